"""Many processes and threads at once, and builders that die."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from jitquant.loader import CudaModule, Loader, LockTimeoutError
from jitquant.loader.compile import builder as builder_module
from jitquant.loader.request.plan import Request
from jitquant.loader.request.used import note_use, write_manifest
from jitquant.loader.store import cache as cache_module
from jitquant.loader.store.cache import staged_by_this_machine

from .conftest import Toy
from .toys import (
    entries,
    fork,
    litter,
    new_loader,
    wait_for,
    write_factor,
    write_plain,
    write_toy,
)


def slow_compiler(directory: Path) -> str:
    """A C++ compiler that takes its time with the source of a test, as the file beside it says."""
    path = directory / "slow" / "g++"
    path.parent.mkdir(exist_ok=True)
    path.with_name("seconds").write_text("3000")
    path.write_text(
        '#!/bin/sh\ncase " $*" in *" -c "*/plain.cpp*) sleep "$(cat "${0%/*}/seconds")";; esac\n'
        'exec g++ "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def waiting_compiler(directory: Path, go: Path) -> str:
    """A C++ compiler that begins with the source of a test when ``go`` is there, if WAITS."""
    path = directory / "waiting" / "g++"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        '#!/bin/sh\ncase " $*" in *" -c "*/plain.cpp*)\n'
        f'  while [ -n "$WAITS" ] && [ ! -e "{go}" ]; do sleep 0.05; done;; esac\nexec g++ "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_thirty_two_processes_build_a_cold_module_once(tmp_path: Path, nvcc: None) -> None:
    source = write_toy(tmp_path / "source")

    def work() -> bool:
        module = new_loader(tmp_path / "cache").get("toy", [source])
        return bool(module.scale(torch.ones(1), 1.0).item() == 3)

    outputs = [tmp_path / f"{index}.txt" for index in range(32)]
    processes = [fork(work, output) for output in outputs]
    statuses = [os.waitpid(pid, 0)[1] for pid in processes]
    said = "".join(output.read_text() for output in outputs)
    assert statuses == [0] * 32, said
    assert said.count("building toy for") == 1
    assert len(entries(tmp_path / "cache")) == 1
    assert litter(tmp_path / "cache") == []


def test_threads_of_one_process_build_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_plain(tmp_path / "source")
    for loaders in ([new_loader(tmp_path / "a")] * 8, [new_loader(tmp_path / "b")] * 4):
        modules: list[CudaModule] = []
        barrier = threading.Barrier(len(loaders))

        def work(loader: Loader, barrier: threading.Barrier, modules: list[CudaModule]) -> None:
            barrier.wait()
            modules.append(loader.get("plain", [source]))

        threads = [
            threading.Thread(target=work, args=(loader, barrier, modules)) for loader in loaders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(modules) == len(loaders)
        assert len(set(map(id, modules))) == 1
    assert capfd.readouterr().err.count("building plain") == 2


def test_two_loaders_of_one_process_build_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_plain(tmp_path / "source")
    loaders = [new_loader(tmp_path / "cache") for _ in range(4)]
    threads = [threading.Thread(target=loader.get, args=("plain", [source])) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err.count("building plain") == 1
    assert len(entries(tmp_path / "cache")) == 1


def test_orphaned_compiler_does_not_hold_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_plain(tmp_path / "source"), tmp_path / "cache"
    compiler = slow_compiler(tmp_path)
    monkeypatch.setenv("CXX", compiler)
    builder = fork(lambda: bool(new_loader(cache).get("plain", [source])), tmp_path / "output")
    wait_for(lambda: litter(cache))
    wait_for(lambda: children(builder))
    orphans = children(builder)
    os.kill(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    try:
        Path(compiler).with_name("seconds").write_text("0")
        assert new_loader(cache).get("plain", [source]).library.factor() == 3
        assert litter(cache) == []
    finally:
        for orphan in orphans:
            kill(orphan)


def test_interrupt_kills_the_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = write_plain(tmp_path / "source"), tmp_path / "cache"
    monkeypatch.setenv("CXX", slow_compiler(tmp_path))
    output = tmp_path / "output"
    builder = fork(lambda: bool(new_loader(cache).get("plain", [source])), output)
    wait_for(lambda: children(builder))
    compilers = children(builder)
    os.kill(builder, signal.SIGINT)
    os.waitpid(builder, 0)
    assert "KeyboardInterrupt" in output.read_text()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in compilers))
    assert litter(cache) == []


def test_interrupt_of_a_warmup_kills_all_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, manifest, output = tmp_path / "notes", tmp_path / "used.json", tmp_path / "output"
    monkeypatch.setenv("JITQUANT_RECORD", str(notes))
    for name in ("one", "two", "three"):
        note_use(Request(name, (write_plain(tmp_path / name),)), [])
    monkeypatch.delenv("JITQUANT_RECORD")
    write_manifest(notes, manifest)
    cache = tmp_path / "cache"
    monkeypatch.setenv("CXX", slow_compiler(tmp_path))
    monkeypatch.setenv("JITQUANT_JOBS", "1")  # one runs, one waits for it, one has not begun
    builder = fork(lambda: bool(new_loader(cache).warmup(manifest=manifest)), output)
    wait_for(lambda: children(builder))
    compilers = children(builder)
    os.kill(builder, signal.SIGINT)
    try:
        wait_for(lambda: os.waitpid(builder, os.WNOHANG)[0])
    finally:
        kill(builder, group=False)
        for compiler in compilers:
            kill(compiler)
    assert "KeyboardInterrupt" in output.read_text()
    assert litter(cache) == entries(cache) == []


def test_waiting_names_the_builder_and_ends_at_the_limit(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builder_module, "HEARTBEAT_SECONDS", 0.2)
    source, cache = plain.copy(tmp_path)
    write_factor(source.with_suffix(".h"), 4)
    (entry,) = entries(cache)
    level1 = json.loads((entry / "entry.json").read_text())["level1"]
    lock = cache / "v1" / "locks" / f"{level1[:3]}.lock"
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        lock.with_suffix(".owner").write_text(
            json.dumps({"pid": 4242, "host": "elsewhere", "started": time.time() - 60})
        )
        monkeypatch.setenv("JITQUANT_LOCK_TIMEOUT", "0.7")
        with pytest.raises(
            LockTimeoutError, match=r"held by process 4242 on elsewhere \(for \d+ s"
        ):
            new_loader(cache).get("plain", [source])
        assert "waiting for process 4242 on elsewhere" in capfd.readouterr().err
        monkeypatch.setenv("JITQUANT_LOCK_TIMEOUT", "soon")
        with pytest.raises(ValueError, match="JITQUANT_LOCK_TIMEOUT='soon': give a number"):
            new_loader(cache).get("plain", [source])
        monkeypatch.setenv("JITQUANT_LOCK_TIMEOUT", "0")
        with pytest.raises(LockTimeoutError, match=r"held by process 4242"):
            new_loader(cache).get("plain", [source])
    # A lock that a dead process left behind does not count.
    assert new_loader(cache).get("plain", [source]).library.factor() == 4


def test_losers_of_a_race_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, go = write_plain(tmp_path / "source"), tmp_path / "go"
    monkeypatch.setenv("CXX", waiting_compiler(tmp_path, go))
    monkeypatch.setenv("WAITS", "1")
    loader = new_loader(tmp_path / "cache")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "waiting for process" in line:  # for a second and more
            go.touch()

    def work() -> bool:
        return bool(new_loader(tmp_path / "cache").get("plain", [source]).library.factor() == 3)

    monkeypatch.setattr(builder_module, "HEARTBEAT_SECONDS", 1.1)
    builder = fork(work, tmp_path / "output.txt")
    wait_for(lambda: children(builder))
    loader.reporter.say = say  # type: ignore[method-assign]
    assert loader.get("plain", [source]).library.factor() == 3
    assert os.waitpid(builder, 0)[1] == 0
    assert any("another process built it (waited" in line for line in said)
    assert not any("building plain" in line for line in said if "waiting" not in line)


def test_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import errno

    def no_flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    source = write_plain(tmp_path / "source")
    loader = new_loader(tmp_path / "cache")
    assert loader.get("plain", [source]).library.factor() == 3
    assert "has no locks; two processes may build the same thing" in capfd.readouterr().err
    assert litter(tmp_path / "cache") == []


def test_sweep_takes_what_dead_builders_left(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    (entry,) = entries(cache)
    shard = json.loads((entry / "entry.json").read_text())["level1"][:3]
    staging = cache / "v1" / "staging"
    dead = staging / f"{staged_by_this_machine(shard)}1-dead"
    others = [
        staging / f"{staged_by_this_machine('000' if shard != '000' else '111')}1-x",
        staging / f"{shard}@elsewhere-0a1b2c3d-1-x",
        staging / f"{staged_by_this_machine(None)}1-x",
    ]
    for path in (dead, *others):
        path.mkdir()
    write_factor(source.with_suffix(".h"), 4)
    new_loader(cache).get("plain", [source])
    assert sorted(staging.iterdir()) == sorted(others)
    for path in others:
        os.utime(path, (0, 0))
    write_factor(source.with_suffix(".h"), 5)
    new_loader(cache).get("plain", [source])
    assert litter(cache) == []


def test_two_machines_that_do_not_see_each_others_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NFS and local locks: the second builds while the first is at it; both succeed."""
    source, go = write_plain(tmp_path / "source"), tmp_path / "go"
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setenv("CXX", waiting_compiler(tmp_path, go))

    def first() -> bool:
        monkeypatch.setattr(cache_module, "this_machine", lambda: "first-0a1b2c3d")
        monkeypatch.setenv("WAITS", "1")
        return bool(new_loader(tmp_path / "cache").get("plain", [source]).library.factor() == 3)

    builder = fork(first, tmp_path / "output.txt")
    wait_for(lambda: children(builder))
    assert len(litter(tmp_path / "cache")) == 2
    assert new_loader(tmp_path / "cache").get("plain", [source]).library.factor() == 3
    go.touch()
    assert os.waitpid(builder, 0)[1] == 0, (tmp_path / "output.txt").read_text()
    assert len(entries(tmp_path / "cache")) == 1
    assert litter(tmp_path / "cache") == []


def test_forked_child_uses_and_builds_modules(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader, output = new_loader(cache), tmp_path / "output"
    for _ in range(32):
        module = loader.get("plain", [source])

    def child() -> bool:
        same = loader.get("plain", [source]) is module
        write_factor(source.with_suffix(".h"), 8)
        return same and loader.get("plain", [source]).library.factor() == 8

    assert os.waitpid(fork(child, output), 0)[1] == 0, output.read_text()
    assert loader.get("plain", [source]).library.factor() == 8


def children(pid: int) -> list[int]:
    """The compilers that a process has started (which lead process groups of their own)."""
    done = subprocess.run(
        ["ps", "-o", "pid=,pgid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    pairs = (line.split() for line in done.stdout.splitlines())
    return [int(child) for child, group in pairs if child == group]


def kill(pid: int, *, group: bool = True) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
