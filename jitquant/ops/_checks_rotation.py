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
            f"rotate is {rotate!r} and the dimension that it mixes has {cols} elements; accepted "
            f"are multiples of {n}. Pad it with zeros, or rotate fewer neighbors"
        )
    if signs is None:
        return
    _checks.same_device(signs, "signs", like, "x")
    if not n or tuple(signs.shape) != (n,) or not signs.is_contiguous():
        raise ValueError(
            f"signs has shape {_checks.shape_text(signs)}; accepted with rotate={rotate!r} is "
            + (f"({n},), contiguous, of +1 and -1" if n else "None: nothing is rotated")
        )


def rope(cos: Tensor | None, sin: Tensor | None, x: Tensor) -> None:
    """Tables of rotary position embedding for the first columns of the rows of ``x``."""
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("cos or sin is None; accepted are both of rope, or none")
        return
    rows, cols = _checks.row_count(x.shape[:-1]), x.shape[-1]
    for t, name in ((cos, "cos"), (sin, "sin")):
        _checks.same_device(t, name, x, "x")
        if t.dim() != 2 or not t.is_contiguous() or t.shape != cos.shape:
            raise ValueError(
                f"{name} has shape {_checks.shape_text(t)}; accepted is (P, R / 2), contiguous, "
                "the same for cos and sin"
            )
    positions, half = cos.shape
    if half % 16 or not 0 < 2 * half <= cols:
        raise ValueError(
            f"cos has {half} columns; accepted are multiples of 16 up to half of the {cols} of x: "
            "one for each pair of the first columns"
        )
    if positions < 1 or rows % positions:
        raise ValueError(
            f"cos has {positions} rows; accepted are divisors of the {rows} rows of x: each serves "
            "as many rows that follow each other, such as the heads of a token"
        )


def rotated_arguments(
    x: Tensor, rotate: str, signs: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> None:
    """What the source of rotated rows takes."""
    rotation(rotate, signs, x.shape[-1], x)
    rope(cos, sin, x)
