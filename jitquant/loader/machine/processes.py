"""Runs compilers in parallel, each in its own process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import LoaderError
from ..settings import setting
from .watchdog import Watchdog

_POLL_SECONDS = 0.01
_ANSWER_SECONDS = 60.0
_BYTES_PER_JOB = 1 << 30
#: Starts a command once it is told to, which the end of this process never does.
_HELD = 'read -r go && exec "$@" </dev/null'


class Command(NamedTuple):
    """One command: its arguments, its name in messages, and the file that it writes."""

    argv: tuple[str, ...]
    label: str
    output: str


class Finished(NamedTuple):
    """A command that has ended, and its output.

    ``returncode`` is negative for a signal, as in subprocess.
    """

    command: Command
    returncode: int
    text: str
    seconds: float = 0.0


class _Running(NamedTuple):
    command: Command
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: float


def default_jobs() -> int:
    """How many compilers to run at once: one per processor, as far as memory allows."""
    if given := setting("JITQUANT_JOBS"):
        return int(given)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    memory = available_bytes()
    return max(1, min(processors, memory // _BYTES_PER_JOB if memory else processors))


def available_bytes() -> int:
    """Available memory in bytes; 0 if unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit != "max":
            found.append(max(int(limit) - int(used), 1))
    return min(found, default=0)


def run_side_by_side(
    commands: Sequence[Command],
    *,
    slots: threading.Semaphore,
    env: Mapping[str, str],
    cwd: Path,
    on_tick: Callable[[list[str]], None],
    may_start: Callable[[Command], bool] = lambda command: True,
) -> list[Finished]:
    """Run ``commands`` in parallel, as far as ``slots`` allows. Stop the others if one fails.

    They start in their order, each once ``may_start`` agrees. ``on_tick`` is called many times a
    second with the labels of what is running. If this call ends early (even by KeyboardInterrupt or
    SIGKILL), the process groups of the commands are killed.

    Returns the commands that ended, the failed one last.

    Raises:
        OSError: a command cannot be started.
        LoaderError: this process ignores SIGCHLD.
    """
    _check_signals()
    waiting = list(commands)
    running: list[_Running] = []
    finished: list[Finished] = []
    with Watchdog() as watchdog:
        try:
            while waiting or running:
                while waiting and may_start(waiting[0]) and slots.acquire(blocking=False):
                    command = waiting.pop(0)
                    try:
                        running.append(_start(command, env, cwd))
                    except BaseException:
                        slots.release()
                        raise
                    process = running[-1].process
                    watchdog.started(process.pid)
                    assert process.stdin is not None
                    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                        stdin.write(b"go\n")
                for item in list(running):
                    process = item.process
                    if process.poll() is not None:
                        running.remove(item)
                        slots.release()
                        watchdog.ended(process.pid)
                        finished.append(_finish(item, cwd))
                        if finished[-1].returncode != 0:
                            return finished
                on_tick([item.command.label for item in running])
                if waiting or running:
                    time.sleep(_POLL_SECONDS)
            return finished
        finally:
            for item in running:
                kill_group(item.process.pid)
            for item in running:
                item.process.wait()
                item.output.close()
                slots.release()


def _start(command: Command, env: Mapping[str, str], cwd: Path) -> _Running:
    # In memory: on a full disk the message that says so would be lost.
    output = open(os.memfd_create("output"), "w+b", buffering=0)  # noqa: SIM115
    try:
        process = subprocess.Popen(
            ("/bin/sh", "-c", _HELD, "sh", *command.argv),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            close_fds=True,
            start_new_session=True,
        )
    except BaseException:
        output.close()
        raise
    return _Running(command, process, output, time.monotonic())


def _finish(item: _Running, cwd: Path) -> Finished:
    took = time.monotonic() - item.started
    with item.output as output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    code = item.process.returncode
    if code == 0 and not (cwd / item.command.output).exists():
        code = 1  # of one that something else in this process has waited for, nothing is known
    return Finished(item.command, code, text, took)


def kill_group(pid: int) -> None:
    """Kill the process group led by ``pid``."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def ask(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> str:
    """The output of a short command, of both streams; empty if it cannot be run.

    Raises:
        LoaderError: this process ignores SIGCHLD.
    """
    _check_signals()
    try:
        done = subprocess.run(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="surrogateescape")


def _check_signals() -> None:
    """Refuse to run compilers where nobody learns how they end: not this process, not nvcc."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise LoaderError(
            "SIGCHLD is ignored in this process, and compilers need it. Call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) before the first build, or build "
            "beforehand (`jitquant build`)."
        )
