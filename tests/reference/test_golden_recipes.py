"""The references of recipes against the second set of peers' bits."""

from __future__ import annotations

import golden_recipes as golden
import pytest
import torch

from jitquant.numerics import recipes


def test_every_vector_is_a_case() -> None:
    assert {recipe for _, recipe in golden.CASES} <= set(golden.RECIPES)
    assert len(golden.CASES) == 434


@pytest.mark.parametrize(("case", "recipe"), golden.CASES)
def test_peer_vectors(case: str, recipe: str) -> None:
    golden.assert_equals_golden(case, recipe, lambda name: getattr(recipes, name))


@pytest.mark.parametrize("case", sorted({case for case, r in golden.CASES if "rht" in r}))
def test_rotated_values_are_transformer_engines(case: str) -> None:
    x = golden.GOLDEN[f"{case}/x"]
    v = torch.nn.functional.pad(x.T, (0, -x.shape[0] % 16)).to(torch.float32)
    y = recipes.hadamard(v, "te", None, x.dtype).to(x.dtype)
    want = golden.GOLDEN[f"{case}/nvfp4_te_rht_t/y"]
    if case == "randn_fp32":  # the order of an fp32 sum is the peer's own
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(y[:, : want.shape[1]], want)
