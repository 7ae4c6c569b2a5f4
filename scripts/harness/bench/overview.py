"""The pictures of the README and of docs/performance.md, drawn from results/summary.json."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from harness.bench import summary
from harness.bench.goals import M, Rows, best_peer, peer_rows, rows_of

#: The ops of the first picture: section, op, label.
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
STYLE = {
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
#: The ops of the second picture, and their labels.
COMPARED = {
    "fp8-tensor": "FP8, one scale",
    "fp8-group": "FP8, 1x128",
    "fp8-rmsnorm": "RMSNorm + FP8",
    "fp8-rmsnorm-residual-group": "add, norm + 1x128",
    "fp8-silu-group": "SwiGLU + 1x128",
    "rmsnorm": "RMSNorm + NVFP4",
}


class Bar(NamedTuple):
    """One kernel: its share of the copy floor, and the best peer's on its GPU if one was timed."""

    label: str
    ours: float
    peer: float | None


def bars(results: Path) -> list[Bar]:
    """The kernels at 16384 x 7168 in bf16, as shares of the speed of a copy."""
    sections = summary.read(results)
    rows = {stem: rows_of(sections[stem]) for stem in ("kernels", "kernels-fp8")}
    beside = peer_rows(sections)
    return [
        Bar(label, rows[stem][op, M]["of_floor"], _peer_of_floor(beside, op, M))
        for stem, op, label in SHOWN
    ]


def _peer_of_floor(rows: Rows, op: str, m: int) -> float | None:
    """The best peer's share of the copy floor; None: none was timed."""
    row, peer = rows[op, m], best_peer(rows, op, m)
    return float(row["of_floor"] * row["us"] / peer[0]) if peer else None


def products(results: Path) -> tuple[float, list[tuple[str, float]]]:
    """One row times an 8192 x 8192 weight: us to read the weight, and us by library.

    Raises:
        KeyError: the summary lacks it, or another library's time of it.
    """
    rows = {
        (row["n"], row["k"], row["rows"]): row for row in summary.products(summary.read(results))
    }
    row = rows[8192, 8192, 1]
    names = {
        "cuBLAS, bf16": "bf16",
        "humming": "humming",
        "Marlin (vLLM)": "marlin",
        "jitquant": "weight_only",
    }
    return row["floor"], [(name, row[key]) for name, key in names.items()]


#: The models of the first picture, by section, and the formats, with their colors.
MODELS = {
    "model-llama-8b": "Llama-3.1-8B",
    "model-qwen3-30b-a3b": "Qwen3-30B-A3B",
    "model-qwen3-32b": "Qwen3-32B",
}
MODEL_FORMATS = {
    "bf16": ("bf16, transformers", PLAIN),
    "bf16-few": ("bf16, same decoder", THEIRS),
    "w4a16": ("NVFP4 weights", OURS),
}


def decoded(results: Path) -> dict[str, dict[str, float]]:
    """By model and format, tokens a second of one sequence."""
    sections = summary.read(results)
    return {
        label: {
            row["format"]: 1e6 / row["us"]
            for row in sections[name]["rows"]
            if row["sequences"] == 1 and row["format"] in MODEL_FORMATS
        }
        for name, label in MODELS.items()
    }


def draw(results: Path, path: Path) -> None:
    """Write the picture as SVG: panels one above the other, readable on a phone.

    Args:
        results: the directory of the summary.
        path: where the picture goes.

    Raises:
        KeyError: the summary lacks an op or a size that is shown.
        OSError: there is no summary.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 11.2), layout="constrained", facecolor="white")
        upper, lower, last = figure.subplots(3, 1, height_ratios=(9, 4.2, 6))

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
        lower.set_xlim(0, 1.2 * max(us for _, us in timed))
        lower.set_ylim(0, len(timed) + 0.5)
        lower.set_xticks([])
        lower.set_title("One token times an 8192² weight", loc="left", weight="bold", size=14)

        models, ticks, place = decoded(results), [], 0.0
        for speeds in models.values():
            ticks.append(place - (len(speeds) - 1) / 2)
            for format, speed in speeds.items():
                name, color = MODEL_FORMATS[format]
                label = name if place > -len(MODEL_FORMATS) else None
                last.barh(place, speed, 0.86, color=color, label=label)
                last.text(speed + 4, place, f"{speed:.0f}", va="center", size=11)
                place -= 1
            place -= 0.8
        last.set_yticks(ticks, list(models))
        last.set_xlim(0, 1.12 * max(max(speeds.values()) for speeds in models.values()))
        last.set_xticks([])
        last.set_title("Decoding one sequence, tokens/s", loc="left", weight="bold", size=14)
        figure.legend(
            *last.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=11,
            handlelength=1,
        )
        for axes in (upper, lower, last):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=0)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def lines(results: Path) -> dict[str, dict[str, dict[int, float]]]:
    """For each label of `COMPARED`, "ours" and "peer": the share of the copy floor by M."""
    rows, made = peer_rows(summary.read(results)), {}
    for op, label in COMPARED.items():
        sizes = [m for name, m in rows if name == op]
        peer = {m: share for m in sizes if (share := _peer_of_floor(rows, op, m)) is not None}
        if not peer:
            raise KeyError(f"a peer's time of {op}")
        made[label] = {"ours": {m: rows[op, m]["of_floor"] for m in sizes}, "peer": peer}
    return made


def draw_peers(results: Path, path: Path) -> None:
    """Write the share of the copy floor over M, with the best peer's, as SVG: six small panels.

    Args:
        results: the directory of the summary.
        path: where the picture goes.

    Raises:
        KeyError: the summary lacks an op that is shown.
        OSError: there is no summary.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 7.6), layout="constrained", facecolor="white")
        panels = figure.subplots(3, 2, sharex=True, sharey=True).flat
        for axes, (label, curves) in zip(panels, lines(results).items(), strict=True):
            axes.axhline(100, color=INK, lw=1, ls="--", label="copy")
            for curve, color, name in (("ours", OURS, "jitquant"), ("peer", THEIRS, "best peer *")):
                sizes, shares = zip(*sorted(curves[curve].items()), strict=True)
                percent = [share * 100 for share in shares]
                axes.plot(sizes, percent, color=color, lw=2.5, marker="o", ms=4, label=name)
            axes.set_title(label, loc="left", weight="bold", size=13)
            axes.set_xscale("log", base=2)
            axes.set_xticks([64, 1024, 16384], ["64", "1k", "16k"])
            axes.set_xlim(40, 90000)
            axes.set_ylim(0, 112)
            axes.set_yticks([0, 50, 100], ["0", "50%", "copy"])
            axes.grid(axis="y", color="#e3e6ea")
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(length=0)
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[1:], names[1:], loc="outside lower center", ncols=2, frameon=False)
        for axes in figure.axes[-2:]:
            axes.set_xlabel("rows")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def draw_fused(results: Path, path: Path) -> None:
    """Write us over M of `quantize_fp8` and of its three kernels apart, as SVG: two panels.

    Args:
        results: the directory of the summary.
        path: where the picture goes.

    Raises:
        KeyError: the summary lacks the measurement.
        OSError: there is no summary.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [r for r in summary.read(results)["granularity"]["rows"] if r["table"] == "fused"]
    titles = {"tensor": "FP8, one scale", "row": "FP8, per row"}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained", facecolor="white")
        for axes, (kind, title) in zip(
            figure.subplots(1, 2, sharex=True, sharey=True), titles.items(), strict=True
        ):
            shown = [row for row in rows if f"'{kind}'" in row["call"]]
            sizes = [row["shape"][0] for row in shown]
            floors = [row["floor_us"] for row in shown]
            axes.plot(sizes, floors, color=INK, lw=1, ls="--", label="copy")
            for key, color, name in (
                ("us", OURS, "fused"),
                ("unfused_us", THEIRS, "amax, scale, cast"),
            ):
                times = [row[key] for row in shown]
                axes.plot(sizes, times, color=color, lw=2.5, marker="o", ms=4, label=name)
            axes.set_title(title, loc="left", weight="bold", size=13)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([1, 64, 1024, 65536], ["1", "64", "1k", "64k"])
            axes.set_yticks([1, 10, 100, 1000], ["1 µs", "10", "100", "1000"])
            axes.set_ylim(0.8, 1000)
            axes.grid(axis="y", color="#e3e6ea")
            axes.spines[["top", "right"]].set_visible(False)
            axes.minorticks_off()
            axes.tick_params(length=0)
            axes.set_xlabel("rows of 7168")
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


PICTURES = {"overview.svg": draw, "peers.svg": draw_peers, "fused.svg": draw_fused}
