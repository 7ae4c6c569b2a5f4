"""Whose files this process may load as code: its own, root's, and those of a configured group."""

from __future__ import annotations

import contextlib
import grp
import os
import stat
from pathlib import Path

from ..settings import setting

#: The group that shares the cache.
GROUP = "JITQUANT_CACHE_GROUP"


def shared_group() -> int | None:
    """The number of the group that ``JITQUANT_CACHE_GROUP`` names, ``None`` if it is not set."""
    name = setting(GROUP)
    if not name:
        return None
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"{GROUP}={name!r}: there is no such group; give its name.") from None


def doubt(status: os.stat_result, group: int | None) -> str:
    """Who else can write to a file or directory; ``""`` if only trusted users can."""
    shared = group is not None and status.st_gid == group
    if status.st_uid not in (os.geteuid(), 0) and not shared:
        return (
            f"is owned by uid {status.st_uid}, and this process is uid {os.geteuid()}: its owner "
            "could make this process load any code"
        )
    return others_write(status, shared=shared)


def read_trusted(path: Path) -> bytes:
    """The contents of a file that only trusted users can write to.

    Raises:
        OSError: others can, or it cannot be read.
        ValueError: ``JITQUANT_CACHE_GROUP`` names no group.
    """
    with open(path, "rb") as stream:
        if why := doubt(os.fstat(stream.fileno()), shared_group()):
            raise PermissionError(f"{path} {why}")
        return stream.read()


def write_trusted(path: Path, content: bytes) -> None:
    """Write a file that only this user can write to, in one step. Does nothing if that fails."""
    with contextlib.suppress(OSError):
        write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step: if that fails, it is as before.

    Raises:
        OSError: it cannot be written, with its name.
    """
    temporary = path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        # Whatever the umask.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_output(path: Path, text: str) -> None:
    """:func:`write_whole` for a file that the user names: maybe a link, or ``/dev/stdout``."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path.resolve(), text.encode())


def others_write(status: os.stat_result, *, shared: bool = False) -> str:
    """Whether others than the owner can write to it; with ``shared``, its group may."""
    mode = stat.S_IMODE(status.st_mode)
    if not mode & (0o002 if shared else 0o022):
        return ""
    return f"has mode {mode:04o}: others can write to it, and could make this process load any code"
