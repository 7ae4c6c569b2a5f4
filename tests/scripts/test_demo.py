"""The demo, its language model, and the table of docs/accuracy.md, which the demo makes."""

from __future__ import annotations

import copy
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.demo import formats, report
from harness.demo.formats import FORMATS, Row
from language_model import (
    WEIGHTS,
    Cache,
    LanguageModel,
    bits_per_byte,
    load,
    sizes_for,
    texts,
    windows,
    written,
)
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
ROWS = [Row(name, 2 + 0.001 * i, 10_000 - i, "text", None) for i, name in enumerate(FORMATS)]


@pytest.fixture(scope="module")
def small() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(hidden=128, layers=2, intermediate=128).to(torch.bfloat16).eval()


def test_the_cache_changes_nothing(small: LanguageModel) -> None:
    text = torch.arange(60).reshape(2, 30) % 256
    cache = Cache(2)
    with torch.no_grad():
        whole = small(text)
        parts = [small(part, cache) for part in (text[:, :9], text[:, 9:10], text[:, 10:11])]
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, :11], rtol=0.05, atol=0.02)


def test_bits_of_a_model_that_knows_nothing(small: LanguageModel) -> None:
    model = copy.deepcopy(small)
    torch.nn.init.zeros_(model.lm_head.weight)
    text = torch.randint(256, (5, 17), dtype=torch.uint8)
    assert bits_per_byte(model, text, batch=2) == pytest.approx(8)


def test_text_that_is_held_out_is_not_trained_on() -> None:
    train, held_out = (bytes(part.tolist()) for part in texts())
    assert len(train) > 10 * len(held_out) > 2_000_000
    begins = range(0, len(held_out) - 200, len(held_out) // 20)
    seen = sum(held_out[begin : begin + 200] in train for begin in begins)
    assert seen <= 3  # some modules of the library have near copies
    views = windows(torch.arange(100, dtype=torch.uint8), 4, 10)
    assert views[:, 0].tolist() == [0, 29, 59, 89]
    assert views.shape == (4, 11)


def test_the_model_that_is_in_the_repository_has_learned() -> None:
    model = load()
    assert WEIGHTS.stat().st_size < 6_000_000
    _, held_out = texts()
    bits = bits_per_byte(model, windows(held_out, 4, 256))
    assert bits < 2.6  # of 8; zlib needs about 2.5 with all of a file to look at
    assert written(model, "import o", 1) == "s"


def test_sizes() -> None:
    for parameters in (2.6e6, 20e6):
        sizes = sizes_for(parameters)
        model = LanguageModel(**sizes)
        count = sum(p.numel() for p in model.parameters())
        assert count == pytest.approx(parameters, rel=0.15)


@pytest.mark.slow
def test_every_format_converts(small: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = formats.Measure(small, torch.device("cpu"), 2)
    bf16 = measure.row("bf16", "", 0)
    convert, models = formats.converted, []

    def kept(*arguments: Any) -> Any:
        made = convert(*arguments)
        models.append(made[0])
        return made

    monkeypatch.setattr(formats, "converted", kept)
    for name in FORMATS:
        row = measure.row(name, "a", 2) if name == "nvfp4" else measure.row(name, "", 0)
        assert row.bits_per_byte == pytest.approx(bf16.bits_per_byte, rel=0.05)
        made = models.pop()
        assert type(made.lm_head) is torch.nn.Linear
        if name != "bf16":
            assert type(made.layers[0].mlp.up_proj) is not torch.nn.Linear
            linears = 2 * (4 * 128 * 128 + 3 * 128 * 128)
            assert bf16.size - row.size == linears * (16 - FORMATS[name].bits) / 8
    assert row.per_second is None


def test_tokens_per_second(small: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured and shown with a GPU, without one."""
    measure = formats.Measure(small, torch.device("cpu"), 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    measure.device = torch.device("cuda")  # asked only for its type
    row = measure.row("nvfp4", "a", 2)
    assert row.per_second is not None
    assert row.per_second > 0
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(report.table([replace(row, per_second=123.4) for row in ROWS]))
    lines = console.export_text().splitlines()
    assert sum("tokens/s" in line for line in lines) == 1
    assert sum(line.rstrip().endswith(" 123") for line in lines) == len(ROWS)
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


def test_table_and_picture(tmp_path: Path) -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(report.table(ROWS))
    text = console.export_text()
    assert "NVFP4, 4over6" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # nothing is cut off at 80 columns
    report.picture(ROWS, "title", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    report.picture(ROWS, "title", tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["accuracy.json", "accuracy-20m.json"])
def test_the_documents_have_the_table_of_the_record(name: str) -> None:
    record = json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
    rows = [Row(**row) for row in record["rows"]]
    assert [row.format for row in rows] == list(FORMATS)
    assert all(math.isfinite(row.bits_per_byte) for row in rows)
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert report.markdown(rows) in page
    assert f"{record['windows']} windows" in page
