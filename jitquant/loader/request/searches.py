"""Where compilers searched for the names in what they read.

Only builds import it: a module that is built already needs none of its patterns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .directives import (
    ABSOLUTE,
    COMPUTES,
    UP,
    UP_IN_PARTS,
    Include,
    Text,
    content,
    parse,
    plain,
)
from .includes import LISTING, Identity, Searched, identity
from .sources import Roots, is_own

#: What a compiler runs, and its specs, by the names that it searches for.
TOOLS = ("as", "ld", "cc1plus", "specs")


class IncludePath(NamedTuple):
    """The search directories of one compiler command, in order.

    Without the directory of the including file, which comes first for ``"..."``. ``duplicates``
    are those that the compiler ignores, as they are one of the others by another name. ``flags``
    are the macros of its flags, as ``#define``. ``tools`` are the programs that compile it, with
    what these read to do so, and ``tool_places`` where they are searched.
    """

    quoted: tuple[str, ...] = ()
    bracketed: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    tool_places: tuple[str, ...] = ()


class Unit(NamedTuple):
    """A compiled source, the files that were read for it, and its search directories."""

    source: str
    read: tuple[str, ...]
    path: IncludePath


def named_by_path(unit: Unit, roots: Roots) -> list[str]:
    """The files of ``unit`` that a source names by their paths: no search leads to them."""
    places = tuple(os.path.join(place, "") for place in (*unit.path.quoted, *unit.path.bracketed))
    absolute = [path for path in unit.read if roots.name(path) == path]
    return [path for path in absolute if places and not path.startswith(places)]


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
                texts[file] = parse(content(file))
        flags = parse("".join(unit.path.flags).encode(errors="surrogateescape"))
        every_text = [(unit.source, flags), *((file, texts[file]) for file in files)]
        macros = [pair for _, text in every_text for pair in text.macros]
        known = {name for name, _ in macros}.difference(*(text.others for _, text in every_text))
        asking = set().union(*(text.asking for _, text in every_text))
        while more := {a for _, text in every_text for a, b in text.uses if b in asking} - asking:
            asking |= more
        computing = []
        for file, text in every_text:
            words = {word for name, word in text.calls if name in asking}
            asked = [include for name, include in macros if name in text.asks | words]
            asked += [include for name, include in text.named if name in asking]
            for include in (*text.includes, *asked):
                search.note(os.path.dirname(file), include)
            if (text.asks_itself | words) - known:
                computing.append(os.path.dirname(file))
        if computing:
            _note_computed(search, unit, roots, every_text, computing)
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


def _note_computed(
    search: _Search,
    unit: Unit,
    roots: Roots,
    every_text: Sequence[tuple[str, Text]],
    computing: Sequence[str],
) -> None:
    """Note where headers could be whose names macros put together, in files of ``computing``."""
    own = [path for path in (unit.source, *unit.read) if is_own(roots.name(path))]
    own += named_by_path(unit, roots)
    named = [name for file, text in every_text if file in own for _, name in text.macros]
    for directory in computing:
        search.note_unknown(directory)
        for include in named:
            search.note(directory, include)
    texts = (plain(content(path)) for path in own)
    text_of_own = b"\n".join((*texts, *map(os.fsencode, unit.path.flags)))
    up = max((path.count(b"..") for path in UP.findall(text_of_own)), default=0)
    in_parts = UP_IN_PARTS.search(text_of_own) is not None
    beside = set(map(os.path.dirname, own))
    for place in dict.fromkeys((*computing, *unit.path.quoted, *unit.path.bracketed)):
        if place in beside or is_own(roots.place(place)):
            for level in range((place.count(os.sep) if in_parts else up) + 1):
                search.note_folders(os.path.join(place, *[os.pardir] * level), text_of_own)
    for path in ABSOLUTE.findall(b"\n".join(COMPUTES.findall(text_of_own))):
        place = os.fsdecode(path)
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        search.note_folders(place, text_of_own)


class _Search:
    """How far each name was searched, by the order of directories and the files that were read."""

    def __init__(self, unit: Unit) -> None:
        self._places = list(dict.fromkeys((*unit.path.quoted, *unit.path.bracketed)))
        self._read = {i: path for path in unit.read if (i := identity(path))}
        self._unnamed = dict(self._read)
        self._stamps = set(map(_stamp, self._read.values()))
        self.twins: list[str] = []
        self._at: dict[tuple[str, str], Identity | None] = {}
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

    def note_folders(self, place: str, text: bytes) -> None:
        """Note that such a name may be in ``place``, or below it in folders that ``text`` names."""
        self._beside.setdefault(place, {})[LISTING] = 1
        for directory, folders, _ in os.walk(place):
            folders[:] = [folder for folder in folders if os.fsencode(folder) in text]
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

    def _find(self, place: str, name: str) -> Identity | None:
        key = (place, name)
        if key not in self._at:
            path = os.path.join(place, name)
            found = self._at[key] = identity(path)
            if found and found not in self._read and _stamp(path) in self._stamps:
                self.twins.append(path)
        return self._at[key]

    def _is_read(self, found: Identity | None, include: Include) -> bool:
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
