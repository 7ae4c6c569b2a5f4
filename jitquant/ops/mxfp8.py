"""MXFP8: the public functions. `jitquant.ops.fp8` describes what they share.

Inductor has no ``float8_e8m0fnu`` for the CPU: in a graph compiled for it, make the buffers for
``out=`` inside, or return the results instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.formats import (
    E4M3,
    E8M0_DTYPE,
    MXFP8_BLOCK,
    SCALE_LAYOUTS,
    ScaleLayout,
    ceil_div,
    scales_shape,
)
from jitquant.numerics import mxfp8 as numerics
from jitquant.ops import _checks_fp8
from jitquant.ops._results import BUFFERS, Form, fitting, fitting_both, quantized, quantized_both
from jitquant.ops.parts import Both, Part, part_for_both
from jitquant.ops.schema import FP8, MATRIX, Op, Plan, Result, Values
from jitquant.tensors import QuantizedTensor

__all__ = [
    "quantize_mxfp8",
    "quantize_mxfp8_both",
]


def _mxfp8_scales(leading: tuple[int, ...], cols: int, scale_layout: str) -> Result:
    groups = ceil_div(cols, MXFP8_BLOCK)
    return Result(scales_shape(leading, groups, "e8m0", scale_layout), E8M0_DTYPE)


def _plan_mxfp8(x: Tensor, dtype: torch.dtype, scale_layout: str) -> Plan:
    leading = tuple(x.shape[:-1])
    scales = _mxfp8_scales(leading, x.shape[-1], scale_layout)
    return Plan(x.device, (Result(tuple(x.shape), dtype), scales))


def _plan_mxfp8_both(x: Tensor, dtype: torch.dtype, scale_layout: str) -> Plan:
    _checks_fp8.matrix(x, "x")
    rows, cols = x.shape
    return Plan(
        x.device,
        (
            Result((rows, cols), dtype),
            _mxfp8_scales((rows,), cols, scale_layout),
            Result((cols, rows), dtype),
            _mxfp8_scales((cols,), rows, scale_layout),
        ),
    )


QUANTIZE = Op(
    "quantize_mxfp8",
    ["data", "scale_inv"],
    module="quantize_mxfp8",
    plan=_plan_mxfp8,
    reference=numerics.quantize_mxfp8,
    accepts={"x": Values(), "dtype": FP8},
    choices={"scale_layout": SCALE_LAYOUTS},
    **BUFFERS,
)


def _part_of_both(x: Tensor) -> Part | None:
    return part_for_both(x, Both.MXFP8)


QUANTIZE_BOTH = Op(
    "quantize_mxfp8_both",
    ["data", "scale_inv", "data_t", "scale_inv_t"],
    module="quantize_both",
    plan=_plan_mxfp8_both,
    reference=numerics.quantize_mxfp8_both,
    accepts={"x": MATRIX, "dtype": FP8},
    choices={"scale_layout": SCALE_LAYOUTS},
    part=_part_of_both,
    **BUFFERS,
)

OPS: tuple[Op, ...] = (QUANTIZE, QUANTIZE_BOTH)
"""Every op of MXFP8."""


def quantize_mxfp8(
    x: Tensor,
    *,
    dtype: torch.dtype = E4M3,
    scale_layout: ScaleLayout = "linear",
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes to MXFP8: FP8 in blocks of 32 neighbors of a row with E8M0 scales, in one launch.

    A scale is ``amax / top`` rounded up to a power of two (RCEIL), as TransformerEngine's and
    torchao's are, so nothing saturates.

    Args:
        x: (..., N); the last block of a row may be shorter.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        scale_layout: "linear", or "swizzled_128x4" for cuBLASLt.
        out: buffers of ``QuantizedTensor.empty(x.shape, format="mxfp8", ...)``.

    Returns:
        data (..., N), scale_inv ``float8_e8m0fnu`` (..., ceil(N / 32)), or swizzled
        (rows up to 128, blocks up to 4) with zero padding.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    form = _form(scale_layout)
    done = QUANTIZE.into(fitting(out, form, dtype), x=x, dtype=dtype, scale_layout=scale_layout)
    return quantized(QUANTIZE, done, form, out)


def quantize_mxfp8_both(
    x: Tensor,
    *,
    dtype: torch.dtype = E4M3,
    scale_layout: ScaleLayout = "linear",
    out: tuple[QuantizedTensor, QuantizedTensor] | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantizes a matrix to MXFP8 row-wise (1x32) and column-wise (32x1), reading it once.

    The first result is `quantize_mxfp8` of x, the second that of its transpose, which is stored
    transposed.

    Args:
        x: (M, K), M and K >= 1.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        scale_layout: "linear", or "swizzled_128x4" for cuBLASLt.
        out: buffers for the two results, which share no memory.

    Returns:
        Quantized tensors of the shapes (M, K), with blocks along K, and (K, M), along M.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    form = _form(scale_layout)
    done = QUANTIZE_BOTH.into(
        fitting_both(out, form, dtype), x=x, dtype=dtype, scale_layout=scale_layout
    )
    return quantized_both(QUANTIZE_BOTH, done, form, out)


def _form(scale_layout: str) -> Form:
    return ("mxfp8", (1, MXFP8_BLOCK), "e8m0", scale_layout, "te")
