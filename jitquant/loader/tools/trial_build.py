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
from pathlib import Path

from ..compile.commands import compiler_environment, linker_flags, make_units
from ..diagnostics import compile_error
from ..errors import LoaderError
from ..machine.processes import Command, default_jobs, run_side_by_side
from ..machine.scratch import scratch
from ..machine.torch_install import torch_install
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
_LOAD = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).jitquant_trial())"
_SECONDS = 120.0
_NAME = "jitquant_trial"


def try_build(plan_of: Callable[[Request], Plan]) -> float:
    """Compile, link, load and call a small kernel. Leaves no files behind. Returns the seconds.

    Raises:
        ValueError: a setting is not valid.
        LoaderError, OSError: builds do not work.
    """
    started = time.monotonic()
    with scratch("trial") as directory:
        sources = (directory / "trial.cu", directory / "trial.cpp")
        for source, text in zip(sources, (_KERNEL, _BINDING), strict=True):
            source.write_text(text)
        library = _compile_and_link(plan_of(Request(_NAME, sources)), directory)
        argv = [sys.executable, "-I", "-S", "-c", _LOAD, str(library)]
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LoaderError(
                f"the library was built and does not load within {_SECONDS:.0f} s"
            ) from error
        if done.returncode != 0 or done.stdout.strip() != str(_ANSWER):
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise LoaderError(f"the library was built but does not load: {last}")
    return time.monotonic() - started


def _compile_and_link(plan: Plan, directory: Path) -> Path:
    torch = torch_install()
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
        library.name,
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
                failed = item.command[:2]
                raise compile_error("a trial", failed, item.returncode, item.text, directory)
    return library
