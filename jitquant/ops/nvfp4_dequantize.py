"""The values of NVFP4 tensors: the public function, which checks its arguments and calls one op."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from jitquant.formats import CODES_PER_BYTE, NVFP4_BLOCK, SCALE_LAYOUTS, ScaleLayout
from jitquant.numerics import nvfp4 as numerics
from jitquant.ops import _checks
from jitquant.ops.schema import FP32, OUTPUT, Op, Plan, Result
from jitquant.tensors import NVFP4Tensor

__all__ = ["dequantize_nvfp4"]


def _plan_dequantize(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    cols: int | None,
    dim: int,
    scale_layout: str,
    dtype: torch.dtype | None,
) -> Plan:
    _checks.dimension(dim)
    if dim == 0 and scale_layout != "linear":
        raise ValueError(f"scale_layout: expected 'linear' with dim=0, got {scale_layout!r}")
    _checks.nvfp4_operand(x_fp4, x_sf, "x_fp4", "x_sf", dim, scale_layout)
    codes = CODES_PER_BYTE * x_fp4.shape[dim]
    width = codes if cols is None else cols
    if not codes - NVFP4_BLOCK < width <= codes:
        raise ValueError(
            f"cols: expected {codes - NVFP4_BLOCK + 1} to {codes} for x_fp4 of shape "
            f"{_checks.shape_text(x_fp4)}, got {width}"
        )
    leading = x_fp4.shape[:-1]
    if dim == 0:
        _checks.gsa_of_tensor(gsa, x_fp4, "x_fp4")
    else:
        _checks.gsa_tensor(gsa, _checks.row_count(leading), x_fp4, "x_fp4")
    shape = (width, x_fp4.shape[1]) if dim == 0 else (*leading, width)
    return Plan(x_fp4.device, (Result(shape, torch.bfloat16 if dtype is None else dtype),))


DEQUANTIZE = Op(
    "dequantize_nvfp4",
    ["out"],
    module="dequant_nvfp4",
    function="dequant_nvfp4",
    plan=_plan_dequantize,
    reference=numerics.dequantize_nvfp4,
    accepts={"gsa": FP32, "dtype": OUTPUT},
    choices={"scale_layout": SCALE_LAYOUTS},
)

OPS: tuple[Op, ...] = (DEQUANTIZE,)


@overload
def dequantize_nvfp4(
    q: NVFP4Tensor,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def dequantize_nvfp4(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    dtype: torch.dtype | None = None,
    *,
    cols: int | None = None,
    dim: int = -1,
    scale_layout: ScaleLayout = "linear",
    out: Tensor | None = None,
) -> Tensor: ...


def dequantize_nvfp4(*args: Any, **kwargs: Any) -> Tensor:
    """The values of a quantized tensor: ``e2m1 * s * gsa`` in fp32, rounded once to ``dtype``.

    ``dequantize_nvfp4(q, dtype)``, or from the parts:
    ``dequantize_nvfp4(x_fp4, x_sf, gsa, dtype, cols=None, dim=-1, scale_layout="linear")``.

    Args:
        q: the quantized tensor, of any layout and granularity.
        dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
        x_fp4: packed codes, or their bytes as uint8: (..., P), or (P, N) with ``dim=0``.
        x_sf: their scales, or the scales' bytes.
        gsa: float32, one element, (rows,) or (..., 1).
        cols: logical size of the packed dimension; default 2 * P.
        dim: the packed dimension: -1 or 0.
        scale_layout: of x_sf: "linear" or "swizzled_128x4".
        out: contiguous tensor of the logical shape to write to.

    Returns:
        A tensor of the logical shape, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    first = args[0] if args else kwargs.get("q")
    if isinstance(first, NVFP4Tensor):
        return _dequantize_whole(*args, **kwargs)
    if "q" in kwargs or (len(args) == 1 and not kwargs):
        raise TypeError(
            "q: expected an NVFP4Tensor, or the parts x_fp4, x_sf and gsa, got "
            f"{type(first).__name__}"
        )
    return _dequantize_parts(*args, **kwargs)


def _dequantize_whole(
    q: NVFP4Tensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    return _dequantize_parts(
        q.x_fp4,
        q.x_sf,
        q.gsa,
        dtype,
        cols=q.cols,
        dim=q.dim,
        scale_layout=q.scale_layout,
        out=out,
    )


def _dequantize_parts(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    dtype: torch.dtype | None = None,
    *,
    cols: int | None = None,
    dim: int = -1,
    scale_layout: str = "linear",
    out: Tensor | None = None,
) -> Tensor:
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    if not isinstance(gsa, Tensor) or gsa.dim() != 1:
        gsa = _checks.seen_as_tensor(gsa, "gsa")
        gsa = _checks.flat_gsa(gsa) if isinstance(gsa, Tensor) else gsa
    done = DEQUANTIZE.into(
        out,
        x_fp4=x_fp4,
        x_sf=x_sf,
        gsa=gsa,
        cols=cols,
        dim=dim,
        scale_layout=scale_layout,
        dtype=dtype,
    )
    return DEQUANTIZE.one_tensor(done, out)


NVFP4Tensor._dequantize = _dequantize_whole
