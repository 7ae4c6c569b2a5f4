"""The tables of the docs, made from results/summary.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.bench import goals, summary
from harness.bench.report import shown_seconds

_MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(document: str, results: Path) -> str:
    """A document with each table between ``<!-- figures: NAME -->`` and ``<!-- end -->`` made anew.

    Args:
        document: Markdown.
        results: the directory of the summary.

    Raises:
        KeyError: `TABLES` has no such name, or the summary lacks what its table needs.
        OSError: there is no summary.
    """

    def made(match: re.Match[str]) -> str:
        lines = TABLES[match[2]](results)
        return f"{match[1]}\n" + "\n".join(lines) + f"\n\n{match[3]}"

    return _MARKED.sub(made, document)


def _rows(results: Path, section: str) -> goals.Rows:
    """By op and M."""
    return goals.rows_of(summary.read(results)[section])


def _calls() -> dict[str, str]:
    from harness.bench.ops import OPS

    return {name: op.call for name, op in OPS.items()}


def _us(value: float) -> str:
    """Three digits."""
    return f"{value:.2f}" if value < 10 else (f"{value:.1f}" if value < 100 else f"{value:.0f}")


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    marks = ["---", *["---:"] * (len(head) - 1)]
    lines = list(map(list, lines))
    return [f"| {' | '.join(cells)} |" for cells in (head, marks, *lines)]


def ceilings(results: Path) -> list[str]:
    """Of the run of the NVFP4 kernels."""
    measured = summary.read(results)["kernels"]["ceilings_gb_per_s"]
    how = {
        "copy": "2 GiB to 2 GiB, bytes read plus bytes written",
        "read": "the fastest of some reductions over 2 GiB",
        "write": "a fill of 2 GiB in fp32",
    }
    return _table(("", "GB/s", "how"), ([k, f"{measured[k]:.0f}", how[k]] for k in how))


def _times(results: Path, stem: str, extra: Callable[[goals.Rows, str], str], title: str) -> Any:
    """All ops of a file: microseconds by M, and one column more."""
    rows, calls = _rows(results, stem), _calls()
    sizes = sorted({m for _, m in rows})
    return _table(
        ("us at M =", *map(str, sizes), title),
        (
            (f"`{calls[op]}`", *(_us(rows[op, m]["us"]) for m in sizes), extra(rows, op))
            for op in dict.fromkeys(op for op, _ in rows)
        ),
    )


def _floors(rows: goals.Rows, op: str) -> str:
    return ", ".join(f"{rows[op, m]['of_floor']:.0%}" for m in (4096, 16384, 65536))


def _casts(rows: goals.Rows, op: str) -> str:
    ratios = (rows[op, m]["us"] / rows["cast", m]["us"] for m in (4096, 16384, 65536))
    return f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}; {_floors(rows, op)}"


def compiled(results: Path) -> list[str]:
    """`rmsnorm_quantize_nvfp4` beside torch.compile of the plain code."""
    rows = {m: row for (_, m), row in _rows(results, "rmsnorm-compiled").items()}
    return _table(
        ("M", *map(str, rows)),
        (
            ("us", *(_us(row["us"]) for row in rows.values())),
            ("torch.compile, us", *(_us(row["plain_us"]) for row in rows.values())),
            ("times as fast", *(f"{row['plain_us'] / row['us']:.2f}" for row in rows.values())),
        ),
    )


_SUMMARY = (
    ("kernels", ("quantize-tensor", "quantize-row", "quantize-given", "swiglu", "rmsnorm")),
    ("kernels", ("rmsnorm-residual", "mhc", "dequantize")),
    ("kernels-fp8", ("fp8-tensor", "fp8-row", "fp8-group", "fp8-block", "mxfp8", "fp8-rmsnorm")),
    ("kernels-fp8", ("fp8-silu-group", "fp8-group-both", "mxfp8-both", "fp8-dequantize")),
    ("kernels-ragged", ("fp8-ragged-64", "nvfp4-ragged-64")),
)


def main_ops(results: Path) -> list[str]:
    """The main op of each kind at three sizes."""
    calls, lines = _calls(), []
    for stem, ops in _SUMMARY:
        rows = _rows(results, stem)
        for op in ops:
            cells = (
                f"{_us(rows[op, m]['us'])}, {rows[op, m]['of_floor']:.0%}"
                for m in (1024, 4096, 16384)
            )
            lines.append((f"`{calls[op]}`", *cells))
    return _table(("us, of floor, at M =", "1024", "4096", "16384"), lines)


def peers(results: Path) -> list[str]:
    """How many times as fast as the best peer each op is that has one."""
    rows, calls = _rows(results, "kernels-fp8"), _calls()
    return _table(
        ("times as fast, at M =", *map(str, goals.SIZES)),
        (
            (
                f"`{calls[op]}`",
                *(f"{t / rows[op, m]['us']:.2f}" for m, t in zip(goals.SIZES, times, strict=True)),
            )
            for op, times in goals.PEERS.items()
        ),
    )


def products(results: Path) -> list[str]:
    """`nvfp4_linear` beside cuBLAS, Marlin and humming."""
    return _table(
        ("weight", "rows", "bytes", "bf16", "`nvfp4_linear`", "Marlin", "humming"),
        (
            (
                f"{row['n']} x {row['k']}",
                str(row["rows"]),
                *(
                    f"{row[key]:.1f}"
                    for key in ("floor", "bf16", "weight_only", "marlin", "humming")
                ),
            )
            for row in summary.read(results)["linear-peers"]["rows"]
        ),
    )


def _linear(results: Path, head: Sequence[str], keys: Sequence[str], few: bool) -> list[str]:
    """`nvfp4_linear` with up to 16 rows of x, or with more."""
    return _table(
        ("weight", "rows", *head),
        (
            (
                f"{row['n']} x {row['k']}",
                str(row["rows"]),
                *(f"{row[key]:.1f}" for key in keys),
                f"{row['bf16'] / row['weight_only']:.2f}",
            )
            for row in summary.read(results)["linear"]["rows"]
            if (row["rows"] <= 16) == few
        ),
    )


def few_rows(results: Path) -> list[str]:
    """`nvfp4_linear` with up to 16 rows beside cuBLAS."""
    return _linear(
        results,
        ("bytes", "bf16", "x in bf16", "behind a plain kernel", "x in NVFP4", "bf16 / x in bf16"),
        ("floor", "bf16", "weight_only", "weight_only_behind", "quantized"),
        few=True,
    )


def many_rows(results: Path) -> list[str]:
    """`nvfp4_linear` with more than 16 rows beside cuBLAS and FP8."""
    return _linear(
        results,
        ("bf16", "x in bf16", "x in NVFP4", "in FP8", "FP8 weight", "bf16 / x in bf16"),
        ("bf16", "weight_only", "quantized", "fp8", "fp8_weight"),
        few=False,
    )


def shapes(results: Path) -> list[str]:
    """The part of its floor that each op reached at each shape."""
    rows = summary.read(results)["sweep"]["rows"]
    ops = list(dict.fromkeys(op for row in rows for op in row if op != "case"))
    return _table(
        ("shape", *ops),
        ((row["case"], *(f"{row[op]:.0%}" if op in row else "" for op in ops)) for row in rows),
    )


def host(results: Path) -> list[str]:
    """Host time of eager calls, and how often that of torch.abs it is."""
    head = ("us, M = 1", "new results", "times torch.abs(x)", "out=", "times torch.abs(x, out=y)")
    lines = []
    for row in summary.read(results)["host"]["rows"]:
        ratios = row["ratio"], row["out_ratio"]
        met = all(
            ratio <= most for ratio, most in zip(ratios, goals.host(row["name"]), strict=True)
        )
        lines.append(
            (
                f"`{row['name']}`",
                _us(row["us"]),
                f"{ratios[0]:.2f}",
                _us(row["out_us"]),
                f"{ratios[1]:.2f}",
                "" if row["name"].startswith("torch") else ("met" if met else "missed"),
            )
        )
    return _table((*head, ""), lines)


#: Ends of the names of what is not the first call of one module.
_NO_MODULES = ("_median", "_most", "_call", "_compilers")


def loader(results: Path) -> list[str]:
    """What the loader takes, and torch's own ways of the same beside it."""
    seconds: dict[str, float | None] = summary.read(results)["loader"]["seconds"]
    calls = [k for k in seconds if k.startswith("first_") and not k.endswith(_NO_MODULES)]
    longest = max(calls, key=lambda key: seconds[key] or 0.0, default="").removeprefix("first_")
    whats = {
        "import": "`import jitquant` beyond `import torch`, processor time",
        "first_median": "first call of an op in bfloat16, nothing built: the median of all",
        "first_most": f"the same: the longest, of `{longest}`",
        "cold": "`fused_amax_quantize` as a whole, nothing built",
        "all_cold": "`jitquant.warmup()`, nothing built",
        "bf16_cold": "`jitquant.warmup(dtypes=[torch.bfloat16])`, nothing built",
        "bundled": "`jitquant.warmup()` from a bundle, without a compiler",
        "warm": "a built module in a new process",
        "first_call": "first call of a built C++ function after `import jitquant`",
        "hit": "`get_cuda_module` again",
        "frozen_hit": "the same after `jitquant.freeze()`",
        "cpp_cold": "a C++ function through the stable ABI, nothing built",
        "cpp_load": "the same by `torch.utils.cpp_extension.load`",
        "cpp_inline": "the same by `load_inline`",
        "plain": "the kernels of `fused_amax_quantize` by `torch.utils.cpp_extension.load`",
        "inline": "the same by `load_inline`",
        "explain": "`jitquant explain fused_amax_quantize`",
        "doctor": "`jitquant doctor`",
    }
    ours = {"cpp_load": "cpp_cold", "cpp_inline": "cpp_cold", "plain": "cold", "inline": "cold"}

    def line(key: str, took: float) -> tuple[str, str, str, str]:
        compilers = seconds.get(f"{key}_compilers")
        own = seconds.get(ours.get(key, ""))
        return (
            whats[key],
            shown_seconds(took),
            f"{compilers:.1f} s" if compilers else "",
            f"{took / own:.1f}" if own else "",
        )

    head = ("", "time", "of it in compilers, processor time", "times as long as with the loader")
    return _table(head, [line(key, took) for key in whats if (took := seconds.get(key))])


def _goals(stem: str, which: tuple[goals.Goal, ...]) -> Callable[[Path], list[str]]:
    return lambda results: goals.table(which, _rows(results, stem), _calls())


DOCUMENTS = ("performance.md", "measurements.md", "loader.md")

TABLES: dict[str, Callable[[Path], list[str]]] = {
    "ceilings": ceilings,
    "summary": main_ops,
    "peers": peers,
    "products": products,
    "few-rows": few_rows,
    "many-rows": many_rows,
    "nvfp4": lambda results: _times(results, "kernels", _floors, "of floor from 4096 on"),
    "fp8": lambda results: _times(
        results, "kernels-fp8", _casts, "times the cast; of floor, from 4096 on"
    ),
    "ragged": lambda results: _times(results, "kernels-ragged", _floors, "of floor from 4096 on"),
    "compiled": compiled,
    "shapes": shapes,
    "host": host,
    "loader": loader,
    "goals-nvfp4": _goals("kernels", goals.NVFP4),
    "goals-fp8": _goals("kernels-fp8", goals.FP8),
    "goals-ragged": _goals("kernels-ragged", goals.RAGGED),
}
