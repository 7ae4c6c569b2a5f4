"""``pip install '.[nvcc]'``: a compiler from PyPI, in an environment that has no other."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
#include "jitquant/export.h"
__global__ void fill(float* out, int n) {
  if (threadIdx.x < n) out[threadIdx.x] = 1.0f;
}
cudaError_t launch_fill(float* out, int n, cudaStream_t stream) {
  fill<<<1, 32, 0, stream>>>(out, n);
  return cudaGetLastError();
}
JITQUANT_EXPORT(launch_fill, "fill(Tensor(a!) out, int n) -> ()")
"""
CODE = """
import json, subprocess, sys
from pathlib import Path
import torch
from jitquant.loader import get_cuda_module
from jitquant.loader.machine.toolchain import Memo, find_nvcc
nvcc, notes = find_nvcc(Memo())
module = get_cuda_module("fill", [Path(sys.argv[1])], archs="90a;100a;120a")
try:
    module.fill(torch.ones(1), 1)
    said = "nothing"
except RuntimeError as error:
    said = str(error)
needed = subprocess.run(["ldd", module.path], capture_output=True, text=True).stdout
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line]
print(json.dumps({"nvcc": nvcc.path, "version": nvcc.version, "origin": nvcc.origin,
                  "cudart": nvcc.cudart, "said": said, "needed": needed, "mapped": mapped}))
"""


def requirements(extra: str) -> list[str]:
    """What an extra of the project asks for."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(rf"^{extra} = \[(.*?)\]$", text, re.M | re.S)
    assert listed is not None
    return re.findall(r'"([^"]+)"', listed.group(1))


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pip whose dry run downloads metadata alone: 23.3 or newer."""
    directory = tmp_path_factory.mktemp("pip")
    install = ["install", "--quiet", "--no-deps", "--target", str(directory), "pip>=23.3"]
    done = run_pip([sys.executable, "-m", "pip"], *install)
    if done.returncode != 0:
        pytest.skip(f"no network, or no index: {done.stderr.strip()[-300:]}")
    return [sys.executable, str(directory / "pip")]


def run_pip(
    pip: list[str], *arguments: str, constraints: Path | str = os.devnull
) -> subprocess.CompletedProcess[str]:
    """Without the constraints that this machine or its user may have configured."""
    command = [*pip, "--disable-pip-version-check", *arguments]
    env = {**os.environ, "PIP_CONSTRAINT": str(constraints)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def resolve(pip: list[str], report: Path, *wanted: str) -> list[dict[str, Any]]:
    """The metadata of what pip would install.

    Raises:
        LookupError: it finds no such set; what pip says.
    """
    dry = ["install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    done = run_pip(pip, *dry, "--report", str(report), *wanted)
    if done.returncode != 0:
        raise LookupError(done.stderr.strip())
    return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def toolkit_of_torch(found: list[dict[str, Any]]) -> str:
    """The release of cuda-toolkit that the torch in ``found`` pins."""
    (pinned,) = (
        re.search(r"==([\d.]+)", need)
        for item in found
        if item["name"] == "torch"
        for need in item["requires_dist"]
        if need.startswith("cuda-toolkit[")
    )
    assert pinned is not None
    return pinned[1]


def skip_if_the_index_lacks(pip: list[str], report: Path, torch: str, extras: list[str]) -> None:
    """Skip unless the index has torch, and our parts of its CUDA: each set without the other."""
    wanted = [f"torch=={torch}"]
    try:
        release = toolkit_of_torch(resolve(pip, report, *wanted))
        toolkit = [need for need in extras if need.startswith("cuda-toolkit[")]
        wanted = [f"{need.partition(']')[0]}]=={release}" for need in toolkit]
        resolve(pip, report, *wanted)
    except LookupError as error:
        said = str(error).splitlines()[-1]
        pytest.skip(f"the index does not have {' '.join(wanted)} for this Python: {said}")


@pytest.mark.slow
@pytest.mark.parametrize("torch", ["2.11.0", "2.15.0"])
def test_the_extras_take_the_cuda_of_torch(pip: list[str], tmp_path: Path, torch: str) -> None:
    """torch stays; every part is of the minor release of CUDA that it was built for.

    nvcc 13.0 with the nvvm of 13.5 fails in ptxas.
    """
    report = tmp_path / "report.json"
    extras = [*requirements("nvcc"), *requirements("nvrtc")]
    try:
        found = resolve(pip, report, f"torch=={torch}", *extras)
    except LookupError:
        skip_if_the_index_lacks(pip, report, torch, extras)
        raise
    versions = {item["name"]: item["version"] for item in found}
    assert versions["torch"].partition("+")[0] == torch
    built_for = toolkit_of_torch(found).rpartition(".")[0]
    parts = ("nvcc", "crt", "runtime", "nvrtc")
    names = [*(f"nvidia-cuda-{part}" for part in parts), "nvidia-nvvm"]
    assert {name: versions[name].rpartition(".")[0] for name in names} == dict.fromkeys(
        names, built_for
    )
    assert "nvidia-cuda-cccl" in versions


@pytest.mark.slow
def test_the_pins_agree_with_the_torch_that_is_pinned(pip: list[str]) -> None:
    """Of what is installed for the tests; a CPU build of torch pins no CUDA and agrees with all."""
    dry = ["install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    cuda = [need for need in requirements("test") if need.startswith("cuda-")]
    assert len(cuda) == 2
    wanted = ["torch", *requirements("nvcc"), *cuda]
    done = run_pip(pip, *dry, *wanted, constraints=ROOT / "constraints.txt")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the extra, and torch from the one of the tests."""
    directory = tmp_path_factory.mktemp("environment")
    python = directory / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    done = run_pip(pip, "install", "--quiet", *requirements("nvcc"))
    if done.returncode != 0:
        pytest.skip(f"pip cannot install the extra here: {done.stderr.strip()[-300:]}")
    (packages,) = (directory / "lib").glob("python*/site-packages")
    others = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (packages / "torch_from_elsewhere.pth").write_text("\n".join([str(ROOT), *others]) + "\n")
    return directory


def without_a_toolkit(command: list[str]) -> list[str]:
    """``command`` in a mount namespace where /usr/local/cuda is empty, if that can be had."""
    toolkit = Path("/usr/local/cuda").resolve()
    if not toolkit.is_dir():
        return command
    hide = f'mount -t tmpfs none "{toolkit}" && exec "$@"'
    hidden = ["unshare", "--mount", "sh", "-c", hide, "sh"]
    if shutil.which("unshare") is None:
        return command
    works = subprocess.run([*hidden, "true"], capture_output=True, check=False).returncode == 0
    return [*hidden, *command] if works else command


@pytest.mark.slow
@pytest.mark.parametrize("static", [True, False], ids=["as installed", "shared runtime only"])
def test_a_kernel_builds_and_loads(environment: Path, tmp_path: Path, static: bool) -> None:
    if not static:  # as the wheels of some releases are
        for library in environment.glob("lib/**/libcudart_static.a"):
            library.unlink()
    source = tmp_path / "fill.cu"
    source.write_text(KERNEL)
    dropped = ("CUDA_HOME", "CUDA_PATH", "CXX", "LD_LIBRARY_PATH", "PYTHONPATH")
    clean = {k: v for k, v in os.environ.items() if k not in dropped}
    clean |= {
        "PATH": "/usr/bin:/bin",
        "JITQUANT_CACHE_DIR": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    python = str(environment / "bin" / "python")
    command = without_a_toolkit([python, "-c", CODE, str(source)])
    done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert Path(found["nvcc"]).is_relative_to(environment.resolve())
    assert found["origin"] == "the PyPI wheels"
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["version"])  # ptxas is of the same release
    assert "out: expected a tensor on cuda" in found["said"]
    if not static:
        assert Path(found["cudart"]).name.startswith("libcudart.so.")
        (line,) = [line for line in found["needed"].splitlines() if "libcudart.so" in line]
        assert str(environment.resolve()) in line
        assert any(Path(path).is_relative_to(environment.resolve()) for path in found["mapped"])
