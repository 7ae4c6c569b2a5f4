"""``jitquant explain``: would it be built, and why."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from jitquant.loader.core import Loader
from jitquant.loader.tools.explain import Explanation
from jitquant.loader.tools.explain import explain as explained
from jitquant.loader.tools.names import request_of
from jitquant.loader.units import show_duration

from .output import Arch, Json, console, print_json


def explain(
    name: Annotated[
        str, typer.Argument(help="A kernel's name, your own .cu, or a module built before.")
    ],
    arch: Arch = None,
    json: Json = False,
) -> None:
    """Show whether a module is cached, and if not, what changed since its last build.

    Compiles and loads nothing. A module with its own include_dirs or flags can be named once it has
    been built.
    """
    loader = Loader()
    result = explained(loader, request_of(loader, name, arch))
    if json:
        print_json(result)
    else:
        _show(result)


def _show(result: Explanation) -> None:
    out = console()
    archs = ", ".join(f"sm_{arch}" for arch in result.archs) or "the host only"
    origin = f" ({result.archs_from})" if result.archs else ""
    heading = {
        "hit": "in the cache: it would be loaded",
        "bundle": "in a bundle: it would be loaded",
        "miss": f"it would be built: {result.reason}",
    }[result.state]
    out.print(f"{result.name}: {heading}", style="green" if result.state != "miss" else "yellow")
    out.print(f"  for {archs}{origin}", markup=False)
    for change in result.changes:
        what = f"{change.kind} {change.name}".strip()
        before, now = _short(change.before), _short(change.now)
        out.print(f"  {what}: {before} -> {now}", markup=False)
    for line in result.refused:
        out.print(f"  not taken from a bundle: {line}", markup=False)
    if result.last is not None:
        last = result.last
        took = ", ".join(f"{label} {show_duration(seconds)}" for label, seconds in last.steps)
        which = "this build" if result.state != "miss" else "the last build"
        out.print(
            f"  {which} took {show_duration(last.seconds)}" + (f" ({took})" if took else ""),
            markup=False,
        )
        ago = show_duration(max(0.0, time.time() - last.built))
        built_for = ", ".join(f"sm_{arch}" for arch in last.archs) or "the host only"
        out.print(f"  made {ago} ago on {last.host} for {built_for}", markup=False)
    if result.directory is not None:
        out.print(f"  {result.directory}", markup=False)


def _short(value: str | None) -> str:
    if value is None:
        return "not there"
    is_digest = len(value) == 64 and all(c in "0123456789abcdef" for c in value)
    return value[:12] if is_digest else value
