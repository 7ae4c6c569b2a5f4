"""Many tensors in one buffer: the public functions. `jitquant.ops.fp8` says what they share.

A buffer holds G tensors, one after the other, of any shapes: group i is the elements ``offsets[i]``
to ``offsets[i + 1]`` of the flattened buffer. With ``sizes`` it is the ``sizes[i]`` elements from
``offsets[i]`` on, and what follows up to the next group is padding, for alignment. What padding
holds changes nothing, and its results are zero. Offsets ascend; they lie on the buffer's device,
and the CPU does not read them, so they are not checked: whatever they are, nothing outside of the
buffer is touched. `jitquant.testing.checked` reads and checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from jitquant.formats import (
    GROUPED_FORMATS,
    NVFP4_DIVISOR,
    QUANTIZED_MAX,
    RECIPES,
    Activation,
    Recipe,
    one_of,
)
from jitquant.numerics.fp8 import scale_from_amax
from jitquant.numerics.nvfp4 import scales_from_amax
from jitquant.ops import _checks, _checks_fp8, _sharded, _table_grouped
from jitquant.ops._kernel_op import MAKER_OF_GROUPS, KernelOp
from jitquant.ops.fp8 import E4M3
from jitquant.tensors.grouped import QuantizedGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def quantize_grouped(
    x: Tensor,
    offsets: Tensor,
    *,
    format: Literal["fp8_tensor", "nvfp4"] = "fp8_tensor",
    scale: Tensor | None = None,
    sizes: Tensor | None = None,
    dtype: torch.dtype = E4M3,
    recipe: Recipe = "te",
    amax_group: ProcessGroup | None = None,
    out: QuantizedGroups | None = None,
) -> QuantizedGroups:
    """Quantizes each tensor of a buffer with a scale of its own.

    Two launches, or one with scales given, whatever the number of groups.

    Args:
        x: contiguous, of any shape; offsets count its elements.
        offsets: int64 (G + 1,), ascending.
        format: "fp8_tensor": each group as `jitquant.quantize_fp8` of a tensor. "nvfp4": each as
            `jitquant.quantize_nvfp4`, in blocks of 16 neighbours of the buffer; groups begin at
            multiples of 16, and a block belongs to the group of its first element.
        scale: float32 (G,), the factors that encode (NVFP4: S, 2688 / amax); None: from the amaxes.
        sizes: int64 (G,), elements of each group; None: groups follow each other.
        dtype: of "fp8_tensor": ``float8_e4m3fn`` or ``float8_e5m2``.
        recipe: of "nvfp4": "te" or "vllm".
        amax_group: the ranks that have the other parts of the same G tensors, or None: the amax of
            each is that of all its parts, by one all_reduce for all of them. The buffer is
            quantized twice then, with the amaxes of this rank and with those of all.
        out: buffers of ``QuantizedGroups.empty(x.shape, offsets, ...)``.

    Returns:
        data, scale_inv (G,), amax (G,), and for NVFP4 block_scales. An empty group has the amax 0.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, scale, "scale")

        def again(scale: Tensor | None) -> QuantizedGroups:
            keywords: dict[str, Any] = {"format": format, "dtype": dtype, "recipe": recipe}
            return quantize_grouped(x, offsets, scale=scale, sizes=sizes, out=out, **keywords)

        return _over(amax_group, again, dtype, out)
    groups = (x, offsets, scale, sizes)
    # What the format has no use for is no argument of its op.
    if format == "nvfp4":
        _checks_fp8.fp8_dtype(dtype)
        op = _table_grouped.QUANTIZE_NVFP4
        return _quantized(op, (*groups, recipe), _OF_NVFP4, format, recipe, out)
    one_of("format", format, GROUPED_FORMATS)
    one_of("recipe", recipe, RECIPES)
    op = _table_grouped.QUANTIZE_FP8
    return _quantized(op, (*groups, dtype), _OF_FP8, format, "te", out)


def quantize_grouped_grad(
    grad: Tensor,
    offsets: Tensor,
    *,
    scale: Tensor | None = None,
    sizes: Tensor | None = None,
    act_input: Tensor | None = None,
    activation: Activation = "none",
    dbias: bool = True,
    dtype: torch.dtype = torch.float8_e5m2,
    amax_group: ProcessGroup | None = None,
    out: QuantizedGroups | None = None,
) -> QuantizedGroups:
    """Quantizes the gradients of a buffer of tensors, with the bias gradients of each.

    What is cast is ``grad * activation'(act_input)``, made in fp32 and not rounded in between; its
    sums over the rows of a group are the group's bias gradients. As many launches as
    `quantize_grouped`.

    Args:
        grad: (..., N), contiguous. Groups are whole rows of it: offsets are multiples of N.
        offsets: int64 (G + 1,), ascending, in elements.
        scale: float32 (G,) to take; None: from the amaxes.
        sizes: int64 (G,), elements of each group; None: groups follow each other.
        act_input: what went into the activation, of grad's shape and dtype.
        activation: "none", "relu", "silu" or "gelu" (its tanh form).
        dbias: whether bias gradients are made.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        amax_group: as in `quantize_grouped`; dbias stays that of this rank's rows.
        out: buffers of ``QuantizedGroups.empty(grad.shape, offsets, dbias=..., ...)``.

    Returns:
        data, scale_inv (G,), amax (G,) of the product, and dbias float32 (G, N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if amax_group is not None:
        _sharded.check_no_scale(amax_group, scale, "scale")

        def again(scale: Tensor | None) -> QuantizedGroups:
            keywords: dict[str, Any] = {"act_input": act_input, "activation": activation}
            keywords |= {"sizes": sizes, "dbias": dbias, "dtype": dtype, "out": out}
            return quantize_grouped_grad(grad, offsets, scale=scale, **keywords)

        return _over(amax_group, again, dtype, out)
    args = (grad, offsets, scale, sizes, act_input, activation, dbias, dtype)
    op = _table_grouped.QUANTIZE_GRAD_FP8
    return _quantized(op, args, _OF_GRADIENT, "fp8_tensor", "te", out, dbias)


def dequantize_grouped(
    q: QuantizedGroups, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The values of a buffer of quantized tensors, in fp32 and rounded once to ``dtype``.

    Args:
        q: what `quantize_grouped` or `quantize_grouped_grad` gave.
        dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
        out: contiguous tensor of the buffer's shape to write to.

    Returns:
        A tensor of the buffer's shape, zero outside of the groups, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if not isinstance(q, QuantizedGroups):
        raise TypeError(
            f"q is {type(q).__name__}; accepted is QuantizedGroups, as quantize_grouped gives"
        )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    if q.format != "nvfp4":
        args = (q.data, q.scale_inv, q.offsets, q.sizes, dtype)
        return _table_grouped.DEQUANTIZE_FP8.one_tensor(args, out)
    numel = _checks.row_count(q.shape)
    parts = (q.data, q.block_scales, q.scale_inv, q.offsets, numel, q.sizes, dtype)
    if out is None:
        return _table_grouped.DEQUANTIZE_NVFP4.one_tensor(parts, None).reshape(q.shape)
    _checks.tensor_out(out)
    wanted = torch.bfloat16 if dtype is None else dtype
    _checks.out_tensor(out, "out", tuple(q.shape), wanted, q.data.device)
    _table_grouped.DEQUANTIZE_NVFP4.one_tensor(parts, out.view(-1))
    return out


def _over(
    group: ProcessGroup,
    quantize: Callable[[Tensor | None], QuantizedGroups],
    dtype: torch.dtype,
    out: QuantizedGroups | None,
) -> QuantizedGroups:
    """Many tensors with the amaxes of a group.

    Args:
        group: the ranks.
        quantize: with scales that are given, or its own.
        dtype: of FP8 elements.
        out: buffers that ``quantize`` writes, or None.
    """
    first = quantize(None)
    amax = _sharded.max_over(first.amax.clone(), group)
    if first.format == "nvfp4":
        scale, scale_inv = scales_from_amax(amax, NVFP4_DIVISOR)
    else:
        scale = scale_from_amax(amax, QUANTIZED_MAX[dtype])
        scale_inv = None
    q = quantize(scale)
    if out is None:
        return replace(q, amax=amax, scale_inv=q.scale_inv if scale_inv is None else scale_inv)
    out.amax.copy_(amax)
    if scale_inv is not None:
        out.scale_inv.copy_(scale_inv)
    return out


_OF_FP8 = ("data", "scale_inv", "amax")
_OF_GRADIENT = (*_OF_FP8, "dbias")
_OF_NVFP4 = ("data", "block_scales", "scale_inv", "amax")


def _quantized(
    op: KernelOp,
    args: tuple[Any, ...],
    names: tuple[str, ...],
    format: str,
    recipe: str,
    out: QuantizedGroups | None,
    dbias: bool = False,
) -> QuantizedGroups:
    """A call of an op whose results are the parts of these names.

    Args:
        op: what quantizes.
        args: all of its arguments, in its order: the buffer, offsets, scale and sizes first.
        names: the parts that its results are.
        format: of the result.
        recipe: of the result.
        out: buffers for the result.
        dbias: whether the result has bias gradients.
    """
    if out is None:
        results = op.direct(args)
        if results is NotImplemented:
            args = tuple(op.tensors(args))
            results = op.dispatched(args)
        parts = dict(zip(names, results, strict=True))
        if not dbias:
            parts.pop("dbias", None)
        return QuantizedGroups(
            **parts,
            offsets=args[1],
            sizes=args[3],
            format=format,
            shape=tuple(args[0].shape),
            recipe=recipe,
        )
    packed = format == "nvfp4"
    if not (
        type(out) is QuantizedGroups
        and out.format == format
        and isinstance(args[0], Tensor)
        and out.shape == tuple(args[0].shape)
        and (out.block_scales is not None) == packed
        and (out.dbias is not None) == dbias
        and op.direct((*args, *_buffers(out, names, args[0]))) is None
    ):
        args = tuple(op.tensors(args))
        _check_buffers(out, names, format, tuple(args[0].shape), packed, dbias)
        op.dispatched(args, _buffers(out, names, args[0]))
    out.offsets, out.sizes, out.recipe = args[1], args[3], recipe
    return out


def _buffers(out: QuantizedGroups, names: tuple[str, ...], x: Tensor) -> list[Any]:
    """The buffers of ``out``, in the order of the op's results."""
    buffers = [getattr(out, name) for name in names]
    if names is _OF_GRADIENT and out.dbias is None:
        buffers[-1] = torch.empty((0, *x.shape[-1:]), dtype=torch.float32, device=x.device)
    return buffers


def _check_buffers(
    out: object,
    names: tuple[str, ...],
    format: str,
    shape: tuple[int, ...],
    packed: bool,
    dbias: bool,
) -> None:
    """Raises where ``out`` has not the form, or not just the parts, of a result of this call."""
    if not isinstance(out, QuantizedGroups):
        raise TypeError(
            f"out is {type(out).__name__}; accepted is QuantizedGroups, such as "
            f"{MAKER_OF_GROUPS} makes"
        )
    for field, wanted in (("format", format), ("shape", shape)):
        if getattr(out, field) != wanted:
            raise ValueError(
                f"out.{field} is {getattr(out, field)!r}; accepted is {wanted!r} for this call. "
                f"{MAKER_OF_GROUPS} makes buffers that fit"
            )
    if (out.block_scales is not None) != packed:
        raise ValueError(
            f"out.block_scales is {'None' if packed else 'given'}; format {format!r} has "
            f"{'such a result' if packed else 'no such result'}. "
            f"{MAKER_OF_GROUPS} makes buffers that fit"
        )
    if (out.dbias is not None) != dbias:
        raise ValueError(
            f"out.dbias is {'None' if out.dbias is None else 'given'}; accepted is the opposite "
            f"for this call. Make the buffers with dbias={dbias}"
        )
    parts = {f"out.{name}": getattr(out, name) for name in names if name != "dbias" or dbias}
    _checks.out_parts(parts, MAKER_OF_GROUPS)


QuantizedGroups._dequantize = dequantize_grouped
