"""README, docs and pictures, brought up to date with results/summary.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.bench import goals, overview, sentences, summary
from harness.bench.report import shown_seconds

_MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(document: str, results: Path) -> str:
    """A document with new tables between ``<!-- figures: NAME -->`` and ``<!-- end -->``.

    Args:
        document: Markdown.
        results: the directory of the summary.

    Raises:
        LookupError: `TABLES` has no such name, or the summary lacks what its table needs.
        OSError: there is no summary.
    """

    def made(match: re.Match[str]) -> str:
        table = TABLES[match[2]]
        try:
            lines = table(results)
        except (KeyError, TypeError) as error:
            raise LookupError(f"the table {match[2]!r} needs {error}") from error
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


def _origin(results: Path, *names: str) -> list[str]:
    """When sections were measured, and with which kernels, as lines below a table."""
    sections = summary.read(results)
    origins: dict[str, list[str]] = {}
    for name in names:
        section = sections[name]
        gpu, utc = section["gpu"].removeprefix("NVIDIA "), section["utc"][:10]
        origin = f"{gpu}, {utc}, kernels {section['kernels_cu_sha256'][:8]}"
        origins.setdefault(origin, []).append(name.removeprefix("model-"))
    if len(origins) == 1:
        return ["", f"*{next(iter(origins))}.*"]
    return ["", *(f"*{', '.join(of)}: {origin}.*" for origin, of in origins.items())]


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


def peers(results: Path, *names: str) -> list[str]:
    """How many times as fast as the best peer each op is, back to back and behind, and whose.

    Args:
        results: the directory of the summary.
        names: of the sections; default: those that have all ops.
    """
    sections, calls = summary.read(results), _calls()
    names = names or ("kernels-peers", "kernels-fp8-peers")
    rows: goals.Rows = {}
    for name in names:
        rows |= goals.rows_of(sections[name])
    ops, timed = goals.with_peers(rows), {m for _, m in rows}
    columns = {str(m): (m, goals.best_peer, "us") for m in goals.SIZES if m in timed}
    columns |= {f"{m} behind": (m, goals.best_peer_behind, "behind_us") for m in goals.FEW}

    def cells(op: str) -> Iterable[str]:
        where: dict[str, list[str]] = {}
        for column, (m, best_of, ours) in columns.items():
            best = best_of(rows, op, m)
            yield f"{best[0] / rows[op, m][ours]:.2f}" if best else ""
            if best:
                where.setdefault(best[1], []).append(column)
        most, *others = sorted(where, key=lambda name: -len(where[name]))
        yield "; ".join([most, *(f"{name} at {', '.join(where[name])}" for name in others)])

    table = _table(
        ("times as fast, at M =", *columns, "fastest peer"),
        ((f"`{calls[op]}`", *cells(op)) for op in ops),
    )
    origins = [_origin(results, name)[-1] for name in names]
    return [*table, "", *dict.fromkeys(origins), _versions(sections[names[-1]])]


def _versions(section: dict[str, Any]) -> str:
    """The libraries that were timed, as a line below a table."""
    return f"*{', '.join(f'{goals.NAMES[k]} {text}' for k, text in section['libraries'].items())}.*"


def products(results: Path, rows: Container[int] | None = None) -> list[str]:
    """`nvfp4_linear` beside cuBLAS, Marlin and humming.

    Args:
        results: the directory of the summary.
        rows: of x, those that the table has; default: all.
    """
    sections = summary.read(results)
    keys = ("floor", "bf16", "weight_only", *summary.LIBRARIES)
    return _table(
        ("weight", "rows", "bytes", "bf16", "`nvfp4_linear`", "Marlin", "humming"),
        (
            (
                f"{row['n']} x {row['k']}",
                str(row["rows"]),
                *(f"{row[key]:.1f}" if key in row else "" for key in keys),
            )
            for row in summary.products(sections)
            if rows is None or row["rows"] in rows
        ),
    ) + _origin(results, "linear-peers")


_FORMATS = {
    "bf16": "bf16, transformers",
    "bf16-compiled": "the same, compiled",
    "bf16-few": "bf16, few launches",
    "fp8": "FP8",
    "w4a16": "NVFP4 weights",
    "w4a16-fp8-prefill": "the same, prompts in FP8",
    "w4a4": "NVFP4 weights and activations",
}
"""Formats of `./scripts/bench model` for people."""


def models(results: Path, *names: str) -> list[str]:
    """Milliseconds of a step of whole models by format, and the time to read NVFP4 weights.

    Args:
        results: the directory of the summary.
        names: of their sections; default: all.
    """
    sections = summary.read(results)
    names = names or tuple(name for name in sections if name.startswith("model-"))
    steps = {
        name: {(row["format"], row["sequences"]): row for row in sections[name]["rows"]}
        for name in names
    }
    sizes = [*sorted({n for rows in steps.values() for _, n in rows if n}), 0]

    def cells(rows: Any, kind: str, key: str) -> list[str]:
        found = (rows.get((kind, n)) for n in sizes)
        return ["" if row is None else f"{row[key] / 1000:.2f}" for row in found]

    lines = []
    for name, rows in steps.items():
        model = name.removeprefix("model-")
        kinds = [kind for kind in _FORMATS if any(kind == k for k, _ in rows)]
        lines += [(model, _FORMATS[kind], *cells(rows, kind, "us")) for kind in kinds]
        if "w4a16" in kinds:
            floors = cells({k: v for k, v in rows.items() if k[1]}, "w4a16", "floor_us")
            lines.append((model, "to read NVFP4 weights and the cache", *floors))
    head = [f"{n} sequence{'s' * (n > 1)}" for n in sizes if n]
    table = _table(("model", "ms a step", *head, "prompt"), lines)
    return table + _origin(results, *names)


def _granularity(results: Path, table: str) -> list[dict[str, Any]]:
    rows = summary.read(results)["granularity"]["rows"]
    return [row for row in rows if row["table"] == table]


def fused(results: Path) -> list[str]:
    """`quantize_fp8` with one scale and one a row, beside amax, scale and cast in three kernels."""
    rows = _granularity(results, "fused")
    sizes = list(dict.fromkeys(row["shape"][0] for row in rows))
    lines = []
    for call in dict.fromkeys(row["call"] for row in rows):
        of_call = [row for row in rows if row["call"] == call]
        lines.append((f"`{call}`", *(_us(row["us"]) for row in of_call)))
        lines.append(("in three kernels", *(_us(row["unfused_us"]) for row in of_call)))
    return _table(("us at M =", *map(str, sizes)), lines) + _origin(results, "granularity")


def square(results: Path) -> list[str]:
    """One large matrix by granularity."""
    rows = _granularity(results, "square")
    return _table(
        (" x ".join(map(str, rows[0]["shape"])), "us", "of floor"),
        ((f"`{r['call']}`", _us(r["us"]), f"{r['floor_us'] / r['us']:.0%}") for r in rows),
    ) + _origin(results, "granularity")


def batches(results: Path) -> list[str]:
    """1x128 of (batch, sequence, hidden)."""
    rows = {tuple(row["shape"][:2]): row for row in _granularity(results, "batches")}
    lengths = list(dict.fromkeys(length for _, length in rows))
    return _table(
        ("us, of floor, batch", *(f"sequence {length}" for length in lengths)),
        (
            (
                str(batch),
                *(
                    f"{_us(r['us'])}, {r['floor_us'] / r['us']:.0%}"
                    for r in (rows[batch, length] for length in lengths)
                ),
            )
            for batch in dict.fromkeys(batch for batch, _ in rows)
        ),
    ) + _origin(results, "granularity")


def experts(results: Path) -> list[str]:
    """`nvfp4_experts` beside bf16."""
    keys = ("floor", "layer", "behind", "bf16")
    return _table(
        ("experts x hidden x intermediate", "tokens", "bytes", "whole layer", "behind", "bf16"),
        (
            (
                f"{row['experts']} x {row['hidden']} x {row['intermediate']}",
                f"{row['tokens']}{', same experts' * (row['routing'] == 'one')}",
                *(_us(row[key]) for key in keys),
            )
            for row in summary.read(results)["experts"]["rows"]
        ),
    ) + _origin(results, "experts")


def layers(results: Path) -> list[str]:
    """`Float8BlockwiseLinear` and training steps beside bf16."""
    rows = [row for row in summary.read(results)["layers"]["rows"] if "backward" in row["name"]]
    more = ["NVFP4", "times as long"] if any("nvfp4" in row for row in rows) else []
    return _table(
        ("", "bf16", "FP8", "times as fast", *more),
        (
            (
                row["name"],
                *(f"{row[key] / 1000:.3g} ms" for key in ("bf16", "fp8")),
                f"{row['ratio']:.2f}",
                *(
                    (f"{row['nvfp4'] / 1000:.3g} ms", f"{row['nvfp4'] / row['bf16']:.2f}")
                    if "nvfp4" in row
                    else [""] * len(more)
                ),
            )
            for row in rows
        ),
    ) + _origin(results, "layers")


def _linear(results: Path, head: Sequence[str], keys: Sequence[str], few: bool) -> list[str]:
    """`nvfp4_linear` with up to 16 rows of x, or with more."""
    return _table(
        ("weight", "rows", *head),
        (
            (
                f"{row['n']} x {row['k']}",
                str(row["rows"]),
                *(f"{row[key]:.1f}" if key in row else "" for key in keys),
                f"{row['bf16'] / row['weight_only']:.2f}",
            )
            for row in summary.read(results)["linear"]["rows"]
            if (row["rows"] <= 16) == few
        ),
    ) + _origin(results, "linear")


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
        "edit_median": "the same after an edit of the module's source: the median of all modules",
        "edit_most": "the same: the longest",
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
        "nvrtc": 'a kernel by `backend="nvrtc"`',
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


def _goals(
    stem: str, which: tuple[goals.Goal, ...], peers: str = ""
) -> Callable[[Path], list[str]]:
    """A section's goals, and those beside other libraries of the section ``peers``."""

    def lines(results: Path) -> list[str]:
        made = goals.table(which, _rows(results, stem), _calls())
        if peers:
            beside = _rows(results, peers)
            made += goals.table(goals.beside_peers(beside), beside, _calls())[2:]
        return made

    return lines


_PAGES = ("performance", "measurements", "loader", "status")
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in _PAGES))
"""What has tables or sentences that follow from the summary."""


def documents(root: Path, results: Path) -> dict[str, str]:
    """Each of `DOCUMENTS` as it should be, by its name.

    Raises:
        LookupError: the summary lacks what one of them shows.
        OSError: there is no such file.
    """
    sections = summary.read(results)
    return {
        name: sentences.updated(
            name, updated((root / name).read_text(encoding="utf-8"), results), sections
        )
        for name in DOCUMENTS
    }


def draw(results: Path) -> None:
    """Draw each picture into the directory of the summary.

    Raises:
        LookupError: the summary lacks what one of them shows.
        OSError: there is no summary.
    """
    for name, picture in overview.PICTURES.items():
        try:
            picture(results, results / name)
        except KeyError as error:
            raise LookupError(f"the picture {name} needs {error}") from error


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "ceilings": ceilings,
    "summary": main_ops,
    "peers": peers,
    "peers-h200": lambda results: peers(results, "kernels-fp8-peers-h200"),
    "products": lambda results: products(results, (1, 16, 64)),
    "all-products": products,
    "models": models,
    "llama": lambda results: models(results, "model-llama-8b"),
    "experts": experts,
    "fused": fused,
    "square": square,
    "batches": batches,
    "layers": layers,
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
    "goals-nvfp4": _goals("kernels", goals.NVFP4, "kernels-peers"),
    "goals-fp8": _goals("kernels-fp8", goals.FP8, "kernels-fp8-peers"),
    "goals-ragged": _goals("kernels-ragged", goals.RAGGED),
}
