"""Which commands there are."""

from __future__ import annotations

import typer

from . import cache
from .build import build
from .bundle import bundle
from .code import ptx, sass
from .doctor import doctor
from .explain import explain
from .new import new
from .stats import stats
from .watch import watch

app = typer.Typer(
    help="Build, look into and mend what jitquant compiles.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command()(build)
app.command()(bundle)
app.command()(explain)
app.command()(stats)
app.command()(sass)
app.command()(ptx)
app.command()(new)
app.command()(watch)
app.add_typer(cache.app, name="cache")
