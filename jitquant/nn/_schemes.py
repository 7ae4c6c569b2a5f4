"""The formats that `quantize_checkpoint` writes: parts of a weight, their values, their scheme.

The schemes are those of compressed-tensors 0.20 by the names "NVFP4", "NVFP4A16", "FP8_BLOCK",
"FP8_DYNAMIC", "INT8" and "MXFP4A16".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitquant.formats import GROUP_EPS_MIN, MXFP4_BLOCK, NVFP4_BLOCK, Mxfp4Scaling, ceil_div
from jitquant.nn._compressed_tensors import (
    FP8_INPUTS,
    FP8_WEIGHTS,
    MXFP4_WEIGHTS,
    NVFP4_INPUTS,
    NVFP4_WEIGHTS,
    global_scale,
)
from jitquant.nn._rounding import WeightRounding, with_gsa
from jitquant.numerics.recipes import quantize_mxfp4
from jitquant.ops import quantize_block, quantize_fp8

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by name."""

_TILE = 128
_ON_CPU = 1 << 19  # elements that are quantized together: their fp32 temporaries stay in caches
_ON_GPU = 1 << 26
_INT8_MAX = 127.0

_CHANNELS = {"symmetric": True, "strategy": "channel", "dynamic": False}
_TOKENS = {"symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Scheme:
    """A format of files.

    Attributes:
        name: of compressed-tensors' format.
        weights, inputs: its arguments in config.json.
        columns: what K is a multiple of.
        layout: parts of a weight (N, K).
        values: the parts of some rows of a weight on any device, by its gsa where it has one, by
            the rounding, which is "nearest" elsewhere, and by the scaling of MXFP4.
        has_gsa: whether layers that engines fuse share a scale.
    """

    name: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    columns: int
    layout: Callable[[int, int], Layout]
    values: Callable[[Tensor, Tensor | None, WeightRounding, Mxfp4Scaling], dict[str, Tensor]]
    has_gsa: bool = False

    def quantize(
        self,
        weight: Tensor,
        gsa: Tensor | None,
        rounding: WeightRounding = "nearest",
        scaling: Mxfp4Scaling = "even",
    ) -> dict[str, Tensor]:
        """All parts of a weight, on its device, a few rows at a time.

        Args:
            weight: (N, K), contiguous, bfloat16, float16 or float32.
            gsa: fp32 (1,), where the format has one.
            rounding: where the format has a gsa.
            scaling: where the format is MXFP4.
        """
        elements = _ON_CPU if weight.device.type == "cpu" else _ON_GPU
        rows = max(_TILE, elements // weight.shape[1] // _TILE * _TILE)
        split = torch.split(weight, rows)
        if weight.device.type == "cpu":
            parts = _side_by_side(lambda part: self.values(part, gsa, rounding, scaling), split)
        else:
            parts = [self.values(part, gsa, rounding, scaling) for part in split]
        made = {name: torch.cat([p[name].view(torch.uint8) for p in parts]) for name in parts[0]}
        layout = self.layout(*weight.shape)
        made = {n: t.view(layout[n][0]).view(layout[n][1]) for n, t in made.items()}
        if gsa is not None:
            made["weight_global_scale"] = global_scale(gsa)
        return {name: made[name] for name in layout}


def _side_by_side(
    function: Callable[[Tensor], dict[str, Tensor]], parts: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """``function`` of each part, in as many threads as PyTorch has for one operation.

    Operations on a part are short: divided between threads each, they wait for each other longer
    than they compute.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(parts) == 1:
        return [function(part) for part in parts]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, parts))
    finally:
        torch.set_num_threads(threads)  # threads that begin later take what was set last


def _nvfp4_layout(n: int, k: int) -> Layout:
    return {
        "weight_packed": (torch.uint8, (n, k // 2)),
        "weight_scale": (torch.float8_e4m3fn, (n, k // NVFP4_BLOCK)),
        "weight_global_scale": (torch.float32, (1,)),
    }


def _nvfp4(
    weight: Tensor, gsa: Tensor | None, rounding: WeightRounding, *_: object
) -> dict[str, Tensor]:
    assert gsa is not None
    q = with_gsa(weight, rounding, gsa)
    return {"weight_packed": q.x_fp4_bytes, "weight_scale": q.x_sf}


def _mxfp4_layout(n: int, k: int) -> Layout:
    return {
        "weight_packed": (torch.uint8, (n, k // 2)),
        "weight_scale": (torch.uint8, (n, k // MXFP4_BLOCK)),
    }


def _mxfp4(weight: Tensor, _: object, __: object, scaling: Mxfp4Scaling) -> dict[str, Tensor]:
    codes, scales = quantize_mxfp4(weight, scaling=scaling)
    return {"weight_packed": codes.view(torch.uint8), "weight_scale": scales.view(torch.uint8)}


def _blocks_layout(n: int, k: int) -> Layout:
    return {
        "weight": (torch.float8_e4m3fn, (n, k)),
        "weight_scale": (torch.float32, (ceil_div(n, _TILE), ceil_div(k, _TILE))),
    }


def _blocks(weight: Tensor, *_: object) -> dict[str, Tensor]:
    q = quantize_block(weight, (_TILE, _TILE), eps=GROUP_EPS_MIN)
    return {"weight": q.data, "weight_scale": q.scale_inv}


def _rows(weight: Tensor, *_: object) -> dict[str, Tensor]:
    q = quantize_fp8(weight, granularity="row")
    return {"weight": q.data, "weight_scale": q.scale_inv.reshape(-1, 1)}


def _int8(weight: Tensor, *_: object) -> dict[str, Tensor]:
    # compressed-tensors divides by amax / 127; quantize_fp8 multiplies by 127 / amax, which rounds
    # some elements at half of the amax, of which bf16 has many, the other way.
    values = weight.float()
    scale = values.abs().amax(1, keepdim=True).div_(_INT8_MAX).clamp_(min=GROUP_EPS_MIN)
    codes = (values / scale).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def _channels_layout(dtype: torch.dtype) -> Callable[[int, int], Layout]:
    return lambda n, k: {"weight": (dtype, (n, k)), "weight_scale": (torch.float32, (n, 1))}


_FP8 = {"num_bits": 8, "type": "float"}
_INT = {"num_bits": 8, "type": "int"}
_NVFP4 = (NVFP4_BLOCK, _nvfp4_layout, _nvfp4, True)

SCHEMES: dict[str, Scheme] = {
    "nvfp4": Scheme("nvfp4-pack-quantized", NVFP4_WEIGHTS, NVFP4_INPUTS, *_NVFP4),
    "nvfp4a16": Scheme("nvfp4-pack-quantized", NVFP4_WEIGHTS, None, *_NVFP4),
    "fp8_block": Scheme("float-quantized", FP8_WEIGHTS, FP8_INPUTS, _TILE, _blocks_layout, _blocks),
    "fp8_row": Scheme(
        "float-quantized",
        {**_FP8, **_CHANNELS},
        {**_FP8, **_TOKENS},
        *(1, _channels_layout(torch.float8_e4m3fn), _rows),
    ),
    "int8": Scheme(
        "int-quantized",
        {**_INT, **_CHANNELS},
        {**_INT, **_TOKENS},
        *(1, _channels_layout(torch.int8), _int8),
    ),
    "mxfp4": Scheme(
        "mxfp4-pack-quantized", MXFP4_WEIGHTS, None, MXFP4_BLOCK, _mxfp4_layout, _mxfp4
    ),
}
"""By the name that ``quantize_checkpoint`` takes."""
