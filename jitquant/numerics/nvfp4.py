"""NVFP4: E2M1 and E4M3 codes, the recipes "te" and "vllm", and back.

Notation: A is the amax of a tensor (or of a row), b that of a block, x an element, S the encoding
scale. fp32 throughout, IEEE division, one operation a line; rounding is to nearest, ties to even.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import (
    CODES_PER_BYTE,
    E2M1_MAX,
    E2M1_SIGN_BIT,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_NAN,
    FP4_DTYPE,
    FP32_MAX,
    NVFP4_BLOCK,
    NVFP4_DIVISOR,
    SCALE_DTYPE,
)
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4


def constant(value: float, like: Tensor) -> Tensor:
    """A 0-dim fp32 tensor on the device of ``like``.

    Scalars that take part in a division are made tensors: PyTorch replaces ``scalar / tensor`` by a
    reciprocal and a product, and on CUDA ``tensor / scalar`` as well, which rounds twice.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def encode_e2m1(x: Tensor) -> Tensor:
    """Rounds to the nearest E2M1 code, ties to the even code; saturates at +-6.

    Each magnitude is compared with the seven midpoints in full precision, so it is rounded once.
    Rounding to half steps first and through a table after is wrong on an eighth of [0, 6].

    Args:
        x: fp32, any shape.

    Returns:
        uint8 of the same shape, codes 0..15. The sign bit is that of ``x``, for zero too; NaN gives
        code 0.
    """
    m = x.abs()
    code = (m > 0.25).to(torch.uint8)
    code += m >= 0.75
    code += m > 1.25
    code += m >= 1.75
    code += m > 2.5
    code += m >= 3.5
    code += m > 5.0
    code.add_(x.signbit(), alpha=E2M1_SIGN_BIT)
    return code.masked_fill_(x.isnan(), 0)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Value of uint8 codes 0..15 as fp32 of the same shape; code 8 is -0."""
    values = (*E2M1_VALUES, *(-v for v in E2M1_VALUES))
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def pack_e2m1(codes: Tensor, dim: int = -1) -> Tensor:
    """Packs uint8 codes in pairs along ``dim``, the even index in the low nibble.

    Args:
        codes: uint8, the size of ``dim`` even.
        dim: -1 (the last dimension) or 0.

    Returns:
        ``float4_e2m1fn_x2``, contiguous, ``dim`` half as long.
    """
    if dim == 0:
        packed = codes[0::2] | (codes[1::2] << 4)
    else:
        packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    # A uint8 view, as PyTorch has few float4_e2m1fn_x2 kernels.
    return packed.contiguous().view(FP4_DTYPE)


def unpack_e2m1(x_fp4: Tensor, dim: int = -1) -> Tensor:
    """Undoes `pack_e2m1`: uint8 codes 0..15, ``dim`` twice as long."""
    packed = x_fp4.view(torch.uint8)
    pairs = torch.stack((packed & 15, packed >> 4), dim=1 if dim == 0 else -1)
    if dim == 0:
        return pairs.reshape(CODES_PER_BYTE * packed.shape[0], *packed.shape[1:])
    return pairs.reshape(*packed.shape[:-1], CODES_PER_BYTE * packed.shape[-1])


def encode_e4m3(x: Tensor) -> Tensor:
    """Rounds to the nearest E4M3 value, ties to even; saturates at +-448; NaN becomes 0x7F.

    ``Tensor.to(float8_e4m3fn)`` alone turns what is beyond 464 into NaN.

    Args:
        x: fp32, any shape.

    Returns:
        ``float8_e4m3fn`` of the same shape.
    """
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(SCALE_DTYPE).view(torch.uint8)
    return codes.masked_fill_(x.isnan(), E4M3_NAN).view(SCALE_DTYPE)


def decode_e4m3(scales: Tensor) -> Tensor:
    """Value of ``float8_e4m3fn`` scales (or of their bytes as uint8) as fp32 of the same shape."""
    return scales.view(SCALE_DTYPE).to(torch.float32)


def rows_of(x: Tensor) -> Tensor:
    """``x`` (..., N) as fp32 (rows, N); a 1-D tensor is one row."""
    cols = x.shape[-1]
    return x.reshape(x.numel() // cols, cols).to(torch.float32)


def weight_values(w: Tensor) -> Tensor:
    """A weight as fp32, with its dimensions."""
    return w.to(torch.float32)


def amax(v: Tensor, granularity: str, inverse: Tensor | None = None) -> Tensor:
    """NaN-ignoring amax: (1,) for "tensor", (rows,) for "row"; 0 if empty.

    With ``inverse`` (rows,) that of rows times it.
    """
    if v.numel() == 0:
        return v.new_zeros(v.shape[0] if granularity == "row" else 1)
    if inverse is not None:  # of each row
        rows = amax(v, "row") * inverse
        return amax(rows[:, None], granularity)
    magnitude = torch.where(v.isnan(), constant(0.0, v), v.abs())
    return magnitude.amax(dim=1) if granularity == "row" else magnitude.amax().reshape(1)


def times(v: Tensor, factor: Tensor, inverse: Tensor | None = None) -> Tensor:
    """``v * factor``; with ``inverse``, an inv_rms, ``v * (factor * inverse)``.

    If that product is not a normal number, ``(v * inverse) * factor``.
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
    """S and gsa of an amax: ``gsa = A / divisor``; ``S = min(divisor / A, FLT_MAX)``, 1 for A = 0.

    S is not ``1 / gsa``: that differs in the last bit for about a quarter of all A.
    """
    s = usable_scale(torch.div(constant(divisor, a), a))
    return torch.where(a == 0, constant(1.0, s), s), gsa_from_amax(a, divisor)


def gsa_from_amax(a: Tensor, divisor: float = NVFP4_DIVISOR) -> Tensor:
    """``A / divisor`` of fp32, rounded once on every device."""
    return torch.div(a, constant(divisor, a))


def scale_from_gsa(gsa: Tensor) -> Tensor:
    """S of a given gsa: ``min(1 / gsa, FLT_MAX)``; 1 where gsa or the result is 0."""
    s = usable_scale(torch.div(constant(1.0, gsa), gsa))
    return torch.where(gsa == 0, constant(1.0, s), s)


def block_scales(b: Tensor, s: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """The stored E4M3 scale of each block and the factor that its elements are encoded with.

    ``te`` is the rule of TransformerEngine's reference quantizer, whose bits tests/data has;
    ``vllm`` that of vLLM, SGLang and FlashInfer with exact reciprocals for their approximate ones.
    ``te_flush`` is ``te``, with code 0 where the stored scale is 0, as ``vllm`` has it.
    Which operand is multiplied first is load-bearing: the two differ in some scale bytes.

    Args:
        b: fp32, amax of each block; NaN if the block has one.
        s: fp32, encoding scale, of a shape that broadcasts with ``b``.
        recipe: "te", "vllm" or "te_flush".

    Returns:
        ``float8_e4m3fn`` scales and fp32 factors, of the shape of ``b``.
    """
    one = constant(1.0, b)
    sixth = torch.div(one, constant(E2M1_MAX, b))
    scales = encode_e4m3(s * (b * sixth) if recipe == "vllm" else b * (s * sixth))
    decoded = decode_e4m3(scales)
    # Where s is zero and 1 / S infinite (S denormal) this is NaN; such a block's codes become 0.
    factor = torch.minimum(torch.div(one, decoded * torch.div(one, s)), constant(FP32_MAX, b))
    if recipe != "te":
        factor = torch.where(decoded == 0, constant(0.0, b), factor)
    return scales, factor


def block_amax(blocks: Tensor, tile_rows: int) -> Tensor:
    """Of each block (rows, groups), or of the tile that it belongs to; NaN if there is one."""
    b = blocks.abs().amax(dim=2)
    if tile_rows == 1:
        return b
    rows, groups = b.shape
    tiles = -(-rows // tile_rows)
    b = functional.pad(b, (0, 0, 0, tiles * tile_rows - rows))
    return b.reshape(tiles, tile_rows, groups).amax(dim=1).repeat_interleave(tile_rows, 0)[:rows]


def quantize_rows(
    v: Tensor, s: Tensor, recipe: str, tile_rows: int = 1, inverse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantizes fp32 rows with the encoding scale(s) S.

    Args:
        v: fp32 (rows, N). N up to the next multiple of 16 is taken as zeros.
        s: fp32 (1,) or (rows,).
        recipe: "te", "vllm" or "te_flush".
        tile_rows: rows that share a block scale: 1, or 16 for 16x16 blocks, where the last tile
            has the rows that there are and a tile's scale is repeated for each of its rows.
        inverse: fp32 (rows,), what rows are still to be multiplied with (`times`).

    Returns:
        uint8 codes 0..15 (rows, ceil(N / 16) * 16) and ``float8_e4m3fn`` scales
        (rows, ceil(N / 16)).
    """
    rows, cols = v.shape
    groups = -(-cols // NVFP4_BLOCK)
    v = functional.pad(v, (0, groups * NVFP4_BLOCK - cols))
    blocks = v.reshape(rows, groups, NVFP4_BLOCK)
    b = block_amax(blocks, tile_rows)
    if inverse is not None:
        b = b * inverse[:, None]
    scales, factor = block_scales(b, s[:, None], recipe)
    of_row = None if inverse is None else inverse[:, None, None]
    codes = encode_e2m1(times(blocks, factor[:, :, None], of_row))
    codes.masked_fill_(decode_e4m3(scales).isnan()[:, :, None], 0)
    return codes.reshape(rows, groups * NVFP4_BLOCK), scales


def encode(
    v: Tensor,
    s: Tensor,
    leading: tuple[int, ...],
    recipe: str,
    scale_layout: str,
    block: str = "1x16",
    dim: int = -1,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x_fp4 and x_sf of fp32 values with the encoding scale(s) S.

    Args:
        v: (rows, N); with ``dim=0`` (K, N).
        s: (1,) or (rows,).
        leading: dimensions of the results before the packed one; their product is ``rows``.
        recipe: "te", "vllm" or "te_flush".
        scale_layout: of x_sf; "linear" with ``dim=0``.
        block: "1x16", or "16x16": 16 neighbors in a row by 16 rows (at the edges the part there
            is) share a scale, which is stored for each of the 16.
        dim: the packed dimension. With 0 neighbors of K are in a byte.
        inverse: (rows,), what rows are still to be multiplied with (`times`).

    Returns:
        ``dim=-1``: (*leading, ceil(N / 16) * 8) and (*leading, ceil(N / 16)) or swizzled;
        ``dim=0``: (ceil(K / 16) * 8, N) and (ceil(K / 16), N).
    """
    codes, scales = quantize_rows(
        v.T if dim == 0 else v, s, recipe, 16 if block == "16x16" else 1, inverse
    )
    if dim == 0:
        return pack_e2m1(codes.T, dim=0), scales.T.contiguous()
    x_fp4 = pack_e2m1(codes).reshape(*leading, codes.shape[1] // 2)
    if scale_layout == "swizzled_128x4":
        return x_fp4, swizzle_128x4(scales)
    return x_fp4, scales.reshape(*leading, scales.shape[1])


def quantize_computed(
    v: Tensor,
    leading: tuple[int, ...],
    divisor: float,
    gsa_value: float | None,
    recipe: str,
    scale_layout: str,
    granularity: str = "tensor",
    block: str = "1x16",
    dim: int = -1,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf and gsa of fp32 values; the rest as in `encode`.

    Args:
        divisor: gsa is ``amax / divisor``.
        gsa_value: the gsa of the whole tensor, if it is given: nothing is reduced then, and gsa
            is (1,) with any granularity.
        granularity: "tensor" or "row": what has an amax.
    """
    if gsa_value is None:
        s, gsa = scales_from_amax(amax(v, granularity, inverse), divisor)
    else:
        gsa = torch.full((1,), gsa_value, dtype=torch.float32, device=v.device)
        s = scale_from_gsa(gsa)
    return (*encode(v, s, leading, recipe, scale_layout, block, dim, inverse), gsa)


def quantize_given(
    v: Tensor,
    leading: tuple[int, ...],
    gsa: Tensor,
    recipe: str,
    scale_layout: str,
    block: str = "1x16",
    dim: int = -1,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x_fp4 and x_sf of fp32 values with the gsa given, of one element or one for each row."""
    s = scale_from_gsa(gsa.reshape(-1))
    return encode(v, s, leading, recipe, scale_layout, block, dim, inverse)


def quantize_from_amax(
    v: Tensor,
    leading: tuple[int, ...],
    amax: Tensor,
    divisor: float,
    recipe: str,
    scale_layout: str,
    block: str = "1x16",
    dim: int = -1,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf and gsa of fp32 values that are part of a tensor, whose amax is given.

    The second half of a quantization with the amax of more than is at hand. A quotient of the amax
    (gsa, or a scale) is not enough: S is not a function of gsa.

    Args:
        amax: one element, or one for each row.
    """
    s, gsa = scales_from_amax(amax.reshape(-1), divisor)
    return (*encode(v, s, leading, recipe, scale_layout, block, dim, inverse), gsa)


def quantize_from_maxima(
    v: Tensor,
    leading: tuple[int, ...],
    amax: Tensor,
    divisor: float,
    recipe: str,
    scale_layout: str,
    inverse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `quantize_from_amax` with the largest of these maxima."""
    a = amax.amax()
    return quantize_from_amax(v, leading, a, divisor, recipe, scale_layout, inverse=inverse)


def amax_gsa(x: Tensor, divisor: float = NVFP4_DIVISOR) -> tuple[Tensor]:
    """``gsa = A / divisor`` (1,), where A is the amax of ``x``; NaNs are ignored."""
    return (scales_from_amax(amax(rows_of(x), "tensor"), divisor)[1],)


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
