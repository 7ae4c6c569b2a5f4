"""``jitquant record``: which modules a command uses."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from jitquant.loader.machine.scratch import scratch
from jitquant.loader.request.used import VARIABLE, write_manifest

from .output import console


def record(
    command: Annotated[list[str], typer.Argument(help="What to run, after --.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Output file; overwritten if it exists.")
    ] = Path("jitquant-used.json"),
) -> None:
    """Run a command and record every module and variant that its processes use.

    `jitquant bundle --from MANIFEST` builds exactly these. The exit code is that of the command.
    Ctrl-C and SIGTERM end the command; what it used until then is recorded.
    """
    is_new = not output.exists()
    with output.open("a", encoding="utf-8"):
        pass  # reported before the run, not after it
    with scratch("record") as directory:
        notes = directory / "notes"
        notes.touch()
        try:
            code = _run(command, {**os.environ, VARIABLE: str(notes)})
        except OSError as error:
            if is_new:
                output.unlink()
            raise ValueError(
                f"record: {command[0]!r} cannot be started: {error.strerror}. Give a program on "
                "PATH, or the path of one that can be executed."
            ) from error
        names = write_manifest(notes, output)
    console(stderr=True).print(f"{len(names)} modules used, in {output}", markup=False)
    raise typer.Exit(code if code >= 0 else 128 - code)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The command's exit code, negative for a signal; it is given the signals that this gets."""
    with subprocess.Popen(command, env=environment) as process:
        before = {
            # Ctrl-C reaches the command by itself, which is of the terminal's foreground group.
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
        }
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
