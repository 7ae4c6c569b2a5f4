"""The demo's measures, on tensors whose answers are known."""

from __future__ import annotations

import io
import math

import pytest
import torch
from harness import DemoError
from harness.demo import layers
from harness.demo.model import Packing, load, sentences
from harness.demo.report import picture, short, table
from rich.console import Console
from torch import nn


def test_sqnr_is_the_ratio_of_energies() -> None:
    x = torch.tensor([3.0, 4.0])
    assert layers.sqnr_db(x, x) == math.inf
    assert layers.sqnr_db(x, torch.tensor([3.0, 3.5])) == pytest.approx(20.0)
    assert layers.sqnr_db(torch.zeros(2), x) == -math.inf


def test_a_layer_is_measured() -> None:
    torch.manual_seed(0)
    row = layers.measure(
        "layer", nn.Linear(64, 32), torch.randn(10, 64), layers.Settings(granularity="row")
    )
    assert row.shape == (10, 64, 32)
    assert 18 < row.activation_db < 24
    assert 18 < row.weight_db < 24
    assert row.bytes_before == 4 * (10 * 64 + 32 * 64)
    assert row.bytes_after == (10 * 64 + 32 * 64) * 9 // 16 + 4 * 10 + 4
    assert row.launches is None


def test_packing_leaves_padding_out_and_puts_it_back() -> None:
    packing = Packing(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    x = torch.arange(12.0).view(2, 3, 2)
    rows = packing.rows(x)
    assert rows.tolist() == [[0, 1], [2, 3], [6, 7]]
    back = packing.unpack(rows, like=x)
    assert back.tolist() == [[[0, 1], [2, 3], [0, 0]], [[6, 7], [0, 0], [0, 0]]]
    pooled = torch.ones(2, 5)
    assert packing.rows(pooled) is pooled


def test_the_page_has_sentences() -> None:
    found = sentences()
    assert len(found) > 20
    assert all(text[-1] in ".!?" for text in found)


def test_a_directory_without_a_model_is_named(tmp_path: object) -> None:
    with pytest.raises(DemoError, match=r"lacks config\.json"):
        load(tmp_path, torch.device("cpu"))  # type: ignore[arg-type]


def test_names_are_shortened() -> None:
    assert short("encoder.layer.3.attention.self.query") == "3.query"
    assert short("encoder.layer.3.attention.output.dense") == "3.attn.output"
    assert short("pooler.dense") == "pooler"


def test_table_and_picture(tmp_path: object) -> None:
    row = layers.Row("encoder.layer.0.output.dense", (750, 1536, 384), 20, 20, 20, 9, 4, 1.5, 2)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table([row, row], "title", "caption", console.width))
    text = console.export_text()
    assert "0.output" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # nothing is cut off at 80 columns
    picture([row, row], "title", tmp_path / "p.png")  # type: ignore[operator]
    assert (tmp_path / "p.png").stat().st_size > 1000  # type: ignore[operator]
