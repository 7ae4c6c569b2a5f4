"""Knowing within a microsecond that no file has changed.

A ``stat`` of every source and header costs microseconds each. Where the kernel tells of changes
(inotify), one look at a descriptor answers for all of them; a full look by ``stat`` then happens
only after an event, and every half second for what inotify does not see (a change made by another
machine or through a memory mapping, a directory mounted over another).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import threading
import weakref
from collections.abc import Iterable

#: Longest time for which inotify's silence is taken for an answer.
TRUST_SECONDS = 0.5

_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x8, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_INSIDE = (
    _MODIFY | _ATTRIB | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
    | _DELETE_SELF | _MOVE_SELF
)  # fmt: skip
_ITSELF = _DELETE_SELF | _MOVE_SELF
_MASK_ADD = 0x20000000
_EVENT = struct.Struct("iIII")


#: Directories, each with the events of it that matter.
Places = frozenset[tuple[str, int]]


class Watcher:
    """Counts changes below a set of directories in :attr:`generation`."""

    def __init__(self) -> None:
        self.generation = 0
        self._guard = threading.Lock()
        self._watched: set[tuple[str, int]] = set()
        self._descriptor = -1
        self._poll: select.epoll | None = None
        self._libc: ctypes.CDLL | None = None
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if descriptor >= 0:
                self._descriptor, self._libc = descriptor, libc
                self._poll = select.epoll()
                self._poll.register(descriptor, select.EPOLLIN)
                _all.add(self)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; :meth:`look` then answers ``-1``, which is no generation."""
        poll, self._poll = self._poll, None
        if poll is not None:
            poll.close()
            os.close(self._descriptor)

    def ensure(self, places: Places) -> bool:
        """Watch ``places``; whether all of them are watched from now on."""
        watched = self._watched
        if self._poll is not None and places <= watched:
            return True
        with self._guard:
            return all(self._add(directory, mask) for directory, mask in places)

    def _add(self, directory: str, mask: int) -> bool:
        if self._poll is None or self._libc is None:
            return False
        done = self._libc.inotify_add_watch(
            self._descriptor, os.fsencode(directory), ctypes.c_uint32(mask | _MASK_ADD)
        )
        if done < 0:
            return False
        self._watched.add((directory, mask))
        return True

    def look(self) -> int:
        """The generation now; it grows whenever something below a directory has changed."""
        poll = self._poll
        if poll is None:
            return -1
        if poll.poll(0):
            self._drain()
        return self.generation

    def _drain(self) -> None:
        # The generation grows first: who finds the queue empty then finds the new one.
        with self._guard:
            self.generation += 1
            with contextlib.suppress(OSError):
                while data := os.read(self._descriptor, 65536):
                    offset = 0
                    while offset + _EVENT.size <= len(data):
                        _, mask, _, length = _EVENT.unpack_from(data, offset)
                        offset += _EVENT.size + length
                        if mask & (_DELETE_SELF | _MOVE_SELF) or mask & 0xE000:
                            # A watch may be gone with its directory: set all of them anew.
                            self._watched.clear()


def _ancestors(directory: str) -> Iterable[str]:
    while True:
        up = os.path.dirname(directory)
        if up == directory:
            return
        yield up
        directory = up


def places_of(paths: Iterable[str]) -> Places:
    """The directories to watch for ``paths``: those that hold them, and all that lead there."""
    inside: set[str] = set()
    for path in paths:
        for spelling in {path, os.path.realpath(path)}:
            inside.add(spelling if os.path.isdir(spelling) else os.path.dirname(spelling))
    leading = {up for directory in inside for up in _ancestors(directory)}
    return frozenset(
        {(directory, _INSIDE) for directory in inside}
        | {(directory, _ITSELF) for directory in leading}
    )


_all: weakref.WeakSet[Watcher] = weakref.WeakSet()


def _after_fork() -> None:
    # The queue of events is shared with the parent, which must not miss any.
    for watcher in list(_all):
        watcher.close()


os.register_at_fork(after_in_child=_after_fork)
