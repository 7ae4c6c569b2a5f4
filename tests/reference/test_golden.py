"""The reference against bits that other libraries' own code gave (tests/data/README.md)."""

from __future__ import annotations

import pytest
import torch
from golden import CASES, GOLDEN, NVFP4, RECIPES, assert_equals_golden

from jitquant import reference

CASES = [(case, recipe) for case, recipe in CASES if recipe in NVFP4]


def test_every_nvfp4_vector_is_a_case() -> None:
    recipes = {key.split("/")[1] for key in GOLDEN if key.count("/") == 2}
    nvfp4 = {recipe for recipe in recipes if recipe.startswith("nvfp4")}
    assert nvfp4 == {*NVFP4, "nvfp4_torchao_training"}
    assert len(CASES) == 28


@pytest.mark.parametrize(("case", "recipe"), CASES)
def test_vector(case: str, recipe: str) -> None:
    x = GOLDEN[f"{case}/x"]
    op, args, kwargs, _ = RECIPES[recipe]
    results = getattr(reference, op)(x, *args, **kwargs)
    assert_equals_golden(case, recipe, results)
    amax = x.float().abs().amax(dim=1 if recipe == "nvfp4_te_rowscaled" else (0, 1)).reshape(-1)
    assert torch.equal(results[2], amax / torch.tensor(2688.0))


def test_torchao_agrees_with_te() -> None:
    agrees = [v for k, v in GOLDEN.items() if k.endswith("nvfp4_torchao_training/agrees")]
    assert agrees
    assert all(bool(v) for v in agrees)


def test_all_zero_tensor() -> None:
    x = GOLDEN["all_zero_bf16/x"]
    for op, args, kwargs, _ in NVFP4.values():
        x_fp4, x_sf, gsa = getattr(reference, op)(x, *args, **kwargs)
        assert not x_fp4.view(torch.uint8).any()
        assert not x_sf.view(torch.uint8).any()
        assert not gsa.any()
        (back,) = reference.dequantize_nvfp4(x_fp4, x_sf, gsa)
        assert torch.equal(back, x)
