"""The command line, ``jitquant`` or ``python -m jitquant``: shows what the loader finds and does.

One module has one command; :mod:`jitquant.cli.app` lists them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import takewhile


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
    own = takewhile(lambda word: word != "--", words)  # behind it is another program's command line
    try:
        with _ended_in_order():
            app(args=words, prog_name="jitquant")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (LoaderError, ValueError, OSError) as error:
        print_error(error, json="--json" in own)
        return 1
    return 0


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise SystemExit, so that a hidden cursor is shown again.

    Not if something else is to happen then, as under nohup.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    ours = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
