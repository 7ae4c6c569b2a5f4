"""Telling the command line from a program that imports the package."""

from __future__ import annotations

import sys
from pathlib import PurePath


def started_as_command() -> bool:
    """Whether this process is ``jitquant ...`` or ``python -m jitquant ...``."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # as it is while the package of ``python -m`` is looked up
        given = sys.orig_argv
        return "-m" in given and given[given.index("-m") + 1 :][:1] == ["jitquant"]
    return PurePath(program).name == "jitquant"
