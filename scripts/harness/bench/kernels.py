"""Measuring one op at one size, and running through all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness import timing
from harness.bench.op import Op

BEHIND_ROWS = 64

Peers = Mapping[str, Callable[..., Any] | None]
"""What each library has beside an op, by the library's name; None: nothing, or no library."""


@dataclass
class Measurement:
    """One row of the table. What could not be measured is None, and ``error`` or ``note`` says why.

    ``us`` is brief and ``sustained_us`` is sustained, as in `timing.GraphTimes`. ``plain_us`` is
    brief too, so that the two are compared alike, and all rates and parts but
    ``sustained_of_floor`` are of brief times.
    ``of_copy`` counts all readings of the inputs (twice where an amax over all comes first).
    ``floor_us`` is what a copy takes for as many bytes, and ``of_floor`` is that over ``us``, which
    is ``of_copy`` once more, as a time.
    ``of_mixed`` is against the readings at the read ceiling and the results at the write ceiling:
    for what mostly writes.
    ``peers`` has the brief times of other libraries, None if untimed, and ``peer_errors``
    what was raised instead. ``behind_us`` and ``peers_behind`` are as `timing.behind_us`, for up to
    `BEHIND_ROWS` rows: of larger calls an overlap is a small part.
    """

    op: str
    m: int
    n: int
    us: float | None = None
    sustained_us: float | None = None
    behind_us: float | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None
    floor_us: float | None = None
    of_floor: float | None = None
    sustained_of_floor: float | None = None
    of_mixed: float | None = None
    launches: int | None = None
    host_us: float | None = None
    plain_us: float | None = None
    peers: dict[str, float | None] = field(default_factory=dict)
    peers_behind: dict[str, float] = field(default_factory=dict)
    peer_errors: dict[str, str] = field(default_factory=dict)
    note: str = ""
    error: str = ""

    @property
    def best_peer(self) -> tuple[float, str] | None:
        """The shortest time of another library, and its name."""
        timed = [(us, name) for name, us in self.peers.items() if us is not None]
        return min(timed, default=None)

    @property
    def best_peer_behind(self) -> tuple[float, str] | None:
        """The same behind a plain kernel."""
        return min(((us, name) for name, us in self.peers_behind.items()), default=None)


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _host(fn: Callable[..., Any], arguments: tuple[Any, ...], m: int) -> float:
    # A large call keeps the GPU busy for longer than the host, so fewer of them are queued.
    calls, repeats = (100, 15) if m <= 1024 else (20, 7)
    return timing.host_us(lambda: fn(*arguments), calls=calls, repeats=repeats)


def measure(
    op: Op,
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    ceilings: timing.Ceilings,
    compiled: Callable[..., Any] | None,
    peers: Peers,
) -> Measurement:
    """One op at one size, and its plain code and peers if these are given.

    Failures are put into the row.
    """
    from jitquant.testing import count_launches

    row = Measurement(op.name, m, n, peers=dict.fromkeys(peers))
    inputs: list[tuple[Any, ...]] = []
    try:
        inputs = op.inputs(m, n, dtype, device)
        row.launches = int(count_launches(op.run, *inputs[0]))
        times = timing.graph_times(op.run, inputs)
        row.us, row.sustained_us = times.brief, times.sustained
        if m <= BEHIND_ROWS:
            row.behind_us = timing.behind_us(op.run, inputs)
        traffic = op.traffic(m, n, dtype.itemsize)
        row.gb_per_s = traffic.moved / (row.us * 1e3)
        row.of_copy = row.gb_per_s / ceilings.copy
        row.floor_us = traffic.floor_us(ceilings)
        row.of_floor = row.floor_us / row.us
        row.sustained_of_floor = row.floor_us / row.sustained_us
        row.of_mixed = traffic.mixed_floor_us(ceilings) / row.us
        row.host_us = _host(op.run, inputs[0], m)
    except Exception as error:
        row.error = first_line(error)
    if compiled is None:
        row.note = "plain code not measured"
    else:
        _measure_plain(row, compiled, inputs)
    if inputs:
        _measure_peers(row, peers, inputs)
    return row


def _measure_plain(
    row: Measurement, compiled: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]
) -> None:
    try:
        compiled(*inputs[0])
        row.plain_us = timing.brief_us(compiled, inputs)
    except Exception as error:
        row.note = f"plain code: {first_line(error)}"


def _measure_peers(row: Measurement, peers: Peers, inputs: Sequence[tuple[Any, ...]]) -> None:
    for name, peer in peers.items():
        if peer is None:
            continue
        try:
            peer(*inputs[0])  # what it compiles and tunes cannot be captured
            row.peers[name] = timing.brief_us(peer, inputs)
            if row.m <= BEHIND_ROWS:
                row.peers_behind[name] = timing.behind_us(peer, inputs)
        except Exception as error:
            row.peer_errors[name] = first_line(error)


def run(
    ops: Sequence[Op],
    sizes: Sequence[int],
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    ceilings: timing.Ceilings,
    *,
    peers: Mapping[str, Peers],
    compile_plain: bool = True,
    seconds: float = 165.0,
) -> Iterator[list[Measurement]]:
    """The rows of one op after the other.

    Args:
        peers: those of each op, by its name.
        compile_plain: whether ``torch.compile`` of the plain code is measured as well.
        seconds: after this time the plain code is left out, so that the ops themselves are done.
    """
    begin = time.perf_counter()
    for op in ops:
        rows = []
        for m in sizes:
            # For each size by itself: with dynamic shapes the code is ten times slower.
            torch.compiler.reset()
            in_time = compile_plain and time.perf_counter() - begin <= seconds
            compiled = torch.compile(op.plain, dynamic=False) if in_time else None
            rows.append(measure(op, m, n, dtype, device, ceilings, compiled, peers[op.name]))
            torch.cuda.empty_cache()
        yield rows
