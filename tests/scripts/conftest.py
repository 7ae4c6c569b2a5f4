"""What the tests of the benchmark share."""

from __future__ import annotations

import pytest
from harness import timing


@pytest.fixture
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each set of inputs 5 us, 6 sustained, 4 behind and 15 of plain code; 2 launches."""
    monkeypatch.setattr(timing, "sets_needed", lambda _: 2)
    monkeypatch.setattr(
        timing,
        "graph_times",
        lambda fn, inputs: timing.GraphTimes(len(inputs) * 5.0, len(inputs) * 6.0),
    )
    monkeypatch.setattr(timing, "brief_us", lambda fn, inputs: len(inputs) * 15.0)
    monkeypatch.setattr(timing, "behind_us", lambda fn, inputs: len(inputs) * 4.0)
    monkeypatch.setattr(timing, "host_us", lambda fn, **_: 1.0)
    monkeypatch.setattr("jitquant.testing.count_launches", lambda fn, *arguments: 2)
