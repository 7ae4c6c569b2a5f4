"""LoRA of peft on top of `NVFP4Linear` and `Float8BlockwiseLinear`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from nn.helpers import sqnr
from samples import randn
from torch import nn

from jitquant.nn import NVFP4Linear, convert

BF16 = torch.bfloat16


def test_adapters_train(tmp_path: Path) -> None:
    """The loss falls, in adapters of the first layer too, behind a quantized one."""
    peft = pytest.importorskip("peft")
    from jitquant.integrations.peft import with_jitquant

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).to(BF16)
    convert(model, "nvfp4")
    before = copy.deepcopy(model)
    config = with_jitquant(peft.LoraConfig(target_modules=["0", "2"], r=4))
    tuned = peft.get_peft_model(model, config)
    adapters = {n: p for n, p in tuned.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in adapters)
    x, y = randn(64, 64), randn(64, 32, seed=1)
    assert torch.equal(tuned(x), before(x))  # the second factor begins as zero
    optimizer = torch.optim.AdamW(adapters.values(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = (tuned(x) - y).float().square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    first = next(p for n, p in adapters.items() if "0.lora_B" in n)
    assert first.count_nonzero() > 0
    with pytest.raises(NotImplementedError, match="not merged into a weight in NVFP4"):
        tuned.merge_and_unload()

    tuned.save_pretrained(tmp_path)
    again = with_jitquant(peft.PeftConfig.from_pretrained(tmp_path))
    back = peft.PeftModel.from_pretrained(before, tmp_path, config=again)
    assert isinstance(back.base_model.model[0].get_base_layer(), NVFP4Linear)
    assert torch.equal(back.eval()(x), tuned.eval()(x))


def test_merged_adapters_are_seen() -> None:
    """peft writes to weight.data, which FP8 layers do not see by themselves."""
    peft = pytest.importorskip("peft")
    from jitquant.integrations.peft import with_jitquant

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32)).to(BF16).eval()
    convert(model, "fp8_block")
    config = peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False)
    tuned = peft.get_peft_model(model, with_jitquant(config)).eval()
    x = randn(16, 64)
    with torch.no_grad():
        apart = tuned(x)
        with tuned.disable_adapter():
            before = tuned(x)
        tuned.merge_adapter()
        assert sqnr(tuned(x), apart) > 20 > sqnr(before, apart)
        tuned.unmerge_adapter()
        assert sqnr(tuned(x), apart) > 30  # the weight was rounded twice
        assert sqnr(tuned.merge_and_unload()(x), apart) > 20


def test_all_linear_is_refused() -> None:
    """It means nn.Linear to peft: adapters would go to the layers that are not quantized."""
    peft = pytest.importorskip("peft")
    from jitquant.integrations.peft import with_jitquant

    with pytest.raises(ValueError, match="target_modules: expected names such as"):
        with_jitquant(peft.LoraConfig(target_modules="all-linear"))
    with_jitquant(peft.LoraConfig(target_modules=".*_proj"))
    with_jitquant(peft.LoraConfig())
