"""The command line as a whole: both ways in, errors, and what it does without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jitquant
from jitquant.cli import main
from jitquant.cli.app import app
from jitquant.loader import CacheError

from .conftest import Run

ROOT = Path(jitquant.__file__).resolve().parents[1]


def test_module_and_script_are_the_same_command_and_do_not_import_torch(tmp_path: Path) -> None:
    script = tmp_path / "jitquant"
    script.write_text(
        "import sys\nfrom jitquant.cli import main\ncode = main()\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JITQUANT_CACHE_DIR": str(tmp_path / "c"),
    }
    for start in ([str(script)], ["-X", "dev", "-m", "jitquant"]):
        done = subprocess.run(
            [sys.executable, *start, "cache", "path", "--json"],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        assert json.loads(done.stdout) == {"path": str(tmp_path / "c"), "exists": False}


def test_public_names_are_there_for_a_program_that_is_called_as_the_command_is() -> None:
    code = (
        "import sys; sys.argv[0] = 'jitquant'; import jitquant; assert 'torch' not in sys.modules\n"
        "assert all(getattr(jitquant, name) is not None for name in jitquant.__all__)\n"
        "import torch; assert torch.ops.jitquant.quantize_nvfp4.default"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@pytest.mark.parametrize(
    "command", sorted(c.name or c.callback.__name__ for c in app.registered_commands)
)  # type: ignore[union-attr]
def test_each_command_explains_itself(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert len(done.out.splitlines()) > 5


def test_a_wrong_command_line_is_exit_code_2(run: Run) -> None:
    assert run("no-such-command").code == 2
    assert run("cache", "path", "--no-such-option").code == 2


def test_what_the_loader_raises_is_told_without_a_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Path:
        raise CacheError("cache directory /x: [red]no[/red]. Set another.")

    monkeypatch.setattr("jitquant.cli.cache.default_root", refuse)
    done = run("cache", "path")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: cache directory /x: [red]no[/red]. Set another.\n"
    done = run("cache", "path", "--json")
    assert done.code == 1
    assert done.json["error"] == "CacheError"


def test_json_of_another_program_is_not_asked_for(run: Run, tmp_path: Path) -> None:
    done = run("record", "-o", tmp_path / "used.json", "--", tmp_path / "absent", "--json")
    assert (done.code, done.out) == (1, "")
    assert "cannot be started" in done.err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_json_that_cannot_be_written_is_one_line_on_stderr(tmp_path: Path, unbuffered: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JITQUANT_CACHE_DIR": str(tmp_path),
        "PYTHONUNBUFFERED": unbuffered,
    }
    for words, said in (
        (["cache", "path"], "No space left on device"),
        (["new", "no-dash"], "expected a C identifier"),
    ):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "jitquant", *words, "--json"],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                env=environment,
            )
        assert done.returncode == 1
        assert said in done.stderr
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


def test_signals_that_end_a_command_are_left_as_they_were(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    during: list[object] = []

    def look() -> Path:
        during.extend(map(signal.getsignal, numbers))
        return Path("/x")

    numbers = (signal.SIGTERM, signal.SIGHUP)
    monkeypatch.setattr("jitquant.cli.cache.default_root", look)
    ours = (signal.SIG_DFL, signal.SIG_IGN)
    before = [signal.signal(n, h) for n, h in zip(numbers, ours, strict=True)]
    try:
        assert run("cache", "path").code == 0
        assert list(map(signal.getsignal, numbers)) == [*ours]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert during[0] is not signal.SIG_DFL
    assert during[1] is signal.SIG_IGN  # as under nohup


def test_a_mistake_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise KeyError("x")

    monkeypatch.setattr("jitquant.cli.cache.default_root", fail)
    with pytest.raises(KeyError):
        main(["cache", "path"])


def test_version() -> None:
    code = (
        "import sys; sys.argv = ['jitquant', '--version']; from jitquant.cli import main\n"
        "assert main() == 0 and 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == f"jitquant {jitquant.__version__}\n"
