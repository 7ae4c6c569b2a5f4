"""Where included names are searched, and what would be found first now.

A new header that comes earlier on the include path shadows the one that was read, although no
file that was read has changed. So a build stores, for each name that it included, the directories
that were searched first. Names in ``__has_include`` count even if they do not exist.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .sources import Roots, Signature, settled, signature_of

# What begins with a literal is found several times as fast.
_INCLUDED = re.compile(
    rb"\n[ \t]*#[ \t]*(include_next|include|import)[ \t]*([\"<])([^\">\n]+)[\">]"
)
_ASKED = re.compile(rb"__has_include(?:_next)?[ \t]*\([ \t]*([\"<])([^\">\n]+)[\">]")


class IncludePath(NamedTuple):
    """The search directories of one compiler command, in order.

    Without the directory of the including file, which comes first for ``"..."``. ``duplicates``
    are those that the compiler ignores, as they are one of the others by another name.
    """

    quoted: tuple[str, ...] = ()
    bracketed: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()


class Searched(NamedTuple):
    """Names, and in how many of the first directories each was searched.

    The name "" stands for the directories themselves: which of them are the same one.
    """

    places: list[str]
    names: dict[str, int]


class Unit(NamedTuple):
    """A compiled source, the files that were read for it, and its search directories."""

    source: str
    read: tuple[str, ...]
    path: IncludePath


_Identity = tuple[int, int]


def searched_by(units: Iterable[Unit], roots: Roots) -> list[Searched]:
    """The names that the compilers of ``units`` searched, and where."""
    texts: dict[str, list[_Include]] = {}
    found: list[Searched] = []
    for unit in units:
        search = _Search(unit)
        for file in (unit.source, *unit.read):
            if file not in texts:
                texts[file] = list(_included_by(file))
            for include in texts[file]:
                search.note(os.path.dirname(file), include)
        search.note_unnamed()
        every = list(
            dict.fromkeys((*unit.path.quoted, *unit.path.bracketed, *unit.path.duplicates))
        )
        for places, names in (*search.result(), (every, {"": len(every)})):
            if names:
                one = Searched(list(map(roots.place, places)), dict(sorted(names.items())))
                if one not in found:
                    found.append(one)
    return found


class _Include(NamedTuple):
    name: str
    quoted: bool
    asked: bool
    following: bool


def _included_by(file: str) -> Iterator[_Include]:
    try:
        with open(file, "rb") as stream:
            text = b"\n" + stream.read()
    except OSError:
        return
    for how, quote, name in _INCLUDED.findall(text):
        yield _Include(os.fsdecode(name), quote == b'"', False, how == b"include_next")
    for quote, name in _ASKED.findall(text):
        yield _Include(os.fsdecode(name), quote == b'"', True, False)


class _Search:
    """How far each name was searched, by the order of directories and the files that were read."""

    def __init__(self, unit: Unit) -> None:
        self._places = list(dict.fromkeys((*unit.path.quoted, *unit.path.bracketed)))
        self._read = {i: path for path in unit.read if (i := _identity(path))}
        self._unnamed = dict(self._read)
        self._at: dict[tuple[str, str], _Identity | None] = {}
        self._names: dict[str, int] = {}
        self._beside: dict[str, dict[str, int]] = {}

    def result(self) -> Iterator[tuple[Sequence[str], dict[str, int]]]:
        yield self._places, self._names
        for directory, names in self._beside.items():
            yield [directory], names

    def note(self, directory: str, include: _Include) -> None:
        """Note an include in a file of ``directory``."""
        name = include.name
        if include.quoted and not include.following:
            beside = self._find(directory, name)
            if beside in self._read and not include.asked:
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

    def note_unnamed(self) -> None:
        """Note what was read without being named: by a computed include, or a flag."""
        for path in self._unnamed.values():
            for depth, place in enumerate(self._places):
                prefix = os.path.join(place, "")
                if path.startswith(prefix) and depth > self._names.get(path[len(prefix) :], 0):
                    self._names[path[len(prefix) :]] = depth

    def _depth(self, include: _Include) -> int | None:
        """In how many directories the name was searched before it was found."""
        last: int | None = None
        for depth, place in enumerate(self._places):
            found = self._find(place, include.name)
            if found is None:
                continue
            if include.asked:
                return depth + 1
            if found in self._read:
                last = depth
                if not include.following:
                    break
        return len(self._places) if include.asked else last

    def _find(self, place: str, name: str) -> _Identity | None:
        key = (place, name)
        if key not in self._at:
            self._at[key] = _identity(os.path.join(place, name))
        found = self._at[key]
        if found is not None:
            self._unnamed.pop(found, None)
        return found


def _identity(path: str) -> _Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


class Visible(NamedTuple):
    """Which names exist where they were searched, and the directories that determine this."""

    names: list[str]
    directories: dict[str, Signature | None]


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
            by_first.setdefault(name.partition("/")[0], []).append((name, depth))
        for index, place in enumerate(places[: max(names.values(), default=0)]):
            if not counts(place):
                continue
            directory = roots.path(place)
            if not _look_at(directory, told):
                continue
            listed = {*os.listdir(directory), ".", ".."}
            for first in by_first.keys() & listed:
                for name, depth in by_first[first]:
                    if depth <= index:
                        continue
                    path = os.path.join(directory, name)
                    _look_at(os.path.dirname(path), told)
                    if name == first or os.path.exists(path):
                        names_now.add(f"{place}{name}")
    return Visible(sorted(names_now), told)


def _same(
    places: Iterable[str], roots: Roots, told: dict[str, Signature | None]
) -> Iterator[tuple[str, str]]:
    """Which directories are one of the earlier ones: a link may lead elsewhere later."""
    first: dict[_Identity | None, str] = {}
    for place in places:
        directory = roots.path(place)
        if _look_at(directory, told) and first.setdefault(_identity(directory), place) != place:
            yield place, first[_identity(directory)]


def _look_at(directory: str, told: dict[str, Signature | None]) -> bool:
    """Whether the directory exists; its signature, or that of a parent, goes to ``told``.

    This precedes reading its contents, so that a change in between is detected later.
    """
    wanted = directory
    while directory not in told:
        try:
            status = os.stat(directory)
        except OSError:
            directory = os.path.dirname(directory) or os.sep
            continue
        if not stat.S_ISDIR(status.st_mode):
            directory = os.path.dirname(directory)
            continue
        told[directory] = signature_of(status) if settled(status, time.time_ns()) else None
    return directory == wanted
