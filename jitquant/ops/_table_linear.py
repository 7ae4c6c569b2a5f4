"""The declaration of the product with a weight in NVFP4."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from jitquant import numerics as reference
from jitquant.formats import CODES_PER_BYTE, FP4_DTYPE, NVFP4_BLOCK, SCALE_DTYPE
from jitquant.ops import _checks
from jitquant.ops.schema import Op, Plan, Result

_BLOCK_BYTES = NVFP4_BLOCK // CODES_PER_BYTE


def _packed(codes: Tensor, scales: Tensor, label: str, scales_label: str) -> None:
    """Codes with linear scales, packed along the last dimension."""
    _checks.packed_tensor(codes, label, FP4_DTYPE)
    if codes.dim() == 0 or codes.shape[-1] == 0 or codes.shape[-1] % _BLOCK_BYTES:
        raise ValueError(
            f"{label} has shape {_checks.shape_text(codes)}; accepted is a multiple of 8 bytes (16 "
            "codes) along the last dimension"
        )
    _checks.packed_tensor(scales, scales_label, SCALE_DTYPE)
    _checks.same_device(scales, scales_label, codes, label)
    expected = (*codes.shape[:-1], codes.shape[-1] // _BLOCK_BYTES)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"{scales_label} has shape {_checks.shape_text(scales)}; accepted is {expected}, "
            f"linear scales for {label} of shape {_checks.shape_text(codes)}"
        )


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
    _packed(w_fp4, w_sf, "w_fp4", "w_sf")
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
        _packed(x, x_sf, "x", "x_sf")
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
    "nvfp4_linear",
    "Tensor x, Tensor w_fp4, Tensor w_sf, Tensor w_gsa, Tensor? x_sf=None, Tensor? x_gsa=None, *, "
    "Tensor? bias=None, Tensor? residual=None, ScalarType? dtype=None",
    ["y"],
    module="nvfp4_linear",
    function="nvfp4_linear",
    plan=_plan,
    reference=reference.nvfp4_linear,
)
LINEAR_OPS: tuple[Op, ...] = (LINEAR,)
"""Products."""
