"""The demo's table, picture and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from harness.demo.layers import Row

SERIES = (("weight", "#4c72b0", "s"), ("activation", "#dd8452", "o"), ("output", "#55a868", "D"))


def short(name: str) -> str:
    """A layer's name without the words that all of them share."""
    name = re.sub(r"^encoder\.layer\.|^model\.layers\.|^layers?\.", "", name)
    name = name.replace("attention.self.", "").replace("self_attn.", "").replace("mlp.", "")
    return re.sub(r"\.dense$", "", name).replace("attention", "attn")


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def table(rows: Sequence[Row], title: str, caption: str, width: int) -> Table:
    """All rows and, below them, means and sums; 80 columns are enough for usual layer names."""
    view = Table(
        title=title,
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1 if width >= 100 else 0),
    )
    view.add_column("layer", no_wrap=True)
    view.add_column("shape", no_wrap=True)
    for heading in ("act.\ndB", "weight\ndB", "output\ndB", "MiB\nbefore", "MiB\nafter"):
        style = "bold" if "output" in heading else ""
        view.add_column(heading, justify="right", no_wrap=True, style=style)
    view.add_column("us", justify="right", no_wrap=True)
    view.add_column("launches", justify="right", no_wrap=True)
    for row in rows:
        view.add_row(
            short(row.layer),
            "x".join(map(str, row.shape)),
            f"{row.activation_db:.2f}",
            f"{row.weight_db:.2f}",
            f"{row.output_db:.2f}",
            _mib(row.bytes_before),
            _mib(row.bytes_after),
            _us(row.microseconds),
            "-" if row.launches is None else str(row.launches),
        )
    view.add_section()
    count = len(rows)
    view.add_row(
        f"{count} layers",
        "mean, sum",
        f"{sum(r.activation_db for r in rows) / count:.2f}",
        f"{sum(r.weight_db for r in rows) / count:.2f}",
        f"{sum(r.output_db for r in rows) / count:.2f}",
        _mib(sum(r.bytes_before for r in rows)),
        _mib(sum(r.bytes_after for r in rows)),
        _us(sum(r.microseconds for r in rows)),
        "-" if rows[0].launches is None else str(sum(r.launches or 0 for r in rows)),
    )
    return view


def picture(rows: Sequence[Row], title: str, path: Path) -> None:
    """Per-layer SQNR of weight, activation and output."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [short(row.layer) for row in rows]
    width = min(24.0, max(7.0, 0.3 * len(rows)))
    figure, axes = plt.subplots(figsize=(width, 5.2), layout="constrained")
    for series, color, marker in SERIES:
        values = [getattr(row, f"{series}_db") for row in rows]
        mean = sum(values) / len(values)
        axes.plot(
            values,
            marker=marker,
            color=color,
            markersize=5,
            linewidth=1.2,
            label=f"{series} (mean {mean:.1f} dB)",
        )
    groups = [name.split(".")[0] for name in names]
    for index in range(1, len(names)):
        if groups[index] != groups[index - 1]:
            axes.axvline(index - 0.5, color="0.85", linewidth=1, zorder=0)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlim(-0.7, len(names) - 0.3)
    axes.set_ylabel("SQNR in dB (higher is better)")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9, borderpad=0.2
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
