"""The two halves of a quantization whose amax is that of more than is at hand.

The first gives the amax of the part at hand; the second quantizes with the amax of the whole. What
they give together is, bit for bit, the part's share of what the whole would be quantized to. A
quotient of the amax (gsa, or a scale) would not do: S is no function of gsa.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import MAX_PARTIALS, NVFP4_DIVISOR, QUANTIZED_MAX
from jitquant.numerics.elements import constant
from jitquant.numerics.fp8 import amax_keep_nan, encode, scale_from_amax, silu_mul
from jitquant.numerics.fused import (
    add_residual,
    deinterleave,
    hyper_connection_sum,
    norm_parts,
    values_in_16_bytes,
    weighted,
)
from jitquant.numerics.nvfp4 import amax as amax_of_numbers
from jitquant.numerics.nvfp4 import (
    packed,
    quantize_rows,
    quantize_weight_rows,
    rows_of,
    scales_from_amax,
)


def amax(
    x: Tensor,
    *,
    granularity: str = "tensor",
    keep_nan: bool = False,
    run: int = 0,
    activate: bool = False,
) -> tuple[Tensor]:
    """Largest magnitude of ``x`` (..., N), or of a gate-and-up projection: (1,) or (rows,).

    Args:
        x: (..., N).
        granularity: "tensor" or "row".
        keep_nan: NaN where there is one, as FP8 has it; else a NaN is as if it were not there.
        run: 0; or gate and up columns come in turns of this many, and the magnitudes are those of
            the gate.
        activate: with a run, of ``silu(gate) * up``.
    """
    if run:
        values = deinterleave(x, x.shape[-1] // 2, run, "swiglu" if activate else "select", False)
    else:
        values = rows_of(x)
    return ((amax_keep_nan if keep_nan else amax_of_numbers)(values, granularity),)


def _quantized(
    v: Tensor,
    leading: tuple[int, ...],
    a: Tensor,
    divisor: float,
    recipe: str,
    scale_layout: str,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    s, gsa = scales_from_amax(a, divisor)
    codes, scales = quantize_rows(v, s, recipe, inverse=inverse)
    return (*packed(codes, scales, leading, scale_layout), gsa)


def quantize_nvfp4_from_amax(
    x: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of ``x`` (..., N) with its amax given: one element, or (rows,)."""
    return _quantized(rows_of(x), x.shape[:-1], amax.reshape(-1), divisor, recipe, scale_layout)


def quantize_weight_nvfp4_from_amax(
    w: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    block: str = "1x16",
    dim: int = -1,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of a weight with its amax given, one element."""
    s, gsa = scales_from_amax(amax.reshape(1), divisor)
    return (*quantize_weight_rows(w, s, block, dim, recipe, scale_layout), gsa)


def deinterleave_quantize_nvfp4_from_amax(
    fused: Tensor,
    intermediate: int,
    granularity_cols: int,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    op: str = "select",
    halves: bool = False,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of the values of `deinterleave` with their amax given, (1,) or (rows,)."""
    v = deinterleave(fused, intermediate, granularity_cols, op, halves)
    return _quantized(v, fused.shape[:-1], amax.reshape(-1), divisor, recipe, scale_layout)


def _maxima(u: Tensor, inv_rms: Tensor) -> Tensor:
    """The amax as the largest of as many maxima as a kernel can have: (MAX_PARTIALS,)."""
    return functional.pad(amax_of_numbers(u, "tensor", inv_rms), (0, MAX_PARTIALS - 1))


def rmsnorm_amax(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Maxima (MAX_PARTIALS,) whose largest is the amax of `rmsnorm`, and its inv_rms (rows,).

    ``residual`` becomes ``x + residual``, which is what is normalized.
    """
    v = rows_of(add_residual(x, residual))
    u, inv_rms = norm_parts(v, weight, eps, values_in_16_bytes(x))
    return _maxima(u, inv_rms), inv_rms


def rmsnorm_quantize_nvfp4_from_amax(
    x: Tensor,
    weight: Tensor,
    inv_rms: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of ``x * inv_rms * weight``, whose amax is the largest of ``amax``."""
    u, a = weighted(rows_of(x), weight), amax.amax().reshape(1)
    return _quantized(u, x.shape[:-1], a, divisor, recipe, scale_layout, inv_rms)


def mhc_rmsnorm_amax(
    X: Tensor, A: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """As `rmsnorm_amax`, of `hyper_connection_sum`."""
    u, inv_rms = norm_parts(hyper_connection_sum(X, A), weight, eps, values_in_16_bytes(X))
    return _maxima(u, inv_rms), inv_rms


def mhc_rmsnorm_quantize_nvfp4_from_amax(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    inv_rms: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rmsnorm_quantize_nvfp4_from_amax`, of `hyper_connection_sum`."""
    u, a = weighted(hyper_connection_sum(X, A), weight), amax.amax().reshape(1)
    return _quantized(u, X.shape[:-2], a, divisor, recipe, scale_layout, inv_rms)


def _cast(
    v: Tensor,
    leading: tuple[int, ...],
    a: Tensor,
    dtype: torch.dtype,
    scale_ub: float | None,
    granularity: str,
) -> tuple[Tensor, Tensor]:
    a = a.reshape(-1)
    bound = a if scale_ub is None else torch.minimum(a, constant(scale_ub, a))
    scale = scale_from_amax(bound, QUANTIZED_MAX[dtype])
    data = encode(v * scale[:, None], dtype).reshape(*leading, v.shape[1])
    shape = (*leading, 1) if granularity == "row" else (1,)
    return data, torch.div(constant(1.0, scale), scale).reshape(shape)


def quantize_fp8_from_amax(
    x: Tensor,
    amax: Tensor,
    *,
    dtype: torch.dtype,
    scale_ub: float | None = None,
    granularity: str = "tensor",
) -> tuple[Tensor, Tensor]:
    """data, scale_inv of ``x`` (..., N) with its amax given: one element, or one a row."""
    return _cast(rows_of(x), x.shape[:-1], amax, dtype, scale_ub, granularity)


def silu_mul_quantize_fp8_from_amax(
    fused: Tensor,
    amax: Tensor,
    *,
    dtype: torch.dtype,
    scale_ub: float | None = None,
    granularity: str = "row",
    interleave: int = 0,
) -> tuple[Tensor, Tensor]:
    """data, scale_inv of the values of `silu_mul` with their amax given."""
    v = silu_mul(fused, interleave)
    return _cast(v, fused.shape[:-1], amax, dtype, scale_ub, granularity)
