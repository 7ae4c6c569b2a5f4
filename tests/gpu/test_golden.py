"""The kernels against bits that other libraries' own code gave (tests/data/README.md)."""

from __future__ import annotations

import pytest
from golden import CASES, GOLDEN, RECIPES, assert_equals_golden
from samples import OPS


@pytest.mark.parametrize(("case", "recipe"), CASES)
def test_vector(case: str, recipe: str) -> None:
    op, args, kwargs, _ = RECIPES[recipe]
    results = OPS[op].compiled().default(GOLDEN[f"{case}/x"].cuda(), *args, **kwargs)
    assert_equals_golden(case, recipe, results)
