"""Detects within a microsecond that no file has changed.

A ``stat`` takes microseconds per source and header. With inotify, polling one descriptor covers
all of them. All files are then checked with ``stat`` only after an event, and every half second for
changes that inotify does not report (by another machine or through a memory mapping, or a directory
mounted over another).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

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


#: File systems whose files change without an event here, since other machines (or another part of
#: this one) write to them too: the f_type of statfs(2).
_SILENT = {
    0x0000517B: "smb",
    0x00006969: "nfs",
    0x01021997: "9p",
    0x01161970: "gfs2",
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x19830326: "beegfs",
    0x47504653: "gpfs",
    0x5346414F: "afs",
    0x65735546: "fuse",
    0x6B414653: "kafs",
    0x73757245: "coda",
    0x7461636F: "ocfs2",
    0x786F4256: "vboxsf",
    0xAAD7AAEA: "panfs",
    0xFE534D42: "smb2",
    0xFF534D42: "cifs",
}


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def shared_file_system(directory: str) -> str:
    """The file system of ``directory`` if others may change it without an event here, else ""."""
    result = (ctypes.c_long * 64)()  # struct statfs begins with f_type; 120 bytes of it are used
    if _libc().statfs(os.fsencode(directory), result) != 0:
        return "an unknown file system"
    return _SILENT.get(result[0] & 0xFFFFFFFF, "")


#: Directories, each with the events of it that matter.
Places = frozenset[tuple[str, int]]


class Watcher:
    """Counts changes below a set of directories in :attr:`generation`.

    Changes below the directories of compilers and toolkits are also counted in :attr:`installed`:
    these have many files, which need no check after a change elsewhere.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.installed = 0
        self._installed: set[int] = set()
        self._guard = threading.Lock()
        self._watched: dict[bool, set[tuple[str, int]]] = {True: set(), False: set()}
        self._descriptor = -1
        self._poll: select.epoll | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._descriptor = _libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._descriptor >= 0:
                self._poll = select.epoll()
                self._poll.register(self._descriptor, select.EPOLLIN)
                _all.add(self)

    @property
    def pending(self) -> Callable[..., Any] | None:
        """``poll(0, 1)`` of the event queue, which is empty while nothing changes.

        It raises ValueError once the watcher is closed, and OSError if the program has closed
        descriptors that are not its own.
        """
        return None if self._poll is None else self._poll.poll

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching; :meth:`look` then answers ``-1``, which is not a valid generation."""
        poll, self._poll = self._poll, None
        if poll is not None:
            with contextlib.suppress(OSError):  # the program has closed them
                poll.close()
                os.close(self._descriptor)

    def ensure(self, places: Places, *, installed: bool = False) -> bool:
        """Watch ``places``; returns whether all of them are watched from now on.

        It is false if a file system does not report its changes.
        """
        if self._poll is not None and places <= self._watched[installed]:
            return True
        with self._guard:
            return all(self._add(directory, mask, installed) for directory, mask in places)

    def _add(self, directory: str, mask: int, installed: bool) -> bool:
        if self._poll is None or shared_file_system(directory):
            return False
        done = _libc().inotify_add_watch(
            self._descriptor, os.fsencode(directory), ctypes.c_uint32(mask | _MASK_ADD)
        )
        if done < 0:
            return False
        if installed:
            self._installed.add(done)
        self._watched[installed].add((directory, mask))
        return True

    def look(self) -> int:
        """The generation now; it grows whenever something below a directory has changed."""
        poll = self._poll
        if poll is None:
            return -1
        try:
            if poll.poll(0, 1):
                self._drain()
        except (OSError, ValueError):  # closed by the program, or in another thread just now
            self._poll = None
            _lost.append(poll)
            return -1
        return self.generation

    def _drain(self) -> None:
        # The generation grows first: who finds the queue empty then finds the new one.
        with self._guard:
            self.generation += 1
            installed = False
            with contextlib.suppress(OSError):
                while data := os.read(self._descriptor, 65536):
                    offset = 0
                    while offset + _EVENT.size <= len(data):
                        watch, mask, _, length = _EVENT.unpack_from(data, offset)
                        offset += _EVENT.size + length
                        installed = installed or watch in self._installed
                        if mask & (_DELETE_SELF | _MOVE_SELF) or mask & 0xE000:
                            # A watch may be gone with its directory: set all of them again.
                            for places in self._watched.values():
                                places.clear()
                            installed = True
            self.installed += installed


def places_of(paths: Iterable[str], *, hard_links: bool = False) -> Places:
    """The directories to watch for ``paths``: their parents, up to the root.

    For a symbolic link on the way, both the directory that contains it, because the link may
    change, and its target. With ``hard_links`` also the files that have another name, because a
    directory does not report what is written to that.
    """
    places: set[tuple[str, int]] = set()
    queue = [(path, _INSIDE) for path in paths]
    seen: set[tuple[str, int]] = set()
    while queue:
        path, mask = queue.pop()
        while (path, mask) not in seen:
            seen.add((path, mask))
            up = os.path.dirname(path)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                mode = status.st_mode
                if hard_links and status.st_nlink > 1 and not stat.S_ISDIR(mode):
                    places.add((path, _INSIDE))
                if stat.S_ISLNK(mode):
                    places.add((up, _INSIDE))
                    queue.append((os.path.join(up, os.readlink(path)), mask))
                else:
                    places.add((path, mask) if stat.S_ISDIR(mode) else (up, _INSIDE))
            path, mask = up, _ITSELF
    return frozenset(places)


_all: weakref.WeakSet[Watcher] = weakref.WeakSet()
#: Whose descriptors may be other files by now, which they would close at their end.
_lost: list[select.epoll] = []


def _after_fork() -> None:
    # The queue of events is shared with the parent, which must not miss any.
    for watcher in list(_all):
        watcher.close()


os.register_at_fork(after_in_child=_after_fork)
