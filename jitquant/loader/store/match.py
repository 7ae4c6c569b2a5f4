"""Whether a cached build matches the current files, and opening it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..errors import LoaderError
from ..machine.memo import Memo, Signature
from ..request.includes import look_at, visible_now
from ..request.key import digest_of
from ..request.plan import Plan, Wanted, python_abi
from ..request.sources import Watched, is_own
from .cache import Entry
from .hold import Hold

#: How often a build begins anew because its files have changed.
MOST_ATTEMPTS = 5


class ChangedError(Exception):
    """A source changed while it was being compiled."""


def changes_too_fast(name: str) -> LoaderError:
    """The error for the last of these attempts."""
    return LoaderError(
        f"module {name!r}: its sources change faster than they compile; the last "
        f"{MOST_ATTEMPTS} builds were out of date when they were done. Save less often, "
        "or look for a program that writes to them."
    )


class Build(NamedTuple):
    """A build in a cache, held there: its entry, its library, and what it must be watched for."""

    entry: Entry
    library: Path
    watch: Watched
    hold: Hold
    is_new: bool = False


def match_entry(plan: Wanted, memo: Memo, entry: Entry, *, installed: bool = True) -> Watched | str:
    """What to watch if ``entry`` is a build of what ``plan`` sees now, else what differs.

    Without ``installed`` the files of compilers and toolkits are not checked.
    """
    own: list[tuple[str, Signature | None]] = []
    others: list[tuple[str, Signature | None]] = []

    def counts(name: str) -> bool:
        return installed or is_own(name)

    for name, digest in entry.headers.items():
        if not counts(name):
            continue
        path = plan.roots.path(name)
        state = memo.state(path, own=is_own(name)) if path else None
        if state is None or state.digest != digest:
            return name
        (own if is_own(name) else others).append((path, state.signature))
    if isinstance(plan, Plan):
        others += [(program, memo.signature(program)) for program in plan.programs]
        told: dict[str, Signature | None] = {}
        for place in filter(os.path.isabs, plan.program_places):
            look_at(place, told)
        others += told.items()
    if entry.python_abi is not None and entry.python_abi != python_abi():
        return "Python ABI"
    directories = _found_where_it_was(plan, memo, entry, installed)
    if directories is None:
        return "search path"
    for directory, signature in directories.items():
        is_ours = is_own(plan.roots.place(directory))
        (own if is_ours else others).append((directory, signature))
    return Watched(tuple(own), tuple(others))


def _found_where_it_was(
    plan: Wanted, memo: Memo, entry: Entry, installed: bool
) -> dict[str, Signature | None] | None:
    """The directories that tell where names would be found, unless one is found elsewhere now.

    While none of them has changed there is nothing to look for.
    """
    key = digest_of([entry.level2, plan.roots.labels, installed])
    if recalled := memo.recall(key):
        return dict(recalled[1])
    visible = visible_now(entry.searched, plan.roots, (lambda place: True) if installed else is_own)
    if visible.names != [name for name in entry.visible if installed or is_own(name)]:
        return None
    memo.note(key, visible.directories)
    return visible.directories
