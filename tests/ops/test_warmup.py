"""`jitquant.warmup` of some dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitquant
from jitquant.ops import ALL_OPS
from jitquant.ops.parts import PARTS


def test_parts_of_the_dtypes_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("jitquant.loader.warmup", lambda *_, **given: asked.append(given))
    jitquant.warmup()
    jitquant.warmup("amax_gsa", dtypes=[torch.float16, torch.bfloat16], devices=[1])
    assert asked[0]["parts"] == {}
    assert asked[1]["devices"] == [1]
    parts = asked[1]["parts"]
    both = [(p.name, p.flags) for p in (PARTS[torch.float16], PARTS[torch.bfloat16])]
    # Other modules have parts of these, which would have some kernels twice.
    for name in ("amax_gsa", "fused_rmsnorm_quantize", "nvfp4_experts", "quantize_mxfp4"):
        assert parts[name] == both
    linear = {part for part, _ in parts["nvfp4_linear"]}
    assert linear >= {"bf16_16_rows", "bf16_many_rows_to_bf16", "fp16_64_rows_to_fp16"}
    assert "dequantize" not in parts  # what reads codes is built as a whole
    assert parts.keys() <= {op.module for op in ALL_OPS}


@pytest.mark.parametrize("dtype", [torch.int8, "bf16"])
def test_a_dtype_without_kernels(dtype: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"dtypes: expected one of torch\.bfloat16, torch\.float16, torch\.float32, got",
    ):
        jitquant.warmup(dtypes=[dtype])


def test_one_dtype_is_no_list() -> None:
    with pytest.raises(TypeError, match=r"Pass dtypes=\[torch.bfloat16\]"):
        jitquant.warmup(dtypes=torch.bfloat16)  # type: ignore[arg-type]
