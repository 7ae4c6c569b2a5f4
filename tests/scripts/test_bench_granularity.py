"""The benchmark of granularities, with its clock taken away, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import timing
from harness.bench import granularity

import jitquant


def test_every_time_is_of_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def brief_us(fn: Callable[..., Any], inputs: Any) -> float:
        done.append([fn(*arguments) for arguments in inputs])
        return float(len(done))

    monkeypatch.setattr(timing, "brief_us", brief_us)
    monkeypatch.setattr(timing, "sets_needed", lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name, value in {
        "DEVICE": "cpu",
        "COLS": 256,
        "ROWS": (1, 3),
        "SQUARE": 256,
        "BATCHES": (2,),
        "LENGTHS": (1, 4),
    }.items():
        monkeypatch.setattr(granularity, name, value)
    shown: list[str] = []
    rows = granularity.report(1.0, shown.append)
    assert [row["table"] for row in rows] == ["fused"] * 4 + ["square"] * 5 + ["batches"] * 2
    assert rows[0]["unfused_us"] == 2
    assert rows[-1]["shape"] == (2, 4, 256)
    # Read twice, then elements, scale_inv and amax.
    assert rows[0]["floor_us"] == pytest.approx((2 * 512 + 256 + 8) * 1e-3)
    for i in range(0, 8, 2):  # both ways have the same bits
        for one, three in zip(done[i], done[i + 1], strict=True):
            assert torch.equal(one.data.view(torch.uint8), three.data.view(torch.uint8))
            assert torch.equal(one.scale_inv.flatten(), three.scale_inv.flatten())
    assert all(isinstance(q, jitquant.QuantizedTensor) for qs in done for q in qs)
    assert len(shown) == len(rows)
    assert "in three kernels" in shown[0]
