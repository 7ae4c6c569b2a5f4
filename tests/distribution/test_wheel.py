"""The distributions: what is in them, and that a kernel compiles from the wheel, far away."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from jitquant.loader import NvccNotFoundError
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
from pathlib import Path
import jitquant
from jitquant.loader import Loader, reloads
assert not reloads()
module = jitquant.get_cuda_module("quantize_nvfp4", ["quantize_nvfp4.cu"])
assert {"default", "out"} <= set(module.quantize_nvfp4.overloads())
print(Path(jitquant.__file__).parent)
print(Loader().kernels_dir())
"""


def _run(*command: str, **keywords: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, check=False, **keywords
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def _built(kind: str, out: Path) -> Path:
    for tool in ("build", "hatchling", "pip"):
        # Asked of the metadata: looking for the module pip makes setuptools give up distutils.
        if not any(metadata.distributions(name=tool)):
            pytest.skip(f"{tool} is not installed")
    _run(
        *(sys.executable, "-m", "build", f"--{kind}", "--no-isolation"),
        *("--outdir", str(out), str(ROOT)),
        cwd=out,
    )
    (built,) = (path for path in out.iterdir() if path.suffix in (".whl", ".gz"))
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_source_distribution_has_what_its_tests_and_documents_need(tmp_path: Path) -> None:
    with tarfile.open(_built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("docs", "examples", "results", "scripts", "tests"):
        files = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".json", ".md", ".png", ".py", ".safetensors")
        }
        files = {name for name in files if "/out/" not in name}  # ignored: what an example wrote
        assert files <= names, sorted(files - names)


def test_the_wheel_has_the_kernels_the_license_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        described = next(name for name in names if name.endswith("/METADATA"))
        text = archive.read(described).decode()
        commands = archive.read(described.replace("METADATA", "entry_points.txt")).decode()
    assert "jitquant = jitquant.cli:main" in commands
    plugins = commands.partition("[vllm.general_plugins]\n")[2].splitlines()
    assert plugins[0] == "jitquant = jitquant.integrations.vllm:register"
    kernels = {
        f"jitquant/kernels_cu/{path.relative_to(ROOT / 'kernels_cu').as_posix()}"
        for path in (ROOT / "kernels_cu").rglob("*")
        if path.suffix in (".cu", ".cuh", ".cpp", ".h")
    }
    assert any("/include/jitquant/" in name for name in kernels)
    assert any("/bindings/" in name for name in kernels)
    assert kernels <= names
    assert "jitquant/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    inside = {name for name in names if name.startswith("jitquant/")}
    assert {Path(name).suffix for name in inside} == {".py", ".typed", ".cu", ".cuh", ".cpp", ".h"}
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"jitquant"}
    for extra in ("cupy", "inspect", "nvcc", "nvrtc", "test", "bench", "demo"):
        assert f"Provides-Extra: {extra}\n" in text


@pytest.mark.slow
def test_an_installed_wheel_compiles_a_kernel(wheel: Path, tmp_path: Path) -> None:
    try:
        find_nvcc(Memo())
    except NvccNotFoundError as error:
        pytest.skip(f"no nvcc: {error}")
    site, away = tmp_path / "site", tmp_path / "away"
    away.mkdir()
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--disable-pip-version-check", "--target", str(site), str(wheel)),
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "JITQUANT_CACHE_DIR": str(tmp_path / "cache"),
    }
    package, kernels = _run(sys.executable, "-c", COMPILE, cwd=away, env=environment).splitlines()
    assert Path(package) == site / "jitquant"
    assert Path(kernels) == site / "jitquant" / "kernels_cu"
    assert list((tmp_path / "cache").rglob("*.so"))


def test_importing_does_no_work(tmp_path: Path) -> None:
    code = (
        "import sys, jitquant\n"
        "heavy = {'matplotlib', 'rich', 'typer', 'transformers', 'numpy.f2py', 'cupy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import torch\n"
        "print(torch.cuda.is_initialized())\n"
    )
    cache = tmp_path / "cache"
    environment = {**os.environ, "JITQUANT_CACHE_DIR": str(cache)}
    assert _run(sys.executable, "-c", code, env=environment) == "[]\nFalse\n"
    assert not cache.exists()
