"""Why a module would be built now or not, and what its last build was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..request.plan import Request
from ..store.changes import Change, changes_since, what_changed
from ..store.match import digests_now, match_entry

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


@dataclass(frozen=True)
class Explanation:
    """What asking for a module would do now.

    Attributes:
        state: ``"hit"`` (the cache has it), ``"bundle"`` (a bundle has it) or ``"miss"``.
        reason: of a miss, in one line.
        changes: of a miss, what differs from the last build.
        key: the level-1 key, ``""`` where a bundle has it and no compiler is asked.
        directory: where the build is; ``None`` for a miss.
        last: the build that was found, or else the last one of this name.
        refused: why bundles in use do not have it.
    """

    name: str
    state: str
    reason: str
    changes: list[Change]
    sources: list[str]
    archs: list[str]
    archs_from: str
    key: str
    directory: Path | None
    last: LastBuild | None
    refused: list[str]


def explain(loader: Loader, request: Request) -> Explanation:
    """What asking for ``request`` would do now; compiles and loads nothing.

    Raises:
        LoaderError, ValueError, TypeError, FileNotFoundError: as
            :func:`jitquant.loader.get_cuda_module`, for what is found before compiling.
    """
    wanted = loader.look_up(request)

    def explanation(state: str, **more: Any) -> Explanation:
        given = {"reason": "", "changes": [], "key": "", "directory": None, "last": None, **more}
        return Explanation(
            name=request.name,
            state=state,
            sources=list(wanted.sources),
            archs=list(wanted.archs.archs),
            archs_from=wanted.archs.origin,
            refused=refused,
            **given,
        )

    build, refused = loader.search_bundles(wanted)
    if build is not None:
        last = _last_build({"info": build.entry.info, "inputs": build.entry.inputs})
        return explanation("bundle", directory=build.library.parent, last=last)
    plan = loader.plan(wanted)
    build = loader.find(plan)
    if build is not None:
        build.hold.release()
        last = _last_build({"info": build.entry.info, "inputs": build.entry.inputs})
        return explanation("hit", key=plan.level1, directory=build.library.parent, last=last)
    record = loader.cache().last(request.name)
    shadowed = any(
        match_entry(plan, loader.hasher, entry) == "search path"
        for _, entry in loader.cache().candidates(plan.level1)
    )
    now = digests_now(plan, loader.hasher, (record or {}).get("headers", {}))
    return explanation(
        "miss",
        reason=(
            "an included name is now found in another directory first"
            if shadowed
            else what_changed(record, plan.inputs, now)
        ),
        changes=changes_since(record, plan.inputs, now) if record else [],
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
