"""The public functions: gsa and ``out=`` sorted out, then one op.

What they share:

- Inputs are bfloat16, float16 or float32, on the CPU or a GPU, of any leading dimensions and
  strides, with a contiguous last dimension; anything with ``__dlpack__`` is taken as well. On a GPU
  up to three leading dimensions that do not follow each other in memory are read in place. A size N
  that is no multiple of 16 is filled up with zeros; the logical shape is kept.
- ``gsa`` is the factor that dequantizes: ``value = e2m1 * s * gsa``. None: it is computed, as
  ``amax / divisor``, for the tensor or for each row as ``granularity`` says. A number: it is taken
  as the gsa of the tensor. A float32 tensor of one element, or of one a row, is taken as it is: the
  result's ``gsa`` is that very tensor (no copy), and its values are never read on the CPU. A gsa
  that is given decides the granularity, and ``divisor`` is not used.
- ``amax_group`` is the process group whose ranks have the parts of one tensor, and each of which
  makes the call: the amax is that of all parts, by one all_reduce between the two launches, and
  what a rank gets is its part of what the whole tensor would give, bit for bit. Parts may be
  divided between rows, or, in multiples of 16, between columns; ``granularity="row"`` is for the
  latter, with the same rows on every rank. It does not go together with a gsa. See
  ``docs/distributed.md``.
- ``out`` is a `QuantizedActivation` whose buffers are written and which is returned; with a gsa
  tensor its ``gsa`` attribute becomes that tensor. Buffers are contiguous and share no memory with
  the inputs or with each other; neither does ``residual`` with ``x``. Inductor has no
  float4_e2m1fn_x2 for the CPU: a graph compiled for it can write to the same buffers once; for
  more, return the results instead.
- Nothing is differentiable: no result requires grad.

Errors: TypeError for a wrong type or dtype, ValueError for a shape, stride, device, number or name
that is not accepted; the message says what is. On a GPU also `jitquant.loader.LoaderError` and its
subclasses, where a kernel cannot be compiled or loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from jitquant.formats import (
    GRANULARITIES,
    NVFP4_DIVISOR,
    DeinterleaveOp,
    Granularity,
    Recipe,
    ScaleLayout,
    WeightBlock,
    one_of,
)
from jitquant.ops import _checks, _sharded, _table, _table_sharded
from jitquant.ops.schema import Op
from jitquant.tensors.nvfp4 import QuantizedActivation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def amax_gsa(x: Tensor, divisor: float = NVFP4_DIVISOR, *, out: Tensor | None = None) -> Tensor:
    """``max |x| / divisor``, the gsa of a tensor; a NaN is as if it were not there.

    Args:
        x: (..., N).
        divisor: positive; 2688 = 6 * 448 is NVFP4's.
        out: float32 (1,) to write to.

    Returns:
        float32 (1,), or ``out``; 0 for an empty tensor.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    return _table.AMAX_GSA.one_tensor((x, divisor), out)


def quantize_nvfp4(
    x: Tensor,
    gsa: float | Tensor | None = None,
    *,
    granularity: Granularity = "tensor",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    amax_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """Quantizes activations to NVFP4: at most two launches, one if gsa is given.

    Args:
        x: (..., N); a 1-D tensor is one row.
        gsa: None to compute it, a positive number, or float32 of one element or (rows,).
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is the amax over it.
        recipe: "te" (TransformerEngine) or "vllm"; see ``docs/numerics.md``.
        scale_layout: "linear", or "swizzled_128x4" for cuBLASLt.
        amax_group: the ranks whose parts have one amax, or None.
        out: buffers of ``QuantizedActivation.empty(x.shape, ...)``.

    Returns:
        x_fp4 (..., ceil(N / 16) * 8), x_sf (..., ceil(N / 16)) or swizzled, gsa (1,) or (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    given = _checks.as_gsa(gsa)
    args: tuple[Any, ...]
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, given, "gsa")
        x = _checks.as_tensor(x, "x")
        _sharded.check_blocks(x.shape[-1] if x.dim() else 0, granularity, amax_group)
        amax = _sharded.amax_over(amax_group, x, granularity)
        op, args = _table_sharded.QUANTIZE, (x, amax, divisor, recipe, scale_layout)
    elif isinstance(given, Tensor):
        op, args = _table.QUANTIZE.static, (x, given, recipe, scale_layout)
    else:
        op = _table.QUANTIZE.dynamic
        args = (x, divisor, given, granularity, recipe, scale_layout)
    return _quantized(op, args, given, granularity, recipe, scale_layout, out)


def quantize_weight_nvfp4(
    w: Tensor,
    *,
    block: WeightBlock = "1x16",
    dim: int = -1,
    gsa: float | Tensor | None = None,
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    amax_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """Quantizes a weight to NVFP4, with blocks along the dimension that a product sums over.

    Args:
        w: (N, K), or (K, N) with ``dim=0``.
        block: "1x16", or "16x16": 16 by 16 elements share a scale, which is stored for each of the
            16, so that x_sf has the same shape and a transposed weight the same values.
        dim: dimension of K: -1 or 0.
        gsa: None to compute it, a positive number, or float32 of one element.
        divisor: a computed gsa is the amax over it.
        recipe: "te" or "vllm".
        scale_layout: "linear", or, with ``dim=-1``, "swizzled_128x4".
        amax_group: the ranks whose parts have one amax, or None.
        out: buffers of ``QuantizedActivation.empty(w.shape, dim=dim, ...)``.

    Returns:
        ``dim=-1``: x_fp4 (N, ceil(K / 16) * 8), x_sf (N, ceil(K / 16)) or swizzled. ``dim=0``:
        x_fp4 (ceil(K / 16) * 8, N) with neighbours of K in a byte, x_sf (ceil(K / 16), N).
        gsa (1,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    given = _checks.as_gsa(gsa)
    args: tuple[Any, ...]
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, given, "gsa")
        amax = _sharded.amax_over(amax_group, w, "tensor")
        op, args = _table_sharded.WEIGHT, (w, amax, divisor, block, dim, recipe, scale_layout)
    elif isinstance(given, Tensor):
        op, args = _table.WEIGHT.static, (w, given, block, dim, recipe, scale_layout)
    else:
        op = _table.WEIGHT.dynamic
        args = (w, divisor, given, block, dim, recipe, scale_layout)
    return _quantized(op, args, given, "tensor", recipe, scale_layout, out, dim=dim)


def deinterleave_quantize_nvfp4(
    fused: Tensor,
    intermediate: int,
    gsa: float | Tensor | None = None,
    *,
    granularity_cols: int = 8,
    op: DeinterleaveOp = "swiglu",
    halves: bool = False,
    granularity: Granularity = "tensor",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    amax_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """Quantizes what a fused gate-and-up projection stands for; the amax is that of these values.

    Args:
        fused: (..., 2 * intermediate), gate and up columns in turns of ``granularity_cols``.
        intermediate: columns of the result.
        gsa: None to compute it, a positive number, or float32 of one element or (rows,).
        granularity_cols: length of the turns; divides ``intermediate``.
        op: "swiglu": ``silu(gate) * up`` in fp32; "select": the gate as it is, for a GEMM whose
            epilogue has applied SwiGLU.
        halves: the columns are [gate | up] instead; ``granularity_cols`` is not used.
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is the amax over it.
        recipe: "te" or "vllm".
        scale_layout: "linear" or "swizzled_128x4".
        amax_group: the ranks whose parts have one amax, or None.
        out: buffers of ``QuantizedActivation.empty((*fused.shape[:-1], intermediate), ...)``.

    Returns:
        A quantized tensor of the shape (..., intermediate).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    given = _checks.as_gsa(gsa)
    how = (op, halves)
    args: tuple[Any, ...]
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, given, "gsa")
        fused = _checks.as_tensor(fused, "fused")
        _checks.deinterleave_arguments(fused, intermediate, granularity_cols, op, halves)
        _sharded.check_blocks(intermediate, granularity, amax_group)
        run = intermediate if halves else granularity_cols
        amax = _sharded.amax_over(amax_group, fused, granularity, run=run, activate=op == "swiglu")
        which = _table_sharded.DEINTERLEAVE
        sizes = (fused, intermediate, granularity_cols)
        args = (*sizes, amax, divisor, *how, recipe, scale_layout)
    elif isinstance(given, Tensor):
        which = _table.DEINTERLEAVE.static
        args = (fused, intermediate, granularity_cols, given, *how, recipe, scale_layout)
    else:
        which = _table.DEINTERLEAVE.dynamic
        sizes = (fused, intermediate, granularity_cols)
        args = (*sizes, divisor, given, *how, granularity, recipe, scale_layout)
    return _quantized(which, args, given, granularity, recipe, scale_layout, out, cols=intermediate)


def rmsnorm_quantize_nvfp4(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    gsa: float | Tensor | None = None,
    granularity: Granularity = "row",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    amax_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """RMSNorm and quantization in one launch (two with a computed gsa for the tensor).

    ``y = v * inv_rms * weight`` in fp32, ``inv_rms = 1 / sqrt(mean(v^2) + eps)``; y is quantized as
    it is, without a rounding to the input's dtype.

    Args:
        x: (..., N).
        weight: (N,), contiguous, of x's dtype or float32.
        eps: added to the mean of the squares.
        residual: of x's shape and dtype; becomes ``x + residual``, added in fp32 and rounded once,
            and that is the v which is normalized. Without it v is x.
        gsa: None to compute it, a positive number, or float32 of one element or (rows,).
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is the amax over it.
        recipe: "te" or "vllm".
        scale_layout: "linear" or "swizzled_128x4".
        amax_group: the ranks whose parts have one amax, or None.
        out: buffers of ``QuantizedActivation.empty(x.shape, inv_rms=True, granularity=...)``.

    Returns:
        A quantized tensor of x's shape with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    given = _checks.as_gsa(gsa)
    args: tuple[Any, ...]
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, given, "gsa")
        halves = (_table_sharded.RMSNORM_AMAX, _table_sharded.RMSNORM)
        first, norm = (x, weight, eps, residual), (x if residual is None else residual, weight)
        form = (granularity, divisor, recipe, scale_layout)
        return _norm_over(amax_group, halves, first, norm, form, out)
    if isinstance(given, Tensor):
        op, args = _table.RMSNORM.static, (x, weight, given, eps, residual, recipe, scale_layout)
    else:
        op = _table.RMSNORM.dynamic
        args = (x, weight, eps, divisor, residual, given, granularity, recipe, scale_layout)
    return _quantized(op, args, given, granularity, recipe, scale_layout, out)


def mhc_rmsnorm_quantize_nvfp4(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    gsa: float | Tensor | None = None,
    granularity: Granularity = "row",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    amax_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """The mix of hyper-connections, RMSNorm and quantization, in as many launches as the norm.

    ``v = sum over h of A[..., h] * X[..., h, :]`` in fp32, in the order of h; then as
    `rmsnorm_quantize_nvfp4`.

    Args:
        X: (..., n_hc, N), n_hc from 1 to 8.
        A: (..., n_hc), contiguous, of X's dtype or float32.
        weight: (N,), contiguous, of X's dtype or float32.
        eps: added to the mean of the squares.
        gsa: None to compute it, a positive number, or float32 of one element or (rows,).
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is the amax over it.
        recipe: "te" or "vllm".
        scale_layout: "linear" or "swizzled_128x4".
        amax_group: the ranks whose parts have one amax, or None.
        out: buffers of ``QuantizedActivation.empty((..., N), inv_rms=True, granularity=...)``.

    Returns:
        A quantized tensor of the shape (..., N) with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    given = _checks.as_gsa(gsa)
    args: tuple[Any, ...]
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, given, "gsa")
        halves = (_table_sharded.MHC_AMAX, _table_sharded.MHC)
        form = (granularity, divisor, recipe, scale_layout)
        first, norm = (X, A, weight, eps), (X, A, weight)
        return _norm_over(amax_group, halves, first, norm, form, out, reduced=2)
    if isinstance(given, Tensor):
        op, args = _table.MHC.static, (X, A, weight, given, eps, recipe, scale_layout)
    else:
        op = _table.MHC.dynamic
        args = (X, A, weight, eps, divisor, given, granularity, recipe, scale_layout)
    return _quantized(op, args, given, granularity, recipe, scale_layout, out, reduced=2)


@overload
def dequantize_nvfp4(
    q: QuantizedActivation,
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
        gsa: float32, one element or (rows,).
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
    if isinstance(first, QuantizedActivation):
        return _dequantize_whole(*args, **kwargs)
    if "q" in kwargs or (len(args) == 1 and not kwargs):
        raise TypeError(
            f"q is {type(first).__name__}; accepted are a QuantizedActivation, or the parts x_fp4, "
            "x_sf, gsa"
        )
    return _dequantize_parts(*args, **kwargs)


def _dequantize_whole(
    q: QuantizedActivation, dtype: torch.dtype | None = None, *, out: Tensor | None = None
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
    return _table.DEQUANTIZE.one_tensor((x_fp4, x_sf, gsa, cols, dim, scale_layout, dtype), out)


def _norm_over(
    group: ProcessGroup,
    halves: tuple[Op, Op],
    first: tuple[Any, ...],
    norm: tuple[Any, ...],
    form: tuple[str, float, str, str],
    out: QuantizedActivation | None,
    *,
    reduced: int = 1,
) -> QuantizedActivation:
    """A norm with the amax of a group.

    Args:
        group: the ranks.
        halves: the ops before and after the all_reduce.
        first: the arguments of the first.
        norm: those of the second that say what is normalized.
        form: granularity, divisor, recipe and scale layout.
        out: buffers for the result.
        reduced: how many last dimensions of the input become the result's last.
    """
    granularity, divisor, recipe, scale_layout = form
    _sharded.check_granularity_of_norm(granularity)
    buffers = _sharded.without_inv_rms(out)
    amax, inv_rms = _sharded.norm_amax_over(
        group, halves[0], first, None if out is None else out.inv_rms
    )
    args = (*norm, inv_rms, amax, divisor, recipe, scale_layout)
    q = _quantized(
        halves[1], args, None, granularity, recipe, scale_layout, buffers, reduced=reduced
    )
    if out is None:
        return replace(q, inv_rms=inv_rms)
    out.recipe = recipe
    return out


def _quantized(
    op: Op,
    args: tuple[Any, ...],
    given: float | Tensor | None,
    granularity: str,
    recipe: str,
    scale_layout: str,
    out: QuantizedActivation | None,
    *,
    dim: int = -1,
    cols: int | None = None,
    reduced: int = 1,
) -> QuantizedActivation:
    """A call of an op that quantizes, and its results put together.

    Args:
        op: the op that the gsa asks for.
        args: all of its arguments, in its order.
        given: the gsa that is given.
        cols: logical size of the packed dimension, where it is not that of the input.
        reduced: how many last dimensions of the input become the result's last.
    """
    gsa = None
    if isinstance(given, Tensor):
        gsa = given
        if granularity not in GRANULARITIES:
            one_of("granularity", granularity, GRANULARITIES)
        granularity = "tensor" if gsa.numel() == 1 else "row"
    elif given is not None:
        granularity = "tensor"  # of the name that was given the op says whether it is one
    if out is None:
        results = op.made(args)
        return QuantizedActivation(
            results[0],
            results[1],
            results[2] if gsa is None else gsa,
            results[-1] if op.results[-1] == "inv_rms" else None,
            args[0].shape[dim] if cols is None else cols,
            scale_layout,
            granularity,
            recipe,
            dim,
        )
    if not (
        type(out) is QuantizedActivation
        and out.scale_layout == scale_layout
        and (gsa is not None or out.granularity == granularity)
        and out.dim == dim
        and out.cols == (_size(args[0], dim) if cols is None else cols)
        and (out.inv_rms is None or "inv_rms" in op.results)
        and op.direct(args, out) is None
    ):
        _dispatch_into(out, op, args, gsa, (cols, scale_layout, granularity, dim), reduced)
    out.recipe = recipe
    if gsa is not None:
        out.gsa, out.granularity = gsa, granularity
    return out


def _size(x: Any, dim: int) -> int | None:
    """Size of a dimension of what may be no tensor, or have no such dimension."""
    try:
        size: int = x.size(dim)
    except (AttributeError, IndexError, TypeError):
        return None
    return size


def _dispatch_into(
    out: QuantizedActivation,
    op: Op,
    args: tuple[Any, ...],
    gsa: Tensor | None,
    form: tuple[int | None, str, str, int],
    reduced: int,
) -> None:
    """The call into ``out`` by the op itself, with what is wrong with ``out`` said first."""
    cols, scale_layout, granularity, dim = form
    tensors = op.tensors(args)
    shape = tensors[0].shape
    if dim == -1:
        size = shape[-1] if cols is None and shape else cols
        shape = (*shape[: len(shape) - reduced], size)
    _check_form(out, op, tuple(shape), scale_layout, granularity if gsa is None else None, dim)
    buffers = [getattr(out, name) for name in op.results]
    op.dispatched(tensors, buffers)


def _check_form(
    out: object,
    op: Op,
    shape: tuple[int, ...],
    scale_layout: str,
    granularity: str | None,
    dim: int,
) -> None:
    """Buffers are for a result of this logical shape and layout; the op looks at the tensors."""
    if not isinstance(out, QuantizedActivation):
        raise TypeError(
            f"out is {type(out).__name__}; accepted is a QuantizedActivation, such as "
            "QuantizedActivation.empty(shape, ...) makes"
        )
    for name, has, wanted in (
        ("shape", out.shape, shape),
        ("dim", out.dim, dim),
        ("scale_layout", out.scale_layout, scale_layout),
        ("granularity", out.granularity if granularity else granularity, granularity),
    ):
        if has != wanted:
            raise ValueError(
                f"out.{name} is {has!r}; accepted is {wanted!r} for this call. "
                "QuantizedActivation.empty(shape, ...) makes buffers that fit"
            )
    if "inv_rms" in op.results and out.inv_rms is None:
        raise ValueError(
            f"out.inv_rms is None; {op.name} has such a result. Make the buffers with inv_rms=True"
        )
    if "inv_rms" not in op.results and out.inv_rms is not None:
        raise ValueError(
            f"out.inv_rms is given; {op.name} has no such result. Make the buffers without it"
        )


QuantizedActivation._dequantize = _dequantize_whole
