"""FP8, INT8 and MXFP8 once more, by other means: NumPy, with elements rounded in float64.

Rounding is a search in the table of a format's values, made from the format's definition; powers of
two come from frexp. Nothing here shares a formula, let alone code, with ``jitquant.reference``.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
TOP = {"float8_e4m3fn": F32(448), "float8_e5m2": F32(57344), "int8": F32(127)}
FLT_MAX = np.finfo(F32).max


def _values(exponent_bits: int, mantissa_bits: int, count: int) -> np.ndarray:
    """The first ``count`` non-negative values of a format, in the order of their codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    out = []
    for code in range(count):
        field, mantissa = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
        out.append(
            2.0 ** (1 - bias) * mantissa if field == 0 else 2.0 ** (field - bias) * (1 + mantissa)
        )
    return np.array(out)


VALUES = {"float8_e4m3fn": _values(4, 3, 127), "float8_e5m2": _values(5, 2, 124)}


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of the nearest elements, ties to even, saturating."""
    nan = np.isnan(x)
    x = np.where(nan, 0, x).astype(np.float64)
    if dtype == "int8":
        return np.where(nan, 0, np.clip(np.rint(x), -128, 127)).astype(np.int8).view(np.uint8)
    values = VALUES[dtype]
    middle = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x)
    below = np.searchsorted(middle, magnitude, side="left")
    tie = magnitude == middle[np.minimum(below, len(middle) - 1)]
    index = np.where(tie & (below % 2 == 1), below + 1, below)
    return np.where(nan, 0x7F, index + 128 * np.signbit(x)).astype(np.uint8)


def decode(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Elements as float32; codes beyond the finite ones are NaN."""
    if dtype == "int8":
        return codes.view(np.int8).astype(F32)
    values = VALUES[dtype]
    index = codes & 127
    magnitude = np.where(index < len(values), values[np.minimum(index, len(values) - 1)], np.nan)
    return (np.where(codes > 127, -1.0, 1.0) * magnitude).astype(F32)


def amax(x: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """Largest magnitude, NaN if there is one."""
    return np.max(np.abs(x), axis=axis)


def tensor_scale(a: np.ndarray, dtype: str) -> np.ndarray:
    """The scale of amaxes."""
    out = []
    for value in np.atleast_1d(a).astype(F32).ravel():
        if value == 0 or np.isinf(value) or np.isnan(value):
            out.append(F32(1))
        else:
            with np.errstate(over="ignore"):
                out.append(min(TOP[dtype] / value, FLT_MAX))
    return np.array(out, F32).reshape(np.shape(np.atleast_1d(a)))


def tensor_scale_inv(scale: np.ndarray, a: np.ndarray, dtype: str) -> np.ndarray:
    """What dequantizes: of FP8 the reciprocal; of INT8 the amax over 127, if it is finite."""
    out = F32(1) / scale
    if dtype == "int8":
        known = np.isfinite(a).reshape(out.shape)
        with np.errstate(invalid="ignore"):
            out = np.where(known, a.reshape(out.shape).astype(F32) / F32(127), out)
    return out


def exponent_up(s: np.ndarray) -> np.ndarray:
    """ceil(log2(s)) + 127 of positive numbers; 255 where there is none."""
    mantissa, exponent = np.frexp(s.astype(np.float64))
    ceiling = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.where(np.isfinite(s), ceiling + 127, 255).astype(np.int64)


def groups(
    x: np.ndarray,
    dtype: str,
    recipe: str,
    ue8m0: bool,
    eps: float,
    bounds: tuple[float, float] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, scale_inv and exponents of float32 groups (n, elements)."""
    top, one = TOP[dtype] if bounds is None else F32(bounds[1]), F32(1)
    with np.errstate(all="ignore"):
        b = amax(x, axis=1).astype(F32)
        b = np.where(b < F32(eps), F32(eps), b)
        if recipe == "te":
            factor = top / b
            scale_inv = one / factor
        else:
            scale_inv = b / top
            factor = one / scale_inv
        exponent = exponent_up(scale_inv)
        if ue8m0:
            number = scale_inv
            scale_inv = np.exp2((exponent - 127).astype(np.float64)).astype(F32)
            scale_inv = np.where(np.isnan(number), F32(np.nan), scale_inv)
            scaled = x.astype(np.float64) * np.exp2(127.0 - exponent)[:, None]
            scaled = scaled.astype(F32)
        elif recipe == "vllm":
            scaled = x / scale_inv[:, None]
        else:
            scaled = x * factor[:, None]
        if bounds is not None:
            low, high = map(F32, bounds)
            scaled = np.where(scaled < low, low, np.where(scaled > high, high, scaled))
    assert scaled.dtype == F32
    assert scale_inv.dtype == F32
    return encode(scaled, dtype), scale_inv, exponent


def mx_exponent(b: np.ndarray, dtype: str) -> np.ndarray:
    """The smallest power of two that is at least b / top, as an E8M0 byte."""
    with np.errstate(all="ignore"):
        s = b.astype(F32) / TOP[dtype]
    e = np.where(s == 0, 0, exponent_up(np.where(s == 0, F32(1), s)))
    e = np.clip(e, 0, 254)
    return np.where(np.isnan(s), 255, np.where(np.isinf(s), 254, e)).astype(np.uint8)


def mx_blocks(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and E8M0 bytes of float32 blocks (n, 32)."""
    e = mx_exponent(amax(x, axis=1), dtype)
    with np.errstate(all="ignore"):
        scaled = (x.astype(np.float64) * np.exp2(127.0 - e)[:, None]).astype(F32)
    return encode(scaled, dtype), e
