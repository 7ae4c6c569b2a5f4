"""``jitquant build``: compile ahead of time, with a bar."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jitquant.loader.core import Loader
from jitquant.loader.machine.archs import parse_archs, visible_archs
from jitquant.loader.report import LOG, Reporter
from jitquant.loader.request.plan import Request
from jitquant.loader.request.sources import kernel_names
from jitquant.loader.request.used import read_manifest
from jitquant.loader.tools.ahead import Outcome, build_all
from jitquant.loader.tools.names import request_of
from jitquant.loader.units import show_duration

from .output import Arch, Json, console, print_json

Names = Annotated[
    list[str] | None,
    typer.Argument(help="Kernels, .cu files, or modules built before; default: all kernels."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Parallel compilers; default: one per CPU, at most one per GiB of memory."
    ),
]


def build(names: Names = None, arch: Arch = None, jobs: Jobs = None, json: Json = False) -> None:
    """Build modules in parallel; skip those that are in the cache."""
    outcomes = build_named(names, arch, jobs, Loader(temporary=False), quiet=json)
    if json:
        print_json([_plain(outcome) for outcome in outcomes])
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed and not json:
        out = console(stderr=True)
        for outcome in failed:
            out.print(f"\n{outcome.error}", markup=False)
    raise typer.Exit(1 if failed else 0)


def build_named(
    names: Sequence[str] | None,
    arch: str | None,
    jobs: int | None,
    loader: Loader,
    *,
    quiet: bool,
    manifest: Path | None = None,
) -> list[Outcome]:
    """Build the named modules and those of a manifest, with progress on stderr."""
    if arch is not None:
        parse_archs(
            arch, native=visible_archs
        )  # what is wrong with it is wrong for every module: said once
    loader.reporter = _LogOnly()
    requests: dict[str, Request] = {}
    if manifest is not None:
        requests = read_manifest(manifest, as_built=arch is None)
        if arch is not None:
            requests = {key: request._replace(archs=arch) for key, request in requests.items()}
    elif not names:
        names = kernel_names(loader.kernels_dir())
    for name in names or ():
        request = request_of(loader, name, arch)
        if requests.setdefault(request.name, request) != request:
            raise ValueError(
                f"two of these modules are named {request.name!r}; build one at a time."
            )
    with _at_once(jobs):
        if quiet:
            return build_all(loader.ensure, requests)
        return _show(loader, requests, console(stderr=True))


@contextlib.contextmanager
def _at_once(jobs: int | None) -> Iterator[None]:
    """Within the block ``jobs`` compilers run at once."""
    before = os.environ.get("JITQUANT_JOBS")
    if jobs is not None:
        os.environ["JITQUANT_JOBS"] = str(jobs)
    try:
        yield
    finally:
        if jobs is not None:
            if before is None:
                del os.environ["JITQUANT_JOBS"]
            else:
                os.environ["JITQUANT_JOBS"] = before


class _LogOnly(Reporter):
    """The bar says on the terminal what the loader would."""

    def say(self, line: str) -> None:
        LOG.info("%s", line)


def _show(loader: Loader, requests: Mapping[str, Request], out: Console) -> list[Outcome]:
    doing: dict[str, str] = {}
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        task = progress.add_task("", total=len(requests))

        def on_tick(name: str, labels: Sequence[str]) -> None:
            doing[name] = ", ".join(labels)
            progress.update(task, description=", ".join(filter(None, list(doing.values()))))

        def on_done(outcome: Outcome) -> None:
            doing.pop(outcome.name, None)
            progress.advance(task)
            took = f"{outcome.state} in {show_duration(outcome.seconds)}"
            note = "in the cache already" if outcome.state == "hit" else took
            out.print(f"{outcome.name}: {note}", markup=False)

        return build_all(loader.ensure, requests, on_tick=on_tick, on_done=on_done)


def _plain(outcome: Outcome) -> dict[str, object]:
    build = outcome.build
    return {
        "name": outcome.name,
        "state": outcome.state,
        "seconds": round(outcome.seconds, 3),
        "archs": build.entry.inputs["archs"] if build else [],
        "library": build.library if build else None,
        "error": None if outcome.error is None else str(outcome.error),
    }
