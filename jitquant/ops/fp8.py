"""FP8 and INT8: the public functions. Scales and ``out=`` sorted out, then one op.

What they share with those of `jitquant.ops.mxfp8` and `jitquant.ops.grouped`:

- Inputs are bfloat16, float16 or float32, on the CPU or a GPU, of any leading dimensions and
  strides, with a contiguous last dimension; anything with ``__dlpack__`` is taken as well.
- ``scale`` is the factor that encodes, ``q = x * scale``, as TransformerEngine's is. ``scale_inv``
  of a result is the factor that dequantizes, ``1 / scale`` to the bit. A checkpoint that stores the
  factor that dequantizes passes its reciprocal.
- ``amax_group`` is the process group whose ranks have the parts of one tensor, and each of which
  makes the call: amaxes are those of all parts, by one all_reduce between the two launches, and
  what a rank gets is its part of what the whole tensor would give, bit for bit. Rows may be divided
  where there is one scale for the tensor; columns also with one a row, on ranks with the same rows.
  It does not go together with a scale. Functions whose scales are those of groups and blocks do not
  have it: these are the same on every rank, as long as none is divided. Nor has
  `rmsnorm_quantize_fp8`, which computes scales of rows that a rank has to have whole. See
  ``docs/distributed.md``.
- ``out`` is a `QuantizedTensor` whose buffers are written and which is returned. Buffers are
  contiguous, those of the elements may have rows that lie apart, and they share no memory with the
  inputs or with each other; neither does ``residual`` with ``x``.
- Nothing is differentiable: no result requires grad.
- Nothing is read back to the CPU, and every call can be captured in a CUDA graph.

Errors: TypeError for a wrong type or dtype, ValueError for a shape, stride, device, number or name
that is not accepted; the message says what is. On a GPU also `jitquant.loader.LoaderError` and its
subclasses, where a kernel cannot be compiled or loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from jitquant.formats import (
    GRANULARITIES,
    BlockScaleLayout,
    Granularity,
    GroupRecipe,
    GroupScaleLayout,
    ScaleFormat,
    one_of,
)
from jitquant.ops import _checks, _checks_fp8, _sharded, _table_fp8, _table_sharded
from jitquant.ops._kernel_op import KernelOp
from jitquant.ops._results import Form, left_alone, quantized, quantized_both
from jitquant.tensors.fp8 import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

E4M3 = torch.float8_e4m3fn


def quantize_fp8(
    x: Tensor,
    *,
    granularity: Granularity = "tensor",
    dtype: torch.dtype = E4M3,
    scale: float | Tensor | None = None,
    scale_ub: float | None = None,
    amax: bool = True,
    amax_group: ProcessGroup | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes a tensor to FP8 with one scale, or one for each row (token).

    ``scale = top / amax``, 1 where the amax is 0, infinite or NaN, at most FLT_MAX; top is 448, or
    57344 for e5m2. This is TransformerEngine's current scaling; with a scale given, the cast of its
    delayed scaling. Two launches for a computed scale of the whole tensor, one for all else.

    Args:
        x: (..., N); a 1-D tensor is one row.
        granularity: what a computed scale covers: "tensor" or "row".
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        scale: None to compute it; a number, finite and with a finite reciprocal in float32;
            float32 of one element or of one for each row, which decides the granularity.
        scale_ub: a computed scale is made from ``min(amax, scale_ub)``, as vLLM and FBGEMM have it.
        amax: whether a given scale comes with the amax of ``x``, for a history; a computed scale
            always does.
        amax_group: the ranks whose parts have one amax, or None.
        out: buffers of ``QuantizedTensor.empty(x.shape, format="fp8_tensor" or "fp8_row", ...)``.

    Returns:
        data (..., N), scale_inv and amax: (1,) for the tensor, (..., 1) for rows. amax is that of
        ``x``, before scale_ub, and NaN where ``x`` has one.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, scale, "scale")
        op, after = _table_sharded.QUANTIZE_FP8, (dtype, scale_ub, granularity)
        return _over(amax_group, op, x, after, 0, granularity, dtype, out)
    given, number, granularity = _scale(scale, x, "x", granularity)
    amax = amax or scale is None
    args = (x, given, dtype, number, scale_ub, granularity, amax)
    return quantized(_table_fp8.QUANTIZE_FP8, args, _OF_FP8[granularity], dtype, out, amax)


def silu_mul_quantize_fp8(
    fused: Tensor,
    *,
    granularity: Granularity = "row",
    dtype: torch.dtype = E4M3,
    scale: float | Tensor | None = None,
    scale_ub: float | None = None,
    interleave: int = 0,
    amax: bool = True,
    amax_group: ProcessGroup | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """``silu(gate) * up`` in fp32, then `quantize_fp8` of it, in one launch.

    The product is not rounded to the input's dtype in between; amax and scale are the product's.

    Args:
        fused: (..., 2 * N): [gate | up].
        granularity: "row"; "tensor" where a scale or an ``amax_group`` is given.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        scale: None to compute one for each row; else as in `quantize_fp8`.
        scale_ub: as in `quantize_fp8`.
        interleave: gate and up columns come in turns of this many; 0: [gate | up].
        amax: whether a given scale comes with the amax.
        amax_group: the ranks whose parts have one amax, or None.
        out: buffers of ``QuantizedTensor.empty((*fused.shape[:-1], N), ...)``.

    Returns:
        A quantized tensor of the shape (..., N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, scale, "scale")
        fused = _checks.as_tensor(fused, "fused")
        run = interleave or _checks_fp8.gate_and_up(fused, interleave)
        op, after = _table_sharded.SILU_MUL_FP8, (dtype, scale_ub, granularity, interleave)
        return _over(amax_group, op, fused, after, run, granularity, dtype, out)
    given, number, granularity = _scale(scale, fused, "fused", granularity)
    amax = amax or scale is None
    args = (fused, given, dtype, number, scale_ub, granularity, interleave, amax)
    form = _OF_FP8[granularity]
    return quantized(_table_fp8.SILU_MUL_FP8, args, form, dtype, out, amax, halved=True)


def rmsnorm_quantize_fp8(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    granularity: Granularity = "row",
    dtype: torch.dtype = E4M3,
    scale: float | Tensor | None = None,
    scale_ub: float | None = None,
    amax: bool = True,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """RMSNorm in fp32, then `quantize_fp8` of it, in one launch.

    ``y = v * inv_rms * weight``, ``inv_rms = 1 / sqrt(mean(v^2) + eps)``; y is not rounded to the
    input's dtype in between.

    Args:
        x: (..., N).
        weight: (N,), contiguous, of x's dtype or float32.
        eps: added to the mean of the squares.
        residual: of x's shape and dtype; becomes ``x + residual``, added in fp32 and rounded once,
            and that is the v which is normalized. Without it v is x.
        granularity: "row"; "tensor" where a scale is given.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        scale: None to compute one for each row; else as in `quantize_fp8`.
        scale_ub: as in `quantize_fp8`.
        amax: whether a given scale comes with the amax of y.
        out: buffers of ``QuantizedTensor.empty(x.shape, inv_rms=True, ...)``.

    Returns:
        A quantized tensor of x's shape with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    given, number, granularity = _scale(scale, x, "x", granularity)
    amax = amax or scale is None
    args = (x, weight, given, eps, residual, dtype, number, scale_ub, granularity, amax)
    return quantized(_table_fp8.RMSNORM_FP8, args, _OF_FP8[granularity], dtype, out, amax)


def quantize_group(
    x: Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    counts: Tensor | None = None,
    zero_rest: bool = True,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes to FP8 or INT8 with a scale for ``group_size`` neighbours of a row: one launch.

    Args:
        x: (..., N); the last group of a row has the elements that there are.
        group_size: 16, 32, 64, 128 or 256.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8`` (to nearest, ties to even).
        scale_format: "float32"; "ue8m0": float32 that hold powers of two, rounded up;
            "ue8m0_packed": their exponents, four groups in an int32, the first in the lowest byte,
            zeros for groups that there are not.
        scale_layout: "row": (..., G); "column": (..., T, G) with strides (1, T), as scaled_mm
            takes them; "column_tma": with strides (1, T up to a multiple of 4), as DeepGEMM does,
            padding zero.
        eps: amaxes are raised to it; None: 1e-10, or 1e-4 with recipe "deepgemm".
        recipe: "te" (TransformerEngine, torchao), "deepgemm" or "vllm"; see ``docs/numerics.md``.
        counts: int32 or int64, on x's device, how many rows of each batch (..., :, :) there are:
            (E,) for x (E, T, N), one for (T, N). Rows past it are not read and influence no scale.
        zero_rest: rows past the count become zero, elements and scales. False: they are left as
            they are in ``out``, or uninitialised.
        out: buffers of ``QuantizedTensor.empty(x.shape, format="fp8_group", ...)``.

    Returns:
        data (..., N) and scale_inv (..., G).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    args = (
        *(x, group_size, counts),
        *(dtype, scale_format, scale_layout, eps, recipe, zero_rest),
    )
    form = _form("group", (1, group_size), dtype, scale_format, scale_layout, recipe)
    if not zero_rest and out is None:
        return left_alone(_table_fp8.QUANTIZE_GROUP, args, form, dtype)
    return quantized(_table_fp8.QUANTIZE_GROUP, args, form, dtype, out)


def silu_mul_quantize_group(
    fused: Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype = E4M3,
    interleave: int = 0,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    counts: Tensor | None = None,
    zero_rest: bool = True,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """``silu(gate) * up`` in fp32, then `quantize_group` of it, in one launch.

    Args:
        fused: (..., 2 * N): [gate | up].
        interleave: gate and up columns come in turns of this many; 0: [gate | up].
        group_size, dtype, scale_format, scale_layout, eps, recipe, counts, zero_rest: as in
            `quantize_group`.
        out: buffers of ``QuantizedTensor.empty((*fused.shape[:-1], N), format="fp8_group", ...)``.

    Returns:
        A quantized tensor of the shape (..., N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    args = (
        *(fused, group_size, counts),
        *(dtype, interleave, scale_format, scale_layout, eps, recipe, zero_rest),
    )
    form = _form("group", (1, group_size), dtype, scale_format, scale_layout, recipe)
    if not zero_rest and out is None:
        return left_alone(_table_fp8.SILU_MUL_GROUP, args, form, dtype, halved=True)
    return quantized(_table_fp8.SILU_MUL_GROUP, args, form, dtype, out, halved=True)


def rmsnorm_quantize_group(
    x: Tensor,
    weight: Tensor,
    group_size: int = 128,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "row",
    amax_eps: float | None = None,
    recipe: GroupRecipe = "te",
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """RMSNorm in fp32 as in `rmsnorm_quantize_fp8`, then `quantize_group` of it, in one launch.

    Args:
        x: (..., N).
        weight: (N,), contiguous, of x's dtype or float32.
        group_size: 16, 32, 64, 128 or 256.
        eps: added to the mean of the squares.
        residual: as in `rmsnorm_quantize_fp8`.
        dtype, scale_format, scale_layout, recipe: as in `quantize_group`.
        amax_eps: the eps of `quantize_group`.
        out: buffers of ``QuantizedTensor.empty(x.shape, format="fp8_group", inv_rms=True, ...)``.

    Returns:
        A quantized tensor of x's shape with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    args = (
        *(x, weight, group_size, eps),
        *(residual, dtype, scale_format, scale_layout, amax_eps, recipe),
    )
    form = _form("group", (1, group_size), dtype, scale_format, scale_layout, recipe)
    return quantized(_table_fp8.RMSNORM_GROUP, args, form, dtype, out)


def quantize_block(
    w: Tensor,
    block: Sequence[int] = (128, 128),
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: BlockScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes a weight to FP8 or INT8 with a scale for each block, in one launch.

    Args:
        w: (..., N, K); blocks at the edges have the elements that there are.
        block: rows and columns: (128, 128), (64, 64), (32, 32) or (16, 16).
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        scale_format: "float32", or "ue8m0": float32 that hold powers of two, rounded up.
        scale_layout: "row": (..., ceil(N / rows), ceil(K / columns)); "row_padded": the last size
            filled up to a multiple of four with zeros, whose transpose is what scaled_mm takes for
            a 128x128 weight.
        eps, recipe: as in `quantize_group`.
        out: buffers of ``QuantizedTensor.empty(w.shape, format="fp8_block", ...)``.

    Returns:
        data (..., N, K) and scale_inv (..., ceil(N / rows), ceil(K / columns)), or padded.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    rows, cols = _pair(block)
    args = (w, rows, cols, dtype, scale_format, scale_layout, eps, recipe)
    form = _form("block", (rows, cols), dtype, scale_format, scale_layout, recipe)
    return quantized(_table_fp8.QUANTIZE_BLOCK, args, form, dtype, out)


def quantize_group_both(
    x: Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "column",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    out: tuple[QuantizedTensor, QuantizedTensor] | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantizes a matrix row-wise (1xG) and column-wise (Gx1), reading it once: for training.

    The first result is `quantize_group` of x, the second that of its transpose, which is stored
    transposed: the operands of both products of a backward pass, without a copy.

    Args:
        x: (M, K), M and K >= 1.
        group_size, dtype, scale_format, eps, recipe: as in `quantize_group`.
        scale_layout: as in `quantize_group`; "column" is what scaled_mm takes.
        out: buffers for the two results, which share no memory.

    Returns:
        Quantized tensors of the shapes (M, K), with groups along K, and (K, M), along M.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    args = (x, group_size, dtype, scale_format, scale_layout, eps, recipe)
    form = _form("group", (1, group_size), dtype, scale_format, scale_layout, recipe)
    return quantized_both(_table_fp8.QUANTIZE_GROUP_BOTH, args, form, dtype, out)


def quantize_block_both(
    w: Tensor,
    block: Sequence[int] = (128, 128),
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: BlockScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    out: tuple[QuantizedTensor, QuantizedTensor] | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantizes a weight and its transpose, reading it once, in one launch: for training.

    The first result is `quantize_block` of w, the second that of its transpose, which is stored
    transposed: what a forward product takes, and what the gradient of its input takes. Both have
    the same elements, as a block and its transpose share a scale.

    Args:
        w: (N, K), N and K >= 1.
        block, dtype, scale_format, scale_layout, eps, recipe: as in `quantize_block`.
        out: buffers for the two results, which share no memory.

    Returns:
        Quantized tensors of the shapes (N, K) and (K, N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    rows, cols = _pair(block)
    args = (w, rows, cols, dtype, scale_format, scale_layout, eps, recipe)
    form = _form("block", (rows, cols), dtype, scale_format, scale_layout, recipe)
    return quantized_both(_table_fp8.QUANTIZE_BLOCK_BOTH, args, form, dtype, out)


def dequantize(
    q: QuantizedTensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The values of a quantized tensor: ``data * scale_inv`` in fp32, rounded once to ``dtype``.

    Args:
        q: of any format and layout.
        dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
        out: contiguous tensor of the logical shape to write to.

    Returns:
        A tensor of the logical shape, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if not isinstance(q, QuantizedTensor):
        raise TypeError(
            f"q is {type(q).__name__}; accepted is a QuantizedTensor. For NVFP4 call "
            "dequantize_nvfp4, for many tensors in a buffer dequantize_grouped"
        )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    args = (q.data, q.stored_scales, *q.block, q.layout, dtype)
    return _table_fp8.DEQUANTIZE.one_tensor(args, out)


_OF_FP8: dict[str, Form] = {
    "tensor": ("fp8_tensor", (0, 0), "float32", "row", "te"),
    "row": ("fp8_row", (1, 0), "float32", "row", "te"),
}


def _form(
    kind: str,
    block: tuple[int, int],
    dtype: torch.dtype,
    scale_format: str,
    layout: str,
    recipe: str,
) -> Form:
    name = f"int8_{kind}" if dtype == torch.int8 else f"fp8_{kind}"
    return name, block, scale_format, layout, recipe


def _pair(block: Sequence[int]) -> tuple[int, int]:
    pair = tuple(block) if isinstance(block, Sequence) else ()
    if len(pair) != 2:
        raise ValueError(f"block is {block!r}; accepted are rows and columns, such as (128, 128)")
    if not (isinstance(pair[0], SupportsIndex) and isinstance(pair[1], SupportsIndex)):
        raise TypeError(f"block is {block!r}; accepted are two ints, such as (128, 128)")
    return pair


def _scale(
    scale: float | Tensor | None, x: Tensor, name: str, granularity: Granularity
) -> tuple[Tensor | None, float | None, Granularity]:
    """A given scale as a tensor or a number, and the granularity that it decides."""
    if granularity not in GRANULARITIES:
        one_of("granularity", granularity, GRANULARITIES)
    if scale is None:
        return None, None, granularity
    if isinstance(scale, Tensor) or hasattr(scale, "__dlpack__"):
        given = _checks.as_tensor(scale, "scale")
        if given.numel() != 1:
            return given, None, "row"
        if granularity == "row" and _checks.row_count(_checks.as_tensor(x, name).shape[:-1]) != 1:
            granularity = "tensor"
        return given, None, granularity
    number: object = scale
    if not isinstance(number, bool) and isinstance(number, Real):
        return None, float(number), "tensor"
    raise TypeError(
        f"scale is {type(scale).__name__}; accepted are None (it is computed), a number, and a "
        "float32 tensor of one element or of one for each row"
    )


def _over(
    group: ProcessGroup,
    op: KernelOp,
    x: Tensor,
    after: tuple[Any, ...],
    run: int,
    granularity: Granularity,
    dtype: torch.dtype,
    out: QuantizedTensor | None,
) -> QuantizedTensor:
    """FP8 with the amax of a group.

    Args:
        group: the ranks.
        op: what quantizes, given the amax.
        x: its first argument.
        after: its arguments after the amax.
        run: 0, or ``x`` is gate and up in turns of this many columns.
        granularity: of the amax.
        dtype: of the elements.
        out: buffers for the result.
    """
    one_of("granularity", granularity, GRANULARITIES)
    buffer = _sharded.amax_buffer(out)
    amax = _sharded.amax_over(
        group, x, granularity, keep_nan=True, run=run, activate=run > 0, out=buffer
    )
    buffers = None if out is None else replace(out, amax=None)
    form = _OF_FP8[granularity]
    q = quantized(op, (x, amax, *after), form, dtype, buffers, halved=run > 0)
    if out is not None:
        return out
    return replace(q, amax=amax.reshape(q.scale_inv.shape))


QuantizedTensor._dequantize = dequantize
