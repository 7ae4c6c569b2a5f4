"""Whether files were changed while a compiler read them."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
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


def on_the_way(paths: Iterable[str]) -> dict[str, os.stat_result]:
    """What there is on the ways to ``paths``: all directories, and links with their targets."""
    found: dict[str, os.stat_result] = {}
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        with contextlib.suppress(OSError):
            up, status = os.path.dirname(path), os.lstat(path)
            found[path] = status
            waiting.append(up)
            if stat.S_ISLNK(status.st_mode):
                waiting.append(os.path.join(up, os.readlink(path)))
    return found


def changed_after(
    paths: Sequence[str], moment_ns: int, before: Mapping[str, os.stat_result]
) -> str | None:
    """The first of ``paths`` that was changed after ``moment_ns``, or what is another on the way.

    ``before`` is what there was on some ways then.
    """
    for path in paths:
        try:
            if os.stat(path).st_ctime_ns > moment_ns:
                return path
        except OSError:
            return path
    ways = on_the_way(paths)
    return next((w for w, now in ways.items() if _is_other(w, now, before.get(w), moment_ns)), None)


def _is_other(
    path: str, now: os.stat_result, before: os.stat_result | None, moment_ns: int
) -> bool:
    """Whether a link is new since then, or a directory was moved to ``path``."""
    if stat.S_ISDIR(now.st_mode) and before is not None:
        return not os.path.samestat(now, before)
    if now.st_ctime_ns <= moment_ns or not stat.S_ISDIR(now.st_mode):
        return now.st_ctime_ns > moment_ns and stat.S_ISLNK(now.st_mode)
    # A change in a directory gives it a new mtime too, and so does a move the one that has it.
    around = os.stat(os.path.dirname(path))
    return now.st_mtime_ns <= moment_ns or around.st_ctime_ns > moment_ns
