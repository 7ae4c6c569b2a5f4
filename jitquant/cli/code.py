"""``jitquant sass`` and ``jitquant ptx``: the code of a module, with source lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from jitquant.loader.core import Loader
from jitquant.loader.tools.inspect import Code, with_sources
from jitquant.loader.tools.inspect import ptx as ptx_of
from jitquant.loader.tools.inspect import sass as sass_of
from jitquant.loader.tools.names import request_of

from .output import Arch, Json, console, print_json

Name = Annotated[str, typer.Argument(help="A kernel's name, a .cu, or a module built before.")]
Kernel = Annotated[
    str | None, typer.Option(help="Only kernels whose name contains this, mangled or not.")
]


def sass(name: Name, kernel: Kernel = None, arch: Arch = None, json: Json = False) -> None:
    """Show a module's machine code, interleaved with its source lines.

    Needs cuobjdump and nvdisasm (the extra `inspect`). Builds the module if necessary.
    """
    loader = Loader()
    _show(name, sass_of(loader, request_of(loader, name, arch)), kernel, json)


def ptx(name: Name, kernel: Kernel = None, arch: Arch = None, json: Json = False) -> None:
    """Show a module's PTX, interleaved with its source lines.

    Recompiles the device code: a build keeps only machine code.
    """
    loader = Loader()
    _show(name, ptx_of(loader.plan_of(request_of(loader, name, arch))), kernel, json)


def _show(name: str, found: Sequence[Code], kernel: str | None, json: bool) -> None:
    chosen = [c for c in found if kernel is None or kernel in c.name or kernel in c.kernel]
    if not chosen:
        there = "".join(f"\n  {code.name}" for code in found) or " none"
        given = "" if kernel is None else f" with {kernel!r} in its name"
        raise ValueError(f"{name}: no kernel{given}. There are:{there}")
    if json:
        print_json(chosen)
        return
    out = console()
    for code in chosen:
        heading = f"== {code.name}  sm_{code.arch}"
        if not out.is_terminal:
            sys.stdout.write(
                "\n".join([heading, *(text for text, _ in with_sources(code, _shorter))]) + "\n\n"
            )
            continue
        out.print(Text(heading, style="bold"))
        for text, is_source in with_sources(code, _shorter):
            out.print(Text(text, style="cyan" if is_source else ""))
        out.print()


def _shorter(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
