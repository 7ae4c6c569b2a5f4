"""The declarations of the two halves of a quantization whose amax is that of a process group.

``*_amax`` is the first launch, ``*_from_amax`` the second; `jitquant.ops._sharded` puts an
all_reduce between them. Argument names follow `jitquant.ops._table`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.formats import GRANULARITIES, MAX_PARTIALS, NVFP4_DIVISOR, one_of
from jitquant.numerics import sharded
from jitquant.ops import _checks, _table
from jitquant.ops import _checks_fp8 as checks
from jitquant.ops._kernel_op import KernelOp
from jitquant.ops.schema import Op, Plan, Result, fp32


def _plan_amax(
    x: Tensor,
    *,
    granularity: str = "tensor",
    keep_nan: bool = False,
    run: int = 0,
    activate: bool = False,
) -> Plan:
    _checks.input_tensor(x, "x")
    one_of("granularity", granularity, GRANULARITIES)
    if run < 0 or (run and x.shape[-1] % (2 * run)):
        raise ValueError(
            f"run is {run} and x has shape {_checks.shape_text(x)}; accepted are 0, and divisors "
            "of half of the columns"
        )
    rows = _checks.row_count(x.shape[:-1])
    return Plan(x.device, (fp32(rows if granularity == "row" else 1),))


def _given(amax: Tensor, counts: tuple[int, ...], like: Tensor, name: str) -> None:
    """A given amax: fp32, contiguous, of one of these numbers of elements."""
    if amax.dtype != torch.float32:
        raise TypeError(f"amax is {amax.dtype}; accepted is float32. Convert it with amax.float()")
    _checks.same_device(amax, "amax", like, name)
    if amax.numel() not in counts or not amax.is_contiguous():
        raise ValueError(
            f"amax has shape {_checks.shape_text(amax)} and strides {tuple(amax.stride())}; "
            f"accepted are {' or '.join(map(str, counts))} elements, contiguous"
        )


def _nvfp4(
    x: Tensor,
    name: str,
    leading: tuple[int, ...],
    cols: int,
    amax: Tensor,
    divisor: float,
    recipe: str,
    scale_layout: str,
) -> Plan:
    rows = _checks.row_count(leading)
    _given(amax, (1, rows), x, name)
    _checks.divisor_value(divisor)
    plan, _ = _table.static_plan(x, name, leading, cols, None, recipe, scale_layout)
    return Plan(plan.device, (*plan.results, fp32(amax.numel())))


def _plan_quantize(
    x: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.input_tensor(x, "x")
    return _nvfp4(x, "x", x.shape[:-1], x.shape[-1], amax, divisor, recipe, scale_layout)


def _plan_weight(
    w: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    block: str = "1x16",
    dim: int = -1,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    packed = _table.weight_results(w, block, dim, recipe, scale_layout)
    _given(amax, (1,), w, "w")
    _checks.divisor_value(divisor)
    return Plan(w.device, (*packed, fp32(1)))


def _plan_deinterleave(
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
) -> Plan:
    _checks.deinterleave_arguments(fused, intermediate, granularity_cols, op, halves)
    leading = fused.shape[:-1]
    return _nvfp4(fused, "fused", leading, intermediate, amax, divisor, recipe, scale_layout)


def _plan_rmsnorm_amax(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, residual: Tensor | None = None
) -> Plan:
    _checks.norm_arguments(x, weight, eps, residual)
    return Plan(x.device, (fp32(MAX_PARTIALS), fp32(_checks.row_count(x.shape[:-1]))))


def _normalized(
    x: Tensor,
    name: str,
    leading: tuple[int, ...],
    inv_rms: Tensor,
    amax: Tensor,
    divisor: float,
    recipe: str,
    scale_layout: str,
) -> Plan:
    plan, rows = _table.static_plan(x, name, leading, x.shape[-1], None, recipe, scale_layout)
    _given(amax, (1, MAX_PARTIALS), x, name)
    _checks.divisor_value(divisor)
    _checks.same_device(inv_rms, "inv_rms", x, name)
    if inv_rms.dtype != torch.float32 or tuple(inv_rms.shape) != (rows,):
        raise ValueError(
            f"inv_rms is {inv_rms.dtype} {_checks.shape_text(inv_rms)}; accepted is float32 "
            f"({rows},), as the first half gives it"
        )
    return Plan(plan.device, (*plan.results, fp32(1)))


def _plan_rmsnorm(
    x: Tensor,
    weight: Tensor,
    inv_rms: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.norm_arguments(x, weight, 0.0, None)
    return _normalized(x, "x", x.shape[:-1], inv_rms, amax, divisor, recipe, scale_layout)


def _plan_mhc_amax(X: Tensor, A: Tensor, weight: Tensor, eps: float = 1e-6) -> Plan:
    _checks.mhc_arguments(X, A, weight, eps)
    return Plan(X.device, (fp32(MAX_PARTIALS), fp32(_checks.row_count(X.shape[:-2]))))


def _plan_mhc(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    inv_rms: Tensor,
    amax: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> Plan:
    _checks.mhc_arguments(X, A, weight, 0.0)
    return _normalized(X, "X", X.shape[:-2], inv_rms, amax, divisor, recipe, scale_layout)


def _fp8(
    x: Tensor,
    name: str,
    cols: int,
    amax: Tensor,
    dtype: torch.dtype,
    scale_ub: float | None,
    granularity: str,
) -> Plan:
    checks.fp8_dtype(dtype)
    one_of("granularity", granularity, GRANULARITIES)
    checks.upper_bound(scale_ub, False)
    leading = x.shape[:-1]
    by_row = granularity == "row"
    _given(amax, (_checks.row_count(leading) if by_row else 1,), x, name)
    shape = (*leading, 1) if by_row else (1,)
    return Plan(x.device, (Result((*leading, cols), dtype), fp32(*shape)))


def _plan_fp8(
    x: Tensor,
    amax: Tensor,
    *,
    dtype: torch.dtype,
    scale_ub: float | None = None,
    granularity: str = "tensor",
) -> Plan:
    _checks.input_tensor(x, "x")
    return _fp8(x, "x", x.shape[-1], amax, dtype, scale_ub, granularity)


def _plan_silu_mul_fp8(
    fused: Tensor,
    amax: Tensor,
    *,
    dtype: torch.dtype,
    scale_ub: float | None = None,
    granularity: str = "row",
    interleave: int = 0,
) -> Plan:
    cols = checks.gate_and_up(fused, interleave)
    return _fp8(fused, "fused", cols, amax, dtype, scale_ub, granularity)


_KEYWORDS = 'str recipe="te", str scale_layout="linear"'
_PACKED = ["x_fp4", "x_sf", "gsa"]
_CAST = ["data", "scale_inv"]

AMAX = Op(
    "amax",
    'Tensor x, *, str granularity="tensor", bool keep_nan=False, int run=0, bool activate=False',
    ["amax"],
    module="amax",
    function="amax",
    plan=_plan_amax,
    reference=sharded.amax,
)
QUANTIZE = Op(
    "quantize_nvfp4_from_amax",
    f"Tensor x, Tensor amax, float divisor=2688., *, {_KEYWORDS}",
    _PACKED,
    module="fused_amax_quantize",
    function="quantize_nvfp4_from_amax",
    plan=_plan_quantize,
    reference=sharded.quantize_nvfp4_from_amax,
)
WEIGHT = Op(
    "quantize_weight_nvfp4_from_amax",
    f'Tensor w, Tensor amax, float divisor=2688., *, str block="1x16", int dim=-1, {_KEYWORDS}',
    _PACKED,
    module="quantize_weight_nvfp4",
    function="quantize_weight_nvfp4_from_amax",
    plan=_plan_weight,
    reference=sharded.quantize_weight_nvfp4_from_amax,
)
DEINTERLEAVE = Op(
    "deinterleave_quantize_nvfp4_from_amax",
    "Tensor fused, int intermediate, int granularity_cols, Tensor amax, float divisor=2688., *, "
    f'str op="select", bool halves=False, {_KEYWORDS}',
    _PACKED,
    module="deinterleave_quantize",
    function="deinterleave_quantize_nvfp4_from_amax",
    plan=_plan_deinterleave,
    reference=sharded.deinterleave_quantize_nvfp4_from_amax,
)
RMSNORM_AMAX = Op(
    "rmsnorm_amax",
    "Tensor x, Tensor weight, float eps=1e-6, *, Tensor(a!)? residual=None",
    ["amax", "inv_rms"],
    module="fused_rmsnorm_quantize",
    function="rmsnorm_amax",
    plan=_plan_rmsnorm_amax,
    reference=sharded.rmsnorm_amax,
)
RMSNORM = Op(
    "rmsnorm_quantize_nvfp4_from_amax",
    f"Tensor x, Tensor weight, Tensor inv_rms, Tensor amax, float divisor=2688., *, {_KEYWORDS}",
    _PACKED,
    module="fused_rmsnorm_quantize",
    function="rmsnorm_quantize_nvfp4_from_amax",
    plan=_plan_rmsnorm,
    reference=sharded.rmsnorm_quantize_nvfp4_from_amax,
)
MHC_AMAX = Op(
    "mhc_rmsnorm_amax",
    "Tensor X, Tensor A, Tensor weight, float eps=1e-6",
    ["amax", "inv_rms"],
    module="fused_mhc_rmsnorm_quantize",
    function="mhc_rmsnorm_amax",
    plan=_plan_mhc_amax,
    reference=sharded.mhc_rmsnorm_amax,
)
MHC = Op(
    "mhc_rmsnorm_quantize_nvfp4_from_amax",
    "Tensor X, Tensor A, Tensor weight, Tensor inv_rms, Tensor amax, float divisor=2688., *, "
    f"{_KEYWORDS}",
    _PACKED,
    module="fused_mhc_rmsnorm_quantize",
    function="mhc_rmsnorm_quantize_nvfp4_from_amax",
    plan=_plan_mhc,
    reference=sharded.mhc_rmsnorm_quantize_nvfp4_from_amax,
)
QUANTIZE_FP8 = KernelOp(
    "quantize_fp8_from_amax",
    'Tensor x, Tensor amax, *, ScalarType dtype, float? scale_ub=None, str granularity="tensor"',
    _CAST,
    module="quantize_fp8",
    function="quantize_fp8_from_amax",
    plan=_plan_fp8,
    reference=sharded.quantize_fp8_from_amax,
)
SILU_MUL_FP8 = KernelOp(
    "silu_mul_quantize_fp8_from_amax",
    "Tensor fused, Tensor amax, *, ScalarType dtype, float? scale_ub=None, "
    'str granularity="row", int interleave=0',
    _CAST,
    module="silu_mul_quantize",
    function="silu_mul_quantize_fp8_from_amax",
    plan=_plan_silu_mul_fp8,
    reference=sharded.silu_mul_quantize_fp8_from_amax,
)

SHARDED_OPS: tuple[Op, ...] = (
    AMAX,
    QUANTIZE,
    WEIGHT,
    DEINTERLEAVE,
    RMSNORM_AMAX,
    RMSNORM,
    MHC_AMAX,
    MHC,
    QUANTIZE_FP8,
    SILU_MUL_FP8,
)
"""Every op that is half of a quantization."""
