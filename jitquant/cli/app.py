"""Which commands there are."""

from __future__ import annotations

import typer

from . import cache
from .build import build
from .bundle import bundle
from .explain import explain

app = typer.Typer(
    help="Build, look into and mend what jitquant compiles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(build)
app.command()(bundle)
app.command()(explain)
app.add_typer(cache.app, name="cache")
