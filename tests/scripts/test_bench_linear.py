"""The benchmark of NVFP4 products, with its clock taken away, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import timing
from harness.bench import linear


def test_every_product_is_the_weight_times_x(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def graph_us(fn: Callable[..., Any], inputs: Any, **_: Any) -> float:
        done.append([fn(*arguments) for arguments in inputs])
        return float(len(done))

    monkeypatch.setattr(timing, "graph_us", graph_us)
    monkeypatch.setattr(timing, "sets_needed", lambda *_: 2)
    monkeypatch.setattr(linear, "DEVICE", "cpu")
    monkeypatch.setattr(linear, "SHAPES", ((48, 64),))
    monkeypatch.setattr(linear, "ROWS", (1, 3))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shown: list[str] = []
    rows = linear.report(1000.0, shown.append)
    assert [row["rows"] for row in rows] == [1, 3]
    assert rows[0]["floor"] == round(48 * 64 * 9 / 16 / 1000 * 1e-3, 3)
    assert rows[0]["weight_only_behind"] == 4 - 1  # less the plain kernel's
    assert len(shown) == 2
    assert "48 x 64" in shown[0]
    # plain, then for each number of rows: bf16, after each other, behind, quantized.
    for first, count in ((1, 1), (5, 3)):
        assert all(y.shape == (count, 48) for times in done[first : first + 4] for y in times)
        for alone, behind in zip(done[first + 1], done[first + 2], strict=True):
            assert torch.equal(alone, behind)
