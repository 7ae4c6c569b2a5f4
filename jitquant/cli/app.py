"""Which commands there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from . import cache
from .build import build
from .bundle import bundle
from .code import ptx, sass
from .compile_commands import compile_commands
from .doctor import doctor
from .explain import explain
from .new import new
from .quantize import quantize
from .record import record
from .stats import stats
from .watch import watch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        import jitquant

        typer.echo(f"jitquant {jitquant.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Quantize checkpoints; build, inspect and debug kernels."""


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(doctor, build, bundle, record, compile_commands, explain, stats, sass, ptx),
    *(quantize, new, watch),
)
for command in _COMMANDS:
    app.command(command.__name__.replace("_", "-"))(command)
app.add_typer(cache.app, name="cache")
