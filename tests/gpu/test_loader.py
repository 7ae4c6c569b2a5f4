"""The loader's own features where they need a GPU: exported launchers, live editing, NVRTC."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import jitquant
from jitquant.loader import CudaModule, Loader, OldGraphWarning
from jitquant.loader.nvrtc import kernel
from jitquant.loader.watch.live import was_captured
from jitquant.testing import assert_no_sync, count_launches

from .helpers import module

SOURCE = """
#include <cuda_bf16.h>
#include "jitquant/export.h"

constexpr float kFactor = 1.0f;

template <class T, int kTimes>
__global__ void scale_kernel(const T* x, float s, T* out, int64_t n) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = static_cast<T>(static_cast<float>(x[i]) * s * kFactor * kTimes);
}

__global__ void fill(float* out, float value, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = value * kFactor;
}

__global__ void reversed(const int* from, int* to) {
  extern __shared__ int shared[];
  shared[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  to[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

#ifndef __CUDACC_RTC__
cudaError_t launch_scale(const jitquant::TensorView& x, float s, const float* bias,
                         const jitquant::TensorView& out, cudaStream_t stream) {
  const float* from = x.contiguous().data<const float>();
  float* to = out.with_shape_of(x).contiguous().data<float>();
  const int64_t n = x.numel();
  if (bias != nullptr) jitquant::refuse("bias is not for this kernel");
  if (n == 0) return cudaSuccess;
  if (s == 1000.0f) return cudaErrorLaunchOutOfResources;
  scale_kernel<float, 1><<<static_cast<unsigned>((n + 255) / 256), 256, 0, stream>>>(from, s, to,
                                                                                     n);
  return cudaGetLastError();
}
JITQUANT_EXPORT(launch_scale,
                "scale(Tensor x, float s, Tensor? bias=None, *, Tensor(a!) out) -> ()")
#endif
"""


def write(directory: Path, factor: float = 1.0) -> Path:
    source = directory / "gpu_scale.cu"
    source.write_text(SOURCE.replace("kFactor = 1.0f", f"kFactor = {factor}f"))
    return source


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return Loader(cache_dir=tmp_path_factory.mktemp("cache"), reload=True)


@pytest.fixture(scope="module")
def scale(loader: Loader, tmp_path_factory: pytest.TempPathFactory) -> CudaModule:
    return loader.get("gpu_scale", [write(tmp_path_factory.mktemp("source"))])


def test_an_exported_launcher_runs_on_the_current_stream(scale: CudaModule) -> None:
    x = torch.randn(1000, 33, device="cuda")
    out = torch.empty_like(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        y = x * 2
        scale.scale(y, 1.5, out=out)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(out, x * 2 * 1.5)
    empty = torch.empty(0, device="cuda")
    assert scale.scale(empty, 1.0, out=empty) is None
    assert count_launches(lambda: scale.scale(x, 2.0, out=out)) == 1
    assert_no_sync(lambda: scale.scale(x, 2.0, out=out))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": lambda x: x.cpu()}, "scale: x: expected a tensor on cuda, got one on the CPU"),
        ({"out": lambda x: x.cpu()}, "scale: out: expected a tensor on cuda, got one on the CPU"),
        ({"x": lambda x: x.half()}, r"scale: x: expected float32, got float16\. Convert it"),
        ({"x": lambda x: x.t()}, r"x: expected contiguous memory, got strides \(1, 4\)\. Pass x"),
        ({"out": lambda x: x[1:]}, r"scale: out: expected the shape of x, \(4, 4\), got \(3, 4\)"),
        ({"bias": lambda x: x}, "scale: bias is not for this kernel"),
        ({"bias": lambda x: x.half()}, "scale: bias: expected float32, got float16"),
        ({"s": lambda x: 1000.0}, "scale: CUDA error cudaErrorLaunchOutOfResources"),
    ],
)
def test_wrong_arguments_are_refused_before_a_launch(
    scale: CudaModule, change: dict[str, Callable[[torch.Tensor], object]], said: str
) -> None:
    x, out = torch.ones(4, 4, device="cuda"), torch.zeros(4, 4, device="cuda")
    arguments = {"x": x, "s": 2.0, "bias": None, "out": out}
    for name, make in change.items():
        arguments[name] = make(out if name == "out" else x)
    with pytest.raises(RuntimeError, match=said):
        scale.scale(**arguments)
    torch.cuda.synchronize()
    assert not out.any()


def test_an_exported_operator_can_be_compiled(scale: CudaModule) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        scale.scale(x + 1, 2.0, out=out)
        return out - 1

    x = torch.randn(100, device="cuda")
    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), doubled(x))


def test_a_graph_of_the_code_before_an_edit_replays_and_is_named(
    loader: Loader, tmp_path: Path
) -> None:
    source = write(tmp_path, 3.0)
    old = loader.get("gpu_scale", [source])
    x, out = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
    old.scale(x, 1.0, out=out)
    assert not was_captured(old)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        old.scale(x, 1.0, out=out)
    assert was_captured(old)
    write(tmp_path, 5.0)
    with pytest.warns(OldGraphWarning, match="'gpu_scale' was edited"):
        new = loader.get("gpu_scale", [source])
    out.zero_()
    graph.replay()
    assert out.tolist() == [3.0] * 8
    new.scale(x, 1.0, out=out)
    assert out.tolist() == [5.0] * 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(tmp_path, 6.0)
        loader.get("gpu_scale", [source]).scale(x, 1.0, out=out)
    assert out.tolist() == [6.0] * 8
    graph.replay()
    assert out.tolist() == [3.0] * 8


@pytest.mark.parametrize("way", ["dispatcher", "public function"])
def test_the_projects_kernels_say_that_they_were_captured(way: str) -> None:
    amax = module("amax_gsa")
    call = amax.compute_amax_gsa if way == "dispatcher" else jitquant.amax_gsa
    x = torch.randn(64, 64, device="cuda")
    call(x)
    flag = ctypes.c_int.in_dll(amax.library, "jitquant_captured")
    flag.value = 0  # another test may have captured it
    call(x)
    assert not was_captured(amax)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(x)
    assert was_captured(amax)


@pytest.fixture(params=["cupy", "cuda.core"])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(request.param)
    ways = {"cupy": kernel.by_cupy, "cuda.core": kernel.by_cuda_core}
    monkeypatch.setattr(kernel, "launcher", lambda: ways[request.param])


@pytest.mark.usefixtures("launcher")
def test_kernels_of_nvrtc_run(loader: Loader, tmp_path: Path) -> None:
    compiled = loader.get_device_module("gpu_scale", [write(tmp_path, 2.0)])
    x = torch.randn(1000, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    kernel = compiled.kernel("scale_kernel<__nv_bfloat16, 3>")
    kernel[(4,), 256](x, 0.5, y, x.numel())
    assert torch.equal(y, (x.float() * 0.5 * 2 * 3).bfloat16())

    out = torch.zeros(10, device="cuda")
    compiled.fill[1, 32](out, 2, 7)
    assert out.tolist() == [4.0] * 7 + [0.0] * 3

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        values = torch.arange(512, dtype=torch.int32, device="cuda") * 2
        back = torch.empty_like(values)
        compiled.reversed[1, 512, 512 * 4](values, back)
        side.synchronize()
    assert back.tolist() == list(range(1022, -1, -2))
    compiled.fill[1, 32, 0, side](out, 1.0, 10)
    side.synchronize()
    assert out.tolist() == [2.0] * 10


def test_kernels_of_nvrtc_take_cupy_arrays(loader: Loader, tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    compiled = loader.get_device_module("gpu_scale", [write(tmp_path, 4.0)])
    out = cupy.zeros(10, dtype=cupy.float32)
    compiled.fill[1, 32](out, 0.5, 10)
    assert out.get().tolist() == [2.0] * 10
    mixed = torch.zeros(10, device="cuda")
    compiled.kernel("scale_kernel<float, 1>")[1, 32](out, 1.0, mixed, 10)
    assert mixed.tolist() == [8.0] * 10


def test_edited_kernels_of_nvrtc_run(loader: Loader, tmp_path: Path) -> None:
    out = torch.zeros(10, device="cuda")
    for factor in (10.0, 11.0, 12.0):
        loader.get_device_module("gpu_scale", [write(tmp_path, factor)]).fill[1, 32](out, 1.0, 10)
        assert out.tolist() == [factor] * 10
