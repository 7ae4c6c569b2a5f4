"""MXFP8 (OCP Microscaling): FP8 elements, an E8M0 scale for 32 neighbors, rounded up (RCEIL)."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.formats import E8M0_DTYPE, MXFP8_BLOCK, QUANTIZED_MAX
from jitquant.numerics.fp8 import encode, group_amax, inverse_power_of_two
from jitquant.numerics.layout import stored_scales
from jitquant.numerics.nvfp4 import constant, rows_of


def e8m0_rceil(s: Tensor) -> Tensor:
    """fp32, positive or NaN, rounded up to a power of two, as the biased exponent: int32 0..255.

    torchao's RCEIL and the conversion instruction ``cvt.rp.satfinite.ue8m0x2.f32``: up to 2^-127 it
    is 0, infinity is 254, NaN 255.
    """
    bits = s.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    least = (exponent == 0) & (mantissa <= 0x400000)
    up = ((mantissa != 0) & ~least).to(torch.int32)
    exponent = (exponent + up).clamp(max=254)
    return torch.where(s.isnan(), 255, exponent).to(torch.int32)


def quantize_mxfp8_rows(v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Elements (rows, N) and E8M0 bytes (rows, ceil(N / 32)) of fp32 rows."""
    blocks, b = group_amax(v, MXFP8_BLOCK)
    exponent = e8m0_rceil(torch.div(b, constant(QUANTIZED_MAX[dtype], b)))
    data = encode(blocks * inverse_power_of_two(exponent)[:, :, None], dtype)
    data = data.reshape(v.shape[0], b.shape[1] * MXFP8_BLOCK)[:, : v.shape[1]].contiguous()
    return data, exponent.to(torch.uint8).view(E8M0_DTYPE)


def quantize_mxfp8(
    x: Tensor, *, dtype: torch.dtype, scale_layout: str = "linear"
) -> tuple[Tensor, Tensor]:
    """data and E8M0 scales of ``x`` (..., N), a scale for 32 neighbors of a row.

    Args:
        x: (..., N); the last block has the elements that there are.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        scale_layout: "linear" gives (..., ceil(N / 32)); "swizzled_128x4" the tiles that cuBLASLt
            reads, see `swizzle_128x4`.
    """
    data, scales = quantize_mxfp8_rows(rows_of(x), dtype)
    return data.reshape(x.shape), stored_scales(scales, tuple(x.shape[:-1]), scale_layout)


def quantize_mxfp8_both(
    x: Tensor, *, dtype: torch.dtype, scale_layout: str = "linear"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_mxfp8` of ``x`` (M, K) and of its transpose: data, scale_inv, data_t, scale_inv_t.

    data_t is (K, M), contiguous, with blocks along M.
    """
    return (
        *quantize_mxfp8(x, dtype=dtype, scale_layout=scale_layout),
        *quantize_mxfp8(x.T, dtype=dtype, scale_layout=scale_layout),
    )
