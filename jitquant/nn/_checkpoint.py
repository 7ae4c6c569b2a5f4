"""`quantize_checkpoint`: quantizes a checkpoint folder for inference engines, matrix by matrix."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from jitquant.formats import MXFP4_SCALINGS, Mxfp4Scaling, one_of
from jitquant.nn._calibration import Calibration
from jitquant.nn._checkpoint_folder import (
    alone,
    begin,
    check_free,
    check_space,
    end,
    ended,
    finish,
    keep,
)
from jitquant.nn._checkpoint_source import Source
from jitquant.nn._checkpoint_work import Checkpoint, Progress, Work
from jitquant.nn._rounding import (
    WEIGHT_ROUNDINGS,
    WeightRounding,
)
from jitquant.nn._schemes import SCHEMES
from jitquant.nn._targets import FUSED_LAYERS, as_families, as_patterns

Format = Literal["nvfp4", "nvfp4a16", "fp8_block", "fp8_row", "int8", "mxfp4"]
FileLayout = Literal["compressed-tensors", "modelopt", "gpt-oss"]
_FORMAT_OF = {"modelopt": "nvfp4", "gpt-oss": "mxfp4"}


def quantize_checkpoint(
    source: str | PathLike[str],
    out: str | PathLike[str],
    *,
    format: Format = "nvfp4a16",
    layout: FileLayout = "compressed-tensors",
    targets: str | Sequence[str] = "all",
    ignore: str | Sequence[str] | None = None,
    fused_layers: Sequence[Sequence[str]] = FUSED_LAYERS,
    rounding: WeightRounding = "nearest",
    scaling: Mxfp4Scaling = "even",
    calibration: Calibration | str | PathLike[str] | None = None,
    fp8_share: float = 0.0,
    input_amax: float | Mapping[str, float] | None = None,
    device: torch.device | str | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """Quantizes a model folder, file by file, to one that vLLM, sglang and transformers load.

    One matrix and its quantized parts are in memory at a time, or those that share a scale and take
    up to 1 GiB. Meanwhile the next tensors are read and the last ones written: up to 256 MiB each,
    and not more than an eighth of a file.

    Weight files keep their names and tensors. Tokenizer and other small files are copied.
    ``SHA256SUMS`` is written last. The output is written to ``out`` + ".partial" and renamed when
    it is complete. If a call is killed, the same call resumes after the last finished file.

    Reads weights in bfloat16, float16 and float32, in FP8 blocks (DeepSeek's ``weight_scale_inv``)
    and in MXFP4 (experts of gpt-oss, which are written as one matrix each, or together with layout
    "gpt-oss"). Tensors that keep their format are copied bit for bit.

    Args:
        source: a folder with config.json and safetensors files.
        out: a folder that does not exist yet.
        format: "nvfp4": weights and activations; "nvfp4a16": only weights; "fp8_block": 128x128;
            "fp8_row" and "int8": a scale for each output feature; "mxfp4": only weights, which
            sglang 0.5.23 reads in experts alone.
        layout: "compressed-tensors"; "modelopt" for "nvfp4"; "gpt-oss" for "mxfp4", which has the
            experts of gpt-oss in MXFP4, as OpenAI published them, and all else as it is.
        targets, ignore, fused_layers: as for `convert`. Embeddings are never quantized.
        rounding: of weights to NVFP4, as for `convert`: "nearest", "4over6", "mse" or "gptq".
        scaling: of weights to "mxfp4", as for `jitquant.quantize_mxfp4`. Experts that are in MXFP4
            already keep their bytes.
        calibration: from `calibrate`, or a file from `Calibration.save`, of the model that is in
            the folder. Used for "gptq", which keeps layers that engines fuse in memory together,
            for ``fp8_share``, and for "nvfp4" instead of ``input_amax``.
        fp8_share: for NVFP4: the share of matrices, as for `convert`, to write in FP8 blocks;
            experts stay in NVFP4. They are chosen by reading the others before anything is written,
            with "mse" instead of "gptq".
        input_amax: for "nvfp4": the amax of the input of each layer by its name in the folder, as
            `report` measures it, or one number for all; None: from the calibration, as are names
            that are missing.
        device: where to quantize; None: a GPU if there is one.
        restart: whether to start over instead of resuming an interrupted call.
        progress: called after each tensor.

    Returns:
        What was written.

    Raises:
        FileNotFoundError, ValueError: the folder lacks a file, a file is truncated, the model has
            an unknown format, there is no such device, an argument is invalid, or a tensor has NaN
            in it, or a weight infinity: found before the work begins with "mse" and "gptq", which
            take long, and else when it is read. Tensors that ``ignore`` names are not checked.
        FileExistsError: ``out`` exists, or a different call's unfinished work.
        OSError: the disk is full.
    """
    one_of("format", format, tuple(SCHEMES))
    one_of("layout", layout, ("compressed-tensors", *_FORMAT_OF))
    if format != _FORMAT_OF.get(layout, format):
        raise ValueError(
            f"format: expected {_FORMAT_OF[layout]!r} with layout {layout!r}, got {format!r}"
        )
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    _check_accuracy(format, layout, rounding, scaling, calibration, fp8_share)
    if format == "nvfp4" and input_amax is None and calibration is None:
        raise ValueError(
            "input_amax: expected amaxes with format 'nvfp4', which quantizes activations by a "
            "static scale, got None. Give a calibration, the amaxes that jitquant.nn.report "
            "measures (by name), one number for all layers such as 448, or take format 'nvfp4a16', "
            "which leaves activations as they are"
        )
    source, shown = Path(source), Path(out)
    out = shown.resolve()  # a link to a folder, and ".", have no place for a name beside them
    check_free(out)
    where = _usable(
        device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    )
    ignored = None if ignore is None else as_patterns("ignore", ignore)
    fused_layers = as_families(fused_layers)
    files = Source(source)
    known = {}
    if calibration is not None:  # under both names: the files may have those of the model
        names, known = calibration.in_files, calibration.layers
        known = known | {names.get(name, name): found for name, found in known.items()}
    work = Work(files, format, layout, where, rounding, scaling, known)
    work.plan(targets, ignored, fused_layers, input_amax)
    partial = out.with_name(out.name + ".partial")
    what = {
        "format": format,
        "layout": layout,
        "rounding": rounding,
        "scaling": scaling,
        "targets": targets if isinstance(targets, str) else list(targets),
        "ignore": None if ignored is None else list(ignored),
        "fused_layers": [list(family) for family in fused_layers],
        "input_amax": input_amax
        if isinstance(input_amax, (int, float, type(None)))
        else dict(input_amax),
        "calibration": {n: [found.rows, found.amax.item()] for n, found in known.items()},
        "fp8_share": fp8_share,
        "source": {
            name: [(source / name).stat().st_size, (source / name).stat().st_mtime_ns]
            for name in files.files
        },
    }
    if (complete := ended(out, what)) is not None:
        work.result.path, work.result.files = shown, complete[0]
        work.set_fp8(complete[1] or [])
        return work.result
    began = time.perf_counter()
    with alone(partial), closing(files.reader):
        done, in_fp8 = begin(partial, what, restart)
        check_space(partial, work.bytes_after(done))
        if fp8_share:
            work.set_fp8(work.lowest(fp8_share, progress) if in_fp8 is None else in_fp8)
            check_space(partial, work.bytes_after(done))

        if rounding in ("mse", "gptq"):
            work.scan(done, progress)

        def kept() -> None:
            keep(partial, what, done, work.result.in_fp8 if fp8_share else None)

        try:
            kept()
            work.run(partial, done, kept, progress)
            finish(files, work, partial, done)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(
                    errno.ENOSPC,
                    f"no space left for {partial}; free some, and the same call goes on from here",
                ) from error
            raise
        end(partial, out)
    work.result.path, work.result.files = shown, dict(done)
    read, written = files.reader.waited, work.waited
    took = time.perf_counter() - began
    work.result.seconds = {
        "reading": read,
        "quantizing": took - read - written,
        "writing": written,
    }
    return work.result


def _usable(device: torch.device | str) -> torch.device:
    """A device that has memory: refused before the work begins."""
    try:
        found = torch.empty(0, device=device).device
        if found.type not in ("cpu", "cuda"):
            raise RuntimeError(f"no kernels are for {found.type!r}")
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"device: expected 'cpu' or a GPU of this machine, got {str(device)!r}: {why}"
        ) from error
    return found


def _check_accuracy(
    format: str,
    layout: str,
    rounding: str,
    scaling: str,
    calibration: Calibration | None,
    fp8_share: float,
) -> None:
    one_of("rounding", rounding, WEIGHT_ROUNDINGS)
    one_of("scaling", scaling, MXFP4_SCALINGS)
    if scaling != "even" and format != "mxfp4":
        raise ValueError(
            f"scaling: expected 'even' with format {format!r}, got {scaling!r}. Other values are "
            "for 'mxfp4'"
        )
    if not 0 <= fp8_share <= 1:
        raise ValueError(f"fp8_share: expected a number from 0 to 1, such as 0.05, got {fp8_share}")
    for name, given, default in (("rounding", rounding, "nearest"), ("fp8_share", fp8_share, 0)):
        if given != default and not SCHEMES[format].has_gsa:
            raise ValueError(
                f"{name}: expected {default!r} with format {format!r}, got {given!r}. Other values "
                "are for 'nvfp4' and 'nvfp4a16'"
            )
    if rounding == "gptq" and calibration is None:
        raise ValueError(
            "calibration: expected one with rounding 'gptq', got None. Make it with "
            "jitquant.nn.calibrate(model, batches), or give the file that its save() wrote"
        )
    if fp8_share and layout == "modelopt":
        raise ValueError(
            f"fp8_share: expected 0 with layout 'modelopt', got {fp8_share}. Use layout "
            "'compressed-tensors', which can mix both formats in one model"
        )
