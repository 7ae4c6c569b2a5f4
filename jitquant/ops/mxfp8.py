"""MXFP8: the public functions. `jitquant.ops.fp8` says what they share with the others.

Inductor has no ``float8_e8m0fnu`` for the CPU: in a graph compiled for it, make the buffers for
``out=`` inside, or return the results instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.formats import MXFP8_BLOCK, ScaleLayout
from jitquant.ops import _table_fp8
from jitquant.ops._results import Form, quantized, quantized_both
from jitquant.ops.fp8 import E4M3
from jitquant.tensors.fp8 import QuantizedTensor


def quantize_mxfp8(
    x: Tensor,
    *,
    dtype: torch.dtype = E4M3,
    scale_layout: ScaleLayout = "linear",
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes to MXFP8: FP8 in blocks of 32 neighbours of a row with E8M0 scales, in one launch.

    A scale is ``amax / top`` rounded up to a power of two (RCEIL), as TransformerEngine's and
    torchao's are, so nothing saturates.

    Args:
        x: (..., N); the last block of a row has the elements that there are.
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
    return quantized(_table_fp8.QUANTIZE_MXFP8, (x, dtype, scale_layout), form, dtype, out)


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
    args = (x, dtype, scale_layout)
    return quantized_both(_table_fp8.QUANTIZE_MXFP8_BOTH, args, _form(scale_layout), dtype, out)


def _form(scale_layout: str) -> Form:
    return "mxfp8", (1, MXFP8_BLOCK), "e8m0", scale_layout, "te"
