"""Whose files this process may load as code: its own, root's, and those of a configured group."""

from __future__ import annotations

import grp
import os
import stat

from ..settings import setting

#: The group that shares the cache.
GROUP = "JITQUANT_CACHE_GROUP"


def shared_group() -> int | None:
    """The number of the group that ``JITQUANT_CACHE_GROUP`` names, ``None`` if it is not set.

    Raises:
        ValueError: there is no such group.
    """
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


def others_write(status: os.stat_result, *, shared: bool = False) -> str:
    """Whether others than the owner can write to it; with ``shared``, its group may."""
    mode = stat.S_IMODE(status.st_mode)
    if not mode & (0o002 if shared else 0o022):
        return ""
    return f"has mode {mode:04o}: others can write to it, and could make this process load any code"
