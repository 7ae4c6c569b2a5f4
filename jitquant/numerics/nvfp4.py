"""NVFP4: the recipes "te" and "vllm", for activations and weights, and back.

Notation: A is the amax of a tensor (or of a row), b that of a block, x an element, S the encoding
scale. fp32 throughout, IEEE division, one operation a line; rounding is to nearest, ties to even.
Functions ending in ``_static`` take gsa, the others compute it and return it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import E2M1_MAX, FP32_MAX, NVFP4_BLOCK, NVFP4_DIVISOR, ceil_div
from jitquant.numerics.elements import (
    constant,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4


def rows_of(x: Tensor) -> Tensor:
    """``x`` (..., N) as fp32 (rows, N); a 1-D tensor is one row."""
    cols = x.shape[-1]
    return x.reshape(x.numel() // cols, cols).to(torch.float32)


def amax(v: Tensor, granularity: str, inverse: Tensor | None = None) -> Tensor:
    """Largest magnitude that is no NaN: (1,) for "tensor", (rows,) for "row"; 0 where none is.

    With ``inverse`` (rows,) that of rows times it.
    """
    if v.numel() == 0:
        return torch.zeros(v.shape[0] if granularity == "row" else 1, device=v.device)
    rows = torch.where(v.isnan(), constant(0.0, v), v.abs()).amax(dim=1)
    if inverse is not None:
        rows = rows * inverse
        rows = torch.where(rows.isnan(), constant(0.0, v), rows)
    return rows if granularity == "row" else rows.amax().reshape(1)


def times(v: Tensor, factor: Tensor, inverse: Tensor | None = None) -> Tensor:
    """``v * factor``; with ``inverse``, an inv_rms, ``v * (factor * inverse)``.

    Where that product is no normal number, ``(v * inverse) * factor``.
    """
    if inverse is None:
        return v * factor
    both = factor * inverse
    ordinary = (both >= 2.0**-126) & (both <= FP32_MAX)
    return torch.where(ordinary, v * both, (v * inverse) * factor)


def usable_scale(scale: Tensor) -> Tensor:
    """``min(scale, FLT_MAX)``, and 1 where that is 0; NaN stays."""
    scale = torch.minimum(scale, constant(FP32_MAX, scale))
    return torch.where(scale == 0, constant(1.0, scale), scale)


def scales_from_amax(a: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """S and gsa of an amax: ``S = min(divisor / A, FLT_MAX)``, or 1; ``gsa = A / divisor``.

    S is not ``1 / gsa``: that differs in the last bit for about a quarter of all A.
    """
    d = constant(divisor, a)
    return usable_scale(torch.div(d, a)), torch.div(a, d)


def scale_from_gsa(gsa: Tensor) -> Tensor:
    """S of a given gsa: ``min(1 / gsa, FLT_MAX)``; 1 where gsa or the result is 0."""
    s = usable_scale(torch.div(constant(1.0, gsa), gsa))
    return torch.where(gsa == 0, constant(1.0, s), s)


def block_scales(b: Tensor, s: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """The stored E4M3 scale of each block and the factor that its elements are encoded with.

    ``te`` is the rule of TransformerEngine's reference quantizer, whose bits tests/data has;
    ``vllm`` that of vLLM, SGLang and FlashInfer with exact reciprocals for their approximate ones.
    Which operand is multiplied first is load-bearing: the two differ in some scale bytes.

    Args:
        b: fp32, amax of each block; NaN if the block has one.
        s: fp32, encoding scale, of a shape that broadcasts with ``b``.
        recipe: "te" or "vllm".

    Returns:
        ``float8_e4m3fn`` scales and fp32 factors, of the shape of ``b``.
    """
    one = constant(1.0, b)
    sixth = torch.div(one, constant(E2M1_MAX, b))
    scales = encode_e4m3(b * (s * sixth) if recipe == "te" else s * (b * sixth))
    decoded = decode_e4m3(scales)
    # Where s is zero and 1 / S infinite (S denormal) this is NaN; such a block's codes become 0.
    factor = torch.minimum(torch.div(one, decoded * torch.div(one, s)), constant(FP32_MAX, b))
    if recipe == "vllm":
        factor = torch.where(decoded == 0, constant(0.0, b), factor)
    return scales, factor


def quantize_rows(
    v: Tensor, s: Tensor, recipe: str, tile_rows: int = 1, inverse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantizes fp32 rows with the encoding scale(s) S.

    Args:
        v: fp32 (rows, N). N up to the next multiple of 16 is taken as zeros.
        s: fp32 (1,) or (rows,).
        recipe: "te" or "vllm".
        tile_rows: rows that share a block scale: 1, or 16 for 16x16 blocks, where the last tile
            has the rows that there are and a tile's scale is repeated for each of its rows.
        inverse: fp32 (rows,), what rows are still to be multiplied with (`times`).

    Returns:
        uint8 codes 0..15 (rows, ceil(N / 16) * 16) and ``float8_e4m3fn`` scales
        (rows, ceil(N / 16)).
    """
    rows, cols = v.shape
    groups = ceil_div(cols, NVFP4_BLOCK)
    v = functional.pad(v, (0, groups * NVFP4_BLOCK - cols))
    blocks = v.reshape(rows, groups, NVFP4_BLOCK)
    b = blocks.abs().amax(dim=2)
    if tile_rows > 1:
        tiles = ceil_div(rows, tile_rows)
        b = functional.pad(b, (0, 0, 0, tiles * tile_rows - rows))
        b = b.reshape(tiles, tile_rows, groups).amax(dim=1).repeat_interleave(tile_rows, dim=0)
        b = b[:rows]
    if inverse is not None:
        b = b * inverse[:, None]
    scales, factor = block_scales(b, s[:, None], recipe)
    row_inverse = None if inverse is None else inverse[:, None, None]
    codes = encode_e2m1(times(blocks, factor[:, :, None], row_inverse))
    codes.masked_fill_(decode_e4m3(scales).isnan()[:, :, None], 0)
    return codes.reshape(rows, groups * NVFP4_BLOCK), scales


def packed(
    codes: Tensor, scales: Tensor, leading: tuple[int, ...], scale_layout: str
) -> tuple[Tensor, Tensor]:
    """x_fp4 and x_sf of what `quantize_rows` gave for a tensor with these leading dimensions."""
    x_fp4 = pack_e2m1(codes).reshape(*leading, codes.shape[1] // 2)
    if scale_layout == "swizzled_128x4":
        return x_fp4, swizzle_128x4(scales)
    return x_fp4, scales.reshape(*leading, scales.shape[1])


def quantize_values(
    v: Tensor,
    leading: tuple[int, ...],
    divisor: float,
    global_scale: float | None,
    granularity: str,
    recipe: str,
    scale_layout: str,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes fp32 rows (rows, N) of a tensor (*leading, N): x_fp4, x_sf and gsa.

    ``global_scale``, if given, is the gsa of the whole tensor: nothing is reduced, and gsa is (1,)
    whatever the granularity. ``inverse`` is as in `quantize_rows`.
    """
    if global_scale is None:
        s, gsa = scales_from_amax(amax(v, granularity, inverse), divisor)
    else:
        gsa = torch.full((1,), global_scale, dtype=torch.float32, device=v.device)
        s = scale_from_gsa(gsa)
    codes, scales = quantize_rows(v, s, recipe, inverse=inverse)
    return (*packed(codes, scales, leading, scale_layout), gsa)


def quantize_values_static(
    v: Tensor,
    leading: tuple[int, ...],
    gsa: Tensor,
    recipe: str,
    scale_layout: str,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes fp32 rows (rows, N) of a tensor (*leading, N) with the gsa given."""
    s = scale_from_gsa(gsa.reshape(-1))
    codes, scales = quantize_rows(v, s, recipe, inverse=inverse)
    return packed(codes, scales, leading, scale_layout)


def amax_gsa(x: Tensor, divisor: float = NVFP4_DIVISOR) -> tuple[Tensor]:
    """``gsa = A / divisor`` (1,), where A is the largest magnitude of ``x`` that is no NaN."""
    return (scales_from_amax(amax(rows_of(x), "tensor"), divisor)[1],)


def quantize_nvfp4(
    x: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    granularity: str = "tensor",
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of ``x`` (..., N)."""
    return quantize_values(
        rows_of(x), x.shape[:-1], divisor, global_scale, granularity, recipe, scale_layout
    )


def quantize_nvfp4_static(
    x: Tensor, global_scale: Tensor, *, recipe: str = "te", scale_layout: str = "linear"
) -> tuple[Tensor, Tensor]:
    """x_fp4, x_sf of ``x`` (..., N) with the gsa given, (1,) or (rows,)."""
    return quantize_values_static(rows_of(x), x.shape[:-1], global_scale, recipe, scale_layout)


def quantize_weight_rows(
    w: Tensor, s: Tensor, block: str, dim: int, recipe: str, scale_layout: str
) -> tuple[Tensor, Tensor]:
    """x_fp4 and x_sf of a weight with the encoding scale S (1,)."""
    v = w.to(torch.float32)
    codes, scales = quantize_rows(
        v.T if dim == 0 else v, s, recipe, tile_rows=16 if block == "16x16" else 1
    )
    if dim == 0:
        return pack_e2m1(codes.T, dim=0), scales.T.contiguous()
    return packed(codes, scales, (w.shape[0],), scale_layout)


def quantize_weight_nvfp4(
    w: Tensor,
    divisor: float = NVFP4_DIVISOR,
    *,
    global_scale: float | None = None,
    block: str = "1x16",
    dim: int = -1,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of a weight.

    Args:
        w: (N, K) with ``dim=-1``, (K, N) with ``dim=0``; blocks run along K.
        divisor: gsa is the weight's amax over it.
        global_scale: gsa, if it is given.
        block: "1x16", or "16x16": 16 neighbours of K by 16 of N (at the edges the part there is)
            share a scale, which is stored for each of the 16.
        dim: the dimension of K.
        recipe: "te" or "vllm".
        scale_layout: of x_sf; "linear" with ``dim=0``.

    Returns:
        ``dim=-1``: (N, ceil(K / 16) * 8) and (N, ceil(K / 16));
        ``dim=0``: (ceil(K / 16) * 8, N) with neighbours of K in a byte, and (ceil(K / 16), N).
    """
    if global_scale is None:
        s, gsa = scales_from_amax(amax(w.to(torch.float32), "tensor"), divisor)
    else:
        gsa = torch.full((1,), global_scale, dtype=torch.float32, device=w.device)
        s = scale_from_gsa(gsa)
    return (*quantize_weight_rows(w, s, block, dim, recipe, scale_layout), gsa)


def quantize_weight_nvfp4_static(
    w: Tensor,
    gsa: Tensor,
    *,
    block: str = "1x16",
    dim: int = -1,
    recipe: str = "te",
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor]:
    """x_fp4, x_sf of a weight with the gsa given, one element."""
    s = scale_from_gsa(gsa.reshape(1))
    return quantize_weight_rows(w, s, block, dim, recipe, scale_layout)


def dequantize_nvfp4(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    *,
    cols: int | None = None,
    dim: int = -1,
    scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``e2m1 * s * gsa`` in fp32, left to right, then one rounding to ``dtype``.

    Args:
        x_fp4: packed codes, (..., P) with ``dim=-1``, (P, N) with ``dim=0``.
        x_sf: their scales.
        gsa: (1,) or (rows,).
        cols: logical size of the packed dimension; default 2 * P.
        dim: the packed dimension.
        scale_layout: of x_sf.
        dtype: of the result; default bfloat16.
    """
    codes = unpack_e2m1(x_fp4, dim)
    packed_last = codes.T if dim == 0 else codes
    size = packed_last.shape[-1]
    groups = size // NVFP4_BLOCK
    rows = packed_last.numel() // size
    values = decode_e2m1(packed_last.reshape(rows, groups, NVFP4_BLOCK))
    if scale_layout == "swizzled_128x4":
        scales = decode_e4m3(unswizzle_128x4(x_sf, rows, groups))
    else:
        scales = decode_e4m3(x_sf.T if dim == 0 else x_sf).reshape(rows, groups)
    out = (values * scales[:, :, None]) * gsa.reshape(-1)[:, None, None]
    out = out.reshape(packed_last.shape).to(torch.bfloat16 if dtype is None else dtype)
    out = out[..., : size if cols is None else cols]
    return ((out.T if dim == 0 else out).contiguous(),)
