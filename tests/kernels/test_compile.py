"""Every kernel file: through nvcc alone, and compiled, linked and loaded by the loader."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from jitquant.loader import Loader, NvccNotFoundError
from jitquant.loader.machine.processes import default_jobs
from jitquant.loader.machine.toolchain import Memo, find_nvcc
from jitquant.loader.request.plan import Request
from jitquant.loader.request.sources import kernel_files
from jitquant.loader.tools.inspect import build_of, kernels_of
from jitquant.ops import KERNEL_OPS
from jitquant.ops.parts import PARTS

KERNELS = Path(__file__).parents[2] / "kernels_cu"
FILES = kernel_files(KERNELS)
SOURCES = [path.name for path in FILES.values()]
BUILT = "90a"
"""What the loader compiles, links and loads every file for."""
BUILT_IN_PART = "100a"
"""What it compiles the kernels for bf16 for: those for other dtypes take each choice as 120a."""
OTHERS = ("120a",)
"""Beside those, so that every choice of the preprocessor is compiled."""
OTHERS_IN_PART = ("80",)
"""And for bf16 alone: other dtypes take the same choices."""
ALIKE = {"quantize_nvfp4.cu": ("86", "103a", "110a", "121a"), "quantize_block.cu": ("89",)}
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


# Bytes of a thread. The 512 threads of a block of experts have all registers there are; what does
# not fit is used once a group of rows, not in the loop over tiles. Rotated rows in fp16 and rotated
# groups in fp32 are a few registers past their bound; no GPU has timed a looser one. A matrix and
# its transpose were timed with these spills, which make room for three blocks per SM: on 9.0 4over6
# takes 466 us with 56 bytes and 530 with two blocks. Rows of fp16 in a cluster spill for 10.0
# alone.
SPILLED = {
    "fused_rmsnorm_quantize": 8,
    "nvfp4_experts": 280,
    "quantize_both": 8,
    "quantize_mxfp4": 8,
    "quantize_nvfp4_both": 160,
    "quantize_nvfp4_recipe": 32,
    "rotate_quantize": 16,
    "rotate_quantize_per_token_group": 16,
}
# What functions apart take: of 4over6, for the rare errors that are too near to tell apart, and of
# stochastic rounding, for scales that are zero, subnormal or saturated.
STACK = SPILLED | {
    "quantize_mxfp4": 192,
    "quantize_nvfp4_both": 640,
    "quantize_nvfp4_recipe": 640,
}


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
    request: pytest.FixtureRequest,
    cache: Path,
    nvcc: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[None]]]:
    """What the tests that will run need compiled, as many at once as there are processors.

    By module for the loader's builds, and by file for the other architectures.
    """
    objects = tmp_path_factory.mktemp("objects")
    futures: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(default_jobs()) as pool, pytest.MonkeyPatch.context() as patch:
        # One compiler for a whole file: with several the registers differ from build to build.
        patch.setenv("JITQUANT_JOBS", "1")
        for item in request.session.items:
            if item.path != request.path or "compiled" not in item.fixturenames:
                continue
            (what,) = item.callspec.params.values()
            if what in SOURCES:
                futures[what] = pool.submit(_compile_for_others, what, nvcc, objects / what)
            elif what not in futures:
                futures[what] = pool.submit(_build, what, cache)
        yield futures
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def compiled(
    request: pytest.FixtureRequest, compilations: dict[str, Future[None]]
) -> Callable[[], None]:
    """Waits for what this test needs compiled."""
    (what,) = request.node.callspec.params.values()
    return compilations[what].result


def _loader(cache: Path) -> Loader:
    return Loader(cache_dir=cache, capturing=lambda: False)


def _request(name: str) -> Request:
    return Request(name, (f"{name}.cu",), archs=(BUILT,))


def _request_in_part(name: str) -> Request:
    flags = PARTS[torch.bfloat16].flags
    return Request(name, (f"{name}.cu",), cuda_flags=flags, archs=(BUILT_IN_PART,))


def _build(name: str, cache: Path) -> None:
    # With a loader of its own: one loader starts as many compilers as JITQUANT_JOBS says.
    loader, warnings = _loader(cache), []
    loader.reporter.warn = warnings.append  # type: ignore[method-assign]
    loader.ensure(_request(name))
    loader.ensure(_request_in_part(name))
    assert not warnings, "\n".join(warnings)


def _compile_for_others(source: str, nvcc: str, out: Path) -> None:
    _compile_for(OTHERS, source, nvcc, out)
    _compile_for(OTHERS_IN_PART, source, nvcc, out, PARTS[torch.bfloat16].flags)


def _compile_for(
    archs: tuple[str, ...], source: str, nvcc: str, out: Path, flags: Sequence[str] = ()
) -> None:
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    subprocess.run(
        [
            # What is compiled here does not run; it takes less than half of the time so.
            *(nvcc, "-std=c++17", "-Ofc=max", *gencode, "-c", f"-I{KERNELS / 'include'}", *flags),
            *(str(FILES[Path(source).stem]), "-o", f"{out}.o"),
        ],
        env=dict(os.environ),  # a copy: pytest changes this process's while threads start compilers
        check=True,
    )


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
def test_the_loader_builds_and_loads(name: str, cache: Path, compiled: Callable[[], None]) -> None:
    compiled()
    module = _loader(cache).get(name, [f"{name}.cu"], archs=[BUILT])
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
def test_no_spills_and_no_stack(name: str, cache: Path, compiled: Callable[[], None]) -> None:
    compiled()
    requests = (_request(name), _request_in_part(name))
    kernels = [k for request in requests for k in kernels_of(build_of(_loader(cache), request))]
    assert {kernel.arch for kernel in kernels} == {BUILT, BUILT_IN_PART}
    over = [
        f"{kernel.name} for {kernel.arch}: {spilled} bytes spilled, a stack of {kernel.stack}"
        for kernel in kernels
        for spilled in [max(kernel.spill_stores, kernel.spill_loads)]
        if spilled > SPILLED.get(name, 0) or kernel.stack > STACK.get(name, 0)
    ]
    assert not over, "\n".join(over)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amax_gsa"])
def test_a_part_has_the_kernels_of_its_dtype(
    name: str, cache: Path, compiled: Callable[[], None], tmp_path: Path
) -> None:
    compiled()
    whole = {kernel.name for kernel in kernels_of(build_of(_loader(cache), _request(name)))}
    flags = PARTS[torch.bfloat16].flags
    request = Request(name, (f"{name}.cu",), cuda_flags=flags, archs=(BUILT,))
    part = {kernel.name for kernel in kernels_of(_loader(tmp_path / "cache").ensure(request))}
    assert part == {kernel for kernel in whole if "Bf16" in kernel}
    assert 0 < len(part) < len(whole)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_architecture(source: str, compiled: Callable[[], None]) -> None:
    compiled()


@pytest.mark.slow
@pytest.mark.parametrize("source", ALIKE)
def test_architectures_alike(source: str, nvcc: str, tmp_path: Path) -> None:
    _compile_for(ALIKE[source], source, nvcc, tmp_path / "alike")


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("90a", False), ("100a", True), pytest.param("120a", True, marks=pytest.mark.slow)],
)
def test_the_e2m1_instruction_is_used_where_it_is(
    arch: str, expected: bool, nvcc: str, tmp_path: Path
) -> None:
    ptx = tmp_path / "out.ptx"
    subprocess.run(
        [
            *(nvcc, "-std=c++17", "-ptx", f"-arch=compute_{arch}", f"-I{KERNELS / 'include'}"),
            *(str(FILES["quantize_nvfp4"]), "-o", str(ptx)),
        ],
        check=True,
    )
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx.read_text()) is expected
