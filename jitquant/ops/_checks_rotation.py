"""Argument checks of what is done to values before they are quantized: rotations and RoPE."""

from __future__ import annotations

from torch import Tensor

from jitquant.numerics import recipes as numerics
from jitquant.ops import _checks


def rotation(rotate: str, signs: Tensor | None, cols: int, like: Tensor) -> None:
    """A transform of neighbors in a dimension of ``cols`` elements, and its signs."""
    n = numerics.hadamard_size(rotate)
    if n and cols % n:
        raise ValueError(
            f"rotate: expected a multiple of {n} elements in the rotated dimension for {rotate!r}, "
            f"got {cols}. Pad it with zeros, or rotate fewer neighbors"
        )
    if signs is None:
        return
    _checks.same_device(signs, "signs", like, "x")
    if n == 0 or tuple(signs.shape) != (n,) or not signs.is_contiguous():
        raise ValueError(
            f"signs: expected {f'shape ({n},), contiguous' if n else 'None'} with "
            f"rotate={rotate!r}, got shape {_checks.shape_text(signs)}"
        )


def _table(t: Tensor, name: str, cos: Tensor, x: Tensor) -> None:
    _checks.same_device(t, name, x, "x")
    if t.dim() != 2 or not t.is_contiguous() or t.shape != cos.shape:
        raise ValueError(
            f"{name}: expected shape (P, R / 2), contiguous, the same for cos and sin, got shape "
            f"{_checks.shape_text(t)}"
        )


def rope(cos: Tensor | None, sin: Tensor | None, x: Tensor) -> None:
    """Tables of rotary position embedding for the first columns of the rows of ``x``."""
    if cos is None or sin is None:
        if (cos is None) != (sin is None):
            raise ValueError("rope: expected both cos and sin, or neither, got one of them")
        return
    rows, cols = _checks.row_count(x.shape[:-1]), x.shape[-1]
    _table(cos, "cos", cos, x)
    _table(sin, "sin", cos, x)
    positions, half = cos.shape
    if half % 16 or not 0 < 2 * half <= cols:
        raise ValueError(
            f"cos: expected a multiple of 16 columns, up to half of the {cols} of x, got {half}. "
            "Each is for a pair of x's first columns"
        )
    if positions < 1 or rows % positions:
        raise ValueError(
            f"cos: expected a divisor of the {rows} rows of x, got {positions} rows. Each serves "
            "consecutive rows of x, such as the heads of a token"
        )


def rotated_arguments(
    x: Tensor, rotate: str, signs: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> None:
    """What the source of rotated rows takes."""
    rotation(rotate, signs, x.shape[-1], x)
    rope(cos, sin, x)
