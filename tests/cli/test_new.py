"""``jitquant new``: what it writes works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import jitquant
from jitquant.cli.new import _OF_MODULES, _meant, files_of
from jitquant.loader import NvrtcNotFoundError
from jitquant.loader.module import CudaModule

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
        ("float", "means something in Python already"),
        ("torch", "there is a Python module 'torch' already ("),
    ],
)
def test_names_that_cannot_be(run: Run, tmp_path: Path, name: str, said: str) -> None:
    done = run("new", name, "--dir", tmp_path / "mine")
    assert done.code == 1
    assert said in done.err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("module", "SOURCE", "DTYPES", "needs_gpu", "x", "s", "dtype", "_"),
        *("NvccNotFoundError", "test_the_reference_by_hand", "typed"),
        *("prim", "name", "higher_order", "load_library"),
        *("key", "archs", "path", "library", "extension_name", "_functions"),
    ],
)
def test_names_that_mean_something_else_there(run: Run, tmp_path: Path, name: str) -> None:
    done = run("new", name, "--dir", tmp_path / "mine")
    assert done.code == 1
    assert f"name: {name!r} means something else in the generated files" in done.err
    assert {"reference", "samples"} < _meant()  # which are modules of these tests, too
    assert not (tmp_path / "mine").exists()


def test_all_attributes_of_a_module_are_among_them(tmp_path: Path) -> None:
    module = CudaModule(
        "n", extension_name="n", key="0", archs=(), path=tmp_path, functions={}, library=MagicMock()
    )
    assert {n for n in vars(module) if not n.startswith("__")} == set(_OF_MODULES)


def test_other_names_are_put_as_they_are() -> None:
    for name in ("NAME", "MY_NAME", "MEMBERS", "match", "double"):
        test = files_of(name)[f"test_{name}.py"]
        (found,) = re.findall(rf"^from {name} import (.*)$", test, re.MULTILINE)
        assert sorted(found.split(", ")) == sorted([name, "module", "reference"])


def test_a_folder_of_that_name_is_no_module(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halve").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run("new", "halve", "--dir", tmp_path / "mine").code == 0


def test_the_commands_that_it_prints_can_be_pasted(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "my kernels"
    lines = run("new", "halve", "--dir", mine).out.splitlines()
    pytest_words = ["python", "-m", "pytest", str(mine / "test_halve.py")]
    watch_words = ["jitquant", "watch", str(mine / "halve.cu"), "--", *pytest_words]
    assert [shlex.split(line)[1:] for line in lines[-2:]] == [pytest_words, watch_words]


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
