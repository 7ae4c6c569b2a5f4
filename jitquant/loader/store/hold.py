"""Keeps a library while a process uses it, by a shared lock on its file.

The lock is the kernel's and ends with the process in any case. A forked child shares it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
# Whoever removes an entry has it locked for the time of one rename.
_PATIENCE_SECONDS = 1.0


class Hold:
    """An open library, in use until :meth:`release`.

    After :meth:`keep` it is in use until the process ends.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._released = False

    @property
    def path(self) -> str:
        """A path to the open file, even if it was renamed or removed."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def status(self) -> os.stat_result:
        """The ``stat`` of the open file."""
        return os.fstat(self.descriptor)

    def sha256(self) -> str:
        """The digest of the open file; ``""`` if it is none that holds data."""
        if not stat.S_ISREG(self.status().st_mode):
            return ""
        with open(self.descriptor, "rb", closefd=False) as stream:
            stream.seek(0)
            return hashlib.sha256(stream.read()).hexdigest()

    def release(self) -> None:
        """Stop using it."""
        if not self._released:
            self._released = True
            os.close(self.descriptor)

    def keep(self) -> None:
        """Hold it for the rest of the process, as a loaded library requires."""
        self._released = True

    def __del__(self) -> None:
        self.release()


def hold(library: Path) -> Hold | None:
    """Keep ``library`` from being removed; ``None`` if that is too late.

    On a file system without locks nothing is held, and nothing is removed either (:func:`unused`).

    Raises:
        OSError: it cannot be opened.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        # A pipe in its place would wait for a writer.
        descriptor = os.open(library, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
    """Whether the file system of ``directory`` supports these locks."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    return is_lockable(descriptor)


def is_lockable(descriptor: int) -> bool:
    """Whether the file system of an open file supports these locks. Closes the file."""
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
    """Whether no process uses ``library``, nor can start to use it within the block.

    Also ``False`` if that is unknown.
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
