"""The goals for one H200, and how they are held against what was measured.

M x 7168 in bf16. Those of one-pass ops of the 8-bit formats are against a cast with one scale; the
times of peers are the best of torch.compile, vLLM, FlashInfer and FBGEMM on another H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Rows = dict[tuple[str, int], dict[str, Any]]
"""What a section of the summary has, by op and M."""

PERCENT = "{:.1%}"
TIMES = "{:.2f}"
MICROSECONDS = "{:.2f} us"


def rows_of(section: dict[str, Any]) -> Rows:
    """The rows of a section of `summary`, whose quantities are lists over M."""
    return {
        (row["op"], m): {key: row[key][i] for key in row if key != "op"}
        for row in section["rows"]
        for i, m in enumerate(section["m"])
    }


@dataclass(frozen=True)
class Quantity:
    """Something of a row that a goal is about.

    Attributes:
        of: its value.
        form: how it is printed.
        is_least: whether the goal is the least that is wanted; otherwise the most.
    """

    of: Callable[[Rows, str, int], float]
    form: str
    is_least: bool = False


@dataclass(frozen=True)
class Goal:
    """One goal of an op: a bound for each M."""

    op: str
    text: str
    quantity: Quantity
    bounds: dict[int, float]


def _us(rows: Rows, op: str, m: int) -> float:
    return float(rows[op, m]["us"])


def _over(base: str) -> Callable[[Rows, str, int], float]:
    return lambda rows, op, m: _us(rows, op, m) / _us(rows, base, m)


TIME = Quantity(_us, MICROSECONDS)
OF_FLOOR = Quantity(lambda rows, op, m: float(rows[op, m]["of_floor"]), PERCENT, is_least=True)
FLOORS = Quantity(lambda rows, op, m: 1 / float(rows[op, m]["of_floor"]), TIMES)
CASTS = Quantity(_over("cast"), TIMES)


def _floors(op: str, least: float, most_rows: float | None = None) -> Goal:
    """At least a part of the floor from 4096 rows on, and another at 65536."""
    bounds = {4096: least, 16384: least, 65536: most_rows or least}
    return Goal(op, "part of its floor", OF_FLOOR, bounds)


NVFP4 = (
    Goal("quantize-tensor", "time", TIME, {1: 2.5, 16: 3.0, 64: 3.5}),
    Goal("quantize-tensor", "times its floor", FLOORS, {1024: 1.0, 2048: 1.0}),
    Goal("quantize-tensor", "part of its floor", OF_FLOOR, {4096: 0.85, 16384: 0.95, 65536: 0.95}),
    Goal("quantize-given", "time", TIME, {1: 2.0}),
    _floors("quantize-given", 0.90, 0.93),
    _floors("quantize-row", 0.90, 0.93),
    Goal("rmsnorm", "time", TIME, {1: 3.0}),
    _floors("rmsnorm", 0.88),
    _floors("rmsnorm-residual", 0.88),
    _floors("mhc", 0.85),
    *(_floors(op, 0.88) for op in ("swiglu", "swiglu-given", "select", "select-given")),
    Goal("dequantize", "part of its floor", OF_FLOOR, {4096: 0.88, 16384: 0.93, 65536: 0.88}),
)

_ONE_PASS = (
    "fp8-row",
    "fp8-group",
    "fp8-group-16",
    "fp8-group-vllm",
    "fp8-group-tma",
    "fp8-group-packed",
    "int8-group",
    "fp8-block",
    "mxfp8",
    "mxfp8-swizzled",
)
_NORMS = ("fp8-rmsnorm", "fp8-rmsnorm-given", "fp8-rmsnorm-group")
_MORE_BYTES = (
    "fp8-rmsnorm-residual",
    "fp8-rmsnorm-residual-group",
    "fp8-silu",
    "fp8-silu-given",
    "fp8-silu-group",
    "fp8-group-both",
    "fp8-block-both",
    "mxfp8-both",
)
#: Rows at which `PEERS` has the best peer's microseconds.
SIZES = (1, 64, 1024, 4096, 16384, 65536)
PEERS = {
    "fp8-tensor": (2.4, 4.9, 16.5, 47.4, 165, 620),
    "fp8-row": (2.0, 2.2, 8.4, 23.7, 84.1, 341),
    "fp8-group": (1.6, 1.9, 7.7, 23.5, 84.3, 329),
    "fp8-group-packed": (1.7, 2.1, 10.6, 35.0, 133, 522),
    "int8-group": (1.4, 1.9, 10.0, 29.9, 107, 413),
    "fp8-rmsnorm": (3.1, 3.6, 17.3, 59.7, 188, 739),
    "fp8-rmsnorm-group": (2.9, 3.8, 15.9, 47.9, 173, 671),
    "fp8-rmsnorm-given": (1.9, 2.1, 11.7, 36.4, 134, 522),
    "fp8-rmsnorm-residual": (3.6, 4.5, 21.6, 78.4, 245, 959),
    "fp8-silu-given": (1.3, 3.0, 13.5, 45.8, 175, 689),
    "fp8-silu-group": (1.8, 2.8, 19.8, 71.8, 280, 1111),
    "fp8-silu": (4.5, 4.6, 23.4, 82.1, 312, 1235),
}
_OF_CAST = {1024: 1.25, 4096: 1.08, 16384: 1.05, 65536: 1.05}

FP8 = (
    Goal("fp8-tensor", "time", TIME, {1: 2.3, 64: 3.5}),
    Goal("fp8-tensor", "times its floor", FLOORS, {1024: 1.0, 2048: 1.0}),
    Goal("fp8-tensor", "part of its floor", OF_FLOOR, {16384: 0.95, 65536: 0.95}),
    *(Goal(op, "time", TIME, {1: 1.7, 64: 2.2}) for op in _ONE_PASS),
    *(Goal(op, "time", TIME, {1: 2.5, 64: 3.0}) for op in _NORMS),
    *(Goal(op, "times the cast", CASTS, _OF_CAST) for op in (*_ONE_PASS, *_NORMS)),
    *(Goal(op, "part of its floor", OF_FLOOR, {16384: 0.92, 65536: 0.92}) for op in _MORE_BYTES),
    *(
        Goal(op, "time of the best peer", TIME, dict(zip(SIZES, times, strict=True)))
        for op, times in PEERS.items()
    ),
)


def _ragged() -> Iterable[Goal]:
    """Within 5% of the same bytes as one tensor."""
    for groups in (8, 64, 1024):
        for op, base in (
            (f"fp8-ragged-{groups}", "fp8-tensor"),
            (f"fp8-ragged-{groups}-given", "fp8-tensor-given"),
            (f"nvfp4-ragged-{groups}", "quantize-tensor"),
        ):
            bounds = dict.fromkeys(SIZES[2:], 1.05)
            yield Goal(op, "times one tensor", Quantity(_over(base), TIMES), bounds)


RAGGED = tuple(_ragged())


def best_peer(rows: Rows, op: str, m: int) -> float | None:
    """Microseconds of the fastest other library: of the same run, else `PEERS`; None: untimed."""
    row = rows[op, m]
    timed = [us for us in (row.get("peer_us"), row.get("plain_us")) if us is not None]
    if timed:
        return float(min(timed))
    return PEERS[op][SIZES.index(m)] if op in PEERS and m in SIZES else None


def host(call: str) -> tuple[float, float]:
    """How many times the host time of torch.abs a call may take, with new results and with out=."""
    return (2.0, 1.5) if "nvfp4" in call else (1.8, 1.3)


def table(goals: Iterable[Goal], rows: Rows, calls: dict[str, str]) -> list[str]:
    """Lines of a table: each goal, what was reached at each M, and where it is missed.

    Args:
        goals: which of them.
        rows: of a file of the bench.
        calls: what each op is, for people.

    Raises:
        KeyError: an op or M was not measured.
    """
    lines = ["| op | goal | reached | |", "| --- | --- | --- | --- |"]
    for goal in goals:
        quantity = goal.quantity
        word = "at least" if quantity.is_least else "at most"
        reached, missed = [], []
        for m, bound in goal.bounds.items():
            value = quantity.of(rows, goal.op, m)
            reached.append(quantity.form.format(value).removesuffix(" us"))
            if value < bound if quantity.is_least else value > bound:
                missed.append(str(m))
        lines.append(
            f"| `{calls[goal.op]}` | {goal.text}, {word} {_bounds(goal)} "
            f"| {', '.join(reached)} | {'missed at ' + ', '.join(missed) if missed else 'met'} |"
        )
    return lines


def _bounds(goal: Goal) -> str:
    """Each bound with the sizes that it is for, neighbors together."""
    form = {PERCENT: "{:.0%}", TIMES: "{:.2f}", MICROSECONDS: "{:g} us"}[goal.quantity.form]
    parts: list[tuple[float, list[str]]] = []
    for m, bound in goal.bounds.items():
        if parts and parts[-1][0] == bound:
            parts[-1][1].append(str(m))
        else:
            parts.append((bound, [str(m)]))
    return ", ".join(f"{form.format(bound)} at {' and '.join(sizes)}" for bound, sizes in parts)
