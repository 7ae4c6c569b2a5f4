"""`quantize_checkpoint`: quantizes a checkpoint folder for inference engines, matrix by matrix."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from jitquant.formats import INPUT_DTYPES, NVFP4_BLOCK, NVFP4_DIVISOR, ceil_div, one_of
from jitquant.loader.units import show_size
from jitquant.nn._calibration import Calibration, InputStatistics, lowest, output_sqnr
from jitquant.nn._compressed_tensors import FileScheme, global_scale, quantization_config
from jitquant.nn._rounding import (
    WEIGHT_ROUNDINGS,
    WeightRounding,
    gsa_for,
    quantized_weights,
    sample,
    with_gsa,
)
from jitquant.nn._safetensors import Entry, Writer, read_ahead, read_header, read_tensor
from jitquant.nn._schemes import SCHEMES, Layout, Scheme
from jitquant.nn._targets import FUSED_LAYERS, as_patterns, families, refusal
from jitquant.numerics.nvfp4 import gsa_from_amax
from jitquant.numerics.recipes import dequantize_mxfp4
from jitquant.tensors.fp8 import QuantizedTensor
from jitquant.tensors.nvfp4 import NVFP4Tensor

Format = Literal["nvfp4", "nvfp4a16", "fp8_block", "fp8_row", "int8", "mxfp4"]
FileLayout = Literal["compressed-tensors", "modelopt"]
Progress = Callable[[int, int, str], None]
"""Called with the bytes read, all that will be, and the name of the file in work."""

INDEX = "model.safetensors.index.json"
SUMS = "SHA256SUMS"
_STATE = "progress.json"
_EMBEDDINGS = ("embed", "wte", "wpe", "lookup", "relative_attention_bias", "position")
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".tmp")
_PROJECTION_OF = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}
"""The tensor of experts in memory that a matrix of an expert is in."""
_OWNER_OF = ("block_sparse_moe.experts", "mlp.experts")
"""How files of Mixtral name experts, and how transformers 5 does in memory."""
_SPARE = 64 << 20  # bytes that are left free
_KEPT = 1 << 30  # bytes of a family that is read once; a larger one is read again for its amax
_FP8 = torch.float8_e4m3fn
_BLOCK = 128


@dataclass
class Checkpoint:
    """What `quantize_checkpoint` wrote; ``print`` it.

    Attributes:
        path: the folder.
        format: the requested format.
        files: the weight files and their SHA-256.
        elements, quantized: number of elements of all weights, and of the quantized ones.
        bytes_before, bytes_after: size of all tensors.
        left: elements of tensors with two or more dimensions that are not quantized, by name.
        why: the reason, by name.
        in_fp8: names of the matrices that ``fp8_share`` keeps in FP8 blocks.
        sqnr: with ``fp8_share``: the SQNR of each matrix in NVFP4, in dB, by name; empty if it was
            computed by an earlier, interrupted call.
        uncalibrated: names of matrices that "gptq" rounds like "mse".
    """

    path: Path
    format: str
    files: dict[str, str] = field(default_factory=dict)
    elements: int = 0
    quantized: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    left: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    in_fp8: list[str] = field(default_factory=list)
    sqnr: dict[str, float] = field(default_factory=dict)
    uncalibrated: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        share = self.quantized / max(1, self.elements)
        lines = [
            f"{self.path}: {len(self.files)} files, {show_size(self.bytes_before)} -> "
            f"{show_size(self.bytes_after)}",
            f"  {self.quantized:,} of {self.elements:,} parameters in {self.format} ({share:.1%})",
        ]
        for what, some in (
            ("in FP8", self.in_fp8),
            ("not in the calibration, rounded as mse", self.uncalibrated),
        ):
            if some:
                more = f" and {len(some) - 1} more" if len(some) > 1 else ""
                lines.append(f"  {what}: {some[0]}{more}")
        reasons: dict[str, list[str]] = {}
        for name, why in self.why.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            size = sum(self.left[name] for name in names)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  unchanged: {names[0]}{more}: {size:,} parameters: {why}")
        return "\n".join(lines)


class _Matrix(NamedTuple):
    """A weight (N, K) of the checkpoint.

    Attributes:
        file: the file that contains it.
        source: "plain", "fp8" (with ``weight_scale_inv``), or for experts of gpt-oss "mxfp4", or
            "stack": (E, K, N) in bfloat16, float16 or float32.
        name: the name of its tensor in the file, without ``_blocks``.
        shape: (N, K).
        expert: the index of the expert in the tensor, and its rows.
    """

    file: str
    source: str
    name: str
    shape: tuple[int, int]
    expert: int = 0
    rows: slice = slice(None)


class _Source:
    """The tensors of a folder by name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise FileNotFoundError(f"{directory} is not a directory. Pass a model's folder")
        self.directory = directory
        config = directory / "config.json"
        if not config.is_file():
            raise FileNotFoundError(f"{directory} has no config.json. Pass a model's folder")
        self.config = _read_json(config)
        index = directory / INDEX
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} has no weight_map; download it again")
            self.map: dict[str, str] = weight_map
            names = sorted(set(self.map.values()))
        else:
            names = sorted(p.name for p in directory.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(
                f"{directory} has no *.safetensors; models in other files are converted by "
                "transformers: model.save_pretrained(...)"
            )
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise FileNotFoundError(
                f"{directory} has no {', '.join(absent)}, which {INDEX} names; download it again"
            )
        self.files: dict[str, dict[str, Entry]] = {n: read_header(directory / n) for n in names}
        found = {name: file for file, entries in self.files.items() for name in entries}
        if index.is_file():
            lost = [name for name, file in self.map.items() if found.get(name) != file]
            if lost:
                raise ValueError(f"{self.map[lost[0]]} has no {lost[0]}, which {INDEX} says it has")
        self.map = found

    def entry(self, name: str) -> Entry:
        return self.files[self.map[name]][name]

    def read(self, name: str, expert: int | None = None) -> Tensor:
        entry = self.entry(name)
        if expert is not None:
            size = entry.size // entry.shape[0]
            entry = Entry(entry.dtype, entry.shape[1:], entry.begin + expert * size, size)
        return read_tensor(self.directory / self.map[name], entry)

    def read_ahead(self, name: str) -> None:
        read_ahead(self.directory / self.map[name], self.entry(name))

    def values(self, matrix: _Matrix, device: torch.device) -> Tensor:
        """A matrix in bfloat16, float16 or float32 on a device."""
        if matrix.source == "mxfp4":
            codes, scales = self.mxfp4(matrix)
            x_fp4, x_sf = codes.to(device), scales.to(device)
            return dequantize_mxfp4(x_fp4.view(torch.float4_e2m1fn_x2), x_sf)[0]
        if matrix.source == "stack":
            return self.read(matrix.name, matrix.expert).to(device).t()[matrix.rows].contiguous()
        weight = self.read(matrix.name).to(device)
        if matrix.source == "fp8":
            scale = self.read(f"{matrix.name}_scale_inv").to(device, torch.float32)
            block = (_BLOCK, _BLOCK)
            q = QuantizedTensor(weight, scale, None, None, "fp8_block", block)
            weight = q.dequantize(torch.bfloat16)
        return weight.contiguous()

    def mxfp4(self, matrix: _Matrix) -> tuple[Tensor, Tensor]:
        """Codes uint8 (N, K / 2) and E8M0 scales (N, K / 32) of a matrix in MXFP4."""
        codes = self.read(f"{matrix.name}_blocks", matrix.expert)[matrix.rows].flatten(1)
        scales = self.read(f"{matrix.name}_scales", matrix.expert)[matrix.rows]
        return codes.contiguous(), scales.contiguous().view(torch.float8_e8m0fnu)


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
    calibration: Calibration | str | PathLike[str] | None = None,
    fp8_share: float = 0.0,
    input_amax: float | Mapping[str, float] | None = None,
    device: torch.device | str | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Checkpoint:
    """Quantizes a model folder, file by file, to one that vLLM, sglang and transformers load.

    One matrix and its quantized parts are in memory at a time, or those that share a scale and take
    up to 1 GiB. Weight files keep their names
    and tensors. Tokenizer and other small files are copied. ``SHA256SUMS`` is written last. The
    output is written to ``out`` + ".partial" and renamed when it is complete. If a call is killed,
    the same call resumes after the last finished file.

    Reads weights in bfloat16, float16 and float32, in FP8 blocks (DeepSeek's ``weight_scale_inv``)
    and in MXFP4 (experts of gpt-oss, which are written as one matrix each). Tensors that keep their
    format are copied bit for bit.

    Args:
        source: a folder with config.json and safetensors files.
        out: a folder that does not exist yet.
        format: "nvfp4": weights and activations; "nvfp4a16": only weights; "fp8_block": 128x128;
            "fp8_row" and "int8": a scale for each output feature; "mxfp4": only weights.
        layout: "compressed-tensors", or "modelopt" for "nvfp4".
        targets, ignore, fused_layers: as for `convert`. Embeddings are never quantized.
        rounding: of weights to NVFP4, as for `convert`: "nearest", "4over6", "mse" or "gptq".
        calibration: from `calibrate`, or a file from `Calibration.save`, with the names of the
            folder. Used for "gptq", which keeps layers that engines fuse in memory together, for
            ``fp8_share``, and for "nvfp4" instead of ``input_amax``.
        fp8_share: for NVFP4: the share of matrices, as for `convert`, to write in FP8 blocks. They
            are chosen by reading the whole model before anything is written, with "mse" instead of
            "gptq".
        input_amax: for "nvfp4": the amax of the input of each layer by name, as `report` measures
            it, or one number for all; None: from the calibration.
        device: where to quantize; None: a GPU if there is one.
        restart: whether to start over instead of resuming an interrupted call.
        progress: called after each tensor.

    Returns:
        What was written.

    Raises:
        FileNotFoundError, ValueError: the folder lacks a file, a file is truncated, the model has
            an unknown format, there is no such device, an argument is invalid, or a weight has NaN
            or infinity in it: found before the work begins with "mse" and "gptq", which take long,
            and else when its matrix is read.
        FileExistsError: ``out`` exists, or a different call's unfinished work.
        OSError: the disk is full.
    """
    one_of("format", format, tuple(SCHEMES))
    one_of("layout", layout, ("compressed-tensors", "modelopt"))
    if layout == "modelopt" and format != "nvfp4":
        raise ValueError(f"format: expected 'nvfp4' with layout 'modelopt', got {format!r}")
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    _check_accuracy(format, layout, rounding, calibration, fp8_share)
    if format == "nvfp4" and input_amax is None and calibration is None:
        raise ValueError(
            "input_amax is None; format 'nvfp4' quantizes activations by a scale from calibration. "
            "Give a calibration, the amaxes that jitquant.nn.report measures (by name), one number "
            "for all layers such as 448, or take format 'nvfp4a16', which leaves activations as "
            "they are"
        )
    source, out = Path(source), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is there already; give another folder, or remove it")
    where = _usable(
        device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    )
    ignored = None if ignore is None else as_patterns("ignore", ignore)
    files = _Source(source)
    known = {} if calibration is None else calibration.layers
    work = _Work(files, format, layout, where, rounding, known)
    work.plan(targets, ignored, fused_layers, input_amax)
    partial = out.with_name(out.name + ".partial")
    what = {
        "format": format,
        "layout": layout,
        "rounding": rounding,
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
    done, in_fp8 = _begin(partial, what, restart)
    _check_space(partial, work.bytes_after(done))
    if fp8_share:
        work.set_fp8(work.lowest(fp8_share, progress) if in_fp8 is None else in_fp8)
        _check_space(partial, work.bytes_after(done))

    if rounding in ("mse", "gptq"):
        work.scan(done, progress)

    def keep() -> None:
        _keep(partial, what, done, work.result.in_fp8 if fp8_share else None)

    try:
        keep()
        work.run(partial, done, keep, progress)
        _finish(files, work, partial, done)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC,
                f"no space left for {partial}; free some, and the same call goes on from here",
            ) from error
        raise
    if out.is_dir():
        out.rmdir()
    partial.rename(out)
    work.result.path, work.result.files = out, dict(done)
    return work.result


class _Work:
    """Decides what to do with each tensor, and writes it."""

    def __init__(
        self,
        source: _Source,
        format: str,
        layout: str,
        device: torch.device,
        rounding: WeightRounding,
        calibration: Mapping[str, InputStatistics],
    ) -> None:
        self.source, self.layout, self.device = source, layout, device
        self.rounding: WeightRounding = rounding
        self.calibration = calibration
        self.scheme: Scheme = SCHEMES[format]
        self.result = Checkpoint(Path(), format)
        self.matrices: dict[str, _Matrix] = {}
        self.quantized: dict[str, _Matrix] = {}
        self.ignored: list[str] = []
        self.amaxes: dict[str, float] = {}
        self.relatives: dict[str, list[str]] = {}
        self._kept: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._samples: dict[str, Tensor] = {}
        self._gsas: dict[str, Tensor] = {}
        self._rounded: dict[str, NVFP4Tensor] = {}

    def plan(
        self,
        targets: str | Sequence[str],
        ignored: Sequence[str] | None,
        fused_layers: Sequence[Sequence[str]],
        input_amax: float | Mapping[str, float] | None,
    ) -> None:
        """Decides by name what to do with each matrix. Reads no values."""
        config = self.source.config
        _check_model(config)
        for name, file in self.source.map.items():
            self._find(name, file)
        shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        done = self.result
        for name, matrix in self.matrices.items():
            why = refusal(name, shapes, targets, ignored)
            if why is None and matrix.shape[1] % self.scheme.columns:
                why = f"its {matrix.shape[1]} columns are not a multiple of {self.scheme.columns}"
            if why is None:
                self.quantized[name] = matrix
            else:
                done.why[name], done.left[name] = why, math.prod(matrix.shape)
                self.ignored.append(name)
        if not self.quantized:
            first = next(iter(done.why.items()), None)
            raise ValueError(
                f"{self.source.directory} has no matrix that targets and ignore leave to be "
                "quantized" + (f"; {first[0]} is left: {first[1]}" if first else "")
            )
        if config.get("tie_word_embeddings") and "lm_head" not in self.ignored:
            self.ignored.append("lm_head")
        if self.scheme.has_gsa:
            for family in families(self.quantized, shapes, fused_layers):
                self.relatives |= dict.fromkeys(family, family)
        if self.rounding == "gptq":
            done.uncalibrated = [name for name in self.quantized if self._inputs(name) is None]
            self._check_calibration()
        if self.scheme.inputs is not None and self.scheme.has_gsa:
            self.amaxes = {name: self._amax(name, input_amax) for name in self.quantized}
        for name in self.source.map:
            entry = self.source.entry(name)
            done.bytes_before += entry.size
            counts = not name.endswith(("_scales", "weight_scale_inv"))
            elements = math.prod(entry.shape) * (2 if name.endswith("_blocks") else 1)
            done.elements += elements if counts else 0
            why = self._why_left(name)
            if counts and why is not None:
                done.why[name], done.left[name] = why, elements
        done.quantized = sum(math.prod(m.shape) for m in self.quantized.values())
        self._lay_out()

    def _lay_out(self) -> None:
        self.outputs = {file: self._outputs(file) for file in self.source.files}
        self.result.bytes_after = self.bytes_after({})

    def _inputs(self, name: str) -> InputStatistics | None:
        """What is known of the inputs of a matrix."""
        found = self.calibration.get(name)
        if found is None and (place := _in_memory(name)) is not None:
            found = self.calibration.get(".".join(place))
        return found

    def _amax(self, name: str, amaxes: float | Mapping[str, float] | None) -> float:
        """The amax of the inputs of a matrix; of an expert that no token chose, the largest of
        the others, as engines take it."""
        amax = amaxes.get(name) if isinstance(amaxes, Mapping) else amaxes
        if amax is None and (found := self._inputs(name)) is not None:
            amax = found.amax.item()
        if amax is None and (place := _in_memory(name)) is not None:
            start = f"{place[0]}.{place[1]}."
            others = [f.amax.item() for n, f in self.calibration.items() if n.startswith(start)]
            amax = max(others, default=None)
        if amax is None or not 0 < amax < math.inf:
            raise ValueError(
                f"input_amax of {name}: expected a positive number, got {amax}. Measure it with "
                "report(model, inputs), or pass one number for all layers"
            )
        return float(amax)

    def _check_calibration(self) -> None:
        if len(self.result.uncalibrated) == len(self.quantized):
            raise ValueError(
                "calibration: expected layers named as in the folder, such as "
                f"{next(iter(self.quantized))}, got "
                f"{', '.join([*self.calibration][:1]) or 'no layers'}"
            )
        for name, matrix in self.quantized.items():
            found = self._inputs(name)
            if found is not None and len(found.moment) != matrix.shape[1]:
                raise ValueError(
                    f"calibration: expected {matrix.shape[1]} elements in each input of {name}, "
                    f"got {len(found.moment)}. Calibrate this model"
                )

    def lowest(self, share: float, progress: Progress | None) -> list[str]:
        """The matrices to keep in FP8. Reads all matrices."""
        rounding: WeightRounding = "mse" if self.rounding == "gptq" else self.rounding
        sqnr, read, total = self.result.sqnr, 0, self.result.bytes_before
        for name in self.quantized:
            weight = self._values(name)
            found = self._inputs(name)
            found = None if found is None else found.to(weight.device)
            q = with_gsa(weight, rounding, self._gsa(name))
            sqnr[name] = output_sqnr(weight, q, found, self.scheme.inputs is None)
            if progress is not None:
                read += weight.nbytes
                progress(min(read, total), total, "what stays in FP8")
        groups = [self.relatives.get(name, [name]) for name in self.quantized]
        fits = [g for g in groups if self.quantized[g[0]].shape[1] % _BLOCK == 0]
        return lowest(sqnr, fits, int(share * len(self.quantized) + 0.5))

    def scan(self, done: Mapping[str, str], progress: Progress | None) -> None:
        """Reads the matrices of files that are not finished, for their amaxes and for NaN."""
        read, total = 0, self.result.bytes_before
        for name, matrix in self.quantized.items():
            if matrix.file not in done and name not in self._maxima:
                read += self._values(name).nbytes
                if progress is not None:
                    progress(min(read, total), total, "whether all weights are finite")

    def set_fp8(self, names: Sequence[str]) -> None:
        """Marks matrices to be written in FP8 blocks."""
        done = self.result
        done.in_fp8 = list(names)
        done.uncalibrated = [name for name in done.uncalibrated if name not in names]
        for name in names:
            self.amaxes.pop(name, None)
        self._lay_out()

    def scheme_of(self, name: str) -> Scheme:
        """The scheme of a matrix."""
        return SCHEMES["fp8_block"] if name in self.result.in_fp8 else self.scheme

    def _find(self, name: str, file: str) -> None:
        """Registers the matrices of a tensor."""
        entry = self.source.entry(name)
        if name.endswith("_blocks") and entry.dtype == torch.uint8 and len(entry.shape) == 4:
            experts, rows, groups, _ = entry.shape
            base = name.removesuffix("_blocks")
            self._find_experts(file, "mxfp4", base, experts, (rows, groups * 32))
            return
        if self._is_stack(name):
            experts, cols, rows = entry.shape
            self._find_experts(file, "stack", name, experts, (rows, cols))
            return
        if not name.endswith(".weight") or len(entry.shape) != 2 or 0 in entry.shape:
            return
        module = name.removesuffix(".weight")
        if any(part in module.rpartition(".")[2] for part in _EMBEDDINGS):
            return
        n, k = entry.shape
        if entry.dtype == _FP8:
            scale = f"{name}_scale_inv"
            blocks = (ceil_div(n, _BLOCK), ceil_div(k, _BLOCK))
            if scale not in self.source.map or self.source.entry(scale).shape != blocks:
                raise ValueError(
                    f"{name}: expected FP8 in 128x128 blocks with {scale} of shape {blocks}, as "
                    "DeepSeek stores it, got FP8 without these scales"
                )
            self.matrices[module] = _Matrix(file, "fp8", name, (n, k))
        elif entry.dtype in INPUT_DTYPES:
            self.matrices[module] = _Matrix(file, "plain", name, (n, k))

    def _is_stack(self, name: str) -> bool:
        """Whether a tensor contains gpt-oss experts in the layout of its bf16 files."""
        entry, last = self.source.entry(name), name.rpartition(".")[2]
        return (
            self.source.config.get("model_type") == "gpt_oss"
            and last in ("gate_up_proj", "down_proj")
            and len(entry.shape) == 3
            and entry.dtype in INPUT_DTYPES
        )

    def _find_experts(
        self, file: str, source: str, base: str, experts: int, shape: tuple[int, int]
    ) -> None:
        """Registers the matrices of gpt-oss experts, whose gate and up rows alternate."""
        owner, pieces = _expert_pieces(base)
        rows, cols = shape
        for expert in range(experts):
            for i, piece in enumerate(pieces):
                self.matrices[f"{owner}.{expert}.{piece}"] = _Matrix(
                    *(file, source, base, (rows // len(pieces), cols), expert),
                    slice(i, None, len(pieces)),
                )

    def _why_left(self, name: str) -> str | None:
        """Why a tensor is not quantized; None if it is, or if it is small."""
        entry, module = self.source.entry(name), name.removesuffix(".weight")
        known = module in self.matrices or name.endswith("_blocks") or self._is_stack(name)
        if known or len(entry.shape) < 2 or self._expert_bias(name) is not None:
            return None
        if any(part in module.rpartition(".")[2] for part in _EMBEDDINGS):
            return "an embedding"
        if entry.dtype not in INPUT_DTYPES:
            return f"it is {entry.dtype}"
        if len(entry.shape) == 3 and "experts" in name:
            return f"experts of {self.source.config.get('model_type')} in one tensor are not read"
        return "not the weight of a linear"

    def _parts(self, name: str, matrix: _Matrix) -> Layout:
        """The tensors to write for a matrix, by full name."""
        if name not in self.quantized:
            return {f"{name}.weight": (torch.bfloat16, matrix.shape)}
        parts = self.scheme_of(name).layout(*matrix.shape)
        if name in self.amaxes:
            parts["input_global_scale"] = (torch.float32, (1,))
        if self.layout == "modelopt":
            parts = {
                "weight": parts["weight_packed"],
                "weight_scale": parts["weight_scale"],
                "weight_scale_2": (torch.float32, ()),
                "input_scale": (torch.float32, ()),
            }
        return {f"{name}.{part}": about for part, about in parts.items()}

    def _outputs(self, file: str) -> list[tuple[str, Layout]]:
        """The tensors to write for each tensor of a file, in order."""
        by_tensor: dict[str, list[str]] = {}
        for module, matrix in self.matrices.items():
            if matrix.file == file:
                by_tensor.setdefault(matrix.name, []).append(module)
        found = []
        for name, entry in self.source.files[file].items():
            made: Layout = {}
            modules = by_tensor.get(name.removesuffix("_blocks"), [])
            as_it_is = modules and self.matrices[modules[0]].source in ("plain", "stack")
            if modules and not (as_it_is and not self.quantized.keys() & set(modules)):
                for module in modules:
                    made |= self._parts(module, self.matrices[module])
            elif self._is_scale(name):
                pass
            elif self._expert_bias(name) is not None:
                owner, pieces = self._expert_bias(name) or ("", ())
                experts, size = entry.shape
                shape = (size // len(pieces),)
                for e in range(experts):
                    made |= {f"{owner}.{e}.{p}.bias": (entry.dtype, shape) for p in pieces}
            else:
                made = {name: (entry.dtype, entry.shape)}
            found.append((name, made))
        return found

    def _is_scale(self, name: str) -> bool:
        """Whether a tensor is a scale that is read together with its weight."""
        if name.endswith("_scales"):
            return f"{name.removesuffix('_scales')}_blocks" in self.source.map
        weight = name.removesuffix("_scale_inv")
        return weight != name and weight in self.source.map

    def _expert_bias(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """The experts of a bias, and its matrices, whose elements alternate."""
        base = name.removesuffix("_bias")
        if base == name:
            return None
        if base in self.source.map and self._is_stack(base):
            owner, pieces = _expert_pieces(base)
            experts = range(self.source.entry(base).shape[0])
            every = {f"{owner}.{e}.{piece}" for e in experts for piece in pieces}
            return (owner, pieces) if every & self.quantized.keys() else None
        return _expert_pieces(base) if f"{base}_blocks" in self.source.map else None

    def bytes_after(self, done: Mapping[str, str]) -> int:
        """Size of the tensors in the files that are not finished."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for file, outputs in self.outputs.items()
            if file not in done
            for _, layout in outputs
            for dtype, shape in layout.values()
        )

    def run(
        self,
        folder: Path,
        done: dict[str, str],
        keep: Callable[[], None],
        progress: Progress | None,
    ) -> None:
        """Writes the files that are not finished.

        Args:
            folder: to write to.
            done: hashes of the finished files; the others are added.
            keep: called after each file.
            progress: called after each tensor.
        """
        total, read = self.result.bytes_before, 0
        for file, outputs in self.outputs.items():
            size = sum(self.source.entry(name).size for name, _ in outputs)
            if file in done:
                read += size
                continue
            layout = {n: about for _, made in outputs for n, about in made.items()}
            with _writing(folder / file, layout) as writer:
                for i, (name, made) in enumerate(outputs):
                    for following, _ in outputs[i + 1 : i + 2]:
                        self.source.read_ahead(following)
                    for part, tensor in self._tensors(name, made):
                        writer.write(part, tensor)
                    read += self.source.entry(name).size
                    if progress is not None:
                        progress(read, total, file)
                done[file] = writer.close()
            self._kept.clear()
            keep()

    def _tensors(self, name: str, made: Layout) -> Iterator[tuple[str, Tensor]]:
        """The tensors to write for one tensor."""
        modules = dict.fromkeys(part.rpartition(".")[0] for part in made)
        if list(made) == [name] and not self._is_quantized(name):
            matrix = self.matrices.get(name.removesuffix(".weight"))
            if matrix is None or matrix.source == "plain":
                yield name, self.source.read(name)
                return
        bias = self._expert_bias(name)
        if bias is not None:
            owner, pieces = bias
            whole = self.source.read(name)
            for e in range(whole.shape[0]):
                for i, piece in enumerate(pieces):
                    yield f"{owner}.{e}.{piece}.bias", whole[e, i :: len(pieces)]
            return
        for module in modules:
            yield from self._matrix(module)

    def _is_quantized(self, name: str) -> bool:
        return name.removesuffix(".weight") in self.quantized

    def _matrix(self, name: str) -> Iterator[tuple[str, Tensor]]:
        matrix = self.matrices[name]
        if name not in self.quantized:
            yield f"{name}.weight", self._values(name).to(torch.bfloat16)
            return
        scheme, gsa = self.scheme_of(name), None
        if (found := self._as_it_is(matrix, scheme)) is not None:
            for part, tensor in found.items():
                yield f"{name}.{part}", tensor
            return
        if scheme.has_gsa and self.rounding == "gptq":
            q = self._gptq(name)
            gsa, packed = q.gsa, {"weight_packed": q.x_fp4_bytes, "weight_scale": q.x_sf}
            parts = packed | {"weight_global_scale": global_scale(gsa)}
        else:
            weight = self._values(name)
            gsa = self._gsa(name) if scheme.has_gsa else None
            parts = scheme.quantize(weight, gsa, self.rounding)
        if name in self.amaxes:
            parts["input_global_scale"] = torch.tensor([NVFP4_DIVISOR / self.amaxes[name]])
        if self.layout == "modelopt":
            assert gsa is not None
            parts = {
                "weight": parts["weight_packed"],
                "weight_scale": parts["weight_scale"],
                "weight_scale_2": gsa.reshape(()),
                "input_scale": torch.tensor(self.amaxes[name] / NVFP4_DIVISOR),
            }
        for part, tensor in parts.items():
            yield f"{name}.{part}", tensor

    def _gptq(self, name: str) -> NVFP4Tensor:
        """A matrix, rounded together with those that engines fuse with it."""
        if name not in self._rounded:
            family = self.relatives.get(name, [name])
            weights = [self._values(member) for member in family]
            known = [self._inputs(member) for member in family]
            moments = [None if k is None else k.moment.to(self.device) for k in known]
            made = quantized_weights(weights, "gptq", moments)
            self._rounded |= dict(zip(family, made, strict=True))
        return self._rounded.pop(name)

    def _as_it_is(self, matrix: _Matrix, scheme: Scheme) -> dict[str, Tensor] | None:
        """The parts of a matrix that already has the requested format."""
        if matrix.source == "fp8" and scheme is SCHEMES["fp8_block"]:
            scale = self.source.read(f"{matrix.name}_scale_inv").to(torch.float32)
            return {"weight": self.source.read(matrix.name), "weight_scale": scale}
        if matrix.source == "mxfp4" and self.result.format == "mxfp4":
            codes, scales = self.source.mxfp4(matrix)
            return {"weight_packed": codes, "weight_scale": scales.view(torch.uint8)}
        return None

    def _values(self, name: str) -> Tensor:
        """The values of a matrix. Records its amax."""
        if name in self._kept:
            return self._kept.pop(name)
        matrix = self.matrices[name]
        weight = self.source.values(matrix, self.device)
        if name not in self._maxima:
            low, high = weight.aminmax()
            amax = torch.maximum(-low, high).float().reshape(1)
            if not bool(amax.isfinite()):
                raise ValueError(
                    f"{matrix.name} in {self.source.directory / matrix.file}: expected finite "
                    f"weights, got NaN or infinity. Leave it out with ignore={name!r}, or get the "
                    "file again"
                )
            self._maxima[name] = amax
            if self.rounding in ("mse", "gptq"):
                self._samples[name] = sample(weight, len(self.relatives.get(name, [name])))
        return weight

    def _gsa(self, name: str) -> Tensor:
        """The gsa of a matrix and of those that engines fuse with it."""
        family = self.relatives.get(name, [name])
        for member in family:
            if member not in self._maxima:
                weight = self._values(member)
                if weight.nbytes * len(family) <= _KEPT:
                    self._kept[member] = weight
        if name not in self._gsas:
            amax = torch.stack([self._maxima[member] for member in family]).amax(0)
            samples = [self._samples.pop(member) for member in family if member in self._samples]
            gsa = gsa_for(self.rounding, gsa_from_amax(amax), samples)
            self._gsas |= dict.fromkeys(family, gsa)
        return self._gsas[name]


def _expert_pieces(base: str) -> tuple[str, tuple[str, ...]]:
    """The experts module that a gpt-oss tensor belongs to, and the matrices in it."""
    owner, _, last = base.rpartition(".")
    return owner, ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)


@contextlib.contextmanager
def _writing(path: Path, layout: Layout) -> Iterator[Writer]:
    writer = Writer(path, layout)
    try:
        yield writer
    except BaseException:
        writer.abandon()
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a {type(found).__name__} instead of a JSON object")
    return found


def _check_model(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind in _CONV1D:
        raise ValueError(
            f"model_type: expected a model of nn.Linear layers, got {kind!r}, whose matrices are "
            "transposed (Conv1D)"
        )
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise ValueError(
            f"quant_method in config.json: expected none, 'fp8' or 'mxfp4', got {method!r}. Start "
            "from the model before quantization"
        )


def _in_memory(name: str) -> tuple[str, str, str] | None:
    """Where transformers 5 has a matrix of an expert: the module, the tensor, and the expert."""
    owner, _, piece = name.rpartition(".")
    experts, _, expert = owner.rpartition(".")
    projection = _PROJECTION_OF.get(piece)
    if projection is None or not expert.isdecimal():
        return None
    if experts.endswith(_OWNER_OF[0]):
        experts = experts.removesuffix(_OWNER_OF[0]) + _OWNER_OF[1]
    return experts, projection, expert


def _usable(device: torch.device | str) -> torch.device:
    """A device that has memory: refused before the work begins."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"device: expected 'cpu' or a GPU of this machine, got {str(device)!r}: {why}"
        ) from error


def _check_accuracy(
    format: str, layout: str, rounding: str, calibration: Calibration | None, fp8_share: float
) -> None:
    one_of("rounding", rounding, WEIGHT_ROUNDINGS)
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
            "calibration is None; 'gptq' needs it: calibration=jitquant.nn.calibrate(model, "
            "batches), or the file that its save() wrote"
        )
    if fp8_share and layout == "modelopt":
        raise ValueError(
            f"fp8_share: expected 0 with layout 'modelopt', got {fp8_share}. Use layout "
            "'compressed-tensors', which can mix both formats in one model"
        )


def _begin(
    partial: Path, what: dict[str, Any], restart: bool
) -> tuple[dict[str, str], list[str] | None]:
    """Creates the working folder, and finds what an interrupted call has finished.

    Returns:
        The hashes of the finished files, and the names that stay in FP8, or None.
    """
    state = partial / _STATE
    if partial.exists() and restart:
        if not state.is_file() and any(partial.iterdir()):
            raise FileExistsError(f"{partial} is not from an unfinished call; remove it")
        shutil.rmtree(partial)
    if not partial.exists():
        partial.mkdir(parents=True)
        _keep(partial, what, {}, None)
        return {}, None
    try:
        kept = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    if kept.get("what") != json.loads(json.dumps(what)):
        raise FileExistsError(
            f"{partial} is from an unfinished call with other arguments or another source; "
            "restart=True (--restart) starts over"
        )
    done: dict[str, str] = kept["done"]
    for left in partial.glob("*.tmp"):
        left.unlink()
    whole = {file: digest for file, digest in done.items() if (partial / file).is_file()}
    return whole, kept["in_fp8"]


def _keep(
    partial: Path, what: dict[str, Any], done: Mapping[str, str], in_fp8: Sequence[str] | None
) -> None:
    beside = partial / f"{_STATE}.tmp"
    state = {"what": what, "done": done, "in_fp8": in_fp8}
    beside.write_text(json.dumps(state), encoding="utf-8")
    beside.replace(partial / _STATE)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE:
        raise OSError(
            errno.ENOSPC,
            f"{folder} is on a disk with {show_size(free)} free and {show_size(needed)} are to be "
            "written",
        )


def _finish(source: _Source, work: _Work, folder: Path, done: Mapping[str, str]) -> None:
    """Everything but the weights."""
    for path in sorted(source.directory.iterdir()):
        known = path.name in ("config.json", INDEX, SUMS, "hf_quant_config.json")
        if path.is_file() and not known and path.suffix not in _NOT_COPIED:
            shutil.copyfile(path, folder / path.name)
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    config["quantization_config"] = _config(work)
    _write_json(folder / "config.json", config)
    if work.layout == "modelopt":
        _write_json(folder / "hf_quant_config.json", _modelopt(work))
    names = {n: file for file, made in work.outputs.items() for _, parts in made for n in parts}
    if (source.directory / INDEX).is_file():
        total = work.bytes_after({})
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    (folder / _STATE).unlink()
    sums = dict(done)
    for path in folder.iterdir():
        if path.name not in sums:
            sums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _config(work: _Work) -> dict[str, Any]:
    """The ``quantization_config`` of config.json."""
    if work.layout == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": NVFP4_BLOCK,
            "kv_cache_scheme": None,
            "ignore": work.ignored,
        }
    layers: dict[str, FileScheme] = {}
    for name in work.quantized:
        scheme = work.scheme_of(name)
        layers[name] = (scheme.name, scheme.weights, scheme.inputs)
    return quantization_config(layers, work.ignored)


def _modelopt(work: _Work) -> dict[str, Any]:
    return {
        "producer": {"name": "jitquant"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": NVFP4_BLOCK,
            "exclude_modules": work.ignored,
        },
    }


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
