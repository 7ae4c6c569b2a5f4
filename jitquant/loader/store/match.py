"""Whether a cached build is one of what the files say now, and taking it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..request.plan import Wanted, python_abi
from ..request.sources import (
    FileHasher,
    Signature,
    Watched,
    search_places,
    settled,
    signature_of,
    visible_names,
)
from .cache import Cache, Entry
from .hold import Hold


class ChangedError(Exception):
    """A source changed while it was being compiled."""


class Build(NamedTuple):
    """A build in a cache, held there: its entry, its library, and what it must be watched for."""

    entry: Entry
    library: Path
    watch: Watched
    hold: Hold
    is_new: bool = False


def match_entry(plan: Wanted, hasher: FileHasher, entry: Entry) -> Watched | str:
    """What to watch if ``entry`` is a build of what ``plan`` sees now, else what differs."""
    watched: list[tuple[str, Signature | None]] = []
    for name, digest in entry.headers.items():
        path = plan.roots.path(name)
        state = hasher.state(path) if path else None
        if state is None or state.digest != digest:
            return name
        watched.append((path, state.signature))
    if entry.python_abi is not None and entry.python_abi != python_abi():
        return "Python ABI"
    # The directories are looked at before their contents: what comes in between is seen later.
    places = _directories(plan, entry.headers)
    if visible_names(plan.roots, entry.included, entry.headers) != entry.visible:
        return "search path"
    return (*watched, *places)


def take(cache: Cache, directory: Path, entry: Entry, match: Watched) -> Build | None:
    """The build in ``directory``, unless it is damaged or just being removed."""
    held = cache.open_library(directory, entry)
    return None if held is None else Build(entry, directory / entry.library, match, held)


def digests_now(plan: Wanted, hasher: FileHasher, headers: Iterable[str]) -> dict[str, str | None]:
    """The digests that these headers have now, ``None`` for one that is gone."""
    now: dict[str, str | None] = {}
    for name in headers:
        path = plan.roots.path(name)
        state = hasher.state(path) if path else None
        now[name] = state.digest if state else None
    return now


def _directories(plan: Wanted, headers: Iterable[str]) -> Watched:
    now = time.time_ns()
    found: dict[str, Signature | None] = {}
    for place in search_places(plan.roots, headers):
        path = os.path.normpath(plan.roots.path(place))
        while path not in found:
            try:
                status = os.stat(path)
            except OSError:
                path = os.path.dirname(path)
                continue
            found[path] = signature_of(status) if settled(status, now) else None
    return tuple(found.items())
