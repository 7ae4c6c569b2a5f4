"""Which commands there are."""

from __future__ import annotations

import typer

from . import cache

app = typer.Typer(
    help="Build, look into and mend what jitquant compiles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache.app, name="cache")
