"""The product in NVFP4, and the arguments of scaled_mm, read as cuBLASLt reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

import jitquant
from jitquant.nn import NVFP4TrainingLinear, _nvfp4_mm

from .helpers import spread, sqnr

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def unpacked(codes: Tensor) -> Tensor:
    """Values of packed E2M1, the even element in the low nibble."""
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()
    return CODES[both % 8] * torch.where(both >= 8, -1.0, 1.0)


def as_cublas_reads_nvfp4(arguments: dict[str, Any]) -> Tensor:
    """The NVFP4 product of scaled_mm's arguments, in float64, tile addresses as in cuBLAS' docs."""
    operands = []
    for side in "ab":
        codes, scales = arguments[f"mat_{side}"], arguments[f"scale_{side}"]
        codes = codes if side == "a" else codes.t()
        assert codes.dtype == torch.float4_e2m1fn_x2
        assert codes.is_contiguous()
        values = unpacked(codes.view(torch.uint8)).double()
        rows, groups = values.shape[0], values.shape[1] // 16
        assert scales[0].is_contiguous()
        assert scales[0].numel() == -(-rows // 128) * 128 * -(-groups // 4) * 4
        recipes = [ScalingType.BlockWise1x16, ScalingType.TensorWise][: len(scales)]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(scales)]
        assert arguments[f"scale_recipe_{side}"] == recipes
        assert arguments[f"swizzle_{side}"] == swizzles
        m, g = torch.arange(rows)[:, None], torch.arange(groups)[None, :]
        tile = (m // 128) * (-(-groups // 4)) + g // 4
        address = tile * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + g % 4
        values *= scales[0].double().flatten()[address].repeat_interleave(16, dim=1)
        operands.append(values * (scales[1].double() if len(scales) > 1 else 1))
    return operands[0] @ operands[1].T


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_nvfp4_arguments(layout: str, granularity: str) -> None:
    x = jitquant.quantize_nvfp4(spread(130, 96), granularity=granularity, scale_layout=layout)
    w = jitquant.quantize_weight_nvfp4(spread(80, 96, 1), scale_layout=layout)
    want = x.dequantize(torch.float32).double() @ w.dequantize(torch.float32).double().T
    got = as_cublas_reads_nvfp4(_nvfp4_mm.nvfp4_arguments(x, w, torch.bfloat16))
    if granularity == "row":
        got = got * x.gsa[:, None].double() * w.gsa.double()
    assert sqnr(got, want) > 120


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_is_called_on_sm_100(
    monkeypatch: pytest.MonkeyPatch, granularity: str, with_bias: bool
) -> None:
    """The path to scaled_mm, with scaled_mm replaced by a reading of its arguments."""

    def read(out: Tensor, *, output_dtype: torch.dtype, **arguments: Any) -> None:
        calls.append(output_dtype)
        out.copy_(as_cublas_reads_nvfp4(arguments))

    calls: list[torch.dtype] = []
    x = jitquant.quantize_nvfp4(randn(3, 5, 96), granularity=granularity)
    w = jitquant.quantize_weight_nvfp4(randn(80, 96, seed=1))
    bias = randn(80, seed=2) if with_bias else None
    want = _nvfp4_mm.nvfp4_mm(x, w, bias, torch.bfloat16)
    monkeypatch.setattr(_nvfp4_mm, "has_microscaling", lambda device: True)
    monkeypatch.setattr(_nvfp4_mm, "scaled_mm_into", read)
    got = _nvfp4_mm.nvfp4_mm(x, w, bias, torch.bfloat16)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    once = granularity == "tensor" and not with_bias
    assert calls == [torch.bfloat16 if once else torch.float32]
    wide = _nvfp4_mm.nvfp4_mm(x, w, bias, torch.float32)
    torch.testing.assert_close(wide, want.float(), rtol=1e-2, atol=1e-2)
    assert calls.pop() == torch.float32
    odd = jitquant.quantize_weight_nvfp4(randn(72, 96))
    _nvfp4_mm.nvfp4_mm(x, odd, None, torch.bfloat16)
    assert len(calls) == 1  # 72 rows are not what cuBLASLt takes


def test_the_products_of_a_training_step_on_sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(out: Tensor, *, output_dtype: torch.dtype, **arguments: Any) -> None:
        calls.append(output_dtype)
        out.copy_(as_cublas_reads_nvfp4(arguments))

    calls: list[torch.dtype] = []
    layer = NVFP4TrainingLinear(64, 96, bias=False, dtype=torch.float32)
    found = []
    for there in (False, True):
        monkeypatch.setattr(_nvfp4_mm, "has_microscaling", lambda device, there=there: there)
        monkeypatch.setattr(_nvfp4_mm, "scaled_mm_into", read)
        layer.seed_rounding(1)
        layer.weight.grad = None
        x = randn(32, 64, dtype=torch.float32).requires_grad_()
        y = layer(x)
        y.backward(randn(32, 96, dtype=torch.float32, seed=1))
        found.append((y.detach(), x.grad, layer.weight.grad))
    assert calls == [torch.float32] * 3
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_scaled_mm_hands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's op gets from us what it gets from its public function."""
    given: list[tuple[Any, ...]] = []
    out = torch.empty(130, 80)
    x = jitquant.quantize_nvfp4(spread(130, 96), scale_layout="swizzled_128x4")
    w = jitquant.quantize_weight_nvfp4(spread(80, 96, 1), scale_layout="swizzled_128x4")
    arguments = _nvfp4_mm.nvfp4_arguments(x, w, torch.float32)
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda *parts: given.append(parts))
    scaled_mm(**arguments)

    def write(*parts: Any, out: Tensor) -> None:
        given.append(parts)
        out.zero_()

    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "out", write)
    _nvfp4_mm.scaled_mm_into(out, **arguments)
    assert (out == 0).all()
    public, ours = given
    defaults = ((), False)  # contraction_dim and use_fast_accum
    assert len(public) == len(ours) + len(defaults)
    for a, b in zip(public, (*ours, *defaults), strict=True):
        assert a is b or (isinstance(a, Tensor) and a.data_ptr() == b.data_ptr()) or a == b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("leading", [(), (3,), (2, 5)], ids=str)
def test_given_memory(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    x = jitquant.quantize_nvfp4(randn(*leading, 72))
    w, bias = jitquant.quantize_weight_nvfp4(randn(24, 72, seed=1)), randn(24, seed=2)
    want = _nvfp4_mm.nvfp4_mm(x, w, bias, dtype)
    out = torch.full((*leading, 24), torch.nan, dtype=dtype)
    assert _nvfp4_mm.nvfp4_mm(x, w, bias, dtype, out=out) is out
    assert torch.equal(out, want)


def test_opcheck() -> None:
    # Without test_schema: PyTorch cannot compare these dtypes.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    x = jitquant.quantize_nvfp4(randn(2, 3, 32))
    w = jitquant.quantize_weight_nvfp4(randn(16, 32, seed=1))
    operands = (
        *(x.x_fp4_bytes, x.x_sf, x.gsa, "linear"),
        *(w.x_fp4_bytes, w.x_sf, w.gsa, "linear"),
        *(None, None, "exact"),
    )
    ops = torch.ops.jitquant
    torch.library.opcheck(ops.nvfp4_mm.default, (*operands, torch.float32), test_utils=checks)
    written = torch.empty(2, 3, 16)
    torch.library.opcheck(ops.nvfp4_mm_out.default, (*operands, written), test_utils=checks)
