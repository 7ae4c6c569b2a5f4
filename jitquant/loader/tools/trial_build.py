"""Checks within a second or two that a build works.

Compiles a kernel and a binding with the commands of any build, links them, and loads and calls the
library, all in a temporary directory. Unlike a build this does not import torch into Python, which
would take longer than the rest: the compiler itself links the library, which is loaded only with
torch's C++ libraries.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..compile.commands import compiler_environment, linker_flags, make_units
from ..diagnostics import compile_error
from ..errors import LoaderError
from ..machine.processes import Command, default_jobs, run_side_by_side
from ..machine.scratch import scratch
from ..machine.torch_install import TorchInstall, torch_install
from ..request.plan import Plan, Request

_KERNEL = """\
__global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }
int jitquant_trial_kernel() { return reinterpret_cast<void*>(&add_one) != nullptr; }
"""
#: Of torch a light header and a function of its C interface; the bindings' own takes a second.
_BINDING = """\
#include <torch/csrc/inductor/aoti_torch/c/macros.h>
#include <vector>
extern "C" int32_t aoti_torch_device_type_cpu();
int jitquant_trial_kernel();
extern "C" int jitquant_trial() {
  return 41 + jitquant_trial_kernel() + aoti_torch_device_type_cpu();
}
"""
#: The device type of the CPU is 0.
_ANSWER = 42
#: Loads torch's libraries while the compilers run, then the library that is named on stdin.
_LOAD = """\
import ctypes, sys
ctypes.CDLL(sys.argv[1])
path = sys.stdin.readline().rstrip("\\n")
if path:
    print(ctypes.CDLL(path).jitquant_trial())
"""
_SECONDS = 120.0
_NAME = "jitquant_trial"


@dataclass(frozen=True)
class TrialBuild:
    """The result; ``error`` is ``None`` if builds work."""

    seconds: float
    error: LoaderError | OSError | None


def try_build(plan_of: Callable[[Request], Plan]) -> TrialBuild:
    """Compile, link, load and call a small kernel. Leaves no files behind.

    Raises:
        ValueError: a setting is not valid.
    """
    started = time.monotonic()
    error: LoaderError | OSError | None = None
    with scratch("trial") as directory:
        (directory / "trial.cu").write_text(_KERNEL)
        (directory / "trial.cpp").write_text(_BINDING)
        sources = (directory / "trial.cu", directory / "trial.cpp")
        try:
            _build_and_call(plan_of(Request(_NAME, sources)), directory)
        except (LoaderError, OSError) as caught:
            error = caught
    return TrialBuild(time.monotonic() - started, error)


def _build_and_call(plan: Plan, directory: Path) -> None:
    torch = torch_install()
    argv = [sys.executable, "-I", "-S", "-c", _LOAD, f"{torch.library_dir}/libtorch_cpu.so"]
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            library = _compile_and_link(plan, torch, directory)
            out, said = process.communicate(f"{library}\n", timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise LoaderError(
                f"the library was built and does not load within {_SECONDS:.0f} s"
            ) from error
        finally:
            process.kill()
    if process.returncode != 0 or out.strip() != str(_ANSWER):
        last = (said.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise LoaderError(f"the library was built but does not load: {last}")


def _compile_and_link(plan: Plan, torch: TorchInstall, directory: Path) -> Path:
    units = make_units(plan, _NAME, directory)
    library = directory / f"{_NAME}.so"
    link = Command(
        (
            *(plan.host.program, "-shared", "-o", library.name),
            *(f"o{index}.o" for index in range(len(units))),
            *(f"-L{torch.library_dir}", f"-Wl,-rpath,{torch.library_dir}"),
            *("-ltorch_cpu", "-lc10"),
            *linker_flags(plan, units),
        ),
        "linking",
    )
    for commands in ([unit.command for unit in units], [link]):
        finished = run_side_by_side(
            commands,
            slots=threading.BoundedSemaphore(max(2, default_jobs())),
            env=compiler_environment(),
            cwd=directory,
            on_tick=lambda labels: None,
        )
        for item in finished:
            if item.returncode != 0:
                raise compile_error("a trial", item.command, item.returncode, item.text, directory)
    return library
