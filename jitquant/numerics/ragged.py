"""Many tensors in one buffer: FP8 and NVFP4 with a scale each, MXFP8, and the gradient's cast.

Segment i is the rows ``offsets[i]`` to ``offsets[i] + sizes[i]`` of the buffer (..., N), or,
without sizes, to ``offsets[i + 1]``; a buffer of one dimension has rows of one element. Rows
between segments are padding: they are not read, and their results are zero. Bounds are those of the
buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import MXFP8_BLOCK, NVFP4_BLOCK, NVFP4_DIVISOR, QUANTIZED_MAX
from jitquant.numerics.fp8 import decode_e8m0, encode, scale_from_amax
from jitquant.numerics.mxfp8 import quantize_mxfp8_rows
from jitquant.numerics.nvfp4 import (
    block_scales,
    constant,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    pack_e2m1,
    scales_from_amax,
    unpack_e2m1,
    usable_scale,
)

_SQRT_2_OVER_PI = 0.79788456080286536
_GELU_CUBIC = 0.044715
_QGELU_SLOPE = 1.702


def row_of(shape: Sequence[int]) -> int:
    """The elements of a row of a buffer of this shape, which offsets count."""
    return 1 if len(shape) == 1 else shape[-1]


def segment_bounds(
    offsets: Tensor, sizes: Tensor | None, numel: int, row: int = 1
) -> tuple[Tensor, Tensor]:
    """First element and last + 1 of each segment, int64 (G,), within a buffer of ``numel``."""
    rows = numel // max(row, 1)
    start = offsets[:-1].clamp(0, rows) * row
    stop = offsets[1:].clamp(0, rows) * row
    if sizes is not None:
        stop = torch.minimum(stop, start + sizes.clamp(0, rows) * row)
    return start, torch.maximum(start, stop)


def segment_of(position: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """The segment that each position of the buffer is in, or -1."""
    if start.numel() == 0:
        return torch.full_like(position, -1)
    segment = torch.searchsorted(start, position, right=True) - 1
    inside = (segment >= 0) & (position < stop[segment.clamp(min=0)])
    return torch.where(inside, segment, -1)


def _segments_of_elements(offsets: Tensor, sizes: Tensor | None, x: Tensor) -> Tensor:
    start, stop = segment_bounds(offsets, sizes, x.numel(), row_of(x.shape))
    return segment_of(torch.arange(x.numel(), device=offsets.device), start, stop)


def _amax_of_segments(v: Tensor, segment: Tensor, count: int) -> Tensor:
    """Largest magnitude of each segment, NaN if it has one; 0 where it is empty. fp32 (count,)."""
    # Magnitudes of floats are ordered as their bits are, NaN above all.
    bits = v.abs().view(torch.int32).to(torch.int64)
    out = torch.zeros(count + 1, dtype=torch.int64, device=v.device)
    out.scatter_reduce_(0, torch.where(segment < 0, count, segment), bits, "amax")
    return out[:count].to(torch.int32).view(torch.float32)


def _of_segment(values: Tensor, segment: Tensor, outside: float) -> Tensor:
    """The value of the segment that each element is in, and ``outside`` where it is in none."""
    extended = torch.cat((values, constant(outside, values).reshape(1)))
    return extended[torch.where(segment < 0, values.numel(), segment)]


def _quantize_fp8(
    v: Tensor, segment: Tensor, count: int, scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """data (numel,), scale_inv and amax (count,) of flat fp32 values, zero outside of segments."""
    amax = _amax_of_segments(v, segment, count)
    if scale is None:
        scale = scale_from_amax(amax, QUANTIZED_MAX[dtype])
    data = encode(v * _of_segment(scale, segment, 1.0), dtype)
    return data, torch.div(constant(1.0, scale), scale), amax


def _flat(x: Tensor, segment: Tensor) -> Tensor:
    """``x`` flat in fp32, zero outside of segments."""
    return x.reshape(-1).to(torch.float32).masked_fill(segment < 0, 0.0)


def quantize_ragged_fp8(
    x: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    sizes: Tensor | None = None,
    dtype: torch.dtype,
    activation: str = "none",
) -> tuple[Tensor, Tensor, Tensor]:
    """data like ``x``, scale_inv and amax (G,): each segment as `quantize_fp8` of a tensor.

    Args:
        x: contiguous, of any shape.
        offsets: int64 (G + 1,), in rows.
        scale: fp32 (G,) to take; None: from the amaxes.
        sizes: int64 (G,), in rows; None: segments follow each other.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        activation: of x before; one of `jitquant.formats.ACTIVATIONS`.
    """
    segment = _segments_of_elements(offsets, sizes, x)
    v = activated(_flat(x, segment), activation)
    data, scale_inv, amax = _quantize_fp8(v, segment, offsets.numel() - 1, scale, dtype)
    return data.reshape(x.shape), scale_inv, amax


def activated(x: Tensor, activation: str) -> Tensor:
    """fp32 ``x`` after "relu", "srelu", "silu", "qgelu" or "gelu" (its tanh form); or "none"."""
    if activation == "none":
        return x
    if activation in ("relu", "srelu"):
        y = torch.where(x < 0, constant(0.0, x), x)
        return y if activation == "relu" else y * y
    y = x
    if activation == "gelu":
        y = 2 * _SQRT_2_OVER_PI * x * (1 + _GELU_CUBIC * (x * x))
    if activation == "qgelu":
        y = _QGELU_SLOPE * x
    one = constant(1.0, x)
    return x * torch.div(one, one + torch.exp(-y))


def activation_derivative(x: Tensor, activation: str) -> Tensor:
    """Derivative at fp32 ``x``: of "relu", "srelu", "silu", "qgelu" or "gelu" (its tanh form)."""
    if activation == "relu":
        return (x > 0).to(torch.float32)
    if activation == "srelu":
        return torch.where(x > 0, x + x, constant(0.0, x))
    y = z = x
    if activation == "gelu":
        # 0.5 * (1 + tanh(y / 2)) is 1 / (1 + exp(-y)), which loses nothing far below 0.
        square, twice = x * x, 2 * _SQRT_2_OVER_PI * x
        y = twice * (1 + _GELU_CUBIC * square)
        z = twice * (1 + 3 * _GELU_CUBIC * square)
    if activation == "qgelu":
        y = z = _QGELU_SLOPE * x
    one = constant(1.0, x)
    s = torch.div(one, one + torch.exp(-y))
    # Beyond fp32, s is 0 or 1, and so is the derivative; infinity would make it NaN.
    largest = torch.finfo(torch.float32).max
    return s * (one + z.clamp(-largest, largest) * (one - s))


def quantize_ragged_grad_fp8(
    grad: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    sizes: Tensor | None = None,
    act_input: Tensor | None = None,
    activation: str = "none",
    with_dbias: bool = True,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """data, scale_inv, amax, dbias of ``grad * activation'(act_input)``, made in fp32.

    Args:
        grad: (..., N), contiguous; a segment is whole rows of it. With dbias it has two dimensions
            or more: offsets of one dimension count elements, whose columns are not those of a bias.
        offsets: int64 (G + 1,), in rows.
        scale: fp32 (G,) to take; None: from the amaxes.
        sizes: int64 (G,), in rows.
        act_input: what went into the activation, like ``grad``.
        activation: one of `jitquant.formats.ACTIVATIONS`.
        with_dbias: whether dbias is made; without it is (0, N).
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.

    Returns:
        data like ``grad``, scale_inv and amax (G,), dbias fp32 (G, N): the sum over the rows of a
        segment, added in fp64 and rounded once.
    """
    count, cols = offsets.numel() - 1, grad.shape[-1]
    segment = _segments_of_elements(offsets, sizes, grad)
    v = _flat(grad, segment)
    if act_input is not None and activation != "none":
        v = (v * activation_derivative(_flat(act_input, segment), activation)).masked_fill(
            segment < 0, 0.0
        )
    data, scale_inv, amax = _quantize_fp8(v, segment, count, scale, dtype)
    if not with_dbias:
        return data.reshape(grad.shape), scale_inv, amax, v.new_empty(0, cols)
    sums = torch.zeros((count + 1) * cols, dtype=torch.float64, device=v.device)
    column = torch.arange(v.numel(), device=v.device) % cols
    sums.scatter_add_(0, torch.where(segment < 0, count, segment) * cols + column, v.double())
    dbias = sums[: count * cols].to(torch.float32).reshape(count, cols)
    return data.reshape(grad.shape), scale_inv, amax, dbias


def _segments_of_blocks(
    offsets: Tensor, sizes: Tensor | None, numel: int, row: int
) -> tuple[Tensor, Tensor]:
    """The segment of the first element of each block of 16, and a mask of elements in it."""
    start, stop = segment_bounds(offsets, sizes, numel, row)
    blocks = -(-numel // NVFP4_BLOCK)
    position = torch.arange(blocks * NVFP4_BLOCK, device=offsets.device)
    position = position.reshape(blocks, NVFP4_BLOCK)
    segment = segment_of(position[:, 0].contiguous(), start, stop)
    if start.numel() == 0:
        return segment, position < 0
    inside = (segment >= 0)[:, None] & (position < stop[segment.clamp(min=0)][:, None])
    return segment, inside


def quantize_ragged_nvfp4(
    x: Tensor,
    offsets: Tensor,
    scale: Tensor | None = None,
    *,
    sizes: Tensor | None = None,
    recipe: str = "te",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa, amax of a buffer whose segments begin at multiples of 16.

    Blocks are 16 neighbors of the flattened buffer. A block belongs to the segment that its first
    element is in; its other elements count as zeros.

    Args:
        x: contiguous, of any shape.
        offsets: int64 (G + 1,), in rows.
        scale: the encoding scale S (G,) to take; gsa is then ``1 / S``. None: from the amaxes.
        sizes: int64 (G,), in rows.
        recipe: "te", "vllm" or "te_flush".

    Returns:
        x_fp4 (ceil(numel / 16) * 8,), x_sf (ceil(numel / 16),), gsa and amax (G,).
    """
    numel, count = x.numel(), offsets.numel() - 1
    segment, inside = _segments_of_blocks(offsets, sizes, numel, row_of(x.shape))
    v = functional.pad(x.reshape(-1).to(torch.float32), (0, -numel % NVFP4_BLOCK))
    v = v.reshape(-1, NVFP4_BLOCK).masked_fill(~inside, 0.0)
    known = torch.where(v.isnan(), constant(0.0, v), v)
    amax = _amax_of_segments(known.reshape(-1), segment.repeat_interleave(NVFP4_BLOCK), count)
    if scale is None:
        s, gsa = scales_from_amax(amax, NVFP4_DIVISOR)
    else:
        s = usable_scale(scale)
        gsa = torch.div(constant(1.0, s), s)
    s = _of_segment(s, segment, 1.0)
    scales, factor = block_scales(v.abs().amax(dim=1), s, recipe)
    codes = encode_e2m1(v * factor[:, None])
    codes.masked_fill_(decode_e4m3(scales).isnan()[:, None] | ~inside, 0)
    return pack_e2m1(codes).reshape(-1), scales, gsa, amax


def quantize_ragged_mxfp8(
    x: Tensor, offsets: Tensor, *, sizes: Tensor | None = None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """data like ``x`` and E8M0 scales (ceil(numel / 32),) of a buffer in blocks of 32 neighbors.

    Args:
        x: contiguous, of any shape.
        offsets: int64 (G + 1,), in rows.
        sizes: int64 (G,), in rows.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
    """
    v = _flat(x, _segments_of_elements(offsets, sizes, x))
    data, scales = quantize_mxfp8_rows(v[None], dtype)
    return data.reshape(x.shape), scales.reshape(-1)


def dequantize_ragged_mxfp8(
    data: Tensor,
    block_scales: Tensor,
    offsets: Tensor,
    *,
    sizes: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``data * 2^(e - 127)`` in fp32, rounded once to ``dtype``; zero outside of segments."""
    segment = _segments_of_elements(offsets, sizes, data)
    scales = decode_e8m0(block_scales).repeat_interleave(MXFP8_BLOCK)[: data.numel()]
    values = (data.reshape(-1).to(torch.float32) * scales).masked_fill(segment < 0, 0.0)
    return (values.to(torch.bfloat16 if dtype is None else dtype).reshape(data.shape),)


def dequantize_ragged_fp8(
    data: Tensor,
    scale_inv: Tensor,
    offsets: Tensor,
    *,
    sizes: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``data * scale_inv`` of each segment in fp32, rounded once to ``dtype``; zero outside."""
    segment = _segments_of_elements(offsets, sizes, data)
    values = data.reshape(-1).to(torch.float32) * _of_segment(scale_inv, segment, 0.0)
    values = values.masked_fill(segment < 0, 0.0)
    return (values.to(torch.bfloat16 if dtype is None else dtype).reshape(data.shape),)


def dequantize_ragged_nvfp4(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    offsets: Tensor,
    *,
    numel: int,
    row_size: int = 1,
    sizes: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``e2m1 * s * gsa`` in fp32, rounded once to ``dtype``: (numel,), zero outside of segments."""
    segment, inside = _segments_of_blocks(offsets, sizes, numel, row_size)
    codes = decode_e2m1(unpack_e2m1(x_fp4)).reshape(-1, NVFP4_BLOCK)
    values = codes * decode_e4m3(x_sf)[:, None] * _of_segment(gsa, segment, 0.0)[:, None]
    values = values.masked_fill(~inside, 0.0).reshape(-1)[:numel]
    return (values.to(torch.bfloat16 if dtype is None else dtype),)
