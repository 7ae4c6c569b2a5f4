"""Recipes for training and rotation: Hadamard, stochastic rounding, 4over6, MXFP4.

Notation as in `jitquant.numerics.nvfp4`. Formulas and sources are in ``docs/numerics.md``; the
peers' bits for most of them in ``tests/data``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import (
    BOTH_PARTIALS,
    E2M1_MAX,
    E2M1_SIGN_BIT,
    E8M0_DTYPE,
    FP32_MAX,
    MAX_PARTIALS,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    TE_SIGNS,
)
from jitquant.numerics.fp8 import decode_e8m0, inverse_power_of_two
from jitquant.numerics.layout import stored_scales, unswizzle_128x4
from jitquant.numerics.nvfp4 import (
    amax,
    block_amax,
    block_scales,
    constant,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    rows_of,
    scale_from_gsa,
    scales_from_amax,
    unpack_e2m1,
)

_WORD = 0xFFFFFFFF

MXFP4_FLUSHING = ("gptoss_up", "gptoss_down", "static_6", "static_4")
"""Scalings that turn a block whose byte is 0 into zeros, the last two without signs."""


def hadamard_size(rotate: str) -> int:
    """Neighbors that a rotation mixes: 0 for "none", 16 for "te"."""
    return {"none": 0, "te": 16}[rotate] if rotate in ("none", "te") else int(rotate)


def hadamard(v: Tensor, rotate: str, signs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``v * diag(signs) * H / sqrt(n)`` of groups of n neighbors, H in Sylvester's order.

    Butterflies at distance 1, 2, 4, ... n / 2, each a sum and a difference in fp32.

    Args:
        v: fp32 (rows, N), N a multiple of n.
        rotate: "none", "16" to "256", or "te": 16 wide, TransformerEngine's signs unless others are
            given, and one rounding to ``dtype`` at the end.
        signs: +1 and -1 (n,), applied before H; None: all are +1, or TransformerEngine's.
        dtype: of the tensor that ``v`` was.

    Returns:
        fp32 (rows, N).
    """
    n = hadamard_size(rotate)
    if n == 0:
        return v
    if signs is None and rotate == "te":
        signs = torch.tensor(TE_SIGNS, device=v.device)
    factor = constant(1 / math.sqrt(n), v)
    if signs is not None:
        factor = signs.to(torch.float32) * factor
    groups = v.reshape(v.shape[0], v.shape[1] // n, n) * factor
    distance = 1
    while distance < n:
        pairs = groups.reshape(*groups.shape[:2], n // (2 * distance), 2, distance)
        a, b = pairs.unbind(dim=3)
        groups = torch.stack((a + b, a - b), dim=3).reshape(groups.shape)
        distance *= 2
    y = groups.reshape(v.shape)
    return y.to(dtype).to(torch.float32) if rotate == "te" else y


def rope(v: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary position embedding: ``a cos - b sin`` and ``b cos + a sin`` of pairs (a, b).

    Args:
        v: fp32 (rows, N).
        cos, sin: fp32 (P, R / 2), P a divisor of the rows: each serves rows / P that follow each
            other. The first R columns are pairs.
        interleaved: pairs are neighbors; False: column i and column i + R / 2.
    """
    rows, half = v.shape[0], cos.shape[1]
    each = rows // cos.shape[0]
    cos, sin = (t.repeat_interleave(each, 0) for t in (cos, sin))
    first = v[:, : 2 * half]
    if interleaved:
        a, b = first[:, 0::2], first[:, 1::2]
    else:
        a, b = first[:, :half], first[:, half:]
    turned = (a * cos + -(b * sin), b * cos + a * sin)
    pairs = torch.stack(turned, 2).flatten(1) if interleaved else torch.cat(turned, 1)
    return torch.cat((pairs, v[:, 2 * half :]), 1)


def rotated(
    x: Tensor,
    rotate: str,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> Tensor:
    """fp32 rows after `rope`, if there are tables, and then `hadamard`.

    Args:
        x: (..., N).
        rotate, signs: of the transform.
        cos, sin, interleaved: of `rope`; None: without it.
    """
    v = rows_of(x)
    if cos is not None and sin is not None:
        v = rope(v, cos, sin, interleaved)
    return hadamard(v, rotate, signs, x.dtype)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words a counter, as int64 (..., 4).

    Args:
        counter: four int64 tensors of 32 bits each that broadcast with each other.
        key: two, of one element.
    """
    zero = counter[0] * 0 + counter[1] * 0 + counter[2] * 0 + counter[3] * 0
    c0, c1, c2, c3 = (c + zero for c in counter)
    k0, k1 = key
    for _ in range(10):
        p, q = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (q >> 32 & _WORD) ^ c1 ^ k0,
            q & _WORD,
            (p >> 32 & _WORD) ^ c3 ^ k1,
            p & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def random_bytes(rng_state: Tensor, rows: int, blocks: int, columnwise: bool = False) -> Tensor:
    """uint8 (rows, blocks * 16): the byte that each element of a tensor is rounded with.

    The 16 bytes of block k of row r are Philox4x32-10 of the counter
    ``(k, r, offset mod 2^32, offset / 2^32 + columnwise * 2^31)`` and the key seed, lowest bytes
    first. So they depend only on an element's position.

    Args:
        rng_state: int64 (2,): seed and offset; the offset is not negative.
        rows: of the matrix that is quantized.
        blocks: of 16 neighbors in a row.
        columnwise: whether it is the transpose.
    """
    device = rng_state.device
    seed, offset = rng_state.to(torch.int64).unbind()
    high = (offset >> 32 & 0x7FFFFFFF) | (0x80000000 if columnwise else 0)
    block = torch.arange(blocks, device=device)[None, :]
    row = torch.arange(rows, device=device)[:, None]
    words = philox((block, row, offset & _WORD, high), (seed & _WORD, seed >> 32 & _WORD))
    shifts = torch.tensor([0, 8, 16, 24], device=device)
    return (words[..., None] >> shifts & 0xFF).to(torch.uint8).reshape(rows, blocks * 16)


def stochastic_e2m1(v: Tensor, r: Tensor) -> Tensor:
    """Rounds to a neighboring E2M1 code with the random bytes ``r``: uint8 codes 0..15.

    ``t = |v| + r / 256 * step``, rounded once to fp32; the code is that of the largest magnitude up
    to t. TransformerEngine's rule for architectures without ``cvt.rs``. NaN gives code 0.
    """
    a = v.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0)).double()
    # The sum is exact in fp64 but for an |v| that is too small to change the code.
    t = (a.double() + r.double() / 256 * step).to(torch.float32)
    code = torch.zeros_like(a, dtype=torch.uint8)
    for value in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        code += t >= value
    code.add_(v.signbit(), alpha=E2M1_SIGN_BIT)
    return code.masked_fill_(v.isnan(), 0)


def _tile_sum(e: Tensor) -> Tensor:
    """Of 16 rows: ``e[r] += e[r + 8]``, then + 4, + 2, + 1; for each row of a tile."""
    rows, groups = e.shape
    tiles = -(-rows // 16)
    e = functional.pad(e, (0, 0, 0, tiles * 16 - rows)).reshape(tiles, 16, groups)
    for half in (8, 4, 2, 1):
        e = e[:, :half] + e[:, half : 2 * half]
    return e.expand(tiles, 16, groups).reshape(tiles * 16, groups)[:rows]


def _scaled(x: Tensor, s: Tensor, S: Tensor, recipe: str) -> Tensor:
    """Blocks (rows, groups, 16) with the stored scales ``s`` before they are rounded to E2M1."""
    one = constant(1.0, x)
    enc = torch.minimum(torch.div(one, s * torch.div(one, S)), constant(FP32_MAX, x))
    if recipe != "te":
        enc = torch.where(s == 0, constant(0.0, x), enc)
    return x * enc[:, :, None]


def _candidate(
    x: Tensor,
    s: Tensor,
    S: Tensor,
    a: Tensor,
    denominator: Tensor,
    select: str,
    tile_rows: int,
    recipe: str = "te",
) -> tuple[Tensor, Tensor]:
    """Codes (rows, groups, 16) of blocks with the stored scales ``s``, and their errors."""
    codes = encode_e2m1(_scaled(x, s, S, recipe))
    product = decode_e2m1(codes) * s[:, :, None]
    if select.endswith("_fast"):
        d = product - x * S[:, :, None]
    else:
        d = torch.div(product * a[:, :, None], denominator) - x
    if "abs_max" in select:
        error = d.abs().amax(dim=2)
        if tile_rows > 1:
            error = block_amax(error[:, :, None], tile_rows)
        return codes, error
    terms = d * d if "mse" in select else d.abs()
    error = terms[:, :, 0]
    for i in range(1, NVFP4_BLOCK):
        error = error + terms[:, :, i]
    return codes, _tile_sum(error) if tile_rows > 1 else error


def encoding_scale(a: Tensor, divisor: float, from_gsa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """S, A and gsa of an amax ``a``, or, with ``from_gsa``, of a gsa, whose A is gsa * divisor."""
    if from_gsa:
        return scale_from_gsa(a), a * constant(divisor, a), a
    S, gsa = scales_from_amax(a, divisor)
    return S, a, gsa


def four_over_six(
    x: Tensor,
    a: Tensor,
    select: str,
    e4m3_max: int,
    tile_rows: int = 1,
    from_gsa: bool = False,
    recipe: str = "te",
    r: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scale that makes a block's amax 6, or that which makes it 4, by the smaller error.

    Args:
        x: fp32 (rows, groups, 16).
        a: amax, or gsa with ``from_gsa``: fp32 (1,) or (rows,).
        select: "4over6_mae" or "4over6_mse" (TransformerEngine), with "_fast" its errors in the
            domain of the scaled values; "4over6_abs_max", "static_6", "static_4" (fouroversix).
        e4m3_max: largest scale: 448 or 256.
        tile_rows: 16: one choice for 16 rows.
        from_gsa: see `encoding_scale`.
        recipe: "te_flush": code 0 in blocks whose scale is 0.
        r: random bytes of the shape of ``x`` for the static rules, or None.

    Returns:
        uint8 codes (rows, groups, 16) and E4M3 scales (rows, groups).
    """
    full = 4.0 if select == "static_4" else E2M1_MAX
    S, a, _ = encoding_scale(a, full * e4m3_max, from_gsa)
    S, a = S[:, None], a[:, None]
    base = torch.div(block_amax(x, tile_rows), constant(full, x)) * S
    s6 = encode_e4m3(base)
    if select.startswith("static"):
        scaled = _scaled(x, decode_e4m3(s6), S, recipe)
        codes = encode_e2m1(scaled) if r is None else stochastic_e2m1(scaled, r)
    else:
        how = (S, a, constant(full * e4m3_max, x), select, tile_rows, recipe)
        codes, error = _candidate(x, decode_e4m3(s6), *how)
        s4 = encode_e4m3(base * 1.5)
        codes4, error4 = _candidate(x, decode_e4m3(s4), *how)
        four = error4 < error
        codes = torch.where(four[:, :, None], codes4, codes)
        s6 = torch.where(four, s4.view(torch.uint8), s6.view(torch.uint8)).view(s6.dtype)
    return codes.masked_fill_(decode_e4m3(s6).isnan()[:, :, None], 0), s6


def divisor_of(select: str, e4m3_max: int) -> float:
    """``gsa = A / divisor``."""
    return (4.0 if select == "static_4" else E2M1_MAX) * e4m3_max


def _encode_nvfp4(
    v: Tensor,
    a: Tensor,
    r: Tensor | None,
    select: str,
    e4m3_max: int,
    tile_rows: int,
    from_gsa: bool = False,
    recipe: str = "te",
) -> tuple[Tensor, Tensor]:
    """Codes (rows, N up to 16) and scales (rows, N / 16) of fp32 rows."""
    rows, cols = v.shape
    groups = -(-cols // NVFP4_BLOCK)
    x = functional.pad(v, (0, groups * NVFP4_BLOCK - cols)).reshape(rows, groups, NVFP4_BLOCK)
    r = None if r is None else r.reshape(x.shape)
    if select != "none":
        codes, scales = four_over_six(x, a, select, e4m3_max, tile_rows, from_gsa, recipe, r)
    else:
        S = encoding_scale(a, E2M1_MAX * e4m3_max, from_gsa)[0]
        scales, factor = block_scales(block_amax(x, tile_rows), S[:, None], recipe)
        scaled = x * factor[:, :, None]
        codes = encode_e2m1(scaled) if r is None else stochastic_e2m1(scaled, r)
        codes.masked_fill_(decode_e4m3(scales).isnan()[:, :, None], 0)
    return codes.reshape(rows, groups * NVFP4_BLOCK), scales


def _bytes_for(
    rounding: str,
    rng_state: Tensor | None,
    given: Tensor | None,
    v: Tensor,
    block: int,
    columnwise: bool = False,
) -> Tensor | None:
    rows, cols = v.shape
    padded = -(-cols // block) * block
    if rounding == "nearest":
        return None
    if given is not None:
        return functional.pad(given.reshape(rows, cols), (0, padded - cols))
    assert rng_state is not None
    return random_bytes(rng_state, rows, padded // NVFP4_BLOCK, columnwise)


def maxima(a: Tensor) -> Tensor:
    """An amax as the largest of as many maxima as a kernel can have: (MAX_PARTIALS,)."""
    return functional.pad(a, (0, MAX_PARTIALS - 1))


def rotated_amax(
    x: Tensor,
    *,
    rotate: str = "none",
    signs: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    granularity: str = "tensor",
) -> tuple[Tensor]:
    """The amax of ``x`` after `rotated`, NaN aside: (MAX_PARTIALS,) maxima, or (rows,)."""
    a = amax(rotated(x, rotate, signs, cos, sin, interleaved), granularity)
    return (a if granularity == "row" else maxima(a),)


def quantize_nvfp4_recipe(
    x: Tensor,
    amax: Tensor,
    *,
    granularity: str = "tensor",
    block: str = "1x16",
    rotate: str = "none",
    signs: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    select: str = "none",
    e4m3_max: int = 448,
    rounding: str = "nearest",
    rng_state: Tensor | None = None,
    random_bytes: Tensor | None = None,
    scale_layout: str = "linear",
    from_gsa: bool = False,
    recipe: str = "te",
) -> tuple[Tensor, Tensor, Tensor]:
    """x_fp4, x_sf and gsa of ``x`` (..., N) by a recipe for training or rotation.

    Args:
        x: (..., N).
        amax: of what is quantized: maxima of the tensor, or (rows,) with granularity "row".
        granularity: "tensor" or "row".
        block: "1x16" or "16x16".
        rotate, signs, cos, sin, interleaved: see `rotated`.
        select: "none" (the recipe's scale), or see `four_over_six`.
        e4m3_max: largest scale.
        rounding: "nearest", or "stochastic" with ``rng_state`` or ``random_bytes``.
        rng_state: see `random_bytes`.
        random_bytes: uint8 of the shape of ``x``.
        scale_layout: of x_sf.
        from_gsa: ``amax`` is a given gsa, (1,) or (rows,); see `encoding_scale`.
        recipe: "te", "vllm" or "te_flush", see `block_scales`; with a selection not "vllm".
    """
    a = amax.reshape(-1) if granularity == "row" or from_gsa else amax.amax().reshape(1)
    v = rotated(x, rotate, signs, cos, sin, interleaved)
    r = _bytes_for(rounding, rng_state, random_bytes, v, NVFP4_BLOCK)
    tile_rows = 16 if block == "16x16" else 1
    codes, scales = _encode_nvfp4(v, a, r, select, e4m3_max, tile_rows, from_gsa, recipe)
    leading = tuple(x.shape[:-1])
    return (
        pack_e2m1(codes).reshape(*leading, codes.shape[1] // 2),
        stored_scales(scales, leading, scale_layout),
        encoding_scale(a, divisor_of(select, e4m3_max), from_gsa)[2].clone(),
    )


def nvfp4_both_amax(
    x: Tensor, *, rotate: str = "none", signs: Tensor | None = None
) -> tuple[Tensor]:
    """(2, BOTH_PARTIALS): maxima of ``x`` (M, K), and of its transpose after `hadamard`."""
    v = hadamard(rows_of(x.T), rotate, signs, x.dtype)
    pair = torch.stack((amax(rows_of(x), "tensor"), amax(v, "tensor")))
    return (functional.pad(pair, (0, BOTH_PARTIALS - 1)),)


def quantize_nvfp4_both(
    x: Tensor,
    amax: Tensor,
    *,
    block: str = "1x16",
    rotate: str = "none",
    signs: Tensor | None = None,
    select: str = "none",
    e4m3_max: int = 448,
    rounding: str = "nearest",
    rng_state: Tensor | None = None,
    scale_layout: str = "linear",
    random_bytes: Tensor | None = None,
    random_bytes_t: Tensor | None = None,
    from_gsa_t: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_fp4, x_sf, gsa of ``x`` (M, K), and of its transpose, which alone is rotated.

    With 16x16 blocks the second three have the codes and scales of the first, transposed. Each of
    the two has its own random bytes: drawn, or given as ``random_bytes`` (M, K) and
    ``random_bytes_t`` (K, M). With ``from_gsa_t``, a given gsa, ``amax`` is one too, of ``x``; with
    16x16 blocks it is that of both.
    """
    rows, cols = x.shape
    tile_rows = 16 if block == "16x16" else 1
    from_gsa = from_gsa_t is not None
    results: list[Tensor] = []
    for t in range(2):
        if from_gsa_t is not None:
            a = (from_gsa_t if t and tile_rows == 1 else amax).reshape(1)
        else:
            a = amax[t].amax().reshape(1)
        v = rows_of(x.T if t else x)
        if t:
            v = hadamard(v, rotate, signs, x.dtype)
        given = random_bytes_t if t else random_bytes
        r = _bytes_for(rounding, rng_state, given, v, NVFP4_BLOCK, bool(t))
        if t and tile_rows > 1:
            # The transposed tiles, because the choice of a tile depends on the rows of x.
            groups_t = -(-rows // NVFP4_BLOCK)
            padded = functional.pad(rows_of(x), (0, 0, 0, groups_t * NVFP4_BLOCK - rows))
            codes, scales = _encode_nvfp4(padded, a, None, select, e4m3_max, tile_rows, from_gsa)
            tiles = scales.view(torch.uint8)[::NVFP4_BLOCK].T.repeat_interleave(NVFP4_BLOCK, 0)
            codes, scales = codes.T[:cols], tiles[:cols].contiguous().view(scales.dtype)
        else:
            codes, scales = _encode_nvfp4(v, a, r, select, e4m3_max, tile_rows, from_gsa)
        results += [
            pack_e2m1(codes),
            stored_scales(scales, (v.shape[0],), scale_layout),
            encoding_scale(a, divisor_of(select, e4m3_max), from_gsa)[2].clone(),
        ]
    return tuple(results)  # type: ignore[return-value]


def mxfp4_exponent(b: Tensor, scaling: str) -> Tensor:
    """The E8M0 byte of blocks whose amax is ``b``, int32; 255 for infinity and NaN.

    Args:
        b: fp32, not negative.
        scaling: "floor" (OCP), "ceil", "even" (torchao), "rceil" (torchao, cuBLAS), "gptoss_up",
            "gptoss_down", "static_6", "static_4" (fouroversix).
    """
    bits = b.view(torch.int32)
    if scaling in ("rceil", *MXFP4_FLUSHING):
        full = 4.0 if scaling in ("gptoss_down", "static_4") else E2M1_MAX
        g = torch.div(b, constant(full, b)).view(torch.int32)
        e, m = g >> 23, g & 0x7FFFFF
        if scaling == "rceil":
            e = e + torch.where(e == 0, m > 0x400000, m > 0)
        elif scaling != "gptoss_down":
            e = e + (m > 0)
    else:
        if scaling == "even":
            bits = bits + (1 << 21)
        e = (bits >> 23) - 2
        if scaling == "ceil":
            e = e + ((bits & 0x7FFFFF) > 0)
        e = e.clamp(min=0)
    return torch.where(b.isfinite(), e, 255).to(torch.int32)


def quantize_mxfp4(
    x: Tensor,
    *,
    scaling: str = "rceil",
    rotate: str = "none",
    signs: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    rounding: str = "nearest",
    rng_state: Tensor | None = None,
    random_bytes: Tensor | None = None,
    scale_layout: str = "linear",
) -> tuple[Tensor, Tensor]:
    """x_fp4 (..., ceil(N / 32) * 16) and E8M0 x_sf (..., ceil(N / 32)) of ``x`` (..., N).

    Args:
        x: (..., N); N up to the next multiple of 32 is taken as zeros.
        scaling: see `mxfp4_exponent`.
        rotate, signs, cos, sin, interleaved, rounding, rng_state, random_bytes, scale_layout: as in
            `quantize_nvfp4_recipe`.
    """
    v = rotated(x, rotate, signs, cos, sin, interleaved)
    rows, cols = v.shape
    groups = -(-cols // MXFP4_BLOCK)
    r = _bytes_for(rounding, rng_state, random_bytes, v, MXFP4_BLOCK)
    blocks = functional.pad(v, (0, groups * MXFP4_BLOCK - cols)).reshape(rows, groups, MXFP4_BLOCK)
    e = mxfp4_exponent(blocks.abs().amax(dim=2), scaling)
    scaled = blocks * inverse_power_of_two(e)[:, :, None]
    codes = encode_e2m1(scaled) if r is None else stochastic_e2m1(scaled, r.reshape(blocks.shape))
    if scaling in MXFP4_FLUSHING:
        kept = E2M1_SIGN_BIT if scaling.startswith("gptoss") else 0
        codes = torch.where((e == 0)[:, :, None], codes & kept, codes)
    codes.masked_fill_((e == 255)[:, :, None], 0)
    scales = e.to(torch.uint8).view(E8M0_DTYPE)
    leading = tuple(x.shape[:-1])
    packed = pack_e2m1(codes.reshape(rows, groups * MXFP4_BLOCK))
    return packed.reshape(*leading, groups * 16), stored_scales(scales, leading, scale_layout)


def dequantize_mxfp4(
    x_fp4: Tensor,
    x_sf: Tensor,
    *,
    cols: int | None = None,
    scale_layout: str = "linear",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``e2m1 * 2^(e - 127)``, rounded once to ``dtype``.

    Args:
        x_fp4: (..., P), P a multiple of 16.
        x_sf: E8M0 (..., P / 16), or swizzled.
        cols: logical size of the last dimension; default 2 * P.
        scale_layout: of x_sf.
        dtype: of the result; default bfloat16.
    """
    codes = unpack_e2m1(x_fp4)
    size = codes.shape[-1]
    groups = size // MXFP4_BLOCK
    rows = codes.numel() // size
    values = decode_e2m1(codes.reshape(rows, groups, MXFP4_BLOCK))
    if scale_layout == "swizzled_128x4":
        x_sf = unswizzle_128x4(x_sf, rows, groups)
    out = (values * decode_e8m0(x_sf).reshape(rows, groups, 1)).reshape(codes.shape)
    return (out.to(torch.bfloat16 if dtype is None else dtype)[..., :cols].contiguous(),)
