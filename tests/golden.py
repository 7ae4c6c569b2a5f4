"""Bits that other libraries' own code gave (tests/data/README.md), and calls that match them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = load_file(Path(__file__).parent / "data" / "peer_vectors.safetensors")
E4M3 = torch.float8_e4m3fn


class Recipe(NamedTuple):
    """A call of an op, or of the reference of its name, after ``x``; what of a vector it gives."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fields: tuple[str, ...]


def _deepgemm(scale_format: str, field: str) -> Recipe:
    kwargs = {"dtype": E4M3, "scale_format": scale_format, "recipe": "deepgemm"}
    return Recipe("quantize_per_token_group", (128,), kwargs, ("q", field))


NVFP4 = {
    "nvfp4_te": Recipe("quantize_nvfp4", (), {}, ("x_fp4", "x_sf")),
    "nvfp4_te_rowscaled": Recipe("quantize_nvfp4", (), {"granularity": "row"}, ("x_fp4", "x_sf")),
    "nvfp4_te_16x16": Recipe("quantize_weight_nvfp4", (), {"block": "16x16"}, ("x_fp4", "x_sf")),
}
EIGHT_BITS = {
    "fp8_1x128_deepgemm_f32": _deepgemm("float32", "scale_inv"),
    "fp8_1x128_deepgemm_ue8m0": _deepgemm("ue8m0", "scale_inv"),
    "fp8_1x128_deepgemm_packed": _deepgemm("ue8m0_packed", "scale_inv_packed"),
    "fp8_128x128_deepgemm": Recipe(
        "quantize_block", (128, 128), {"dtype": E4M3, "recipe": "deepgemm"}, ("q", "scale_inv")
    ),
    "fp8_tensor_te": Recipe("quantize_fp8", (), {"dtype": E4M3}, ("q", "scale_inv")),
    "mxfp8_torchao_rceil": Recipe("quantize_mxfp8", (), {"dtype": E4M3}, ("q", "scale_e8m0")),
}
RECIPES = {**NVFP4, **EIGHT_BITS}
_VECTORS = sorted({tuple(key.split("/")[:2]) for key in GOLDEN if key.count("/") == 2})
CASES = [(case, recipe) for case, recipe in _VECTORS if recipe in RECIPES]


def assert_equals_golden(case: str, recipe: str, results: tuple[Tensor, ...]) -> None:
    """Of a call's results the first are the vector's, to the bit and in its order."""
    fields = RECIPES[recipe].fields
    wanted = [GOLDEN[f"{case}/{recipe}/{field}"] for field in fields]
    for got, want, field in zip(results[: len(fields)], wanted, fields, strict=True):
        got = (got.view(torch.uint8) if got.dtype.itemsize == 1 else got).cpu()
        assert (got.dtype, got.shape) == (want.dtype, want.shape), field
        if field == "x_fp4":
            # Where the scale of a block is zero its codes mean nothing.
            meaningful = (wanted[1] != 0).repeat_interleave(8, dim=1)
            got, want = got[meaningful], want[meaningful]
        assert torch.equal(got, want), field
