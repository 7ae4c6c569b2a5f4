"""Why a module would or would not be built now, and its last build."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..request.plan import Request
from ..store.changes import Change, changes_since, what_changed
from ..store.match import match_entry

if TYPE_CHECKING:
    from ..core import Loader


@dataclass(frozen=True)
class LastBuild:
    """A build that was made: when, where, for what, and how long each of its commands took."""

    seconds: float
    built: float
    host: str
    archs: list[str]
    steps: list[tuple[str, float]]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What requesting a module would do now.

    Attributes:
        state: ``"hit"`` (in the cache), ``"bundle"`` (in a bundle) or ``"miss"``.
        reason: for a miss, in one line.
        changes: for a miss, what differs from the last build.
        key: the level-1 key; ``""`` if a bundle has the module, so that no compiler is needed.
        directory: of the build; ``None`` for a miss.
        last: the build that was found, or else the last one with this name.
        refused: why the configured bundles do not fit.
    """

    name: str
    state: str
    reason: str = ""
    changes: list[Change] = field(default_factory=list)
    sources: list[str]
    archs: list[str]
    archs_from: str
    key: str = ""
    directory: Path | None = None
    last: LastBuild | None = None
    refused: list[str]


def explain(loader: Loader, request: Request) -> Explanation:
    """What requesting ``request`` would do now. Compiles and loads nothing."""
    wanted = loader.look_up(request)
    build, refused = loader.search_bundles(wanted)
    explanation = partial(
        Explanation,
        name=request.name,
        sources=list(wanted.sources),
        archs=list(wanted.archs.archs),
        archs_from=wanted.archs.origin,
        refused=refused,
    )
    if build is not None:
        last = _last_build(build.entry.record)
        return explanation(state="bundle", directory=build.library.parent, last=last)
    plan = loader.plan(wanted)
    build = loader.find(plan)
    if build is not None:
        build.hold.release()
        last = _last_build(build.entry.record)
        return explanation(state="hit", key=plan.level1, directory=build.library.parent, last=last)
    record = loader.cache().last(request.name)
    shadowed = any(
        match_entry(plan, loader.memo, entry) == "search path"
        for _, entry in loader.cache().candidates(plan.level1)
    )
    changes = changes_since(record, plan, loader.memo)
    loader.memo.keep()
    return explanation(
        state="miss",
        reason=(
            "an included name is now found in another directory first"
            if shadowed
            else what_changed(changes)
        ),
        changes=changes or [],
        key=plan.level1,
        last=_last_build(record) if record else None,
    )


def _last_build(record: dict[str, Any]) -> LastBuild:
    info = record.get("info", {})
    return LastBuild(
        seconds=float(info.get("seconds", 0.0)),
        built=float(info.get("built", 0.0)),
        host=str(info.get("host", "")),
        archs=list(record.get("inputs", {}).get("archs", [])),
        steps=[(str(label), float(took)) for label, took in info.get("steps", [])],
    )
