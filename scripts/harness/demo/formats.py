"""A trained language model in a format of few bits, and what that costs it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from language_model import LanguageModel, bits_per_byte, texts, windows, written
from torch import Tensor, nn
from torch.nn import functional

import jitquant
from jitquant.nn import Calibration, calibrate, convert

LENGTH = 256  # bytes of a window
CALIBRATED = 64  # windows of the text that the model was trained on

Cast = Callable[[Tensor], Tensor]
"""Quantizes a matrix along its last dimension, and dequantizes it in fp32."""


def _fp8(x: Tensor) -> Tensor:
    return jitquant.quantize_fp8(x, granularity="row").dequantize(torch.float32)


def _int8(x: Tensor) -> Tensor:
    values = x.float()
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return (values / scale).round() * scale


def _mxfp4(x: Tensor) -> Tensor:
    codes, scales = jitquant.quantize_mxfp4(x, scaling="even")
    return jitquant.dequantize_mxfp4(codes, scales, dtype=torch.float32)


@dataclass(frozen=True)
class Format:
    """A format of the linears of a model.

    Attributes:
        label: for people.
        bits: of an element of a weight, its share of the scales included; large matrices.
        inputs: bits of an element of the inputs.
        recipe, rounding: as for `jitquant.nn.convert`.
        cast: for formats without a layer: of weights and inputs, whose product is in fp32.
    """

    label: str
    bits: float
    inputs: int
    recipe: str | None = None
    rounding: str = "nearest"
    cast: Cast | None = None


_W4 = {"recipe": "nvfp4a16", "bits": 4.5, "inputs": 16}
_W4A4 = {"recipe": "nvfp4", "bits": 4.5, "inputs": 4}
FORMATS = {
    "bf16": Format("bf16", 16, 16),
    "fp8_block": Format("FP8, 128x128 blocks", 8, 8, "fp8_block"),
    "fp8_row": Format("FP8, rows", 8, 8, cast=_fp8),
    "int8": Format("INT8, rows", 8, 8, cast=_int8),
    "mxfp4a16": Format("MXFP4", 4.25, 16, "mxfp4"),
    "nvfp4a16": Format("NVFP4, nearest", **_W4),
    "nvfp4a16_4over6": Format("NVFP4, 4over6", rounding="4over6", **_W4),
    "nvfp4a16_mse": Format("NVFP4, mse", rounding="mse", **_W4),
    "nvfp4a16_gptq": Format("NVFP4, gptq", rounding="gptq", **_W4),
    "mxfp4": Format("MXFP4", 4.25, 4, cast=_mxfp4),
    "nvfp4": Format("NVFP4, nearest", **_W4A4),
    "nvfp4_4over6": Format("NVFP4, 4over6", rounding="4over6", **_W4A4),
    "nvfp4_mse": Format("NVFP4, mse", rounding="mse", **_W4A4),
    "nvfp4_gptq": Format("NVFP4, gptq", rounding="gptq", **_W4A4),
}
SHOWN = ("bf16", "fp8_block", "nvfp4", "nvfp4_gptq", "nvfp4a16_gptq")
"""Those of the demo; the others are of the table of the documents."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        format: its name.
        bits_per_byte: on text that was held out.
        size: bytes of all weights.
        text: that it writes.
        per_second: bytes of text on a GPU; None on the CPU.
    """

    format: str
    bits_per_byte: float
    size: int
    text: str
    per_second: float | None


class Dequantized(nn.Module):
    """A linear whose operands are quantized and dequantized, for formats without a layer."""

    def __init__(self, linear: nn.Linear, cast: Cast) -> None:
        super().__init__()
        self.cast = cast
        self.register_buffer("weight", cast(linear.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.cast(x), self.weight).to(x.dtype)


def converted(model: LanguageModel, name: str, found: Calibration) -> tuple[LanguageModel, int]:
    """A copy of a model in a format, and the bytes of its weights."""
    made, how = copy.deepcopy(model), FORMATS[name]
    linears = {n: m for n, m in made.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    elements = sum(m.weight.numel() for m in linears.values())
    rest = sum(p.nbytes for p in made.parameters()) - 2 * elements
    if how.recipe is not None:
        convert(made, how.recipe, rounding=how.rounding, calibration=found)
    elif how.cast is not None:
        for path, linear in linears.items():
            owner, _, attribute = path.rpartition(".")
            new = Dequantized(linear, how.cast)
            setattr(made.get_submodule(owner), attribute, new)
    return made, rest + int(elements * how.bits / 8)


class Measure:
    """What formats cost one model."""

    def __init__(self, model: LanguageModel, device: torch.device, count: int) -> None:
        """Calibrates.

        Args:
            model: in bf16.
            device: where it runs.
            count: windows of held-out text.
        """
        self.model, self.device = model.to(device), device
        train, held_out = texts()
        self.held_out = windows(held_out, count, LENGTH)
        batches = windows(train, CALIBRATED, LENGTH - 1).to(device).split(16)
        self.calibration = calibrate(self.model, batches)

    def row(self, name: str, prompt: str, count: int) -> Row:
        """Measures one format.

        Args:
            name: of a format.
            prompt: that the model continues.
            count: bytes that it writes.
        """
        made, size = converted(self.model, name, self.calibration)
        bits = bits_per_byte(made, self.held_out)
        text, speed = written(made, prompt, count) if count else "", None
        if self.device.type == "cuda" and count:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            written(made, prompt, count)
            speed = count / (time.perf_counter() - begin)
        return Row(name, bits, size, text, speed)
