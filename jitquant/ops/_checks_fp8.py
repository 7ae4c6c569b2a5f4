"""Argument checks of the FP8, INT8 and MXFP8 ops, beside those that all ops share in `_checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.formats import (
    ACTIVATIONS,
    BLOCK_SHAPES,
    GROUP_SIZES,
    one_of,
)
from jitquant.ops import _checks


def group_size(size: int) -> None:
    """``group_size`` is one that there are kernels for."""
    if size not in GROUP_SIZES:
        raise ValueError(
            f"group_size is {size}; accepted are {', '.join(map(str, GROUP_SIZES))}. For one scale "
            "a row call quantize_fp8 with granularity='row'"
        )


def block_shape(rows: int, cols: int) -> None:
    """``block`` is one that there are kernels for."""
    if (rows, cols) not in BLOCK_SHAPES:
        raise ValueError(
            f"block is {(rows, cols)}; accepted are {', '.join(map(str, BLOCK_SHAPES))}. For "
            "blocks of one row call quantize_per_token_group"
        )


def scale_tensor(scale: Tensor, rows: int, granularity: str, like: Tensor, like_name: str) -> None:
    """A given scale: contiguous, one element or one for each row."""
    _checks.same_device(scale, "scale", like, like_name)
    count = rows if granularity == "row" else 1
    if scale.numel() != count:
        raise ValueError(
            f"scale has shape {_checks.shape_text(scale)}; accepted with granularity "
            f"{granularity!r} is a tensor of {count} element{'' if count == 1 else 's'}"
        )
    _checks.contiguous(scale, "scale")


def upper_bound(value: float | None) -> None:
    """There is no bound of the amax beside a scale that is given."""
    if value is not None:
        raise ValueError(
            f"scale_ub is {value} beside a scale; accepted is one of the two: scale_ub bounds the "
            "amax that a scale is computed from"
        )


def counts_tensor(counts: Tensor, leading: tuple[int, ...], like: Tensor, name: str) -> None:
    """Rows of each batch: integers, one for each index of the dimensions before the rows'."""
    _checks.same_device(counts, "counts", like, name)
    if len(leading) == 0:
        raise ValueError(
            f"counts is given with {name} of shape {_checks.shape_text(like)}; accepted is "
            "(E, T, N) with a count for each E, or (T, N) with one count"
        )
    batches = _checks.row_count(leading[:-1])
    if counts.numel() != batches:
        raise ValueError(
            f"counts has shape {_checks.shape_text(counts)}; accepted for {name} of shape "
            f"{_checks.shape_text(like)} are {batches} numbers of rows"
        )
    _checks.contiguous(counts, "counts")


def gate_and_up(fused: Tensor, interleave: int) -> int:
    """A fused gate-and-up tensor (..., 2 * N); returns N."""
    if fused.shape[-1] % 2:
        raise ValueError(
            f"fused has shape {_checks.shape_text(fused)}; accepted is (..., 2 * N): gate and up"
        )
    cols: int = fused.shape[-1] // 2
    _checks.turns(interleave, cols)
    return cols


def matrix(t: Tensor, name: str) -> None:
    """A tensor to be quantized along both dimensions."""
    if t.dim() != 2 or t.shape[0] == 0:
        raise ValueError(
            f"{name} has shape {_checks.shape_text(t)}; accepted is (M, K) with M and K >= 1. "
            f"Flatten leading dimensions with {name}.flatten(0, -2)"
        )


def activation(name: str, act_input: Tensor | None, grad: Tensor) -> None:
    """The activation whose derivative is fused, and what went into it."""
    one_of("activation", name, ACTIVATIONS)
    if (name == "none") != (act_input is None):
        raise ValueError(
            f"activation is {name!r} and act_input is "
            f"{'None' if act_input is None else 'given'}; accepted are both or neither"
        )
    if act_input is None:
        return
    _checks.same_device(act_input, "act_input", grad, "grad")
    if act_input.dtype != grad.dtype or act_input.shape != grad.shape:
        raise ValueError(
            f"act_input is {act_input.dtype} {_checks.shape_text(act_input)}; accepted is grad's "
            f"dtype and shape, {grad.dtype} {_checks.shape_text(grad)}"
        )
    _checks.contiguous(act_input, "act_input")


def buffer_of_segments(t: Tensor, name: str) -> None:
    """A buffer that holds many tensors is contiguous; it may be empty."""
    if t.layout != torch.strided or not t.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous; accepted is a contiguous buffer, as offsets count its "
            f"elements. Call {name}.contiguous() first"
        )
    if t.dim() == 0:
        raise ValueError(f"{name} has shape (); accepted is a tensor of one dimension or more")


def offsets_tensor(offsets: Tensor, sizes: Tensor | None, like: Tensor, like_name: str) -> int:
    """Where segments begin and how long they are; returns the number of segments."""
    for t, name in ((offsets, "offsets"), (sizes, "sizes")):
        if t is None:
            continue
        _checks.same_device(t, name, like, like_name)
        if t.dim() != 1 or (t.shape[0] == 0 and t is offsets):
            wanted = "(G + 1,)" if t is offsets else "(G,)"
            raise ValueError(f"{name} has shape {_checks.shape_text(t)}; accepted is {wanted}")
        _checks.contiguous(t, name)
    count: int = offsets.shape[0] - 1
    if sizes is not None and sizes.shape[0] != count:
        raise ValueError(
            f"sizes has shape {_checks.shape_text(sizes)}; accepted is ({count},), one for each "
            "segment of offsets"
        )
    return count


def floats_of_segments(
    t: Tensor | None, name: str, count: int, like: Tensor, like_name: str
) -> None:
    """One fp32 for each segment."""
    if t is None:
        return
    _checks.same_device(t, name, like, like_name)
    if t.dim() != 1 or t.shape[0] != count or not t.is_contiguous():
        raise ValueError(
            f"{name} has shape {_checks.shape_text(t)}; accepted is ({count},), contiguous, one "
            "for each segment"
        )
