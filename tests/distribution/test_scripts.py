"""The commands in scripts/: their help, their refusals, and the virtual environment they keep."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "JITQUANT_PYTHON": sys.executable, "COLUMNS": "120"}


def _run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT
    )


def _needs(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("name", ["test", "demo", "bench", "gpu-suite"])
def test_help(name: str, tmp_path: Path) -> None:
    _needs("typer", "rich")
    done = _run(str(ROOT / "scripts" / name), "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"./scripts/{name}" in done.stdout


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["-k", "row"], "-k row"),
        (["--all", "tests/ops"], "-m  tests/ops"),
        (["--gpu", "-x"], f"-m  {ROOT}/tests/gpu -x"),
    ],
)
def test_what_pytest_is_given(given: list[str], passed: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pytest ]; then echo "pytest: $*"; exit; fi\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    done = _run(str(ROOT / "scripts" / "test"), "--no-lint", "--python", str(python), *given)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("pytest: "))
    assert line.endswith(f" {passed}")


def test_one_command_writes_what_the_summary_is_made_from(tmp_path: Path) -> None:
    """All sections but those of examples and of a second GPU."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = harness.bench ]; then echo "bench: $*"; exit; fi\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    python.chmod(0o755)
    command = [str(ROOT / "scripts" / "gpu-suite"), "--out", str(tmp_path / "out")]
    steps = ("bench", "products", "sweep", "host", "loader")
    done = _run("env", f"JITQUANT_PYTHON={python}", *command, *steps)
    assert done.returncode == 0, done.stderr
    runs = re.findall(r"^bench: -m harness.bench (.*) --out", done.stdout, re.MULTILINE)
    first = ["--ops all", "--ops fp8", "--ops ragged", "--ops rmsnorm"]
    assert runs[:4] == first
    assert [run.split()[0] for run in runs[4:]] == [
        *("linear", "experts", "layers", "model", "sweep", "host", "loader")
    ]


RACE = """\
========= Error: Race reported between Read access at jitquant::load_shared_4(unsigned int)+0x1
=========     and Write access at void jitquant::copy_words<(int)4>(unsigned int, bool)+0x1
=========     and Write access at void jitquant::copy_words<(int)4>(unsigned int, bool)+0x2
========= Error: Race reported between Write access at void jitquant::copy_words<(int)2>()+0x1
=========     and Read access at jitquant::load_shared_16(unsigned int)+0x2
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("old", "new", "known"),
    [
        ("", "", True),
        ("displayed (2", "displayed (3", False),  # one more than the log shows
        ("copy_words<(int)4>(unsigned int, bool)+0x2", "copy_tile()+0x2", False),
        ("load_shared_4", "load_4", False),
        ("load_shared_16", "load_16", False),
        ("copy_words<(int)2>()", "store()", False),
        ("Read", "Write", False),
        (RACE, "all cases ran", False),
    ],
)
def test_only_known_races_are_accepted(tmp_path: Path, old: str, new: str, known: bool) -> None:
    log = tmp_path / "racecheck.log"
    log.write_text(RACE.replace(old, new) if old else RACE)
    function = "sed -n '/^known_races() {/,/^}/p' \"$1\""
    code = f'eval "$({function})"; known_races "$2"'
    done = _run("bash", "-c", code, "bash", str(ROOT / "scripts" / "gpu-suite"), str(log))
    assert (done.returncode == 0) == known


@pytest.mark.slow
def test_the_demo_names_what_it_cannot_use(tmp_path: Path) -> None:
    _needs("typer", "rich", "safetensors")
    demo = str(ROOT / "scripts" / "demo")
    done = _run(demo, "--weights", "nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "--weights nowhere" in done.stdout
    done = _run(demo, "--device", "abacus", cwd=tmp_path)
    assert done.returncode == 1
    assert "--device abacus" in done.stdout


@pytest.mark.slow
def test_the_demo_shows_what_formats_cost(tmp_path: Path) -> None:
    _needs("typer", "rich", "safetensors", "matplotlib")
    few = ("--device", "cpu", "--windows", "8")
    done = _run(str(ROOT / "scripts" / "demo"), *few, "--out", "shown", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "shown" / "accuracy.json").read_text())
    rows = {row["format"]: row for row in record["rows"]}
    bits = {name: row["bits_per_byte"] for name, row in rows.items()}
    assert bits["bf16"] < 2.2
    assert bits["fp8_block"] < 1.005 * bits["bf16"]
    assert bits["nvfp4a16_gptq"] < bits["nvfp4"] < 1.03 * bits["bf16"]
    assert rows["nvfp4"]["size"] < 0.35 * rows["bf16"]["size"]
    assert all(len(row["text"]) == 60 for row in rows.values())
    assert (tmp_path / "shown" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_benchmark_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    _needs("typer", "rich")
    done = _run(str(ROOT / "scripts" / "bench"), cwd=tmp_path)
    assert done.returncode == 2
    assert "No GPU" in done.stdout


class TestEnvironment:
    """A checkout at a path with a space, with the shell code and nothing else."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        root = tmp_path / "a checkout"
        shutil.copytree(ROOT / "scripts" / "lib", root / "scripts" / "lib")
        return root

    @staticmethod
    def shell(root: Path, code: str) -> subprocess.CompletedProcess[str]:
        text = f'set -euo pipefail; source "$1/scripts/lib/env.sh"; {code}'
        return _run("bash", "-c", text, "bash", str(root))

    def test_the_root_is_found(self, checkout: Path) -> None:
        assert self.shell(checkout, 'echo "$ROOT"').stdout.strip() == str(checkout)

    def test_no_environment_is_not_usable(self, checkout: Path) -> None:
        assert self.shell(checkout, "venv_usable").returncode == 1

    @pytest.mark.slow
    def test_a_broken_environment_is_made_anew(self, checkout: Path) -> None:
        (checkout / ".venv" / "bin").mkdir(parents=True)
        (checkout / ".venv" / "pyvenv.cfg").touch()
        (checkout / ".venv" / "bin" / "python").symlink_to("gone")
        done = self.shell(checkout, "venv_usable || make_venv; venv_usable && echo usable")
        assert "recreating it" in done.stderr
        assert done.stdout.strip() == "usable", done.stderr

        moved = checkout.with_name("moved")
        checkout.rename(moved)
        assert self.shell(moved, "venv_usable").returncode == 1

    def test_a_given_interpreter_is_used_as_it_is(self, checkout: Path) -> None:
        done = self.shell(checkout, f'prepare_python demo "{sys.executable}"; echo "$PYTHON"')
        assert done.stdout.strip() == sys.executable
        assert not (checkout / ".venv").exists()
        assert self.shell(checkout, "prepare_python demo no-such-python").returncode == 1

    def test_missing_requirements_are_named(self, checkout: Path) -> None:
        (checkout / "pyproject.toml").write_text(
            '[project]\ndependencies = ["pytest>=1", "no-such-package>=1"]\n'
            '[project.optional-dependencies]\nextra = ["another-missing.one"]\n'
        )
        done = self.shell(checkout, f'PYTHON="{sys.executable}"; missing_requirements extra')
        assert done.stdout.split() == ["no-such-package", "another-missing.one"]
