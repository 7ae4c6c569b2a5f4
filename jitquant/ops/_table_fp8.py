"""The declarations of the FP8, INT8 and MXFP8 ops, and for each the plan.

A plan has the arguments of its op, in order, and no side effect. Scales are planned as they lie in
memory, contiguous and with their padding; `QuantizedTensor.scale_inv` is the view of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant import numerics as reference
from jitquant.formats import (
    BLOCK_SCALE_LAYOUTS,
    E8M0_DTYPE,
    GRANULARITIES,
    GROUP_SCALE_LAYOUTS,
    MXFP8_BLOCK,
    QUANTIZED_MAX,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
    ceil_div,
    one_of,
    scales_shape,
)
from jitquant.ops import _checks
from jitquant.ops import _checks_fp8 as checks
from jitquant.ops._kernel_op import KernelOp
from jitquant.ops.schema import Plan, Result, fp32

_DEQUANTIZE_LAYOUTS = (*GROUP_SCALE_LAYOUTS, BLOCK_SCALE_LAYOUTS[1], *SCALE_LAYOUTS)
_BLOCK_FORMATS = SCALE_FORMATS[:2]


def _scales(leading: tuple[int, ...], groups: int, scale_format: str, scale_layout: str) -> Result:
    dtype = torch.int32 if scale_format == "ue8m0_packed" else torch.float32
    return Result(scales_shape(leading, groups, scale_format, scale_layout), dtype)


def _fp8(
    x: Tensor,
    name: str,
    cols: int,
    scale: Tensor | None,
    dtype: torch.dtype,
    scale_value: float | None,
    scale_ub: float | None,
    granularity: str,
    with_amax: bool,
    dynamic_tensor: bool,
) -> tuple[Plan, int]:
    """Plan with data, scale_inv and amax, and the rows."""
    checks.fp8_dtype(dtype)
    one_of("granularity", granularity, GRANULARITIES)
    checks.scale_number(scale_value)
    given = scale is not None or scale_value is not None
    checks.upper_bound(scale_ub, given)
    leading = x.shape[:-1]
    rows = _checks.row_count(leading)
    if scale is not None:
        if scale_value is not None:
            raise ValueError("scale is given as a tensor and as a number; accepted is one of them")
        checks.scale_tensor(scale, rows, granularity, x, name)
    elif scale_value is not None and granularity == "row":
        raise ValueError("scale is one number; accepted with it is granularity 'tensor'")
    elif not given and granularity == "tensor" and not dynamic_tensor:
        raise ValueError(
            "granularity is 'tensor' without a scale; accepted are 'row', or a scale that is "
            "given. For a computed scale of the whole tensor quantize the result with quantize_fp8"
        )
    shape: tuple[int, ...] = (*leading, 1) if granularity == "row" else (1,)
    results = (
        Result((*leading, cols), dtype),
        fp32(*shape),
        fp32(*shape) if with_amax else fp32(0),
    )
    return Plan(x.device, results), rows


def _plan_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype,
    scale_value: float | None = None,
    scale_ub: float | None = None,
    granularity: str = "tensor",
    with_amax: bool = True,
) -> Plan:
    _checks.input_tensor(x, "x")
    return _fp8(
        x,
        "x",
        x.shape[-1],
        scale,
        dtype,
        scale_value,
        scale_ub,
        granularity,
        with_amax,
        True,
    )[0]


def _plan_silu_mul_fp8(
    fused: Tensor,
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype,
    scale_value: float | None = None,
    scale_ub: float | None = None,
    granularity: str = "row",
    interleave: int = 0,
    with_amax: bool = True,
) -> Plan:
    cols = checks.gate_and_up(fused, interleave)
    return _fp8(
        fused,
        "fused",
        cols,
        scale,
        dtype,
        scale_value,
        scale_ub,
        granularity,
        with_amax,
        False,
    )[0]


def _plan_rmsnorm_fp8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype,
    scale_value: float | None = None,
    scale_ub: float | None = None,
    granularity: str = "row",
    with_amax: bool = True,
) -> Plan:
    _checks.norm_arguments(x, weight, eps, residual)
    plan, rows = _fp8(
        x,
        "x",
        x.shape[-1],
        scale,
        dtype,
        scale_value,
        scale_ub,
        granularity,
        with_amax,
        False,
    )
    return Plan(plan.device, (*plan.results, fp32(rows)))


def _group(
    x: Tensor,
    name: str,
    cols: int,
    group_size: int,
    counts: Tensor | None,
    dtype: torch.dtype,
    scale_format: str,
    scale_layout: str,
    eps: float | None,
    recipe: str,
    eps_name: str = "eps",
) -> tuple[Result, Result]:
    checks.group_size(group_size)
    checks.group_numerics(
        dtype,
        scale_format,
        scale_layout,
        eps,
        recipe,
        SCALE_FORMATS,
        GROUP_SCALE_LAYOUTS,
        eps_name,
    )
    leading = tuple(x.shape[:-1])
    if counts is not None:
        checks.counts_tensor(counts, leading, x, name)
    scales = _scales(leading, ceil_div(cols, group_size), scale_format, scale_layout)
    return Result((*leading, cols), dtype), scales


def _plan_group(
    x: Tensor,
    group_size: int,
    counts: Tensor | None = None,
    *,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "row",
    eps: float | None = None,
    recipe: str = "te",
    zero_rest: bool = True,
) -> Plan:
    _checks.input_tensor(x, "x")
    results = _group(
        x,
        "x",
        x.shape[-1],
        group_size,
        counts,
        dtype,
        scale_format,
        scale_layout,
        eps,
        recipe,
    )
    return Plan(x.device, results)


def _plan_silu_mul_group(
    fused: Tensor,
    group_size: int,
    counts: Tensor | None = None,
    *,
    dtype: torch.dtype,
    interleave: int = 0,
    scale_format: str = "float32",
    scale_layout: str = "row",
    eps: float | None = None,
    recipe: str = "te",
    zero_rest: bool = True,
) -> Plan:
    cols = checks.gate_and_up(fused, interleave)
    results = _group(
        fused,
        "fused",
        cols,
        group_size,
        counts,
        dtype,
        scale_format,
        scale_layout,
        eps,
        recipe,
    )
    return Plan(fused.device, results)


def _plan_rmsnorm_group(
    x: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "row",
    amax_eps: float | None = None,
    recipe: str = "te",
) -> Plan:
    _checks.norm_arguments(x, weight, eps, residual)
    results = _group(
        x,
        "x",
        x.shape[-1],
        group_size,
        None,
        dtype,
        scale_format,
        scale_layout,
        amax_eps,
        recipe,
        "amax_eps",
    )
    return Plan(x.device, (*results, fp32(_checks.row_count(x.shape[:-1]))))


def _plan_block(
    w: Tensor,
    block_rows: int,
    block_cols: int,
    *,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "row",
    eps: float | None = None,
    recipe: str = "te",
) -> Plan:
    _checks.input_tensor(w, "w", 2, "(..., N, K)")
    checks.block_shape(block_rows, block_cols)
    checks.group_numerics(
        dtype, scale_format, scale_layout, eps, recipe, _BLOCK_FORMATS, BLOCK_SCALE_LAYOUTS
    )
    leading = (*w.shape[:-2], ceil_div(w.shape[-2], block_rows))
    scales = _scales(leading, ceil_div(w.shape[-1], block_cols), scale_format, scale_layout)
    return Plan(w.device, (Result(tuple(w.shape), dtype), scales))


def _plan_group_both(
    x: Tensor,
    group_size: int,
    *,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "column",
    eps: float | None = None,
    recipe: str = "te",
) -> Plan:
    checks.matrix(x, "x")
    checks.group_size(group_size)
    checks.group_numerics(
        dtype, scale_format, scale_layout, eps, recipe, SCALE_FORMATS, GROUP_SCALE_LAYOUTS
    )
    rows, cols = x.shape
    return Plan(
        x.device,
        (
            Result((rows, cols), dtype),
            _scales((rows,), ceil_div(cols, group_size), scale_format, scale_layout),
            Result((cols, rows), dtype),
            _scales((cols,), ceil_div(rows, group_size), scale_format, scale_layout),
        ),
    )


def _plan_block_both(
    w: Tensor,
    block_rows: int,
    block_cols: int,
    *,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "row",
    eps: float | None = None,
    recipe: str = "te",
) -> Plan:
    checks.matrix(w, "w")
    keywords = (dtype, scale_format, scale_layout, eps, recipe)
    checks.block_shape(block_rows, block_cols)
    checks.group_numerics(*keywords, _BLOCK_FORMATS, BLOCK_SCALE_LAYOUTS)
    rows, cols = w.shape
    tall, wide = ceil_div(rows, block_rows), ceil_div(cols, block_cols)
    return Plan(
        w.device,
        (
            Result((rows, cols), dtype),
            _scales((tall,), wide, scale_format, scale_layout),
            Result((cols, rows), dtype),
            _scales((wide,), tall, scale_format, scale_layout),
        ),
    )


def _mxfp8_scales(leading: tuple[int, ...], cols: int, scale_layout: str) -> Result:
    groups = ceil_div(cols, MXFP8_BLOCK)
    return Result(scales_shape(leading, groups, "e8m0", scale_layout), E8M0_DTYPE)


def _plan_mxfp8(x: Tensor, *, dtype: torch.dtype, scale_layout: str = "linear") -> Plan:
    _checks.input_tensor(x, "x")
    checks.fp8_dtype(dtype)
    one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
    leading = tuple(x.shape[:-1])
    scales = _mxfp8_scales(leading, x.shape[-1], scale_layout)
    return Plan(x.device, (Result(tuple(x.shape), dtype), scales))


def _plan_mxfp8_both(x: Tensor, *, dtype: torch.dtype, scale_layout: str = "linear") -> Plan:
    checks.matrix(x, "x")
    checks.fp8_dtype(dtype)
    one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
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


def _plan_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    block_rows: int,
    block_cols: int,
    *,
    scale_layout: str = "row",
    dtype: torch.dtype | None = None,
) -> Plan:
    if data.dtype not in QUANTIZED_MAX:
        raise TypeError(
            f"data is {data.dtype}; accepted are torch.float8_e4m3fn, torch.float8_e5m2 and "
            "torch.int8"
        )
    if data.dim() == 0 or data.shape[-1] == 0 or (block_rows > 1 and data.dim() < 2):
        raise ValueError(
            f"data has shape {_checks.shape_text(data)}; accepted is (..., N) with N >= 1, and "
            "(..., N, K) for blocks"
        )
    if data.stride(-1) != 1 and data.shape[-1] != 1:
        raise ValueError(
            f"data has strides {tuple(data.stride())}; accepted are tensors whose last dimension "
            "is contiguous (stride 1)"
        )
    if block_rows < 0 or block_cols < 0 or block_cols % 16:
        raise ValueError(
            f"block_rows is {block_rows} and block_cols is {block_cols}; accepted are numbers that "
            "are not negative, and a block_cols that is a multiple of 16"
        )
    _checks.output_dtype(dtype)
    one_of("scale_layout", scale_layout, _DEQUANTIZE_LAYOUTS)
    _checks.same_device(scale_inv, "scale_inv", data, "data")
    if scale_inv.dtype not in (torch.float32, torch.int32, E8M0_DTYPE, torch.uint8):
        raise TypeError(
            f"scale_inv is {scale_inv.dtype}; accepted are float32, int32 of packed exponents, "
            "float8_e8m0fnu, and its bytes as uint8"
        )
    if block_rows == 0 and scale_inv.dtype != torch.float32:
        raise TypeError(
            f"scale_inv is {scale_inv.dtype} with block_rows 0; accepted is float32 where a whole "
            "tensor has one scale. Pass the number that it stands for as torch.float32"
        )
    if (
        block_rows
        and scale_layout == "swizzled_128x4"
        and scale_inv.dtype not in (E8M0_DTYPE, torch.uint8)
    ):
        raise TypeError(
            f"scale_inv is {scale_inv.dtype} with scale_layout 'swizzled_128x4'; accepted are "
            "float8_e8m0fnu and its bytes as uint8. Scales of other dtypes have another layout"
        )
    leading: tuple[int, ...] = tuple(data.shape[:-1])
    packed = "ue8m0_packed" if scale_inv.dtype == torch.int32 else "float32"
    wanted: tuple[int, ...] = (1,)
    if block_rows:
        if block_rows > 1:
            leading = (*data.shape[:-2], ceil_div(data.shape[-2], block_rows))
        groups = ceil_div(data.shape[-1], block_cols) if block_cols else 1
        wanted = scales_shape(leading, groups, packed, scale_layout)
    if tuple(scale_inv.shape) != tuple(wanted) or not scale_inv.is_contiguous():
        raise ValueError(
            f"scale_inv has shape {_checks.shape_text(scale_inv)} and strides "
            f"{tuple(scale_inv.stride())}; accepted is {tuple(wanted)}, contiguous, for data of "
            f"shape {_checks.shape_text(data)} and scale_layout {scale_layout!r}"
        )
    out = Result(tuple(data.shape), torch.bfloat16 if dtype is None else dtype)
    return Plan(data.device, (out,))


_FP8 = "ScalarType dtype, float? scale_value=None, float? scale_ub=None"
_GROUP = 'str scale_format="float32", str scale_layout="row", float? eps=None, str recipe="te"'

QUANTIZE_FP8 = KernelOp(
    "quantize_fp8",
    f'Tensor x, Tensor? scale=None, *, {_FP8}, str granularity="tensor", bool with_amax=True',
    ["data", "scale_inv", "amax"],
    module="quantize_fp8",
    function="quantize_fp8",
    plan=_plan_fp8,
    reference=reference.quantize_fp8,
)
SILU_MUL_FP8 = KernelOp(
    "silu_mul_quantize_fp8",
    f'Tensor fused, Tensor? scale=None, *, {_FP8}, str granularity="row", int interleave=0, '
    "bool with_amax=True",
    ["data", "scale_inv", "amax"],
    module="silu_mul_quantize",
    function="silu_mul_quantize_fp8",
    plan=_plan_silu_mul_fp8,
    reference=reference.silu_mul_quantize_fp8,
)
RMSNORM_FP8 = KernelOp(
    "rmsnorm_quantize_fp8",
    "Tensor x, Tensor weight, Tensor? scale=None, float eps=1e-6, *, "
    f'Tensor(a!)? residual=None, {_FP8}, str granularity="row", bool with_amax=True',
    ["data", "scale_inv", "amax", "inv_rms"],
    module="rmsnorm_quantize",
    function="rmsnorm_quantize_fp8",
    plan=_plan_rmsnorm_fp8,
    reference=reference.rmsnorm_quantize_fp8,
)
QUANTIZE_GROUP = KernelOp(
    "quantize_group",
    f"Tensor x, int group_size, Tensor? counts=None, *, ScalarType dtype, {_GROUP}, "
    "bool zero_rest=True",
    ["data", "scale_inv"],
    module="quantize_group",
    function="quantize_group",
    plan=_plan_group,
    reference=reference.quantize_group,
)
SILU_MUL_GROUP = KernelOp(
    "silu_mul_quantize_group",
    "Tensor fused, int group_size, Tensor? counts=None, *, ScalarType dtype, int interleave=0, "
    f"{_GROUP}, bool zero_rest=True",
    ["data", "scale_inv"],
    module="silu_mul_quantize_group",
    function="silu_mul_quantize_group",
    plan=_plan_silu_mul_group,
    reference=reference.silu_mul_quantize_group,
)
RMSNORM_GROUP = KernelOp(
    "rmsnorm_quantize_group",
    "Tensor x, Tensor weight, int group_size, float eps=1e-6, *, Tensor(a!)? residual=None, "
    'ScalarType dtype, str scale_format="float32", str scale_layout="row", '
    'float? amax_eps=None, str recipe="te"',
    ["data", "scale_inv", "inv_rms"],
    module="rmsnorm_quantize_group",
    function="rmsnorm_quantize_group",
    plan=_plan_rmsnorm_group,
    reference=reference.rmsnorm_quantize_group,
)
QUANTIZE_BLOCK = KernelOp(
    "quantize_block",
    f"Tensor w, int block_rows, int block_cols, *, ScalarType dtype, {_GROUP}",
    ["data", "scale_inv"],
    module="quantize_block",
    function="quantize_block",
    plan=_plan_block,
    reference=reference.quantize_block,
)
QUANTIZE_GROUP_BOTH = KernelOp(
    "quantize_group_both",
    'Tensor x, int group_size, *, ScalarType dtype, str scale_format="float32", '
    'str scale_layout="column", float? eps=None, str recipe="te"',
    ["data", "scale_inv", "data_t", "scale_inv_t"],
    module="quantize_both",
    function="quantize_group_both",
    plan=_plan_group_both,
    reference=reference.quantize_group_both,
)
QUANTIZE_BLOCK_BOTH = KernelOp(
    "quantize_block_both",
    f"Tensor w, int block_rows, int block_cols, *, ScalarType dtype, {_GROUP}",
    ["data", "scale_inv", "data_t", "scale_inv_t"],
    module="quantize_both",
    function="quantize_block_both",
    plan=_plan_block_both,
    reference=reference.quantize_block_both,
)
QUANTIZE_MXFP8 = KernelOp(
    "quantize_mxfp8",
    'Tensor x, *, ScalarType dtype, str scale_layout="linear"',
    ["data", "scale_inv"],
    module="quantize_mxfp8",
    function="quantize_mxfp8",
    plan=_plan_mxfp8,
    reference=reference.quantize_mxfp8,
)
QUANTIZE_MXFP8_BOTH = KernelOp(
    "quantize_mxfp8_both",
    'Tensor x, *, ScalarType dtype, str scale_layout="linear"',
    ["data", "scale_inv", "data_t", "scale_inv_t"],
    module="quantize_both",
    function="quantize_mxfp8_both",
    plan=_plan_mxfp8_both,
    reference=reference.quantize_mxfp8_both,
)
DEQUANTIZE = KernelOp(
    "dequantize",
    "Tensor data, Tensor scale_inv, int block_rows, int block_cols, *, "
    'str scale_layout="row", ScalarType? dtype=None',
    ["out"],
    module="dequantize",
    function="dequantize",
    plan=_plan_dequantize,
    reference=reference.dequantize,
)

FP8_OPS: tuple[KernelOp, ...] = (
    QUANTIZE_FP8,
    SILU_MUL_FP8,
    RMSNORM_FP8,
    QUANTIZE_GROUP,
    SILU_MUL_GROUP,
    RMSNORM_GROUP,
    QUANTIZE_BLOCK,
    QUANTIZE_GROUP_BOTH,
    QUANTIZE_BLOCK_BOTH,
    QUANTIZE_MXFP8,
    QUANTIZE_MXFP8_BOTH,
    DEQUANTIZE,
)
"""Every op of this module."""
