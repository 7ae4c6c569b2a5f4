"""Argument checks of the FP8, INT8 and MXFP8 ops, beside those that all ops share in `_checks`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jitquant.formats import BLOCK_SHAPES, BLOCK_SIDES, GROUP_SIZES, QUANTIZED_MAX
from jitquant.ops import _checks


def group_size(size: int) -> None:
    """``group_size`` is one that there are kernels for."""
    if size not in GROUP_SIZES:
        raise ValueError(
            f"group_size: expected one of {', '.join(map(str, GROUP_SIZES))}, got {size}. For one "
            "scale for each row call quantize_fp8 with granularity='row'"
        )


def block_shape(rows: int, cols: int) -> None:
    """``block`` is one that there are kernels for."""
    if rows != cols or rows not in BLOCK_SIDES:
        raise ValueError(
            f"block: expected one of {', '.join(map(str, BLOCK_SHAPES))}, got {(rows, cols)}. For "
            "blocks of one row call quantize_per_token_group"
        )


def _rounded(x: float, bits: int) -> float:
    """``x`` with so many significant bits, to nearest even. Without a tensor, which may be
    elsewhere by default.
    """
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def _holds(dtype: torch.dtype, x: float) -> bool:
    """Whether a number from 16 to the dtype's largest is one of its values."""
    if dtype == torch.int8:
        return x == round(x)
    return _rounded(x, 4 if dtype == torch.float8_e4m3fn else 3) == x


def bounds(dtype: torch.dtype, fp8_min: float | None, fp8_max: float | None) -> None:
    """Bounds of elements, in float32, lie within the dtype, the upper one being one of its values.

    They are at least 16, at most 0, and finite.
    """
    top = QUANTIZED_MAX[dtype]
    least = -128.0 if dtype == torch.int8 else -top
    high = None if fp8_max is None else _rounded(fp8_max, 24)
    if high is not None and (high > top or not _holds(dtype, high)):
        raise ValueError(
            f"fp8_max: expected a value of {dtype} from 16 to {top}, got {fp8_max}. Leave it out "
            "for the largest"
        )
    if fp8_min is not None and _rounded(fp8_min, 24) < least:
        raise ValueError(
            f"fp8_min: expected a number from {least} to 0 with {dtype}, got {fp8_min}"
        )


def scale_tensor(scale: Tensor, rows: int, granularity: str, like: Tensor, like_name: str) -> None:
    """A given scale: contiguous, one element or one for each row."""
    _checks.same_device(scale, "scale", like, like_name)
    count = rows if granularity == "row" else 1
    if scale.numel() != count:
        raise ValueError(
            f"scale: expected {count} element{'' if count == 1 else 's'} with granularity "
            f"{granularity!r}, got shape {_checks.shape_text(scale)}"
        )
    _checks.contiguous(scale, "scale")


def no_bound(name: str, value: float | None) -> None:
    """Bounds of the amax and a given scale exclude each other."""
    if value is not None:
        raise ValueError(
            f"{name}: expected None beside a scale, got {value}. It bounds the amax that a scale "
            "is computed from"
        )


def counts_tensor(counts: Tensor, like: Tensor, name: str) -> None:
    """Rows of each batch: integers, one for each index of the dimensions before the rows'."""
    _checks.same_device(counts, "counts", like, name)
    if like.dim() == 1:
        raise ValueError(
            f"counts: expected None for {name} of shape {_checks.shape_text(like)}, got a tensor. "
            "Pass (E, T, N) with E counts, or (T, N) with one"
        )
    batches = _checks.row_count(like.shape[:-2])
    if counts.numel() != batches:
        raise ValueError(
            f"counts: expected {batches} numbers of rows for {name} of shape "
            f"{_checks.shape_text(like)}, got shape {_checks.shape_text(counts)}"
        )
    _checks.contiguous(counts, "counts")


def gate_and_up(fused: Tensor, interleave: int) -> None:
    """A fused gate-and-up tensor (..., 2 * N)."""
    if fused.shape[-1] % 2:
        raise ValueError(
            "fused: expected shape (..., 2 * N), gate and up, got shape "
            f"{_checks.shape_text(fused)}"
        )
    _checks.turns(interleave, fused.shape[-1] // 2)


def matrix(t: Tensor, name: str) -> None:
    """A tensor to be quantized along both dimensions."""
    if t.dim() != 2 or t.shape[0] == 0:
        raise ValueError(
            f"{name}: expected shape (M, K) with M and K >= 1, got shape {_checks.shape_text(t)}. "
            f"Flatten leading dimensions with {name}.flatten(0, -2)"
        )


def activation(name: str, act_input: Tensor | None, grad: Tensor) -> None:
    """The activation whose derivative is fused, and what went into it."""
    if (name == "none") != (act_input is None):
        raise ValueError(
            f"activation: expected an activation and act_input, or neither, got {name!r} with "
            f"act_input {'None' if act_input is None else 'given'}"
        )
    if act_input is None:
        return
    _checks.same_device(act_input, "act_input", grad, "grad")
    if act_input.dtype != grad.dtype or act_input.shape != grad.shape:
        raise ValueError(
            f"act_input: expected {grad.dtype} of shape {_checks.shape_text(grad)}, as grad is, "
            f"got {act_input.dtype} of shape {_checks.shape_text(act_input)}"
        )
    _checks.contiguous(act_input, "act_input")


def buffer_of_segments(t: Tensor, name: str) -> None:
    """A buffer that holds many tensors is contiguous; it may be empty."""
    if t.layout != torch.strided or not t.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous buffer, got one that is not. Offsets count its "
            f"rows. Call {name}.contiguous() first"
        )
    if t.dim() == 0:
        raise ValueError(f"{name}: expected a tensor of one dimension or more, got shape ()")


def offsets_tensor(offsets: Tensor, sizes: Tensor | None, like: Tensor, like_name: str) -> None:
    """Where segments begin and how long they are."""
    _checks.same_device(offsets, "offsets", like, like_name)
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(
            f"offsets: expected shape (G + 1,), got shape {_checks.shape_text(offsets)}"
        )
    _checks.contiguous(offsets, "offsets")
    if sizes is None:
        return
    _checks.same_device(sizes, "sizes", like, like_name)
    if sizes.dim() != 1:
        raise ValueError(f"sizes: expected shape (G,), got shape {_checks.shape_text(sizes)}")
    _checks.contiguous(sizes, "sizes")
    count = offsets.shape[0] - 1
    if sizes.shape[0] != count:
        raise ValueError(
            f"sizes: expected shape ({count},), one element for each segment of offsets, got shape "
            f"{_checks.shape_text(sizes)}"
        )


def floats_of_segments(
    t: Tensor | None, name: str, offsets: Tensor, like: Tensor, like_name: str
) -> None:
    """One fp32 for each segment."""
    if t is None:
        return
    count = offsets.shape[0] - 1
    _checks.same_device(t, name, like, like_name)
    if t.dim() != 1 or t.shape[0] != count or not t.is_contiguous():
        raise ValueError(
            f"{name}: expected shape ({count},), contiguous, one element for each segment, got "
            f"shape {_checks.shape_text(t)}"
        )
