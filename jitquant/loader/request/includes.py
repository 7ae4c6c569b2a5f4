"""Where included names are searched, and what would be found first now.

A new header that comes earlier on the include path shadows the one that was read, although no
file that was read has changed. So a build stores, for each name that it included, the directories
that were searched first. Names in ``__has_include`` count even if they do not exist.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ..machine.memo import Signature, settled, signature_of
from .key import digest_of
from .sources import Roots, is_own

Identity = tuple[int, int]
#: Not the name of a file: what is asked for has a name that only a compiler can tell.
LISTING = "/"
#: As many as Linux follows.
_MOST_LINKS = 40


class Searched(NamedTuple):
    """Names, and in how many of the first directories each was searched.

    The name "" stands for the directories themselves: which of them are the same one. ``LISTING``
    stands for all files in them.
    """

    places: list[str]
    names: dict[str, int]


def identity(path: str, *, of_directory: bool = False) -> Identity | None:
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

    def lacking(self, names: Iterable[str]) -> str | None:
        """A file that is not among ``names``."""
        files = {name for name in self.names if " = " not in name}
        return min(files.difference(names), default=None)

    def paths(self, roots: Roots) -> list[str]:
        """The files of these names, and the caller's directories of which all files count.

        Not those above, such as /tmp, in which others write all the time.
        """
        own = (name for name in self.names if is_own(name) and "/../" not in name)
        parts = (name.partition("/ = ") for name in own)
        listed = [f"{place}/_" for place, _, what in parts if what and not what.endswith("/")]
        found = [roots.path(name) for name in self.names if " = " not in name]
        return [*found, *(os.path.dirname(roots.path(name)) for name in listed)]


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
                    _look_at_targets(path, told, _MOST_LINKS)
                    if identity(path):
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


def may_be_removed(
    before: Mapping[str, set[str]], moment_ns: int, searched: Iterable[Searched], roots: Roots
) -> str | None:
    """A name in ``searched`` that is not there, but by the dates may have been at ``moment_ns``.

    Not directly in a directory of ``before``: of that :func:`removed_since` tells for certain.
    """
    changed: dict[str, bool] = {}
    for places, names in searched:
        for index, place in enumerate(places):
            top = os.path.dirname(roots.path(place))
            for name, depth in names.items():
                path = os.path.join(top, name)
                if depth <= index or name in ("", LISTING) or identity(path):
                    continue
                told: dict[str, Signature | None] = {}
                look_at(os.path.dirname(path), told)
                if place in before:
                    told.pop(top, None)
                for directory in told.keys() - changed.keys():
                    with contextlib.suppress(OSError):
                        changed[directory] = os.stat(directory).st_ctime_ns > moment_ns
                if any(changed.get(directory, True) for directory in told):
                    return f"{place}{name}"
    return None


def _same(
    places: Iterable[str], roots: Roots, told: dict[str, Signature | None]
) -> Iterator[tuple[str, str]]:
    """Which directories are one of the earlier ones: a link may lead elsewhere later."""
    first: dict[Identity | None, str] = {}
    for place in places:
        directory = roots.path(place)
        if not look_at(directory, told):
            continue
        earlier = first.setdefault(identity(directory, of_directory=True), place)
        if earlier != place:
            yield place, earlier


def look_at(directory: str, told: dict[str, Signature | None], links: int = _MOST_LINKS) -> bool:
    """Whether the directory exists. Its signature, or that of a parent, goes to ``told``.

    This precedes reading its contents, so that a change in between is detected later. At most
    ``links`` are followed to what is not there.
    """
    wanted = directory
    while directory not in told:
        try:
            status = os.stat(directory)
        except OSError:
            _look_at_targets(directory, told, links)  # what may come to be
            directory = os.path.dirname(directory) or os.sep
            continue
        if not stat.S_ISDIR(status.st_mode):
            directory = os.path.dirname(directory)
            continue
        told[directory] = signature_of(status) if settled(status, time.time_ns()) else None
    return directory == wanted


def _look_at_targets(path: str, told: dict[str, Signature | None], links: int) -> None:
    """Look at the directory of each link that ``path`` leads to, and of what is at their end."""
    with contextlib.suppress(OSError):  # no link
        for left in reversed(range(links)):
            path = os.path.join(os.path.dirname(path), os.readlink(path))
            look_at(os.path.dirname(path), told, left)
