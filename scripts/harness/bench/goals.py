"""The goals for one H200, and how they are held against what was measured.

M x 7168 in bf16. Those of one-pass ops of the 8-bit formats are against a cast with one scale.
Those beside other libraries are for any GPU, as both ran on it in the same run.
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

M = 16384
"""Rows of the ops that pictures and sentences compare."""

SIZES = (1, 64, 1024, 4096, 16384, 65536)
"""Rows at which ops are held against other libraries."""

FEW = (1, 64)
"""The same behind a plain kernel."""

COMPILED = "torch.compile"
NAMES = {"vllm": "vLLM", "flashinfer": "FlashInfer", "torchao": "torchao", "fbgemm": "FBGEMM"}
"""Other libraries, for people."""


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
_OF_CAST = {1024: 1.25, 4096: 1.08, 16384: 1.05, 65536: 1.05}

FP8 = (
    Goal("fp8-tensor", "time", TIME, {1: 2.3, 64: 3.5}),
    Goal("fp8-tensor", "times its floor", FLOORS, {1024: 1.0, 2048: 1.0}),
    Goal("fp8-tensor", "part of its floor", OF_FLOOR, {16384: 0.95, 65536: 0.95}),
    *(Goal(op, "time", TIME, {1: 1.7, 64: 2.2}) for op in _ONE_PASS),
    *(Goal(op, "time", TIME, {1: 2.5, 64: 3.0}) for op in _NORMS),
    *(Goal(op, "times the cast", CASTS, _OF_CAST) for op in (*_ONE_PASS, *_NORMS)),
    *(Goal(op, "part of its floor", OF_FLOOR, {16384: 0.92, 65536: 0.92}) for op in _MORE_BYTES),
)


def _ragged() -> Iterable[Goal]:
    """Within 5% of the same bytes as one tensor."""
    for segments in (8, 64, 1024):
        for op, base in (
            (f"fp8-ragged-{segments}", "fp8-tensor"),
            (f"fp8-ragged-{segments}-given", "fp8-tensor-given"),
            (f"nvfp4-ragged-{segments}", "quantize-tensor"),
        ):
            bounds = dict.fromkeys(SIZES[2:], 1.05)
            yield Goal(op, "times one tensor", Quantity(_over(base), TIMES), bounds)


RAGGED = tuple(_ragged())


Peer = tuple[float, str]
"""Microseconds of the fastest other library, and its name."""


def peer_rows(sections: dict[str, Any]) -> Rows:
    """The rows that were timed beside other libraries, each in the run of its peers."""
    rows = rows_of(sections["kernels-peers"]) | rows_of(sections["kernels-fp8-peers"])
    norm = rows_of(sections[norm_section(sections)])
    return rows | {at: row for at, row in norm.items() if at[0] == "rmsnorm"}


def norm_section(sections: dict[str, Any]) -> str:
    """Where the norm of NVFP4 has torch.compile beside it: with the other peers, or by itself."""
    row = rows_of(sections["kernels-peers"]).get(("rmsnorm", M), {})
    return "rmsnorm-compiled" if row.get("plain_us") is None else "kernels-peers"


def best_peer(rows: Rows, op: str, m: int) -> Peer | None:
    """The fastest of other libraries and torch.compile; None: none was timed."""
    row = rows[op, m]
    library = NAMES.get(row.get("peer") or "", "")
    timed = [(row.get("peer_us"), library), (row.get("plain_us"), COMPILED)]
    return min(((us, name) for us, name in timed if us is not None), default=None)


def best_peer_behind(rows: Rows, op: str, m: int) -> Peer | None:
    """The fastest of other libraries behind a plain kernel; None: it or the op was not timed."""
    row = rows[op, m]
    if row.get("peer_behind_us") is None or row.get("behind_us") is None:
        return None
    return row["peer_behind_us"], NAMES[row["peer_behind"]]


def with_peers(rows: Rows) -> list[str]:
    """The ops that another library was timed on, not only torch.compile."""
    return list(dict.fromkeys(op for (op, _), row in rows.items() if row.get("peer_us")))


def _over_peer(
    peer: Callable[[Rows, str, int], Peer | None], ours: str
) -> Callable[[Rows, str, int], float]:
    def times(rows: Rows, op: str, m: int) -> float:
        best = peer(rows, op, m)
        if best is None:
            raise KeyError(f"a peer's time of {op} at {m}")
        return best[0] / float(rows[op, m][ours])

    return times


OVER_PEER = Quantity(_over_peer(best_peer, "us"), TIMES, is_least=True)
OVER_PEER_BEHIND = Quantity(_over_peer(best_peer_behind, "behind_us"), TIMES, is_least=True)


def beside_peers(rows: Rows) -> Iterable[Goal]:
    """No slower than the best peer, back to back and behind a plain kernel, where one was timed."""
    text = "times as fast as the best peer"
    for op in with_peers(rows):
        for how, quantity, peer, sizes in (
            (text, OVER_PEER, best_peer, SIZES),
            (f"{text}, both behind a plain kernel", OVER_PEER_BEHIND, best_peer_behind, FEW),
        ):
            if timed := [m for m in sizes if peer(rows, op, m)]:
                yield Goal(op, how, quantity, dict.fromkeys(timed, 1.0))


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
    return ", ".join(f"{form.format(bound)} at {_listed(sizes)}" for bound, sizes in parts)


def _listed(words: list[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
