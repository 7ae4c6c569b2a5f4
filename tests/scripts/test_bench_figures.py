"""The tables and the picture that are made from results/, and the goals in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.bench import figures, goals, overview

ROOT = Path(__file__).parents[2]


def test_the_tables_are_those_of_the_results() -> None:
    """After a new measurement: ``./scripts/bench figures``."""
    documents = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in figures.DOCUMENTS]
    for name in figures.TABLES:
        assert any(f"<!-- figures: {name} -->\n\n| " in document for document in documents)
    for document in documents:
        assert figures.updated(document, ROOT / "results") == document


def test_the_picture_shows_the_results(tmp_path: Path) -> None:
    """After a new measurement: ``./scripts/bench figures``."""
    pytest.importorskip("matplotlib")
    overview.draw(ROOT / "results", tmp_path / "overview.svg")
    drawn, committed = (
        re.findall(r"<text[^>]*>([^<]*)<", path.read_text(encoding="utf-8"))
        for path in (tmp_path / "overview.svg", ROOT / "results" / "overview.svg")
    )
    assert {bar.label for bar in overview.bars(ROOT / "results")} < set(drawn)
    assert sum(text.endswith("%") for text in drawn) == len(overview.SHOWN)
    assert drawn == committed


def test_only_what_is_marked_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "rmsnorm-compiled.json").write_text(
        '{"rows": [{"m": 16, "us": 2.0, "plain_us": 7.0}]}', encoding="utf-8"
    )
    before = "a\n<!-- figures: compiled -->\nold\n<!-- end -->\nb <!-- end -->\n"
    made = figures.updated(before, tmp_path)
    assert "old" not in made
    assert "| times as fast | 3.50 |" in made
    assert made.startswith("a\n<!-- figures: compiled -->\n")
    assert made.endswith("<!-- end -->\nb <!-- end -->\n")
    assert figures.updated(made, tmp_path) == made
    with pytest.raises(KeyError, match="other"):
        figures.updated("<!-- figures: other -->\n<!-- end -->", tmp_path)


@pytest.mark.parametrize(
    ("quantity", "bound", "met"),
    [
        (goals.TIME, 3.0, True),
        (goals.TIME, 2.9, False),
        (goals.OF_FLOOR, 0.8, True),
        (goals.OF_FLOOR, 0.81, False),
        (goals.FLOORS, 1.25, True),
        (goals.FLOORS, 1.24, False),
        (goals.CASTS, 1.5, True),
        (goals.CASTS, 1.49, False),
    ],
)
def test_a_goal_is_met_or_missed(quantity: goals.Quantity, bound: float, met: bool) -> None:
    rows: goals.Rows = {
        ("op", 64): {"us": 3.0, "of_floor": 0.8},
        ("cast", 64): {"us": 2.0, "of_floor": 1.0},
    }
    goal = goals.Goal("op", "a goal", quantity, {64: bound})
    line = goals.table([goal], rows, {"op": "call(x)"})[-1]
    assert line.endswith("| met |" if met else "| missed at 64 |")


def test_the_bounds_of_neighbours_are_said_once() -> None:
    goal = goals.Goal("op", "time", goals.TIME, {1: 1.0, 2: 5.0, 3: 5.0})
    rows: goals.Rows = {("op", m): {"us": 2.0} for m in (1, 2, 3)}
    assert goals.table([goal], rows, {"op": "call(x)"})[-1] == (
        "| `call(x)` | time, at most 1 us at 1, 5 us at 2 and 3 | 2.00, 2.00, 2.00 | missed at 1 |"
    )
