"""The declarations of the ops on many tensors in one buffer, and for each the plan."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant import numerics as reference
from jitquant.formats import (
    CODES_PER_BYTE,
    FP4_DTYPE,
    NVFP4_BLOCK,
    RECIPES,
    SCALE_DTYPE,
    ceil_div,
    one_of,
)
from jitquant.ops import _checks
from jitquant.ops import _checks_fp8 as checks
from jitquant.ops._kernel_op import KernelOp
from jitquant.ops.schema import Plan, Result, fp32

_BLOCK_BYTES = NVFP4_BLOCK // CODES_PER_BYTE


def _groups(
    x: Tensor, name: str, offsets: Tensor, scale: Tensor | None, sizes: Tensor | None
) -> tuple[int, Result]:
    """The number of groups, and a float for each."""
    checks.buffer_of_groups(x, name)
    count = checks.offsets_tensor(offsets, sizes, x, name)
    checks.floats_of_groups(scale, "scale", count, x, name)
    return count, fp32(count)


def _plan_fp8(
    x: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    sizes: Tensor | None = None,
    dtype: torch.dtype,
) -> Plan:
    checks.fp8_dtype(dtype)
    _, floats = _groups(x, "x", offsets, scale, sizes)
    return Plan(x.device, (Result(tuple(x.shape), dtype), floats, floats))


def _plan_grad_fp8(
    grad: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    sizes: Tensor | None = None,
    act_input: Tensor | None = None,
    activation: str = "none",
    with_dbias: bool = True,
    dtype: torch.dtype,
) -> Plan:
    checks.fp8_dtype(dtype)
    count, floats = _groups(grad, "grad", offsets, scale, sizes)
    checks.activation(activation, act_input, grad)
    if grad.shape[-1] == 0:
        raise ValueError(
            f"grad has shape {_checks.shape_text(grad)}; accepted is (..., N) with N >= 1"
        )
    dbias = fp32(count if with_dbias else 0, grad.shape[-1])
    return Plan(grad.device, (Result(tuple(grad.shape), dtype), floats, floats, dbias))


def _plan_nvfp4(
    x: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    sizes: Tensor | None = None,
    recipe: str = "te",
) -> Plan:
    one_of("recipe", recipe, RECIPES)
    _, floats = _groups(x, "x", offsets, scale, sizes)
    blocks = ceil_div(_checks.row_count(x.shape), NVFP4_BLOCK)
    return Plan(
        x.device,
        (
            Result((blocks * _BLOCK_BYTES,), FP4_DTYPE),
            Result((blocks,), SCALE_DTYPE),
            floats,
            floats,
        ),
    )


def _plan_dequantize_fp8(
    data: Tensor,
    scale_inv: Tensor,
    offsets: Tensor,
    *,
    sizes: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    _checks.output_dtype(dtype)
    if data.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(
            f"data is {data.dtype}; accepted are torch.float8_e4m3fn and torch.float8_e5m2"
        )
    if not data.is_contiguous():
        raise ValueError("data is not contiguous; accepted is a contiguous buffer")
    count = checks.offsets_tensor(offsets, sizes, data, "data")
    checks.floats_of_groups(scale_inv, "scale_inv", count, data, "data")
    out = Result(tuple(data.shape), torch.bfloat16 if dtype is None else dtype)
    return Plan(data.device, (out,))


def _plan_dequantize_nvfp4(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    offsets: Tensor,
    *,
    numel: int,
    sizes: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    _checks.output_dtype(dtype)
    _checks.packed_tensor(x_fp4, "x_fp4", FP4_DTYPE)
    _checks.packed_tensor(x_sf, "x_sf", SCALE_DTYPE)
    _checks.same_device(x_sf, "x_sf", x_fp4, "x_fp4")
    count = checks.offsets_tensor(offsets, sizes, x_fp4, "x_fp4")
    checks.floats_of_groups(gsa, "gsa", count, x_fp4, "x_fp4")
    blocks = ceil_div(numel, NVFP4_BLOCK)
    if numel < 0 or tuple(x_fp4.shape) != (blocks * _BLOCK_BYTES,):
        raise ValueError(
            f"x_fp4 has shape {_checks.shape_text(x_fp4)}; accepted is ({blocks * _BLOCK_BYTES},) "
            f"for {numel} elements"
        )
    if tuple(x_sf.shape) != (blocks,):
        raise ValueError(
            f"x_sf has shape {_checks.shape_text(x_sf)}; accepted is ({blocks},) for {numel} "
            "elements"
        )
    return Plan(x_fp4.device, (Result((numel,), torch.bfloat16 if dtype is None else dtype),))


_GROUPS = "Tensor offsets, Tensor? scale=None, *, Tensor? sizes=None"

QUANTIZE_FP8 = KernelOp(
    "quantize_grouped_fp8",
    f"Tensor x, {_GROUPS}, ScalarType dtype",
    ["data", "scale_inv", "amax"],
    flat=True,
    module="quantize_grouped",
    function="quantize_grouped_fp8",
    plan=_plan_fp8,
    reference=reference.quantize_grouped_fp8,
)
QUANTIZE_GRAD_FP8 = KernelOp(
    "quantize_grouped_grad_fp8",
    f'Tensor grad, {_GROUPS}, Tensor? act_input=None, str activation="none", '
    "bool with_dbias=True, ScalarType dtype",
    ["data", "scale_inv", "amax", "dbias"],
    flat=True,
    module="quantize_grouped_grad",
    function="quantize_grouped_grad_fp8",
    plan=_plan_grad_fp8,
    reference=reference.quantize_grouped_grad_fp8,
)
QUANTIZE_NVFP4 = KernelOp(
    "quantize_grouped_nvfp4",
    f'Tensor x, {_GROUPS}, str recipe="te"',
    ["x_fp4", "x_sf", "gsa", "amax"],
    flat=True,
    module="quantize_grouped_nvfp4",
    function="quantize_grouped_nvfp4",
    plan=_plan_nvfp4,
    reference=reference.quantize_grouped_nvfp4,
)
DEQUANTIZE_FP8 = KernelOp(
    "dequantize_grouped_fp8",
    "Tensor data, Tensor scale_inv, Tensor offsets, *, Tensor? sizes=None, ScalarType? dtype=None",
    ["out"],
    module="dequantize_grouped",
    function="dequantize_grouped_fp8",
    plan=_plan_dequantize_fp8,
    reference=reference.dequantize_grouped_fp8,
)
DEQUANTIZE_NVFP4 = KernelOp(
    "dequantize_grouped_nvfp4",
    "Tensor x_fp4, Tensor x_sf, Tensor gsa, Tensor offsets, *, int numel, Tensor? sizes=None, "
    "ScalarType? dtype=None",
    ["out"],
    module="dequantize_grouped",
    function="dequantize_grouped_nvfp4",
    plan=_plan_dequantize_nvfp4,
    reference=reference.dequantize_grouped_nvfp4,
)

GROUPED_OPS: tuple[KernelOp, ...] = (
    QUANTIZE_FP8,
    QUANTIZE_GRAD_FP8,
    QUANTIZE_NVFP4,
    DEQUANTIZE_FP8,
    DEQUANTIZE_NVFP4,
)
"""Every op of this module."""
