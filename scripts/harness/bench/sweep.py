"""Shapes beside each other at equal work: no length of a row, stride, dtype or layout falls off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import jitquant
from harness import timing
from harness.bench import plain
from harness.bench.op import Traffic
from jitquant import QuantizedActivation

M, N = 8192, 7168
"""Every case has about as many values as this one, which the others are held against."""

MODULES = ("dequant_nvfp4", "fused_amax_quantize", "fused_rmsnorm_quantize", "quantize_nvfp4")
OPS = ("tensor", "given", "row", "rmsnorm", "dequantize")


@dataclass(frozen=True)
class Case:
    """An input (m, n) and its memory layout.

    Attributes:
        group: what the case varies.
        m, n: its shape.
        dtype: of the input, and of what is dequantized.
        pad: elements between a row and the next.
        layout: of the scales.
    """

    group: str
    m: int
    n: int
    dtype: torch.dtype = torch.bfloat16
    pad: int = 0
    layout: str = "linear"

    @property
    def name(self) -> str:
        """Shape, and what else is not as usual."""
        remarks = (
            "" if self.dtype == torch.bfloat16 else str(self.dtype).removeprefix("torch."),
            f"rows {self.n + self.pad} apart" if self.pad else "",
            "" if self.layout == "linear" else self.layout,
        )
        return " ".join((f"{self.m} x {self.n}", *filter(None, remarks)))


ROWS = (384, 1536, 2048, 2880, 4096, 5120, 8192, 14336, 16384, 28672)
CASES = (
    Case("usual", M, N),
    *(Case("N", M * N // n, n) for n in ROWS),
    *(Case("M", m, N) for m in (7919, 8191, 8193, 9999)),
    *(Case("unaligned N", M, n) for n in (7170, 7171, 7176)),
    Case("strided rows", M, N, pad=256),
    Case("fp16", M, N, torch.float16),
    Case("fp32", M, N, torch.float32),
    Case("swizzled", M, N, layout="swizzled_128x4"),
)


@dataclass(frozen=True)
class Point:
    """One op in one case.

    ``us``, ``of_floor`` and ``of_mixed`` are as in the table of the kernels, ``per_value`` is the
    time for one value over that of the usual case.
    """

    op: str
    group: str
    case: str
    m: int
    n: int
    us: float | None = None
    of_floor: float | None = None
    of_mixed: float | None = None
    per_value: float | None = None
    error: str = ""


class Call(NamedTuple):
    """An op, what it moves, and the arguments of calls that leave the L2 cache behind."""

    run: Callable[..., Any]
    traffic: Traffic
    inputs: list[tuple[Any, ...]]


def _nbytes(q: QuantizedActivation) -> int:
    return sum(part.nbytes for part in (q.x_fp4, q.x_sf, q.gsa, q.inv_rms) if part is not None)


def call(op: str, case: Case, xs: list[Tensor]) -> Call:
    """One of `OPS` on inputs that `tensors` made."""
    x, layout = xs[0], case.layout
    values = x.numel() * x.element_size()
    runs: dict[str, Callable[..., Any]] = {
        "tensor": lambda x: jitquant.quantize_nvfp4(x, scale_layout=layout),
        "given": lambda x, gsa: jitquant.quantize_nvfp4(x, gsa, scale_layout=layout),
        "row": lambda x: jitquant.quantize_nvfp4(x, granularity="row", scale_layout=layout),
        "rmsnorm": lambda x, w: jitquant.rmsnorm_quantize_nvfp4(x, w, scale_layout=layout),
        "dequantize": lambda q: jitquant.dequantize_nvfp4(q, case.dtype),
    }
    run = runs[op]
    if op == "dequantize":
        packed = [runs["tensor"](x) for x in xs]
        read = _nbytes(packed[0])
        return Call(run, Traffic(read + values, read, values), [(q,) for q in packed])
    extra: tuple[Tensor, ...] = ()
    if op == "given":
        extra = (torch.full((1,), 4.0 / plain.DIVISOR, device=x.device),)
    elif op == "rmsnorm":
        extra = (torch.ones(case.n, dtype=x.dtype, device=x.device),)
    written = _nbytes(run(x, *extra)) - (extra[0].nbytes if op == "given" else 0)
    read = values * (2 if op == "tensor" else 1)
    return Call(run, Traffic(values + written, read, written), [(x, *extra) for x in xs])


def tensors(case: Case, device: torch.device) -> list[Tensor]:
    """Inputs of as many calls as it takes to leave the L2 cache behind."""
    count = timing.sets_needed(case.m * case.n * case.dtype.itemsize)
    pool = torch.empty((count, case.m, case.n + case.pad), dtype=case.dtype, device=device)
    return [x[:, : case.n] for x in pool.normal_()]


def run(device: torch.device, ceilings: timing.Ceilings) -> Iterator[list[Point]]:
    """The points of one case after the other, in the order of `OPS`; the usual case comes first."""
    usual: dict[str, float] = {}
    for case in CASES:
        xs = tensors(case, device)
        points = []
        for op in OPS:
            at = (op, case.group, case.name, case.m, case.n)
            try:
                fn, traffic, inputs = call(op, case, xs)
                us = timing.brief_us(fn, inputs)
            except Exception as error:
                points.append(Point(*at, error=f"{type(error).__name__}: {error}"[:300]))
                continue
            per_value = us / (case.m * case.n)
            if case is CASES[0]:
                usual[op] = per_value
            points.append(
                Point(
                    *at,
                    us,
                    traffic.floor_us(ceilings) / us,
                    traffic.mixed_floor_us(ceilings) / us,
                    per_value / usual[op] if op in usual else None,
                )
            )
        yield points
        del xs
        torch.cuda.empty_cache()


def worst(points: list[Point], op: str | None = None) -> Point | None:
    """The point that is furthest from its floor, of one op or of all; None if none was measured."""
    measured = [p for p in points if p.of_floor is not None and op in (None, p.op)]
    return min(measured, key=lambda point: point.of_floor or 0.0, default=None)
