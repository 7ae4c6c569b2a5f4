"""NVFP4 once more, by other means: scalars of numpy.float32 and exact rationals, no PyTorch.

Slow and literal. Rounding to a format is a search for the nearest of its values among exact
fractions, so nothing here shares a formula, let alone code, with ``jitquant.reference``.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max

E2M1_VALUES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
# E4M3 from its definition: exponent bias 7, subnormals at exponent 0; byte 127 is NaN.
E4M3_VALUES = [
    Fraction(code & 7, 8) * Fraction(1, 64)
    if code >> 3 == 0
    else (1 + Fraction(code & 7, 8)) * Fraction(2) ** ((code >> 3) - 7)
    for code in range(127)
]


def nearest(values: list[Fraction], x: float) -> int:
    """Index of the value nearest to ``x`` >= 0, the even index of two; the last one beyond it."""
    if math.isinf(x):
        return len(values) - 1
    exact = Fraction(x)
    above = bisect.bisect_left(values, exact)
    if above == len(values):
        return len(values) - 1
    if above == 0 or values[above] == exact:
        return above
    below = above - 1
    low, high = exact - values[below], values[above] - exact
    if low == high:
        return below if below % 2 == 0 else above
    return below if low < high else above


def e2m1(x: np.float32) -> int:
    sign = 8 if np.signbit(x) else 0
    return sign | nearest(E2M1_VALUES, abs(float(x)))


def e4m3(x: np.float32) -> int:
    if np.isnan(x):
        return 127
    return (128 if np.signbit(x) else 0) | nearest(E4M3_VALUES, abs(float(x)))


def e4m3_value(code: int) -> np.float32:
    if code & 127 == 127:
        return F32(np.nan)
    value = F32(float(E4M3_VALUES[code & 127]))
    return -value if code & 128 else value


def amax_of(values: np.ndarray) -> np.float32:
    """Largest magnitude that is no NaN."""
    return F32(max((abs(float(v)) for v in values.ravel() if not np.isnan(v)), default=0.0))


def encoding_scale(a: np.float32, divisor: float) -> np.float32:
    with np.errstate(all="ignore"):
        s = F32(divisor) / a
    s = min(s, FLT_MAX)
    return F32(1) if a == 0 or s == 0 else s


def encoding_scale_given(gsa: np.float32) -> np.float32:
    if np.isnan(gsa):
        return gsa
    with np.errstate(all="ignore"):
        s = min(F32(1) / gsa, FLT_MAX) if gsa != 0 else F32(1)
    return F32(1) if s == 0 else s


def block(x: np.ndarray, b: np.float32, s: np.float32, recipe: str) -> tuple[int, list[int]]:
    """Scale byte and codes of a block ``x`` of fp32 whose amax is b (NaN if it has one)."""
    with np.errstate(all="ignore"):
        sixth = F32(1) / F32(6)
        byte = e4m3(s * (b * sixth) if recipe == "vllm" else b * (s * sixth))
        if byte == 127:
            return byte, [0] * len(x)
        value = e4m3_value(byte)
        if recipe in ("vllm", "te_flush") and value == 0:
            enc = F32(0)
        else:
            enc = F32(1) / (value * (F32(1) / s))
            enc = FLT_MAX if enc > FLT_MAX else enc
        codes = []
        for v in x:
            product = v * enc
            codes.append(0 if np.isnan(product) else e2m1(product))
        return byte, codes


def quantize(
    x: np.ndarray,
    recipe: str = "te",
    granularity: str = "tensor",
    divisor: float = 2688.0,
    gsa: np.ndarray | None = None,
    tile_rows: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (rows, N up to 16), scale bytes (rows, N / 16 up), gsa, of fp32 (rows, N)."""
    rows, cols = x.shape
    groups = -(-cols // 16)
    padded = np.zeros((rows, groups * 16), np.float32)
    padded[:, :cols] = x
    codes = np.zeros((rows, groups * 16), np.uint8)
    scales = np.zeros((rows, groups), np.uint8)
    if gsa is None:
        amaxes = [amax_of(x)] if granularity == "tensor" else [amax_of(row) for row in x]
        s_of = [encoding_scale(a, divisor) for a in amaxes]
        gsa = np.array([a / F32(divisor) for a in amaxes], np.float32)
    else:
        s_of = [encoding_scale_given(F32(g)) for g in gsa]
    for m in range(rows):
        s = s_of[m if len(s_of) == rows else 0]
        first = m // tile_rows * tile_rows
        for k in range(groups):
            tile = padded[first : first + tile_rows, 16 * k : 16 * k + 16]
            b = F32(np.nan) if np.isnan(tile).any() else amax_of(tile)
            scales[m, k], codes[m, 16 * k : 16 * k + 16] = block(
                padded[m, 16 * k : 16 * k + 16], b, s, recipe
            )
    return codes, scales, gsa


def pack(codes: np.ndarray) -> np.ndarray:
    """Even column in the low nibble."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
