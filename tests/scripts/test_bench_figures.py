"""The summary of the results, the tables and pictures made from it, and the goals in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness.bench import figures, goals, overview, summary
from harness.bench.__main__ import app
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
SECTIONS = summary.read(ROOT / "results")


def _raw_kernels(us: float) -> dict[str, Any]:
    """A record of two ops at two sizes, as ``./scripts/bench`` writes it."""
    rows = [
        {
            "op": op,
            "m": m,
            "us": us + m,
            "sustained_us": 2 * us,
            "of_floor": 1 / 3,
            "plain_us": 7.0 if op == "b" else None,
            "host_us": 1.0,
        }
        for op in ("b", "a")
        for m in (16, 1)
    ]
    gpu = {"name": "a GPU", "l2_bytes": 5}
    return {"gpu": gpu, "torch": "2", "utc": "now", "n": 48, "dtype": "bfloat16", "rows": rows}


def test_a_section_has_what_the_documents_show() -> None:
    section = summary.section_of("kernels", _raw_kernels(1.5))
    assert section == {
        "gpu": "a GPU",
        "torch": "2",
        "utc": "now",
        "n": 48,
        "dtype": "bfloat16",
        "m": [1, 16],
        "rows": [
            {
                "op": "b",
                "us": [2.5, 17.5],
                "sustained_us": [3.0, 3.0],
                "of_floor": [0.333333, 0.333333],
                "plain_us": [7.0, 7.0],
            },
            {
                "op": "a",
                "us": [2.5, 17.5],
                "sustained_us": [3.0, 3.0],
                "of_floor": [0.333333, 0.333333],
            },
        ],
    }
    assert goals.rows_of(section)["b", 16]["us"] == 17.5
    assert summary.section_of("other", {}) is None
    assert summary.section_of("model-small", {"rows": [{"us": 1.0}]}) == {"rows": [{"us": 1.0}]}


def _raw_peers() -> dict[str, Any]:
    """Records of ops with a fast library at few rows, with another, and with torch.compile only."""
    times = [
        # op, us, torch.compile, peers back to back and behind
        ("fp8-row", 2.0, 3.0, {"vllm": None, "torchao": 4.0, "fbgemm": 5.0}, {"fbgemm": 1.0}),
        ("mxfp8", 2.0, None, {"vllm": 1.5, "torchao": 2.5, "fbgemm": None}, {"torchao": 5.0}),
        ("fp8-block", 2.0, 6.0, {"vllm": None, "torchao": None, "fbgemm": None}, {}),
    ]
    rows = [
        {
            "op": op,
            "m": m,
            "us": us * m,
            "of_floor": 0.5,
            "plain_us": plain and plain * m,
            "peers": {k: v and v * (m if m > 1 else 10) for k, v in peers.items()},
            "behind_us": us if m <= 64 else None,
            "peers_behind": behind if m <= 64 else {},
        }
        for op, us, plain, peers, behind in times
        for m in goals.SIZES
    ]
    versions = {"vllm": "1.2", "torchao": "0.3", "fbgemm": "not importable"}
    origin = {"gpu": "NVIDIA H100 80GB", "utc": "2026-11-24T10", "kernels_cu_sha256": "0123456789"}
    return {**origin, "peers": versions, "n": 48, "dtype": "bfloat16", "rows": rows}


def _peers_section() -> summary.Record:
    section = summary.section_of("kernels-fp8-peers", _raw_peers())
    assert section is not None
    return section


def test_a_section_beside_peers_has_the_best_of_them() -> None:
    section = _peers_section()
    assert section["libraries"] == _raw_peers()["peers"]
    row, _, alone = section["rows"]
    assert (row["peer"], row["peer_us"][:2]) == (["torchao"] * 6, [40.0, 256.0])
    assert row["peer_behind"] == ["fbgemm", "fbgemm", None, None, None, None]
    assert row["peer_behind_us"][:3] == [1.0, 1.0, None]
    assert set(alone) == {"op", "us", "of_floor", "plain_us", "behind_us"}
    rows = goals.rows_of(section)
    assert goals.best_peer(rows, "fp8-row", 64) == (192.0, "torch.compile")
    assert goals.best_peer(rows, "mxfp8", 64) == (96.0, "vLLM")
    assert goals.best_peer_behind(rows, "fp8-row", 64) == (1.0, "FBGEMM")
    assert goals.best_peer_behind(rows, "fp8-row", 1024) is None
    assert goals.with_peers(rows) == ["fp8-row", "mxfp8"]


def test_the_table_of_peers_names_the_fastest(tmp_path: Path) -> None:
    none = {**_peers_section(), "m": [], "rows": []}
    summary.write(tmp_path, {"kernels-fp8-peers": _peers_section(), "kernels-peers": none})
    assert figures.peers(tmp_path)[2:] == [
        "| `quantize_fp8(x, granularity='row')` | 1.50 | 1.50 | 1.50 | 1.50 | 1.50 | 1.50 "
        "| 0.50 | 0.50 | torch.compile; FBGEMM at 1 behind, 64 behind |",
        "| `quantize_mxfp8(x)` | 7.50 | 0.75 | 0.75 | 0.75 | 0.75 | 0.75 | 2.50 | 2.50 "
        "| vLLM; torchao at 1 behind, 64 behind |",
        "",
        "*H100 80GB, 2026-11-24, kernels 01234567.*",
        "*vLLM 1.2, torchao 0.3, FBGEMM not importable.*",
    ]


def test_goals_beside_peers_are_for_the_sizes_that_these_were_timed_at() -> None:
    section = _peers_section()
    for row in section["rows"]:
        if row["op"] == "mxfp8":
            row["peer_us"][1] = row["peer_behind_us"][0] = None
    rows = goals.rows_of(section)
    calls = dict.fromkeys(("fp8-row", "mxfp8"), "call(x)")
    behind = "times as fast as the best peer, both behind a plain kernel"
    lines = goals.table(goals.beside_peers(rows), rows, calls)[2:]
    assert [line.split(" | ")[1:] for line in lines[1:]] == [
        [f"{behind}, at least 1.00 at 1 and 64", "0.50, 0.50", "missed at 1, 64 |"],
        [
            "times as fast as the best peer, at least 1.00 at 1, 1024, 4096, 16384 and 65536",
            "7.50, 0.75, 0.75, 0.75, 0.75",
            "missed at 1024, 4096, 16384, 65536 |",
        ],
        [f"{behind}, at least 1.00 at 64", "2.50", "met |"],
    ]
    assert lines[0].endswith("| 1.50, 1.50, 1.50, 1.50, 1.50, 1.50 | met |")


@pytest.mark.parametrize("compiled", [True, False])
def test_the_norm_of_nvfp4_is_of_a_run_that_has_torch_compile(compiled: bool) -> None:
    norm = {"op": "rmsnorm", "us": [2.0], "of_floor": [0.5]}
    sections = {
        "kernels-peers": {
            "m": [goals.M],
            "rows": [{**norm, "plain_us": [4.0 if compiled else None]}],
        },
        "kernels-fp8-peers": {"m": [], "rows": []},
        "rmsnorm-compiled": {"m": [goals.M], "rows": [{**norm, "plain_us": [6.0]}]},
    }
    best = goals.best_peer(goals.peer_rows(sections), "rmsnorm", goals.M)
    assert best == (4.0 if compiled else 6.0, "torch.compile")


def test_the_summary_is_written_as_it_is_read(tmp_path: Path) -> None:
    path = summary.write(tmp_path, SECTIONS)
    assert path.read_text() == (ROOT / "results" / summary.NAME).read_text()
    for name, section in SECTIONS.items():
        assert f' "{name}": {{' in path.read_text().splitlines()
        for row in section.get("rows", ()):
            assert f"   {json.dumps(row)}" in path.read_text()


def test_a_record_goes_into_the_summary_or_a_file_of_its_own(tmp_path: Path) -> None:
    raw, results = tmp_path / "raw", tmp_path / "results"
    results.mkdir()
    assert summary.save(raw, "kernels", _raw_kernels(1.0)) == raw / "kernels.json"
    assert json.loads((raw / "kernels.json").read_text()) == _raw_kernels(1.0)

    summary.write(results, {"kernels": {}, "host": {"m": 1}})
    (raw / "notes.json").write_text("[]")
    assert summary.add_folder(results, raw) == (["kernels"], ["notes.json"])
    assert summary.save(results, "loader", {"seconds": {"cold": 8.0}}) == results / summary.NAME
    assert summary.read(results) == {
        "host": {"m": 1},
        "kernels": summary.section_of("kernels", _raw_kernels(1.0)),
        "loader": {"seconds": {"cold": 8.0}},
    }
    with pytest.raises(
        ValueError,
        match=r"notes: expected one of experts, fp8_training, gpu_tests,.*shapes, sweep",
    ):
        summary.save(results, "notes", {})
    assert sorted(path.name for path in results.iterdir()) == [summary.NAME]


def test_the_command_takes_raw_records_in(tmp_path: Path) -> None:
    """``./scripts/bench figures --raw DIR``: summary, tables, sentences and pictures follow."""
    raw = tmp_path / "raw"
    results = _copy_of_the_documents(tmp_path)
    summary.save(raw, "loader", {"seconds": {"cold": 34.0, "explain": 0.1}})
    (raw / "notes.json").write_text("{}")
    done = _figures(tmp_path, raw)
    assert done.exit_code == 0, done.output
    assert "took loader from" in done.output
    assert "ignored notes.json" in done.output
    assert "| 34.00 s |" in (tmp_path / "docs" / "loader.md").read_text()
    same = [name for name in figures.DOCUMENTS if name != "docs/loader.md"]
    assert all((tmp_path / name).read_text() == (ROOT / name).read_text() for name in same)
    assert all((results / name).is_file() for name in overview.PICTURES)


def test_numbers_in_sentences_follow(tmp_path: Path) -> None:
    results = _copy_of_the_documents(tmp_path)
    rows = [{**row, "bf16": row["weight_only"]} for row in SECTIONS["linear"]["rows"]]
    summary.write(results, {**SECTIONS, "linear": {**SECTIONS["linear"], "rows": rows}})
    assert _figures(tmp_path).exit_code == 0
    assert "at 1.00 to 1.00 times bf16's speed" in (tmp_path / "docs" / "status.md").read_text()


def test_products_beside_other_libraries_are_of_their_run() -> None:
    ours = {"n": 8, "k": 8, "rows": 1, "weight_only": 2.0}
    peers = {**ours, "weight_only": 9.0, "marlin": 3.0, "humming": 4.0}
    sections = {"linear": {"rows": [ours]}, "linear-peers": {"rows": [peers, ours]}}
    assert summary.products(sections) == [peers]


def test_the_table_of_experts_names_the_routing_and_the_kernels(tmp_path: Path) -> None:
    results = _copy_of_the_documents(tmp_path)
    times = {"floor": 46.6, "layer": 70.1, "behind": 71.5, "bf16": 170.25}
    shape = {"experts": 256, "hidden": 7168, "intermediate": 2048, "tokens": 8, "routing": "one"}
    origin = {"gpu": "NVIDIA H200", "utc": "2026-11-23T10", "kernels_cu_sha256": "0123456789"}
    summary.write(results, {**SECTIONS, "experts": {**origin, "rows": [{**shape, **times}]}})
    assert _figures(tmp_path).exit_code == 0
    text = (tmp_path / "docs" / "measurements.md").read_text()
    line = "| 256 x 7168 x 2048 | 8, same experts | 46.6 | 70.1 | 71.5 | 170 |"
    assert f"{line}\n\n*H200, 2026-11-23, kernels 01234567.*\n\n<!-- end -->" in text


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("linear", {"rows": []}, "the sentence '{} to {} times as fast as bf16"),
        ("linear-peers", {"rows": SECTIONS["linear-peers"]["rows"][1:]}, "needs (8192, 8192, 1)"),
        ("kernels-fp8-peers", {"m": [1, 64]}, "needs ('fp8-rmsnorm', 16384)"),
        ("layers", {"rows": [{"name": "forward, backward"}]}, "the table 'layers' needs 'bf16'"),
        ("rmsnorm-compiled", {"rows": []}, "the sentence"),
    ],
)
def test_a_record_that_lacks_something_changes_nothing(
    tmp_path: Path, section: str, change: dict[str, Any], said: str
) -> None:
    results = _copy_of_the_documents(tmp_path)
    summary.write(results, {**SECTIONS, section: {**SECTIONS[section], **change}})
    done = _figures(tmp_path)
    assert done.exit_code == 2
    assert done.output.startswith("Nothing was written: the ")
    assert said in done.output
    assert all((tmp_path / n).read_text() == (ROOT / n).read_text() for n in figures.DOCUMENTS)
    assert [path.name for path in results.iterdir()] == [summary.NAME]


def test_a_raw_record_without_its_quantities_is_named(tmp_path: Path) -> None:
    _copy_of_the_documents(tmp_path)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "kernels.json").write_text('{"rows": [{"op": "a", "m": 1}]}')
    done = _figures(tmp_path, tmp_path / "raw")
    assert "Nothing was written: kernels.json lacks 'us'. results/README.md" in done.output


def _copy_of_the_documents(root: Path) -> Path:
    """README, docs and summary in a directory; returns that of the summary."""
    for name in figures.DOCUMENTS:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes((ROOT / name).read_bytes())
    (root / "results").mkdir()
    summary.write(root / "results", SECTIONS)
    return root / "results"


def _figures(root: Path, raw: Path | None = None) -> Result:
    words = ["figures", "--results", str(root / "results"), "--root", str(root)]
    return CliRunner().invoke(app, [*words, *(["--raw", str(raw)] if raw else [])])


def test_the_documents_are_those_of_the_results() -> None:
    """After a new measurement: ``./scripts/bench figures``."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in figures.DOCUMENTS}
    for name in figures.TABLES:
        assert any(f"<!-- figures: {name} -->\n\n| " in text for text in texts.values()), name
    for name, text in figures.documents(ROOT, ROOT / "results").items():
        assert text == texts[name], f"{name} is not what results/ say: run ./scripts/bench figures"


@pytest.mark.parametrize("name", overview.PICTURES)
def test_a_picture_shows_the_results(tmp_path: Path, name: str) -> None:
    """After a new measurement: ``./scripts/bench figures``."""
    pytest.importorskip("matplotlib")
    overview.PICTURES[name](ROOT / "results", tmp_path / name)
    drawn, committed = (
        re.findall(r"<text[^>]*>([^<]*)<", path.read_text(encoding="utf-8"))
        for path in (tmp_path / name, ROOT / "results" / name)
    )
    assert drawn == committed
    if name == "overview.svg":
        assert {bar.label for bar in overview.bars(ROOT / "results")} < set(drawn)
        assert sum(text.endswith("%") for text in drawn) == len(overview.SHOWN)
        for model, speeds in overview.decoded(ROOT / "results").items():
            assert {model, *(f"{speed:.0f}" for speed in speeds.values())} < set(drawn)
    elif name == "peers.svg":
        assert set(overview.lines(ROOT / "results")) < set(drawn)
    else:
        assert {"FP8, one scale", "fused", "amax, scale, cast", "copy"} < set(drawn)


def test_peers_are_shown_where_they_were_timed() -> None:
    """The shares of the picture are those that the table's ratios follow from."""
    curves = overview.lines(ROOT / "results")["FP8, 1x128"]
    assert set(goals.SIZES) <= set(curves["peer"]) <= set(curves["ours"])
    rows = goals.rows_of(SECTIONS["kernels-fp8-peers"])
    for m, share in curves["peer"].items():
        assert curves["ours"][m] / share == pytest.approx(goals.OVER_PEER.of(rows, "fp8-group", m))


def test_only_what_is_marked_is_made_anew(tmp_path: Path) -> None:
    row = {"op": "rmsnorm", "us": [2.0], "plain_us": [7.0]}
    summary.write(tmp_path, {"rmsnorm-compiled": {"m": [16], "rows": [row]}})
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


def test_the_bounds_of_neighbors_are_said_once() -> None:
    goal = goals.Goal("op", "time", goals.TIME, {1: 1.0, 2: 5.0, 3: 5.0})
    rows: goals.Rows = {("op", m): {"us": 2.0} for m in (1, 2, 3)}
    assert goals.table([goal], rows, {"op": "call(x)"})[-1] == (
        "| `call(x)` | time, at most 1 us at 1, 5 us at 2 and 3 | 2.00, 2.00, 2.00 | missed at 1 |"
    )
