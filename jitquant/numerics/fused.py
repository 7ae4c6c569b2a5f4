"""What is computed before quantization in one pass: deinterleave, RMSNorm, mHC.

Every value is computed in fp32 and quantized as it is, without a rounding to the input's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import NVFP4_DIVISOR, ceil_div
from jitquant.numerics.elements import constant
from jitquant.numerics.nvfp4 import quantize_values, quantize_values_static, rows_of


def deinterleave(
    fused: Tensor, intermediate: int, granularity_cols: int, op: str, halves: bool
) -> Tensor:
    """The values of a fused gate-and-up projection, fp32 (rows, intermediate).

    Args:
        fused: (..., 2 * intermediate).
        intermediate: columns of the result.
        granularity_cols: G; output column c is gate column ``c // G * 2G + c % G`` and the up
            column G further. Divides ``intermediate``.
        op: "select" gives the gate, "swiglu" ``gate / (1 + exp(-gate)) * up``.
        halves: gate is the first half of the columns and up the second; G is ignored.
    """
    v = rows_of(fused)
    if halves:
        gate, up = v[:, :intermediate], v[:, intermediate:]
    else:
        runs = v.reshape(v.shape[0], intermediate // granularity_cols, 2, granularity_cols)
        gate = runs[:, :, 0].reshape(v.shape[0], intermediate)
        up = runs[:, :, 1].reshape(v.shape[0], intermediate)
    if op == "select":
        return gate
    return torch.div(gate, constant(1.0, gate) + torch.exp(-gate)) * up


def deinterleave_quantize_nvfp4(
    fused: Tensor,
    intermediate: int,
    granularity_cols: int,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    op: str = "select",
    halves: bool = False,
    granularity: str = "tensor",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of the values of `deinterleave`; the amax is theirs, not ``fused``'s."""
    v = deinterleave(fused, intermediate, granularity_cols, op, halves)
    return quantize_values(
        v, fused.shape[:-1], divisor, global_scale, granularity, recipe, scale_layout
    )


def deinterleave_quantize_nvfp4_static(
    fused: Tensor,
    intermediate: int,
    granularity: int,
    global_scale: Tensor,
    *,
    op: str = "select",
    halves: bool = False,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor]:
    """x_fp4, x_sf of the values of `deinterleave`, with the gsa given."""
    v = deinterleave(fused, intermediate, granularity, op, halves)
    return quantize_values_static(v, fused.shape[:-1], global_scale, recipe, scale_layout)


def add_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """``residual <- x + residual``, added in fp32 and rounded once; then the residual as stored."""
    if residual is None:
        return x
    residual.copy_(x.to(torch.float32) + residual.to(torch.float32))
    return residual


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 tensors, rounded once.

    The product is exact in fp64. The sum is rounded to odd there (an inexact sum gets its last bit
    set), which makes the final rounding to fp32 the only one that counts.
    """
    p, c = a.double() * b.double(), c.double()
    total = p + c
    c_part = total - p
    error = (p - (total - c_part)) + (c - c_part)
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & (bits & 1 == 0) & total.isfinite()
    # One step towards the exact sum: away from zero if the error has the sign of the sum.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + step, bits).view(torch.float64).to(torch.float32)


def _fold(v: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two: its halves are added until one is left."""
    while v.shape[-1] > 1:
        half = v.shape[-1] // 2
        v = v[..., :half] + v[..., half:]
    return v[..., 0]


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def sum_of_squares(v: Tensor, run: int) -> Tensor:
    """The sum over each row of ``v * v``, added in the one order that the kernels have.

    Runs of neighbours are added by one fma after another, the runs of a block of 16 in pairs, 32
    blocks by halves (`_fold`); of these chunks those 64 apart one after another, and the 64 by
    halves.

    Args:
        v: fp32 (rows, N).
        run: how many values of ``x`` are 16 bytes: 8, or 4 of fp32.

    Returns:
        fp32 (rows,).
    """
    rows, cols = v.shape
    blocks = ceil_div(cols, 16)
    lanes = min(_power_of_two(blocks), 32)
    chunks = ceil_div(blocks, lanes)
    stored = _power_of_two(chunks) if chunks <= 64 else ceil_div(chunks, 64) * 64
    v = functional.pad(v, (0, stored * lanes * 16 - cols))
    values = v.reshape(rows, stored, lanes, 16 // run, run)
    total = values[..., 0] * values[..., 0]
    for i in range(1, run):
        total = _fma(values[..., i], values[..., i], total)
    of_block = total[..., 0::2] + total[..., 1::2]
    of_chunk = _fold(_fold(of_block))
    total = of_chunk[:, :64]
    for first in range(64, stored, 64):
        total = total + of_chunk[:, first : first + 64]
    return _fold(total)


def weighted(v: Tensor, weight: Tensor) -> Tensor:
    """``v * weight``, fp32 (rows, N), rounded toward zero: a product of numbers is a number."""
    exact = v.double() * weight.double()  # 48 bits
    product = exact.to(torch.float32)
    away = product.double().abs() > exact.abs()
    return torch.where(away, (product.view(torch.int32) - 1).view(torch.float32), product)


def norm_parts(v: Tensor, weight: Tensor, eps: float, run: int) -> tuple[Tensor, Tensor]:
    """What a norm quantizes: ``u = v * weight``, and ``inv_rms = 1 / sqrt(mean(v^2) + eps)``.

    Args:
        v: fp32 (rows, N).
        weight: (N,).
        eps: added to the mean of the squares.
        run: as in `sum_of_squares`.

    Returns:
        fp32 (rows, N) and fp32 (rows,). The norm is their product, but what quantizes it multiplies
        ``u`` with ``inv_rms`` and a scale in one (`nvfp4.times`).
    """
    total = sum_of_squares(v, run)
    over_cols = torch.div(constant(1.0, v), constant(float(v.shape[1]), v))
    mean = _fma(total, over_cols.expand_as(total), constant(eps, v).expand_as(total))
    # PyTorch's fp32 square root is not always correctly rounded on a CPU; by way of fp64 it is.
    root = torch.sqrt(mean.double()).to(torch.float32)
    return weighted(v, weight), torch.div(constant(1.0, v), root)


def rmsnorm(v: Tensor, weight: Tensor, eps: float, *, run: int = 4) -> tuple[Tensor, Tensor]:
    """``v * weight * inv_rms``, fp32 (rows, N), and inv_rms (rows,); see `norm_parts`."""
    u, inv_rms = norm_parts(v, weight, eps, run)
    return u * inv_rms[:, None], inv_rms


def values_in_16_bytes(x: Tensor) -> int:
    """The ``run`` of `sum_of_squares`."""
    return 16 // x.element_size()


def rmsnorm_quantize_nvfp4(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    divisor: float = NVFP4_DIVISOR,
    *,
    residual: Tensor | None = None,
    global_scale: float | None = None,
    granularity: str = "row",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa, inv_rms of `rmsnorm` of ``x``, or of ``x + residual``, added in place."""
    v = rows_of(add_residual(x, residual))
    u, inv_rms = norm_parts(v, weight, eps, values_in_16_bytes(x))
    quantized = quantize_values(
        u, x.shape[:-1], divisor, global_scale, granularity, recipe, scale_layout, inv_rms
    )
    return (*quantized, inv_rms)


def rmsnorm_quantize_nvfp4_static(
    x: Tensor,
    weight: Tensor,
    gsa: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, inv_rms, with the gsa given."""
    v = rows_of(add_residual(x, residual))
    u, inv_rms = norm_parts(v, weight, eps, values_in_16_bytes(x))
    quantized = quantize_values_static(u, x.shape[:-1], gsa, recipe, scale_layout, inv_rms)
    return (*quantized, inv_rms)


def hyper_connection_sum(x: Tensor, a: Tensor) -> Tensor:
    """``sum over h of A[h] * X[h]``, fp32 (rows, N), in the order of h, each step one fma.

    Args:
        x: (..., H, N).
        a: (..., H).
    """
    streams = x.shape[-2]
    rows = x.numel() // (streams * x.shape[-1])
    v = x.reshape(rows, streams, x.shape[-1]).to(torch.float32)
    mix = a.reshape(rows, streams).to(torch.float32)
    total = mix[:, :1] * v[:, 0]
    for h in range(1, streams):
        total = _fma(mix[:, h : h + 1], v[:, h], total)
    return total


def mhc_rmsnorm_quantize_nvfp4(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    granularity: str = "row",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa, inv_rms of `rmsnorm` of `hyper_connection_sum`."""
    u, inv_rms = norm_parts(hyper_connection_sum(X, A), weight, eps, values_in_16_bytes(X))
    quantized = quantize_values(
        u, X.shape[:-2], divisor, global_scale, granularity, recipe, scale_layout, inv_rms
    )
    return (*quantized, inv_rms)


def mhc_rmsnorm_quantize_nvfp4_static(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    gsa: Tensor,
    eps: float = 1e-6,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, inv_rms, with the gsa given."""
    u, inv_rms = norm_parts(hyper_connection_sum(X, A), weight, eps, values_in_16_bytes(X))
    quantized = quantize_values_static(u, X.shape[:-2], gsa, recipe, scale_layout, inv_rms)
    return (*quantized, inv_rms)
