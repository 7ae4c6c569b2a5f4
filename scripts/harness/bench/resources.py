"""What every kernel takes of a multiprocessor, as a document; it needs a compiler and no GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from jitquant.loader import Loader
from jitquant.loader.compile.usage import KernelUsage, occupancy
from jitquant.loader.request.sources import kernel_names
from jitquant.loader.store.match import Build
from jitquant.loader.tools.inspect import build_of, kernels_of
from jitquant.loader.tools.names import request_of

THREADS = (128, 256, 512)
"""Sizes of a block that the occupancy is given for."""


def builds(loader: Loader, arch: str) -> dict[str, Build]:
    """The project's modules for one architecture, which are built if need be.

    Raises:
        LoaderError: there is no compiler, or a module does not compile.
    """
    return {
        name: build_of(loader, request_of(loader, name, arch))
        for name in kernel_names(loader.kernels_dir())
    }


def document(built: Mapping[str, Build], arch: str, digest: str) -> str:
    """A section a module, a line a kernel.

    Args:
        built: modules, by name.
        arch: what they were compiled for, as in ``"90a"``.
        digest: of the CUDA sources.
    """
    modules = {name: kernels_of(build) for name, build in built.items()}
    kernels = [usage for found in modules.values() for usage in found]
    spilling = sum(usage.stack + usage.spilled > 0 for usage in kernels)
    # A wrapper of nvcc is shown after its version.
    versions = sorted({str(build.entry.inputs["nvcc"]).split()[0] for build in built.values()})
    *most, last = map(str, THREADS)
    paragraphs = (
        f"Written by `./scripts/bench resources` for sm_{arch}: what the assembler of nvcc "
        f"{', '.join(versions)} said of `kernels_cu` {digest}.",
        f"{len(kernels)} kernels, {spilling or 'none'} with a stack or spills. Registers are those "
        "of a thread; the stack, and what spilling reads and writes, are bytes of a thread; shared "
        "is static shared memory, in bytes of a block. The last columns are the occupancy, the "
        "part of a multiprocessor's warps that these allow to be resident, in blocks of "
        f"{', '.join(most)} and {last} threads and without the shared memory that a launch asks "
        "for; `jitquant stats --threads T --shared B` says it for others.",
    )
    lines = ["# What the kernels take"]
    for paragraph in paragraphs:
        lines += ["", *textwrap.wrap(paragraph, 100, break_on_hyphens=False)]
    for name, found in modules.items():
        lines += [
            "",
            f"## {name}",
            "",
            f"| kernel | registers | stack | spilled | shared | {' | '.join(map(str, THREADS))} |",
            f"| --- {'| ---: ' * (4 + len(THREADS))}|",
            *map(_line, found),
        ]
    return "\n".join(lines) + "\n"


def _line(usage: KernelUsage) -> str:
    name = usage.short_name.replace(" >", ">")
    for scope in ("jitquant::", "(anonymous namespace)::"):
        name = name.replace(scope, "")
    cells = [f"`{name}`", *map(str, (usage.registers, usage.stack, usage.spilled, usage.shared))]
    for threads in THREADS:
        here = occupancy(usage, threads)
        cells.append("-" if here is None else f"{here.occupancy:.0%}")
    return f"| {' | '.join(cells)} |"
