"""How long the loader takes: cold, all at once, warm; and a plain ``load`` of the same kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch

from jitquant.loader.core import default_kernels_dir
from jitquant.loader.toolchain import Memo, find_nvcc

Row = tuple[str, float | None, str]

MODULE = "fused_amax_quantize"

COLD = f"""
import time, torch
begin = time.perf_counter()
from jitquant.loader import get_cuda_module
get_cuda_module("{MODULE}", ["{MODULE}.cu"])
print("seconds", time.perf_counter() - begin)
"""

ALL_COLD = """
import time, torch
begin = time.perf_counter()
import jitquant
count = len(jitquant.warmup())
print("remark", count, "modules")
print("seconds", time.perf_counter() - begin)
"""

PLAIN = """
import os, sys, time, torch
from torch.utils.cpp_extension import load
begin = time.perf_counter()
load("plain_extension", [sys.argv[1]], extra_include_paths=[sys.argv[2]],
     extra_cuda_cflags=["-O3", "-lineinfo"], build_directory=os.path.dirname(sys.argv[1]))
print("seconds", time.perf_counter() - begin)
"""

SOURCE = """
// The kernels of one module as a usual torch extension has them: in a .cu that includes torch.
#include <torch/extension.h>
#include "{source}"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{
  m.def("bytes_of", [](const torch::Tensor& x) {{ return x.nbytes(); }});
}}
"""


class _FailedError(Exception):
    pass


def _python(code: str, environment: dict[str, str], *arguments: str) -> tuple[float, str]:
    """Seconds and remark that ``code`` prints, run in a new process."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, remark = None, ""
    for line in result.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word == "seconds":
            seconds = float(rest)
        elif word == "remark":
            remark = rest
    if result.returncode or seconds is None:
        lines = (result.stderr.strip() or "no output").splitlines()
        told = [line for line in lines if ": error: " in line or ": cannot find " in line]
        raise _FailedError((told[0] if told else lines[-1])[:200])
    return seconds, remark


def _row(what: str, measure: Callable[[], tuple[float, str]]) -> Row:
    try:
        seconds, remark = measure()
    except _FailedError as failure:
        return what, None, f"failed: {failure}"
    return what, seconds, remark


def measure(report: Callable[[Row], None], *, compare: bool = True) -> dict[str, float | None]:
    """Runs everything, each in processes and caches of its own, and returns the seconds.

    Args:
        report: called with each row as it is done.
        compare: whether the plain load is measured, which takes the longest.
    """
    results: dict[str, float | None] = {}

    def done(key: str, row: Row) -> None:
        results[key] = row[1]
        report(row)

    with tempfile.TemporaryDirectory(prefix="jitquant-bench-") as scratch:
        environment = {**os.environ, "JITQUANT_QUIET": "1"}
        # As where the package is installed: a module is compiled to bytecode once, not each time.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(Path(scratch, "bytecode"))
        environment["JITQUANT_CACHE_DIR"] = str(Path(scratch, "one"))
        done("cold", _row(f"{MODULE}, cold", lambda: _python(COLD, environment)))
        if results["cold"] is not None:
            again = [_row("", lambda: _python(COLD, environment))[1] for _ in range(5)]
            known = sorted(seconds for seconds in again if seconds is not None)
            done(
                "warm",
                (
                    f"{MODULE}, warm, in a new process",
                    known[len(known) // 2] if known else None,
                    "beyond importing torch; median of 5",
                ),
            )
        environment["JITQUANT_CACHE_DIR"] = str(Path(scratch, "all"))
        done("all_cold", _row("all modules, cold", lambda: _python(ALL_COLD, environment)))
        if compare:
            done("plain", _plain(Path(scratch, "plain"), environment))
    return results


def _plain(directory: Path, environment: dict[str, str]) -> Row:
    what = f"{MODULE}'s kernels behind torch/extension.h, plain load, cold"
    if torch.version.cuda is None:
        return what, None, "this torch is a CPU build, which cannot load a .cu with torch headers"
    directory.mkdir()
    source = directory / "plain_extension.cu"
    kernels = default_kernels_dir()
    source.write_text(SOURCE.format(source=kernels / f"{MODULE}.cu"), encoding="utf-8")
    # torch takes the toolkit to be around the first nvcc on PATH, which may be a wrapper script.
    toolkit = Path(find_nvcc(Memo())[0].path).resolve().parent.parent
    environment = {"CUDA_HOME": str(toolkit), **environment}
    if not torch.cuda.is_available():
        environment.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    return _row(what, lambda: _python(PLAIN, environment, str(source), str(kernels / "include")))
