"""Products with a weight in NVFP4: the op and the public function."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from jitquant.formats import CODES_PER_BYTE, NVFP4_BLOCK
from jitquant.numerics import linear as numerics
from jitquant.ops import _checks
from jitquant.ops.schema import Op, Plan, Result
from jitquant.tensors import NVFP4Tensor

__all__ = ["nvfp4_linear"]


def _evenly_strided(x: Tensor) -> bool:
    """Whether the rows are at one distance from each other."""
    pairs = [(n, s) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(pairs))


def _bias(bias: Tensor, n: int, x: Tensor) -> None:
    _checks.same_device(bias, "bias", x, "x")
    _checks.output_dtype(bias.dtype)
    if bias.shape != (n,) or not bias.is_contiguous():
        raise ValueError(
            f"bias has shape {_checks.shape_text(bias)} and strides {tuple(bias.stride())}; "
            f"accepted is a contiguous ({n},), one for each row of the weight"
        )


def _plan(
    x: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    x_sf: Tensor | None = None,
    x_gsa: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    _checks.nvfp4_operand(w_fp4, w_sf, ("w_fp4", "w_sf"), -1, "linear")
    if w_fp4.dim() != 2:
        raise ValueError(
            f"w_fp4 has shape {_checks.shape_text(w_fp4)}; accepted is (N, P), a weight"
        )
    n, cols = w_fp4.shape[0], CODES_PER_BYTE * w_fp4.shape[1]
    _checks.gsa_of_tensor(w_gsa, w_fp4, "w_fp4")
    _checks.same_device(x, "x", w_fp4, "w_fp4")
    if x_sf is None:
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"x is {x.dtype}; accepted are bfloat16 and float16. Convert it with .to(), or "
                "quantize it"
            )
        _checks.input_tensor(x, "x")
        own = x.shape[-1]
        if not _evenly_strided(x):
            raise ValueError(
                f"x has strides {tuple(x.stride())} for shape {_checks.shape_text(x)}; accepted "
                "are rows at one distance from each other. Pass x.contiguous()"
            )
    else:
        _checks.nvfp4_operand(x, x_sf, ("x", "x_sf"), -1, "linear")
        own = CODES_PER_BYTE * x.shape[-1]
        if x_gsa is None:
            raise ValueError("x_gsa is None with x_sf; accepted is x's gsa")
    if not cols - NVFP4_BLOCK < own <= cols or (x_sf is not None and own != cols):
        raise ValueError(
            f"x has {own} columns; accepted are {cols - NVFP4_BLOCK + 1} to {cols}, as w_fp4 has "
            f"shape {_checks.shape_text(w_fp4)}"
        )
    leading = x.shape[:-1]
    rows = _checks.row_count(leading)
    if x_gsa is not None:
        _checks.gsa_tensor(x_gsa, rows, x, "x")
    _checks.output_dtype(dtype)
    if dtype is None:
        dtype = x.dtype if x_sf is None else torch.bfloat16
    if bias is not None:
        _bias(bias, n, x)
    shape = (*leading, n)
    if residual is not None:
        _checks.same_device(residual, "residual", x, "x")
        if residual.dtype != dtype or residual.shape != shape or not residual.is_contiguous():
            raise ValueError(
                f"residual is {residual.dtype} with shape {_checks.shape_text(residual)} and "
                f"strides {tuple(residual.stride())}; accepted is a contiguous {dtype} of shape "
                f"{shape}"
            )
    return Plan(x.device, (Result(shape, dtype),))


LINEAR = Op(
    "nvfp4_linear", ["y"], module="nvfp4_linear", plan=_plan, reference=numerics.nvfp4_linear
)

OPS: tuple[Op, ...] = (LINEAR,)
"""Every product."""


def nvfp4_linear(
    x: Tensor | NVFP4Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias + residual`` with a weight that stays in NVFP4, as it is stored.

    Every product is exact: a code times its block scale is a bf16 number. Sums are in fp32, in an
    order that depends on K, on the device and on how many rows there are (1 to 2, 3 to 8, 9 to 16;
    above, on the shape of the tiles), so that a call gives the same bits every time. Then come the
    gsas, the bias and the residual, each rounded once to fp32, and one rounding to the result's
    dtype.

    A GPU (compute capability 8.0 and newer) reads the weight as it is stored, in one launch for up
    to 16 rows, and allocates nothing beside the result. More rows are one launch, on the tensor
    cores, on compute capability 9.0 with x in bf16 or fp16, K a multiple of 64 and rows that start
    on multiples of 16 bytes. All else takes a launch for each 16 rows: from about 64 rows on,
    dequantizing the weight once is faster there, which is what `jitquant.nn.NVFP4Linear` does.

    Args:
        x: (..., K), bfloat16 or float16, the last dimension contiguous and the rows at one distance
            from each other; or an `NVFP4Tensor` (..., K) with linear scales.
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
    if not isinstance(weight, NVFP4Tensor):
        raise TypeError(
            f"weight is {type(weight).__name__}; accepted is an NVFP4Tensor, as "
            "quantize_weight_nvfp4 gives it"
        )
    quantized = isinstance(x, NVFP4Tensor)
    for name, q in (("weight", weight), ("x", x)):
        if isinstance(q, NVFP4Tensor) and (q.dim != -1 or q.scale_layout != "linear"):
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
    parts = (x.x_fp4, x.x_sf, x.gsa) if isinstance(x, NVFP4Tensor) else (x, None, None)
    values, scales, gsa = parts
    if dtype is None and not quantized:
        dtype = values.dtype
    return LINEAR.one_tensor(
        [values, weight.x_fp4, weight.x_sf, weight.gsa, scales, gsa, bias, residual, dtype], out
    )
