"""The public function for products with a weight in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.ops._table_linear import LINEAR
from jitquant.tensors.nvfp4 import QuantizedActivation


def nvfp4_linear(
    x: Tensor | QuantizedActivation,
    weight: QuantizedActivation,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias + residual`` with a weight that stays in NVFP4, as it is stored.

    Every product is exact: a code times its block scale is a bf16 number. Sums are in fp32, in an
    order that depends on K and on whether there are 1 to 2, 3 to 8, or more rows, so that a call
    gives the same bits every time. Then come the gsas, the bias and the residual, each rounded once
    to fp32, and one rounding to the result's dtype.

    On a GPU (compute capability 8.0 and newer) up to 16 rows take one launch, which reads the
    weight once and allocates nothing beside the result; more rows take a launch for each 16. It is
    made for decoding: from about 64 rows on, dequantizing the weight once is faster.

    Args:
        x: (..., K), bfloat16 or float16, the last dimension contiguous and the rows at one distance
            from each other; or a `QuantizedActivation` (..., K) with linear scales.
        weight: (N, K), packed along K with linear scales and one gsa, as `quantize_weight_nvfp4`
            gives it.
        bias: (N,), bfloat16, float16 or float32.
        residual: contiguous (..., N) of the result's dtype, added last.
        dtype: bfloat16, float16 or float32; default that of ``out``, of ``x``, or bfloat16.
        out: contiguous (..., N) to write to.

    Returns:
        (..., N) of ``dtype``, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if not isinstance(weight, QuantizedActivation):
        raise TypeError(
            f"weight is {type(weight).__name__}; accepted is a QuantizedActivation, as "
            "quantize_weight_nvfp4 gives it"
        )
    quantized = isinstance(x, QuantizedActivation)
    for name, q in (("weight", weight), ("x", x)):
        if isinstance(q, QuantizedActivation) and (q.dim != -1 or q.scale_layout != "linear"):
            raise ValueError(
                f"{name} has dim {q.dim} and scale_layout {q.scale_layout!r}; accepted are -1 and "
                "'linear'"
            )
    cols = x.shape[-1] if len(x.shape) else 0
    if cols != weight.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; accepted is (..., {weight.shape[-1]}) for a weight of "
            f"shape {tuple(weight.shape)}"
        )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    parts = (x.x_fp4, x.x_sf, x.gsa) if isinstance(x, QuantizedActivation) else (x, None, None)
    values, scales, gsa = parts
    if dtype is None and not quantized:
        dtype = values.dtype
    return LINEAR.one_tensor(
        [values, weight.x_fp4, weight.x_sf, weight.gsa, scales, gsa, bias, residual, dtype], out
    )
