"""The part of their module that a first call for a matrix and its transpose waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitquant.ops.blockwise import QUANTIZE_BLOCK_BOTH, QUANTIZE_PER_TOKEN_GROUP_BOTH
from jitquant.ops.mxfp8 import QUANTIZE_BOTH
from jitquant.ops.schema import Op

PLAIN = {"scale_format": "float32", "recipe": "te", "fp8_min": None, "fp8_max": None}
GROUPS, BLOCKS = QUANTIZE_PER_TOKEN_GROUP_BOTH, QUANTIZE_BLOCK_BOTH


@pytest.mark.parametrize(
    ("op", "cols", "changed", "name"),
    [
        (GROUPS, 256, {}, "bf16_plain"),
        (GROUPS, 16, {"scale_format": "ue8m0"}, "bf16_plain"),
        (GROUPS, 256, {"scale_format": "ue8m0_packed"}, "bf16_any"),
        (GROUPS, 256, {"group_size": 64}, "bf16_any"),
        (GROUPS, 256, {"recipe": "vllm"}, "bf16_any"),
        (GROUPS, 256, {"recipe": "vllm", "scale_format": "ue8m0"}, "bf16_plain"),
        (GROUPS, 256, {"fp8_max": 224.0}, "bf16_any"),
        (GROUPS, 256, {"fp8_min": -224.0}, "bf16_any"),
        (GROUPS, 40, {}, "bf16"),
        (BLOCKS, 256, {}, "bf16_plain"),
        (BLOCKS, 256, {"block_rows": 64}, "bf16_any"),
        (BLOCKS, 40, {}, "bf16"),
        (QUANTIZE_BOTH, 256, {}, "bf16_mxfp8"),
        (QUANTIZE_BOTH, 40, {}, "bf16"),
    ],
)
def test_a_first_call_waits_for_its_scales(
    op: Op, cols: int, changed: dict[str, Any], name: str
) -> None:
    x = torch.empty(3, cols, dtype=torch.bfloat16)
    arguments = {op.names[0]: x, "group_size": 128, "block_rows": 128, **PLAIN, **changed}
    part = op.part(arguments)
    assert part is not None
    assert part.name == name
    assert [wider.name for wider in part.wider] == ["bf16"] * (name != "bf16")
