"""Printing: tables and lines for people, JSON for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import json as _json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

#: The option of every command that can be asked about another architecture than the one here.
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        help="Architectures, such as 90a,100a,103a,120f; default: those set by environment "
        "variables, or visible GPUs.",
    ),
]
#: The option of every command with machine-readable output.
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def console(*, stderr: bool = False) -> Console:
    """A console; output that is not a terminal does not wrap."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=True)


def table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; columns in ``right`` are set flush right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left")
    return made


def print_json(value: Any) -> None:
    """``value``, a dataclass or a plain value, as JSON on stdout."""
    sys.stdout.write(_json.dumps(value, indent=1, default=_plain) + "\n")
    sys.stdout.flush()  # what the system refuses is raised here, not at the end of the process


def print_error(error: Exception, *, json: bool) -> None:
    """An error in its own words: on stdout as JSON, or on stderr for people.

    JSON that cannot be written becomes the line for people.
    """
    if json:
        try:
            print_json({"error": type(error).__name__, "message": str(error)})
            return
        except OSError:  # what is left of it must not fail again when the process ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError):
        console(stderr=True).print(f"error: {error}", markup=False)


def cannot_start(command: str, program: str, error: OSError) -> ValueError:
    """The error of ``jitquant command`` about a program that it was given to run."""
    return ValueError(
        f"{command}: {program!r} cannot be started: {error.strerror}. Give a program on PATH, or "
        "the path of one that can be executed."
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
