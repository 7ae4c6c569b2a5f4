"""``jitquant compile-commands``: what a language server such as clangd reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jitquant.loader.core import Loader
from jitquant.loader.request.sources import kernel_names
from jitquant.loader.tools.compile_commands import compile_commands as commands_of
from jitquant.loader.tools.compile_commands import merge
from jitquant.loader.tools.names import request_of

from .build import Names
from .output import Arch, console


def compile_commands(
    names: Names = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Output file; entries for other sources are kept."),
    ] = Path("compile_commands.json"),
    arch: Arch = None,
) -> None:
    """Write compile_commands.json, so that clangd finds headers, macros and architecture.

    Compiles nothing. clangd searches a source's directory and its parents for the file.
    """
    loader = Loader()
    chosen = names or kernel_names(loader.kernels_dir())
    found = commands_of(loader.plan_of(request_of(loader, name, arch)) for name in chosen)
    total = merge(output, found)
    console().print(f"{len(found)} commands written, {total} in {output}", markup=False)
