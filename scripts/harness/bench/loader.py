"""How long the loader takes: cold, warm, per call; and torch's own ways beside it.

Every figure is of new processes and caches. What needs a GPU build of torch says so where there is
none; the rest is measured on any machine with a compiler.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from jitquant._warmup import first_calls
from jitquant.loader.core import default_kernels_dir
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import find_nvcc
from jitquant.loader.request.sources import kernel_files

Row = tuple[str, float | None, str]

MODULE = "fused_amax_quantize"

#: The processor's time, which other programs on the machine change less than the seconds.
COMPILERS = """
import resource
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("remark", f"{used.ru_utime + used.ru_stime:.1f} s of the compilers")
"""

COLD = f"""
import time, torch
begin = time.perf_counter()
from jitquant.loader import get_cuda_module
get_cuda_module("{MODULE}", ["{MODULE}.cu"])
print("seconds", time.perf_counter() - begin)
{COMPILERS}
"""

#: What the first call of an op waits for: a part of its module, or the whole.
FIRST = f"""
import sys, time, torch
name, part, *flags = sys.argv[1:]
begin = time.perf_counter()
from jitquant.loader import get_cuda_module, get_part
if part:
    get_part(name, [name + ".cu"], part, tuple(flags))
else:
    get_cuda_module(name, [name + ".cu"])
print("seconds", time.perf_counter() - begin)
{COMPILERS}
"""

#: What a first call waits for after an edit, in the process that has called the op before.
EDITED = f"""
import sys, time, torch
from pathlib import Path
from jitquant.loader import Loader
from jitquant.loader.request.sources import kernel_files
kernels, name, part, *flags = sys.argv[1:]
loader = Loader(kernels_dir=kernels, reload=True)
def get():
    if part:
        return loader.get_part(name, [name + ".cu"], part, tuple(flags))[0]
    return loader.get(name, [name + ".cu"])
before = get()
source = kernel_files(Path(kernels))[name]
source.write_text(source.read_text() + "// edited\\n")
begin = time.perf_counter()
assert get() is not before
print("seconds", time.perf_counter() - begin)
{COMPILERS}
"""

#: Everything from a bundle, without a compiler.
BUNDLED = """
import os, time, torch
os.environ.update(PATH="/nowhere", JITQUANT_NO_BUILD="1")
begin = time.perf_counter()
import jitquant
count = len(jitquant.warmup())
print("seconds", time.perf_counter() - begin)
print("remark", f"{count} modules")
"""

ALL_COLD = """
import time, torch
begin = time.perf_counter()
import jitquant
count = len(jitquant.warmup())
print("seconds", time.perf_counter() - begin)
import resource
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("remark", f"{used.ru_utime + used.ru_stime:.1f} s of the compilers, {count} modules")
"""

BF16_COLD = ALL_COLD.replace("warmup()", "warmup(dtypes=[torch.bfloat16])")

PLAIN = """
import os, sys, time, torch
from torch.utils.cpp_extension import load
begin = time.perf_counter()
load("plain_extension", [sys.argv[1]], extra_include_paths=[sys.argv[2]],
     extra_cuda_cflags=["-O3", "-lineinfo"], build_directory=os.path.dirname(sys.argv[1]))
print("seconds", time.perf_counter() - begin)
"""

INLINE = """
import os, sys, time, torch
from torch.utils.cpp_extension import load_inline
begin = time.perf_counter()
load_inline("inline_extension",
            cpp_sources=["int64_t bytes_of(const torch::Tensor& x);"],
            cuda_sources=[f'#include "{sys.argv[1]}"\\n'
                          'int64_t bytes_of(const torch::Tensor& x) { return x.nbytes(); }'],
            functions=["bytes_of"], extra_include_paths=[sys.argv[2]],
            extra_cuda_cflags=["-O3", "-lineinfo"], build_directory=sys.argv[3])
print("seconds", time.perf_counter() - begin)
"""

#: One C++ function three times: bound through the stable ABI, by pybind11, and for load_inline.
STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
static int64_t numel(torch::stable::Tensor x) { return x.numel(); }
STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("numel(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) { m.impl("numel", TORCH_BOX(&numel)); }
"""
PYBIND = """
#include <torch/extension.h>
static int64_t numel(const torch::Tensor& x) { return x.numel(); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("numel", &numel); }
"""
CPP_COLD = """
import sys, time, torch
begin = time.perf_counter()
from jitquant.loader import get_cuda_module
assert get_cuda_module("bench_stable", [sys.argv[1]]).numel(torch.ones(3)) == 3
print("seconds", time.perf_counter() - begin)
"""
CPP_LOAD = """
import os, sys, time, torch
from torch.utils.cpp_extension import load
begin = time.perf_counter()
module = load("bench_load", [sys.argv[1]], extra_cflags=["-O2"],
              build_directory=os.path.dirname(sys.argv[1]))
assert module.numel(torch.ones(3)) == 3
print("seconds", time.perf_counter() - begin)
"""
CPP_INLINE = """
import sys, time, torch
from torch.utils.cpp_extension import load_inline
begin = time.perf_counter()
module = load_inline("bench_inline", cpp_sources=[
    "static int64_t numel(const torch::Tensor& x) { return x.numel(); }"],
    functions=["numel"], build_directory=sys.argv[1])
assert module.numel(torch.ones(3)) == 3
print("seconds", time.perf_counter() - begin)
"""

IMPORT = """
import time, torch
begin = time.process_time()
import jitquant
print("seconds", time.process_time() - begin)
"""

#: A kernel of one's own by the other backend.
NVRTC = """
import sys, time, torch
from jitquant.loader import get_cuda_module
begin = time.perf_counter()
get_cuda_module("bench_nvrtc", [sys.argv[1]], backend="nvrtc", archs="90a").clear
print("seconds", time.perf_counter() - begin)
"""
KERNEL = "__global__ void clear(float* x) { x[threadIdx.x] = 0; }\n"

HIT = """
import sys, time, torch
import jitquant
from jitquant.loader import get_cuda_module
sources = [sys.argv[1]]
get_cuda_module("bench_stable", sources)
if len(sys.argv) > 2:
    jitquant.freeze()
time.sleep(0.3)
def once(count=5000):
    begin = time.perf_counter()
    for _ in range(count):
        get_cuda_module("bench_stable", sources)
    return (time.perf_counter() - begin) / count
print("seconds", min(once() for _ in range(20)))
"""

#: Calls of one function: as torch's own load gives it, and as the loader does. Turn by turn.
CALLS = """
import importlib.util, sys, time, torch
from jitquant.loader import get_cuda_module
kind, stable, pybind, built = sys.argv[1:]
spec = importlib.util.spec_from_file_location("bench_load", built)
plain = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plain)
mine = get_cuda_module("bench_pybind", [pybind])
ops = get_cuda_module("bench_stable", [stable])
functions = {"plain": plain.numel, "mine": mine.numel, "op": ops.numel.default}
x = torch.ones(16)
def once(function, count=20000):
    begin = time.perf_counter()
    for _ in range(count):
        function(x)
    return (time.perf_counter() - begin) / count
best = dict.fromkeys(functions, float("inf"))
for _ in range(30):
    for name, function in functions.items():
        best[name] = min(best[name], once(function))
print("remark", f"{best[kind] / best['plain']:.2f} times a plain pybind function's")
print("seconds", best[kind])
"""

FIRST_CALL = """
import sys, time, torch
import jitquant
x = torch.ones(3)
begin = time.perf_counter()
assert jitquant.get_cuda_module("bench_stable", [sys.argv[1]]).numel(x) == 3
print("seconds", time.perf_counter() - begin)
"""

COMMAND = """
import subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run([sys.executable, "-m", "jitquant", *sys.argv[1:]], capture_output=True)
print("seconds", time.perf_counter() - begin)
sys.exit(done.returncode)
"""

SOURCE = """
// The kernels of one module as a usual torch extension has them: in a .cu that includes torch.
#include <torch/extension.h>
#include "{source}"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{
  m.def("bytes_of", [](const torch::Tensor& x) {{ return x.nbytes(); }});
}}
"""


_COMPILERS_TOOK = re.compile(r"([\d.]+) s of the compilers")


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


def _median(what: str, remark: str, measure: Callable[[], tuple[float, str]], runs: int) -> Row:
    rows = [_row(what, measure) for _ in range(runs)]
    known = sorted(seconds for _, seconds, _ in rows if seconds is not None)
    if not known:
        return rows[-1]
    return what, known[len(known) // 2], f"{remark}; median of {len(known)}"


def measure(report: Callable[[Row], None], *, compare: bool = True) -> dict[str, float | None]:
    """Runs everything, each in processes and caches of its own, and returns the seconds.

    What ends in ``_compilers`` is processor time of the compilers, the others are of a clock (the
    import's is of a processor).

    Args:
        report: called with each row as it is done.
        compare: whether torch's own ways are measured too, which take the longest.
    """
    results: dict[str, float | None] = {}

    def done(key: str, row: Row) -> None:
        results[key] = row[1]
        if took := _COMPILERS_TOOK.search(row[2]):
            results[f"{key}_compilers"] = float(took[1])
        report(row)

    with tempfile.TemporaryDirectory(prefix="jitquant-bench-") as scratch:
        # Without a wrapper torch does not find what an earlier run has left in ccache.
        environment = {**os.environ, "JITQUANT_QUIET": "1", "TORCH_NO_COMPILER_WRAPPER": "1"}
        # As where the package is installed: a module is compiled to bytecode once, not each time.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(Path(scratch, "bytecode"))
        environment["JITQUANT_CACHE_DIR"] = str(Path(scratch, "one"))
        imported = lambda: _python(IMPORT, environment)  # noqa: E731
        _row("", imported)  # makes the bytecode
        done("import", _median("import jitquant", "processor time beyond torch's", imported, 5))
        done("cold", _row(f"{MODULE}, cold", lambda: _python(COLD, environment)))
        if results["cold"] is not None:
            what = f"{MODULE}, warm, in a new process"
            warm = lambda: _python(COLD, environment)  # noqa: E731
            done("warm", _median(what, "beyond importing torch", warm, 5))
        for command, limit in (("explain", 2), ("doctor", 2)):
            words = [command, *([MODULE] if command == "explain" else [])]
            run = partial(_python, COMMAND, environment, *words)
            what = f"jitquant {' '.join(words)}, the whole command"
            done(command, _median(what, f"at most {limit} s", run, 5))
        environment["JITQUANT_CACHE_DIR"] = str(Path(scratch, "all"))
        done("all_cold", _row("all modules, cold", lambda: _python(ALL_COLD, environment)))
        one_dtype = {**environment, "JITQUANT_CACHE_DIR": str(Path(scratch, "bf16"))}
        done("bf16_cold", _row("all in bfloat16, cold", lambda: _python(BF16_COLD, one_dtype)))
        bundle = str(Path(scratch, "bundle"))
        _row("", lambda: _python(COMMAND, environment, "bundle", "-o", bundle))
        bundled = {
            **environment,
            "JITQUANT_CACHE_DIR": str(Path(scratch, "none")),
            "JITQUANT_BUNDLES": bundle,
        }
        what = "all modules from a bundle, without a compiler"
        done("bundled", _median(what, "", lambda: _python(BUNDLED, bundled), 3))
        _measure_first_calls(Path(scratch, "first"), environment, done)
        _measure_cpp(Path(scratch, "cpp"), environment, done, compare=compare)
        if compare:
            done("plain", _plain(Path(scratch, "plain"), environment))
            done("inline", _inline(Path(scratch, "inline"), environment))
    return results


def _measure_first_calls(
    directory: Path, environment: dict[str, str], done: Callable[[str, Row], None]
) -> None:
    """Every part that a bfloat16 tensor needs, cold; the longest of each module after an edit."""
    kernels = directory / "kernels_cu"
    shutil.copytree(default_kernels_dir(), kernels)
    longest: dict[str, tuple[float, str, tuple[str, ...], dict[str, str]]] = {}
    took: list[tuple[float, str]] = []
    for index, (name, part) in enumerate(first_calls(torch.bfloat16)):
        shown = f"{name}_{part.name}" if part else name
        words = (name, part.name, *part.flags) if part else (name, "")
        cold = {**environment, "JITQUANT_CACHE_DIR": str(directory / str(index))}
        row = _row(f"a first call that needs {shown}", partial(_python, FIRST, cold, *words))
        done(f"first_{shown}", row)
        if row[1] is not None:
            took.append((row[1], shown))
            if row[1] > longest.get(name, (0.0,))[0]:
                longest[name] = (row[1], shown, words, cold)
    _median_and_most("first", "a first call", took, done)
    took = []
    for _, shown, words, built in longest.values():
        run = partial(_python, EDITED, built, str(kernels), *words)
        row = _row(f"the first call after an edit of the source of {shown}", run)
        done(f"edit_{shown}", row)
        if row[1] is not None:
            took.append((row[1], shown))
    _median_and_most("edit", "the first call after an edit", took, done)


def _median_and_most(
    key: str, what: str, took: list[tuple[float, str]], done: Callable[[str, Row], None]
) -> None:
    took = sorted(took)
    if took:
        remark = f"of {len(took)}"
        done(f"{key}_median", (f"{what}, the median", took[len(took) // 2][0], remark))
        done(f"{key}_most", (f"{what}, the longest", took[-1][0], f"{took[-1][1]}, {remark}"))


def _measure_cpp(
    directory: Path,
    environment: dict[str, str],
    done: Callable[[str, Row], None],
    *,
    compare: bool,
) -> None:
    """One C++ function, which any torch can call: cold, warm, and each call of it."""
    directory.mkdir()
    environment = {**environment, "JITQUANT_CACHE_DIR": str(directory / "cache")}
    stable, pybind = directory / "stable.cpp", directory / "load" / "pybind.cpp"
    pybind.parent.mkdir()
    stable.write_text(STABLE, encoding="utf-8")
    pybind.write_text(PYBIND, encoding="utf-8")
    run = partial(_python, CPP_COLD, environment, str(stable))
    done("cpp_cold", _row("a C++ function through the stable ABI, cold", run))
    run = partial(_python, FIRST_CALL, environment, str(stable))
    what = "the same, warm: its first call in a new process"
    done("first_call", _median(what, "beyond importing torch and jitquant", run, 5))
    kernel = directory / "kernel.cu"
    kernel.write_text(KERNEL, encoding="utf-8")
    run = partial(_python, NVRTC, environment, str(kernel))
    done("nvrtc", _median("a kernel by backend='nvrtc'", "in a new process", run, 3))
    run = partial(_python, HIT, environment, str(stable))
    done("hit", _row("get_cuda_module on a hit, each call", run))
    run = partial(_python, HIT, environment, str(stable), "frozen")
    done("frozen_hit", _row("the same after jitquant.freeze()", run))
    if not compare:
        return
    run = partial(_python, CPP_LOAD, environment, str(pybind))
    done("cpp_load", _row("the same function behind torch/extension.h, plain load, cold", run))
    inline = directory / "inline"
    inline.mkdir()
    run = partial(_python, CPP_INLINE, environment, str(inline))
    done("cpp_inline", _row("the same, torch's load_inline, cold", run))
    arguments = (str(stable), str(pybind), str(pybind.with_name("bench_load.so")))
    for kind, what in (
        ("plain", "a call of a pybind function from a plain load"),
        ("mine", "a call of the same from get_cuda_module (at most 1.2 times)"),
        ("op", "a call of an operator from get_cuda_module, through torch's dispatcher"),
    ):
        done(f"call_{kind}", _row(what, partial(_python, CALLS, environment, kind, *arguments)))


_NO_CUDA = "needs a CUDA build of torch: this one cannot load a .cu with torch headers"


def _inline(directory: Path, environment: dict[str, str]) -> Row:
    what = f"{MODULE}'s kernels, torch's load_inline, cold"
    if torch.version.cuda is None:
        return what, None, _NO_CUDA
    directory.mkdir()
    kernels = default_kernels_dir()
    arguments = (
        str(kernel_files(kernels)[MODULE]),
        str(kernels / "include"),
        str(directory),
    )
    return _row(what, lambda: _python(INLINE, _for_torch(environment), *arguments))


def _for_torch(environment: dict[str, str]) -> dict[str, str]:
    # torch takes the toolkit to be around the first nvcc on PATH, which may be a wrapper script.
    toolkit = Path(find_nvcc(Memo())[0].path).resolve().parent.parent
    environment = {"CUDA_HOME": str(toolkit), **environment}
    if not torch.cuda.is_available():
        environment.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    return environment


def _plain(directory: Path, environment: dict[str, str]) -> Row:
    what = f"{MODULE}'s kernels behind torch/extension.h, plain load, cold"
    if torch.version.cuda is None:
        return what, None, _NO_CUDA
    directory.mkdir()
    source = directory / "plain_extension.cu"
    kernels = default_kernels_dir()
    source.write_text(SOURCE.format(source=kernel_files(kernels)[MODULE]), encoding="utf-8")
    arguments = (str(source), str(kernels / "include"))
    return _row(what, lambda: _python(PLAIN, _for_torch(environment), *arguments))
