"""The files that flags name: response files, objects, archives, scripts of the linker."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .includes import Searched

# Compilers work in a directory that is gone later, so a file that they read has an absolute path.
_FILE = re.compile(r"(?:^|[,=@])(/[^,]+)")
_RESPONSE = re.compile(r"(?:^|,)@(/[^,]+)")
_OPTIONS_FILE = ("-optf", "--options-file")
# Files that compilers and linkers write, in each build anew, so they are not inputs.
_WRITES = r"(?:^|[,=])--?(?:time|ftime-trace|fdevice-time-trace|Map|MF)"
_WRITTEN = re.compile(_WRITES + "[=,]/[^,]+")
_WRITTEN_NEXT = re.compile(_WRITES + "$")
# The next word is for another program: -Xlinker -Map -Xlinker /a.map is -Map /a.map.
_HANDS_ON = re.compile(r"-X[a-z]+|--[a-z]+-options")


class Named(NamedTuple):
    """The files that flags name, and all words of the flags, those of response files included."""

    files: tuple[str, ...]
    words: tuple[str, ...]


def named_by(flags: Iterable[str]) -> Named:
    """What is in the files that flags name is part of the flags."""
    files: dict[str, None] = {}
    words, handed_on = [""], ""
    waiting = [*flags][::-1]
    while waiting:
        word = waiting.pop()
        is_options = words[-1] in _OPTIONS_FILE or word.startswith(_OPTIONS_FILE)
        is_written = _WRITTEN_NEXT.search(handed_on) is not None
        words.append(word)
        if not _HANDS_ON.fullmatch(word):
            handed_on = word
        read = "" if is_written else _WRITTEN.sub("", word)
        for path in filter(os.path.isfile, _FILE.findall(read)):
            if path not in files and (is_options or path in _RESPONSE.findall(word)):
                with contextlib.suppress(OSError, ValueError), open(path) as stream:
                    waiting += shlex.split(stream.read())[::-1]
            files[path] = None
    return Named(tuple(files), tuple(words[1:]))


def _linked_in(library: str) -> list[str]:
    """The files whose contents are linked in for ``library``: none for a shared one.

    Those that a thin archive or a script of the linker names are elsewhere.
    """
    names: list[bytes] = []
    with contextlib.suppress(OSError, ValueError), open(library, "rb") as stream:
        magic = stream.read(8)
        if magic.startswith(b"\x7fELF"):
            return []
        if magic == b"!<thin>\n":
            text = stream.read()
            at = text.index(b"//" + 46 * b" ") + 48
            size = int(text[at : at + 10])
            names = text[at + 12 : at + 12 + size].split(b"/\n")
        elif magic != b"!<arch>\n":
            names = re.split(rb"[\s(),\"]+", magic + stream.read())
    found = (os.path.join(os.path.dirname(library), os.fsdecode(name)) for name in names if name)
    return [library, *(path for path in found if os.path.isfile(path))]


def libraries_of(
    words: Sequence[str],
    last: Sequence[str],
    find: Callable[[str], str],
    place: Callable[[str], str],
) -> tuple[list[str], list[Searched]]:
    """The archives that ``-l`` and ``-L`` lead to, and where libraries were looked for.

    ``last`` are directories that are searched after those. ``find`` gives the path of a library of
    the compiler's own directories; ``place`` names a directory. Which of several the linker takes
    is up to more flags: all of them count.
    """
    flat = [part for word in words for part in word.removeprefix("-Wl,").split(",")]
    directories = [*(word[2:] for word in flat if word.startswith("-L")), *last]
    names: dict[str, int] = {}
    archives: dict[str, None] = {}
    for library in (word[2:] for word in flat if word.startswith("-l")):
        exact = library.startswith(":")
        files = [library[1:]] if exact else [f"lib{library}.a", f"lib{library}.so"]
        for name in files:
            names[name] = len(directories)
            paths = [os.path.join(directory, name) for directory in directories]
            for path in (*paths, find(name)):
                if os.path.isfile(path):
                    archives |= dict.fromkeys(_linked_in(path))
    searched = [Searched([place(d) for d in directories], names)] if names and directories else []
    return list(archives), searched
