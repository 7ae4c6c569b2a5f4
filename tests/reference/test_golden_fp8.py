"""FP8 and MXFP8 against bits that other libraries' own code gave (tests/data/README.md)."""

from __future__ import annotations

import pytest
import torch
from golden import CASES, EIGHT_BITS, GOLDEN, assert_equals_golden

from jitquant import reference
from jitquant.numerics.fp8 import scale_from_amax

CASES = [(case, recipe) for case, recipe in CASES if recipe in EIGHT_BITS]


def test_every_8_bit_vector_is_a_case() -> None:
    recipes = {key.split("/")[1] for key in GOLDEN if key.count("/") == 2}
    assert {r for r in recipes if "fp8" in r} == {*EIGHT_BITS, "fp8_tensor_torchao"}
    assert len(CASES) == 56


@pytest.mark.parametrize(("case", "recipe"), CASES)
def test_vector(case: str, recipe: str) -> None:
    op, args, kwargs, _ = EIGHT_BITS[recipe]
    results = getattr(reference, op)(GOLDEN[f"{case}/x"], *args, **kwargs)
    assert_equals_golden(case, recipe, results)


@pytest.mark.parametrize("case", sorted({case for case, _ in CASES}))
def test_tensor_scale(case: str) -> None:
    amax = GOLDEN[f"{case}/x"].float().abs().amax().reshape(1)
    scale = scale_from_amax(amax, 448.0)
    assert torch.equal(scale, GOLDEN[f"{case}/fp8_tensor_te/scale"])
    # torchao raises the amax to 1e-12; for what is larger it has the same bits.
    if amax >= 1e-12:
        assert torch.equal(scale, GOLDEN[f"{case}/fp8_tensor_torchao/scale"])
