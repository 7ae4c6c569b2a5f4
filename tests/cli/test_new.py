"""``jitquant new``: what it writes works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jitquant
from jitquant.loader import NvrtcNotFoundError

from .conftest import Run

ROOT = Path(jitquant.__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_new_kernel_passes_its_own_tests(run: Run, tmp_path: Path) -> None:
    done = run("new", "halve", "--dir", tmp_path / "mine")
    assert done.code == 0
    files = sorted((tmp_path / "mine").iterdir())
    assert [path.name for path in files] == ["halve.cu", "halve.py", "test_halve.py"]
    assert "NAME" not in "".join(path.read_text() for path in files)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JITQUANT_CACHE_DIR": str(tmp_path / "c")}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-q", "--no-header"],
        cwd=tmp_path / "mine",
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert "there is no CUDA device" in tested.stdout
    passed, skipped = map(int, re.findall(r"(\d+) (?:passed|skipped)", tested.stdout)[:2])
    assert (passed + skipped, passed >= 5) == (11, True)


@pytest.mark.parametrize("name", ["halve", "zeta_4", "Twice"])
@pytest.mark.parametrize("command", ["check", "format --check"])
def test_it_is_in_order(run: Run, tmp_path: Path, name: str, command: str) -> None:
    pytest.importorskip("ruff")
    run("new", name, "--dir", tmp_path)
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", *command.split(), "--isolated", "--line-length=100"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert linted.returncode == 0, linted.stdout


def test_its_kernel_compiles_for_trying_too(run: Run, tmp_path: Path) -> None:
    from loader.toys import new_loader

    run("new", "halve", "--dir", tmp_path)
    try:
        module = new_loader(tmp_path / "cache").get_device_module("halve", [tmp_path / "halve.cu"])
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))
    assert module.kernel("halve_kernel<float>").parameters[1].kind == "f32"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_nothing_is_skipped(run: Run, tmp_path: Path) -> None:
    run("new", "halve", "--dir", tmp_path)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--no-header"],
        cwd=tmp_path,
        env={
            **{k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"},
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "11 passed" in tested.stdout, tested.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../../x", "expected a C identifier"),
        ("no-dash", "expected a C identifier"),
        ("class", "means something in Python already"),
        ("json", "means something in Python already"),
        ("torch", "there is a Python module 'torch' already ("),
    ],
)
def test_names_that_cannot_be(run: Run, tmp_path: Path, name: str, said: str) -> None:
    done = run("new", name, "--dir", tmp_path / "mine")
    assert done.code == 1
    assert said in done.err
    assert not (tmp_path / "mine").exists()


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_halve.py").write_text("mine")
    done = run("new", "halve", "--dir", tmp_path)
    assert done.code == 1
    assert "test_halve.py exists already" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["test_halve.py"]


def test_twice_names_the_file_that_is_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not an installed module, as which the file is found from its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("new", "halve").code == 0
    done = run("new", "halve")
    assert done.code == 1
    assert "halve.cu exists already; choose another name" in done.err


def test_json_lists_the_files(run: Run, tmp_path: Path) -> None:
    done = run("new", "halve", "--dir", tmp_path, "--json")
    assert done.json == {
        "files": [str(tmp_path / name) for name in ("halve.cu", "halve.py", "test_halve.py")]
    }
