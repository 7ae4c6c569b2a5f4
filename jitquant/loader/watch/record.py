"""What a process remembers of a module that it has loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..module import CudaModule
from ..request.sources import Watched
from ..store.cache import Entry
from .inotify import TRUST_SECONDS, Places, Watcher, places_of

_ARCH_VARIABLES = ("JITQUANT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST")
_NEVER = -2
# Modules that are asked for a few times only are not worth the setting up of watches.
_LOOKS_BEFORE_WATCHING = 4


def arch_environment() -> tuple[str | None, str | None]:
    """The variables that choose architectures, as they are now."""
    environ = os.environ
    first, second = _ARCH_VARIABLES
    # ``in`` is several times cheaper than a ``get`` that fails.
    return (
        environ[first] if first in environ else None,  # noqa: SIM401
        environ[second] if second in environ else None,  # noqa: SIM401
    )


class Loaded(NamedTuple):
    """A library that this process has loaded, and the cache entry that it came from."""

    entry: Entry
    module: CudaModule


@dataclass(eq=False)
class Record:
    """A loaded module, and what must stay as it is for it to be current.

    Attributes:
        watched: files and directories; a signature of ``None`` means to look closer.
        environment: :func:`arch_environment` if the module depends on it.
        directory: the working directory if a path is relative to it.
        reloads: whether edits of files count; what else chooses the module always does.
    """

    module: CudaModule
    entry: Entry
    watched: Watched
    environment: tuple[str | None, str | None] | None
    directory: str | None
    watcher: Watcher | None = None
    reloads: bool = True
    _generation: int = _NEVER
    _until: float = 0.0
    _looks: int = 0
    _places: Places | None = field(default=None, repr=False)

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
        if self.environment is not None and self.environment != arch_environment():
            return "the choice of architectures"
        if self.directory is not None and self.directory != os.getcwd():
            return "the working directory"
        return None

    def freshness(self) -> Callable[[], bool]:
        """A function that tells in half a microsecond whether the files are as they were."""
        if not self.reloads:
            return lambda: True
        record, watcher, now = self, self.watcher, time.monotonic
        pending = watcher.pending if watcher is not None else None
        if watcher is None or pending is None:
            return lambda: record._look_at_files() is None

        def fresh() -> bool:
            # As in changed(); written out, since a call costs as much as all that it does.
            try:
                if (
                    not pending(0, 1)
                    and watcher.generation == record._generation
                    and now() <= record._until
                ):
                    return True
            except ValueError:  # a forked child, where nobody watches
                pass
            return record._look_at_files() is None

        return fresh

    def _look_at_files(self) -> str | None:
        watcher, generation = self.watcher, _NEVER
        if watcher is not None:
            self._looks += 1
            if self._looks > _LOOKS_BEFORE_WATCHING:
                if self._places is None:
                    self._places = places_of([path for path, _ in self.watched])
                # First the generation and the watches, then the files: what changes in between
                # is seen by one or the other.
                generation = watcher.look()
                if not watcher.ensure(self._places):
                    generation = _NEVER
        stat = os.stat
        for path, signature in self.watched:
            try:
                status = stat(path)
            except OSError:
                return path
            if signature != (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino):
                return path
        self._generation, self._until = generation, time.monotonic() + TRUST_SECONDS
        return None
