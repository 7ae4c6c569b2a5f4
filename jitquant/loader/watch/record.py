"""What a process remembers about a module that it has loaded."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..module import CudaModule
from ..request.plan import OF_COMPILERS, OF_NVCC
from ..request.sources import Signatures, Watched
from ..store.cache import Entry
from .inotify import TRUST_SECONDS, Places, Watcher, places_of

#: What ``os.environ`` looks into, with bytes for keys: that costs a fifth of a look through it.
_environ: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
_OF_ARCHS = ("JITQUANT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST")
_NEVER = -2
# Modules that are asked for a few times only are not worth the setting up of watches.
_LOOKS_BEFORE_WATCHING = 4


class Variables(NamedTuple):
    """Variables that a module depends on, and their values."""

    names: tuple[bytes, ...]
    values: list[bytes | None]

    @classmethod
    def now(cls, *, archs: bool, cuda: bool) -> Variables:
        """Those of compilers, and those that choose architectures and nvcc, as they are now."""
        names = (*OF_COMPILERS, *(_OF_ARCHS if archs else ()), *(OF_NVCC if cuda else ()))
        encoded = tuple(map(os.fsencode, names))
        return cls(encoded, list(map(_environ.get, encoded)))


class Loaded(NamedTuple):
    """A library that this process has loaded, and the cache entry that it came from."""

    entry: Entry
    module: CudaModule


@dataclass(eq=False)
class Record:
    """A loaded module, and what must not change for it to be current.

    Attributes:
        watched: files and directories; a signature of ``None`` means to read the file again.
        variables: the environment variables it was looked up with.
        directory: the working directory if a path is relative to it.
        reloads: whether edits of files count; everything else that selects the module always does.
    """

    module: CudaModule
    entry: Entry
    watched: Watched
    variables: Variables
    directory: str | None
    watcher: Watcher | None = None
    reloads: bool = True
    _generation: int = _NEVER
    _until: float = 0.0
    _looks: int = 0
    _installed: int = _NEVER
    _installed_until: float = 0.0
    _places: tuple[Places, Places] | None = field(default=None, repr=False)

    def changed(self) -> str | None:
        """What is not as it was: the path of a file or directory, or a name; else ``None``."""
        watcher = self.watcher
        if (
            self.reloads
            and (
                watcher is None
                or watcher.look() != self._generation
                or time.monotonic() > self._until
            )
            and (different := self._look_at_files()) is not None
        ):
            return different
        names, values = self.variables
        if list(map(_environ.get, names)) != values:
            return "the environment"
        if self.directory is not None and self.directory != os.getcwd():
            return "the working directory"
        return None

    def up_to_date_check(self, frozen: Callable[[], bool]) -> Callable[[], bool]:
        """A function that returns in half a microsecond whether the files are unchanged.

        Args:
            frozen: returns whether changes do not count; called only if a file has changed.
        """
        if not self.reloads:
            return itertools.repeat(True).__next__  # half the time of a lambda
        record, watcher, now = self, self.watcher, time.monotonic
        pending = watcher.pending if watcher is not None else None
        if watcher is None or pending is None:
            return lambda: record._look_at_files() is None or frozen()

        def fresh() -> bool:
            # As in changed(); written out, since a call costs as much as all that it does.
            try:
                if (
                    not pending(0, 1)
                    and watcher.generation == record._generation
                    and now() <= record._until
                ):
                    return True
            except (OSError, ValueError):  # a forked child, where nobody watches, or closed
                pass
            return record._look_at_files() is None or frozen()

        return fresh

    def _look_at_files(self) -> str | None:
        watcher, generation, installed = self.watcher, _NEVER, _NEVER
        if watcher is not None:
            self._looks += 1
            if self._looks > _LOOKS_BEFORE_WATCHING:
                if self._places is None:
                    ours, others = ([path for path, _ in group] for group in self.watched)
                    self._places = places_of(ours, hard_links=True), places_of(others)
                # First the generations and the watches, then the files: what changes in between
                # is seen by one or the other.
                near, far = self._places
                generation, installed = watcher.look(), watcher.installed
                if not watcher.ensure(far, installed=True):
                    installed = _NEVER
                if not watcher.ensure(near):
                    generation = _NEVER
        now = time.monotonic()
        if (changed := _changed(self.watched.own)) is not None:
            return changed
        unwatched = installed == _NEVER and (self._places is None or now > self._installed_until)
        if unwatched or installed != self._installed:
            if (changed := _changed(self.watched.installed)) is not None:
                return changed
            self._installed, self._installed_until = installed, now + TRUST_SECONDS
        self._generation, self._until = generation, now + TRUST_SECONDS
        return None


def _changed(files: Signatures) -> str | None:
    stat = os.stat
    for path, signature in files:
        try:
            status = stat(path)
        except OSError:
            return path
        if signature != (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino):
            return path
    return None
