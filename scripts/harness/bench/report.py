"""The benchmark's tables and picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from harness.bench.host import HostRow
from harness.bench.kernels import Measurement
from harness.bench.op import Op
from harness.bench.sweep import OPS as SWEPT
from harness.bench.sweep import Point, worst
from harness.timing import Ceilings


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _peer(best: tuple[float, str] | None) -> str:
    return "{:.2f} {}".format(*best) if best else ""


def kernel_table(op: Op, rows: Sequence[Measurement], caption: str) -> Table:
    """All sizes of one op, and a line under them."""
    view = Table(
        title=f"{op.name}: {op.call}",
        title_justify="left",
        caption=escape(caption) or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
        collapse_padding=True,  # for 120 columns
    )
    for heading in (
        "M",
        "us",
        "sustained\nus",
        "floor\nus",
        "of\nfloor",
        "launches",
        "compiled\nus",
        "times\nfaster",
        "best peer\nus",
        "behind\nus",
        "best peer\nbehind us",
    ):
        view.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        faster = row.plain_us / row.us if row.us and row.plain_us else None
        view.add_row(
            str(row.m),
            _number(row.us, ".2f"),
            _number(row.sustained_us, ".2f"),
            _number(row.floor_us, ".2f"),
            _number(row.of_floor, ".0%"),
            _number(row.launches, "d"),
            _number(row.plain_us, ".2f"),
            _number(faster, ".2f"),
            _peer(row.best_peer),
            _number(row.behind_us, ".2f"),
            _peer(row.best_peer_behind),
        )
    return view


def remarks(rows: Sequence[Measurement]) -> list[str]:
    """What the rows of one op have to say, each once."""
    texts = [f"{row.error}|{row.note}".strip("|") for row in rows]
    texts += [f"{name}: {text}" for row in rows for name, text in row.peer_errors.items()]
    return [text for text in dict.fromkeys(texts) if text]


def sweep_table(points: Sequence[Point]) -> Table:
    """A line a case, a column an op."""
    view = Table(
        title="microseconds, part of the floor",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
    )
    view.add_column("case", no_wrap=True)
    for op in SWEPT:
        view.add_column(op, justify="right", no_wrap=True)
    by_case: dict[str, dict[str, Point]] = {}
    for point in points:
        by_case.setdefault(point.case, {})[point.op] = point
    for case, mine in by_case.items():
        view.add_row(case, *(_swept(mine.get(op)) for op in SWEPT))
    return view


def _swept(point: Point | None) -> str:
    if point is None or point.us is None:
        return "-"
    return f"{point.us:.1f}  {_number(point.of_floor, '.0%'):>4}"


def sweep_summary(points: Sequence[Point]) -> list[str]:
    """Each op's worst point, what fp16 and the swizzled layout cost, and the worst point of all."""
    lines = []
    for op in SWEPT:
        if (point := worst(points, op)) is not None:
            lines.append(f"{op}: worst at {_named(point)}")
    for group, usual in (("fp16", "bf16"), ("swizzled", "linear")):
        ratios = [
            f"{point.op} {point.per_value:.3f}"
            for point in points
            if point.group == group and point.per_value is not None
        ]
        if ratios:
            lines.append(f"{group} / {usual}: {', '.join(ratios)}")
    if (point := worst(points)) is not None:
        lines.append(f"Worst point: {point.op} at {_named(point)}")
    return lines


def _named(point: Point) -> str:
    return (
        f"{point.case}: {_number(point.of_floor, '.0%')} of its floor, "
        f"{_number(point.per_value, '.2f')} times the usual case's time for a value"
    )


def host_table(rows: Sequence[HostRow], m: int, n: int) -> Table:
    """What calls cost the host, beside torch.abs."""
    view = Table(
        title=f"host time, x ({m}, {n}) bfloat16",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
    )
    view.add_column("call", no_wrap=True)
    for heading in ("us", "/ torch.abs(x)", "out= us", "/ torch.abs(x, out=)", "compiled us"):
        view.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        view.add_row(
            row.name,
            _number(row.us, ".2f"),
            _number(row.ratio, ".2f"),
            _number(row.out_us, ".2f"),
            _number(row.out_ratio, ".2f"),
            _number(row.compiled_us, ".2f"),
        )
    return view


def shown_seconds(seconds: float | None) -> str:
    """A time in the unit that suits it."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def loader_table(rows: Sequence[tuple[str, float | None, str]]) -> Table:
    """What was measured, the time, and a remark."""
    view = Table(title="loader", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    view.add_column("measured")
    view.add_column("time", justify="right", no_wrap=True)
    view.add_column("remark")
    for what, seconds, remark in rows:
        view.add_row(what, shown_seconds(seconds), remark)
    return view


def picture(
    ops: Sequence[Op],
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    title: str,
    path: Path,
) -> bool:
    """A roofline an op: bandwidth over M, below what a copy has; False if nothing was measured.

    Lines of equal time are diagonals, so a panel shows where a call is bound by the memory and
    where by the time that any launch takes. Points are labeled with their time, and from a quarter
    of the ceiling on with the part that they have of it.
    """
    measured = [row for row in rows if row.us and row.gb_per_s and row.of_copy]
    drawn = [op for op in ops if any(row.op == op.name for row in measured)]
    if not drawn:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, len(drawn))
    lines = math.ceil(len(drawn) / columns)
    figure, panels = plt.subplots(
        lines,
        columns,
        figsize=(4.6 * columns, 0.9 + 3.1 * lines),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    sizes = sorted({row.m for row in measured})
    lowest = min(row.gb_per_s for row in measured if row.gb_per_s)
    for axes, op in zip(panels.flat, drawn, strict=False):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(sizes[0] / 6, sizes[-1] * 2.5)
        axes.set_ylim(lowest / 2, 2.2 * ceilings.copy)
        _roofline(axes, op, [row for row in measured if row.op == op.name], ceilings)
        axes.set_xticks(sizes, [str(m) for m in sizes], rotation=45)
        axes.minorticks_off()
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for index, axes in enumerate(panels.flat):
        if index >= len(drawn):
            axes.set_visible(False)
        elif index + columns >= len(drawn):  # nothing below it
            axes.set_xlabel("M (rows)", fontsize=8)
            axes.tick_params(labelbottom=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("GB/s, all readings and results", fontsize=8)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _roofline(axes: Any, op: Op, rows: Sequence[Measurement], ceilings: Ceilings) -> None:
    sizes = [row.m for row in rows]
    reached = [row.gb_per_s or 0.0 for row in rows]
    kilobytes = [rate * (row.us or 0.0) for row, rate in zip(rows, reached, strict=True)]
    left, right = axes.get_xlim()
    for us in (1, 10, 100, 1000):
        rates = [m * kilobytes[-1] / sizes[-1] / us for m in (left, right)]
        axes.plot((left, right), rates, color="0.88", lw=0.8, zorder=0)
        m = 1.15 * ceilings.copy * us * sizes[-1] / kilobytes[-1]
        if left < m < right / 2:
            axes.text(m, 1.22 * ceilings.copy, f"{us} us", color="0.6", fontsize=6, ha="center")
    axes.axhline(ceilings.copy, color="black", lw=1, label="a copy")
    if rows[-1].of_mixed:
        mixed = reached[-1] / rows[-1].of_mixed
        axes.axhline(mixed, color="black", lw=1, ls=":", label="the readings, then the results")
    axes.plot(sizes, reached, "o-", ms=3.5, color="tab:blue", label="jitquant")
    compiled = [
        (row.m, moved / row.plain_us)
        for row, moved in zip(rows, kilobytes, strict=True)
        if row.plain_us
    ]
    if compiled:
        label = "torch.compile of the plain code"
        axes.plot(*zip(*compiled, strict=True), "--", lw=1, color="tab:orange", label=label)
    for row, rate in zip(rows, reached, strict=True):
        part = row.of_copy or 0.0
        small = part < 0.25
        axes.annotate(
            f"{row.us:.2f} us" if small else f"{part:.0%}",
            (row.m, rate),
            xytext=(-4, 1) if small else (0, -5),
            textcoords="offset points",
            ha="right" if small else "center",
            va="bottom" if small else "top",
            fontsize=6.5,
        )
    axes.set_title(op.call, loc="left", fontsize=8)
