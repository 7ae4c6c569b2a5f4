"""A caller's existing .cu with torch's headers in it, on a CUDA build of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jitquant.loader import Loader
from jitquant.loader.request.scan import scan_includes

BODY = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
__global__ void multiply(const float* x, float* y, float s, int64_t n) {
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = x[i] * s;
}
torch::Tensor scale(torch::Tensor x, double s) {
  if (!x.is_cuda()) return x * s;
  auto y = torch::empty_like(x);
  multiply<<<(x.numel() + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), s, x.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def("scale_op(Tensor x, float s) -> Tensor", &scale);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scale", &scale); }
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None, reason="torch's CUDA headers come with a CUDA build of torch"
)
def test_pybind_and_torch_library_in_a_kernel(
    tmp_path: Path, loader: Loader, nvcc: None, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "user.cu"
    source.write_text(BODY)
    module = loader.get("user", [source])
    said = capfd.readouterr().err
    assert "the torch headers in user.cu cost most of the time" in said
    x = torch.ones(3)
    assert torch.equal(module.scale(x, 2.0), x * 2)
    assert torch.equal(module.scale_op(x, 2.0), x * 2)


@pytest.mark.parametrize(
    ("line", "torch_headers"),
    [
        ("#include <torch/extension.h>", True),
        ("#include <ATen/ATen.h>", True),
        ("  #  include  <c10/util/Half.h>", True),
        ("#include <pybind11/pybind11.h>", True),
        ("#include <Python.h>", True),
        ("#include <torch/csrc/stable/library.h>", False),
        ("#include <torch/headeronly/util/Half.h>", False),
        ("#include <torch/csrc/inductor/aoti_torch/c/shim.h>", False),
        ("#include <cuda_fp8.h>", False),
        ("// #include <torch/extension.h>", False),
    ],
)
def test_which_includes_are_torchs(tmp_path: Path, line: str, torch_headers: bool) -> None:
    (tmp_path / "k.cu").write_text('#include "k.cuh"\n')
    (tmp_path / "k.cuh").write_text(line + "\n")
    scan = scan_includes(str(tmp_path / "k.cu"), [])
    assert scan.torch == torch_headers
