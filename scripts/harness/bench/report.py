"""The benchmark's tables and picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from harness.bench.host import HostRow
from harness.bench.kernels import Measurement
from harness.bench.ops import Op
from harness.bench.sweep import OPS as SWEPT
from harness.bench.sweep import Point, worst


def _number(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)


def kernel_table(op: Op, rows: Sequence[Measurement]) -> Table:
    """All sizes of one op."""
    view = Table(
        title=f"{op.name}: {op.call}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1),
    )
    for heading in (
        "M",
        "us",
        "floor\nus",
        "GB/s",
        "of\nfloor",
        "of read\n+ write",
        "launches",
        "host us",
        "compiled\nus",
        "compiled\nlaunches",
        "compiled\nhost us",
        "times\nfaster",
    ):
        view.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        faster = row.plain_us / row.us if row.us and row.plain_us else None
        view.add_row(
            str(row.m),
            _number(row.us, ".2f"),
            _number(row.floor_us, ".2f"),
            _number(row.gb_per_s, ".0f"),
            _number(row.of_floor, ".0%"),
            _number(row.of_mixed, ".0%"),
            _number(row.launches, "d"),
            _number(row.host_us),
            _number(row.plain_us, ".2f"),
            _number(row.plain_launches, "d"),
            _number(row.plain_host_us),
            _number(faster, ".2f"),
        )
    return view


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


def picture(ops: Sequence[Op], rows: Sequence[Measurement], title: str, path: Path) -> bool:
    """Times and fractions of the ceiling over M; False if there is nothing to draw."""
    if not any(row.us for row in rows):
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
    colors = plt.get_cmap("tab10").colors
    for index, op in enumerate(ops):
        mine = [row for row in rows if row.op == op.name and row.us]
        compiled = [row for row in mine if row.plain_us]
        color = colors[index % len(colors)]
        left.plot([r.m for r in mine], [r.us for r in mine], "o-", ms=4, color=color)
        left.plot([r.m for r in compiled], [r.plain_us for r in compiled], "--", lw=1, color=color)
        right.plot(
            [r.m for r in mine],
            [100 * (r.of_copy or 0) for r in mine],
            "o-",
            ms=4,
            color=color,
            label=op.name,
        )
    left.set_yscale("log")
    left.set_ylabel("microseconds, by graph replay")
    left.set_title("time (dashed: torch.compile of the plain code)", loc="left", fontsize=10)
    right.set_ylabel("% of the copy ceiling")
    right.set_ylim(bottom=0)
    right.axhline(100, color="0.6", lw=1, ls=":")
    right.set_title("bytes moved against a device-to-device copy", loc="left", fontsize=10)
    sizes = sorted({row.m for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=4)
        axes.set_xticks(sizes, [str(m) for m in sizes])
        axes.minorticks_off()
        axes.set_xlabel("M (rows)")
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
