"""``jitquant watch``: rebuild on save, run the command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from loader.toys import PATIENCE_SECONDS, new_loader, write_factor, write_plain
from quick import in_quick

import jitquant
from jitquant.cli.watch import Child, Watch
from jitquant.loader import CompileError, FirstLoadError, Loader
from jitquant.loader.request.plan import Request

from .conftest import Run

ROOT = Path(jitquant.__file__).resolve().parents[1]
COMMAND = "import sys, time; print('sta' + 'rted', flush=True); time.sleep(3000)"


class Watching:
    """A running ``jitquant watch``; its output is in one file."""

    def __init__(self, directory: Path, *command: str) -> None:
        self.source = write_plain(directory / "source")
        self.output = directory / "output.txt"
        words = [sys.executable, "-m", "jitquant", "watch", str(self.source)]
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                [*words, *(["--", *command] if command else [])],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "JITQUANT_CACHE_DIR": str(directory / "cache"),
                },
            )

    def wait_for(self, text: str, count: int = 1, seconds: float = PATIENCE_SECONDS) -> str:
        end = time.monotonic() + seconds
        while self.output.read_text().count(text) < count:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.02)
        return self.output.read_text()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    made = Watching(tmp_path, sys.executable, "-c", COMMAND)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_each_good_edit_is_built_and_starts_the_command_anew(watching: Watching) -> None:
    said = watching.wait_for("started")
    assert said.index("plain: built in") < said.index("started")
    header = watching.source.with_suffix(".h")
    (first,) = children(watching.process.pid)
    write_factor(header, 4)
    watching.wait_for("started", 2)
    assert not Path(f"/proc/{first}").exists()
    (second,) = children(watching.process.pid)
    header.write_text("#error out\n")
    watching.wait_for("error: ")
    assert "out" in watching.wait_for("building 'plain' failed")
    assert children(watching.process.pid) == [second]  # the last good one goes on
    write_factor(header, 4)
    watching.wait_for("plain: fixed; the code is as before the error")
    assert children(watching.process.pid) == [second]  # as it was: nothing to do
    write_factor(header, 3)
    watching.wait_for("plain: as built before")
    watching.wait_for("started", 3)
    watching.source.unlink()
    watching.wait_for("does not exist")
    write_plain(watching.source.parent, 5)
    watching.wait_for("started", 4)
    (last,) = children(watching.process.pid)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(PATIENCE_SECONDS) == 0
    assert not Path(f"/proc/{last}").exists()


@pytest.mark.parametrize("number", in_quick(1, [signal.SIGTERM, signal.SIGHUP]))
@pytest.mark.slow
def test_the_command_ends_with_what_watches(watching: Watching, number: signal.Signals) -> None:
    watching.wait_for("started")
    (child,) = children(watching.process.pid)
    watching.process.send_signal(number)
    assert watching.process.wait(PATIENCE_SECONDS) == 128 + number
    assert not Path(f"/proc/{child}").exists()


def test_a_killed_command_is_waited_for_however_busy_the_machine_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signals.append(number))

    def wait(seconds: float | None) -> int:
        if seconds is not None:
            raise subprocess.TimeoutExpired("command", seconds)
        return -signals[-1]

    child = Child(["command"])
    process = MagicMock(pid=1, wait=MagicMock(side_effect=wait))
    monkeypatch.setattr(child, "_process", process)
    child.stop()
    assert signals == [signal.SIGTERM, signal.SIGKILL]
    assert process.wait.call_args.args == (None,)


@pytest.mark.slow
def test_a_header_may_have_any_name(watching: Watching) -> None:
    watching.wait_for("started")
    watching.source.write_text(watching.source.read_text().replace("plain.h", "values.def"))
    watching.wait_for("building 'plain' failed")
    write_factor(watching.source.with_name("values.def"), 4)
    watching.wait_for("started", 2)
    write_factor(watching.source.with_name("values.def"), 5)
    watching.wait_for("started", 3)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
def test_a_library_that_does_not_load_and_a_header_behind_a_link(watching: Watching) -> None:
    watching.wait_for("started")
    (first,) = children(watching.process.pid)
    text = watching.source.read_text()
    watching.source.write_text(
        f"{text}void absent();\nstatic struct A {{ A() {{ absent(); }} }} a;\n"
    )
    watching.wait_for("does not load")
    target = watching.source.parent.parent / "elsewhere" / "values.def"
    target.parent.mkdir()
    write_factor(target, 4)
    header = watching.source.with_suffix(".h")
    header.unlink()
    header.symlink_to(target)
    assert children(watching.process.pid) == [first]  # the last good one goes on
    watching.source.write_text(text)
    watching.wait_for("started", 2)
    write_factor(target, 5)
    watching.wait_for("started", 3)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(PATIENCE_SECONDS) == 0


def test_directories_that_are_replaced_or_come_to_be_are_watched(watching: Watching) -> None:
    source = watching.source
    watching.wait_for("started")
    include, other = source.parent / "include", source.parent.parent / "other"
    include.mkdir()
    write_factor(include / "foo.h", 4)
    source.write_text(
        '#if __has_include("late/foo.h")\n#include "late/foo.h"\n#else\n'
        '#include "include/foo.h"\n#endif\nextern "C" int factor() { return FACTOR; }\n'
    )
    watching.wait_for("started", 2)
    other.mkdir()
    write_factor(other / "foo.h", 5)
    include.rename(source.parent.parent / "old")
    other.rename(include)
    watching.wait_for("started", 3)
    write_factor(include / "foo.h", 6)
    watching.wait_for("started", 4)
    shutil.rmtree(include)
    watching.wait_for("building 'plain' failed")
    include.mkdir()
    write_factor(include / "foo.h", 7)
    watching.wait_for("started", 5)
    write_factor(include / "foo.h", 8)
    watching.wait_for("started", 6)
    (source.parent / "late").mkdir()
    write_factor(source.parent / "late" / "foo.h", 9)
    watching.wait_for("started", 7)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(PATIENCE_SECONDS) == 0


def test_a_command_that_ends_is_said(tmp_path: Path) -> None:
    made = Watching(tmp_path, sys.executable, "-c", "raise SystemExit(3)")
    try:
        made.wait_for("ended with exit code 3")
    finally:
        made.process.send_signal(signal.SIGINT)
        assert made.process.wait(PATIENCE_SECONDS) == 0


def failing(*errors: Exception) -> Watch:
    """One whose builds end with these errors, one after the other."""
    loader = MagicMock(spec=Loader, ensure=MagicMock(side_effect=errors))
    loader.look_up.side_effect = errors[0]
    return Watch(loader, Request("k", (Path("/x/out/k.cu"),)), Child([]))


def test_an_error_is_said_once_wherever_its_log_is(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        f"k.cu:1: error: {what}\ncommand: nvcc -DTORCH_EXTENSION_NAME=k_{number:012x} k.cu\n"
        f"whole log: /logs/k-{number}.log"
        for number, what in enumerate(["no", "no", "neither"])
    ]
    watch = failing(*map(CompileError, texts))
    for _ in texts:
        watch.build()
    said = capsys.readouterr().err
    assert [said.count(f"k-{number}.log") for number in range(3)] == [1, 0, 1]


def test_real_errors_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_plain(tmp_path / "source")
    text = source.read_text()
    watch = Watch(new_loader(tmp_path / "cache"), Request("plain", (source,)), Child([]))
    does_not_load = "void absent();\nstatic struct A { A() { absent(); } } a;\n"
    for added, said in (
        ("int f( {\n", "building 'plain' failed"),
        (does_not_load, "does not load"),
    ):
        source.write_text(f"{text}{added}")
        for count in (1, 0):
            watch.build()
            assert capsys.readouterr().err.count(said) == count


def test_only_what_a_failed_build_lacks_starts_another(capsys: pytest.CaptureFixture[str]) -> None:
    """Not what the watching itself, or anything else, writes there."""
    watch = failing(
        CompileError(
            "building 'k' failed: nvcc k.cu (exit code 2).\n"
            "/x/out/k.cu:2: fatal error: values.def: No such file or directory\n"
            "     2 | float* out = log;\nwhole log: /logs/k-1.log"
        ),
        CompileError('/x/k.cu:1: error: cannot open source file "table.inc.txt"'),
        FirstLoadError("k: libmine.so: cannot open shared object file: No such file or directory"),
    )
    assert not watch._matters("/x/values.def")
    watch.build()
    touched = ("values.def", "out", "log", "k-1.log", "def", "other.def", "more.values.def", "k.cu")
    assert [n for n in touched if watch._matters(f"/x/{n}")] == ["values.def", "k.cu"]
    watch.build()
    assert watch._matters("/x/table.inc.txt")
    watch.build()
    assert watch._matters("/x/libmine.so")


def test_a_command_that_cannot_be_started(run: Run, tmp_path: Path) -> None:
    done = run("watch", write_plain(tmp_path / "source"), "--", tmp_path / "absent")
    assert done.code == 1
    absent = str(tmp_path / "absent")
    assert f"error: watch: {absent!r} cannot be started: No such file or directory. " in done.err
