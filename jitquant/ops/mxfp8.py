"""MXFP8: the public functions. `jitquant.ops.fp8` says what they share with the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitquant.formats import MXFP8_BLOCK, ScaleLayout
from jitquant.ops import _checks, _table_fp8
from jitquant.ops.fp8 import E4M3, check_buffers, run_both
from jitquant.quantized_tensor import QuantizedTensor


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
    x = _checks.as_tensor(x, "x")
    described = _described(scale_layout)
    op, keywords = _table_fp8.QUANTIZE_MXFP8, {"dtype": dtype, "scale_layout": scale_layout}
    if out is None:
        return QuantizedTensor(*op.default(x, **keywords), **described)
    check_buffers(out, "out", described, tuple(x.shape), dtype)
    op.out(x, **keywords, data=out.data, scale_inv=out.stored_scales)
    return out


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
        out: buffers for the two results.

    Returns:
        Quantized tensors of the shapes (M, K), with blocks along K, and (K, M), along M.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    x = _checks.as_tensor(x, "x")
    keywords = {"dtype": dtype, "scale_layout": scale_layout}
    described = _described(scale_layout)
    return run_both(_table_fp8.QUANTIZE_MXFP8_BOTH, (x,), keywords, described, out)


def _described(scale_layout: str) -> dict[str, Any]:
    return {
        "format": "mxfp8",
        "block": (1, MXFP8_BLOCK),
        "scale_format": "e8m0",
        "layout": scale_layout,
    }
