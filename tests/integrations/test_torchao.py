"""torchao's ``quantize_`` with the configs of this project."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn
from torch import nn

from jitquant.nn import Float8BlockwiseLinear, NVFP4Linear

pytest.importorskip("torchao")
from torchao.quantization import quantize_

from jitquant.integrations.torchao import (
    JitquantFP8BlockConfig,
    JitquantNVFP4Config,
)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (JitquantNVFP4Config(granularity="row"), NVFP4Linear),
        (JitquantNVFP4Config(weight_only=True), NVFP4Linear),
        (JitquantFP8BlockConfig(), Float8BlockwiseLinear),
    ],
    ids=["nvfp4", "weight_only", "fp8_block"],
)
def test_quantize(config: Any, kind: Any) -> None:
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    model = nn.Sequential(linear, nn.Linear(96, 32, dtype=torch.bfloat16))
    how = {k: v for k, v in vars(config).items() if k in ("granularity", "recipe", "weight_only")}
    want = kind.from_linear(linear, **how)
    quantize_(model, config, filter_fn=lambda _, name: name == "0")
    assert type(model[0]) is kind
    assert type(model[1]) is nn.Linear
    x = randn(4, 64)
    assert torch.equal(model[0](x), want(x))
