"""The part of their module that a first call of the products with experts waits for."""

from __future__ import annotations

import pytest
import torch

from jitquant.ops.experts import EXPERTS, GROUPED_LINEAR


def _empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "experts", "name"),
    [
        (0, 4, "bf16_few_rows"),
        (1, 4, "bf16_few_rows"),
        (32, 4, "bf16_few_rows"),
        (33, 4, "bf16_grouped_some_rows"),
        (256, 4, "bf16_grouped_some_rows"),
        (257, 4, "bf16_grouped_many_rows"),
    ],
)
def test_rows_sorted_by_expert(rows: int, experts: int, name: str) -> None:
    x = _empty(rows, 64, dtype=torch.bfloat16)
    part = GROUPED_LINEAR.part({"x": x, "w_fp4": _empty(experts, 16, 32)})
    assert part is not None
    assert part.name == name
    assert [wider.name for wider in part.wider] == ["bf16"]


@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "hidden", "name"),
    [
        (1, 8, 128, 64, "fp16_one_row"),
        (2, 8, 128, 64, "fp16_few_rows"),
        (32, 64, 128, 64, "fp16_few_rows"),
        (33, 8, 128, 64, "fp16_some_rows"),
        (128, 8, 16, 64, "fp16_some_rows"),
        (129, 8, 17, 64, "fp16_more_rows"),  # more pairs than some devices sort at once
        (128, 8, 16, 1 << 19, "fp16_more_rows"),  # more products than are kept at once
        (129, 8, 16, 64, "fp16"),  # more than 64 rows per expert
    ],
)
def test_layers(rows: int, top_k: int, experts: int, hidden: int, name: str) -> None:
    part = EXPERTS.part(
        {
            "x": _empty(rows, hidden, dtype=torch.float16),
            "gate_up_fp4": _empty(experts, 32, hidden // 2),
            "down_fp4": _empty(experts, hidden, 8),
            "topk_ids": _empty(rows, top_k, dtype=torch.int64),
        }
    )
    assert part is not None
    assert part.name == name


def test_codes_need_the_whole_module() -> None:
    assert GROUPED_LINEAR.part({"x": _empty(4, 32), "w_fp4": _empty(4, 16, 32)}) is None
