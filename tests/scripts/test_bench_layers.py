"""The benchmark of layers, with its clock taken away, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import timing
from harness.bench import layers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each measurement would have timed, run once."""
    done: list[Any] = []

    def graph_us(fn: Callable[..., Any], inputs: Any, *_: Any) -> float:
        done.extend(fn(*arguments) for arguments in inputs)
        return float(len(done))

    def event_us(fn: Callable[[], Any], **_: Any) -> float:
        fn()
        return 1.0

    monkeypatch.setattr(timing, "graph_us", graph_us)
    monkeypatch.setattr(timing, "event_us", event_us)
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    return done


def test_linear(calls: list[Any]) -> None:
    torch.manual_seed(0)
    pairs = list(layers.linear(128, 256, 384))
    assert [pair.bf16 is None for pair in pairs] == [False, False, False, True, True]
    plain, fp8 = calls[0], calls[2]  # of the same inputs
    for want, got in zip(plain, fp8, strict=True):
        noise = (got.float() - want.float()).square().sum() / want.float().square().sum()
        assert 0 < noise < 10**-2.5
    assert pairs[3].gigabytes == 4e-9 * 128 * 256
    assert pairs[0].ratio == pairs[0].bf16 / pairs[0].fp8


@pytest.mark.slow
def test_stack(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    pair, seconds = layers.stack(2, 2, 16, 512, 384, steps=1)
    assert "2 blocks" in pair.name
    assert pair.ratio == 1
    assert pair.nvfp4 == 1
    assert set(seconds) == {"bf16", "fp8", "nvfp4"}
