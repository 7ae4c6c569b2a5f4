"""Where included names are searched, and what would be found first now.

A new header that comes earlier on the include path shadows the one that was read, although no
file that was read has changed. So a build stores, for each name that it included, the directories
that were searched first. Names in ``__has_include`` count even if they do not exist.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .key import digest_of
from .sources import Roots, Signature, is_own, settled, signature_of

# Between two words may be comments. To find what is in a comment itself too does no harm. What
# begins with a literal is found several times as fast.
_GAP = rb"(?:[ \t\f\v]|/\*.*?\*/)*"
_NAME = rb"(?:\"([^\"\n]+)\"|<([^>\n]+)>)"
_SPLICE = re.compile(rb"\\[ \t\f\v]*\r?\n")


def _pattern(*parts: bytes) -> re.Pattern[bytes]:
    return re.compile(_GAP.join(parts), re.DOTALL)


_INCLUDED = _pattern(rb"#", rb"(include_next|include|import|embed)\b", _NAME + rb"?")
#: A line that includes what a macro names, of which a compiler alone can tell whether it is read.
INCLUDES_MACRO = _pattern(rb"\n", rb"#", rb"include\b", rb"[A-Za-z_]")
_ASKED = _pattern(rb"__has_(?:include|embed)(_next)?", rb"\(", _NAME)
_ASKED_BY_MACRO = _pattern(rb"__has_(?:include|embed)(?:_next)?", rb"\(", rb"(\w+)")
#: The definition of a macro with parameters, whose names are no macros.
_FUNCTION = _pattern(rb"#", rb"define\b", rb"\w+\([^\n]*")
#: Where a macro may stand for __has_include, with the name of a header or of a macro.
_CONDITION = _pattern(rb"#", rb"(?:el)?if\b([^\n]*\([^\n]*)")
_ARGUMENT = _pattern(rb"\(", rb"()" + _NAME, rb"\)")
_ARGUMENT_MACRO = _pattern(rb"\(", rb"(\w+)", rb"\)")
_MACRO = _pattern(rb"#", rb"define\b", rb"(\w+)", _NAME)
_WORD = re.compile(rb"[\w.+-]+")
#: Other ways to write what directives consist of.
_SPELLINGS = ((b"%:", b"#"), (b"??=", b"#"), (b"??/", b"\\"), (b"\0", b" "))


class IncludePath(NamedTuple):
    """The search directories of one compiler command, in order.

    Without the directory of the including file, which comes first for ``"..."``. ``duplicates``
    are those that the compiler ignores, as they are one of the others by another name. ``flags``
    are its flags as text, with ``#define`` for ``-D``. ``tools`` are the
    programs that compile it, with what these read to do so, and ``tool_places`` where they are
    searched.
    """

    quoted: tuple[str, ...] = ()
    bracketed: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    tool_places: tuple[str, ...] = ()


class Searched(NamedTuple):
    """Names, and in how many of the first directories each was searched.

    The name "" stands for the directories themselves: which of them are the same one. ``LISTING``
    stands for all files in them.
    """

    places: list[str]
    names: dict[str, int]


class Unit(NamedTuple):
    """A compiled source, the files that were read for it, and its search directories."""

    source: str
    read: tuple[str, ...]
    path: IncludePath


_Identity = tuple[int, int]
#: What a compiler runs, and its specs, by the names that it searches for.
TOOLS = ("as", "ld", "cc1plus", "specs")
#: Not the name of a file: what is asked for has a name that only a compiler can tell.
LISTING = "/"


def searched_by(units: Iterable[Unit], roots: Roots) -> tuple[list[Searched], list[str]]:
    """The names that the compilers of ``units`` searched, and where.

    And files that GCC may have compared and left out: after ``#pragma once`` it passes over another
    file of the same contents, size and time.
    """
    texts: dict[str, Text] = {}
    found: list[Searched] = []
    twins: list[str] = []
    for unit in units:
        search = _Search(unit)
        files = (unit.source, *unit.read)
        for file in files:
            if file not in texts:
                texts[file] = parse(_content(file))
        flags = parse("".join(unit.path.flags).encode(errors="surrogateescape"))
        every_text = [(unit.source, flags), *((file, texts[file]) for file in files)]
        macros = [pair for _, text in every_text for pair in text.macros]
        known = {name for name, _ in macros}
        for file, text in every_text:
            asked = [include for name, include in macros if name in text.asks]
            for include in (*text.includes, *asked):
                search.note(os.path.dirname(file), include)
            if text.asks_itself - known:
                search.note_unknown(os.path.dirname(file))
                own = [_content(path) for path in files if is_own(roots.name(path))]
                own += map(os.fsencode, unit.path.flags)
                words = {os.fsdecode(word) for found in map(_WORD.findall, own) for word in found}
                for place in (os.path.dirname(file), *unit.path.quoted, *unit.path.bracketed):
                    if is_own(roots.place(place)):
                        search.note_folders(place, words)
        search.note_unnamed()
        every = list(
            dict.fromkeys((*unit.path.quoted, *unit.path.bracketed, *unit.path.duplicates))
        )
        tools = (unit.path.tool_places, dict.fromkeys(TOOLS, len(unit.path.tool_places)))
        for places, names in (*search.result(), (every, {"": len(every)}), tools):
            if names and places:
                one = Searched(list(map(roots.place, places)), dict(sorted(names.items())))
                if one not in found:
                    found.append(one)
        twins += search.twins
    return found, twins


class Include(NamedTuple):
    """A name that a file includes or asks for; "" if a macro has it."""

    name: str
    quoted: bool
    asked: bool
    following: bool


class Text(NamedTuple):
    """What a file includes, which macros it asks for, and macros that are names of headers.

    ``asks`` are all words that may be such macros, ``asks_itself`` those that are.
    """

    includes: list[Include]
    asks: set[bytes]
    asks_itself: set[bytes]
    macros: list[tuple[bytes, Include]]


def _content(file: str) -> bytes:
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        return stream.read()
    return b""


def plain(text: bytes) -> bytes:
    """``text`` in the usual spelling, and without the ends of lines that go on."""
    for spelling, usual in _SPELLINGS:
        if spelling in text:
            text = text.replace(spelling, usual)
    return _SPLICE.sub(b"", text)


def parse(text: bytes) -> Text:
    """What ``text`` includes and asks for."""
    text = plain(text)

    def include(quoted: bytes, bracketed: bytes, *, asked: bool, following: bool) -> Include:
        return Include(os.fsdecode(quoted or bracketed), not bracketed, asked, following)

    includes = [
        include(*names, asked=False, following=how == b"include_next")
        for how, *names in _INCLUDED.findall(text)
    ]
    asked, asks = _ASKED.findall(text), set(_ASKED_BY_MACRO.findall(text))
    asks_itself = set(_ASKED_BY_MACRO.findall(_FUNCTION.sub(b"", text))) if asks else set()
    for condition in _CONDITION.findall(text):
        asked += _ARGUMENT.findall(condition)
        asks.update(_ARGUMENT_MACRO.findall(condition))
    includes += [include(*names, asked=True, following=bool(after)) for after, *names in asked]
    macros = [
        (name, include(*names, asked=True, following=True)) for name, *names in _MACRO.findall(text)
    ]
    return Text(includes, asks, asks_itself, macros)


class _Search:
    """How far each name was searched, by the order of directories and the files that were read."""

    def __init__(self, unit: Unit) -> None:
        self._places = list(dict.fromkeys((*unit.path.quoted, *unit.path.bracketed)))
        self._read = {i: path for path in unit.read if (i := _identity(path))}
        self._unnamed = dict(self._read)
        self._stamps = set(map(_stamp, self._read.values()))
        self.twins: list[str] = []
        self._at: dict[tuple[str, str], _Identity | None] = {}
        self._names: dict[str, int] = {}
        self._beside: dict[str, dict[str, int]] = {}
        self._computing: set[str] = set()

    def result(self) -> Iterator[tuple[Sequence[str], dict[str, int]]]:
        yield self._places, self._names
        for directory, names in self._beside.items():
            yield [directory], names

    def note(self, directory: str, include: Include) -> None:
        """Note an include in a file of ``directory``."""
        name = include.name
        if not name:
            self._computing.add(directory)
            return
        if include.asked and os.path.isabs(name):
            directory, name = os.path.split(name)
            self._beside.setdefault(directory, {})[name] = 1
            return
        if include.quoted and not include.following:
            beside = self._find(directory, name)
            if self._is_read(beside, include):
                return
            if beside is not None and include.asked:
                self._beside.setdefault(directory, {})[name] = 1
                return
        depth = self._depth(include)
        if depth is None:
            return  # not compiled, or nowhere and nobody minds
        if depth > self._names.get(name, 0):
            self._names[name] = depth
        if include.quoted:
            self._beside.setdefault(directory, {})[name] = 1

    def note_unknown(self, directory: str) -> None:
        """Note that a file of ``directory`` asks for what only a compiler can tell."""
        self._names[LISTING] = len(self._places)
        self._beside.setdefault(directory, {})[LISTING] = 1

    def note_folders(self, place: str, words: set[str]) -> None:
        """Note that such a name may begin with directories of these names."""
        for directory, folders, _ in os.walk(place):
            folders[:] = words.intersection(folders)
            for folder in folders:
                self._beside.setdefault(os.path.join(directory, folder), {})[LISTING] = 1

    def note_unnamed(self) -> None:
        """Note what was read without being named: by a computed include, or a flag."""
        for path in self._unnamed.values():
            for depth, place in enumerate(self._places):
                prefix = os.path.join(place, "")
                if not path.startswith(prefix):
                    continue
                name = path[len(prefix) :]
                if depth > self._names.get(name, 0):
                    self._names[name] = depth
                for directory in self._computing:
                    self._beside.setdefault(directory, {})[name] = 1

    def _depth(self, include: Include) -> int | None:
        """In how many directories the name was searched before it was found."""
        last: int | None = None
        for depth, place in enumerate(self._places):
            found = self._find(place, include.name)
            if found is None:
                continue
            if include.asked and not include.following:
                return depth + 1
            if self._is_read(found, include):
                last = depth
                if not include.following:
                    break
        return len(self._places) if include.asked else last

    def _find(self, place: str, name: str) -> _Identity | None:
        key = (place, name)
        if key not in self._at:
            path = os.path.join(place, name)
            found = self._at[key] = _identity(path)
            if found and found not in self._read and _stamp(path) in self._stamps:
                self.twins.append(path)
        return self._at[key]

    def _is_read(self, found: _Identity | None, include: Include) -> bool:
        """Whether ``include`` has read the file ``found``."""
        if found is None or found not in self._read or include.asked:
            return False
        self._unnamed.pop(found, None)
        return True


def _stamp(path: str) -> tuple[int, int]:
    """What GCC compares first."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return (status.st_size, int(status.st_mtime))
    return (-1, 0)


def _identity(path: str, *, of_directory: bool = False) -> _Identity | None:
    """Which file it is; a compiler passes over a directory with the name of a header."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    is_directory = stat.S_ISDIR(status.st_mode)
    return (status.st_dev, status.st_ino) if is_directory is of_directory else None


class Visible(NamedTuple):
    """Which names exist where they were searched, and the directories that determine this."""

    names: list[str]
    directories: dict[str, Signature | None]

    def paths(self, roots: Roots) -> list[str]:
        """The files of these names."""
        return [roots.path(name) for name in self.names if " = " not in name]


def visible_now(
    searched: Iterable[Searched], roots: Roots, counts: Callable[[str], bool] = lambda place: True
) -> Visible:
    """Which names in ``searched`` exist now; ``counts`` says which directories matter.

    Each directory is listed once. A name is only searched where its first part exists.
    """
    names_now: set[str] = set()
    told: dict[str, Signature | None] = {}
    for places, names in searched:
        if "" in names:
            names_now.update(f"{a} = {b}" for a, b in _same(places, roots, told) if counts(a))
            continue
        by_first: dict[str, list[tuple[str, int]]] = {}
        for name, depth in names.items():
            by_first.setdefault(name.partition("/")[0].casefold(), []).append((name, depth))
        for index, place in enumerate(places[: max(names.values(), default=0)]):
            if not counts(place):
                continue
            directory = roots.path(place)
            if not look_at(directory, told):
                continue
            listed = {".", "..", *_listing(directory)}
            if names.get(LISTING, 0) > index:
                names_now.add(f"{place} = {digest_of(sorted(listed))}")
            for first in by_first.keys() & listed:
                for name, depth in by_first[first]:
                    if depth <= index:
                        continue
                    path = os.path.join(directory, name)
                    look_at(os.path.dirname(path), told)
                    if os.path.islink(path):
                        look_at(os.path.dirname(os.path.realpath(path)), told)
                    if _identity(path):
                        names_now.add(f"{place}{name}")
    return Visible(sorted(names_now), told)


def _listing(directory: str) -> set[str]:
    """What is in a directory, in the case that tells nothing of where case does not count."""
    with contextlib.suppress(OSError):
        return set(map(str.casefold, os.listdir(directory)))
    return set()


def listings(roots: Roots) -> dict[str, set[str]]:
    """What is in each directory of the caller and the project, by its name."""
    return {
        roots.place(directory): _listing(directory)
        for label, directory in roots.labels.items()
        if is_own(label)
    }


def removed_since(
    before: Mapping[str, set[str]], searched: Iterable[Searched], roots: Roots
) -> str | None:
    """A name in ``searched`` that one of the directories had ``before``, and has no more."""
    now = listings(roots)
    for places, names in searched:
        first = {name.partition("/")[0].casefold() for name in names}
        for place in places:
            if gone := first & (before.get(place, set()) - now.get(place, set())):
                return f"{place}{min(gone)}"
    return None


def _same(
    places: Iterable[str], roots: Roots, told: dict[str, Signature | None]
) -> Iterator[tuple[str, str]]:
    """Which directories are one of the earlier ones: a link may lead elsewhere later."""
    first: dict[_Identity | None, str] = {}
    for place in places:
        directory = roots.path(place)
        if not look_at(directory, told):
            continue
        earlier = first.setdefault(_identity(directory, of_directory=True), place)
        if earlier != place:
            yield place, earlier


def look_at(directory: str, told: dict[str, Signature | None]) -> bool:
    """Whether the directory exists. Its signature, or that of a parent, goes to ``told``.

    This precedes reading its contents, so that a change in between is detected later.
    """
    wanted = directory
    while directory not in told:
        try:
            status = os.stat(directory)
        except OSError:
            if os.path.islink(directory):  # to what may come to be
                look_at(os.path.dirname(os.path.realpath(directory)), told)
            directory = os.path.dirname(directory) or os.sep
            continue
        if not stat.S_ISDIR(status.st_mode):
            directory = os.path.dirname(directory)
            continue
        told[directory] = signature_of(status) if settled(status, time.time_ns()) else None
    return directory == wanted
