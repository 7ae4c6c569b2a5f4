"""Command line of the demo."""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from harness import DemoError

MOST = 5.0
"""Percent more bits per byte than bf16: beyond it something is wrong, and the demo fails."""

PROMPT = 'def read(path):\n    """'

app = typer.Typer(add_completion=False)


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where the plot and the JSON go.")] = Path("out/demo"),
    weights: Annotated[
        Path | None,
        typer.Option(help="Of a model of examples/language_model.py, in place of the one there."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every format, as in docs/accuracy.md (minutes).")
    ] = False,
    windows: Annotated[
        int | None, typer.Option(help="Windows of 256 bytes of held-out text; default 32, or 64.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="What the model continues.")] = PROMPT,
) -> None:
    """Quantize a small language model to FP8 and NVFP4, and show what that costs.

    The model reads Python source that it was not trained on, and writes some. Bits per byte say how
    well it predicts: lower is better. On a GPU the kernels are compiled first; on a CPU the
    reference does the same arithmetic.
    """
    console = Console(soft_wrap=False)
    begin = time.perf_counter()
    try:
        run(console, weights, device, out, every, windows or (64 if every else 32), prompt)
    except DemoError as error:
        console.print(f"[bold red]The demo failed:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    console.print(f"Done in {time.perf_counter() - begin:.1f} s.", highlight=False)


def pick_device(wanted: str) -> Any:
    """The torch device; a GPU if ``wanted`` is auto and there is one."""
    import torch

    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise DemoError(f"--device {wanted}: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"--device: expected cpu, cuda, cuda:N or auto, got {wanted}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DemoError(f"--device {wanted}: torch {torch.__version__} sees no GPU here.")
    return device


def run(
    console: Console,
    weights: Path | None,
    wanted: str,
    out: Path,
    every: bool,
    count: int,
    prompt: str,
) -> None:
    """Everything between the command line and the exit code."""
    if weights is not None and not weights.is_file():
        raise DemoError(f"--weights {weights}: no such file.")
    with console.status("importing torch and the model"):
        import torch
        from language_model import WEIGHTS, load

        from harness.demo import formats, report

        device = pick_device(wanted)
        model = load(weights or WEIGHTS)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (reference)"
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"Language model with {parameters / 1e6:.2f} M parameters on {where}")
    with console.status("calibrating"):
        measure = formats.Measure(model, device, count)
    rows = []
    for name in formats.FORMATS if every else formats.SHOWN:
        with console.status(formats.FORMATS[name].label):
            rows.append(measure.row(name, prompt, 0 if every else 60))
    if not every:
        console.print(f"\nContinuations of [bold]{json.dumps(prompt)}[/]:", highlight=False)
        for row in rows:
            inputs = formats.FORMATS[row.format].inputs
            head = f"  {formats.FORMATS[row.format].label}, {inputs}-bit inputs: "
            console.print(head + json.dumps(row.text), highlight=False, markup=False)
        console.print()
    console.print(report.table(rows))
    console.print(
        f"Held-out Python source: {count} windows of {formats.LENGTH} bytes. Up to "
        f"{report.GOOD:.0f}% more than bf16 is good enough for most uses."
    )
    if any(row.per_second is not None for row in rows):
        console.print(
            "tokens/s: a byte at a time without CUDA graphs, so a model this small waits for the "
            "CPU. ./scripts/bench model times large ones."
        )
    out.mkdir(parents=True, exist_ok=True)
    plot, data = out / ("accuracy.svg" if every else "demo.png"), out / "accuracy.json"
    title = f"A language model of {parameters / 1e6:.2f} M parameters"
    report.picture(rows, title, plot)
    record = {
        "device": where,
        "parameters": parameters,
        "windows": count,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": [asdict(row) for row in rows],
    }
    data.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {plot} and {data}", highlight=False, soft_wrap=True)
    if every:
        print(report.markdown(rows))
    worst = max(report.more(row, rows) for row in rows)
    if not math.isfinite(worst) or worst > MOST:
        raise DemoError(f"a format needs {worst:.1f}% more bits per byte; {MOST}% was expected.")


if __name__ == "__main__":
    app(prog_name="./scripts/demo")
