"""The demo's table, picture and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from harness.demo.formats import FORMATS, Row

GOOD = 1.0
"""Percent more bits per byte than bf16 that are called good enough here."""

COLORS = {16: "#4c72b0", 8: "#55a868", 4: "#dd8452"}
INPUTS = {16: "inputs in bf16", 8: "inputs in 8 bits", 4: "inputs in 4 bits"}


def more(row: Row, rows: Sequence[Row]) -> float:
    """Percent of bits per byte that a format needs more than the first."""
    return 100 * (row.bits_per_byte / rows[0].bits_per_byte - 1)


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Format, bits of an input, bits per byte, percent more than bf16, and size, for people."""
    how = FORMATS[row.format]
    return (
        how.label,
        str(how.inputs),
        f"{row.bits_per_byte:.4f}",
        f"{more(row, rows):+.2f}%" if row is not rows[0] else "-",
        f"{row.size / 1e6:.2f} MB",
    )


def table(rows: Sequence[Row]) -> Table:
    """A row for each format."""
    view = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in ("weights", "input\nbits", "bits\nper byte", "more than\nbf16", "size"):
        view.add_column(heading, justify="left" if heading == "weights" else "right")
    fast = any(row.per_second is not None for row in rows)
    if fast:
        view.add_column("tokens/s", justify="right")
    for row in rows:
        speed = [] if row.per_second is None else [f"{row.per_second:.0f}"]
        view.add_row(*cells(row, rows), *speed)
    return view


def markdown(rows: Sequence[Row]) -> str:
    """The table of the documents."""
    lines = ["| weights | input bits | bits per byte | more than bf16 | size |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    lines += [f"| {' | '.join(cells(row, rows))} |" for row in rows]
    return "\n".join(lines)


def picture(rows: Sequence[Row], title: str, path: Path) -> None:
    """A bar for each format: how many more bits per byte it needs than bf16."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "jitquant"
    from matplotlib import pyplot as plt

    shown = rows[1:]
    figure, axes = plt.subplots(figsize=(7, 1.5 + 0.42 * len(shown)), layout="constrained")
    most = max([GOOD, *(more(row, rows) for row in shown)])
    seen: set[int] = set()
    for i, row in enumerate(shown):
        inputs = FORMATS[row.format].inputs
        value = more(row, rows)
        label = None if inputs in seen else INPUTS[inputs]
        seen.add(inputs)
        axes.barh(i, value, color=COLORS[inputs], label=label, height=0.7)
        axes.text(max(value, 0) + most * 0.015, i, f"{value:.2f}%", va="center", fontsize=12)
    axes.axvline(GOOD, color="0.4", linewidth=1.2, linestyle="--")
    axes.text(GOOD, -0.75, "good enough ", ha="right", va="bottom", fontsize=12, color="0.3")
    axes.set_yticks(range(len(shown)), [FORMATS[row.format].label for row in shown], fontsize=12)
    axes.set_ylim(len(shown) - 0.4, -1.3)
    axes.set_xlim(min(0.0, *(more(row, rows) for row in shown)), most * 1.18)
    axes.set_xlabel("more bits per byte than bf16, in % (less is better)", fontsize=12)
    axes.tick_params(axis="x", labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=12, frameon=False)
    axes.set_title(title, loc="left", fontsize=12)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
