"""Temporary directories. The next process removes those that a killed one has left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "jitquant-"
#: One that is younger may not be locked yet.
_OLD_SECONDS = 3600.0


def new_scratch(kind: str) -> tuple[Path, int]:
    """A new temporary directory, and the open file whose lock says that it is in use.

    Raises:
        OSError: none can be made.
    """
    _sweep(tempfile.gettempdir())
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # nor will anybody else get a lock there
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return path, descriptor


@contextlib.contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A temporary directory within the block."""
    path, descriptor = new_scratch(kind)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _sweep(directory: str) -> None:
    """Remove what no process uses."""
    with contextlib.suppress(OSError), os.scandir(directory) as items:
        for item in items:
            if item.name.startswith(_PREFIX) and item.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_unused(item.path)


def _remove_if_unused(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _OLD_SECONDS:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)
