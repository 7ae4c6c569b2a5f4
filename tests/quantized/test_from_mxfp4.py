"""MXFP4 as NVFP4: the same values, in every product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn

import jitquant
from jitquant import NVFP4Tensor, reference
from jitquant.formats import MXFP4_SCALINGS
from jitquant.nn import MXFP4Linear, NVFP4Linear
from jitquant.numerics.linear import refold_e4m3


@pytest.mark.parametrize("scaling", MXFP4_SCALINGS)
@pytest.mark.parametrize("cols", [96, 100, 81, 80])
def test_values_are_the_same(scaling: str, cols: int) -> None:
    x = randn(3, 7, cols) * torch.logspace(-2, 2, 7)[:, None]
    x[1, 2] = 0.0
    codes, scales = jitquant.quantize_mxfp4(x.bfloat16(), scaling=scaling)  # type: ignore[arg-type]
    scales.view(torch.uint8)[2, 3, 1] = 255
    q = NVFP4Tensor.from_mxfp4(codes, scales, cols)
    q.validate()
    assert q.shape == (3, 7, cols)
    want = reference.dequantize_mxfp4(codes, scales, cols=cols, dtype=torch.float32)[0]
    got = q.dequantize(torch.float32)
    assert want[2, 3].isnan().any()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_while_a_model_is_loaded_in_another_dtype() -> None:
    codes, scales = jitquant.quantize_mxfp4(randn(4, 64))
    want = NVFP4Tensor.from_mxfp4(codes, scales)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = NVFP4Tensor.from_mxfp4(codes, scales)
    finally:
        torch.set_default_dtype(torch.float32)
    got.validate()
    assert torch.equal(got.gsa, want.gsa)


@pytest.mark.parametrize("top", [0, 1, 17, 100, 254])
def test_exponents_span_17(top: int) -> None:
    """Wherever they are; blocks of zeros have any."""
    codes = torch.randint(1, 8, (4, 48), dtype=torch.uint8, generator=torch.manual_seed(0))
    codes |= codes << 4
    codes[3] = 0x80
    least = max(top - 17, 0)
    scales = torch.tensor([[top, least, (top + least) // 2]]).repeat(4, 1)
    scales[3] = torch.tensor([0, 255, 254])
    want = reference.dequantize_mxfp4(codes, scales.to(torch.uint8), dtype=torch.float32)[0]
    got = NVFP4Tensor.from_mxfp4(codes, scales.to(torch.uint8)).dequantize(torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if top > 17:
        scales[1, 2] = top - 18
        with pytest.raises(ValueError, match=rf"exponents within 17 .* got {top - 18} to {top}"):
            NVFP4Tensor.from_mxfp4(codes, scales.to(torch.uint8))


def test_layers_and_products() -> None:
    linear = torch.nn.Linear(96, 40, dtype=torch.bfloat16)
    slow = MXFP4Linear.from_linear(linear)
    fast = NVFP4Linear.from_mxfp4(slow, compute="fp8")
    assert fast.weight_packed.data_ptr() == slow.weight_packed.data_ptr()
    x = randn(300, 96)
    values = reference.dequantize_mxfp4(slow.weight_packed, slow.weight_scale, dtype=torch.float32)
    want = x[:5].double() @ values[0].double().T + linear.bias.double()
    torch.testing.assert_close(fast(x[:5]).double(), want, rtol=2**-8, atol=2**-10)
    # In FP8 nothing of the weight is rounded.
    data, scale_inv = refold_e4m3(fast.weight_packed, fast.weight_scale)
    refolded = data.float() * (fast.weight_gsa * scale_inv)[:, None]
    assert torch.equal(refolded, values[0])
    assert torch.equal(fast(x), jitquant.nvfp4_linear(x, fast.weight, linear.bias, compute="fp8"))


def test_what_is_refused() -> None:
    codes, scales = jitquant.quantize_mxfp4(randn(4, 64))
    with pytest.raises(
        TypeError, match=r"x_sf: expected torch\.float8_e8m0fnu or torch\.uint8, got torch\.float32"
    ):
        NVFP4Tensor.from_mxfp4(codes, scales.float())
    nothing: Any = None
    with pytest.raises(TypeError, match=r"x_sf: expected .*, got NoneType"):
        NVFP4Tensor.from_mxfp4(codes, nothing)
    with pytest.raises(
        ValueError,
        match=r"x_fp4: expected shape \(\.\.\., P\), contiguous, with P a multiple of 16 bytes,",
    ):
        NVFP4Tensor.from_mxfp4(codes.view(torch.uint8)[:, :24].contiguous(), scales)
    with pytest.raises(
        ValueError,
        match=r"x_sf: expected shape \(4, 2\) for x_fp4 of shape \(4, 32\), got shape \(3, 2\)",
    ):
        NVFP4Tensor.from_mxfp4(codes, scales[:3])
    with pytest.raises(
        ValueError, match=r"cols: expected 33 to 64 for x_fp4 of shape \(4, 32\), got 32"
    ):
        NVFP4Tensor.from_mxfp4(codes, scales, 32)
