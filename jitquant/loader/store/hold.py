"""Keeping a library while a process uses it: a shared lock on its file.

The lock is the kernel's and goes with the process, however that ends. A forked child shares it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
# Whoever removes an entry has it locked for the time of one rename.
_PATIENCE_SECONDS = 1.0


class Hold:
    """A library in use until :meth:`release`, or until the process ends after :meth:`keep`."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Use it no longer."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def keep(self) -> None:
        """Use it as long as the process lives, as a library that is loaded is used."""
        self._descriptor = None

    def __del__(self) -> None:
        self.release()


def hold(library: Path) -> Hold | None:
    """Keep ``library`` from being removed; ``None`` if it just is, or is not there.

    On a file system without locks nothing is held, and nothing is removed either (:func:`unused`).
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            descriptor = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_still(library, descriptor):
                return Hold(descriptor)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return Hold(descriptor)
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
        os.close(descriptor)
        time.sleep(0.005)


def has_locks(directory: Path) -> bool:
    """Whether the file system of ``directory`` has the locks that this needs."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_FLOCK
    finally:
        os.close(descriptor)
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        there, held = os.stat(path), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)


@contextlib.contextmanager
def unused(library: Path) -> Iterator[bool]:
    """Whether no process uses ``library``, and none can begin to within the block.

    ``False`` too where that cannot be told.
    """
    try:
        try:
            # To be writable is what some network file systems ask for.
            descriptor = os.open(library, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            descriptor = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
