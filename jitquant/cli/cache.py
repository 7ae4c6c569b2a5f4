"""``jitquant cache``: where it is, what is in it, and less of it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from jitquant.loader.store.cache import Cache, default_root
from jitquant.loader.store.prune import Pruned, Stored, clear, prune, stored
from jitquant.loader.units import parse_duration, parse_size, show_duration, show_size

from .output import Json, console, print_json, table

app = typer.Typer(help="Inspect and shrink the cache.", no_args_is_help=True)


@app.command()
def path(json: Json = False) -> None:
    """Print the cache directory (JITQUANT_CACHE_DIR, or the user's cache directory)."""
    root = default_root()
    if json:
        print_json({"path": root, "exists": root.is_dir()})
    else:
        console().print(str(root), markup=False)


@app.command("list")
def list_builds(json: Json = False) -> None:
    """List the builds in the cache, the least recently used first."""
    cache = Cache(default_root())
    cache.check()
    builds = stored(cache)
    if json:
        print_json({"path": cache.root, "builds": builds})
        return
    view = table("module", "for", "size", "last used", "in use", "entry", right=("size",))
    for build in builds:
        view.add_row(*_row(build))
    out = console()
    if builds:
        out.print(view)
    total = show_size(sum(build.size for build in builds))
    out.print(f"{len(builds)} builds, {total}, in {cache.root}", markup=False)


@app.command("prune")
def prune_builds(
    max_size: Annotated[
        str | None, typer.Option(help="Keep at most this much, such as 500M or 2GB.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove builds unused for this long, such as 30d.")
    ] = None,
    json: Json = False,
) -> None:
    """Remove the least recently used builds, except those a live process has loaded."""
    if max_size is None and older_than is None:
        raise typer.BadParameter("give --max-size, --older-than, or both")
    done = prune(
        Cache(default_root()),
        max_size=None if max_size is None else parse_size(max_size),
        older_than=None if older_than is None else parse_duration(older_than),
    )
    _show(done, json)


@app.command("clear")
def clear_all(json: Json = False) -> None:
    """Remove all builds except those a live process has loaded, and logs and records."""
    _show(clear(Cache(default_root())), json)


def _show(done: Pruned, json: bool) -> None:
    if json:
        print_json(done)
        return
    out = console()
    for build in done.removed:
        out.print(f"removed {build.name or build.directory}", markup=False)
    for build in done.in_use:
        out.print(
            f"kept {build.name}: a live process uses it, or the file system cannot tell",
            markup=False,
        )
    freed = show_size(done.size_before - done.size_after)
    out.print(
        f"{len(done.removed)} builds removed, {freed} freed; {show_size(done.size_after)} left"
    )


def _row(build: Stored) -> tuple[str, ...]:
    archs = ", ".join(f"sm_{arch}" for arch in build.archs) or "host"
    return (
        build.name or "(not readable)",
        archs if build.name else "",
        show_size(build.size),
        f"{show_duration(max(0.0, time.time() - build.used))} ago",
        "yes" if build.in_use else "no",
        "/".join(build.directory.parts[-2:]),
    )
