"""``jitquant bundle``: builds for machines without a compiler."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from jitquant.loader.core import Loader
from jitquant.loader.store.bundles import check_free, write_bundle
from jitquant.loader.store.cache import BUNDLES
from jitquant.loader.units import show_size

from .build import Jobs, Names, build_named
from .output import Arch, Json, console, print_json


def bundle(
    names: Names = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A directory that does not exist yet.")
    ] = Path("jitquant-bundle"),
    manifest: Annotated[
        Path | None,
        typer.Option("--from", help="Build exactly what this manifest of `jitquant record` lists."),
    ] = None,
    arch: Arch = None,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Build modules and copy them into a directory for machines without a compiler.

    Needs no GPU. The directory may be moved; JITQUANT_BUNDLES=DIR uses it, with the same sources
    and, for modules that need more of it than its stable ABI, the same torch.
    """
    check_free(output)  # before the minutes that it may take
    outcomes = build_named(names, arch, jobs, Loader(), quiet=json, manifest=manifest)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    written = write_bundle(
        [(o.build.library.parent, o.build.entry) for o in outcomes if o.build is not None], output
    )
    if json:
        print_json(written)
        return
    size = show_size(sum(build.size for build in written.builds))
    console().print(
        f"{len(written.builds)} builds, {size}, in {written.path}\n"
        f"use them with {BUNDLES}={shlex.quote(str(written.path))}",
        markup=False,
    )
