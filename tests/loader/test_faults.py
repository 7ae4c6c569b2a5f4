"""What goes wrong on real machines, done for real: each ends soon, rightly, and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import mmap
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import jitquant.cli
import jitquant.loader
from jitquant.cli import main
from jitquant.loader import CacheError, CompileError, Loader, LoaderError, core
from jitquant.loader.compile import trial
from jitquant.loader.compile.commands import make_units
from jitquant.loader.machine.torch_install import torch_install
from jitquant.loader.machine.watchdog import Watchdog
from jitquant.loader.request.plan import Request
from jitquant.loader.tools import doctor

from .conftest import Toy
from .toys import (
    PATIENCE_SECONDS,
    ROOT,
    entries,
    fork,
    litter,
    new_loader,
    wait_for,
    write_factor,
    write_plain,
    write_toy,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def factor(cache: Path, source: Path) -> int:
    """The result of a module that a new loader gives."""
    return int(new_loader(cache).get(source.stem, [source]).library.factor())


def compiler(directory: Path, script: str, what: str = "/plain.cpp") -> str:
    """A C++ compiler that does ``script`` where it compiles ``what``."""
    path = directory / "stub" / "g++"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'#!/bin/sh\ncase " $*" in *" -c "*"{what}"*) {script};; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def counting(work: Callable[[], bool], counter: mmap.mmap, last: int = 0) -> Callable[[], bool]:
    """``work`` with the events of its interpreter counted, which kill its process at the last.

    Those of the child that tries the library count too. Each file, directory and process that is
    opened, made, renamed, removed or started is an event, so a kill comes before each step, on a
    slow machine as on a fast one.
    """

    def counted() -> bool:
        builder = os.getpid()

        def count(event: str, arguments: object) -> None:
            seen = int.from_bytes(counter[:8], "little") + 1
            counter[:8] = seen.to_bytes(8, "little")
            if seen == last:
                os.kill(builder, signal.SIGKILL)

        sys.addaudithook(count)
        return work()

    return counted


@pytest.mark.slow
def test_a_builder_killed_a_hundred_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each builds another version, so that no kill meets a cache that has the answer."""
    source = write_plain(tmp_path / "source")
    cache = tmp_path / "cache"
    output = tmp_path / "output.txt"
    # One compiler for all, as a script is part of the key.
    monkeypatch.setenv("CXX", compiler(tmp_path, '[ -z "$KILLS" ] || kill -9 $PPID'))
    assert factor(cache, source) == 3
    counter = mmap.mmap(-1, 8)

    def builds() -> bool:
        return factor(cache, source) > 0

    write_factor(source.with_suffix(".h"), 4)
    assert os.waitpid(fork(counting(builds, counter), output), 0)[1] == 0, output.read_text()
    events = int.from_bytes(counter[:8], "little")
    killed = 0
    for index in range(100):
        write_factor(source.with_suffix(".h"), 100 + index)
        counter[:8] = bytes(8)
        if index % 5:
            builder = fork(counting(builds, counter, 1 + index * events // 100), output)
        else:  # while a compiler runs
            with monkeypatch.context() as patch:
                patch.setenv("KILLS", "yes")
                builder = fork(builds, output)
        status = os.waitpid(builder, 0)[1]
        assert status in (0, signal.SIGKILL), output.read_text()
        killed += status == signal.SIGKILL
    assert killed >= 90  # what is swept makes a few events more or less
    stale = cache / "v1" / "last" / "plain.999999999-0a0b.tmp"  # of one killed while it wrote it
    stale.touch()
    os.utime(stale, (0, 0))
    for index in (*range(0, 100, 20), 99):
        write_factor(source.with_suffix(".h"), 100 + index)
        assert factor(cache, source) == 100 + index
    write_factor(source.with_suffix(".h"), 3)
    assert factor(cache, source) == 3  # nothing that was there before is lost
    assert litter(cache) == []
    assert not stale.exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP], ids=["ENOLCK", "EOPNOTSUPP"])
def test_processes_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    source = write_plain(tmp_path / "source")
    cache = tmp_path / "cache"
    outputs = [tmp_path / f"{index}.txt" for index in range(4)]
    processes = [fork(lambda: factor(cache, source) == 3, output) for output in outputs]
    statuses = [os.waitpid(pid, 0)[1] for pid in processes]
    assert statuses == [0] * 4, "".join(output.read_text() for output in outputs)
    assert len(entries(cache)) == 1
    assert litter(cache) == []
    assert factor(cache, source) == 3


SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static const long kBack = 40L * 24 * 3600;
int clock_gettime(clockid_t clock, struct timespec* t) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const int result = real(clock, t);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) t->tv_sec -= kBack;
  return result;
}
int gettimeofday(struct timeval* t, void* zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.mark.slow
def test_the_clock_is_set_back(tmp_path: Path) -> None:
    """By forty days, for a process whose cache and sources carry the dates of before."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no C compiler")
    (tmp_path / "shift.c").write_text(SHIFT)
    library = tmp_path / "shift.so"
    command = [gcc, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "shift.c"), "-ldl"]
    subprocess.run(command, check=True)
    source = write_plain(tmp_path / "source")
    cache = tmp_path / "cache"
    assert factor(cache, source) == 3
    before = time.time()
    code = f"""
import sys, time
assert time.time() < {before} - 39 * 24 * 3600
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from loader.toys import new_loader, write_factor
source = Path({str(source)!r})
loader = new_loader(Path({str(cache)!r}))
module = loader.get("plain", [source])
values = [module.library.factor()]
for value in (4, 5, 3, 4):
    write_factor(source.with_suffix(".h"), value)
    values.append(loader.get("plain", [source]).library.factor())
    again = loader.get("plain", [source])
    assert again is loader.get("plain", [source])
print(values)
"""
    environment = {**os.environ, "LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[3, 4, 5, 3, 4]"
    assert done.stderr.count("building plain") == 2  # 4 and 5, each once
    assert "compiling again" not in done.stderr
    assert litter(cache) == []
    assert factor(cache, source) == 4
    assert len(entries(cache)) == 3


def all_can_compile() -> bool:
    """Whether any user may read what a build needs; not where it lies below root's home."""
    torch = torch_install()
    places = [sysconfig.get_path("include"), torch.library_dir, *torch.include_dirs]
    return all(
        p.stat().st_mode & 0o005 == 0o005
        for place in places
        for p in (Path(place), *Path(place).parents)
    )


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can reach, as they cannot ``tmp_path``."""
    made = Path(tempfile.mkdtemp(prefix="jitquant-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def as_user(number: int, work: Callable[[], bool]) -> Callable[[], bool]:
    """``work`` as another user, who may not be able to read the checkout, or its packages."""
    for package in (jitquant.loader, jitquant.cli):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".nvrtc." not in module.name:
                importlib.import_module(module.name)
    main(["explain", "no such name"])  # and what others import when they are called
    doctor.examine(new_loader(Path(tempfile.gettempdir()) / "none"))

    def done() -> bool:
        os.setgroups([])
        os.setgid(number)
        os.setuid(number)
        return work()

    return done


@needs_root
@pytest.mark.slow
def test_two_users(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of root's serves another user, who cannot write to it; a third one's is refused."""
    source = write_plain(place / "source")
    cache = place / "cache"
    assert factor(cache, source) == 3
    for path in [cache, *cache.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    (place / "tmp").mkdir()
    (place / "tmp").chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(place / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    edited = write_plain(place / "edited", 4)
    own = place / "own"
    shutil.copytree(cache, own)
    for path in [own, *own.rglob("*")]:
        os.chown(path, 4001, 4001)
    own.chmod(0o700)
    can_compile = all_can_compile()

    def other_user() -> bool:
        assert factor(cache, source) == 3
        assert factor(own, source) == 3
        if can_compile:
            loader = new_loader(cache)
            missed = loader.get("plain", [edited])
            assert cache not in missed.path.parents
            assert missed.library.factor() == 4
            shutil.rmtree(loader.cache().temporary().root)
        return True

    def third_user() -> bool:
        with pytest.raises(CacheError, match="is owned by uid 4001"):
            new_loader(own, temporary=False).get("plain", [source])
        return True

    for number, work in ((4001, other_user), (4002, third_user)):
        output = tmp_path / f"{number}.txt"
        assert os.waitpid(fork(as_user(number, work), output), 0)[1] == 0, output.read_text()
    assert factor(cache, source) == 3
    assert len(entries(cache)) == 1
    assert litter(cache) == litter(own) == []


@needs_root
@pytest.mark.parametrize("opened", ["", ".", "v1"])
def test_a_cache_that_may_not_be_read_is_named_with_the_way_out(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, opened: str
) -> None:
    """One of root's has mode 0700; opening a part of it does not yet show its builds."""
    source = write_plain(place / "source")
    cache = place / "cache"
    assert factor(cache, source) == 3
    if opened:
        for path in {cache, cache / opened}:
            path.chmod(0o755)
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(cache))
    monkeypatch.setattr(doctor, "try_build", lambda plan_of: 0.1)
    way_out = f"chmod -R a+rX {cache}"

    def other_user() -> bool:
        loader = new_loader(cache)
        with pytest.raises(CacheError, match="cannot be read by uid 4001 ") as caught:
            loader.get("plain", [source])
        assert f"Run `{way_out}` as its owner" in str(caught.value)
        findings = [f for f in doctor.examine(loader).findings if f.check == "cache"]
        assert [(f.state, way_out in f.fix) for f in findings] == [("error", True)]
        for command in (["cache", "list"], ["cache", "clear"], ["explain", str(source)]):
            assert main(command) == 1
        return True

    output = tmp_path / "4001.txt"
    status = os.waitpid(fork(as_user(4001, other_user), output), 0)[1]
    assert status == 0, output.read_text()
    assert len(entries(cache)) == 1


def test_sources_of_ones_own_do_not_need_the_projects_kernels(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may lie in a directory of root's, where a compiler would stop at them."""
    place.chmod(0o777)
    try:
        source = write_plain(place / "source")
        closed = place / "closed"
        (closed / "kernels_cu" / "include").mkdir(parents=True)
        closed.chmod(0 if os.geteuid() else 0o700)
        monkeypatch.setattr(core, "_PACKAGE", f"{closed}/jitquant/")

        def work() -> bool:
            loader = new_loader(place / "cache")
            assert loader.kernels_dir() == closed / "kernels_cu"
            plan = loader.plan(loader.look_up(Request("plain", (source,))))
            (unit,) = make_units(plan, "plain", place)
            assert not [word for word in unit.command.argv if str(closed) in word]
            return True

        output = tmp_path / "output.txt"
        status = os.waitpid(fork(work if os.geteuid() else as_user(4001, work), output), 0)[1]
        assert status == 0, output.read_text()
    finally:
        closed.chmod(0o700)


def test_the_compiler_runs_out_of_memory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "was here"
    script = f'[ -e "{flag}" ] || {{ touch "{flag}"; exit 137; }}'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    monkeypatch.setenv("JITQUANT_JOBS", "4")
    sources = [write_plain(tmp_path / "source"), tmp_path / "source" / "plain_two.cpp"]
    sources[1].write_text("int two() { return 2; }\n")
    loader = new_loader(tmp_path / "cache")
    assert loader.get("plain", sources).library.factor() == 3
    said = capfd.readouterr().err
    assert "most likely because memory ran out; from now on one compiles at a time" in said
    assert "instead of 4, and plain again" in said
    assert litter(tmp_path / "cache") == []
    write_factor(sources[0].with_suffix(".h"), 4)
    assert loader.get("plain", sources).library.factor() == 4
    assert "memory" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "what"),
    [("exit 137", "/plain.cpp"), ("kill -9 $$", "/plain.cpp"), ("kill -9 $$", "/plain_")],
    ids=["code", "signal", "linking"],
)
def test_the_compiler_always_runs_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, what: str
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, how, what))
    monkeypatch.setenv("JITQUANT_JOBS", "4")
    source = write_plain(tmp_path / "source")
    with pytest.raises(CompileError, match=r"memory ran out.*\(JITQUANT_JOBS=1\)") as caught:
        new_loader(tmp_path / "cache").get("plain", [source])
    assert caught.value.out_of_memory
    assert entries(tmp_path / "cache") == []
    assert litter(tmp_path / "cache") == []


@pytest.mark.slow
def test_a_library_that_hangs_while_it_is_loaded_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_HANG_SECONDS", 1.0)
    source = write_plain(tmp_path / "source")
    source.write_text(
        "#include <unistd.h>\nstatic int never = [] { for (;;) pause(); return 0; }();\n"
    )
    with pytest.raises(LoaderError, match=r"static initializer .* was still running after 1 s"):
        new_loader(tmp_path / "cache").get("plain", [source])
    assert entries(tmp_path / "cache") == []
    assert litter(tmp_path / "cache") == []


@pytest.mark.slow
def test_a_library_that_hangs_in_a_forked_child_alone_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a lock of another thread may have been held. The child is known by its death signal."""
    monkeypatch.setattr(trial, "_HANG_SECONDS", 1.0)
    in_new_process = trial._in_new_process

    def with_time(library: Path, scratch: Path) -> trial._Outcome:
        monkeypatch.setattr(trial, "_HANG_SECONDS", PATIENCE_SECONDS)
        return in_new_process(library, scratch)

    monkeypatch.setattr(trial, "_in_new_process", with_time)
    source = write_plain(tmp_path / "source")
    source.write_text(
        source.read_text() + "#include <sys/prctl.h>\n#include <unistd.h>\nstatic int forked = [] "
        "{ int n = 0; for (prctl(PR_GET_PDEATHSIG, &n); n != 0;) pause(); return n; }();\n"
    )
    assert factor(tmp_path / "cache", source) == 3
    (entry,) = entries(tmp_path / "cache")
    assert json.loads((entry / "entry.json").read_text())["ops"] == []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_compilers_end_with_a_builder_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does what they have started."""
    pids = tmp_path / "pids"
    script = f'sleep 3000 & echo $$ $! > "{pids}.new"; mv "{pids}.new" "{pids}"; wait'
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    request = Request("plain", (str(write_plain(tmp_path / "source")),))
    waits = tmp_path / "waits"  # once the builder has said what it started

    def build() -> bool:
        loader = new_loader(tmp_path / "cache")
        return loader.ensure(request, on_tick=lambda _: waits.touch()).is_new

    builder = fork(build, tmp_path / "output.txt")
    wait_for(waits.exists)
    wait_for(pids.exists)
    started = [int(word) for word in pids.read_text().split()]
    assert len(started) == 2
    assert all(map(is_running, started))
    os.kill(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    wait_for(lambda: not any(map(is_running, started)))


def test_no_compiler_runs_that_a_killed_builder_could_not_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setenv("CXX", compiler(tmp_path, f'touch "{ran}"; sleep 3000'))
    source = write_plain(tmp_path / "source")
    killed = tmp_path / "killed"

    def kill(self: Watchdog, group: int) -> None:
        killed.write_text(str(group))
        os.kill(os.getpid(), signal.SIGKILL)

    def build() -> object:
        monkeypatch.setattr(Watchdog, "started", kill)
        return new_loader(tmp_path / "cache").get("plain", [source])

    builder = fork(build, tmp_path / "output.txt")
    os.waitpid(builder, 0)
    group = int(killed.read_text())
    wait_for(lambda: not is_running(group))
    assert not ran.exists()


def test_a_process_that_ignores_the_end_of_its_children_runs_no_compiler(tmp_path: Path) -> None:
    """Each would seem to succeed, and nvcc's answers would be empty."""
    source = write_plain(tmp_path)
    loader = new_loader(tmp_path / "cache")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(LoaderError, match=r"SIGCHLD is ignored.*signal\.SIG_DFL"):
            loader.get("plain", [source])
    finally:
        signal.signal(signal.SIGCHLD, before)
    module = loader.get("plain", [source])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert loader.get("plain", [source]) is module
        write_factor(source.with_suffix(".h"), 4)
        with pytest.raises(LoaderError, match="SIGCHLD is ignored"):
            loader.get("plain", [source])
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_compiler_fails_in_a_process_that_waits_for_every_child(
    tmp_path: Path, loader: Loader
) -> None:
    """How it ended is known to nobody else."""

    def wait(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    source = write_plain(tmp_path / "source")
    write_factor(source.with_suffix(".h"), "absent")  # type: ignore[arg-type]
    before = signal.signal(signal.SIGCHLD, wait)
    try:
        with pytest.raises(CompileError, match="'absent' was not declared"):
            loader.get("plain", [source])
        write_factor(source.with_suffix(".h"), 4)
        assert loader.get("plain", [source]).library.factor() == 4
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("how", ["exit 1", "exit 0"])
def test_the_cache_is_removed_during_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    cache = tmp_path / "cache"
    source = write_plain(tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setenv("CXX", compiler(tmp_path, f'rm -rf "{cache}"; {how}'))
        with pytest.raises(CacheError, match="was removed while a build was going on in it"):
            new_loader(cache).get("plain", [source])
    assert factor(cache, source) == 3
    assert litter(cache) == []


def test_no_temporary_directory_an_open_umask_and_a_path_of_many_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: None
) -> None:
    source = write_toy(tmp_path / "Ünïcode ✓ und Leerzeichen", 6)
    cache = tmp_path / "Zwischen lager ✓"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    before = os.umask(0)
    try:
        module = new_loader(cache).get("toy", [source])
    finally:
        os.umask(before)
    assert torch.equal(module.scale(torch.ones(2), 1.0), torch.full((2,), 6.0))
    open_to_others = [
        p for p in (cache, *cache.rglob("*")) if p.is_dir() and p.stat().st_mode & 0o077
    ]
    assert open_to_others == []
    assert litter(cache) == []
    assert not (tmp_path / "nowhere").exists()


def test_a_source_deleted_after_the_build_is_missed_by_name_and_the_module_lives_on(
    plain: Toy, tmp_path: Path
) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    shutil.rmtree(source.parent)
    with pytest.raises(FileNotFoundError, match=r"plain\.cpp"):
        loader.get("plain", [source])
    assert module.library.factor() == 3
    loader.freeze()
    assert loader.get("plain", [source]) is module
    assert litter(cache) == []
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/../../b", "x\0y", "..", "a;touch x"])
def test_a_hostile_name_touches_nothing(tmp_path: Path, name: str) -> None:
    source = write_plain(tmp_path / "inside" / "source")
    loader: Loader = new_loader(tmp_path / "inside" / "cache")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="name: expected a C identifier"):
        loader.get(name, [source])
    assert sorted(tmp_path.rglob("*")) == before
