"""The benchmark of NVFP4 products, with its clock taken away, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import timing
from harness.bench import linear, peers_linear
from torch import Tensor

import jitquant
from jitquant.tensors import NVFP4Tensor


def test_every_product_is_the_weight_times_x(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def graph_us(fn: Callable[..., Any], inputs: Any, *_: Any) -> float:
        done.append([fn(*arguments) for arguments in inputs])
        return float(len(done))

    def scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, **factors: Tensor) -> Tensor:
        y = a.float() @ b.float() * factors["scale_a"] * factors["scale_b"]
        return y.to(out_dtype)

    monkeypatch.setattr(timing, "graph_us", graph_us)
    monkeypatch.setattr(timing, "behind_us", lambda fn, inputs, _: graph_us(fn, inputs))
    monkeypatch.setattr(timing, "sets_needed", lambda *_: 2)
    monkeypatch.setattr(linear, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def right(w: NVFP4Tensor) -> peers_linear.Product:
        return lambda x: x @ w.dequantize(torch.bfloat16).t()

    def wrong(w: NVFP4Tensor) -> peers_linear.Product:
        return lambda x: 1.03 * right(w)(x)

    shown: list[str] = []
    peers = {"marlin": right, "humming": wrong}
    rows = linear.report(linear.products(1000.0, [(48, 64)], [1, 3], peers), shown.append)
    assert [row["rows"] for row in rows] == [1, 3]
    assert rows[0]["floor"] == round(48 * 64 * 9 / 16 / 1000 * 1e-3, 3)
    assert rows[0]["weight_only_behind"] == 3
    assert (rows[0]["fp8"], rows[0]["fp8_weight"], rows[0]["marlin"]) == (5, 6, 7)
    assert [row["humming"] for row in rows] == [None, None]  # what is wrong is not timed
    assert len(shown) == 2
    assert "48 x 64" in shown[0]
    # For each number of rows: bf16, after each other, behind, quantized, twice FP8, marlin.
    for first, count in ((0, 1), (7, 3)):
        assert all(y.shape == (count, 48) for times in done[first : first + 7] for y in times)
        for alone, behind in zip(done[first + 1], done[first + 2], strict=True):
            assert torch.equal(alone, behind)


def test_what_is_not_there_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("humming", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    text, prepare = peers_linear.found(tmp_path / "none.so")["marlin"]
    assert prepare is None
    assert text.startswith("not importable: ")
    text, prepare = peers_linear.found()["humming"]
    assert prepare is None
    assert "humming" in text


def from_marlin(stored: Tensor, raised: float) -> Tensor:
    """Scales (N, K / 16) of Marlin's bytes: the permutations undone one column at a time."""
    groups, n = stored.shape
    values = torch.empty(groups, n)
    for column in range(n):
        block, at = divmod(column, 64)
        at = at // 4 * 4 + [0, 2, 1, 3][at % 4]
        source = block * 64 + at % 8 * 8 + at // 8
        bits = stored[:, column].view(torch.uint8).int()
        exponent, mantissa = bits >> 3, bits & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 15 - 3)
        values[:, source] = torch.where(bits == 0, 0.0, value) / 2**7 / raised
    return values.t()


def test_scales_for_marlin() -> None:
    torch.manual_seed(0)
    w = jitquant.quantize_weight_nvfp4(torch.randn(128, 96) * torch.rand(128, 1))
    scales, raised = peers_linear.marlin_scales(w.x_sf)
    assert raised == 1
    assert torch.equal(from_marlin(scales, raised), w.x_sf.float())
    low = (w.x_sf.float() / 64).to(torch.float8_e4m3fn)
    scales, raised = peers_linear.marlin_scales(low)
    assert raised == 64
    assert torch.equal(from_marlin(scales, raised), low.float())
