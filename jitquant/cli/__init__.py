"""The command line, ``jitquant`` or ``python -m jitquant``: shows what the loader finds and does.

One module has one command; :mod:`jitquant.cli.app` lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, ``sys.argv``'s if ``arguments`` is ``None``; its exit code.

    What the loader raises about a kernel, the cache or an argument, and what the system refuses, is
    printed without a traceback, and is exit code 1. A command line that is not understood is exit
    code 2.
    """
    from jitquant.loader.errors import LoaderError

    from .app import app
    from .output import print_error

    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=words, prog_name="jitquant")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (LoaderError, ValueError, OSError) as error:
        print_error(error, json="--json" in words)
        return 1
    return 0
