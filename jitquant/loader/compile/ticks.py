"""Whether files were changed while a compiler read them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def wait_for_next_tick(directory: Path) -> int:
    """A time on this file system's clock that separates earlier changes from later ones.

    Files changed before this call have an earlier or equal ``ctime``; files changed after it
    returns have a later one.
    """
    marker = directory / "marker"
    marker.write_bytes(b"")
    first = os.stat(marker).st_ctime_ns
    time.sleep(0.012)
    return first


def changed_after(paths: Iterable[str], moment_ns: int) -> str | None:
    """The first of ``paths`` that was changed after ``moment_ns``, if there is one."""
    for path in paths:
        try:
            if os.stat(path).st_ctime_ns > moment_ns:
                return path
        except OSError:
            return path
    return None
