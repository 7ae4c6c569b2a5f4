"""Checkpoints quantized on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import randn

from jitquant.nn import quantize_checkpoint


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_the_gpu_writes_the_cpus_bytes(kind: str, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = tmp_path / "in"
    source.mkdir()
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    made = {f"model.layers.0.{n}.weight": randn(384, 256, seed=i) for i, n in enumerate(names)}
    made["model.layers.0.up.weight"] = randn(4096, 2304, seed=5)  # is read in three pieces
    how: Any = {}
    if kind == "gpt_oss":
        made["model.layers.0.mlp.experts.down_proj"] = randn(3, 256, 384)
        how = {"format": "mxfp4", "layout": "gpt-oss"}
    save_file(made, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": kind}))
    for device in ("cpu", "cuda"):
        quantize_checkpoint(source, tmp_path / device, device=device, **how)
    # What other threads read is ordered after what the caller's stream has to do.
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        torch.cuda._sleep(100_000_000)
        quantize_checkpoint(source, tmp_path / "stream", device="cuda", **how)
    one, *others = (tmp_path / name / "model.safetensors" for name in ("cpu", "cuda", "stream"))
    for other in others:
        assert one.read_bytes() == other.read_bytes()
