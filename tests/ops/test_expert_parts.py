"""The part of their module that a first call of the products with experts waits for."""

from __future__ import annotations

import pytest
import torch

from jitquant.ops.experts import EXPERTS, GROUPED_LINEAR


def _empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "experts", "cols", "dtype", "names"),
    [
        (0, 4, 64, None, ["few_rows"]),
        (1, 4, 64, None, ["few_rows"]),
        (32, 4, 64, torch.float16, ["few_rows"]),
        (32, 4, 256, torch.float32, ["few_rows_aligned", "few_rows"]),
        (33, 4, 64, None, ["grouped_some_rows"]),  # fewer than 9 per expert
        (33, 4, 512, None, ["grouped_some_rows_aligned", "grouped_some_rows"]),
        (256, 4, 48, None, ["grouped_some_rows"]),
        (256, 4, 64, None, ["grouped_some_rows_in_tiles", "grouped_some_rows"]),
        (256, 4, 64, torch.bfloat16, ["grouped_some_rows_in_tiles", "grouped_some_rows"]),
        (256, 4, 64, torch.float32, ["grouped_some_rows_in_tiles_to_fp32", "grouped_some_rows"]),
        (256, 4, 64, torch.float16, ["grouped_some_rows"]),
        (257, 4, 64, None, ["grouped_many_rows_in_tiles", "grouped_many_rows"]),
        (257, 4, 64, torch.float32, ["grouped_many_rows_in_tiles_to_fp32", "grouped_many_rows"]),
        (257, 4, 48, None, ["grouped_many_rows"]),
    ],
)
def test_rows_sorted_by_expert(
    rows: int, experts: int, cols: int, dtype: torch.dtype | None, names: list[str]
) -> None:
    x = _empty(rows, cols, dtype=torch.bfloat16)
    part = GROUPED_LINEAR.part({"x": x, "w_fp4": _empty(experts, 16, cols // 2), "dtype": dtype})
    assert part is not None
    assert [p.name for p in (part, *part.wider)] == [*(f"bf16_{n}" for n in names), "bf16"]


@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "hidden", "between", "name"),
    [
        (1, 8, 128, 64, 16, "fp16_unsorted_rows"),
        (1, 8, 128, 512, 256, "fp16_unsorted_rows_aligned"),
        (1, 8, 256, 7168, 2048, "fp16_unsorted_rows_aligned"),
        (8, 8, 128, 64, 16, "fp16_unsorted_rows"),
        (4, 8, 128, 4096, 1024, "fp16_unsorted_rows_aligned"),
        (5, 8, 128, 4096, 1024, "fp16_few_rows_aligned"),  # more weights than are read again
        (2, 8, 256, 7168, 2048, "fp16_few_rows_aligned"),
        (9, 8, 128, 64, 16, "fp16_few_rows"),
        (9, 8, 128, 256, 128, "fp16_few_rows"),
        (32, 64, 128, 64, 16, "fp16_few_rows"),
        (33, 8, 128, 64, 16, "fp16_some_rows"),
        (33, 8, 128, 512, 512, "fp16_some_rows_aligned"),
        (128, 8, 16, 64, 16, "fp16_some_rows"),
        (128, 8, 16, 64, 64, "fp16_rows_in_tiles"),
        (129, 8, 17, 64, 16, "fp16_more_rows"),  # more pairs than some devices sort at once
        (129, 8, 17, 64, 64, "fp16_rows_in_tiles"),
        (128, 8, 16, 1 << 19, 64, "fp16_more_rows"),  # more products than are kept at once
        (129, 8, 16, 64, 16, "fp16"),  # more than 64 rows per expert
        (129, 8, 16, 64, 64, "fp16_many_rows_in_tiles"),
        (1024, 8, 16, 1 << 19, 64, "fp16"),
    ],
)
def test_layers(rows: int, top_k: int, experts: int, hidden: int, between: int, name: str) -> None:
    part = EXPERTS.part(
        {
            "x": _empty(rows, hidden, dtype=torch.float16),
            "gate_up_fp4": _empty(experts, 2 * between, hidden // 2),
            "down_fp4": _empty(experts, hidden, between // 2),
            "topk_ids": _empty(rows, top_k, dtype=torch.int64),
        }
    )
    assert part is not None
    assert part.name == name


def test_codes_need_the_whole_module() -> None:
    weight = _empty(4, 16, 32)
    assert GROUPED_LINEAR.part({"x": _empty(4, 32), "w_fp4": weight, "dtype": None}) is None
