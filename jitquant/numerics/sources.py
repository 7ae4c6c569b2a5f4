"""Where the values that are quantized come from: a gate-and-up projection, RMSNorm, mHC.

Every value is computed in fp32 and quantized as it is, without a rounding to the input's dtype.
Arguments have the names that they have in the ops.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import MAX_PARTIALS
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


def rmsnorm(v: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``v * inv_rms * weight`` and ``inv_rms = 1 / sqrt(mean(v^2) + eps)``.

    The squares are rounded to fp32 and summed in fp64: an fp32 sum depends on its order, and this
    is the value that every order approximates.

    Args:
        v: fp32 (rows, N).
        weight: (N,).
        eps: added to the mean of the squares.

    Returns:
        fp32 (rows, N) and fp32 (rows,).
    """
    total = v.square().sum(dim=1, dtype=torch.float64).to(torch.float32)
    mean = torch.div(total, constant(float(v.shape[1]), v))
    # PyTorch's fp32 square root is not always correctly rounded on a CPU; by way of fp64 it is.
    root = torch.sqrt((mean + constant(eps, v)).double()).to(torch.float32)
    inv_rms = torch.div(constant(1.0, v), root)
    return v * inv_rms[:, None] * weight.to(torch.float32), inv_rms


def rmsnorm_of(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rmsnorm` of ``x`` (..., N), or of ``x + residual``, which the residual becomes."""
    return rmsnorm(rows_of(add_residual(x, residual)), weight, eps)


def normalized(x: Tensor, weight: Tensor, inv_rms: Tensor) -> Tensor:
    """``x * inv_rms * weight`` as fp32 (rows, N), with inv_rms as `rmsnorm` gave it."""
    return rows_of(x) * inv_rms[:, None] * weight.to(torch.float32)


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
    """`rmsnorm` of `hyper_connection_sum`."""
    return rmsnorm(hyper_connection_sum(X, A), weight, eps)


def mhc_normalized(X: Tensor, A: Tensor, weight: Tensor, inv_rms: Tensor) -> Tensor:
    """As `normalized`, of `hyper_connection_sum`."""
    return hyper_connection_sum(X, A) * inv_rms[:, None] * weight.to(torch.float32)


def maxima(v: Tensor) -> tuple[Tensor]:
    """The amax as the largest of as many maxima as a kernel can have: (MAX_PARTIALS,)."""
    return (functional.pad(amax(v, "tensor"), (0, MAX_PARTIALS - 1)),)
