"""`report`, and files of converted models, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import randn
from torch import nn

from jitquant.nn import convert, load_compressed_tensors, report, save_compressed_tensors


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(300, 512), nn.GELU(), nn.Linear(512, 200, bias=False))
    return made.to(torch.bfloat16).eval().to(device)


def test_report_has_the_cpus_numbers() -> None:
    x = randn(70, 300)
    cpu, gpu = report(model("cpu"), x), report(model("cuda"), x.cuda())
    assert [layer.name for layer in gpu.layers] == ["0", "2"]
    for a, b in zip(cpu.layers, gpu.layers, strict=True):
        for name in cpu.formats:
            # The first layer has the same input to the bit, the second one's is rounded elsewhere.
            tolerance = 0.01 if a.name == "0" else 0.3
            assert b.output[name] == pytest.approx(a.output[name], abs=tolerance)
            assert b.weight[name] == pytest.approx(a.weight[name], abs=0.001)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
def test_files_written_and_read_on_a_gpu(recipe: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    written = nn.Sequential(nn.Linear(256, 384)).to("cuda", torch.bfloat16).eval()
    convert(written, recipe)
    save_compressed_tensors(written, tmp_path)
    read = nn.Sequential(nn.Linear(256, 384)).to("cuda", torch.bfloat16).eval()
    done = load_compressed_tensors(read, tmp_path)
    assert done.replaced == ["0"]
    assert all(t.is_cuda for t in read.state_dict().values())
    x = randn(16, 256).cuda()
    with torch.no_grad():
        got, want = read(x).double(), written(x).double()
    assert 10 * torch.log10(want.square().sum() / (got - want).square().sum()) > 40
