"""The declarations of the NVFP4 ops, and for each the plan: what is accepted, and what comes out.

A plan has the arguments of its op, in order, and no side effect. Argument names follow the compiled
functions, which take the same arguments: ``global_scale`` is a gsa given as a number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jitquant import formats
from jitquant import numerics as reference
from jitquant.formats import (
    CODES_PER_BYTE,
    FP4_DTYPE,
    NVFP4_BLOCK,
    NVFP4_DIVISOR,
    SCALE_DTYPE,
    ceil_div,
    one_of,
    swizzled_shape,
)
from jitquant.ops import _checks
from jitquant.ops.schema import Op, Plan, Result, fp32

_BLOCK_BYTES = NVFP4_BLOCK // CODES_PER_BYTE


def _packed(
    leading: tuple[int, ...], rows: int, cols: int, scale_layout: str
) -> tuple[Result, Result]:
    groups = ceil_div(cols, NVFP4_BLOCK)
    x_sf = (*leading, groups)
    if scale_layout == "swizzled_128x4":
        x_sf = swizzled_shape(rows, groups)
    return Result((*leading, groups * _BLOCK_BYTES), FP4_DTYPE), Result(x_sf, SCALE_DTYPE)


def _names(recipe: str, scale_layout: str) -> None:
    one_of("recipe", recipe, formats.RECIPES)
    one_of("scale_layout", scale_layout, formats.SCALE_LAYOUTS)


def _dynamic(
    x: Tensor,
    leading: tuple[int, ...],
    cols: int,
    divisor: float,
    global_scale: float | None,
    granularity: str,
    recipe: str,
    scale_layout: str,
) -> tuple[Plan, int]:
    """Plan with x_fp4, x_sf and gsa, and the rows."""
    _names(recipe, scale_layout)
    one_of("granularity", granularity, formats.GRANULARITIES)
    _checks.divisor_value(divisor)
    _checks.gsa_value(global_scale)
    rows = _checks.row_count(leading)
    count = rows if granularity == "row" and global_scale is None else 1
    return Plan(x.device, (*_packed(leading, rows, cols, scale_layout), fp32(count))), rows


def static_plan(
    x: Tensor,
    name: str,
    leading: tuple[int, ...],
    cols: int,
    gsa: Tensor | None,
    recipe: str,
    scale_layout: str,
) -> tuple[Plan, int]:
    """Plan with x_fp4 and x_sf, and the rows."""
    _names(recipe, scale_layout)
    rows = _checks.row_count(leading)
    if gsa is not None:
        _checks.gsa_tensor(gsa, rows, x, name)
    return Plan(x.device, _packed(leading, rows, cols, scale_layout)), rows


def _with_inv_rms(planned: tuple[Plan, int]) -> Plan:
    plan, rows = planned
    return Plan(plan.device, (*plan.results, fp32(rows)))


def _plan_amax_gsa(x: Tensor, divisor: float = NVFP4_DIVISOR) -> Plan:
    _checks.input_tensor(x, "x")
    _checks.divisor_value(divisor)
    return Plan(x.device, (fp32(1),))


def _plan_quantize(
    x: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    granularity: str = "tensor",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.input_tensor(x, "x")
    return _dynamic(
        x, x.shape[:-1], x.shape[-1], divisor, global_scale, granularity, recipe, scale_layout
    )[0]


def _plan_quantize_static(
    x: Tensor, gsa: Tensor, *, recipe: str = "te", scale_layout: str = "linear"
) -> Plan:
    _checks.input_tensor(x, "x")
    return static_plan(x, "x", x.shape[:-1], x.shape[-1], gsa, recipe, scale_layout)[0]


def _plan_deinterleave(
    fused: Tensor,
    intermediate: int,
    granularity_cols: int,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    op: str = "select",
    halves: bool = False,
    granularity: str = "tensor",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.deinterleave_arguments(fused, intermediate, granularity_cols, op, halves)
    return _dynamic(
        fused,
        fused.shape[:-1],
        intermediate,
        divisor,
        global_scale,
        granularity,
        recipe,
        scale_layout,
    )[0]


def _plan_deinterleave_static(
    fused: Tensor,
    intermediate: int,
    granularity_cols: int,
    gsa: Tensor,
    *,
    op: str = "select",
    halves: bool = False,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.deinterleave_arguments(fused, intermediate, granularity_cols, op, halves)
    return static_plan(fused, "fused", fused.shape[:-1], intermediate, gsa, recipe, scale_layout)[0]


def _plan_rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    divisor: float = NVFP4_DIVISOR,
    *,
    residual: Tensor | None = None,
    global_scale: float | None = None,
    granularity: str = "row",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.norm_arguments(x, weight, eps, residual)
    return _with_inv_rms(
        _dynamic(
            x, x.shape[:-1], x.shape[-1], divisor, global_scale, granularity, recipe, scale_layout
        )
    )


def _plan_rmsnorm_static(
    x: Tensor,
    weight: Tensor,
    gsa: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.norm_arguments(x, weight, eps, residual)
    return _with_inv_rms(static_plan(x, "x", x.shape[:-1], x.shape[-1], gsa, recipe, scale_layout))


def _plan_mhc(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    granularity: str = "row",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.mhc_arguments(X, A, weight, eps)
    return _with_inv_rms(
        _dynamic(
            X, X.shape[:-2], X.shape[-1], divisor, global_scale, granularity, recipe, scale_layout
        )
    )


def _plan_mhc_static(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    gsa: Tensor,
    eps: float = 1e-6,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.mhc_arguments(X, A, weight, eps)
    return _with_inv_rms(static_plan(X, "X", X.shape[:-2], X.shape[-1], gsa, recipe, scale_layout))


def weight_results(
    w: Tensor, block: str, dim: int, recipe: str, scale_layout: str
) -> tuple[Result, Result]:
    """x_fp4 and x_sf of a weight."""
    _checks.input_tensor(w, "w", 2, "(N, K), or (K, N) with dim=0")
    if w.dim() != 2:
        raise ValueError(
            f"w has shape {_checks.shape_text(w)}; accepted is (N, K), or (K, N) with dim=0. "
            "Quantize the matrices of a stack one by one: each has a gsa of its own"
        )
    one_of("block", block, formats.WEIGHT_BLOCKS)
    _checks.dimension(dim)
    _names(recipe, scale_layout)
    if dim == -1:
        return _packed(w.shape[:1], w.shape[0], w.shape[1], scale_layout)
    if scale_layout != "linear":
        raise ValueError(
            f"scale_layout is {scale_layout!r} with dim=0; accepted is 'linear'. For swizzled "
            "scales quantize the transposed weight with dim=-1"
        )
    if w.shape[0] == 0:
        raise ValueError(f"w has shape {_checks.shape_text(w)}; accepted with dim=0 is K >= 1")
    groups = ceil_div(w.shape[0], NVFP4_BLOCK)
    return (
        Result((groups * _BLOCK_BYTES, w.shape[1]), FP4_DTYPE),
        Result((groups, w.shape[1]), SCALE_DTYPE),
    )


def _plan_weight(
    w: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    block: str = "1x16",
    dim: int = -1,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    packed = weight_results(w, block, dim, recipe, scale_layout)
    _checks.divisor_value(divisor)
    _checks.gsa_value(global_scale)
    return Plan(w.device, (*packed, fp32(1)))


def _plan_weight_static(
    w: Tensor,
    gsa: Tensor,
    *,
    block: str = "1x16",
    dim: int = -1,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    packed = weight_results(w, block, dim, recipe, scale_layout)
    _checks.gsa_of_tensor(gsa, w, "w")
    return Plan(w.device, packed)


def _plan_dequantize(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    *,
    cols: int | None = None,
    dim: int = -1,
    scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> Plan:
    _checks.packed_tensor(x_fp4, "x_fp4", FP4_DTYPE)
    _checks.packed_tensor(x_sf, "x_sf", SCALE_DTYPE)
    _checks.same_device(x_sf, "x_sf", x_fp4, "x_fp4")
    _checks.dimension(dim)
    one_of("scale_layout", scale_layout, formats.SCALE_LAYOUTS)
    _checks.output_dtype(dtype)
    if x_fp4.dim() == 0 or (dim == 0 and x_fp4.dim() != 2):
        raise ValueError(
            f"x_fp4 has shape {_checks.shape_text(x_fp4)}; accepted is (..., P), or (P, N) with "
            "dim=0"
        )
    if dim == 0 and scale_layout != "linear":
        raise ValueError(f"scale_layout is {scale_layout!r} with dim=0; accepted is 'linear'")
    size = x_fp4.shape[dim]
    if size == 0 or size % _BLOCK_BYTES:
        raise ValueError(
            f"x_fp4 has shape {_checks.shape_text(x_fp4)}; accepted is a multiple of 8 bytes (16 "
            "codes) along the packed dimension"
        )
    groups = size // _BLOCK_BYTES
    codes = CODES_PER_BYTE * size
    if cols is None:
        cols = codes
    if not codes - NVFP4_BLOCK < cols <= codes:
        raise ValueError(
            f"cols is {cols}; accepted are {codes - NVFP4_BLOCK + 1} to {codes} for x_fp4 of shape "
            f"{_checks.shape_text(x_fp4)}"
        )
    leading = x_fp4.shape[:-1]
    rows = _checks.row_count(leading)
    scales: tuple[int, ...] = (*leading, groups)
    shape: tuple[int, ...] = (*leading, cols)
    if dim == 0:
        scales, shape = (groups, x_fp4.shape[1]), (cols, x_fp4.shape[1])
        _checks.gsa_of_tensor(gsa, x_fp4, "x_fp4")
    else:
        _checks.gsa_tensor(gsa, rows, x_fp4, "x_fp4")
        if scale_layout == "swizzled_128x4":
            scales = swizzled_shape(rows, groups)
    if tuple(x_sf.shape) != tuple(scales):
        raise ValueError(
            f"x_sf has shape {_checks.shape_text(x_sf)}; accepted is {tuple(scales)} for x_fp4 of "
            f"shape {_checks.shape_text(x_fp4)} and scale_layout {scale_layout!r}"
        )
    return Plan(x_fp4.device, (Result(shape, torch.bfloat16 if dtype is None else dtype),))


_KEYWORDS = 'str recipe="te", str scale_layout="linear"'
_DYNAMIC = f'float? global_scale=None, str granularity="tensor", {_KEYWORDS}'
_DYNAMIC_ROW = f'float? global_scale=None, str granularity="row", {_KEYWORDS}'
_SWIGLU = 'str op="select", bool halves=False'
_BLOCK = 'str block="1x16", int dim=-1'

AMAX_GSA = Op(
    "amax_gsa",
    "Tensor x, float divisor=2688.",
    ["gsa"],
    module="amax_gsa",
    function="compute_amax_gsa",
    plan=_plan_amax_gsa,
    reference=reference.amax_gsa,
)
DEQUANTIZE = Op(
    "dequantize_nvfp4",
    "Tensor x_fp4, Tensor x_sf, Tensor gsa, *, int? cols=None, int dim=-1, "
    'str scale_layout="linear", ScalarType? dtype=None',
    ["out"],
    module="dequant_nvfp4",
    function="dequant_nvfp4",
    plan=_plan_dequantize,
    reference=reference.dequantize_nvfp4,
)


class Family(NamedTuple):
    """The two ops of a function: gsa computed (or given as a number), and gsa given as a tensor."""

    dynamic: Op
    static: Op


QUANTIZE = Family(
    Op(
        "quantize_nvfp4",
        f"Tensor x, float divisor=2688., *, {_DYNAMIC}",
        ["x_fp4", "x_sf", "gsa"],
        module="fused_amax_quantize",
        function="amax_quantize_nvfp4",
        plan=_plan_quantize,
        reference=reference.quantize_nvfp4,
    ),
    Op(
        "quantize_nvfp4_static",
        f"Tensor x, Tensor gsa, *, {_KEYWORDS}",
        ["x_fp4", "x_sf"],
        module="quantize_nvfp4",
        function="quantize_nvfp4",
        plan=_plan_quantize_static,
        reference=reference.quantize_nvfp4_static,
    ),
)
DEINTERLEAVE = Family(
    Op(
        "deinterleave_quantize_nvfp4",
        "Tensor fused, int intermediate, int granularity_cols, float divisor=2688., *, "
        f'float? global_scale=None, {_SWIGLU}, str granularity="tensor", {_KEYWORDS}',
        ["x_fp4", "x_sf", "gsa"],
        module="deinterleave_quantize",
        function="deinterleave_amax_quantize_nvfp4",
        plan=_plan_deinterleave,
        reference=reference.deinterleave_quantize_nvfp4,
    ),
    Op(
        "deinterleave_quantize_nvfp4_static",
        f"Tensor fused, int intermediate, int granularity_cols, Tensor gsa, *, {_SWIGLU}, "
        f"{_KEYWORDS}",
        ["x_fp4", "x_sf"],
        module="deinterleave_quantize",
        function="deinterleave_quantize_nvfp4",
        plan=_plan_deinterleave_static,
        reference=reference.deinterleave_quantize_nvfp4_static,
    ),
)
RMSNORM = Family(
    Op(
        "rmsnorm_quantize_nvfp4",
        "Tensor x, Tensor weight, float eps=1e-6, float divisor=2688., *, "
        f"Tensor(a!)? residual=None, {_DYNAMIC_ROW}",
        ["x_fp4", "x_sf", "gsa", "inv_rms"],
        module="fused_rmsnorm_quantize",
        function="rmsnorm_quantize_nvfp4",
        plan=_plan_rmsnorm,
        reference=reference.rmsnorm_quantize_nvfp4,
    ),
    Op(
        "rmsnorm_quantize_nvfp4_static",
        "Tensor x, Tensor weight, Tensor gsa, float eps=1e-6, *, "
        f"Tensor(a!)? residual=None, {_KEYWORDS}",
        ["x_fp4", "x_sf", "inv_rms"],
        module="fused_rmsnorm_quantize",
        function="rmsnorm_quantize_nvfp4_from_buffer",
        plan=_plan_rmsnorm_static,
        reference=reference.rmsnorm_quantize_nvfp4_static,
    ),
)
MHC = Family(
    Op(
        "mhc_rmsnorm_quantize_nvfp4",
        "Tensor X, Tensor A, Tensor weight, float eps=1e-6, float divisor=2688., *, "
        f"{_DYNAMIC_ROW}",
        ["x_fp4", "x_sf", "gsa", "inv_rms"],
        module="fused_mhc_rmsnorm_quantize",
        function="mhc_rmsnorm_quantize_nvfp4",
        plan=_plan_mhc,
        reference=reference.mhc_rmsnorm_quantize_nvfp4,
    ),
    Op(
        "mhc_rmsnorm_quantize_nvfp4_static",
        f"Tensor X, Tensor A, Tensor weight, Tensor gsa, float eps=1e-6, *, {_KEYWORDS}",
        ["x_fp4", "x_sf", "inv_rms"],
        module="fused_mhc_rmsnorm_quantize",
        function="mhc_rmsnorm_quantize_nvfp4_from_buffer",
        plan=_plan_mhc_static,
        reference=reference.mhc_rmsnorm_quantize_nvfp4_static,
    ),
)
WEIGHT = Family(
    Op(
        "quantize_weight_nvfp4",
        f"Tensor w, float divisor=2688., *, float? global_scale=None, {_BLOCK}, {_KEYWORDS}",
        ["x_fp4", "x_sf", "gsa"],
        module="quantize_weight_nvfp4",
        function="quantize_weight_nvfp4",
        plan=_plan_weight,
        reference=reference.quantize_weight_nvfp4,
    ),
    Op(
        "quantize_weight_nvfp4_static",
        f"Tensor w, Tensor gsa, *, {_BLOCK}, {_KEYWORDS}",
        ["x_fp4", "x_sf"],
        module="quantize_weight_nvfp4",
        function="quantize_weight_nvfp4_from_buffer",
        plan=_plan_weight_static,
        reference=reference.quantize_weight_nvfp4_static,
    ),
)

NVFP4_OPS: tuple[Op, ...] = (
    AMAX_GSA,
    *QUANTIZE,
    *DEINTERLEAVE,
    *RMSNORM,
    *MHC,
    *WEIGHT,
    DEQUANTIZE,
)
"""Every op of NVFP4."""
