"""`jitquant.quantize_fp8` by granularity: fused beside unfused, one large matrix, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import jitquant
from harness import timing
from harness.bench.shapes import nbytes
from jitquant.formats import E4M3_MAX, FP8_GRANULARITIES

DEVICE = "cuda"
MODULES = ("quantize_fp8", "quantize_per_token_group", "quantize_block", "quantize_mxfp8")
COLS = 7168
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
SQUARE = 32768
BATCHES = (1, 8, 32, 128)
LENGTHS = (1, 128, 512, 2048)


@dataclass(frozen=True)
class Time:
    """Microseconds of a call by graph replay.

    Attributes:
        table: "fused", "square" or "batches".
        call: what was called.
        shape: of x, in bf16.
        floor_us: what a copy takes for x, read as often as the call has to, and the results.
        us: of the call.
        unfused_us: of three kernels with the same bits: amax, scale and cast.
    """

    table: str
    call: str
    shape: tuple[int, ...]
    floor_us: float
    us: float
    unfused_us: float | None = None

    def text(self) -> str:
        """A line for people."""
        unfused = "" if self.unfused_us is None else f", in three kernels {self.unfused_us:.2f} us"
        shape = " x ".join(map(str, self.shape))
        return f"{self.call} of {shape}: {self.us:.2f} us ({self.floor_us / self.us:.0%}){unfused}"


def unfused(x: Tensor, top: Tensor, granularity: str) -> jitquant.QuantizedTensor:
    """As ``quantize_fp8(x, granularity=...)`` of a tensor that is not zero, kernel by kernel."""
    of: dict[str, Any] = {"dim": -1, "keepdim": True} if granularity == "row" else {}
    amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32, **of)
    scale = torch.div(top, amax.reshape(-1))
    return jitquant.quantize_fp8(x, scale=scale, amax=False)


def _inputs(shape: tuple[int, ...]) -> list[tuple[Tensor]]:
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    count = timing.sets_needed(x.nbytes)
    return [(torch.empty_like(x).normal_(),) for _ in range(count)]


def _floor_us(x: Tensor, result: Any, reads: int, copy: float) -> float:
    return (reads * x.nbytes + nbytes(result)) / (copy * 1e3)


def fused(copy: float) -> Iterator[Time]:
    """One scale and one for each row, in one call and in three kernels."""
    top = torch.full((1,), E4M3_MAX, device=DEVICE)
    for granularity, reads in (("tensor", 2), ("row", 1)):

        def run(x: Tensor, how: Any = granularity) -> jitquant.QuantizedTensor:
            return jitquant.quantize_fp8(x, granularity=how)

        def three(x: Tensor, how: str = granularity) -> jitquant.QuantizedTensor:
            return unfused(x, top, how)

        for rows in ROWS:
            inputs = _inputs((rows, COLS))
            floor = _floor_us(inputs[0][0], run(*inputs[0]), reads, copy)
            yield Time(
                "fused",
                f"quantize_fp8(x, granularity='{granularity}')",
                (rows, COLS),
                floor,
                timing.brief_us(run, inputs),
                timing.brief_us(three, inputs),
            )


def calls() -> dict[str, tuple[int, Callable[[Tensor], Any]]]:
    """How often a call has to read x, and the call, by its text."""
    made: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
        f"quantize_fp8(x, granularity='{granularity}')": (
            1 + (granularity == "tensor"),
            lambda x, how=granularity: jitquant.quantize_fp8(x, granularity=how),
        )
        for granularity in FP8_GRANULARITIES
    }
    made["quantize_mxfp8(x)"] = (1, jitquant.quantize_mxfp8)
    return made


def square(copy: float) -> Iterator[Time]:
    """Every granularity, and MXFP8, of one large matrix."""
    inputs = _inputs((SQUARE, SQUARE))
    for text, (reads, call) in calls().items():
        floor = _floor_us(inputs[0][0], call(*inputs[0]), reads, copy)
        yield Time("square", text, (SQUARE, SQUARE), floor, timing.brief_us(call, inputs))


def batches(copy: float) -> Iterator[Time]:
    """1x128 of (batch, sequence, `COLS`)."""
    text = "quantize_fp8(x, granularity='1x128')"
    reads, call = calls()[text]
    for batch in BATCHES:
        for length in LENGTHS:
            shape = (batch, length, COLS)
            inputs = _inputs(shape)
            floor = _floor_us(inputs[0][0], call(*inputs[0]), reads, copy)
            yield Time("batches", text, shape, floor, timing.brief_us(call, inputs))


def report(copy: float, show: Callable[[str], Any]) -> list[dict[str, Any]]:
    """All times as plain data; each is shown as it is measured.

    Args:
        copy: GB/s, of which the floors are made.
        show: takes a line.
    """
    rows = []
    for table in (fused, square, batches):
        for time in table(copy):
            show(time.text())
            rows.append({key: value for key, value in asdict(time).items() if value is not None})
        torch.cuda.empty_cache()
    return rows
