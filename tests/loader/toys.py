"""Small sources that the loader's tests compile, and processes that use the loader.

A toy's binding registers its launcher for the CPU and does its arithmetic on the host, so that
the result shows which version of the code ran, without a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from jitquant.loader import Loader
from jitquant.loader.errors import NvccNotFoundError
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import find_nvcc

ROOT = Path(__file__).resolve().parents[2]

KERNEL = """
#include "{header}"
__global__ void multiply(float* x, int n) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= FACTOR;
}}
int {symbol}() {{ return FACTOR; }}
void {symbol}_launch(float* x, int n, cudaStream_t stream) {{
  multiply<<<(n + 255) / 256, 256, 0, stream>>>(x, n);
}}
"""

# The C functions of the stable ABI compile in a third of the time that its C++ takes.
BINDING = """
#include <torch/csrc/stable/c/shim.h>
#include <cstring>
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
int {symbol}();
static void scale(StableIValue* stack, uint64_t, uint64_t) {{
  const auto x = reinterpret_cast<AtenTensorHandle>(stack[0]);
  double s;
  std::memcpy(&s, &stack[1], sizeof s);
  AtenTensorHandle y;
  void* data;
  int64_t n;
  aoti_torch_clone(x, &y);
  aoti_torch_get_data_ptr(y, &data);
  aoti_torch_get_numel(y, &n);
  float* const values = static_cast<float*>(data);
  for (int64_t i = 0; i < n; ++i) values[i] *= static_cast<float>(s) * {symbol}();
  aoti_torch_delete_tensor_object(x);
  stack[0] = reinterpret_cast<StableIValue>(y);
}}
static const struct Library {{
  TorchLibraryHandle defined, cpu;
  Library() {{
    const char* const name = TEXT(TORCH_EXTENSION_NAME);
    aoti_torch_library_init_def(name, __FILE__, __LINE__, &defined);
    aoti_torch_library_def(defined, "scale(Tensor x, float s) -> Tensor");
    aoti_torch_library_init_impl(name, "CPU", __FILE__, __LINE__, &cpu);
    aoti_torch_library_impl(cpu, "scale", &scale);
  }}
  ~Library() {{
    aoti_torch_delete_library_object(cpu);
    aoti_torch_delete_library_object(defined);
  }}
}} library;
"""

#: A C++ source without any CUDA, which compiles in a fifth of the time: for what does not
#: depend on nvcc. It registers nothing and exports two C functions.
PLAIN = """
#include "{header}"
extern "C" int factor() {{ return FACTOR; }}
"""


def write_toy(directory: Path, factor: int = 3, stem: str = "toy") -> Path:
    """A kernel, its binding and its header in ``directory``; returns the ``.cu``."""
    (directory / "bindings").mkdir(parents=True, exist_ok=True)
    source = directory / f"{stem}.cu"
    names = {"header": f"{stem}.cuh", "symbol": f"{stem}_factor"}
    source.write_text(KERNEL.format(**names))
    (directory / "bindings" / f"{stem}.cpp").write_text(BINDING.format(**names))
    write_factor(directory / f"{stem}.cuh", factor)
    return source


def write_plain(directory: Path, factor: int = 3, stem: str = "plain") -> Path:
    """A C++ source and its header in ``directory``; returns the ``.cpp``."""
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / f"{stem}.cpp"
    source.write_text(PLAIN.format(header=f"{stem}.h"))
    write_factor(directory / f"{stem}.h", factor)
    return source


def write_factor(header: Path, factor: int) -> None:
    """(Re)write a toy's header."""
    header.write_text(f"#define FACTOR {factor}\n")


def entries(cache: Path) -> list[Path]:
    """The published entries of a cache."""
    return sorted(path.parent for path in cache.glob("v1/entries/*/*/entry.json"))


def litter(cache: Path) -> list[str]:
    """What is left in a cache of builds in progress."""
    left = [path.name for path in cache.glob("v1/staging/*")]
    return left + [path.name for path in cache.glob("v1/locks/*.owner")]


def forget_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what the person who runs the tests has set for the loader."""
    for variable in list(os.environ):
        if variable == "TORCH_CUDA_ARCH_LIST" or variable.startswith("JITQUANT_"):
            monkeypatch.delenv(variable)


def nvcc_or_reason() -> str | None:
    """Why kernels cannot be compiled here, or ``None`` if they can."""
    try:
        find_nvcc(Memo())
    except NvccNotFoundError as error:
        return f"no nvcc: {str(error).splitlines()[0]}"
    return None


def new_loader(cache: Path, **options: object) -> Loader:
    """A loader of its own, that sees no GPU unless told otherwise."""
    options.setdefault("native", lambda: ())
    return Loader(cache_dir=cache, **options)  # type: ignore[arg-type]


def python(code: str, cache: Path, **env: str) -> subprocess.Popen[str]:
    """A process that runs ``code`` against ``cache``."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JITQUANT_CACHE_DIR": str(cache),
            **env,
        },
    )


#: How long anything may take before a test says that it does not happen, on any machine.
PATIENCE_SECONDS = 300.0


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """stdout and stderr of a process that has to succeed."""
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def wait_for(condition: Callable[[], object]) -> None:
    """Return once ``condition`` is true; an `AssertionError` if it does not come to be."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not so within {PATIENCE_SECONDS} s")


def fork(work: Callable[[], bool], output: Path) -> int:
    """A forked process that does ``work`` and ends with status 0 if that is true; its pid.

    It has torch in memory, which a new interpreter needs seconds for. ``output`` gets what it
    prints.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, 1)
            os.dup2(target, 2)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            status = 0 if work() else 2
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return pid


def copy_cache(source: Path, target: Path) -> Path:
    """A private copy of a cache that a fixture has filled."""
    shutil.copytree(source, target)
    target.chmod(0o700)
    return target
