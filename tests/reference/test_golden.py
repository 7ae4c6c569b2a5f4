"""The reference against bits that other libraries' own code gave (tests/data/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jitquant import reference

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "peer_vectors.safetensors")
RECIPES = {
    "nvfp4_te": lambda x: reference.quantize_nvfp4(x),
    "nvfp4_te_rowscaled": lambda x: reference.quantize_nvfp4(x, granularity="row"),
    "nvfp4_te_16x16": lambda x: reference.quantize_weight_nvfp4(x, block="16x16"),
}
CASES = sorted(
    (case, recipe)
    for case, recipe, field in (key.split("/") for key in GOLDEN if key.count("/") == 2)
    if recipe in RECIPES and field == "x_fp4"
)


def assert_equals_golden(case: str, recipe: str, x_fp4: Tensor, x_sf: Tensor) -> None:
    want_fp4, want_sf = (GOLDEN[f"{case}/{recipe}/{field}"] for field in ("x_fp4", "x_sf"))
    assert torch.equal(x_sf.view(torch.uint8), want_sf)
    meaningful = (want_sf != 0).repeat_interleave(8, dim=1)
    assert torch.equal(x_fp4.view(torch.uint8)[meaningful], want_fp4[meaningful])


def test_every_nvfp4_vector_is_a_case() -> None:
    recipes = {key.split("/")[1] for key in GOLDEN if key.count("/") == 2}
    nvfp4 = {recipe for recipe in recipes if recipe.startswith("nvfp4")}
    assert nvfp4 == {*RECIPES, "nvfp4_torchao_training"}
    assert len(CASES) == 28


@pytest.mark.parametrize(("case", "recipe"), CASES)
def test_vector(case: str, recipe: str) -> None:
    x = GOLDEN[f"{case}/x"]
    x_fp4, x_sf, gsa = RECIPES[recipe](x)
    assert_equals_golden(case, recipe, x_fp4, x_sf)
    amax = x.float().abs().amax(dim=1 if recipe == "nvfp4_te_rowscaled" else (0, 1)).reshape(-1)
    assert torch.equal(gsa, amax / torch.tensor(2688.0))


def test_torchao_agrees_with_te() -> None:
    agrees = [v for k, v in GOLDEN.items() if k.endswith("nvfp4_torchao_training/agrees")]
    assert agrees
    assert all(bool(v) for v in agrees)


def test_all_zero_tensor() -> None:
    x = GOLDEN["all_zero_bf16/x"]
    for quantize in RECIPES.values():
        x_fp4, x_sf, gsa = quantize(x)
        assert not x_fp4.view(torch.uint8).any()
        assert not x_sf.view(torch.uint8).any()
        assert not gsa.any()
        (back,) = reference.dequantize_nvfp4(x_fp4, x_sf, gsa)
        assert torch.equal(back, x)
