"""The files that flags name: response files, objects, archives, scripts of the linker."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable
from typing import NamedTuple

# Compilers work in a directory that is gone later, so a file that they read has an absolute path.
_FILE = re.compile(r"(?:^|[,=@])(/[^,]+)")
_RESPONSE = re.compile(r"(?:^|,)@(/[^,]+)")
_LINKERS = re.compile(r"^(?:-Wl,|-Xlinker=)")
_LIBRARY_PLACE = re.compile(r"\0(?:-L|--?library-path(?=[=\0]))[=\0]?([^\0]+)")
_OPTIONS_FILE = ("-optf", "--options-file")
# Files that compilers and linkers write, in each build anew, so they are not inputs; and nvcc's
# host compiler, which is one of the programs that it runs.
_WRITES = r"(?:^|[,=])--?(?:time|ftime-trace|fdevice-time-trace|Map|ccbin|compiler-bindir)"
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
                hand = "-Wl," if _LINKERS.match(word) else ""
                with contextlib.suppress(OSError, ValueError), open(path) as stream:
                    waiting += [hand + own for own in shlex.split(stream.read())[::-1]]
            files[path] = None
    return Named(tuple(files), tuple(words[1:]))


def library_places(words: Iterable[str]) -> list[str]:
    """The directories where flags let the linker search, in order."""
    parts = [
        part for word in words if word != "-Xlinker" for part in _LINKERS.sub("", word).split(",")
    ]
    return _LIBRARY_PLACE.findall("\0".join(["", *parts]))


def thin_members(archive: str) -> list[str]:
    """The files that a thin archive names, which has only their symbols itself."""
    with contextlib.suppress(OSError, ValueError), open(archive, "rb") as stream:
        if stream.read(8) != b"!<thin>\n":
            return []
        text = stream.read()
        at = text.index(b"//" + 46 * b" ") + 48
        names = text[at + 12 : at + 12 + int(text[at : at + 10])].split(b"/\n")
        paths = (os.path.join(os.path.dirname(archive), os.fsdecode(n)) for n in names if n)
        return list(filter(os.path.isfile, paths))
    return []
