"""Timing on a GPU by graph replay, on the host by the clock, and the memory ceilings of a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

ROTATE_BYTES = 320 * 2**20
"""Inputs rotate through this much memory, which is more than the L2 cache of any GPU so far."""

MAX_SETS = 24_000
"""Most calls in one graph."""


@dataclass(frozen=True)
class Stage:
    """How long a graph is replayed for one figure."""

    seconds: float
    """About how long one measurement takes."""
    repeats: int
    """Measurements; the figure is their median."""

    def __str__(self) -> str:
        return f"{self.repeats} x {self.seconds:g} s"


BRIEF = Stage(seconds=0.02, repeats=3)
"""Short, so that the GPU's power limit has hardly slowed it: what the kernel itself takes."""

SUSTAINED = Stage(seconds=0.05, repeats=5)
"""Long enough for the power limit to act, which it does differently on each GPU of a kind."""


def sets_needed(bytes_per_call: int, rotate_bytes: int = ROTATE_BYTES) -> int:
    """How many sets of inputs fill ``rotate_bytes``; at least 2."""
    return min(MAX_SETS, max(2, math.ceil(rotate_bytes / max(1, bytes_per_call))))


@dataclass(frozen=True)
class GraphTimes:
    """Microseconds of one call, from one graph."""

    brief: float
    """Over `BRIEF`, right after the capture, in which the GPU has rested."""
    sustained: float
    """Over `SUSTAINED`, right after that."""


def graph_times(fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> GraphTimes:
    """Times of one ``fn(*inputs[i])``, as by `graph_us`, both of a graph captured once."""
    brief, sustained = _replayed_us(fn, inputs, BRIEF, SUSTAINED)
    return GraphTimes(brief, sustained)


def brief_us(fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> float:
    """``graph_times(fn, inputs).brief`` alone."""
    return graph_us(fn, inputs, BRIEF)


def graph_us(
    fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], stage: Stage = SUSTAINED
) -> float:
    """Microseconds of one ``fn(*inputs[i])``, by replaying a CUDA graph of one call each.

    Args:
        fn: what is timed; it has been called before, so nothing compiles now.
        inputs: arguments of each call in the graph.
        stage: how long it is replayed.
    """
    (us,) = _replayed_us(fn, inputs, stage)
    return us


def behind_us(
    fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], stage: Stage = BRIEF
) -> float:
    """Microseconds that one ``fn(*inputs[i])`` adds behind a plain kernel.

    Calls that launch programmatically overlap each other. In a model they come behind other
    kernels, most of which allow no overlap. So a ``torch.add`` of 8192 floats comes before each
    call, and its own time is taken off, from a graph of as many: replaying a short one again and
    again would add the host's time on a busy machine.
    """
    probe, written = (torch.zeros(8192, device="cuda") for _ in range(2))

    def plain() -> None:
        torch.add(probe, 1.0, out=written)

    def behind(*arguments: Any) -> Any:
        plain()
        return fn(*arguments)

    alone = graph_us(plain, [()] * max(1000, len(inputs)), stage)
    return graph_us(behind, inputs, stage) - alone


def _replayed_us(
    fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *stages: Stage
) -> list[float]:
    """Microseconds of one call in each stage, in their order, from one graph.

    Every call has its own inputs, and its own results too: they are kept until the graph is
    done, so that the allocator cannot hand one piece of memory, which would stay in the L2 cache,
    to all of them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    keep = []
    with torch.cuda.stream(stream):
        for arguments in inputs[:2]:
            fn(*arguments)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for arguments in inputs:
                keep.append(fn(*arguments))
    torch.cuda.synchronize()
    try:
        graph.replay()
        once_ms = _elapsed_ms(graph.replay, 1)
        return [_median_ms(graph.replay, stage, once_ms) * 1e3 / len(inputs) for stage in stages]
    finally:
        keep.clear()
        graph.reset()


def _median_ms(fn: Callable[[], Any], stage: Stage, once_ms: float) -> float:
    """Milliseconds of one ``fn()``, which takes about ``once_ms``."""
    times = max(1, min(10_000, math.ceil(stage.seconds * 1e3 / max(once_ms, 1e-3))))
    return statistics.median(_elapsed_ms(fn, times) / times for _ in range(stage.repeats))


def _elapsed_ms(fn: Callable[[], Any], times: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        fn()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def event_us(fn: Callable[[], Any], *, repeats: int) -> float:
    """Microseconds of one ``fn()`` on the GPU, the median of ``repeats``, by events around each.

    For work that is too long to be replayed from a graph, and that keeps the GPU busy.
    """
    return statistics.median(_elapsed_ms(fn, 1) for _ in range(repeats)) * 1e3


def host_us(fn: Callable[[], Any], *, calls: int = 100, repeats: int = 15) -> float:
    """Microseconds the host spends in one eager ``fn()``, the GPU's own time left out.

    The queue is drained before each measurement, and ``calls`` is small enough not to fill it.
    The minimum over ``repeats`` is returned: other work of the host only adds.
    """
    for _ in range(3):
        fn()
    best = math.inf
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return best * 1e6 / calls


def host_medians_us(calls: Mapping[Key, Callable[[], Any]], *, rounds: int) -> dict[Key, float]:
    """Microseconds the host spends in each call, the median over all rounds.

    The calls take turns, ``rounds`` times: what the host does meanwhile falls on all of them.
    """
    repeats, per_repeat = 15, 200
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, fn in calls.items():
            for _ in range(20):
                fn()
            for _ in range(repeats):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(per_repeat):
                    fn()
                times[key].append((time.perf_counter() - begin) * 1e6 / per_repeat)
    torch.cuda.synchronize()
    return {key: statistics.median(values) for key, values in times.items()}


@dataclass(frozen=True)
class Ceilings:
    """What this GPU's memory gives, in GB/s (1e9 bytes)."""

    copy: float
    """The fastest of some copies, bytes read plus bytes written."""
    read: float
    """The fastest of some reductions over memory that is only read."""
    write: float
    """The fastest of some fills of memory that is only written."""


def measure_ceilings(device: torch.device) -> Ceilings:
    """Ceilings over 2 GiB, or less if memory is short."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(2 * 2**30, free // 4) // 2**20 * 2**20
    source = torch.empty(size // 4, device=device).uniform_(-1, 1)
    target = torch.empty_like(source)
    # A copy in a graph may go to a copy engine, which is slower than a kernel that copies.
    copiers: Iterable[Callable[[torch.Tensor], torch.Tensor]] = (
        target.copy_,
        lambda x: torch.neg(x, out=target),
    )
    copy = max(2 * source.nbytes / (graph_us(fn, [(source,), (source,)]) * 1e3) for fn in copiers)
    rows = source.view(-1, 2**14)
    column = torch.ones(2**14, 1, device=device)
    readers: Iterable[Callable[[torch.Tensor], torch.Tensor]] = (
        lambda x: x.sum(dim=1),
        lambda x: x.amax(dim=1),
        lambda x: x @ column,
    )
    read = max(source.nbytes / (graph_us(fn, [(rows,), (rows,)]) * 1e3) for fn in readers)
    # Filling with zeros would be a memset; a kernel writes its values.
    fills = (target, target.view(torch.bfloat16))
    write = max(
        fill.nbytes / (graph_us(lambda x: x.fill_(1.5), [(fill,), (fill,)]) * 1e3) for fill in fills
    )
    return Ceilings(copy=copy, read=read, write=write)
