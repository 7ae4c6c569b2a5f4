"""``jitquant cache``: where it is, what is in it, and less of it."""

from __future__ import annotations

import typer

from jitquant.loader.cache import default_root

from .output import Json, console, print_json

app = typer.Typer(help="Look into the cache and make it smaller.", no_args_is_help=True)


@app.command()
def path(json: Json = False) -> None:
    """Print the cache directory (JITQUANT_CACHE_DIR, or the user's cache directory)."""
    root = default_root()
    if json:
        print_json({"path": root, "exists": root.is_dir()})
    else:
        console().print(str(root), markup=False)
