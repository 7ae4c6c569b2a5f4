"""``jitquant stats``: what the kernels take of a multiprocessor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from jitquant.loader.compile.usage import KernelUsage, occupancy
from jitquant.loader.core import Loader
from jitquant.loader.request.sources import kernel_names
from jitquant.loader.tools.explain import explain
from jitquant.loader.tools.inspect import build_of, kernels_of
from jitquant.loader.tools.names import request_of

from .build import Names
from .output import Arch, Json, console, print_json, table

_BLOCKS = (64, 128, 256, 512, 1024)


def stats(
    names: Names = None,
    arch: Arch = None,
    threads: Annotated[int, typer.Option(help="Threads per block.", min=1, max=1024)] = 256,
    shared: Annotated[
        int, typer.Option(help="Dynamic shared memory per block, in bytes.", min=0)
    ] = 0,
    json: Json = False,
) -> None:
    """Show registers, spills, shared memory and occupancy of each kernel and architecture.

    Builds the named modules if necessary; without names, shows the modules in the cache. Numbers
    are from ptxas; occupancy follows from the limits of an SM.
    """
    loader = Loader()
    chosen = list(names or kernel_names(loader.kernels_dir()))
    absent: list[str] = []
    found: list[tuple[str, KernelUsage]] = []
    for name in chosen:
        request = request_of(loader, name, arch)
        if not names and explain(loader, request).state == "miss":
            absent.append(name)
            continue
        found += [(request.name, usage) for usage in kernels_of(build_of(loader, request))]
    if json:
        print_json([_plain(name, usage, shared) for name, usage in found])
        return
    out = console()
    right = ("registers", "spilled", "stack", "shared", f"occupancy at {threads}")
    view = table("module", "kernel", "for", *right, "limited by", right=right)
    for name, usage in found:
        here = occupancy(usage, threads, shared)
        spilled = usage.spilled
        view.add_row(
            name,
            usage.short_name,
            f"sm_{usage.arch}",
            str(usage.registers),
            f"[red]{spilled}[/red]" if spilled else "0",
            str(usage.stack),
            str(usage.shared),
            "-" if here is None else f"{here.occupancy:.0%}" if here.blocks else "none fits",
            "-" if here is None else here.limit,
        )
    if found:
        out.print(view)
    if absent:
        out.print(f"not built: {', '.join(absent)} (`jitquant build` does)", markup=False)


def _plain(name: str, usage: KernelUsage, shared: int) -> dict[str, Any]:
    at = {threads: occupancy(usage, threads, shared) for threads in _BLOCKS}
    return {"module": name, "name": usage.name, **asdict(usage), "occupancy": at}
