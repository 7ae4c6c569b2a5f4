"""The ops and the public functions on a GPU: the CPU's results, inside torch as on the CPU."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ops.test_public_fp8 import both_calls, buffers_like, calls
from samples import OPS, SAMPLES, Sample, assert_nearly, poisoned_buffers, randn
from torch import Tensor

import jitquant
from jitquant import QuantizedActivation, reference
from jitquant.testing import assert_capturable, assert_no_sync, bytes_of, count_launches

from .helpers import same

NAMES = sorted(OPS)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
BF16_PRODUCTS = {"nvfp4_linear_fp8": 2.0**-7}
"""What is accepted of the largest result: sums in another order, rounded to bf16."""


def _agree(
    sample: Sample, by_row: bool, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> None:
    """Bit for bit; of the fusions all but a few codes (test_fused.py says why)."""
    if OPS[sample.op].results == ("amax", "inv_rms"):
        # How many maxima there are is the device's affair, what the largest is is not.
        got, expected = ((t[0].amax().reshape(1), t[1]) for t in (got, expected))
    if OPS[sample.op].results == ("maxima",) and not by_row:
        got, expected = ((t[0].amax(dim=-1, keepdim=True),) for t in (got, expected))
    if sample.exact:
        same(got, expected, what=str(sample))
        return
    for name, a, b in zip(OPS[sample.op].results, got, expected, strict=True):
        if sample.op in BF16_PRODUCTS:
            atol = BF16_PRODUCTS[sample.op] * float(b.abs().amax()) if b.numel() else 0.0
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=atol)
        elif name != "x_sf":
            assert_nearly(a.cpu(), b, name, str(sample))


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_equals_the_cpu(name: str) -> None:
    _skip_without_kernels(name)
    for sample in SAMPLES[name]:
        cpu_args, cpu_kwargs = sample.make("cpu")
        args, kwargs = sample.make("cuda")
        op = OPS[name]
        expected = _as_tuple(op.default(*cpu_args, **cpu_kwargs))
        by_row = kwargs.get("granularity") == "row"
        _agree(sample, by_row, _as_tuple(op.default(*args, **kwargs)), expected)
        if kwargs.get("residual") is not None:
            same([kwargs["residual"]], [cpu_kwargs["residual"]])
        args, kwargs = sample.make("cuda")
        buffers = poisoned_buffers(op, args, kwargs)
        assert op.out(*args, **kwargs, **buffers) is None
        _agree(sample, by_row, tuple(buffers[r] for r in op.results), expected)


def _skip_without_kernels(name: str) -> None:
    if name == "nvfp4_linear_fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 products need compute capability 8.9")


def _plain_sample(name: str) -> Sample:
    for sample in SAMPLES[name]:
        args, _ = sample.make("cpu")
        tensors = [a for a in args if isinstance(a, Tensor)]
        if all(t.numel() and not t.isnan().any() for t in tensors if t.dtype.itemsize > 1):
            return sample
    raise AssertionError(name)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    _skip_without_kernels(name)
    sample = _plain_sample(name)
    args, kwargs = sample.make("cuda")
    # PyTorch cannot compare arguments of these dtypes.
    small = any(isinstance(a, Tensor) and a.dtype in FP8 for a in args)
    checks = ["test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration"]
    checks += [] if small else ["test_schema"]
    results = torch.library.opcheck(OPS[name].default, args, kwargs, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


def _steps() -> dict[str, tuple[Callable[..., Any], list[Tensor], int]]:
    """Per public function: a call, its arguments, its launches."""
    x, w = randn(150, 768).cuda(), randn(768).abs().cuda()
    residual, X = randn(150, 768, seed=2).cuda(), randn(150, 4, 768).cuda()
    a = torch.rand(150, 4, device="cuda")
    gsa = torch.tensor([0.002], device="cuda")
    buffers = QuantizedActivation.empty((150, 768), device="cuda")
    q = jitquant.quantize_nvfp4(x)
    one = 1 if torch.cuda.get_device_capability() >= (9, 0) else 2  # it has few values
    return {
        "amax_gsa": (jitquant.amax_gsa, [x], 1),
        "tensor": (jitquant.quantize_nvfp4, [x], 2),
        "out": (lambda t: jitquant.quantize_nvfp4(t, out=buffers), [x], 2),
        "row": (lambda t: jitquant.quantize_nvfp4(t, granularity="row"), [x], 1),
        "given": (lambda t: jitquant.quantize_nvfp4(t, gsa), [x], 1),
        "number": (lambda t: jitquant.quantize_nvfp4(t, 0.002), [x], 1),
        "weight": (lambda t: jitquant.quantize_weight_nvfp4(t, block="16x16"), [x], 2),
        "swiglu": (lambda t: jitquant.deinterleave_quantize_nvfp4(t, 384), [x], one),
        "rmsnorm": (jitquant.rmsnorm_quantize_nvfp4, [x, w], 1),
        "residual": (
            lambda t, v, r: jitquant.rmsnorm_quantize_nvfp4(t, v, residual=r),
            [x, w, residual],
            1,
        ),
        "mhc": (jitquant.mhc_rmsnorm_quantize_nvfp4, [X, a, w], 1),
        "dequantize": (lambda t: jitquant.dequantize_nvfp4(q), [x], 1),
    }


def _steps_of_8_bits() -> dict[str, tuple[Callable[..., Any], list[Tensor], int]]:
    """As `_steps`; a call is made twice, into buffers as well."""
    x, w, residual = randn(150, 768).cuda(), randn(768).abs().cuda(), randn(150, 768, seed=2).cuda()
    inputs = [x, w, randn(150, 1536).cuda(), torch.tensor([3.0], device="cuda")]
    q = jitquant.quantize_mxfp8(x, scale_layout="swizzled_128x4")
    values = torch.empty_like(x)
    steps: dict[str, tuple[Callable[..., Any], list[Tensor], int]] = {
        "dequantize": (lambda t: (q.dequantize(), q.dequantize(out=values)), [x], 2),
    }
    for norm in (jitquant.rmsnorm_quantize_fp8, jitquant.rmsnorm_quantize_per_token_group):
        step = partial(lambda f, t, v, r: f(t, v, residual=r), norm)
        steps[f"{norm.__name__} residual"] = (step, [x, w, residual], 1)

    def made(*t: Tensor) -> dict[str, Callable[..., Any]]:
        return {**calls(*t), **both_calls(t[0])}

    for name, call in made(*inputs).items():
        buffers = buffers_like(call())

        def both(*t: Tensor, name: str = name, buffers: Any = buffers) -> tuple[Any, Any]:
            return made(*t)[name](), made(*t)[name](out=buffers)

        # Two launches give a scale or an amax of a whole tensor with as many values.
        whole = name in ("tensor", "tensor e5m2", "given", "silu given")
        steps[name] = (both, inputs, 4 if whole else 2)
    return steps


@pytest.mark.parametrize("steps", [_steps, _steps_of_8_bits])
def test_public_functions_launch_capture_and_never_wait(
    steps: Callable[[], dict[str, tuple[Callable[..., Any], list[Tensor], int]]],
) -> None:
    for name, (fn, args, launches) in steps().items():
        assert count_launches(fn, *args) == launches, name
        assert_no_sync(fn, *args)
        assert_capturable(fn, *args)


def test_the_helpers_fail_where_they_should() -> None:
    x = randn(64, 64).cuda()
    with pytest.raises(RuntimeError):
        assert_no_sync(lambda t: t.sum().item(), x)
    calls: list[int] = []

    def depends_on_the_call(t: Tensor) -> Tensor:
        calls.append(1)
        return t + len(calls)

    with pytest.raises(AssertionError, match="differs from the eager call"):
        assert_capturable(depends_on_the_call, x)
    assert count_launches(lambda t: (t + 1, t.clone()), x) == 2


def test_a_compiled_model() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
            self.up = torch.nn.Parameter(randn(1024, 256) / 16)
            self.down = torch.nn.Parameter(randn(256, 512) / 16)

        def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, QuantizedActivation]:
            q = jitquant.rmsnorm_quantize_nvfp4(x, self.norm, residual=residual)
            fused = q.dequantize() @ self.up.T
            h = jitquant.deinterleave_quantize_nvfp4(fused, 512)
            y = h.dequantize() @ self.down.T
            return y, jitquant.quantize_nvfp4(y, scale_layout="swizzled_128x4")

    model = Block().cuda()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for rows in (8, 24):
            x, residual = randn(rows, 256).cuda(), randn(rows, 256, seed=1).cuda()
            want_residual, got_residual = residual.clone(), residual.clone()
            want, want_q = model(x, want_residual)
            got, got_q = compiled(x, got_residual)
            same([got_residual], [want_residual])
            same(
                [got, got_q.x_fp4, got_q.x_sf, got_q.gsa],
                [want, want_q.x_fp4, want_q.x_sf, want_q.gsa],
            )


def test_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    for dtype in (cupy.float16, cupy.float32):
        x = cupy.random.standard_normal((64, 256)).astype(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            q = jitquant.quantize_nvfp4(x)
        same([q.x_fp4, q.x_sf, q.gsa], reference.quantize_nvfp4(torch.from_dlpack(x)))
        codes = cupy.from_dlpack(q.x_fp4_bytes)
        assert codes.shape == (64, 128)
        back = cupy.from_dlpack(q.dequantize(torch.float32))
        assert float(abs(back - x.astype(cupy.float32)).max()) < 1


def test_moves_between_devices() -> None:
    q = jitquant.quantize_nvfp4(randn(33, 100).cuda(), granularity="row")
    there = q.to("cpu").to("cuda")
    for a, b in ((q.x_fp4, there.x_fp4), (q.x_sf, there.x_sf), (q.gsa, there.gsa)):
        assert torch.equal(bytes_of(a), bytes_of(b))
    assert torch.equal(q.dequantize(), there.dequantize())
    assert torch.equal(q.dequantize().cpu(), q.to("cpu").dequantize())


def test_bad_arguments_say_what_they_say_on_the_cpu() -> None:
    x = randn(4, 64).cuda()
    with pytest.raises(ValueError, match=r"gsa.*cpu.*cuda"):
        jitquant.quantize_nvfp4(x, torch.ones(1))
    residual = torch.zeros(64, 4, dtype=x.dtype, device="cuda").T
    with pytest.raises(ValueError, match=r"residual: expected a contiguous last dimension"):
        jitquant.rmsnorm_quantize_nvfp4(x, torch.ones(64, device="cuda"), residual=residual)
    with pytest.raises(TypeError, match="bfloat16"):
        jitquant.quantize_nvfp4(x.int())


def test_a_cold_module_under_capture_is_refused_at_once(tmp_path: Any) -> None:
    from jitquant.loader import CaptureError, Loader

    loader = Loader(cache_dir=tmp_path)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=r"warmup\("), torch.cuda.graph(graph):
        loader.get("amax_gsa", ["amax_gsa.cu"])


def test_after_an_edit_a_captured_graph_keeps_the_old_code(tmp_path: Any) -> None:
    from jitquant.loader import Loader

    (tmp_path / "bindings").mkdir()
    source = tmp_path / "scale.cu"

    def write(factor: str) -> None:
        source.write_text(
            "#include <cuda_runtime.h>\n"
            "__global__ void k(float* x, int n) { int i = blockIdx.x * 256 + threadIdx.x;"
            f" if (i < n) x[i] *= {factor}; }}\n"
            "cudaError_t launch(float* x, int n, cudaStream_t s) {"
            " k<<<(n + 255) / 256, 256, 0, s>>>(x, n); return cudaGetLastError(); }\n"
        )

    write("2.0f")
    kernels = jitquant.loader.core.default_kernels_dir()
    (tmp_path / "bindings" / "scale.cpp").write_text(
        "#include <torch/csrc/stable/library.h>\n"
        "#include <torch/csrc/stable/tensor.h>\n"
        f'#include "{kernels}/bindings/stream.h"\n'
        f'#include "{kernels}/bindings/text.h"\n'
        "cudaError_t launch(float* x, int n, cudaStream_t s);\n"
        "void scale(const torch::stable::Tensor& x) { jitquant::check_launch(launch("
        "static_cast<float*>(x.mutable_data_ptr()), static_cast<int>(x.numel()),"
        ' jitquant::current_stream(x.get_device_index())), "scale"); }\n'
        'STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("scale(Tensor(a!) x) -> ()"); }\n'
        "STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {"
        ' m.impl("scale", TORCH_BOX(&scale)); }\n'
    )
    loader = Loader(cache_dir=tmp_path / "cache")
    x = torch.ones(1000, device="cuda")
    loader.get("scale", [source]).scale(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loader.get("scale", [source]).scale(x)
    write("5.0f")
    loader.get("scale", [source]).scale(x)  # 2 * 5
    graph.replay()  # * 2, the old code
    torch.cuda.synchronize()
    assert x.unique().tolist() == [20.0]
    write("2.0f")
    loader.get("scale", [source]).scale(x)
    assert x.unique().tolist() == [40.0]


FIRST_CALL = """
import torch, jitquant
from jitquant import reference
from jitquant.loader import CaptureError
jitquant.warmup("fused_amax_quantize")
x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
torch.cuda.set_sync_debug_mode("error")
with torch.cuda.graph(graph):
    q = jitquant.quantize_nvfp4(x)
torch.cuda.set_sync_debug_mode("default")
x.copy_(torch.randn(300, 1024, device="cuda") * 7)
graph.replay()
codes, scales, gsa = reference.quantize_nvfp4(x)
assert torch.equal(q.x_fp4_bytes, codes.view(torch.uint8))
assert torch.equal(q.x_sf_bytes, scales.view(torch.uint8))
assert torch.equal(q.gsa, gsa)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        jitquant.amax_gsa(x)
except CaptureError as error:
    assert "warmup(" in str(error)
else:
    raise AssertionError("a module that is not loaded was captured")
jitquant.freeze()
jitquant.quantize_nvfp4(x)
print("as expected")
"""


def test_the_first_call_of_a_process_is_captured_after_warmup() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert done.stdout == "as expected\n", done.stderr
