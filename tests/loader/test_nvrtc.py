"""backend="nvrtc": the kernels of a .cu, compiled without nvcc and a host compiler."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from jitquant.loader import (
    CaptureError,
    CompileError,
    DeviceModule,
    FrozenError,
    Loader,
    NoBuildError,
    NvrtcNotFoundError,
    get_cuda_module,
)
from jitquant.loader.core import default_kernels_dir
from jitquant.loader.nvrtc import compiler
from jitquant.loader.nvrtc import kernel as kernel_module
from jitquant.loader.nvrtc.compiler import parameters_of, plain_name
from jitquant.loader.nvrtc.kernel import by_cuda_core, by_cupy
from jitquant.loader.request.sources import kernel_names

from .toys import finish, new_loader, python

SOURCE = """
#include <cmath>
#include <cuda_bf16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#ifndef __CUDACC_RTC__
#include <vector>
#endif
#include "jitquant/export.h"
#include "scale.cuh"

namespace mine {
namespace {

template <class T, int kTimes>
__global__ void __launch_bounds__(256) scale_kernel(const T* x, float s, T* out, int64_t n) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = static_cast<T>(times(static_cast<float>(x[i]), s) * kTimes);
}

}  // namespace

__global__ void fill(float* out, float value, int n, Pair pair) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = value + pair.a + pair.b;
}

#ifndef __CUDACC_RTC__
std::vector<float> only_for_the_host(const std::vector<float>& v) { return v; }

cudaError_t launch_fill(float* out, float value, int n, cudaStream_t stream) {
  fill<<<1, 32, 0, stream>>>(out, value, n, {0, 0});
  return cudaGetLastError();
}

JITQUANT_EXPORT(launch_fill, "fill(Tensor(a!) out, float value, int n) -> ()")
#endif
}  // namespace mine
"""
HEADER = """
#pragma once
#include <cuda_runtime.h>
struct Pair { float a, b; };
__device__ inline float times(float x, float s) { return x * s * FACTOR; }
#ifndef __CUDACC_RTC__
inline cudaError_t host_only(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
#endif
"""


def nvrtc_or_skip() -> None:
    try:
        compiler._bindings()
    except NvrtcNotFoundError as error:
        pytest.skip(str(error))


def write(directory: Path, factor: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "scale.cu"
    source.write_text(SOURCE)
    source.with_suffix(".cuh").write_text(f"#define FACTOR {factor}\n{HEADER}")
    return source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    nvrtc_or_skip()
    return write(tmp_path / "source")


def test_the_same_file_gives_kernels(source: Path, tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache")
    module = loader.get_device_module("scale", [source])
    assert isinstance(module, DeviceModule)
    assert [k.kind for k in module.fill.parameters] == ["u64", "f32", "u32", "b8"]
    assert module.fill.parameters[3].size == 8
    assert repr(module.fill) == "<DeviceKernel 'mine::fill' (u64, f32, u32, 8 bytes)>"
    assert module.fill is module.kernel("mine::fill")
    template = module.kernel("mine::scale_kernel<__nv_bfloat16, 2>")
    assert [k.kind for k in template.parameters] == ["u64", "f32", "u64", "u64"]
    assert template is module.kernel("mine::scale_kernel<__nv_bfloat16, 2>")
    assert "fill" in dir(module)
    assert repr(module).startswith("<DeviceModule 'scale' (sm_90a) key ")
    with pytest.raises(AttributeError, match="Did you mean 'fill'"):
        _ = module.fil
    assert loader.get_device_module("scale", [source]) is module
    assert module.fill.cubin[:4] == b"\x7fELF"
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_edits_are_seen(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    loader = new_loader(cache)
    first = loader.get_device_module("scale", [source])
    write(source.parent, 7)
    second = loader.get_device_module("scale", [source])
    assert second is not first
    assert second.key != first.key
    write(source.parent, 1)
    assert loader.get_device_module("scale", [source]).key == first.key
    unreloaded = new_loader(cache, reload=False)
    module = unreloaded.get_device_module("scale", [source])
    write(source.parent, 9)
    assert unreloaded.get_device_module("scale", [source]) is module


def test_a_header_that_comes_first_is_seen(tmp_path: Path, loader: Loader) -> None:
    nvrtc_or_skip()
    for place, value in (("late", 1), ("later", 2)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "value.cuh").write_text(f"#define VALUE {value}\n")
    source = tmp_path / "k.cu"
    source.write_text(
        "#include <value.cuh>\ntemplate <int> __global__ void t() {}\n"
        "template __global__ void t<VALUE>();\n__global__ void k(float) {}\n"
    )
    early = tmp_path / "early"
    early.mkdir()
    flags = [f"-I{tmp_path / place}" for place in ("early", "late", "later")]

    def value() -> int:
        code = loader.get_device_module("k", [source], cuda_flags=flags).k.cubin
        return next(n for n in (1, 2, 3) if f"_Z1tILi{n}EEvv".encode() in code)

    assert value() == 1
    (early / "value.cuh").write_text("#define VALUE 3\n")
    assert value() == 3
    (early / "value.cuh").unlink()
    (tmp_path / "late" / "value.cuh").unlink()
    assert value() == 2
    source.write_text("#define FILE <value.cuh>\n#include FILE\n")
    with pytest.raises(ValueError, match="includes what a macro names"):
        loader.get_device_module("k", [source], cuda_flags=flags)


@pytest.mark.parametrize(
    "text",
    [
        '#include /* a */ "value.cuh"\n',
        '#include \\\n"value.cuh"\n',
        '/* a\n */ %:include "value.cuh"\n',
        '#if __has_include("value.cuh")\n#define VALUE 2\n#else\n#define VALUE 1\n#endif\n',
        "#include <next/value.cuh>\n",
    ],
)
def test_a_header_is_seen_however_it_is_included(text: str, tmp_path: Path, loader: Loader) -> None:
    nvrtc_or_skip()
    header, source = tmp_path / "value.cuh", tmp_path / "k.cu"
    for place in ("one/next", "two/next"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "one/next/value.cuh").write_text("#include_next <next/value.cuh>\n")
    if "next" in text:
        header = tmp_path / "two/next/value.cuh"
    source.write_text(f"{text}__global__ void k(int* out) {{ *out = VALUE; }}\n")
    flags = [f"-I{tmp_path}/one", f"-I{tmp_path}/two"]
    keys = set()
    for value in (1, 2):
        if "has_include" not in text or value == 2:
            header.write_text(f"#define VALUE {value}\n")
        keys.add(loader.get_device_module("k", [source], cuda_flags=flags).key)
    assert len(keys) == 2
    computed = "#define IN(x) <x>\n#if __has_include(IN(value.cuh))\n#endif\n"
    for unknown in ("#define FILE <value.cuh>\n#/**/include FILE\n", computed):
        source.write_text(unknown)
        with pytest.raises(ValueError, match="includes what a macro names, or asks for it"):
            loader.get_device_module("k", [source], cuda_flags=flags)


@pytest.mark.parametrize("flag", ["-DASKS=__has_include(H)|-DH=<k.h>", "--define-macro|H=<k.h>"])
def test_a_header_comes_to_be_that_a_flag_names(flag: str, tmp_path: Path, loader: Loader) -> None:
    nvrtc_or_skip()
    source = tmp_path / "k.cu"
    asks = "ASKS" if "ASKS" in flag else "__has_include(H)"
    source.write_text(f"#if {asks}\n__global__ void two() {{}}\n#endif\n")
    given: Any = {"include_dirs": [tmp_path], "cuda_flags": flag.split("|")}
    loader.get_device_module("k", [source], **given)
    (tmp_path / "k.h").write_text("")
    loader.get_device_module("k", [source], **given).two  # noqa: B018


@pytest.mark.parametrize(
    "form",
    ["-I{}", "-I={}", " -I {}", "-I|{}", "--include-path={}", "--include-path|{}"],
)
def test_a_header_is_seen_however_a_flag_names_its_directory(
    form: str, tmp_path: Path, loader: Loader
) -> None:
    nvrtc_or_skip()
    (tmp_path / "inc").mkdir()
    header = tmp_path / "inc" / "k.h"
    header.write_text("__global__ void one() {}\n")
    source = tmp_path / "k.cu"
    source.write_text("#include <k.h>\n")
    flags = [word.format(tmp_path / "inc") for word in form.split("|")]
    loader.get_device_module("k", [source], cuda_flags=flags).one  # noqa: B018
    header.write_text("__global__ void two() {}\n")
    loader.get_device_module("k", [source], cuda_flags=flags).two  # noqa: B018


@pytest.mark.parametrize("form", ["--pre-include={}", "-include={}", "--use-pch={}"])
def test_a_flag_that_adds_a_file_is_refused(form: str, tmp_path: Path, loader: Loader) -> None:
    source = tmp_path / "k.cu"
    source.write_text("__global__ void one() {}\n")
    with pytest.raises(ValueError, match="sees no edits of a file that a flag includes"):
        loader.get_device_module("k", [source], cuda_flags=[form.format(tmp_path / "k.h")])


def test_neither_nvcc_nor_a_host_compiler_is_needed(source: Path, tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from jitquant.loader import get_cuda_module
        module = get_cuda_module("scale", [Path({str(source)!r})], backend="nvrtc", archs="100a")
        print(module.arch, module.fill.symbol)
        """
    environment = {"PATH": str(tmp_path), "CXX": "", "CUDA_VISIBLE_DEVICES": ""}
    out, _ = finish(python(code, tmp_path / "cache", **environment))
    assert out.split() == ["100a", "_ZN4mine4fillEPffi4Pair"]


@pytest.mark.slow
def test_an_error_names_the_file_and_line(source: Path, tmp_path: Path) -> None:
    text = source.read_text()
    source.write_text(text.replace("out[i] = value", "out[i] = valeu"))
    line = text[: text.index("out[i] = value")].count("\n") + 1
    loader = new_loader(tmp_path / "cache")
    with pytest.raises(CompileError, match='identifier "valeu" is undefined') as caught:
        loader.get_device_module("scale", [source])
    first = caught.value.diagnostics[0]
    assert (first.file, first.line) == (str(source), line)
    source.write_text(text)
    header = source.with_suffix(".cuh")
    header.write_text(header.read_text().replace("x * s * FACTOR", "x * s * FACTR"))
    with pytest.raises(CompileError) as caught:
        loader.get_device_module("scale", [source])
    first = caught.value.diagnostics[0]
    assert first.file == str(header)
    assert header.read_text().splitlines()[first.line - 1].endswith("FACTR; }")
    write(source.parent)
    module = loader.get_device_module("scale", [source])
    with pytest.raises(CompileError):
        module.kernel("mine::no_such_kernel<int>")


def test_bad_requests(source: Path, tmp_path: Path, loader: Loader) -> None:
    other = write(tmp_path / "other")
    with pytest.raises(ValueError, match=r"compiles one \.cu for one arch.*, not 2 for 90a"):
        loader.get_device_module("scale", [source, other])
    with pytest.raises(ValueError, match="not 1 for 90a, 100a"):
        loader.get_device_module("scale", [source], archs="90a;100a")
    with pytest.raises(ValueError, match="backend='cuda': give 'nvcc' or 'nvrtc'"):
        get_cuda_module("scale", [source], backend="cuda")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="cxx_flags: backend='nvrtc'"):
        get_cuda_module("s", [source], backend="nvrtc", cxx_flags=["-O3"])  # type: ignore[call-overload]
    loader.freeze()
    with pytest.raises(FrozenError):
        loader.get_device_module("scale", [source])
    capturing = new_loader(tmp_path / "cache", capturing=lambda: True)
    with pytest.raises(CaptureError):
        capturing.get_device_module("scale", [source])


def test_what_is_compiled_is_there_in_a_capture(source: Path, tmp_path: Path) -> None:
    capturing = [False]
    loader = new_loader(tmp_path / "cache", capturing=lambda: capturing[0])
    module = loader.get_device_module("scale", [source])
    capturing[0] = True
    assert loader.get_device_module("scale", [source]) is module
    with pytest.raises(CaptureError):
        module.kernel("mine::scale_kernel<float, 3>")
    capturing[0] = False
    loader.freeze()
    with pytest.raises(FrozenError, match="compiles in every process"):
        module.kernel("mine::scale_kernel<float, 3>")
    loader.freeze(build=True)
    assert module.kernel("mine::scale_kernel<float, 3>").parameters


def test_no_build(source: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    with pytest.raises(NoBuildError, match="backend='nvrtc' compiles in every process"):
        loader.get_device_module("scale", [source], archs="90a")


QUICK = {"dequantize", "fused_amax_quantize", "nvfp4_experts", "quantize_per_token_group"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in kernel_names(default_kernels_dir())
    ],
)
def test_kernels_of_the_project_compile(loader: Loader, name: str) -> None:
    """Their headers are read whole; templates are only parsed until an instance is asked for."""
    nvrtc_or_skip()
    module = loader.get_device_module(name, [f"{name}.cu"], archs="90a")
    assert module.arch == "90a"
    if name == "dequantize":
        kernel = "jitquant::dequantize_kernel<__nv_bfloat16, jitquant::EightBit::kE4m3, 4, true>"
        assert module.kernel(kernel).parameters[1:3] == (("u64", 8), ("u64", 8))


class Array:
    """What CuPy's arrays and others offer."""

    def __init__(self, pointer: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False)}


class Stream:
    """What torch's, CuPy's and cuda.core's streams offer."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 77)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Launches, which are only noted down."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernel_module, "launcher", lambda: lambda *args: calls.append(args))
    return calls


def test_arguments_get_the_size_of_their_parameters(
    source: Path, loader: Loader, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    np = pytest.importorskip("numpy")
    module = loader.get_device_module("scale", [source])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 5)

    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_float), ("b", ctypes.c_float))

    module.fill[(2, 3), 32](Array(4096), 2, 5, Pair(1.0, 2.0))
    module.fill[1, (8, 8, 1), 1024, 77](None, 0.5, np.int64(-1), bytes(8))
    (of, shape, values), (_, other_shape, others) = calls
    assert of is module.fill
    assert shape == ((2, 3), (32,), 0, 5)  # torch's current stream
    assert [v.dtype.str for v in values] == ["<u8", "<f4", "<u4", "<u8"]
    assert (int(values[0]), float(values[1]), int(values[2])) == (4096, 2.0, 5)
    assert values[3].tobytes() == bytes(Pair(1.0, 2.0))
    assert other_shape == ((1,), (8, 8, 1), 1024, 77)
    assert (int(others[0]), int(others[2])) == (0, 0xFFFFFFFF)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((torch.ones(1), 1.0, 1, bytes(8)), ValueError, "argument 0: it is on cpu; move it"),
        ((Array(8), 1.0, 1), TypeError, r"\(u64, f32, u32, 8 bytes\)> does not take 3"),
        ((Array(8), Array(8), 1, bytes(8)), TypeError, "argument 1: .* not 'Array'"),
        ((Array(8), 1.0, 1.5, bytes(8)), TypeError, "argument 2: 'float' object cannot be"),
        ((Array(8), "x", 1, bytes(8)), ValueError, "argument 1: could not convert"),
        ((Array(8), 1.0, 1 << 32, bytes(8)), OverflowError, "argument 2: int too big"),
        ((Array(8), 1.0, 1, bytes(4)), ValueError, "argument 3: 4 bytes instead of 8"),
    ],
)
def test_wrong_arguments_are_refused_before_a_launch(
    source: Path,
    loader: Loader,
    calls: list[tuple[Any, ...]],
    arguments: tuple[object, ...],
    error: type[Exception],
    said: str,
) -> None:
    pytest.importorskip("numpy")
    module = loader.get_device_module("scale", [source])
    with pytest.raises(error, match=said):
        module.fill[1, 1](*arguments)
    assert calls == []


@pytest.mark.parametrize("configuration", [1, (1,), (0, 1), (1, (1, 1, 1, 1)), (1,) * 5])
def test_wrong_launch_shapes_are_refused(
    source: Path, loader: Loader, configuration: object
) -> None:
    module = loader.get_device_module("scale", [source])
    with pytest.raises((TypeError, ValueError)):
        module.fill[configuration]  # type: ignore[index]


def test_parameters_are_read_from_ptx() -> None:
    ptx = """
    .visible .entry none()
    .weak .entry some(
        .param .u64 .ptr .align 1 some_param_0,
        .param .align 4 .b8 some_param_1[12],
        .param .u8 some_param_2
    )
    .maxntid 256
    """
    assert parameters_of(ptx) == {"none": (), "some": (("u64", 8), ("b8", 12), ("u8", 1))}


def test_host_code_is_refused_with_the_way_out(tmp_path: Path, loader: Loader) -> None:
    nvrtc_or_skip()
    source = tmp_path / "k.cu"
    for text in (
        "#include <vector>\n__global__ void k() {}\n",
        "#include <cuda_runtime.h>\n__global__ void k() {}\n"
        "void launch() { k<<<1, 1>>>(); cudaDeviceSynchronize(); }\n",
    ):
        source.write_text(text)
        with pytest.raises(CompileError, match=r"put launchers, .* in #ifndef __CUDACC_RTC__"):
            loader.get_device_module("k", [source])


def test_a_file_of_kernels_works_as_it_is(tmp_path: Path, loader: Loader) -> None:
    nvrtc_or_skip()
    source = tmp_path / "k.cu"
    of_c = ("assert", "limits", "math", "stddef", "stdint", "stdio", "stdlib", "string")
    of_cxx = (
        *("array", "atomic", "bit", "concepts", "functional", "initializer_list", "limits"),
        *("numeric", "optional", "span", "tuple", "type_traits", "utility"),
    )
    headers = [*of_cxx, *(f"c{name}" for name in of_c), *(f"{name}.h" for name in of_c)]
    source.write_text(
        "".join(f"#include <{name}>\n" for name in headers)
        + """
        #include <cuda_runtime.h>
        #include <cuda_fp16.h>
        __device__ float twice(float x) { return 2.0f * x; }
        float plain(float x) { return std::fabs(x) + std::sqrt(x); }
        static __global__ void hidden(int64_t n, std::uint8_t b, const __half* x) { assert(n > 0); }
        extern "C" __global__ void scale(const float* x, float* out, size_t n) {
          static_assert(std::is_same_v<std::conditional_t<true, int, float>, int>);
          static_assert(sizeof(std::array<int, 3>) == 12 && INT_MAX > 1);
          static_assert(std::numeric_limits<float>::is_iec559);
          if (threadIdx.x < n) out[threadIdx.x] = plain(twice(x[threadIdx.x]));
        }
        """
    )
    module = loader.get_device_module("k", [source])
    assert [p.kind for p in module.scale.parameters] == ["u64", "u64", "u64"]
    assert [p.kind for p in module.hidden.parameters] == ["u64", "u8", "u64"]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("plain", "plain"),
        ("_Z4fillPf", "fill"),
        ("_ZL6hiddenl", "hidden"),
        ("_ZN4mine4fillEPffi4Pair", "mine::fill"),
        ("_ZN4mine38_GLOBAL__N__00000000_6_foo_cu_480df95b4anonEi", "mine::anon"),
        ("_ZN4mine5scaleI13__nv_bfloat16EEvPT_", None),
    ],
)
def test_kernels_are_named_by_their_symbols(symbol: str, name: str | None) -> None:
    assert plain_name(symbol) == name


def test_without_the_bindings_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NvrtcNotFoundError, match="Install jitquant's extra 'nvrtc'"):
        new_loader(tmp_path / "cache").get_device_module("scale", [write(tmp_path)])


def test_a_launch_by_cupy(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    cupy = MagicMock()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(kernel_module, "launcher", lambda: by_cupy)
    module = new_loader(tmp_path / "cache").get_device_module("scale", [source])
    for _ in range(2):
        module.fill[2, 32, 64 << 10, Stream()](Array(4096), 2, 5, bytes(8))
    assert isinstance(cupy.cuda.Stream.from_external.call_args.args[0], Stream)
    cupy.RawModule.assert_called_once()
    function = cupy.RawModule.return_value.get_function.return_value
    cupy.RawModule.return_value.get_function.assert_called_with(module.fill.symbol)
    assert function.max_dynamic_shared_size_bytes == 64 << 10
    (grid, block, values), options = function.call_args
    assert (grid, block, options) == ((2,), (32,), {"shared_mem": 64 << 10})
    assert [v.dtype.str for v in values] == ["<u8", "<f4", "<u4", "<u8"]


def test_a_launch_by_cuda_core(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numpy")
    core = MagicMock()
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(kernel_module, "launcher", lambda: by_cuda_core)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    module = new_loader(tmp_path / "cache").get_device_module("scale", [source])
    for _ in range(2):
        module.fill[2, 32, 128, Stream()](Array(4096), 2, 5, bytes(8))
    core.Stream.from_handle.assert_called_with(77)
    core.Device.assert_called_with(3)
    core.ObjectCode.from_cubin.assert_called_once_with(module.fill.cubin)
    core.LaunchConfig.assert_called_with(grid=(2,), block=(32,), shmem_size=128)
    stream, config, kernel, *values = core.launch.call_args.args
    assert stream is core.Stream.from_handle.return_value
    assert config is core.LaunchConfig.return_value
    code = core.ObjectCode.from_cubin.return_value
    code.get_kernel.assert_called_with(module.fill.symbol)
    assert kernel is code.get_kernel.return_value
    assert [v.dtype.str for v in values] == ["<u8", "<f4", "<u4", "<u8"]
