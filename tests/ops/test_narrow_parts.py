"""The part of their module that first calls of recipes, squares and norms wait for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitquant.ops import recipes
from jitquant.ops.blockwise import QUANTIZE_BLOCK, RMSNORM_PER_TOKEN_GROUP
from jitquant.ops.nvfp4_fused import RMSNORM
from jitquant.ops.recipes import BOTH_AMAX, QUANTIZE, QUANTIZE_BOTH, ROTATED_AMAX
from jitquant.ops.schema import Op

X = torch.empty(16, 32, dtype=torch.bfloat16)
PLAIN = {"x": X, "rotate": "none", "select": "none", "rounding": "nearest", "cos": None}


@pytest.mark.parametrize("op", [QUANTIZE, QUANTIZE_BOTH])
@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "bf16_plain_unselected"),
        ({"rounding": "stochastic"}, "bf16_plain_unselected"),
        ({"rotate": "te"}, "bf16_te_unselected"),
        ({"select": "4over6_mse"}, "bf16_plain_selected"),
        ({"select": "static_6", "rounding": "stochastic"}, "bf16_plain_selected_stochastic"),
    ],
)
def test_a_first_call_waits_for_its_scales(op: Op, changed: dict[str, Any], name: str) -> None:
    part = op.part({**PLAIN, **changed})
    assert part is not None
    assert part.name == name
    assert [wider.name for wider in part.wider] == ["_".join(name.split("_")[:2]), "bf16"]


@pytest.mark.parametrize("op", [ROTATED_AMAX, BOTH_AMAX])
def test_an_amax_is_of_any_part_that_is_there(op: Op) -> None:
    part = op.part(PLAIN)
    assert part is not None
    assert [p.name for p in (part, *part.wider)] == [
        "bf16_plain_unselected",
        "bf16_plain_selected",
        "bf16_plain_selected_stochastic",
        "bf16_plain",
        "bf16",
    ]


def test_what_a_selection_needs_is_built_before_its_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(QUANTIZE, "load", lambda arguments: done.append("load"))
    monkeypatch.setattr(ROTATED_AMAX, "made", lambda arguments: (done.append("amax"),))
    for select in ("none", "4over6_mse", "no such one"):
        recipes.amax_for(ROTATED_AMAX, QUANTIZE, {**PLAIN, "select": select})
    assert done == ["amax", "load", "amax", "amax"]


def test_only_cuda_tensors_load_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(QUANTIZE, "compiled", lambda part: built.append(part.name))
    QUANTIZE.load(PLAIN)
    assert built == []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    QUANTIZE.load({**PLAIN, "select": "4over6_mse"})
    assert built == ["bf16_plain_selected"]


@pytest.mark.parametrize(
    ("scale_format", "recipe", "name"),
    [
        ("float32", "te", "bf16_multiplied"),
        ("ue8m0", "vllm", "bf16_multiplied"),
        ("float32", "vllm", "bf16_divided"),
    ],
)
def test_squares_by_whether_they_are_divided(scale_format: str, recipe: str, name: str) -> None:
    part = QUANTIZE_BLOCK.part({"w": X, "scale_format": scale_format, "recipe": recipe})
    assert part is not None
    assert [p.name for p in (part, *part.wider)] == [name, "bf16"]


@pytest.mark.parametrize(
    ("rows", "cols", "is_held"),
    [
        (3, 8192, True),
        (3, 16, True),
        (3, 8208, False),
        (3, 40, False),
        (0, 64, False),
        (3, 0, False),
    ],
)
def test_norms_by_whether_a_block_holds_a_row(rows: int, cols: int, is_held: bool) -> None:
    x = torch.empty(rows, cols, dtype=torch.bfloat16)
    given = {"x": x, "residual": x, "scale_format": "float32", "recipe": "te", "granularity": "row"}
    for op, others in (
        (RMSNORM.ops[0], ["bf16_residual_rows", "bf16_residual", "bf16"]),
        (RMSNORM_PER_TOKEN_GROUP, ["bf16_residual_multiplied", "bf16_residual", "bf16"]),
    ):
        part = op.part({**given, "inv_rms": None})
        assert part is not None
        assert [p.name for p in (part, *part.wider)] == [f"{others[0]}_held"] * is_held + others
