"""``jitquant quantize``: a model's folder in a format of few bits, with a bar."""

from __future__ import annotations

import json as _json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .output import Json, console, print_json


class Format(str, Enum):
    """Names of formats."""

    nvfp4 = "nvfp4"
    nvfp4a16 = "nvfp4a16"
    fp8_block = "fp8_block"
    fp8_row = "fp8_row"
    int8 = "int8"
    mxfp4 = "mxfp4"


class Rounding(str, Enum):
    """Names of roundings."""

    nearest = "nearest"
    four_over_six = "4over6"
    mse = "mse"
    gptq = "gptq"


class FileLayout(str, Enum):
    """Names of layouts."""

    compressed_tensors = "compressed-tensors"
    modelopt = "modelopt"
    gpt_oss = "gpt-oss"


def quantize(
    model: Annotated[Path, typer.Argument(help="A folder with config.json and *.safetensors.")],
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    format: Annotated[Format, typer.Option("--format", "-f")] = Format.nvfp4a16,
    layout: Annotated[
        FileLayout,
        typer.Option(help="Names in the files: modelopt is for nvfp4, gpt-oss for mxfp4."),
    ] = FileLayout.compressed_tensors,
    targets: Annotated[
        list[str] | None,
        typer.Option(help="all, attention, mlp, experts; or names, patterns, re:... (repeat)."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Names or patterns to skip (repeat), instead of the default, heads and routers."
        ),
    ] = None,
    fused_layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers that engines fuse to one product, such as q_proj,k_proj,v_proj (repeat); "
            "none: each layer has its own scale; default: the usual ones."
        ),
    ] = None,
    rounding: Annotated[
        Rounding,
        typer.Option(help="How to round weights to NVFP4, from least to most accurate."),
    ] = Rounding.nearest,
    scaling: Annotated[
        str,
        typer.Option(help="For mxfp4: how amaxes become scales: even, floor, ceil, rceil, ..."),
    ] = "even",
    calibration: Annotated[
        Path | None,
        typer.Option(help="A file from Calibration.save: for gptq, --fp8-share and nvfp4."),
    ] = None,
    fp8_share: Annotated[
        float, typer.Option(help="Share of the matrices, those worst in NVFP4, to keep in FP8.")
    ] = 0.0,
    input_amax: Annotated[
        str | None,
        typer.Option(help="For nvfp4: a JSON file of amaxes by layer, or one number for all."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda:0; default: any GPU.")] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over instead of resuming an interrupted call.")
    ] = False,
    json: Json = False,
) -> None:
    """Quantize a checkpoint for vLLM, sglang and transformers, one matrix at a time.

    Resumes after an interruption.
    """
    from jitquant.nn import quantize_checkpoint

    columns = (
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    out_of = console(stderr=True)
    with Progress(*columns, console=out_of, disable=json or not out_of.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(read: int, total: int, file: str) -> None:
            bar.update(task, completed=read, total=total, description=file)

        done = quantize_checkpoint(
            model,
            out,
            format=format.value,
            layout=layout.value,
            targets="all" if not targets else targets[0] if len(targets) == 1 else targets,
            ignore=ignore,
            **_families(fused_layers),
            rounding=rounding.value,
            scaling=scaling,  # type: ignore[arg-type]  # it checks the name
            calibration=calibration,
            fp8_share=fp8_share,
            input_amax=_amaxes(input_amax),
            device=device,
            restart=restart,
            progress=show,
        )
    if json:
        print_json(done)
    else:
        console().print(str(done), markup=False)


def _families(given: list[str] | None) -> dict[str, Any]:
    """The argument ``fused_layers``, if it is given."""
    if not given:
        return {}
    if given == ["none"]:
        return {"fused_layers": ()}
    families = [[member.strip() for member in family.split(",")] for family in given]
    for family, text in zip(families, given, strict=True):
        if len(family) < 2 or not all(family):
            raise ValueError(
                "--fused-layers: expected two or more names with commas between them, or none, got "
                f"{text!r}. Repeat the option for more layers: --fused-layers q_proj,k_proj,v_proj "
                "--fused-layers gate_proj,up_proj"
            )
    return {"fused_layers": families}


def _amaxes(given: str | None) -> Any:
    if given is None:
        return None
    try:
        return float(given)
    except ValueError:
        pass
    path = Path(given)
    if not path.is_file():
        raise ValueError(f"--input-amax: expected a number or a JSON file, got {given!r}")
    try:
        amaxes = _json.loads(path.read_text(encoding="utf-8"))
        return {name: float(amax) for name, amax in amaxes.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f'--input-amax: expected JSON such as {{"model.layers.0.mlp.up_proj": 3.5}} in {path}, '
            f"got something else: {error}"
        ) from error
