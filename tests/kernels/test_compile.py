"""Every kernel file: through nvcc alone, and compiled, linked and loaded by the loader."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import spills
import torch

from jitquant.loader import Loader, NvccNotFoundError
from jitquant.loader.compile.usage import KernelUsage, split_usage
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.processes import default_jobs
from jitquant.loader.machine.toolchain import find_nvcc
from jitquant.loader.request.plan import Request
from jitquant.loader.request.sources import kernel_files
from jitquant.loader.tools.inspect import build_of, kernels_of
from jitquant.ops import KERNEL_OPS
from jitquant.ops.parts import PARTS

KERNELS = Path(__file__).parents[2] / "kernels_cu"
FILES = kernel_files(KERNELS)
SOURCES = [path.name for path in FILES.values()]
BUILT = "120a"
"""What the loader compiles, links and loads every file for, unoptimized."""
OPTIMIZED = "100a"
"""What the kernels for bf16 are optimized for, which shows what they spill: those for other dtypes
take each choice as 120a. Of 90a results/kernels-resources.md has it for all
(tests/scripts/test_resources.py)."""
OTHERS_IN_PART = ("80",)
"""Beside those, so that every choice of the preprocessor is compiled; for bf16 alone, too."""
UNOPTIMIZED = "-Ofc=max"
"""It takes less than half of the time; what is compiled so does not run."""
BF16 = PARTS[torch.bfloat16].flags
ALIKE = {"quantize_nvfp4": ("86", "103a", "110a", "121a"), "quantize_block": ("89",)}
"""Those that take each choice as another one does, for which one file will do."""
QUICK = {"amax_gsa"}
"""Of the modules, those that are not left to --all: nvcc takes ten to thirty seconds for one."""
EXPORTS = {
    module: [
        name
        for op in KERNEL_OPS
        for where, name in {op.module: op.function, **op.also}.items()
        if where == module
    ]
    for module in sorted({op.module for op in KERNEL_OPS})
}
MODULES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(EXPORTS)
]


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return find_nvcc(Memo())[0].path
    except NvccNotFoundError as error:
        pytest.skip(f"no nvcc: {error}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compilations(
    request: pytest.FixtureRequest, cache: Path, nvcc: str
) -> Iterator[dict[Job, Future[list[KernelUsage]]]]:
    """What the tests that will run need compiled, as many at once as there are processors."""
    with ThreadPoolExecutor(default_jobs()) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JITQUANT_JOBS", "1")
        jobs = dict.fromkeys(
            _job(item)
            for item in request.session.items
            if item.path == request.path and "compiled" in item.fixturenames
        )
        yield {job: pool.submit(job.work, job.name, nvcc, cache) for job in jobs}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def compiled(
    request: pytest.FixtureRequest, compilations: dict[Job, Future[list[KernelUsage]]]
) -> Callable[[], list[KernelUsage]]:
    """Waits for what this test needs compiled; gives the kernels of the device code."""
    return compilations[_job(request.node)].result


class Job(NamedTuple):
    """What a test needs of a module."""

    work: Callable[[str, str, Path], list[KernelUsage]]
    name: str


def _job(item: pytest.Function) -> Job:
    return Job(WORK[item.originalname], item.callspec.params["name"])


def _loader(cache: Path) -> Loader:
    return Loader(cache_dir=cache, capturing=lambda: False)


def _request(name: str) -> Request:
    return Request(name, (f"{name}.cu",), cuda_flags=(UNOPTIMIZED,), archs=(BUILT,))


def _build(name: str, _nvcc: str, cache: Path) -> list[KernelUsage]:
    # With a loader of its own: one loader starts as many compilers as JITQUANT_JOBS says.
    loader, warnings = _loader(cache), []
    loader.reporter.warn = warnings.append  # type: ignore[method-assign]
    build = loader.ensure(_request(name))
    assert not warnings, "\n".join(warnings)
    return kernels_of(build)


def _optimize(name: str, nvcc: str, _cache: Path) -> list[KernelUsage]:
    return _compile_for((OPTIMIZED,), name, nvcc, "-O3", *BF16)


def _whole_and_part(name: str, nvcc: str, _cache: Path) -> list[KernelUsage]:
    whole = _compile_for(("90a",), name, nvcc, UNOPTIMIZED)
    return whole + _compile_for((OPTIMIZED,), name, nvcc, UNOPTIMIZED, *BF16)


def _compile_for_others(name: str, nvcc: str, _cache: Path) -> list[KernelUsage]:
    return _compile_for(OTHERS_IN_PART, name, nvcc, UNOPTIMIZED, *BF16)


WORK = {
    "test_the_loader_builds_and_loads": _build,
    "test_no_spills_and_no_stack": _optimize,
    "test_a_part_has_the_kernels_of_its_dtype": _whole_and_part,
    "test_every_kind_of_architecture": _compile_for_others,
}


def _compile_for(archs: Sequence[str], name: str, nvcc: str, *flags: str) -> list[KernelUsage]:
    """The kernels of the device code alone: the loader compiles the host's."""
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    done = subprocess.run(
        [
            *(nvcc, "-std=c++17", "--resource-usage", *gencode, f"-I{KERNELS / 'include'}", *flags),
            *("-fatbin", str(FILES[name]), "-o", os.devnull),
        ],
        env=dict(os.environ),  # a copy: pytest changes this process's while threads start compilers
        capture_output=True,
        text=True,
        check=False,
    )
    kernels, rest = split_usage(done.stdout + done.stderr)
    assert done.returncode == 0, rest
    assert not rest, rest
    return kernels


def test_the_table_names_every_kernel_file() -> None:
    assert [f"{name}.cu" for name in sorted(EXPORTS)] == SOURCES


@pytest.mark.parametrize("source", SOURCES)
def test_no_torch_header_in_device_code(source: str) -> None:
    room = FILES[Path(source).stem].parent
    headers = [
        *room.glob("*.cuh"),
        *room.glob("*.h"),
        *(KERNELS / "include" / "jitquant").iterdir(),
    ]
    for path in (room / source, *headers):
        assert not re.search(r'#include\s*[<"](torch|ATen|c10|pybind11)/', path.read_text()), path


def _arguments(schema: torch.FunctionSchema) -> tuple[list[object], dict[str, object]]:
    """Arguments of each kind as torch boxes them, with tensors that are not on a GPU."""
    values = {
        "ScalarType": torch.float8_e4m3fn,
        "str": "te",
        "int": 16,
        "float": 1.0,
        "bool": False,
    }
    positional: list[object] = []
    named: dict[str, object] = {}
    for argument in schema.arguments:
        kind = str(argument.real_type)
        value = torch.ones(16, 16) if kind == "Tensor" else values.get(kind)
        if argument.has_default_value():
            value = argument.default_value
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


@pytest.mark.parametrize("name", MODULES)
def test_the_loader_builds_and_loads(
    name: str, cache: Path, compiled: Callable[[], list[KernelUsage]]
) -> None:
    assert {kernel.arch for kernel in compiled()} == {BUILT}
    module = _loader(cache).get(name, [f"{name}.cu"], cuda_flags=[UNOPTIMIZED], archs=[BUILT])
    assert build_of(_loader(cache), _request(name)).entry.stable_abi
    lacking = [f for f in EXPORTS[name] if not hasattr(module, f)]
    assert not lacking, f"module {name} does not export {lacking}"
    for function in EXPORTS[name]:
        assert {"default", "out"} <= set(getattr(module, function).overloads())
        # What is not on a GPU is not for the way past the dispatcher.
        schema = getattr(module, function).default._schema
        arguments = [torch.ones(1, 16)] * len(schema.arguments)
        for for_dispatcher in (True, False):
            direct = getattr(module, f"direct_{function}")
            assert direct(for_dispatcher, *arguments) is NotImplemented
        for op in (getattr(module, function).default, getattr(module, function).out):
            positional, named = _arguments(op._schema)
            with pytest.raises(RuntimeError, match="expected"):
                op._op_dk(torch._C.DispatchKey.CUDA, *positional, **named)
    # Kernels are listed for residency by their library and by no other.
    library = ctypes.CDLL(str(module.path))
    assert library.jitquant_make_resident() != 0  # there is no device: the call says so


@pytest.mark.parametrize("name", MODULES)
def test_no_spills_and_no_stack(name: str, compiled: Callable[[], list[KernelUsage]]) -> None:
    kernels = compiled()
    assert {kernel.arch for kernel in kernels} == {OPTIMIZED}
    over = [
        f"{kernel.name} for {kernel.arch}: {kernel.spilled} bytes spilled, stack {kernel.stack}"
        for kernel in kernels
        if spills.exceed(name, kernel.spilled, kernel.stack)
    ]
    assert not over, "\n".join(over)


@pytest.mark.parametrize("name", ["amax_gsa"])
def test_a_part_has_the_kernels_of_its_dtype(
    name: str, compiled: Callable[[], list[KernelUsage]]
) -> None:
    kernels = compiled()
    whole = {kernel.name for kernel in kernels if kernel.arch == "90a"}
    part = {kernel.name for kernel in kernels if kernel.arch == OPTIMIZED}
    assert part == {kernel for kernel in whole if "Bf16" in kernel}
    assert 0 < len(part) < len(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_every_kind_of_architecture(name: str, compiled: Callable[[], list[KernelUsage]]) -> None:
    assert compiled(), f"{name} has no kernel"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_architectures_alike(name: str, nvcc: str) -> None:
    assert _compile_for(ALIKE[name], name, nvcc, UNOPTIMIZED, *BF16)


@pytest.mark.parametrize(("arch", "expected"), [("90a", False), ("100a", True), ("120a", True)])
def test_the_e2m1_instruction_is_used_where_it_is(
    arch: str, expected: bool, nvcc: str, tmp_path: Path
) -> None:
    ptx = tmp_path / "out.ptx"
    subprocess.run(
        [
            *(nvcc, "-std=c++17", "-ptx", f"-arch=compute_{arch}", f"-I{KERNELS / 'include'}"),
            *(UNOPTIMIZED, *BF16, str(FILES["quantize_nvfp4"]), "-o", str(ptx)),
        ],
        check=True,
    )
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx.read_text()) is expected
