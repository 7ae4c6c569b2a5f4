"""Checks of what a call writes: each element has memory of its own, which nothing else of the call
reads or writes. The bindings make the same checks in the same words (``bindings/memory.h``).

They compare addresses, so they do not apply to fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


def overlaps(t: Tensor) -> bool:
    """Whether elements may share memory: a stride does not reach past all smaller ones.

    What slicing and permuting make of a contiguous tensor never does.
    """
    if t.numel() != 0 and t.is_contiguous():  # Dynamo cannot sort sizes that it does not know
        return False
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if stride <= reach and size > 1:
            return True
        reach += stride * (size - 1)
    return False


def own_elements(t: Tensor, name: str) -> None:
    """A tensor that is written does not overlap itself."""
    if overlaps(t):
        raise ValueError(
            f"{name}: expected memory of its own for each element, as it is written, got strides "
            f"{tuple(t.stride())}. Pass {name}.contiguous() or a slice of a contiguous tensor"
        )


class _Region(NamedTuple):
    """Bytes that a tensor reaches: runs of ``run`` bytes, a multiple of ``step`` apart."""

    start: int
    stop: int
    run: int
    step: int


def _region(t: Tensor) -> _Region:
    size = t.element_size()
    reaches = [(n - 1) * stride * size for n, stride in zip(t.shape, t.stride(), strict=True)]
    run = reaches[-1] + size if reaches else size
    leading = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    step = math.gcd(*(stride * size for n, stride in leading if n > 1))
    return _Region(t.data_ptr(), t.data_ptr() + sum(reaches) + size, run, step)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may have a byte in common. Columns of one matrix have none."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    first, second = _region(a), _region(b)
    if first.stop <= second.start or second.stop <= first.start:
        return False
    step = math.gcd(first.step, second.step)
    if step == 0:
        return True
    apart = (second.start - first.start) % step
    return apart < first.run or apart + second.run > step


def own_memory(written: Sequence[tuple[str, Tensor]], read: Sequence[tuple[str, Tensor]]) -> None:
    """What is written shares no memory with anything else, by name.

    Raises:
        ValueError: it does.
    """
    for i, (name, t) in enumerate(written):
        for other_name, other in (*written[:i], *read):
            if share_memory(t, other):
                raise ValueError(
                    f"{name}: expected memory of its own, as it is written, got memory that it "
                    f"shares with {other_name}. Pass a copy, such as {name}.clone()"
                )
