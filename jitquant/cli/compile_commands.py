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
        Path, typer.Option("--output", "-o", help="The file; commands of other files in it stay.")
    ] = Path("compile_commands.json"),
    arch: Arch = None,
) -> None:
    """Write compile_commands.json, from which clangd knows headers, macros and architecture.

    Compiles nothing. clangd looks for the file in the directory of a source and those above it.
    """
    loader = Loader()
    chosen = names or kernel_names(loader.kernels_dir())
    found = commands_of(loader, [request_of(loader, name, arch) for name in chosen])
    total = merge(output, found)
    console().print(f"{len(found)} commands written, {total} in {output}", markup=False)
