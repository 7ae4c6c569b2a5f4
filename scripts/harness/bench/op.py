"""An op that is measured: its inputs, its call here, the plain code beside it, what it moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness import timing


@dataclass(frozen=True)
class Traffic:
    """Bytes that a call moves: ``once`` with every input read once, ``read`` in all readings."""

    once: int
    read: int
    written: int

    @property
    def moved(self) -> int:
        """All readings and the results."""
        return self.read + self.written

    def floor_us(self, ceilings: timing.Ceilings) -> float:
        """Microseconds in which a copy moves as much."""
        return self.moved / (ceilings.copy * 1e3)

    def mixed_floor_us(self, ceilings: timing.Ceilings) -> float:
        """Microseconds of all reads at the read ceiling plus all writes at the write ceiling.

        For ops where a copy, which writes half of its bytes, is not a good measure. Not a bound: a
        GPU reads and writes at once, and a copy may take less.
        """
        return (self.read / ceilings.read + self.written / ceilings.write) / 1e3


@dataclass(frozen=True)
class Quantized:
    """How an op's input is made from a tensor, and how many bytes that is for (m, n)."""

    make: Callable[[Tensor], Any]
    nbytes: Callable[[int, int], int]


@dataclass(frozen=True)
class Op:
    """One op of the benchmark.

    Attributes:
        name: as ``--ops`` takes it.
        call: what it is, for people.
        modules: the compiled modules behind it.
        run: the op, taking the tensors that `inputs` makes.
        plain: the same in plain PyTorch.
        shapes: of the inputs that are read in full, for (m, n).
        reads: how often these must be read: twice where an amax over all comes first.
        written: bytes of results for (m, n, element size).
        extra: further arguments, for (n, dtype, device), the same for every call.
        quantized: of an op that takes no tensor but what was quantized from one.
    """

    name: str
    call: str
    modules: tuple[str, ...]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    reads: int
    written: Callable[[int, int, int], int]
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]] = lambda m, n: ((m, n),)
    extra: Callable[[int, torch.dtype, torch.device], tuple[Tensor, ...]] = lambda *_: ()
    quantized: Quantized | None = None

    def traffic(self, m: int, n: int, element: int) -> Traffic:
        """Bytes that a call has to move."""
        if self.quantized is not None:
            read = self.quantized.nbytes(m, n)
        else:
            read = sum(math.prod(shape) for shape in self.shapes(m, n)) * element
        write = self.written(m, n, element)
        return Traffic(read + write, self.reads * read, write)

    def inputs(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Any, ...]]:
        """Arguments of as many calls as it takes to leave the L2 cache behind."""
        extra = self.extra(n, dtype, device)
        per_call = self.traffic(m, n, dtype.itemsize).once
        count = 1 if per_call > timing.ROTATE_BYTES else timing.sets_needed(per_call)
        pools = [
            torch.empty((count, *shape), dtype=dtype, device=device).normal_()
            for shape in self.shapes(m, n)
        ]
        if self.quantized is not None:
            return [(self.quantized.make(x),) for x in pools[0]]
        return [(*(pool[i] for pool in pools), *extra) for i in range(count)]


def packed_bytes(rows: int, n: int, gsa: int) -> int:
    """Bytes of codes, scales and ``gsa`` factors."""
    return rows * (n // 2 + n // 16) + 4 * gsa


def vector(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weight of a norm."""
    return torch.empty(n, dtype=dtype, device=device).uniform_(0.5, 1.5)
