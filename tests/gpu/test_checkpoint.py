"""Checkpoints quantized on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import randn

from jitquant.nn import quantize_checkpoint


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_the_gpu_writes_the_cpus_bytes(kind: str, tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = tmp_path / "in"
    source.mkdir()
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    made = {f"model.layers.0.{n}.weight": randn(384, 256, seed=i) for i, n in enumerate(names)}
    how: Any = {}
    if kind == "gpt_oss":
        made["model.layers.0.mlp.experts.down_proj"] = randn(3, 256, 384)
        how = {"format": "mxfp4", "layout": "gpt-oss"}
    save_file(made, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": kind}))
    for device in ("cpu", "cuda"):
        quantize_checkpoint(source, tmp_path / device, device=device, **how)
    one, other = (tmp_path / device / "model.safetensors" for device in ("cpu", "cuda"))
    assert one.read_bytes() == other.read_bytes()
