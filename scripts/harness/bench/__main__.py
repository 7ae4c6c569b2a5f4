"""Command line of the benchmark."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from harness.bench import summary
from harness.provenance import kernels_digest, provenance

if TYPE_CHECKING:
    import torch

SIZES = "1,16,64,1024,2048,4096,16384,65536"
DTYPES = ("bfloat16", "float16", "float32")
OUT = "Where the raw record goes; into its summary.json if it has one, as results does."

app = typer.Typer(add_completion=False)
console = Console(width=None if sys.stdout.isatty() else 120)  # a log is not 80 columns wide


def show(text: str) -> None:
    """Prints a line as it is."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def fail(message: str, code: int = 1) -> typer.Exit:
    """Says what is wrong; the result is to be raised."""
    show(message)
    return typer.Exit(code)


def current_gpu() -> torch.device:
    """The GPU to measure on, with its random numbers seeded; without one the command ends."""
    import torch

    if not torch.cuda.is_available():
        raise fail(
            f"No GPU: torch {torch.__version__} sees none, and this is timed on one. "
            "`./scripts/bench loader` measures the loader and needs only nvcc; "
            "`./scripts/demo` runs anywhere.",
            2,
        )
    torch.manual_seed(0)
    return torch.device("cuda", torch.cuda.current_device())


def write_record(out: Path, stem: str, record: dict[str, Any]) -> None:
    """Writes a record, and says where."""
    show(f"wrote {summary.save(out, stem, record)}")


@app.callback(invoke_without_command=True)
def kernels(
    context: typer.Context,
    m: Annotated[str, typer.Option(help="Numbers of rows.")] = SIZES,
    n: Annotated[int, typer.Option(help="Columns, a multiple of 16.", min=16)] = 7168,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16",
    ops: Annotated[
        str, typer.Option(help="Names, separated by commas; all; fp8; or ragged.")
    ] = "all",
    plain: Annotated[
        bool, typer.Option(help="Also measure torch.compile of the plain PyTorch code.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(help="After this long the plain code is left out.")
    ] = 300.0,
    vllm: Annotated[
        Path | None,
        typer.Option(help="vLLM's _C_stable_libtorch.abi3.so; default: of the installed vLLM."),
    ] = None,
    name: Annotated[
        str, typer.Option(help="Of the record, such as kernels-fp8-peers; default: by --ops.")
    ] = "",
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Measure every kernel on a GPU; with a command, what that says instead.

    Times are of CUDA graph replays whose inputs rotate through more memory than the L2 cache holds:
    brief ones of a GPU that has rested, and sustained ones, which its power limit may slow. The
    ceilings are measured in the same run, and so is what of vLLM, FlashInfer, torchao and FBGEMM
    can be imported. Up to 64 rows also what a call adds behind a plain kernel.
    """
    if context.invoked_subcommand is not None:
        return
    device = current_gpu()
    try:
        sizes = [int(size) for size in m.split(",")]
    except ValueError:
        raise fail(f"--m: expected numbers separated by commas, got {m}", 2) from None
    if min(sizes) < 1 or n % 16 or dtype not in DTYPES:
        raise fail(
            "--m, --n and --dtype: expected M of at least 1, a multiple of 16 for N, and one of "
            f"{', '.join(DTYPES)}, got {m}, {n} and {dtype}",
            2,
        )
    measure_kernels(device, sizes, n, dtype, ops, plain, seconds, vllm, out, name)


def measure_kernels(
    device: torch.device,
    sizes: list[int],
    n: int,
    dtype: str,
    names: str,
    plain: bool,
    seconds: float,
    vllm: Path | None,
    out: Path,
    name: str = "",
) -> None:
    """Runs the ops, prints a table after each, and writes the files."""
    import torch

    import jitquant
    from harness import timing
    from harness.bench import kernels as bench
    from harness.bench import peers, report
    from harness.bench.ops import SETS, chosen

    try:
        ops = list(chosen(names))
    except ValueError as error:
        raise fail(str(error), 2) from None
    begin = time.perf_counter()
    jitquant.warmup(*dict.fromkeys(module for op in ops for module in op.modules))
    built = time.perf_counter() - begin
    libraries = peers.versions(vllm)
    shown = ", ".join(f"{name} {text}" for name, text in libraries.items())
    ceilings = timing.measure_ceilings(device)
    probe = torch.randn(16, n, device=device, dtype=getattr(torch, dtype))
    abs_us = timing.host_us(lambda: torch.abs(probe))
    gpu = torch.cuda.get_device_name(device)
    console.print(
        f"{gpu}, torch {torch.__version__}, {dtype}, N = {n}. Modules ready in {built:.1f} s.\n"
        f"Ceilings in this run: copy {ceilings.copy:.0f} GB/s read and written, "
        f"read {ceilings.read:.0f} GB/s, write {ceilings.write:.0f} GB/s.\n"
        f"Host time of torch.abs(x): {abs_us:.1f} us.\n"
        "us: one call, by graph replay over more memory than the L2 cache holds, for "
        f"{timing.BRIEF}, after the GPU's rest while the graph was built. sustained us: the same "
        f"graph for {timing.SUSTAINED} right after that, which the GPU's power limit may slow. "
        "floor: what a copy takes for as many bytes. compiled: torch.compile of the plain code. "
        "best peer: the fastest of "
        "other libraries at the same. Both are timed as us is. behind: what a call adds behind a "
        f"plain kernel that it does not overlap, for up to {bench.BEHIND_ROWS} rows. "
        "Rates and parts are of us.\n"
        f"Libraries: {escape(shown)}.\n",
        highlight=False,
    )
    by_ops = "rmsnorm-compiled" if plain and names == "rmsnorm" else SETS.get(names, "kernels")
    stem = name or by_ops
    record = {
        **provenance(),
        "n": n,
        "dtype": dtype,
        "rotate_bytes": timing.ROTATE_BYTES,
        "brief_seconds": timing.BRIEF.seconds,
        "brief_repeats": timing.BRIEF.repeats,
        "sustained_seconds": timing.SUSTAINED.seconds,
        "sustained_repeats": timing.SUSTAINED.repeats,
        "ceilings_gb_per_s": asdict(ceilings),
        "host_us_torch_abs": abs_us,
        "modules_ready_seconds": built,
        "peers": libraries,
    }
    rows = []
    whole: dict[str, Any] = {}
    by_name = {op.name: op for op in ops}
    for part in bench.run(
        ops,
        sizes,
        n,
        getattr(torch, dtype),
        device,
        ceilings,
        peers={op.name: peers.peers_of(op.name, libraries) for op in ops},
        compile_plain=plain,
        seconds=max(0.0, seconds - (time.perf_counter() - begin)),
    ):
        rows += part
        console.print(report.kernel_table(by_name[part[0].op], part, peers.absent(libraries)))
        for text in report.remarks(part):
            console.print(f"  {text}", style="yellow", highlight=False, markup=False)
        took = time.perf_counter() - begin
        whole = {**record, "seconds": took, "rows": [asdict(row) for row in rows]}
        # A peer may end the process. The record of an earlier run stays until this one is whole.
        summary.save_part(out, stem, whole)
        console.print()
    write_record(out, stem, whole)
    try:
        png = out / f"{stem}.png"
        title = f"jitquant on {gpu}, {dtype}, N = {n}"
        if report.picture(ops, rows, ceilings, title, png):
            show(f"wrote {png}")
    except ImportError as error:
        console.print(f"no picture: {error}", highlight=False)
    console.print(f"Done in {time.perf_counter() - begin:.1f} s.", highlight=False)
    failed = [row for row in rows if row.error]
    if failed:
        raise fail(f"{len(failed)} of {len(rows)} measurements failed.")


@app.command()
def sweep(
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time lengths of rows, strides, dtypes and layouts beside each other on a GPU, at equal work.

    Every case has about as many values as 8192 x 7168. The worst point is named at the end.
    """
    device = current_gpu()
    import jitquant
    from harness import timing
    from harness.bench import report
    from harness.bench import sweep as bench

    begin = time.perf_counter()
    jitquant.warmup(*bench.MODULES)
    ceilings = timing.measure_ceilings(device)
    points = [point for part in bench.run(device, ceilings) for point in part]
    console.print(report.sweep_table(points))
    for line in report.sweep_summary(points):
        show(line)
    failed = [point for point in points if point.error]
    for point in failed:
        text = f"{point.op} at {point.case}: {point.error}"
        console.print(text, style="yellow", highlight=False, markup=False)
    worst = {op: bench.worst(points, op) for op in bench.OPS}
    write_record(
        out,
        "sweep",
        {
            **provenance(),
            "ceilings_gb_per_s": asdict(ceilings),
            "seconds": time.perf_counter() - begin,
            "worst": {op: asdict(point) for op, point in worst.items() if point is not None},
            "points": [asdict(point) for point in points],
        },
    )
    if failed:
        raise fail(f"{len(failed)} of {len(points)} measurements failed.")


@app.command()
def shapes(
    only: Annotated[str, typer.Option(help="A part of the cases' names.")] = "",
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time ops at many shapes beside a copy of as many bytes, on a GPU, in about a minute."""
    device = current_gpu()
    from harness import timing
    from harness.bench import shapes as bench

    ceilings = timing.measure_ceilings(device)
    points = []
    for point in bench.run(device, ceilings, only):
        points.append(point)
        text = f"{point.op:28} {point.m:7} x {point.n:5}  {point.error}"
        if point.us is not None and point.floor_us is not None:
            text += f"{point.us:9.2f} us, {point.us / point.floor_us:7.3f} times the floor"
        if point.compiled_us is not None:
            text += f", compiled {point.compiled_us:.2f}"
        show(text)
    record = {**provenance(), "ceilings_gb_per_s": asdict(ceilings)}
    write_record(out, "shapes", {**record, "rows": [asdict(point) for point in points]})
    failed = [point for point in points if point.error]
    if failed:
        raise fail(f"{len(failed)} of {len(points)} measurements failed.")


@app.command()
def layers(
    tokens: Annotated[int, typer.Option(help="Rows of the linear, a multiple of 128.")] = 8192,
    size: Annotated[int, typer.Option(help="Its columns and outputs, a multiple of 128.")] = 8192,
    blocks: Annotated[int, typer.Option(help="Blocks of the stack; 0: no stack.", min=0)] = 4,
    batch: Annotated[int, typer.Option(help="Sequences of the stack.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each.", min=1)] = 2048,
    hidden: Annotated[int, typer.Option(help="Its width, a multiple of 512.")] = 4096,
    ffn: Annotated[int, typer.Option(help="Its MLP's width.")] = 14336,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time Float8BlockwiseLinear beside nn.Linear in bf16, alone and in a compiled stack.

    The stack also with NVFP4TrainingLinear. The linear by CUDA graph replay; the stack by CUDA
    events around whole steps.
    """
    device = current_gpu()
    import jitquant
    from harness import timing
    from harness.bench import layers as bench

    jitquant.warmup(*bench.MODULES)
    ceilings = timing.measure_ceilings(device)
    pairs = []

    def done(pair: bench.Pair) -> None:
        pairs.append(pair)
        text = f"{pair.name}: {pair.fp8:.1f} us"
        if pair.bf16 is not None:
            text += f", in bf16 {pair.bf16:.1f} us: {pair.ratio:.3f} times as fast"
        if pair.bf16 is not None and pair.nvfp4 is not None:
            text += f"; in NVFP4 {pair.nvfp4:.1f} us, {pair.nvfp4 / pair.bf16:.3f} times as long"
        if pair.gigabytes:
            floor = pair.gigabytes / ceilings.copy * 1e6
            text += f", {floor / pair.fp8:.0%} of the floor of {floor:.1f} us"
        show(text)

    show(f"copy {ceilings.copy:.0f} GB/s")
    for pair in bench.linear(tokens, size, size):
        done(pair)
    compiling: dict[str, float] = {}
    if blocks:
        pair, compiling = bench.stack(blocks, batch, length, hidden, ffn)
        done(pair)
    write_record(
        out,
        "layers",
        {
            **provenance(),
            "ceilings_gb_per_s": asdict(ceilings),
            "compile_seconds": compiling,
            "rows": [{**asdict(pair), "ratio": pair.ratio} for pair in pairs],
        },
    )


@app.command()
def linear(
    shapes: Annotated[str, typer.Option(help="N x K of the weights; default: four.")] = "",
    rows: Annotated[str, typer.Option(help="Numbers of rows of x; default: five up to 64.")] = "",
    vllm: Annotated[
        Path | None,
        typer.Option(help="vLLM's _C_stable_libtorch.abi3.so; default: of the installed vLLM."),
    ] = None,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time products with weights in NVFP4 beside cuBLAS in bf16, by graph replay.

    vLLM's Marlin and humming are timed in the same run where they can be imported, and their
    products are compared with ours.
    """
    from harness.bench import linear as bench
    from harness.bench import peers_linear

    try:
        chosen = [
            (int(n), int(k)) for n, k in (shape.split("x") for shape in shapes.split(",") if shape)
        ] or bench.SHAPES
        row_counts = [int(count) for count in rows.split(",") if count] or bench.ROWS
    except ValueError:
        raise fail(
            "--shapes and --rows: expected lists such as 8192x8192,6144x4096 and 1,16,64, got "
            f"{shapes} and {rows}",
            2,
        ) from None
    device = current_gpu()
    import jitquant
    from harness import timing

    jitquant.warmup(
        *("nvfp4_linear", "nvfp4_refold", "quantize_fp8"),
        *("quantize_weight_nvfp4", "fused_amax_quantize"),
    )
    ceilings = timing.measure_ceilings(device)
    show(f"read {ceilings.read:.0f} GB/s")

    peers = peers_linear.found(vllm)
    libraries = {name: text for name, (text, _) in peers.items()}
    show(f"Peers: {', '.join(f'{name} {text}' for name, text in libraries.items())}")
    usable = {name: prepare for name, (_, prepare) in peers.items() if prepare is not None}
    times = bench.products(ceilings.read, chosen, row_counts, usable)
    measured = bench.report(times, show)
    write_record(
        out,
        "linear",
        {
            **provenance(),
            "ceilings_gb_per_s": asdict(ceilings),
            "peers": libraries,
            "rows": measured,
        },
    )


@app.command()
def model(
    shape: Annotated[str, typer.Option(help="llama-8b, qwen3-32b or qwen3-30b-a3b.")] = "llama-8b",
    formats: Annotated[
        str,
        typer.Option(
            help="Of bf16, bf16-compiled, bf16-few, fp8, w4a16, w4a16-fp8-prefill and w4a4."
        ),
    ] = "bf16,bf16-few,fp8,w4a16,w4a16-fp8-prefill,w4a4",
    sequences: Annotated[str, typer.Option(help="Decoded together.")] = "1,8,64",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 1024,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt; 0: none.", min=0)] = 4096,
    layers: Annotated[int | None, typer.Option(help="Default: all of the shape.")] = None,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time whole models of transformers with random weights: decoding in one graph, and a prompt.

    bf16 is transformers' own code. The others have its weights in a decoder of few launches
    (scripts/harness/bench/decoder.py), bf16-few in bf16 too, so that what the launches and what the
    formats give can be told apart. Embedding and head are in bf16 in all of them.
    """
    from harness.bench import decoder
    from harness.bench import model as bench

    chosen = formats.split(",")
    known = [bench.PLAIN, bench.COMPILED, *decoder.FORMATS]
    if shape not in bench.SHAPES or set(chosen) - set(known):
        raise fail(
            f"--shape and --formats: expected one of {', '.join(bench.SHAPES)}, and some of "
            f"{', '.join(known)}, got {shape} and {formats}",
            2,
        )
    if "num_experts" in bench.SHAPES[shape][1] and "fp8" in chosen:
        raise fail(f"--shape {shape} --formats {formats}: experts have no fp8; leave it out", 2)
    try:
        counts = [int(count) for count in sequences.split(",") if count]
    except ValueError:
        raise fail(f"--sequences: expected numbers, as in 1,8,64, got {sequences}", 2) from None
    device = current_gpu()
    import torch

    from harness import timing

    begin = time.perf_counter()
    ceilings = timing.measure_ceilings(device)
    show(f"read {ceilings.read:.0f} GB/s")
    rows = []
    whole: dict[str, Any] = {}
    for times in bench.run(
        shape,
        chosen,
        bandwidth=ceilings.read,
        sequences=counts,
        context=context,
        prompt=prompt,
        layers=layers,
    ):
        show(times.text())
        rows.append({**asdict(times), "per_second": times.per_second})
        whole = {
            **provenance(),
            "ceilings_gb_per_s": asdict(ceilings),
            "context": context,
            "layers": layers,
            "seconds": time.perf_counter() - begin,
            "rows": rows,
        }
        summary.save_part(out, f"model-{shape}", whole)
    write_record(out, f"model-{shape}", whole)
    png = out / f"model-{shape}.png"
    bench.picture(rows, f"{torch.cuda.get_device_name(device)}, {context} tokens in the cache", png)
    show(f"wrote {png}")


@app.command()
def experts(
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time expert layers of few tokens with weights in NVFP4 beside bf16, by graph replay."""
    device = current_gpu()
    import jitquant
    from harness import timing
    from harness.bench import experts as bench

    jitquant.warmup("nvfp4_experts")
    ceilings = timing.measure_ceilings(device)
    show(f"read {ceilings.read:.0f} GB/s")

    rows = bench.report(ceilings.read, show)
    write_record(
        out,
        "experts",
        {**provenance(), "ceilings_gb_per_s": asdict(ceilings), "rows": rows},
    )


@app.command()
def granularity(
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time quantize_fp8 by granularity: fused beside three kernels, one large matrix, batches."""
    device = current_gpu()
    import jitquant
    from harness import timing
    from harness.bench import granularity as bench

    jitquant.warmup(*bench.MODULES)
    ceilings = timing.measure_ceilings(device)
    show(f"copy {ceilings.copy:.0f} GB/s")

    rows = bench.report(ceilings.copy, show)
    write_record(
        out,
        "granularity",
        {**provenance(), "ceilings_gb_per_s": asdict(ceilings), "rows": rows},
    )


@app.command()
def resources(
    arch: Annotated[str, typer.Option(help="What to compile for.")] = "90a",
    out: Annotated[Path, typer.Option(help="Where the document goes.")] = Path("out/bench"),
) -> None:
    """Write registers, spills, shared memory and occupancy of every kernel; needs nvcc, no GPU."""
    from harness.bench import resources as bench
    from jitquant.loader import Loader, LoaderError

    try:
        built = bench.builds(Loader(), arch)
    except (LoaderError, ValueError) as error:
        raise fail(str(error)) from None
    path = out / "kernels-resources.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(bench.document(built, arch, kernels_digest()), encoding="utf-8")
    show(f"wrote {path}")


@app.command()
def figures(
    results: Annotated[Path, typer.Option(help="Where the summary is.")] = Path("results"),
    root: Annotated[
        Path, typer.Option(help="The directory of README.md and docs, which are updated.")
    ] = Path(),
    raw: Annotated[
        Path | None, typer.Option(help="First take in the raw records (*.json) of this directory.")
    ] = None,
) -> None:
    """Update every table, number and picture of README and docs from results/summary.json.

    Needs no GPU. If the summary lacks what one of them shows, nothing is written.
    """
    from harness.bench import figures as bench

    with tempfile.TemporaryDirectory() as name:
        staged = Path(name)
        try:
            shutil.copy(results / summary.NAME, staged)
            if raw is not None:
                names, others = summary.add_folder(staged, raw)
                show(f"took {', '.join(names) or 'nothing'} from {raw}")
                if others:
                    show(f"ignored {', '.join(others)}: the summary has no such sections")
            texts = bench.documents(root, staged)
            bench.draw(staged)
        except (LookupError, OSError) as error:
            why = error if isinstance(error, OSError) else error.args[0]
            raise fail(
                f"Nothing was written: {why}. results/README.md has the command for each section.",
                2,
            ) from None
        for path in staged.iterdir():
            shutil.copy(path, results)
            show(f"wrote {results / path.name}")
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
        show(f"wrote {root / name}")


@app.command()
def host(
    m: Annotated[int, typer.Option(help="Rows.", min=1)] = 1,
    n: Annotated[int, typer.Option(help="Columns, a multiple of 16.", min=16)] = 7168,
    compiled: Annotated[bool, typer.Option(help="Also time the calls under torch.compile.")] = True,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time what an eager call costs the host, beside torch.abs, with and without out=.

    Kernels are taken as they are, as in an installed package, unless JITQUANT_RELOAD says
    otherwise.
    """
    os.environ.setdefault("JITQUANT_RELOAD", "0")
    device = current_gpu()
    import jitquant
    from harness.bench import host as bench
    from harness.bench import report

    jitquant.warmup(*bench.MODULES)
    rows = bench.run(m, n, device, compiled=compiled)
    console.print(report.host_table(rows, m, n))
    write_record(
        out,
        "host",
        {
            **provenance(),
            "m": m,
            "n": n,
            "reload": os.environ["JITQUANT_RELOAD"],
            "rows": [asdict(row) for row in rows],
        },
    )


@app.command()
def loader(
    compare: Annotated[
        bool, typer.Option(help="Also time torch's load and load_inline of the same (minutes).")
    ] = True,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("out/bench"),
) -> None:
    """Time the loader: cold, warm, per call, its commands, and torch's own ways of the same."""
    from harness.bench import loader as bench
    from harness.bench import report

    rows = []
    load = [os.getloadavg()[0]]

    def done(row: bench.Row) -> None:
        rows.append(row)
        what, seconds, remark = row
        value = report.shown_seconds(seconds)
        console.print(f"{what}: {value}  {remark}", highlight=False, markup=False)

    results = bench.measure(done, compare=compare)
    for mine, theirs, what in (
        ("cold", "plain", "plain load / cold"),
        ("cold", "inline", "load_inline / cold"),
        ("cpp_cold", "cpp_load", "C++ function: plain load / cold"),
        ("cpp_cold", "cpp_inline", "C++ function: load_inline / cold"),
    ):
        fast, slow = results.get(mine), results.get(theirs)
        if fast and slow:
            rows.append((what, None, f"{slow / fast:.1f} times faster"))
    console.print()
    console.print(report.loader_table(rows))
    load.append(os.getloadavg()[0])
    record = {**provenance(), "cpus": os.cpu_count(), "load": load, "seconds": results}
    write_record(out, "loader", record)
    if results.get("cold") is None:
        raise fail("The loader could not be measured; the first remark says why.")


if __name__ == "__main__":
    app(prog_name="./scripts/bench")
