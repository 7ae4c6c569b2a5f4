"""Whether files were changed while a compiler read them."""

from __future__ import annotations

import os
import stat
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
    """The first of ``paths`` that was changed after ``moment_ns`` or is another file since then."""
    seen: set[str] = set()
    for path in paths:
        try:
            if os.stat(path).st_ctime_ns > moment_ns or _is_other(path, moment_ns, seen):
                return path
        except OSError:
            return path
    return None


def _is_other(path: str, moment_ns: int, seen: set[str]) -> bool:
    """Whether a link on the way to ``path`` is new, or a directory was moved there.

    A change in a directory gives it a new ``mtime`` too. ``seen`` are those that are as before.
    """
    while path not in seen:
        seen.add(path)
        up, status = os.path.dirname(path), os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            target = os.path.join(up, os.readlink(path))
            if status.st_ctime_ns > moment_ns or _is_other(target, moment_ns, seen):
                return True
        elif stat.S_ISDIR(status.st_mode) and status.st_ctime_ns > moment_ns >= status.st_mtime_ns:
            return True
        path = up
    return False
