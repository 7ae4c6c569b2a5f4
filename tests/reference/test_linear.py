"""Products with a weight in NVFP4: the reference against exact fractions and float64."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from samples import randn
from samples_linear import packed, quantized_rows

from jitquant import reference
from jitquant.numerics.linear import nvfp4_linear_fp8, refold_e4m3

from . import oracle


def _every_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of two blocks: one with each of 16 scales an octave apart, one with each of 256."""
    first = torch.tensor([1, *range(14, 127, 8)], dtype=torch.uint8).repeat_interleave(256)
    scales = torch.stack((first, torch.arange(256).to(torch.uint8).repeat(16)), dim=1)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    return (codes[::2] | codes[1::2] << 4).repeat(4096, 1), scales


def test_a_refolded_weight_is_the_nearest() -> None:
    """Of every code times every scale, with each of the exponents that a row can have."""
    codes, scales = _every_scale()
    data, scale_inv = refold_e4m3(codes, scales)
    got = data.view(torch.uint8).tolist()
    exponents = set()
    nearest: dict[Fraction, int] = {}
    for row, (pair, inverse) in enumerate(zip(scales.tolist(), scale_inv.tolist(), strict=True)):
        most = max(byte & 127 for byte in pair)
        largest = 6 * (Fraction(480) if most == 127 else oracle.E4M3_VALUES[most])
        factor = 1 / Fraction(inverse)
        # A power of two that fits; and twice it does not, but for subnormals, which need no more.
        assert factor.numerator & (factor.numerator - 1) == 0
        assert factor.denominator & (factor.denominator - 1) == 0
        assert largest * factor <= 448
        assert most < 8 or largest * factor * 2 > 448
        exponents.add(factor)
        for block, byte in enumerate(pair):
            for code in range(16):
                byte_of = got[row][16 * block + code]
                if byte & 127 == 127:
                    assert byte_of & 127 == 127
                    continue
                value = oracle.E2M1_VALUES[code & 7] * oracle.E4M3_VALUES[byte & 127] * factor
                if value not in nearest:
                    nearest[value] = oracle.nearest(oracle.E4M3_VALUES, value)  # type: ignore[arg-type]
                sign = (code >> 3) ^ (byte >> 7)
                assert byte_of == nearest[value] | sign << 7
    assert len(exponents) == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_fp8_against_float64(dtype: torch.dtype) -> None:
    x, scale_inv = quantized_rows(randn(5, 7, 200).reshape(35, 200))
    codes, scales = packed(40, 208, seed=3)
    gsa, bias = torch.tensor([0.0007]), randn(40, seed=1)
    residual = randn(35, 40, seed=2).to(dtype)
    more: dict[str, Any] = {"bias": bias, "residual": residual, "dtype": dtype}
    got = nvfp4_linear_fp8(x, scale_inv, codes, scales, gsa, **more)[0]
    data, w_scale_inv = refold_e4m3(codes, scales)
    w = data.double() * w_scale_inv[:, None].double() * gsa.double()
    values = x.double() * scale_inv.double()
    want = values @ w[:, :200].t() + bias.double() + residual.double()
    size = values.abs() @ w[:, :200].abs().t() + bias.double().abs() + residual.double().abs()
    assert got.dtype == dtype
    assert bool(((got.double() - want).abs() <= 2.0**-7 * size).all())


def test_products_against_float64() -> None:
    codes, scales = packed(40, 208, seed=3)
    x, gsa = randn(9, 200), torch.tensor([0.0007])
    got = reference.nvfp4_linear(x, codes, scales, gsa, dtype=torch.float32)[0]
    w = reference.dequantize_nvfp4(codes, scales, torch.ones(1), dtype=torch.float32)[0].double()
    w = w[:, :200] * gsa.double()
    want, size = x.double() @ w.t(), x.double().abs() @ w.abs().t()
    assert bool(((got.double() - want).abs() <= 2.0**-20 * size).all())
