"""``jitquant watch``: build after each edit, and run a command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from jitquant.loader.core import Loader
from jitquant.loader.errors import CompileError, FirstLoadError, LoaderError
from jitquant.loader.request.includes import Identity, identity
from jitquant.loader.request.plan import Request
from jitquant.loader.request.sources import SUFFIXES
from jitquant.loader.store.match import Build
from jitquant.loader.tools.names import request_of

from .output import Arch, cannot_start, console

_SUFFIXES = (*SUFFIXES, ".cuh", ".h", ".hpp", ".hh", ".inl", ".inc")
#: A line that says of which file a build has found nothing.
_MISSING = re.compile(r"no such file|not found|does not exist|cannot (open|find)", re.IGNORECASE)
_GRACE_SECONDS = 3.0
_POLL_MILLISECONDS = 100


class Child:
    """The command, of which one at most is running; it leads a process group of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it again; the one before is ended.

        Raises:
            ValueError: it cannot be started.
        """
        self.stop()
        if self.command:
            try:
                self._process = subprocess.Popen(self.command, start_new_session=True)
            except OSError as error:
                raise cannot_start("watch", self.command[0], error) from error

    def ended(self) -> int | None:
        """Its exit code, once, after it has ended by itself."""
        if self._process is None or self._process.poll() is None:
            return None
        code, self._process = self._process.returncode, None
        return code

    def stop(self) -> None:
        """End it, with SIGTERM and, if that does not help, with SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        for number, seconds in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return


class Watch:
    """Builds a request again whenever what it is made from changes."""

    def __init__(self, loader: Loader, request: Request, child: Child) -> None:
        self._loader = loader
        self._request = request
        self._child = child
        self._running: str | None = None  # the build that the command was started with
        self._failed: str | None = None  # what the last build said, if it failed
        self._directories: set[Path] = set()
        self._read: set[str] = set()
        self._out = console(stderr=True)

    def build(self) -> None:
        """Build if need be; start the command if the build is another one than before."""
        started = time.monotonic()
        try:
            build = self._loader.ensure(self._request)
        except (LoaderError, FileNotFoundError, ValueError) as error:
            self._directories |= _directories(self._paths(None))
            before, self._failed = self._failed, _lasting(str(error))
            if self._failed != before:
                self._out.print(f"error: {error}", markup=False)
                if not isinstance(error, CompileError | FirstLoadError | FileNotFoundError):
                    raise
            return
        failed, self._failed = self._failed, None
        build.hold.release()
        paths = self._paths(build)
        self._directories = _directories(paths)
        self._read |= {path.name for path in paths}
        if build.entry.level2 == self._running:
            if failed is not None:
                self._out.print(
                    f"{self._request.name}: fixed; the code is as before the error", markup=False
                )
            return
        self._running = build.entry.level2
        seconds = time.monotonic() - started
        how = f"built in {seconds:.1f} s" if build.is_new else "as built before"
        running = f"; {' '.join(self._child.command)}" if self._child.command else ""
        self._out.print(f"{self._request.name}: {how}{running}", markup=False)
        self._child.start()

    def _paths(self, build: Build | None) -> list[Path]:
        """What it is made from; of what a link leads to, both paths."""
        found = [path for path, _ in build.watch.own] if build is not None else []
        with contextlib.suppress(LoaderError, FileNotFoundError, ValueError):
            wanted = self._loader.look_up(self._request)
            found += [*wanted.sources, *wanted.include_dirs]
        # Where a source stood that is gone, it may come back.
        found += [str(Path.cwd() / str(source)) for source in self._request.sources]
        return [Path(path) for path in (*found, *map(os.path.realpath, found))]

    def _matters(self, path: str) -> bool:
        """Whether it may be a source or a header, a directory, or is what a failed build lacks."""
        name = Path(path).name
        known = path.lower().endswith(_SUFFIXES) or name in self._read or self._has_been(path)
        return known or _is_missing(name, self._failed or "")

    def _has_been(self, path: str) -> bool:
        """Whether ``path`` is a directory, or was one that is watched."""
        return Path(path).is_dir() or Path(path) in self._directories

    def _watched(self) -> dict[Path, Identity]:
        """The directories that exist, and which they are: a watch stays with one that is moved."""
        found = {place: identity(str(place), of_directory=True) for place in self._directories}
        return {place: which for place, which in found.items() if which is not None}

    def run(self) -> None:
        """Until it is interrupted."""
        while True:
            self.build()
            watched = self._watched()
            changes = _changes(watched, self._matters)
            try:
                next(changes)
            except FileNotFoundError:  # a directory that was there a moment ago
                continue
            self.build()  # what changed before the watching began
            moved = False
            while not moved and self._watched() == watched:
                changed = next(changes)
                code = self._child.ended()
                if code is not None:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    self._out.print(f"{self._child.command[0]} ended with {how}", markup=False)
                if changed:
                    self.build()
                    moved = any(map(self._has_been, changed))
            changes.close()


def _lasting(message: str) -> str:
    """``message`` without the names of its log and library, which are others each time."""
    return re.sub(r"(?m)^whole log: .*$|[-_][0-9a-f]{12}\b", "", message)


def _is_missing(name: str, message: str) -> bool:
    """Whether ``message`` says that there is no file ``name``, of any directory."""
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w/-]|\.\w)")
    return any(word.search(line) for line in message.splitlines() if _MISSING.search(line))


def _directories(paths: Iterable[Path]) -> set[Path]:
    places = {path if path.is_dir() else path.parent for path in paths}
    return {place for place in places if place.is_dir()}


def _changes(
    directories: Iterable[Path], matters: Callable[[str], bool]
) -> Generator[list[str], None, None]:
    """Which paths that ``matters`` have changed in ``directories``, several times a second."""
    from watchfiles import watch

    for found in watch(
        *sorted(map(str, directories)),
        watch_filter=lambda _, path: matters(path),
        recursive=False,
        step=30,
        rust_timeout=_POLL_MILLISECONDS,
        yield_on_timeout=True,
        raise_interrupt=True,
    ):
        yield [path for _, path in found]


def watch(
    name: Annotated[
        str, typer.Argument(help="A kernel's name, your own .cu, or a module built before.")
    ],
    command: Annotated[
        list[str] | None, typer.Argument(help="What to run after each build, after --.")
    ] = None,
    arch: Arch = None,
) -> None:
    """Rebuild a module when its sources or headers change, and run a command.

    A running command is stopped before the next one starts. If an edit does not compile, the errors
    are shown and the command of the last good build keeps running. Ctrl-C, SIGTERM or closing the
    terminal stops both.
    """
    loader = Loader()
    child = Child(command or [])
    ended_by: list[int] = []

    def end(number: int, frame: object) -> None:
        ended_by.append(number)
        raise KeyboardInterrupt  # which watchfiles hands on, too

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        Watch(loader, request_of(loader, name, arch), child).run()
    except KeyboardInterrupt:
        if ended_by:
            raise typer.Exit(128 + ended_by[0]) from None
    finally:
        child.stop()
