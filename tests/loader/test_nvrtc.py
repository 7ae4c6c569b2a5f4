"""backend="nvrtc": the device half of a .cu, compiled without nvcc and a host compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from pathlib import Path

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
from jitquant.loader.nvrtc.device_half import device_half
from jitquant.loader.nvrtc.device_module import parameters_of
from jitquant.loader.nvrtc.nvrtc import Nvrtc

from .toys import entries, finish, litter, new_loader, python

SOURCE = """
#include <cmath>
#include <cuda_bf16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <vector>
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

std::vector<float> only_for_the_host(const std::vector<float>& v) { return v; }

cudaError_t launch_fill(float* out, float value, int n, cudaStream_t stream) {
  fill<<<1, 32, 0, stream>>>(out, value, n, {0, 0});
  return cudaGetLastError();
}

JITQUANT_EXPORT(launch_fill, "fill(Tensor(a!) out, float value, int n) -> ()")
}  // namespace mine
"""
HEADER = """
#pragma once
#include <cuda_runtime.h>
struct Pair { float a, b; };
__device__ inline float times(float x, float s) { return x * s * FACTOR; }
inline cudaError_t host_only(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
"""


def nvrtc_or_skip() -> None:
    try:
        Nvrtc()
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
    assert "fill" in dir(module)
    assert repr(module).startswith("<DeviceModule 'scale' (sm_90a) key ")
    with pytest.raises(AttributeError, match=r"Did you mean 'fill'.*mine::scale_kernel<\.\.\.>"):
        _ = module.fil
    assert loader.get_device_module("scale", [source]) is module
    assert litter(tmp_path / "cache") == []
    cubins = list((tmp_path / "cache").glob("v1/entries/*/*/*.cubin"))
    assert len(cubins) == len(entries(tmp_path / "cache")) == 2
    assert cubins[0].read_bytes()[:4] == b"\x7fELF"


def test_it_is_quick_with_the_fp8_and_fp4_headers(source: Path, tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache")
    loader.get_device_module("scale", [source])
    seconds = []
    for factor in (2, 3, 4):
        write(source.parent, factor)
        started = time.perf_counter()
        loader.get_device_module("scale", [source])
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.5, seconds


def test_edits_are_seen_and_what_was_built_is_found(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    loader = new_loader(cache)
    first = loader.get_device_module("scale", [source])
    write(source.parent, 7)
    second = loader.get_device_module("scale", [source])
    assert second is not first
    write(source.parent, 1)
    assert loader.get_device_module("scale", [source]) is first
    assert len(entries(cache)) == 2
    # Another loader, and the same tree at another place, only read the cache.
    again = new_loader(cache).get_device_module("scale", [write(tmp_path / "elsewhere")])
    assert again.key == first.key
    assert len(entries(cache)) == 2
    unreloaded = new_loader(cache, reload=False)
    module = unreloaded.get_device_module("scale", [source])
    write(source.parent, 9)
    assert unreloaded.get_device_module("scale", [source]) is module


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
    assert litter(tmp_path / "cache") == []


def test_bad_requests(source: Path, tmp_path: Path, loader: Loader) -> None:
    other = write(tmp_path / "other")
    with pytest.raises(ValueError, match=r"compiles one \.cu, and 2 were named"):
        loader.get_device_module("scale", [source, other])
    with pytest.raises(ValueError, match="for one architecture, and 90a, 100a"):
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


def test_no_build(source: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    with pytest.raises(NoBuildError, match=r'get_cuda_module\("scale".*, backend="nvrtc"\)'):
        loader.get_device_module("scale", [source], archs="90a")


def test_a_damaged_cubin_is_built_again(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    new_loader(cache).get_device_module("scale", [source])
    (cubin,) = cache.glob("v1/entries/*/*/*.cubin")
    cubin.write_bytes(cubin.read_bytes()[:100])
    with pytest.warns(UserWarning, match="is damaged"):
        new_loader(cache).get_device_module("scale", [source])
    assert litter(cache) == []


@pytest.mark.parametrize("name", ["amax_gsa", "dequant_nvfp4", "quantize_nvfp4"])
def test_kernels_of_the_project_compile(tmp_path: Path, name: str) -> None:
    """Their headers are read whole; templates are only parsed until an instance is asked for."""
    nvrtc_or_skip()
    module = new_loader(tmp_path / "cache").get_device_module(name, [f"{name}.cu"])
    assert module.arch == "90a"


def launched(source: Path, tmp_path: Path) -> tuple[DeviceModule, list[tuple[object, ...]]]:
    """A module whose launches are only noted down."""
    module = new_loader(tmp_path / "cache").get_device_module("scale", [source])
    calls: list[tuple[object, ...]] = []
    module._launch = lambda *args: calls.append(args)  # type: ignore[method-assign]
    return module, calls


class Array:
    """What CuPy's arrays and others offer."""

    def __init__(self, pointer: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False)}


def test_arguments_get_the_size_of_their_parameters(source: Path, tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    module, calls = launched(source, tmp_path)

    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_float), ("b", ctypes.c_float))

    module.fill[(2, 3), 32](Array(4096), 2, 5, Pair(1.0, 2.0))
    module.fill[1, (8, 8, 1), 1024, 77](None, 0.5, np.int64(-1), bytes(8))
    (_, symbol, grid, block, shared, stream, values, _), second = calls
    assert (symbol, grid, block, shared, stream) == (
        module.fill.symbol,
        (2, 3, 1),
        (32, 1, 1),
        0,
        None,
    )
    assert [v.dtype.str for v in values] == ["<u8", "<f4", "<u4", "|V8"]
    assert (int(values[0]), float(values[1]), int(values[2])) == (4096, 2.0, 5)
    assert values[3].tobytes() == bytes(Pair(1.0, 2.0))
    assert second[2:6] == ((1, 1, 1), (8, 8, 1), 1024, 77)
    assert [int(v) for v in second[6][:1]] == [0]
    assert int(second[6][2]) == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((torch.ones(1), 1.0, 1, bytes(8)), ValueError, r"argument 0 is a tensor on cpu; move it"),
        ((Array(8), 1.0, 1), TypeError, r"takes 4 arguments \(u64, f32, u32, b8\), and 3 were"),
        ((Array(8), Array(8), 1, bytes(8)), TypeError, "argument 1 is an array; the parameter is"),
        ((Array(8), 1.0, 1.5, bytes(8)), TypeError, "argument 2 is float; .* integer of 32 bits"),
        ((Array(8), "x", 1, bytes(8)), TypeError, "argument 1 is str; the parameter is f32"),
        ((Array(8), 1.0, 1 << 32, bytes(8)), ValueError, "argument 2 is 4294967296, which does"),
        ((Array(8), 1.0, 1, bytes(4)), ValueError, "argument 3 has 4 bytes; the parameter has 8"),
    ],
)
def test_wrong_arguments_are_refused_before_a_launch(
    source: Path, tmp_path: Path, arguments: tuple[object, ...], error: type, said: str
) -> None:
    pytest.importorskip("numpy")
    module, calls = launched(source, tmp_path)
    with pytest.raises(error, match=said):
        module.fill[1, 1](*arguments)
    assert calls == []


@pytest.mark.parametrize("configuration", [1, (1,), (0, 1), (1, (1, 1, 1, 1)), (1, 1.0), (1,) * 5])
def test_wrong_launch_shapes_are_refused(
    source: Path, tmp_path: Path, configuration: object
) -> None:
    module, _ = launched(source, tmp_path)
    with pytest.raises((TypeError, ValueError), match="kernel 'mine::fill'"):
        module.fill[configuration]


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
    assert parameters_of(ptx) == {"none": [], "some": [["u64", 8], ["b8", 12], ["u8", 1]]}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("__global__ void k() { f(); }", True),
        ("static __device__ float f(float x) { return x; }", True),
        ("constexpr int f(int n) { return n; }", True),
        ("MACRO_HD float f(float x) { return x; }", True),
        ("struct A { int f() { return 1; } };", True),
        ("template <class T> struct B { T x; };", True),
        ("constexpr int kTable[2] = {f(1), 2};", True),
        ("using F = int (*)(int);", True),
        ("__device__ int f(int);", True),
        ("enum class E : int { kA };", True),
        ("DEFINE_KERNEL(float)", True),
        ("int main() { return 0; }", False),
        ("template <class T> int f(T x) { if (x) { return 1; } return 0; }", False),
        ("cudaError_t launch(const float*, cudaStream_t);", False),
        ("inline std::vector<int> f(std::vector<int> v) { return v; }", False),
        ("auto f(int x) -> int { return x; }", False),
        ('JITQUANT_EXPORT(launch, "f(Tensor x) -> ()")', False),
    ],
)
def test_what_belongs_to_the_host(text: str, left: bool) -> None:
    for before, after in (("", ""), ("namespace n {\n", "\n}"), ('extern "C" {\n', "\n}")):
        half = device_half(f"{before}{text}{after}\n__device__ int last;")
        expected = text if left else ""
        assert half.text.strip() == f"{before}{expected}{after}\n__device__ int last;".strip()


def test_lines_stay_where_they_were_and_kernels_are_named() -> None:
    text = (
        '// int f() {\nnamespace a::b {\nvoid host(const char* s = "}") {\n  if (s) {\n  }\n}\n'
        "namespace {\ntemplate <class T>\n__global__ void t(T* x) {}\n}\n"
        "__global__ void __launch_bounds__(1 << 8)\n    plain(int n) {}\n}\n"
        'extern "C" __global__ void c() {}\n'
    )
    half = device_half(text)
    assert half.text.count("\n") == text.count("\n")
    assert "host" not in half.text
    assert [(k.name, k.template, k.line) for k in half.kernels] == [
        ("a::b::t", True, 8),
        ("a::b::plain", False, 11),
        ("c", False, 14),
    ]


def test_without_the_library_the_error_says_what_to_install(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.pathfinder

    def missing(name: str) -> None:
        raise cuda.pathfinder.DynamicLibNotFoundError(f"no {name}")

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(NvrtcNotFoundError, match="Install jitquant's extra 'nvrtc'"):
        new_loader(tmp_path / "cache").get_device_module("scale", [source])


def test_stand_ins_for_the_library_agree_with_it(tmp_path: Path) -> None:
    """The traits give what the C++ library's give, by asserting the same of both."""
    nvrtc_or_skip()
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    text = """
    #include <cstdint>
    #include <type_traits>
    static_assert(std::is_same_v<std::remove_cv_t<const volatile int>, int>);
    static_assert(std::is_same_v<std::decay_t<const int&>, int>);
    static_assert(std::is_same_v<std::conditional_t<false, int, long>, long>);
    static_assert(std::is_same_v<std::remove_pointer_t<int*>, int>);
    static_assert(std::is_integral_v<uint8_t> && std::is_integral<const long>::value);
    static_assert(!std::is_integral_v<float> && std::is_floating_point_v<const double>);
    static_assert(std::is_signed_v<float> && !std::is_signed_v<bool>);
    static_assert(std::is_unsigned_v<unsigned> && !std::is_unsigned_v<float>);
    static_assert(std::is_pointer_v<int*> && !std::is_pointer_v<int> && std::is_const_v<const int>);
    enum class E : short { e };
    static_assert(std::is_void_v<void> && std::is_enum_v<E> && !std::is_enum_v<int>);
    static_assert(std::is_same_v<std::underlying_type_t<E>, short>);
    struct A {}; struct B : A {};
    static_assert(std::is_base_of_v<A, B> && std::is_convertible_v<int, double>);
    static_assert(std::integral_constant<int, 3>::value == 3 && std::true_type::value);
    static_assert(sizeof(int64_t) == 8 && sizeof(uintptr_t) == 8);
    template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
    constexpr T f(T x) { return x; }
    static_assert(f(2) == 2);
    """
    (tmp_path / "k.cpp").write_text(text)
    command = [compiler, "-std=c++20", "-fsyntax-only", str(tmp_path / "k.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "k.cu").write_text(text + "__global__ void k() {}\n")
    loader = new_loader(tmp_path / "cache")
    assert loader.get_device_module("k", [tmp_path / "k.cu"], cuda_flags=["-std=c++20"]).k
