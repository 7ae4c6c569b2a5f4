"""torchao's ``quantize_`` with the configs of this project."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from nn.helpers import sqnr
from samples import randn
from torch import nn

import jitquant
from jitquant.nn import Float8BlockwiseLinear, NVFP4Linear
from jitquant.nn._rounding import quantized_weights

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
        (JitquantNVFP4Config(weight_only=True, compute="fp8"), NVFP4Linear),
        (JitquantFP8BlockConfig(), Float8BlockwiseLinear),
    ],
    ids=["nvfp4", "weight_only", "compute", "fp8_block"],
)
def test_quantize(config: Any, kind: Any) -> None:
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    model = nn.Sequential(linear, nn.Linear(96, 32, dtype=torch.bfloat16))
    how = {k: v for k, v in vars(config).items() if k != "rounding"}
    want = kind.from_linear(linear, **how)
    quantize_(model, config, filter_fn=lambda _, name: name == "0")
    assert type(model[0]) is kind
    assert type(model[1]) is nn.Linear
    x = randn(300, 64)
    assert torch.equal(model[0](x), want(x))


@pytest.mark.parametrize(
    ("config", "kind"),
    [(JitquantNVFP4Config(), NVFP4Linear), (JitquantFP8BlockConfig(), Float8BlockwiseLinear)],
    ids=["nvfp4", "fp8_block"],
)
def test_a_linear_alone(config: Any, kind: Any) -> None:
    """It has no parent to put another module in: it becomes the layer."""
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    want = kind.from_linear(copy.deepcopy(linear))
    quantize_(linear, config)
    assert type(linear) is kind
    assert linear.state_dict().keys() == want.state_dict().keys()
    x = randn(8, 64)
    assert torch.equal(linear(x), want(x))


def test_through_transformers(tmp_path: Path) -> None:
    """Its ``TorchAoConfig`` hands over one linear at a time."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    how = transformers.TorchAoConfig(JitquantNVFP4Config())
    made = auto.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=how)
    assert sum(isinstance(m, NVFP4Linear) for m in made.modules()) == 7  # all but lm_head
    want = auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    quantize_(want.model, JitquantNVFP4Config())
    tokens = torch.arange(12)[None]
    assert torch.equal(made(tokens).logits, want(tokens).logits)


@pytest.mark.parametrize("rounding", ["4over6", "mse"])
def test_rounding(rounding: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 96, dtype=torch.bfloat16))
    weight = model[0].weight.detach()
    (want,) = quantized_weights([weight], rounding)
    quantize_(model, JitquantNVFP4Config(rounding=rounding))
    assert torch.equal(model[0].weight.dequantize(), want.dequantize())
    nearest = jitquant.quantize_weight_nvfp4(weight).dequantize()
    assert sqnr(want.dequantize(), weight) > sqnr(nearest, weight)


def test_gptq_is_refused() -> None:
    with pytest.raises(
        ValueError, match="rounding: expected one of 'nearest', '4over6', 'mse', got 'gptq'"
    ):
        JitquantNVFP4Config(rounding="gptq")


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_scales_with_an_eps(granularity: Any) -> None:
    """Those of torchao's float8, also of tiny values and zeros."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale

    kinds = {"tensor": ScalingGranularity.TENSORWISE, "row": ScalingGranularity.AXISWISE}
    axis = -1 if granularity == "row" else None
    for x in (randn(40, 64), torch.zeros(3, 16), randn(5, 32) * 1e-14):
        q = jitquant.quantize_fp8(x, granularity=granularity, amax_eps=1e-12)
        scale = tensor_to_scale(
            x, torch.float8_e4m3fn, scaling_granularity=kinds[granularity], axiswise_dim=axis
        )
        assert torch.equal(q.scale_inv.reshape(scale.shape), 1 / scale)
        data = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(q.data.view(torch.uint8), data.view(torch.uint8))
