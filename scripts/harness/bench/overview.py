"""The picture at the top of the README, drawn from the files in results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from harness.bench.goals import PEERS, SIZES

M = 16384
#: The ops shown: file, op, label.
SHOWN = (
    ("kernels", "quantize-tensor", "NVFP4"),
    ("kernels", "quantize-row", "NVFP4, per row"),
    ("kernels", "rmsnorm", "RMSNorm + NVFP4"),
    ("kernels", "swiglu", "SwiGLU + NVFP4"),
    ("kernels-fp8", "fp8-row", "FP8, per row"),
    ("kernels-fp8", "fp8-group", "FP8, 1x128"),
    ("kernels-fp8", "mxfp8", "MXFP8"),
    ("kernels-fp8", "fp8-rmsnorm", "RMSNorm + FP8"),
    ("kernels-fp8", "fp8-silu-group", "SwiGLU + FP8 1x128"),
)
OURS, THEIRS, PLAIN, INK = "#2f6f4f", "#b5651d", "#8a93a0", "#1d2530"


class Bar(NamedTuple):
    """One kernel: its share of the copy floor, and the best peer's share if one was timed."""

    label: str
    ours: float
    peer: float | None


def _record(results: Path, stem: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((results / f"{stem}.json").read_text(encoding="utf-8"))
    return record


def bars(results: Path) -> list[Bar]:
    """The kernels at 16384 x 7168 in bf16, as shares of the speed of a copy."""
    rows = {
        row["op"]: row
        for stem in ("kernels", "kernels-fp8")
        for row in _record(results, stem)["rows"]
        if row["m"] == M
    }
    (compiled,) = (row for row in _record(results, "rmsnorm-compiled")["rows"] if row["m"] == M)
    peers = {op: times[SIZES.index(M)] for op, times in PEERS.items()}
    peers["rmsnorm"] = compiled["plain_us"]
    return [
        Bar(
            label,
            rows[op]["of_floor"],
            rows[op]["floor_us"] / peers[op] if op in peers else None,
        )
        for _, op, label in SHOWN
    ]


def products(results: Path) -> tuple[float, list[tuple[str, float]]]:
    """One row times an 8192 x 8192 weight: us to read the weight, and us by library."""
    (row,) = (
        row
        for row in _record(results, "linear-peers")["rows"]
        if (row["n"], row["k"], row["rows"]) == (8192, 8192, 1)
    )
    names = {
        "cuBLAS, bf16": "bf16",
        "humming": "humming",
        "Marlin (vLLM)": "marlin",
        "jitquant": "weight_only",
    }
    return row["floor"], [(name, row[key]) for name, key in names.items()]


def draw(results: Path, path: Path) -> None:
    """Write the picture as SVG: two panels, one above the other, readable on a phone.

    Args:
        results: the directory of the files that ``./scripts/bench`` wrote.
        path: where the picture goes.

    Raises:
        KeyError: a file lacks an op or a size that is shown.
        OSError: a file is missing.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "jitquant",
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 13,
        "text.color": INK,
        "axes.edgecolor": PLAIN,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(6.4, 7.6), layout="constrained", facecolor="white")
        upper, lower = figure.subplots(2, 1, height_ratios=(9, 4.2))

        shown = bars(results)
        places = range(len(shown), 0, -1)
        upper.barh(places, [bar.ours * 100 for bar in shown], 0.66, color=OURS, label="jitquant")
        first = True
        for place, bar in zip(places, shown, strict=True):
            upper.text(
                bar.ours * 100 - 2,
                place,
                f"{bar.ours:.0%}",
                color="white",
                ha="right",
                va="center",
                weight="bold",
            )
            if bar.peer is not None:
                label = "best peer *" if first else None
                upper.vlines(bar.peer * 100, place - 0.42, place + 0.42, THEIRS, lw=5, label=label)
                first = False
        upper.axvline(100, color=INK, lw=1.2, ls="--")
        upper.set_yticks(places, [bar.label for bar in shown])
        upper.set_xlim(0, 109)
        upper.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "copy"])
        upper.set_title("Speed, % of a copy of the same bytes", loc="left", weight="bold", size=14)
        upper.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.06), ncols=2, frameon=False)

        floor, timed = products(results)
        places = range(len(timed), 0, -1)
        colors = [PLAIN, THEIRS, THEIRS, OURS]
        lower.barh(places, [us for _, us in timed], 0.66, color=colors)
        for place, (_, us) in zip(places, timed, strict=True):
            lower.text(us + 0.5, place, f"{us:.1f} µs", va="center")
        lower.axvline(floor, color=INK, lw=1.2, ls="--")
        lower.text(floor + 0.4, 0.3, f"reading the weight: {floor:.1f} µs", size=11, va="center")
        lower.set_yticks(places, [name for name, _ in timed])
        lower.set_xlim(0, 41)
        lower.set_ylim(0, len(timed) + 0.5)
        lower.set_xticks([])
        lower.set_title("One token times an 8192² weight", loc="left", weight="bold", size=14)
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=0)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
