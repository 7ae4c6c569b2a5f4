"""MXFP8 against the oracle."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, inputs, randn
from sweeps import all_bf16, all_bf16_arrangements, all_fp16
from torch import Tensor

from jitquant import reference
from jitquant.formats import FP8_DTYPES
from jitquant.numerics.mxfp8 import e8m0_rceil

from . import oracle_fp8 as oracle

U8 = torch.uint8
by_fp8 = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: str(d)[6:])


def assert_equals_oracle(x: Tensor, dtype: torch.dtype) -> None:
    v = x.float().reshape(-1, x.shape[-1]).numpy()
    rows, cols = v.shape
    blocks = -(-cols // 32)
    padded = np.zeros((rows, blocks * 32), np.float32)
    padded[:, :cols] = v
    codes, e8m0 = oracle.mx_blocks(padded.reshape(-1, 32), str(dtype)[6:])
    data, scales = reference.quantize_mxfp8(x, dtype=dtype)
    assert data.shape == x.shape
    assert scales.shape == (*x.shape[:-1], blocks)
    np.testing.assert_array_equal(scales.view(U8).reshape(-1).numpy(), e8m0)
    np.testing.assert_array_equal(
        data.view(U8).reshape(rows, cols).numpy(), codes.reshape(rows, -1)[:, :cols]
    )


@by_fp8
def test_equals_oracle(dtype: torch.dtype) -> None:
    for (label, make), given_dtype in itertools.product(inputs().items(), DTYPES):
        if not label.startswith("no_rows"):
            assert_equals_oracle(make(given_dtype, "cpu"), dtype)


@by_fp8
def test_every_16_bit_float(dtype: torch.dtype) -> None:
    for x in (*all_bf16_arrangements(), all_fp16()):
        assert_equals_oracle(x.reshape(2048, 32), dtype)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 3),
    cols=st.integers(1, 70),
    given_dtype=st.sampled_from(DTYPES),
    dtype=st.sampled_from(FP8_DTYPES),
    exponent=st.integers(-130, 110),
    seed=st.integers(0, 10_000),
)
def test_made_up_inputs(
    rows: int,
    cols: int,
    given_dtype: torch.dtype,
    dtype: torch.dtype,
    exponent: int,
    seed: int,
) -> None:
    x = randn(rows, cols, dtype=torch.float32, seed=seed).double() * 2.0**exponent
    assert_equals_oracle(x.to(given_dtype), dtype)


def test_exponents() -> None:
    s = torch.tensor([0.0, 1e-45, 2.0**-127, 2.0**-126, 0.5, 1.0, 1.0000001, 3e38])
    assert e8m0_rceil(s).tolist() == [0, 0, 0, 1, 126, 127, 128, 254]
    s = torch.tensor([math.inf, math.nan, -math.nan, 2.0**-127 + 2.0**-149])
    assert e8m0_rceil(s).tolist() == [254, 255, 255, 1]
    s = all_bf16().float().abs().reshape(-1)
    s = s[s.isfinite() & (s > 0)]
    e = e8m0_rceil(s).double()
    assert (torch.exp2(e - 127) >= s.clamp(max=2.0**127)).all()
    assert (torch.exp2(e - 128) < s)[e > 0].all()


def test_nothing_saturates() -> None:
    x = randn(64, 320, dtype=torch.float32) * torch.logspace(-30, 30, 64)[:, None]
    data, scales = reference.quantize_mxfp8(x, dtype=FP8_DTYPES[0])
    (back,) = reference.dequantize(data, scales, 1, 32, scale_layout="linear", dtype=torch.float32)
    assert (
        (back - x).abs() <= x.abs() / 16 + 2.0**-9 * scales.float().repeat_interleave(32, 1)
    ).all()


def test_nan_and_infinity_stay_in_their_block() -> None:
    x = randn(2, 96)
    x[0, 3], x[1, 70] = math.nan, -math.inf
    data, scales = reference.quantize_mxfp8(x, dtype=FP8_DTYPES[0])
    assert scales.view(U8)[0, 0] == 255
    assert scales.view(U8)[1, 2] == 254
    (back,) = reference.dequantize(data, scales, 1, 32, scale_layout="linear")
    block = torch.zeros(2, 96, dtype=torch.bool)
    block[0, :32] = True
    assert torch.equal(back.isnan(), block)
    assert back[1, 70] == -math.inf


@by_fp8
@pytest.mark.parametrize("shape", [(5, 40), (130, 70), (2, 3, 33), (40,), (0, 32)])
def test_swizzled_scales(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = randn(*shape)
    data, linear = reference.quantize_mxfp8(x, dtype=dtype)
    again, swizzled = reference.quantize_mxfp8(x, dtype=dtype, scale_layout="swizzled_128x4")
    assert torch.equal(data.view(U8), again.view(U8))
    rows = math.prod(shape[:-1])
    want = reference.swizzle_128x4(linear.reshape(rows, -1) if rows else linear)
    assert torch.equal(swizzled.view(U8), want.view(U8))
    (a,) = reference.dequantize(data, linear, 1, 32, scale_layout="linear")
    (b,) = reference.dequantize(data, swizzled, 1, 32, scale_layout="swizzled_128x4")
    assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@by_fp8
def test_both_orientations(dtype: torch.dtype, layout: str) -> None:
    x = randn(70, 130)
    got = reference.quantize_mxfp8_both(x, dtype=dtype, scale_layout=layout)
    want = (
        *reference.quantize_mxfp8(x, dtype=dtype, scale_layout=layout),
        *reference.quantize_mxfp8(x.T.contiguous(), dtype=dtype, scale_layout=layout),
    )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(U8), b.view(U8))
    assert got[2].shape == (130, 70)
    assert got[2].is_contiguous()
