"""``jitquant doctor``: whether a build would work here."""

from __future__ import annotations

import typer
from rich.text import Text

from jitquant.loader.core import Loader
from jitquant.loader.tools.doctor import ERROR, NOTE, OK, WARNING, Finding, examine

from .output import Json, console, print_json

_MARKS = {OK: ("ok", "green"), NOTE: ("-", ""), WARNING: ("!", "yellow"), ERROR: ("X", "red")}


def doctor(json: Json = False) -> None:
    """Check compilers, torch, GPUs and the cache, try a build, and suggest fixes.

    Exit code 0 means that a build works here. Changes nothing.
    """
    found = examine(Loader())
    if json:
        print_json(found)
    else:
        _show(found.findings)
        verdict = "A build works here." if found.works else "A build does not work here."
        console().print(f"{verdict} ({found.seconds:.1f} s)")
    raise typer.Exit(0 if found.works else 1)


def _show(findings: list[Finding]) -> None:
    out = console()
    last = ""
    for finding in findings:
        mark, style = _MARKS[finding.state]
        check = "" if finding.check == last else finding.check
        last = finding.check
        first, *rest = finding.text.splitlines()
        out.print(Text.assemble(f"{check:17}", (f"{mark:3}", style), first))
        for line in rest:
            out.print(Text(f"{'':20}{line}"))
        if finding.fix:
            out.print(Text(f"{'':20}-> {finding.fix}", style="bold"))
