"""A checkpoint folder: its tensors by name, and the matrices in them, read one at a time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jitquant.formats import (
    CODES_PER_BYTE,
    E8M0_DTYPE,
    FP8_DTYPES,
    INPUT_DTYPES,
    MXFP4_BLOCK,
    ceil_div,
)
from jitquant.nn._model_folder import INDEX, WHOLE, read_config, read_index
from jitquant.nn._reader import HOST, Part, Reader
from jitquant.nn._safetensors import Entry, read_header
from jitquant.numerics.recipes import dequantize_mxfp4
from jitquant.tensors.fp8 import QuantizedTensor

_EMBEDDINGS = ("embed", "wte", "wpe", "lookup", "relative_attention_bias", "position", "_emb")
_SHARED = "shared"  # by encoder, decoder and head: the embedding of T5 and BART
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
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
DESCRIPTIONS = ("quantization_config", "compression_config")
"""Keys of config.json, and of what is nested in it, that say how a model is quantized."""
_FP8 = torch.float8_e4m3fn
FP8_TILE = 128


class Matrix(NamedTuple):
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

    @property
    def is_stacked(self) -> bool:
        """Whether it is of an expert, in one tensor with the others, as in gpt-oss."""
        return self.source in ("mxfp4", "stack")


class Source:
    """The tensors of a folder by name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory, "source")
        index = read_index(directory, "source")
        names = _files_without_index(directory) if index is None else sorted(set(index.values()))
        if not names:
            raise FileNotFoundError(
                f"source: expected *.safetensors, got {directory} without them. Convert other "
                "files with transformers: model.save_pretrained(...)"
            )
        self.files: dict[str, dict[str, Entry]] = {n: read_header(directory / n) for n in names}
        for name, file in (index or {}).items():
            if name not in self.files[file]:
                raise ValueError(
                    f"{file}: expected {name}, which {INDEX} says it has, got a file without it. "
                    "Download it again"
                )
        self.map: dict[str, str] = {}
        for file, entries in self.files.items():
            for name in entries:
                if name in self.map:
                    raise ValueError(
                        f"{name}: expected it in one file of {directory}, got it in "
                        f"{self.map[name]} and {file}. Remove one of these files"
                    )
                self.map[name] = file
        self.reader = Reader()
        self._experts: deque[tuple[Part, Tensor]] = deque(maxlen=2)  # codes and scales, read last

    def entry(self, name: str) -> Entry:
        return self.files[self.map[name]][name]

    def part(self, name: str, expert: int | None = None) -> Part:
        """A tensor, or one expert's part of it."""
        entry = self.entry(name)
        if expert is not None:
            size = entry.size // entry.shape[0]
            entry = Entry(entry.dtype, entry.shape[1:], entry.begin + expert * size, size)
        return Part(self.directory / self.map[name], entry)

    def read(self, name: str, expert: int | None = None, device: torch.device = HOST) -> Tensor:
        """The values of a `part`, which are not to be changed."""
        part = self.part(name, expert)
        for known, values in self._experts:
            if known == part:  # gate and up are in one
                return values.to(device)
        values = self.reader.read(part, device)
        if expert is not None:
            self._experts.append((part, values))
        else:
            self._experts.clear()
        return values

    def values(self, matrix: Matrix, device: torch.device) -> Tensor:
        """A matrix in bfloat16, float16 or float32 on a device."""
        if matrix.source == "mxfp4":
            codes, scales = self.mxfp4(matrix)
            x_fp4, x_sf = codes.to(device), scales.to(device)
            return dequantize_mxfp4(x_fp4.view(torch.float4_e2m1fn_x2), x_sf)[0]
        if matrix.source == "stack":
            stacked = self.read(matrix.name, matrix.expert, device)
            return stacked.t()[matrix.rows].contiguous()
        weight = self.read(matrix.name, device=device)
        if matrix.source == "fp8":
            scale = self.read(f"{matrix.name}_scale_inv").to(device, torch.float32)
            block = (FP8_TILE, FP8_TILE)
            q = QuantizedTensor(weight, scale, None, None, "fp8_block", block)
            weight = q.dequantize(torch.bfloat16)
        return weight.contiguous()

    def mxfp4(self, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """Codes uint8 (N, K / 2) and E8M0 scales (N, K / 32) of a matrix in MXFP4."""
        codes = self.read(f"{matrix.name}_blocks", matrix.expert)[matrix.rows].flatten(1)
        scales = self.read(f"{matrix.name}_scales", matrix.expert)[matrix.rows]
        return codes.contiguous(), scales.contiguous().view(torch.float8_e8m0fnu)

    def matrices(self) -> dict[str, Matrix]:
        """The weights of linears and experts by the name of their layer.

        Raises:
            ValueError: a tensor has codes that are not read.
        """
        found: dict[str, Matrix] = {}
        for name, file in self.map.items():
            self._find(name, file, found)
        read = {matrix.name for matrix in found.values()}
        for name in self.map:
            if name not in read:
                self._check_unread(name)
        return found

    def _check_unread(self, name: str) -> None:
        dtype, shape = self.entry(name)[:2]
        is_weight = dtype in FP8_DTYPES or name.endswith(".weight")
        is_code = is_weight and dtype in (*FP8_DTYPES, torch.int8, torch.uint8) and len(shape) > 1
        if is_code or name.endswith((".weight_packed", ".qweight")):
            raise ValueError(
                f"{name}: expected bfloat16, float16 or float32, a linear's FP8 in 128x128 blocks, "
                f"or MXFP4 as gpt-oss stores it, got {dtype} of shape {shape}. Start from the "
                "model before quantization"
            )

    def _find(self, name: str, file: str, found: dict[str, Matrix]) -> None:
        """Registers the matrices of a tensor."""
        entry = self.entry(name)
        if name.endswith("_blocks") and entry.dtype == torch.uint8 and len(entry.shape) == 4:
            experts, rows, groups, _ = entry.shape
            base = name.removesuffix("_blocks")
            self._check_mxfp4(name, f"{base}_scales")
            self._find_experts(found, file, "mxfp4", base, experts, (rows, groups * 32))
            return
        if self.is_stack(name):
            experts, cols, rows = entry.shape
            self._find_experts(found, file, "stack", name, experts, (rows, cols))
            return
        if not name.endswith(".weight") or len(entry.shape) != 2 or 0 in entry.shape:
            return
        module = name.removesuffix(".weight")
        if is_embedding(module) or self._is_of_attention(module):
            return
        n, k = entry.shape
        if entry.dtype == _FP8:
            scale = f"{name}_scale_inv"
            blocks = (ceil_div(n, FP8_TILE), ceil_div(k, FP8_TILE))
            if scale not in self.map or self.entry(scale).shape != blocks:
                raise ValueError(
                    f"{name}: expected FP8 in 128x128 blocks with {scale} of shape {blocks}, as "
                    "DeepSeek stores it, got FP8 without these scales"
                )
            found[module] = Matrix(file, "fp8", name, (n, k))
        elif entry.dtype in INPUT_DTYPES:
            found[module] = Matrix(file, "plain", name, (n, k))

    def _check_mxfp4(self, blocks: str, scales: str) -> None:
        *leading, size = self.entry(blocks).shape
        of_blocks = self.entry(scales) if scales in self.map else None
        if (
            size != MXFP4_BLOCK // CODES_PER_BYTE
            or of_blocks is None
            or of_blocks.shape != tuple(leading)
            or of_blocks.dtype not in (torch.uint8, E8M0_DTYPE)
        ):
            found = "none" if of_blocks is None else f"{of_blocks.dtype} {of_blocks.shape}"
            raise ValueError(
                f"{blocks}: expected MXFP4 in blocks of 16 bytes with {scales} of shape "
                f"{tuple(leading)}, as gpt-oss stores it, got blocks of {size} with {found}. "
                "Download the files again"
            )

    def _find_experts(
        self,
        found: dict[str, Matrix],
        file: str,
        source: str,
        base: str,
        experts: int,
        shape: tuple[int, int],
    ) -> None:
        """Registers the matrices of gpt-oss experts, whose gate and up rows alternate."""
        owner, pieces = expert_pieces(base)
        rows, cols = shape
        for expert in range(experts):
            for i, piece in enumerate(pieces):
                found[f"{owner}.{expert}.{piece}"] = Matrix(
                    *(file, source, base, (rows // len(pieces), cols), expert),
                    slice(i, None, len(pieces)),
                )

    def _is_of_attention(self, module: str) -> bool:
        """Whether a linear is in ``nn.MultiheadAttention``, which reads its weight directly."""
        owner, _, last = module.rpartition(".")
        return last == "out_proj" and f"{owner}.in_proj_weight" in self.map

    def is_stack(self, name: str) -> bool:
        """Whether a tensor contains gpt-oss experts in the layout of its bf16 files."""
        entry, last = self.entry(name), name.rpartition(".")[2]
        return (
            self.config.get("model_type") == "gpt_oss"
            and last in ("gate_up_proj", "down_proj")
            and len(entry.shape) == 3
            and entry.dtype in INPUT_DTYPES
        )

    def is_mxfp4(self, name: str) -> bool:
        """Whether a tensor has the codes or scales of experts in gpt-oss's layout."""
        base = name.removesuffix("_blocks").removesuffix("_scales")
        return base != name and {f"{base}_blocks", f"{base}_scales"} <= self.map.keys()

    def is_scale(self, name: str) -> bool:
        """Whether a tensor is a scale that is read together with its weight."""
        if name.endswith("_scales"):
            return f"{name.removesuffix('_scales')}_blocks" in self.map
        weight = name.removesuffix("_scale_inv")
        return weight != name and weight in self.map


def _files_without_index(directory: Path) -> list[str]:
    """The weight files of a folder: one whole model, as transformers reads it, or else all.

    Raises:
        FileNotFoundError: one of numbered files is missing.
    """
    if (directory / WHOLE).is_file():  # others beside it have the same weights in another dtype
        return [WHOLE]
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    for name in names:
        numbered = re.fullmatch(r"(.*-)(\d+)(-of-(\d+)\.safetensors)", name)
        if numbered is None:
            continue
        start, number, rest, count = numbered.groups()
        wanted = [f"{start}{i + 1:0{len(number)}}{rest}" for i in range(int(count))]
        if absent := [one for one in wanted if one not in names]:
            raise FileNotFoundError(
                f"source: expected {int(count)} files as {name}, got {directory}, which has no "
                f"{', '.join(absent)}. Download it again"
            )
    return names


def expert_pieces(base: str) -> tuple[str, tuple[str, ...]]:
    """The experts module that a gpt-oss tensor belongs to, and the matrices in it."""
    owner, _, last = base.rpartition(".")
    return owner, ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)


def in_memory(name: str) -> tuple[str, str, str] | None:
    """Where transformers 5 has a matrix of an expert: the module, the tensor, and the expert."""
    owner, _, piece = name.rpartition(".")
    experts, _, expert = owner.rpartition(".")
    projection = _PROJECTION_OF.get(piece)
    if projection is None or not expert.isdecimal():
        return None
    if experts.endswith(_OWNER_OF[0]):
        experts = experts.removesuffix(_OWNER_OF[0]) + _OWNER_OF[1]
    return experts, projection, expert


def is_embedding(module: str) -> bool:
    """Whether a matrix is looked up, by the name of its layer or of the list that it is in."""
    last = next((p for p in reversed(module.split(".")) if not p.isdecimal()), "")
    return last == _SHARED or any(part in last for part in _EMBEDDINGS)


def has_nan(values: Tensor, infinity: bool) -> bool:
    """Whether a tensor has NaN in it, or also infinity."""
    if values.numel() == 0:
        return False
    codes = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    if values.dtype == E8M0_DTYPE:
        return bool(codes.amax() == 0xFF)
    if values.dtype in FP8_DTYPES:
        of_nan = 0x7F if values.dtype == _FP8 else 0x7C if infinity else 0x7D
        return bool((codes & 0x7F).amax() >= of_nan)
    if not values.is_floating_point():
        return False
    ends = torch.stack(values.aminmax())
    return not bool(ends.isfinite().all()) if infinity else bool(ends.isnan().any())


def _descriptions(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in DESCRIPTIONS:
            yield f"{at}{key}", value
        elif isinstance(value, dict):
            yield from _descriptions(value, f"{at}{key}.")


def check_model(directory: Path, config: Mapping[str, Any]) -> None:
    """Checks that the matrices of a model can be quantized.

    Raises:
        ValueError: they are transposed, or quantized by a method that is not read.
    """
    kind = config.get("model_type")
    if kind in _CONV1D:
        raise ValueError(
            f"model_type: expected a model of nn.Linear layers, got {kind!r}, whose matrices are "
            "transposed (Conv1D)"
        )
    for key, about in _descriptions(config):
        method = about.get("quant_method", about) if isinstance(about, dict) else about
        if method not in (None, {}, "fp8", "mxfp4"):
            raise ValueError(
                f"{key}.quant_method in config.json: expected none, 'fp8' or 'mxfp4', got "
                f"{method!r}. Start from the model before quantization"
            )
    if (directory / "hf_quant_config.json").is_file():
        raise ValueError(
            f"source: expected a model that ModelOpt has not quantized, got {directory}, which has "
            "hf_quant_config.json. Start from the model before quantization"
        )
