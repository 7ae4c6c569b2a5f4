"""Recipes for training and rotation once more, without PyTorch: numpy's fp32 and exact numbers.

Written from the formulas alone. Rounding compares with midpoints, which fp64 holds exactly;
stochastic rounding adds up fractions; Philox is in Python's integers. Each returns codes
(rows, N up to a block), scale bytes (rows, blocks) and, for NVFP4, gsa.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from .oracle import E2M1_VALUES, E4M3_VALUES, FLT_MAX, amax_of, encoding_scale_given

F32 = np.float32
Array = np.ndarray
Pair = tuple[int, int]

_E2M1 = np.array([float(v) for v in E2M1_VALUES])
_E4M3 = np.array([float(v) for v in E4M3_VALUES])
_SIGNS = "+++-+------+-+--"
WORD = 0xFFFFFFFF


def _nearest(values: Array, x: Array) -> Array:
    """Index of the nearest of ``values`` to x >= 0, the even one of two; the last beyond it."""
    middle = (values[:-1] + values[1:]) / 2  # exact
    low = np.searchsorted(middle, x.astype(np.float64), side="left")
    tie = (low < len(middle)) & (middle[np.minimum(low, len(middle) - 1)] == x)
    return low + (tie & (low % 2 == 1))


def e2m1(x: Array) -> Array:
    """Codes; 0 for NaN, as of an infinity times a factor of 0."""
    return np.where(np.isnan(x), 0, _nearest(_E2M1, np.abs(x)) + 8 * np.signbit(x))


def e4m3(x: F32) -> int:
    """The byte of a number that is not negative."""
    return 127 if np.isnan(x) else int(_nearest(_E4M3, np.array(x)))


def rounded(x: Array, dtype: str) -> Array:
    """To nearest, ties to even, of fp32: "bfloat16" has 8 bits, "float16" 11."""
    if dtype == "float32":
        return x
    bits, least, top = {"bfloat16": (8, -126, 3.3895313892515355e38), "float16": (11, -14, 65504)}[
        dtype
    ]
    wide = x.astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, least)
    unit = np.ldexp(1.0, exponent - (bits - 1))
    with np.errstate(all="ignore"):
        near = np.rint(wide / unit) * unit
    near = np.where(np.abs(near) > top, np.copysign(np.inf, wide), near)
    return np.where(np.isfinite(wide), near, wide).astype(F32)


def hadamard(x: Array, rotate: str, signs: Array | None, dtype: str) -> Array:
    """Each sum of a butterfly in fp32, for every pair in turn."""
    if rotate == "none":
        return x
    n = 16 if rotate == "te" else int(rotate)
    if signs is None:
        signs = np.array([1 if s == "+" else -1 for s in _SIGNS]) if rotate == "te" else np.ones(n)
    factor = {16: 0x3E800000, 32: 0x3E3504F3, 64: 0x3E000000, 128: 0x3DB504F3, 256: 0x3D800000}[n]
    c = np.array(factor, np.uint32).view(F32)
    with np.errstate(all="ignore"):
        t = x.reshape(-1, n) * (signs.astype(F32) * c)
        h = 1
        while h < n:
            for i in range(n):
                if i & h == 0:
                    a, b = t[:, i].copy(), t[:, i + h].copy()
                    t[:, i], t[:, i + h] = a + b, a - b
            h *= 2
    y = t.reshape(x.shape)
    return rounded(y, dtype) if rotate == "te" else y


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ k[0], q & WORD, (p >> 32) ^ c[3] ^ k[1], p & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def draws(state: Pair, rows: int, blocks: int, columnwise: bool = False) -> Array:
    """A byte for each element: (rows, blocks * 16)."""
    seed, offset = state[0] & (2**64 - 1), state[1] & (2**63 - 1)
    made = np.zeros((rows, blocks * 16), np.uint8)
    for row in range(rows):
        for block in range(blocks):
            counter = [block, row, offset & WORD, offset >> 32 | (columnwise << 31)]
            words = philox(counter, [seed & WORD, seed >> 32])
            made[row, 16 * block : 16 * block + 16] = [
                words[i // 4] >> 8 * (i % 4) & 0xFF for i in range(16)
            ]
    return made


def _to_f32(x: Fraction) -> Fraction:
    """The nearest fp32 value of what is not near fp32's ends."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= x < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(x / unit) * unit  # Python rounds halves to even


def stochastic(v: Array, r: Array) -> Array:
    """Codes of values with a byte each; 0 for NaN."""
    codes = np.zeros(v.shape, np.int64)
    for at in np.ndindex(*v.shape):
        a = abs(float(v[at]))
        if np.isnan(a):
            continue
        step = Fraction(1, 2) if a < 2 else 1 if a < 4 else 2
        t = Fraction(8) if a > 8 else _to_f32(Fraction(a) + Fraction(int(r[at]), 256) * step)
        codes[at] = max(i for i, value in enumerate(E2M1_VALUES) if value <= t)
    return codes + 8 * (np.signbit(v) & ~np.isnan(v))


def _encoding(s: F32, S: F32) -> F32:
    return min(F32(1) / (s * (F32(1) / S)), FLT_MAX)


def _amax_with_nan(x: Array) -> F32:
    return F32(np.nan) if np.isnan(x).any() else amax_of(x)


def _sum_of_rows(each: list[F32]) -> F32:
    each = each + [F32(0)] * (16 - len(each))
    for half in (8, 4, 2, 1):
        each = [each[i] + each[i + half] for i in range(half)]
    return each[0]


def _scaled(tile: Array, s: int, S: F32, recipe: str) -> Array:
    stored = F32(_E4M3[s])
    flushes = recipe != "te" and stored == 0
    return tile * (F32(0) if flushes else _encoding(stored, S))


def _candidate(
    tile: Array, s: int, S: F32, a: F32, select: str, full: F32, recipe: str
) -> tuple[Array, F32]:
    stored = F32(_E4M3[s])
    codes = e2m1(_scaled(tile, s, S, recipe))
    product = (np.copysign(_E2M1[codes & 7], tile)).astype(F32) * stored
    d = product - tile * S if select.endswith("_fast") else (product * a) / full - tile
    if "abs_max" in select:
        return codes, _amax_with_nan(d)
    rows = []
    for row in d:
        total = F32(0)
        for e in row:
            total = total + (e * e if "mse" in select else abs(e))
        rows.append(total)
    return codes, _sum_of_rows(rows) if len(rows) > 1 else rows[0]


def _tile(
    tile: Array, S: F32, a: F32, r: Array | None, select: str, top: int, recipe: str
) -> tuple[Array, int]:
    """Codes and the scale byte of blocks that share a scale: (rows, 16)."""
    b = _amax_with_nan(tile)
    if np.isnan(b):
        return np.zeros(tile.shape, np.int64), 127
    if select == "none":
        sixth = F32(1) / F32(6)
        s = e4m3(S * (b * sixth) if recipe == "vllm" else b * (S * sixth))
        v = _scaled(tile, s, S, recipe)
        return e2m1(v) if r is None else stochastic(v, r), s
    top_code = F32(4) if select == "static_4" else F32(6)
    base = (b / top_code) * S
    full = F32(float(top_code) * top)
    s6 = e4m3(base)
    if select.startswith("static"):
        v = _scaled(tile, s6, S, recipe)
        return e2m1(v) if r is None else stochastic(v, r), s6
    codes, error = _candidate(tile, s6, S, a, select, full, recipe)
    s4 = e4m3(base * F32(1.5))
    codes4, error4 = _candidate(tile, s4, S, a, select, full, recipe)
    return (codes4, s4) if error4 < error else (codes, s6)


def nvfp4(
    v: Array,
    a: Array,
    *,
    tile_rows: int = 1,
    r: Array | None = None,
    select: str = "none",
    e4m3_max: int = 448,
    gsa: Array | None = None,
    recipe: str = "te",
) -> tuple[Array, Array, Array]:
    """NVFP4 of fp32 ``v`` (rows, N), rotated already, with the amax ``a``: (1,) or (rows,).

    With a ``gsa``, of as many elements, ``a`` is not looked at.
    """
    rows, cols = v.shape
    blocks = -(-cols // 16)
    x = np.zeros((rows, 16 * blocks), F32)
    x[:, :cols] = v
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((rows, blocks), np.uint8)
    divisor = F32((4 if select == "static_4" else 6) * e4m3_max)
    with np.errstate(all="ignore"):
        a = a if gsa is None else gsa * divisor
        for first in range(0, rows, tile_rows):
            place = first if len(a) == rows and len(a) > 1 else 0
            own = a[place]
            if gsa is None:
                S = min(divisor / own, FLT_MAX)
                S = F32(1) if own == 0 or S == 0 else S
            else:
                S = encoding_scale_given(gsa[place])
            for k in range(blocks):
                at = slice(first, first + tile_rows), slice(16 * k, 16 * k + 16)
                codes[at], scales[at[0], k] = _tile(
                    x[at], S, own, None if r is None else r[at], select, e4m3_max, recipe
                )
        return codes, scales, a / divisor if gsa is None else gsa


FLUSHING = ("gptoss_up", "gptoss_down", "static_6", "static_4")


def _mxfp4_exponent(b: F32, scaling: str) -> int:
    """From the value of b, by logarithms to base 2 of exact numbers."""
    if not np.isfinite(b):
        return 255
    exact = Fraction(float(b))

    def field(x: Fraction) -> int:
        """The exponent field that an fp32 number has, of which 0 is a subnormal's."""
        if x < Fraction(2) ** -126:
            return 0
        n = math.floor(math.log2(x.numerator) - math.log2(x.denominator))
        while Fraction(2) ** n > x:
            n -= 1
        while Fraction(2) ** (n + 1) <= x:
            n += 1
        return n + 127

    def is_power(x: Fraction) -> bool:
        return x >= Fraction(2) ** -126 and x == Fraction(2) ** (field(x) - 127)

    if scaling in ("rceil", *FLUSHING):
        g = Fraction(float(b / F32(4 if scaling in ("gptoss_down", "static_4") else 6)))
        if scaling == "gptoss_down":
            return field(g)
        if g < Fraction(2) ** -126:
            return int(g > (Fraction(2) ** -127 if scaling == "rceil" else 0))
        return field(g) + (not is_power(g))
    e = field(exact)
    if scaling == "even":
        # A quarter of the binade below, or of the subnormals' distance.
        e = field(exact + Fraction(2) ** (max(e, 1) - 127) / 4)
    if scaling == "ceil" and exact > 0:
        e += not is_power(exact)
    return max(e - 2, 0)


def mxfp4(v: Array, scaling: str, r: Array | None = None) -> tuple[Array, Array]:
    """MXFP4 of fp32 ``v`` (rows, N), rotated already."""
    rows, cols = v.shape
    blocks = -(-cols // 32)
    x = np.zeros((rows, 32 * blocks), F32)
    x[:, :cols] = v
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((rows, blocks), np.uint8)
    for row in range(rows):
        for k in range(blocks):
            at = slice(row, row + 1), slice(32 * k, 32 * k + 32)
            e = _mxfp4_exponent(_amax_with_nan(x[at]), scaling)
            scales[row, k] = e
            if e == 255:
                continue
            with np.errstate(all="ignore"):
                scaled = x[at].astype(np.float64) * 2.0 ** (127 - e)
            codes[at] = e2m1(scaled) if r is None else stochastic(scaled, r[at])
            if e == 0 and scaling in FLUSHING:
                codes[at] = 8 * np.signbit(x[at]) if scaling.startswith("gptoss") else 0
    return codes, scales
