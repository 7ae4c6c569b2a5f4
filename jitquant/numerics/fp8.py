"""FP8 and INT8: per tensor, per row, per group of a row, per block; and back.

Notation: A is the amax of a tensor (or row), b that of a group or block, x an element. fp32
throughout, IEEE division, one operation a line; rounding is to nearest, ties to even. The formulas
are those of ``docs/numerics.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import (
    E5M2_MAX,
    E5M2_NAN,
    E8M0_DTYPE,
    FP32_MAX,
    GROUP_EPS,
    INT8_MAX,
    QUANTIZED_MAX,
    ceil_div,
)
from jitquant.numerics.layout import unswizzle_128x4
from jitquant.numerics.nvfp4 import constant, encode_e4m3, rows_of, times

_EXPONENT_NAN = 255

Bounds = tuple[float | None, float | None]
"""Least and largest element; None: the dtype's."""


def encode_e5m2(x: Tensor) -> Tensor:
    """Rounds fp32 to the nearest E5M2 value, ties to even; saturates at +-57344; NaN is 0x7F."""
    codes = x.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2).view(torch.uint8)
    return codes.masked_fill_(x.isnan(), E5M2_NAN).view(torch.float8_e5m2)


def encode_int8(x: Tensor) -> Tensor:
    """Rounds fp32 to the nearest integer, ties to even; saturates at -128 and 127; NaN is 0."""
    return x.nan_to_num(nan=0.0).clamp(-INT8_MAX - 1, INT8_MAX).round().to(torch.int8)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 as ``dtype``: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``."""
    if dtype == torch.int8:
        return encode_int8(x)
    return encode_e4m3(x) if dtype == torch.float8_e4m3fn else encode_e5m2(x)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2^(e - 127)`` as fp32 of int32 exponents e in 0..254, exactly; 255 gives infinity."""
    bits = torch.where(exponent > 0, exponent << 23, 1 << 22)  # 2^-127 is subnormal
    return bits.to(torch.int32).view(torch.float32)


def inverse_power_of_two(exponent: Tensor) -> Tensor:
    """``2^(127 - e)`` as fp32 of int32 exponents e in 0..255, exactly."""
    normal = (254 - exponent).clamp(min=0) << 23
    tiny = torch.where(exponent == 254, 1 << 22, 1 << 21)  # 2^-127, 2^-128
    return torch.where(exponent < 254, normal, tiny).to(torch.int32).view(torch.float32)


def decode_e8m0(e: Tensor) -> Tensor:
    """Value of E8M0 bytes as fp32; 255 is NaN."""
    exponent = e.view(torch.uint8).to(torch.int32)
    value = power_of_two(exponent)
    return torch.where(exponent == _EXPONENT_NAN, constant(float("nan"), value), value)


def ue8m0_exponent(scale_inv: Tensor) -> Tensor:
    """Biased exponent of the power of two that a positive fp32 is rounded up to, int32 in 0..255.

    The exponent field, plus 1 if any bit of the mantissa is set; 255 for infinity and NaN.
    """
    bits = scale_inv.view(torch.int32) & 0x7FFFFFFF  # NaN may have a sign
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return exponent.clamp(max=_EXPONENT_NAN)


def amax_keep_nan(v: Tensor, granularity: str, inverse: Tensor | None = None) -> Tensor:
    """NaN-propagating amax of fp32 rows: (1,) or (rows,); 0 if empty.

    With ``inverse`` (rows,) that of rows times it.
    """
    if v.numel() == 0:
        return v.new_zeros(v.shape[0] if granularity == "row" else 1)
    rows = v.abs().amax(dim=1)
    if inverse is not None:
        rows = rows * inverse
    return rows if granularity == "row" else rows.amax().reshape(1)


def scale_from_amax(a: Tensor, top: float) -> Tensor:
    """``min(top / A, FLT_MAX)``; 1 where A is 0, infinite or NaN.

    TransformerEngine's current scaling. scale_inv is ``1 / scale``, which is not ``A / top``:
    for a quarter of all A the last bit differs.
    """
    scale = torch.minimum(torch.div(constant(top, a), a), constant(FP32_MAX, a))
    usable = (a > 0) & (a < float("inf"))
    return torch.where(usable, scale, constant(1.0, a))


def scale_inv_of(scale: Tensor, a: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What dequantizes: ``1 / scale``.

    Of INT8 whose scale was computed ``A / 127``, as vLLM's dynamic_scaled_int8_quant stores it.

    Args:
        scale: what elements are multiplied with.
        a: the amaxes that it was computed from; None: it was given.
        dtype: of the elements.
    """
    inverse = torch.div(constant(1.0, scale), scale)
    if a is None or dtype != torch.int8:
        return inverse
    return torch.where(a <= FP32_MAX, torch.div(a, constant(INT8_MAX, a)), inverse)


def cast(
    v: Tensor,
    leading: tuple[int, ...],
    scale: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    granularity: str,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """data (*leading, N) and scale_inv, (1,) or (*leading, 1), of fp32 rows (rows, N)."""
    scaled = times(v, scale[:, None], None if inverse is None else inverse[:, None])
    data = encode(scaled, dtype).reshape(*leading, v.shape[1])
    shape = (*leading, 1) if granularity == "row" else (1,)
    return data, scale_inv.reshape(shape)


def quantize_scaled(
    v: Tensor,
    leading: tuple[int, ...],
    scale: Tensor | None,
    dtype: torch.dtype,
    scale_value: float | None,
    scale_ub: float | None,
    amax_eps: float | None,
    granularity: str,
    with_amax: bool,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """data, scale_inv, amax of fp32 rows (rows, N) of a tensor (*leading, N).

    Args:
        v: the rows.
        leading: the tensor's dimensions without the last.
        scale: what elements are multiplied with, (1,) or one a row, as ``granularity`` says; None:
            it is made from the amax.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        scale_value: the scale of the whole tensor as a number.
        scale_ub, amax_eps: the scale is made from ``max(min(amax, scale_ub), amax_eps)``.
        granularity: "tensor": scale_inv and amax are (1,); "row": (..., 1).
        with_amax: without it amax is (0,).
        inverse: (rows,), what rows are still to be multiplied with (`nvfp4.times`).
    """
    if scale_value is not None:
        scale = torch.full((1,), scale_value, dtype=torch.float32, device=v.device)
    amax, known = amax_keep_nan(v, granularity, inverse), None
    if scale is None:
        known = _bounded(amax, scale_ub, amax_eps)
        scale = scale_from_amax(known, QUANTIZED_MAX[dtype])
    scale = scale.reshape(-1)
    made = scale_inv_of(scale, known, dtype)
    data, scale_inv = cast(v, leading, scale, made, dtype, granularity, inverse)
    return data, scale_inv, amax.reshape(scale_inv.shape) if with_amax else amax.new_empty(0)


def quantize_scaled_from_amax(
    v: Tensor,
    leading: tuple[int, ...],
    amax: Tensor,
    dtype: torch.dtype,
    scale_ub: float | None,
    amax_eps: float | None,
    granularity: str,
) -> tuple[Tensor, Tensor]:
    """data, scale_inv of fp32 rows with the amax given: one element, or one for each row."""
    known = _bounded(amax.reshape(-1), scale_ub, amax_eps)
    scale = scale_from_amax(known, QUANTIZED_MAX[dtype])
    return cast(v, leading, scale, scale_inv_of(scale, known, dtype), dtype, granularity)


def _bounded(amax: Tensor, scale_ub: float | None, amax_eps: float | None) -> Tensor:
    if scale_ub is not None:
        amax = torch.minimum(amax, constant(scale_ub, amax))
    return amax if amax_eps is None else torch.maximum(amax, constant(amax_eps, amax))


def quantize_tiles(
    v: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    eps: float,
    recipe: str,
    power_of_two_scales: bool,
    bounds: Bounds = (None, None),
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Elements and scale_inv of groups whose amaxes are given.

    Args:
        v: fp32 (tiles, elements).
        b: fp32 (tiles,); NaN if the tile has one.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        eps: b is raised to it.
        recipe: "te" multiplies with ``top / b`` and stores the reciprocal of that; "deepgemm"
            stores ``b / top`` and multiplies with the reciprocal; "vllm" stores ``b / top`` and
            divides by it.
        power_of_two_scales: scale_inv is rounded up to a power of two, and elements are multiplied
            with its reciprocal, which is exact.
        bounds: fp8_min and fp8_max: what elements are clamped to, and top; None: the dtype's.
        inverse: fp32 (tiles,), what elements are still to be multiplied with, and b was
            (`nvfp4.times`).
    """
    if inverse is not None:
        inverse = inverse[:, None]
    low, high = bounds
    top = constant(QUANTIZED_MAX[dtype] if high is None else high, b)
    one = constant(1.0, b)
    b = torch.maximum(b, constant(eps, b))
    if recipe == "te":
        factor = torch.div(top, b)
        scale_inv = torch.div(one, factor)
    else:
        scale_inv = torch.div(b, top)
        factor = torch.div(one, scale_inv)
    if power_of_two_scales:
        nan = scale_inv.isnan()
        exponent = ue8m0_exponent(scale_inv)
        scale_inv = power_of_two(exponent).masked_fill(nan, float("nan"))
        scaled = times(v, inverse_power_of_two(exponent)[:, None], inverse)
    elif recipe == "vllm":
        scaled = torch.div(v if inverse is None else v * inverse, scale_inv[:, None])
    else:
        scaled = times(v, factor[:, None], inverse)
    if bounds != (None, None):
        scaled = scaled.clamp(low, high)
    return encode(scaled, dtype), scale_inv


def store_scales(
    scale_inv: Tensor, leading: tuple[int, ...], scale_format: str, scale_layout: str
) -> Tensor:
    """Scales in the memory layout that is asked for, contiguous; padding is zero.

    Args:
        scale_inv: fp32 (rows, G).
        leading: the leading dimensions (*batch, T), whose product is ``rows``; () is one row.
        scale_format: "ue8m0_packed": the exponents of groups 4p .. 4p + 3 in the bytes of int32 p,
            the first in the lowest byte; otherwise unchanged.
        scale_layout: "row" gives (*leading, P), "column" (*batch, P, T), "column_tma"
            (*batch, P, T up to a multiple of 4), "row_padded" (*leading, P up to a multiple of 4).
    """
    if scale_format == "ue8m0_packed":
        exponent = ue8m0_exponent(scale_inv).to(torch.uint8)
        exponent = functional.pad(exponent, (0, -exponent.shape[1] % 4))
        scale_inv = exponent.contiguous().view(torch.int32)
    columns = scale_inv.shape[1]
    if scale_layout == "row":
        return scale_inv.reshape(*leading, columns)
    if scale_layout == "row_padded":
        padded = functional.pad(scale_inv, (0, -columns % 4))
        return padded.reshape(*leading, padded.shape[1])
    batch, rows = (leading[:-1], leading[-1]) if leading else ((), 1)
    stored = scale_inv.reshape(*batch, rows, columns).transpose(-1, -2)
    if scale_layout == "column_tma":
        stored = functional.pad(stored, (0, -rows % 4))
    return stored.clone(memory_format=torch.contiguous_format)


def load_scales(stored: Tensor, rows: int, groups: int, scale_layout: str) -> Tensor:
    """Undoes `store_scales` and `swizzle_128x4`: fp32 (rows, groups).

    Args:
        stored: fp32; int32 of packed exponents; or E8M0 bytes.
        rows: product of the leading dimensions.
        groups: scales of a row.
        scale_layout: of ``stored``.
    """
    if scale_layout == "swizzled_128x4":
        return decode_e8m0(unswizzle_128x4(stored, rows, groups))
    if scale_layout in ("column", "column_tma"):
        stored = stored.transpose(-1, -2)
        if stored.shape[-2] and rows:
            batches = stored.numel() // (stored.shape[-2] * stored.shape[-1])
            stored = stored[..., : rows // batches, :]
    if stored.dtype == torch.int32:
        stored = stored.clone(memory_format=torch.contiguous_format)
        exponents = stored.view(torch.uint8).view(E8M0_DTYPE)
        return decode_e8m0(exponents.reshape(rows, 4 * stored.shape[-1])[:, :groups])
    if stored.dtype != torch.float32:
        stored = decode_e8m0(stored)
    return stored.reshape(rows, stored.shape[-1] if stored.dim() else 1)[:, :groups]


def group_amax(v: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """fp32 (rows, N) in groups, zeros after N: (rows, G, group_size), and amaxes (rows, G)."""
    rows, cols = v.shape
    groups = ceil_div(cols, group_size)
    padded = functional.pad(v, (0, groups * group_size - cols))
    blocks = padded.reshape(rows, groups, group_size)
    return blocks, blocks.abs().amax(dim=2)


def _quantize_groups(
    v: Tensor,
    group_size: int,
    dtype: torch.dtype,
    scale_format: str,
    eps: float,
    recipe: str,
    bounds: Bounds,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Elements (rows, N) and scale_inv fp32 (rows, G) of fp32 rows, times ``inverse`` (rows,)."""
    blocks, b = group_amax(v, group_size)
    if inverse is not None:
        b = b * inverse[:, None]
        inverse = inverse.repeat_interleave(b.shape[1])
    data, scale_inv = quantize_tiles(
        blocks.reshape(b.numel(), group_size),
        b.reshape(-1),
        dtype,
        eps,
        recipe,
        scale_format != "float32",
        bounds,
        inverse,
    )
    data = data.reshape(v.shape[0], b.shape[1] * group_size)[:, : v.shape[1]].contiguous()
    return data, scale_inv.reshape(b.shape)


def rows_past_counts(counts: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Whether a row of (*batch, T) is at or past the count of its batch: bool (*batch, T)."""
    row = torch.arange(leading[-1], device=counts.device)
    return row >= counts.reshape(*leading[:-1], 1)


def quantize_group_rows(
    v: Tensor,
    leading: tuple[int, ...],
    group_size: int,
    dtype: torch.dtype,
    scale_format: str,
    scale_layout: str,
    eps: float | None,
    recipe: str,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    counts: Tensor | None = None,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """data and scale_inv of fp32 rows (rows, N), a scale for ``group_size`` neighbors of a row.

    Args:
        v: the rows; the last group of a row has the elements that there are.
        leading: the tensor's dimensions without the last.
        group_size: elements of a group.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        scale_format: "float32", "ue8m0" or "ue8m0_packed".
        scale_layout: see `store_scales`.
        eps: what amaxes are raised to; None: the recipe's.
        recipe: "te", "deepgemm" or "vllm".
        fp8_min, fp8_max: see `quantize_tiles`.
        counts: (E,) of (E, T, N): how many rows of each batch there are. The others are not read,
            and their results are zero.
        inverse: (rows,), what rows are still to be multiplied with (`nvfp4.times`).
    """
    eps = GROUP_EPS[recipe] if eps is None else eps
    how = (group_size, dtype, scale_format, eps, recipe, (fp8_min, fp8_max))
    data, scale_inv = _quantize_groups(v, *how, inverse)
    stored = store_scales(scale_inv, leading, scale_format, scale_layout)
    if counts is not None:
        rest = rows_past_counts(counts, leading)
        data.view(torch.uint8).masked_fill_(rest.reshape(-1, 1), 0)
        # Where the scales of those rows lie is found by storing a mask in the same way.
        marks = rest.reshape(-1, 1).expand(scale_inv.shape).to(torch.float32)
        if scale_format == "ue8m0_packed":
            marks = marks[:, ::4]
        stored.masked_fill_(store_scales(marks, leading, "float32", scale_layout) != 0, 0)
    return data.reshape(*leading, v.shape[1]), stored


def quantize_block(
    w: Tensor,
    block_rows: int,
    block_cols: int,
    *,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "row",
    eps: float | None = None,
    recipe: str = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """data and scale_inv of ``w`` (..., N, K), a scale for ``block_rows`` by ``block_cols``.

    At the edges a block has the elements that there are. scale_inv is (..., N blocks, K blocks),
    the last dimension a multiple of four with "row_padded".
    """
    rows, cols = w.shape[-2:]
    count, tall, wide = w.shape[:-2].numel(), ceil_div(rows, block_rows), ceil_div(cols, block_cols)
    matrices = w.reshape(count, rows, cols).to(torch.float32)
    padded = functional.pad(
        matrices, (0, wide * block_cols - cols, 0, tall * block_rows - rows)
    ).reshape(count, tall, block_rows, wide, block_cols)
    tiles = padded.permute(0, 1, 3, 2, 4).reshape(count * tall * wide, block_rows * block_cols)
    data, scale_inv = quantize_tiles(
        tiles,
        tiles.abs().amax(dim=1),
        dtype,
        GROUP_EPS[recipe] if eps is None else eps,
        recipe,
        scale_format != "float32",
        (fp8_min, fp8_max),
    )
    data = data.reshape(count, tall, wide, block_rows, block_cols).permute(0, 1, 3, 2, 4)
    data = data.reshape(count, tall * block_rows, wide * block_cols)[:, :rows, :cols]
    leading = (*w.shape[:-2], tall)
    scales = scale_inv.reshape(count * tall, wide)
    return (
        data.reshape(w.shape).contiguous(),
        store_scales(scales, leading, scale_format, scale_layout),
    )


def quantize_per_token_group_both(
    x: Tensor,
    group_size: int,
    *,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "column",
    eps: float | None = None,
    recipe: str = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_group_rows` of ``x`` (M, K) and of its transpose: data, scale_inv, data_t, ...

    data_t is (K, M), contiguous, with groups along M.
    """
    how = (group_size, dtype, scale_format, scale_layout, eps, recipe, fp8_min, fp8_max)
    return (
        *quantize_group_rows(rows_of(x), x.shape[:1], *how),
        *quantize_group_rows(rows_of(x.T), x.shape[1:], *how),
    )


def quantize_block_both(
    w: Tensor,
    block_rows: int,
    block_cols: int,
    *,
    dtype: torch.dtype,
    scale_format: str = "float32",
    scale_layout: str = "row",
    eps: float | None = None,
    recipe: str = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_block` of ``w`` (N, K) and of its transpose: data, scale_inv, data_t, scale_inv_t.

    data_t is (K, N), contiguous: the same elements, as a block and its transpose share a scale.
    """
    keywords = {
        "dtype": dtype,
        "scale_format": scale_format,
        "scale_layout": scale_layout,
        "eps": eps,
        "recipe": recipe,
        "fp8_min": fp8_min,
        "fp8_max": fp8_max,
    }
    return (
        *quantize_block(w, block_rows, block_cols, **keywords),  # type: ignore[arg-type]
        *quantize_block(w.T, block_cols, block_rows, **keywords),  # type: ignore[arg-type]
    )


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    block_rows: int,
    block_cols: int,
    *,
    scale_layout: str = "row",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``data * scale_inv`` in fp32, then one rounding to ``dtype``.

    Args:
        data: (..., N).
        scale_inv: the scales, stored as ``scale_layout`` says.
        block_rows: rows that share a scale: 1, a block's, or 0 for all.
        block_cols: columns that share a scale, or 0 for all.
        scale_layout: "row", "column", "column_tma", "row_padded", "linear" or "swizzled_128x4".
        dtype: of the result; default bfloat16.
    """
    cols = data.shape[-1]
    rows = data.numel() // cols
    values = data.to(torch.float32).reshape(rows, cols)
    if block_rows == 0:
        scales = scale_inv.reshape(1, 1)
    else:
        # Blocks do not reach over the matrices of a stack.
        per_matrix = rows if block_rows == 1 else data.shape[-2]
        count = 1 if block_rows == 1 else (rows // per_matrix if per_matrix else 0)
        tall = ceil_div(per_matrix, block_rows)
        groups = 1 if block_cols == 0 else ceil_div(cols, block_cols)
        scales = load_scales(scale_inv, count * tall, groups, scale_layout)
        scales = scales.reshape(count, tall, groups).repeat_interleave(block_rows, dim=1)
        scales = scales[:, :per_matrix].reshape(rows, groups)
        scales = scales.repeat_interleave(block_cols or cols, dim=1)[:, :cols]
    out = values * scales
    return (out.to(torch.bfloat16 if dtype is None else dtype).reshape(data.shape),)
