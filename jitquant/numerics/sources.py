"""Where the values that are quantized come from: a gate-and-up projection, RMSNorm, mHC.

Every value is computed in fp32 and quantized without being rounded to the input's dtype.
Arguments have the names that they have in the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import MAX_PARTIALS, ceil_div
from jitquant.numerics.nvfp4 import amax, constant, rows_of


def deinterleave(fused: Tensor, intermediate: int, interleave: int, op: str) -> Tensor:
    """The values of a fused gate-and-up projection, fp32 (rows, intermediate).

    Args:
        fused: (..., 2 * intermediate).
        intermediate: columns of the result.
        interleave: G, a divisor of ``intermediate``; output column c is gate column
            ``c // G * 2G + c % G`` and the up column G further. 0: [gate | up].
        op: "select" gives the gate, "swiglu" ``gate / (1 + exp(-gate)) * up``.
    """
    v = rows_of(fused)
    run = interleave or intermediate
    runs = v.reshape(v.shape[0], intermediate // run, 2, run)
    gate = runs[:, :, 0].reshape(v.shape[0], intermediate)
    up = runs[:, :, 1].reshape(v.shape[0], intermediate)
    if op == "select":
        return gate
    return torch.div(gate, constant(1.0, gate) + torch.exp(-gate)) * up


def swiglu(fused: Tensor, interleave: int) -> Tensor:
    """``silu(gate) * up`` as fp32 (rows, N) of (..., 2 * N).

    Args:
        fused: gate and up columns in turns of ``interleave``, or, with 0, [gate | up].
        interleave: 0, or a divisor of N.
    """
    return deinterleave(fused, fused.shape[-1] // 2, interleave, "swiglu")


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

    Runs of neighbors are added by one fma after another, the runs of a block of 16 in pairs, 32
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


def rmsnorm_of(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`norm_parts` of ``x`` (..., N), or of ``x + residual``, which the residual becomes."""
    return norm_parts(rows_of(add_residual(x, residual)), weight, eps, values_in_16_bytes(x))


def normalized(x: Tensor, weight: Tensor, inv_rms: Tensor) -> tuple[Tensor, Tensor]:
    """As `norm_parts`, with inv_rms as it gave it."""
    return weighted(rows_of(x), weight), inv_rms


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


def mhc_rmsnorm_of(
    X: Tensor, A: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """`norm_parts` of `hyper_connection_sum`."""
    return norm_parts(hyper_connection_sum(X, A), weight, eps, values_in_16_bytes(X))


def mhc_normalized(X: Tensor, A: Tensor, weight: Tensor, inv_rms: Tensor) -> tuple[Tensor, Tensor]:
    """As `normalized`, of `hyper_connection_sum`."""
    return weighted(hyper_connection_sum(X, A), weight), inv_rms


def maxima(v: Tensor, inverse: Tensor) -> tuple[Tensor]:
    """The amax as the largest of as many maxima as a kernel can have: (MAX_PARTIALS,)."""
    return (functional.pad(amax(v, "tensor", inverse), (0, MAX_PARTIALS - 1)),)
