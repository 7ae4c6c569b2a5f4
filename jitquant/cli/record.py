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

from .output import cannot_start, console


def record(
    command: Annotated[list[str], typer.Argument(help="What to run, after --.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Output file; overwritten if it exists.")
    ] = Path("jitquant-used.json"),
) -> None:
    """Run a command and record every module and variant that its processes use.

    `jitquant bundle --from MANIFEST` builds exactly these. The exit code is that of the command.
    Ctrl-C, SIGTERM or closing the terminal end the command; what it used until then is recorded.
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
            raise cannot_start("record", command[0], error) from error
        names, damaged = write_manifest(notes, output)
    lost = f" ({damaged} records were not written whole, and are missing)" if damaged else ""
    console(stderr=True).print(f"{len(names)} modules used, in {output}{lost}", markup=False)
    raise typer.Exit(code if code >= 0 else 128 - code)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """The command's exit code, negative for a signal; it is given the signals that this gets."""
    with subprocess.Popen(command, env=environment) as process:
        # Ctrl-C reaches the command by itself, which is of the terminal's foreground group.
        before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                before[number] = signal.signal(number, lambda got, _: process.send_signal(got))
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
