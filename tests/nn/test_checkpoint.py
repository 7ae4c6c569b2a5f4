"""`quantize_checkpoint` on small folders, read by this project and by compressed-tensors."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import weakref
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import in_quick
from safetensors.torch import load_file, save_file
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.cli import main
from jitquant.formats import MXFP4_SCALINGS
from jitquant.nn import (
    _checkpoint_folder,
    _checkpoint_work,
    _reader,
    _rounding,
    _schemes,
    calibrate,
    convert,
    load_compressed_tensors,
    quantize_checkpoint,
    save_compressed_tensors,
)
from jitquant.nn._checkpoint_source import has_nan
from jitquant.nn._reader import Part, Reader
from jitquant.nn._safetensors import Writer, read_header
from jitquant.nn._schemes import SCHEMES

from .helpers import sqnr

BF16 = torch.bfloat16
HIDDEN, INNER, VOCABULARY = 64, 96, 32


def tensors(dtype: torch.dtype = BF16, times: int = 1) -> dict[str, Tensor]:
    hidden, inner = HIDDEN * times, INNER * times
    made = {"model.embed_tokens.weight": randn(VOCABULARY, hidden, dtype=dtype, seed=1)}
    for i in range(2):
        at = f"model.layers.{i}"
        shapes = {f"self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
        shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
        shapes |= {"mlp.down_proj": (hidden, inner)}
        for j, (name, shape) in enumerate(shapes.items()):
            weight = randn(*shape, dtype=dtype, seed=10 * i + j + 2) * (j + 1)
            made[f"{at}.{name}.weight"] = weight
        made[f"{at}.input_layernorm.weight"] = randn(hidden, dtype=dtype, seed=40 + i)
    made["lm_head.weight"] = randn(VOCABULARY, hidden, dtype=dtype, seed=50)
    return made


def folder(path: Path, made: dict[str, Tensor], shards: int = 3, **config: Any) -> Path:
    """Neighbors lie in different files, as at the end of a shard."""
    path.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    weight_map = {name: names[i % shards] for i, name in enumerate(made)}
    for file in names:
        save_file({n: t for n, t in made.items() if weight_map[n] == file}, path / file)
    if shards > 1:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (path / "model.safetensors.index.json").write_text(text)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (path / "tokenizer.json").write_text("{}")
    return path


def everything(path: Path) -> dict[str, Tensor]:
    return {n: t for file in sorted(path.glob("*.safetensors")) for n, t in load_file(file).items()}


def plain(path: Path) -> dict[str, Tensor]:
    """The weights as the compressed-tensors library decompresses them."""
    pytest.importorskip("compressed_tensors")
    import compressed_tensors.compressors as compressors
    import compressed_tensors.quantization as quantization

    config = json.loads((path / "config.json").read_text())["quantization_config"]
    (scheme,) = quantization.QuantizationConfig.model_validate(config).config_groups.values()
    kind = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    found = everything(path)
    made = {}
    for name in found:
        if name.endswith((".weight_scale", ".weight_global_scale", ".input_global_scale")):
            continue
        base = name.removesuffix("_packed").removesuffix(".weight")
        if f"{base}.weight_scale" in found:
            parts = {n.removeprefix(f"{base}."): t for n, t in found.items() if n.startswith(base)}
            made[f"{base}.weight"] = kind.decompress(parts, scheme)["weight"]
        else:
            made[name] = found[name]
    return made


AT_LEAST = {"nvfp4": 18, "nvfp4a16": 18, "fp8_block": 28, "fp8_row": 28, "int8": 35, "mxfp4": 14}
LEFT = ("embed_tokens", "layernorm", "lm_head")
NAMES = ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.gate", "mlp.up")


@pytest.mark.parametrize("format", AT_LEAST)
@pytest.mark.parametrize("shards", [1, 3])
def test_formats(format: Any, shards: int, tmp_path: Path) -> None:
    times = 4 if format == "fp8_block" else 1  # columns in whole blocks
    made = tensors(times=times)
    source = folder(tmp_path / "in", made, shards)
    calls = []
    done = quantize_checkpoint(
        source,
        tmp_path / "out",
        format=format,
        input_amax=20.0 if format == "nvfp4" else None,
        progress=lambda *call: calls.append(call),
    )
    out = tmp_path / "out"
    got = plain(out)
    assert got.keys() == made.keys()
    for name, want in made.items():
        if any(left in name for left in LEFT):
            assert torch.equal(got[name], want)
        else:
            assert AT_LEAST[format] < sqnr(got[name], want) < 60, name
    assert done.elements == sum(t.numel() for t in made.values())
    assert done.quantized == 2 * times**2 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    size = VOCABULARY * HIDDEN * times
    assert done.left == dict.fromkeys(["lm_head", "model.embed_tokens.weight"], size)
    assert f"model.embed_tokens.weight: {size:,} parameters: an embedding" in str(done)
    assert done.bytes_after == sum(t.nbytes for t in everything(out).values())
    assert calls[-1][:2] == (done.bytes_before, done.bytes_before)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out.partial").exists()
    sums = dict(
        reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines()
    )
    assert set(sums) == {p.name for p in out.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    if shards > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == done.bytes_after
        for file in out.glob("*.safetensors"):
            assert {n for n, f in index["weight_map"].items() if f == file.name} == set(
                load_file(file)
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nvfp4_is_the_ops_with_one_scale_for_fused_layers(dtype: Any, tmp_path: Path) -> None:
    made = tensors(dtype)
    quantize_checkpoint(folder(tmp_path / "in", made), tmp_path / "out")
    got = everything(tmp_path / "out")
    at = "model.layers.1.self_attn"
    names = [f"{at}.{n}_proj" for n in "qkv"]
    gsa = torch.stack([jitquant.amax_gsa(made[f"{n}.weight"]) for n in names]).amax(0)
    for name in names:
        want = jitquant.quantize_weight_nvfp4(made[f"{name}.weight"], gsa=gsa)
        assert torch.equal(got[f"{name}.weight_packed"], want.x_fp4_bytes)
        assert torch.equal(got[f"{name}.weight_scale"].float(), want.x_sf.float())
        assert torch.equal(got[f"{name}.weight_global_scale"], 1 / gsa)
    alone = jitquant.quantize_weight_nvfp4(made[f"{at}.o_proj.weight"])
    assert torch.equal(got[f"{at}.o_proj.weight_packed"], alone.x_fp4_bytes)


def test_rows_are_quantized_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = {"a.weight": randn(300, 128), "norm.weight": randn(4)}
    source = folder(tmp_path / "in", made, 1)
    for format in ("nvfp4a16", "fp8_block", "mxfp4"):
        quantize_checkpoint(source, tmp_path / f"{format}-1", format=format)
        with monkeypatch.context() as patch:
            patch.setattr("jitquant.nn._schemes._ON_CPU", 1)
            quantize_checkpoint(source, tmp_path / f"{format}-2", format=format)
        one, other = (everything(tmp_path / f"{format}-{i}") for i in (1, 2))
        assert all(torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one)


@pytest.mark.parametrize("format", SCHEMES)
def test_a_weight_is_only_read(format: str) -> None:
    scheme, weight = SCHEMES[format], randn(128, 128, dtype=torch.float32)
    before = weight.clone()
    scheme.quantize(weight, torch.tensor([0.01]) if scheme.has_gsa else None)
    assert torch.equal(weight, before)


def test_scalings_of_mxfp4(tmp_path: Path) -> None:
    weight = randn(40, 96, seed=5)
    weight[0, :32] *= 2.0**-127  # some scalings differ only here,
    weight[1, :32] = -0.0  # and some only here
    source = folder(tmp_path / "in", {"a.weight": weight}, 1)
    seen = set()
    for scaling in MXFP4_SCALINGS:
        how: Any = {"format": "mxfp4", "scaling": scaling}
        quantize_checkpoint(source, tmp_path / scaling, **how)
        got = everything(tmp_path / scaling)
        codes, scales = jitquant.quantize_mxfp4(weight, scaling=how["scaling"])
        assert torch.equal(got["a.weight_packed"], codes.view(torch.uint8)), scaling
        assert torch.equal(got["a.weight_scale"], scales.view(torch.uint8)), scaling
        seen.add((tmp_path / scaling / "model.safetensors").read_bytes())
    assert len(seen) == len(MXFP4_SCALINGS)
    quantize_checkpoint(source, tmp_path / "default", format="mxfp4")
    default, even = (tmp_path / name / "model.safetensors" for name in ("default", "even"))
    assert default.read_bytes() == even.read_bytes()


def test_scalings_are_for_mxfp4(tmp_path: Path) -> None:
    says = "scaling: expected 'even' with format 'int8', got 'floor'. Other values are for 'mxfp4'"
    with pytest.raises(ValueError, match=re.escape(says)):
        quantize_checkpoint(tmp_path, tmp_path / "out", format="int8", scaling="floor")
    how: Any = {"format": "mxfp4", "scaling": "up"}
    with pytest.raises(ValueError, match=r"scaling: expected one of 'floor', .* got 'up'"):
        quantize_checkpoint(tmp_path, tmp_path / "out", **how)


def test_int8_is_that_of_compressed_tensors() -> None:
    """Also halfway between two codes, where half of the amax is."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs, quantize

    weight = randn(256, 64)
    weight[:, 1] = weight.abs().amax(1) / 2
    got = SCHEMES["int8"].quantize(weight, None)
    how = QuantizationArgs(**SCHEMES["int8"].weights)
    zero = torch.zeros_like(got["weight_scale"], dtype=torch.int8)
    want = quantize(weight.float(), got["weight_scale"], zero, how, dtype=torch.int8)
    assert torch.equal(got["weight"], want)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8_block"])
def test_parts_are_quantized_side_by_side(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as one after another; PyTorch has its threads again, whatever happens."""
    scheme, weight = SCHEMES[format], randn(1024, 128, seed=3)
    gsa = torch.tensor([0.01]) if scheme.has_gsa else None
    want = scheme.quantize(weight, gsa)
    monkeypatch.setattr(_schemes, "_ON_CPU", 128 * 128)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        got = scheme.quantize(weight, gsa)
        assert torch.get_num_threads() == 3
        for name, tensor in want.items():
            assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))

        def broken(*_: Any) -> dict[str, Tensor]:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            replace(scheme, values=broken).quantize(weight, gsa)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_modelopt(tmp_path: Path) -> None:
    made = tensors()
    amaxes = {n.removesuffix(".weight"): 2.0 + i for i, n in enumerate(made)}
    source = folder(tmp_path / "in", made)
    quantize_checkpoint(
        source, tmp_path / "out", format="nvfp4", layout="modelopt", input_amax=amaxes
    )
    quantize_checkpoint(source, tmp_path / "other")
    got, other = everything(tmp_path / "out"), everything(tmp_path / "other")
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(got[f"{name}.weight"], other[f"{name}.weight_packed"])
    assert torch.equal(1 / got[f"{name}.weight_scale_2"], other[f"{name}.weight_global_scale"][0])
    assert got[f"{name}.input_scale"].item() == pytest.approx(amaxes[name] / 2688)
    about = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert about["quantization"]["quant_algo"] == "NVFP4"
    assert about["quantization"]["exclude_modules"] == ["lm_head", "model.embed_tokens"]


def test_fp8_blocks_as_deepseeks(tmp_path: Path) -> None:
    weight, left = randn(200, 256), randn(8, 256)
    q, r = jitquant.quantize_block(weight), jitquant.quantize_block(left)
    made = {
        "a.weight": q.data,
        "a.weight_scale_inv": q.scale_inv,
        "a.mlp.gate.weight": r.data,
        "a.mlp.gate.weight_scale_inv": r.scale_inv,
        "norm.weight": randn(4),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    source = folder(tmp_path / "in", made, 2, **config)
    done = quantize_checkpoint(source, tmp_path / "out", format="nvfp4a16")
    got = everything(tmp_path / "out")
    want = jitquant.quantize_weight_nvfp4(q.dequantize(BF16))
    assert torch.equal(got["a.weight_packed"], want.x_fp4_bytes)
    assert torch.equal(got["a.mlp.gate.weight"], r.dequantize(BF16))
    assert not any("scale_inv" in name for name in got)
    assert done.elements == 200 * 256 + 8 * 256 + 4
    quantize_checkpoint(source, tmp_path / "same", format="fp8_block")
    same = everything(tmp_path / "same")
    assert torch.equal(same["a.weight"].view(torch.uint8), q.data.view(torch.uint8))
    assert torch.equal(same["a.weight_scale"], q.scale_inv)


@pytest.mark.parametrize("name", ["a.experts.gate_up_proj", "a.embed_tokens.weight"])
def test_fp8_that_is_not_of_a_linear(name: str, tmp_path: Path) -> None:
    """Its scales would be lost."""
    codes, scales = torch.zeros(2, 128, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    if name.endswith(".weight"):
        codes, scales = codes[0], scales[0]
    made = {"q_proj.weight": randn(64, 64), name: codes, f"{name}_scale_inv": scales}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    source = folder(tmp_path / "in", made, 1, **config)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: expected bfloat16, .* FP8 in 128x"):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")
    assert not [*tmp_path.glob("out*")]


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("weight", torch.int8),
        ("weight", torch.uint8),
        ("weight", torch.float8_e5m2),
        ("weight_scale", torch.float8_e4m3fn),
        ("weight_packed", torch.int32),
        ("qweight", torch.int32),
    ],
)
def test_codes_that_nothing_describes(part: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = {"q_proj.weight": randn(64, 64), f"up.{part}": torch.zeros(64, 32).to(dtype)}
    source = folder(tmp_path / "in", made, 1)
    with pytest.raises(ValueError, match=rf"up\.{part}: expected .* got {dtype} of .* Start from"):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")
    assert not [*tmp_path.glob("out*")]


FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"text_config": {"quantization_config": {"quant_method": "awq"}}},
            "text_config.quanti.*awq",
        ),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "compression_config.quant_",
        ),
        ({"quantization_config": {"load_in_8bit": True}}, "got {'load_in_8bit': True}. Start from"),
        ({**FP8, "text_config": FP8, "compression_config": {}}, ""),
    ],
)
def test_where_a_model_is_described(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", tensors(), 1, **config)
    if says:
        with pytest.raises(ValueError, match=says):
            quantize_checkpoint(source, tmp_path / "out", device="cpu")
        assert not [*tmp_path.glob("out*")]
        return
    quantize_checkpoint(source, tmp_path / "out", device="cpu")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert described == {"model_type": "llama", "text_config": {}}


def test_a_model_of_modelopt(tmp_path: Path) -> None:
    """Older ones have nothing in config.json."""
    source = folder(tmp_path / "in", tensors(), 1)
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(
        ValueError, match=r"has hf_quant_config\.json\. Start from the model before"
    ):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")
    assert not [*tmp_path.glob("out*")]


def test_mxfp4_as_gpt_oss(tmp_path: Path) -> None:
    from jitquant.numerics.recipes import dequantize_mxfp4, quantize_mxfp4

    at = "model.layers.0.mlp.experts"
    made, values = {}, {}
    for name, shape in (("gate_up_proj", (2, 96, 64)), ("down_proj", (2, 64, 96))):
        codes, scales = quantize_mxfp4(randn(*shape, seed=len(name)))
        values[name] = dequantize_mxfp4(codes, scales)[0]
        blocks = codes.view(torch.uint8).view(*shape[:2], -1, 16)
        made[f"{at}.{name}_blocks"] = blocks
        made[f"{at}.{name}_scales"] = scales.view(torch.uint8)
        made[f"{at}.{name}_bias"] = randn(2, shape[1], seed=3)
    config = {"quantization_config": {"quant_method": "mxfp4"}, "model_type": "gpt_oss"}
    source = folder(tmp_path / "in", made, 2, **config)
    done = quantize_checkpoint(source, tmp_path / "out")
    got = everything(tmp_path / "out")
    fused = values["gate_up_proj"][1]
    gsa = jitquant.amax_gsa(fused)
    for i, name in enumerate(("gate_proj", "up_proj")):
        want = jitquant.quantize_weight_nvfp4(fused[i::2].contiguous(), gsa=gsa)
        assert torch.equal(got[f"{at}.1.{name}.weight_packed"], want.x_fp4_bytes)
        bias = made[f"{at}.gate_up_proj_bias"][1, i::2]
        assert torch.equal(got[f"{at}.1.{name}.bias"], bias)
    assert len(got) == 2 * 3 * 4
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["quantization_config"]["ignore"] == []
    assert done.quantized == 2 * (96 * 64 + 64 * 96)
    assert done.elements == done.quantized + 2 * (96 + 64)
    quantize_checkpoint(source, tmp_path / "same", format="mxfp4")
    down = plain(tmp_path / "same")[f"{at}.0.down_proj.weight"]
    assert torch.equal(down, values["down_proj"][0])


@pytest.mark.parametrize(
    ("blocks", "scales", "says"),
    [
        ((2, 96, 2, 16), None, "of 16 with none"),
        ((2, 96, 2, 8), (2, 96, 2), "of 8 with torch.uint8"),
        ((2, 96, 2, 16), (2, 96, 3), r"of 16 with torch.uint8 \(2, 96, 3\)"),
    ],
)
def test_mxfp4_that_is_broken(blocks: Any, scales: Any, says: str, tmp_path: Path) -> None:
    at, zeros = "model.layers.0.mlp.experts", partial(torch.zeros, dtype=torch.uint8)
    made = {f"{at}.gate_up_proj_blocks": zeros(blocks)}
    if scales is not None:
        made[f"{at}.gate_up_proj_scales"] = zeros(scales)
    config = {"quantization_config": {"quant_method": "mxfp4"}, "model_type": "gpt_oss"}
    source = folder(tmp_path / "in", made, 1, **config)
    with pytest.raises(
        ValueError, match=rf"up_proj_blocks: .* with {at}\.gate_.*_scales .* {says}"
    ):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("targets", ["all", "attention"])
def test_gpt_oss_in_bf16(targets: str, tmp_path: Path) -> None:
    """Its experts are (E, K, N), rows of gate and up in turns; they are written one matrix each."""
    at, experts = "model.layers.0", 3
    fused = randn(experts, HIDDEN, 2 * INNER, seed=1) * 2
    down, bias = randn(experts, INNER, HIDDEN, seed=2), randn(experts, 2 * INNER, seed=3)
    made = {
        f"{at}.mlp.experts.gate_up_proj": fused,
        f"{at}.mlp.experts.gate_up_proj_bias": bias,
        f"{at}.mlp.experts.down_proj": down,
        f"{at}.mlp.experts.down_proj_bias": randn(experts, HIDDEN, seed=4),
        f"{at}.self_attn.q_proj.weight": randn(HIDDEN, HIDDEN, seed=5),
        f"{at}.mlp.router.weight": randn(experts, HIDDEN, seed=6),
    }
    source = folder(tmp_path / "in", made, 2, model_type="gpt_oss")
    done = quantize_checkpoint(source, tmp_path / "out", targets=targets, device="cpu")
    found = everything(tmp_path / "out")
    if targets == "attention":
        assert all(torch.equal(found[n], t) for n, t in made.items() if "experts" in n)
        assert done.left[f"{at}.mlp.experts.2.up_proj"] == HIDDEN * INNER
        return
    assert done.left == {f"{at}.mlp.router": experts * HIDDEN}
    assert done.quantized == fused.numel() + down.numel() + HIDDEN**2
    whole = fused[1].t().contiguous()
    gsa = jitquant.amax_gsa(whole)
    parts = {"gate_proj": whole[::2], "up_proj": whole[1::2], "down_proj": down[1].t()}
    for name, weight in parts.items():
        base, weight = f"{at}.mlp.experts.1.{name}", weight.contiguous()
        own = jitquant.amax_gsa(weight) if name == "down_proj" else gsa
        q = jitquant.quantize_weight_nvfp4(weight, gsa=own)
        assert torch.equal(found[f"{base}.weight_packed"], q.x_fp4_bytes)
        assert torch.equal(found[f"{base}.weight_scale"].float(), q.x_sf.float())
    assert torch.equal(found[f"{at}.mlp.experts.1.up_proj.bias"], bias[1, 1::2])
    assert f"{at}.mlp.experts.gate_up_proj" not in found


def of_gpt_oss(path: Path, shards: int = 3) -> Path:
    made = {}
    for i in range(2):
        at = f"model.layers.{i}.mlp"
        made[f"{at}.experts.gate_up_proj"] = randn(3, HIDDEN, 2 * INNER, seed=i)
        made[f"{at}.experts.gate_up_proj_bias"] = randn(3, 2 * INNER, seed=i + 2)
        made[f"{at}.experts.down_proj"] = randn(3, INNER, HIDDEN, seed=i + 4)
        made[f"{at}.experts.down_proj_bias"] = randn(3, HIDDEN, seed=i + 6)
        made[f"{at}.router.weight"] = randn(3, HIDDEN, seed=i + 8)
    return folder(path, made, shards, model_type="gpt_oss")


def test_the_layout_of_gpt_oss_is_refused_before_the_work(tmp_path: Path) -> None:
    def refused(match: str, source: Path, **how: Any) -> None:
        with pytest.raises(ValueError, match=match):
            quantize_checkpoint(source, tmp_path / "out", **{**in_layout, **how})
        assert not (tmp_path / "out.partial").exists()

    in_layout: dict[str, Any] = {"format": "mxfp4", "layout": "gpt-oss"}
    source = of_gpt_oss(tmp_path / "in")
    refused("format: expected 'mxfp4' with layout 'gpt-oss', got 'int8'", source, format="int8")
    refused(
        r"targets and ignore: .* got model\.layers\.1\.mlp\.experts\.2\.up_proj left out: named in",
        source,
        ignore="*.1.*.2.up_proj",
    )
    refused("layers.0.mlp.experts.0.gate_proj left out: none of targets", source, targets="router")
    other = folder(tmp_path / "llama", tensors())
    refused(
        "layout: expected a model with experts as gpt-oss has them .* with 'gpt-oss', got 'llama' "
        "without them. Take layout 'compressed-tensors'",
        other,
    )
    made = {"model.layers.0.mlp.experts.down_proj": randn(2, 48, 64)}
    odd = folder(tmp_path / "odd", made, 1, model_type="gpt_oss")
    refused("0.down_proj left out: its 48 columns are not a multiple of 32", odd)


def test_scalings_in_the_layout_of_gpt_oss(tmp_path: Path) -> None:
    source = of_gpt_oss(tmp_path / "in", 1)
    how: dict[str, Any] = {"format": "mxfp4", "layout": "gpt-oss", "scaling": "ceil"}
    quantize_checkpoint(source, tmp_path / "out", **how)
    got, name = everything(tmp_path / "out"), "model.layers.1.mlp.experts.down_proj"
    weight = everything(source)[name].transpose(1, 2).contiguous()
    codes, scales = jitquant.quantize_mxfp4(weight, scaling="ceil")
    assert torch.equal(got[f"{name}_blocks"].flatten(-2), codes.view(torch.uint8))
    assert torch.equal(got[f"{name}_scales"], scales.view(torch.uint8))


def test_a_killed_call_in_the_layout_of_gpt_oss_goes_on(tmp_path: Path) -> None:
    source = of_gpt_oss(tmp_path / "in")
    how: dict[str, Any] = {"format": "mxfp4", "layout": "gpt-oss", "device": "cpu"}
    quantize_checkpoint(source, tmp_path / "whole", **how)
    last = "model-00003-of-00003.safetensors"

    def kill(read: int, total: int, file: str) -> None:
        if file == last:
            raise Killed

    with pytest.raises(Killed):
        quantize_checkpoint(source, tmp_path / "out", progress=kill, **how)
    seen: list[str] = []
    quantize_checkpoint(source, tmp_path / "out", progress=lambda *at: seen.append(at[2]), **how)
    assert set(seen) == {last}
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_an_expert_with_nan_in_the_layout_of_gpt_oss(tmp_path: Path) -> None:
    source = of_gpt_oss(tmp_path / "in", 1)
    made = load_file(source / "model.safetensors")
    made["model.layers.1.mlp.experts.down_proj"][2, 3, 4] = torch.nan
    save_file(made, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj in .* Get the file"):
        quantize_checkpoint(source, tmp_path / "out", format="mxfp4", layout="gpt-oss")


def test_a_pattern_to_ignore_that_means_nothing_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", tensors())
    ignore = ["lm_heda", "*.0.*", "embed_tokens"]
    done = quantize_checkpoint(source, tmp_path / "out", ignore=ignore, device="cpu")
    assert done.idle == {"lm_heda": "lm_head"}
    assert "  ignore: 'lm_heda' means nothing; 'lm_head' is near" in str(done).splitlines()


@pytest.mark.parametrize(
    "name", ["shared", "model.shared", "talker.codec_embedding.3", "layers.0.rel_pos_emb"]
)
def test_what_is_looked_up_is_not_quantized(name: str, tmp_path: Path) -> None:
    """T5's and BART's embedding, one of a list, and one of positions."""
    made = {f"{name}.weight": randn(64, 32), "layers.0.shared_expert.weight": randn(64, 32)}
    done = quantize_checkpoint(
        folder(tmp_path / "in", made, 1), tmp_path / "out", format="int8", device="cpu"
    )
    assert done.why == {f"{name}.weight": "an embedding"}
    assert torch.equal(everything(tmp_path / "out")[f"{name}.weight"], made[f"{name}.weight"])


def test_a_linear_of_an_attention_that_reads_its_weight(tmp_path: Path) -> None:
    """``nn.MultiheadAttention``, as `convert` leaves it; a linear of this name alone is one."""
    made = {
        "head.attention.in_proj_weight": randn(96, 32),
        "head.attention.out_proj.weight": randn(32, 32),
        "layers.0.out_proj.weight": randn(32, 32),
    }
    done = quantize_checkpoint(
        folder(tmp_path / "in", made, 1), tmp_path / "out", format="int8", device="cpu"
    )
    assert done.quantized == 32 * 32
    assert torch.equal(
        everything(tmp_path / "out")["head.attention.out_proj.weight"],
        made["head.attention.out_proj.weight"],
    )
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["quantization_config"]["ignore"] == ["head.attention.out_proj"]


@pytest.mark.parametrize(
    ("config", "more", "ignored"),
    [
        ({}, "", []),
        ({}, "embed_tokens", ["embed_tokens", "lm_head"]),  # Gemma's config.json says no more
        ({"model_type": "whisper", "tie_word_embeddings": True}, "", ["proj_out"]),
        ({"model_type": "bert"}, "wte", ["wte", "cls.predictions.decoder"]),
        ({"model_type": "albert"}, "wte", ["wte", "predictions.decoder"]),
        ({"model_type": "deberta-v2"}, "wte", ["wte", "cls.predictions.decoder"]),
        ({"model_type": "modernbert"}, "wte", ["wte", "decoder"]),
        ({"tie_word_embeddings": False}, "", []),
        ({"tie_word_embeddings": False}, "embed_out", ["embed_out", "lm_head"]),
        ({"tie_word_embeddings": False}, "text.lm_head", ["text.lm_head", "lm_head"]),
    ],
)
def test_heads_are_named_as_transformers_does(
    config: dict[str, Any], more: str, ignored: list[str], tmp_path: Path
) -> None:
    """A head that is the embedding is in no file, but the model has a linear there."""
    made = {"o_proj.weight": randn(32, 32)} | ({f"{more}.weight": randn(64, 32)} if more else {})
    source = folder(tmp_path / "in", made, 1, **config)
    quantize_checkpoint(source, tmp_path / "out", format="int8", device="cpu")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["quantization_config"]["ignore"] == ignored


def test_a_head_that_is_quantized_is_not_ignored(tmp_path: Path) -> None:
    made = {"lm_head.weight": randn(64, 32)}
    source = folder(tmp_path / "in", made, 1, tie_word_embeddings=True)
    quantize_checkpoint(source, tmp_path / "out", format="int8", ignore=(), device="cpu")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["quantization_config"]["ignore"] == []


def test_a_linear_named_like_an_embedding(tmp_path: Path) -> None:
    """It stays as it is, and is in ignore: else transformers reads it with a scale of nothing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 32, "hidden_size": 64, "intermediate_size": 64}
    config = transformers.ElectraConfig(
        vocab_size=32, num_hidden_layers=1, num_attention_heads=2, **sizes
    )
    torch.manual_seed(0)
    model = transformers.ElectraModel(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", format="fp8_row", device="cpu")
    read = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        got, want = read(tokens), model(tokens)
    assert sqnr(got.last_hidden_state, want.last_hidden_state) > 25


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_experts_of_another_layout_are_named(layout: Any, tmp_path: Path) -> None:
    """In ignore too, as vLLM looks for them there: one matrix of one expert each."""
    owner = "model.layers.0.feed_forward.experts"
    stacks = {f"{owner}.gate_up_proj": randn(2, 64, 64), f"{owner}.down_proj": randn(2, 32, 64)}
    plain = {"model.layers.0.self_attn.q_proj.weight": randn(64, 64)}
    source = folder(tmp_path / "in", {**stacks, **plain}, 1, model_type="llama4")
    how: dict[str, Any] = {"format": "nvfp4", "input_amax": 8, "device": "cpu"}
    done = quantize_checkpoint(source, tmp_path / "out", layout=layout, **how)
    assert done.left == {name: t.numel() for name, t in stacks.items()}
    assert "12,288 parameters: experts of llama4 in one tensor are not read" in str(done)
    for name, stack in stacks.items():
        assert torch.equal(everything(tmp_path / "out")[name], stack)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert sorted(described["quantization_config"]["ignore"]) == [
        f"{owner}.{e}.{p}" for e in range(2) for p in ("down_proj", "gate_proj", "up_proj")
    ]


@pytest.mark.parametrize(
    ("how", "layers", "why"),
    [
        ({}, "01", ""),
        ({"format": "fp8_block"}, "", "its 64 columns are not a multiple of 128"),
        ({"ignore": "*.0.*.1.down_proj"}, "1", "named in ignore"),
        ({"targets": ["re:.*0.mlp", "*.1.up_proj"]}, "0", "none of targets"),
    ],
)
def test_experts_of_a_layer_have_one_format(
    how: Any, layers: str, why: str, tmp_path: Path
) -> None:
    """As engines take them; another linear of the layer may have another."""
    shapes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    made = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": randn(*shape)
        for layer in "01"
        for expert in "01"
        for name, shape in shapes.items()
    }
    made["model.layers.0.mlp.shared_expert.up_proj.weight"] = randn(128, 128)
    done = quantize_checkpoint(folder(tmp_path / "in", made, 2), tmp_path / "out", **how)
    left = [name for name in made if name[13] not in layers and ".experts." in name]
    assert done.left.keys() == {name.removesuffix(".weight") for name in left}
    beside = f"an expert beside one that is left: {why}"
    assert {*done.why.values()} == ({why, beside} if left else set())
    got = everything(tmp_path / "out")
    assert all(torch.equal(got[name], made[name]) for name in left)


def test_this_project_reads_it(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.lm_head = nn.Linear(64, 96), nn.Linear(96, 32)

    model = Model().to(BF16)
    source = folder(tmp_path / "in", dict(model.state_dict()), 2)
    quantize_checkpoint(source, tmp_path / "out")
    back = Model().to(BF16)
    assert load_compressed_tensors(back, tmp_path / "out").replaced == ["up"]
    want = jitquant.quantize_weight_nvfp4(model.up.weight.detach())
    assert torch.equal(back.up.weight_packed, want.x_fp4_bytes)


class Killed(BaseException):
    pass


def test_a_killed_call_goes_on(tmp_path: Path) -> None:
    """What is finished is not written again, and the result is that of an undisturbed call."""
    source = folder(tmp_path / "in", tensors(), 4)
    quantize_checkpoint(source, tmp_path / "whole")
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    files = sorted(p.name for p in source.glob("*.safetensors"))

    def kill(read: int, total: int, file: str) -> None:
        if file == files[2]:
            raise Killed

    with pytest.raises(Killed):
        quantize_checkpoint(source, out, progress=kill)
    assert not out.exists()
    assert sorted(p.name for p in partial.iterdir()) == [*files[:2], "progress.json"]
    written = (partial / files[0]).stat().st_ino
    (partial / f"{files[2]}.tmp").write_bytes(b"half")  # as a killed process leaves it
    with pytest.raises(FileExistsError, match=r"other arguments .*--restart"):
        quantize_checkpoint(source, out, format="int8")
    seen = []
    quantize_checkpoint(source, out, progress=lambda *call: seen.append(call[2]))
    assert set(seen) == set(files[2:])
    assert (out / files[0]).stat().st_ino == written
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert not partial.exists()
    with pytest.raises(Killed):
        quantize_checkpoint(source, tmp_path / "o", progress=kill)
    quantize_checkpoint(source, tmp_path / "o", format="int8", restart=True)
    how: dict[str, Any] = {"format": "mxfp4", "scaling": "floor"}
    with pytest.raises(Killed):
        quantize_checkpoint(source, tmp_path / "m", progress=kill, **how)
    with pytest.raises(FileExistsError, match=r"other arguments .*--restart"):
        quantize_checkpoint(source, tmp_path / "m", format="mxfp4")
    quantize_checkpoint(source, tmp_path / "m", **how)


KILLED = """
import os, signal, sys
from jitquant.nn import quantize_checkpoint
source, folder = sys.argv[1:]

def run(last):
    count = 0
    def event(name, arguments):
        nonlocal count
        mine = name == "test.tensor" or any(str(a).startswith(out) for a in arguments)
        if mine and name in ("open", "os.rename", "os.remove", "os.mkdir", "test.tensor"):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
    out = f"{folder}/{last}"
    sys.addaudithook(event)
    quantize_checkpoint(source, out, progress=lambda *_: sys.audit("test.tensor"))

last, status = 0, None
while status != 0:  # as often as there are events, once each; it is a child of its own
    last += 1
    child = os.fork()
    if child == 0:
        run(last)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
print(last)
"""


@pytest.mark.slow
def test_kill_9_at_every_step(tmp_path: Path) -> None:
    """Each time a file is opened, renamed or removed, and after each tensor."""
    source = folder(tmp_path / "in", tensors(), 3)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    quantize_checkpoint(source, whole)
    killed.mkdir()
    command = [sys.executable, "-c", KILLED, str(source), str(killed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    last = int(done.stdout)
    assert last > 40
    want = {path.name: path.read_bytes() for path in whole.iterdir()}
    for i in range(1, last + 1):
        out, partial = killed / str(i), killed / f"{i}.partial"
        if i == last:  # it was not killed
            assert out.is_dir()
        else:
            assert not (out.exists() and partial.exists())
            quantize_checkpoint(source, out)
        assert not partial.exists()
        assert {path.name: path.read_bytes() for path in out.iterdir()} == want, i


def test_two_calls_at_a_time(tmp_path: Path) -> None:
    """The second would write to the files of the first."""
    source = folder(tmp_path / "in", tensors())
    refused = 0

    def again(*_: Any) -> None:
        nonlocal refused
        for restart in (False, True):
            with pytest.raises(FileExistsError, match=r"out\.partial: .* Wait until it ends"):
                quantize_checkpoint(source, tmp_path / "out", restart=restart)
            refused += 1

    quantize_checkpoint(source, tmp_path / "out", progress=again)
    assert refused
    quantize_checkpoint(source, tmp_path / "alone")
    for path in (tmp_path / "alone").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_where_the_result_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Links and "." mean the folders that they lead to, which are empty or not there yet."""
    source = folder(tmp_path / "in", tensors(), 1)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
        quantize_checkpoint(source, tmp_path / f"to-{name}")
        assert (tmp_path / name / "SHA256SUMS").is_file()
        assert (tmp_path / f"to-{name}").is_symlink()
    (tmp_path / "here").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "here")
        quantize_checkpoint(source, ".")
    assert (tmp_path / "here" / "SHA256SUMS").is_file()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "disk")
    with pytest.raises(FileExistsError, match=r"where a disk is mounted\. Give a folder in"):
        quantize_checkpoint(source, tmp_path / "disk")
    assert not [*tmp_path.glob("*.partial")]


def test_a_call_that_was_killed_at_the_very_end(tmp_path: Path) -> None:
    """With its name, but with what tells an unfinished call from a finished one."""
    source = folder(tmp_path / "in", tensors(), 1)
    state: list[bytes] = []

    def note(*_: Any) -> None:
        state[:] = [(tmp_path / "out.partial" / "progress.json").read_bytes()]

    quantize_checkpoint(source, tmp_path / "out", progress=note)
    with pytest.raises(FileExistsError, match="is there already"):
        quantize_checkpoint(source, tmp_path / "out")
    (tmp_path / "out" / "progress.json").write_bytes(state[0])
    with pytest.raises(FileExistsError, match="is there already"):
        quantize_checkpoint(source, tmp_path / "out", format="int8")
    (tmp_path / "out" / "progress.json").write_text("[]")  # of somebody else
    with pytest.raises(FileExistsError, match="is there already"):
        quantize_checkpoint(source, tmp_path / "out")
    (tmp_path / "out" / "progress.json").write_bytes(state[0])
    done = quantize_checkpoint(source, tmp_path / "out")
    assert done.path == tmp_path / "out"
    assert not (tmp_path / "out" / "progress.json").exists()
    assert not (tmp_path / "out.partial").exists()


def test_folders_in_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of sentence-transformers and chat templates are needed; hidden ones and others with
    weights are not."""
    source, out = folder(tmp_path / "in", tensors(), 1), tmp_path / "out"
    files = ("1_Pooling/config.json", "original/a/model.pth", "original/params.json", ".cache/x")
    for file in files:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(file)

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("jitquant.nn._checkpoint.end", kill)
        with pytest.raises(Killed):
            quantize_checkpoint(source, out)
    quantize_checkpoint(source, out, restart=True)
    assert [path.name for path in out.iterdir() if path.is_dir()] == ["1_Pooling"]
    assert (out / files[0]).read_text() == files[0]
    sums = (out / "SHA256SUMS").read_text()
    assert f"{hashlib.sha256(files[0].encode()).hexdigest()}  {files[0]}\n" in sums


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    def refused(match: str, error: Any = ValueError, **how: Any) -> None:
        with pytest.raises(error, match=match):
            quantize_checkpoint(tmp_path / "in", tmp_path / "out", **how)
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.partial").exists()

    refused("is not a directory", FileNotFoundError)
    source = folder(tmp_path / "in", tensors())
    refused(
        "format: expected one of 'nvfp4', 'nvfp4a16', 'fp8_block', 'fp8_row', 'int8',", format="fp4"
    )
    refused(r"input_amax: expected amaxes .* got None\. .* 'nvfp4a16'", format="nvfp4")
    refused("input_amax of model.layers.0", format="nvfp4", input_amax={})
    refused("format: expected 'nvfp4' with layout 'modelopt', got 'nvfp4a16'", layout="modelopt")
    refused("targets and ignore: expected to leave a matrix", ignore="*")
    refused("targets: expected names .*, got 'q_prj', which means none; 'q_proj'", targets="q_prj")
    refused("targets: expected .*, got 'nothing', which means none", targets=["mlp", "nothing"])
    refused("device: expected .*, got 'meta': no kernels are for 'meta'", device="meta")
    refused("device: expected 'cpu' or a GPU of this machine, got 'cuda:99'", device="cuda:99")
    refused("device: expected .*, got 'gpu'", device="gpu")
    refused("calibration: expected a file", FileNotFoundError, calibration=tmp_path / "none")
    shard = source / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    refused(r"expected \d+ bytes, got \d+: it is truncated")
    shard.write_bytes(whole + b"more")
    refused(r"expected \d+ bytes, got \d+: more follows its tensors")
    shard.write_bytes(whole[:4])
    refused("no header of safetensors")
    shard.unlink()
    refused("has no model-00002-of-00003.safetensors", FileNotFoundError)
    shard.write_bytes((source / "model-00001-of-00003.safetensors").read_bytes())
    refused("which model.safetensors.index.json says it has")
    shard.write_bytes(whole)
    config = source / "config.json"
    config.write_text('{"model_type": "gpt2"}')
    refused(r"model_type: expected a model of nn\.Linear layers, got 'gpt2', whose matrices")
    config.write_text('{"quantization_config": {"quant_method": "awq"}}')
    refused(r"quant_method in config\.json: expected none, 'fp8' or 'mxfp4', got 'awq'")
    config.unlink()
    refused("has no config.json", FileNotFoundError)
    config.write_text("{}")
    (tmp_path / "out").write_text("")
    with pytest.raises(FileExistsError, match="is there already"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    """Its files are read if none is missing, and the result has an index, which readers need."""
    source = folder(tmp_path / "in", tensors())
    index = source / "model.safetensors.index.json"
    quantize_checkpoint(source, tmp_path / "with", device="cpu")
    index.unlink()
    quantize_checkpoint(source, tmp_path / "without", device="cpu")
    for path in (tmp_path / "with").iterdir():
        assert (tmp_path / "without" / path.name).read_bytes() == path.read_bytes()
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected 3 files .* has no model-00002-"):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")
    save_file(tensors(torch.float16), source / "model.safetensors")  # comes before all others
    done = quantize_checkpoint(source, tmp_path / "whole", device="cpu")
    assert [*done.files] == ["model.safetensors"]
    assert done.elements == sum(t.numel() for t in tensors().values())
    assert not (tmp_path / "whole" / "model.safetensors.index.json").exists()


def test_names_that_quantized_weights_need(tmp_path: Path) -> None:
    made = {"up.weight": randn(64, 64), "up.weight_scale": randn(1), "down.weight": randn(64, 64)}
    source = folder(tmp_path / "in", made, 2)
    with pytest.raises(ValueError, match=r"got up.* which both give up\.weight_scale\. Leave"):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")
    assert not [*tmp_path.glob("out*")]
    quantize_checkpoint(source, tmp_path / "out", device="cpu", ignore="up")
    assert torch.equal(everything(tmp_path / "out")["up.weight_scale"], made["up.weight_scale"])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_whole_model_beside_an_index(shards: int, tmp_path: Path) -> None:
    """Left from a save in several files, which may be gone: transformers ignores it."""
    made = {"0.weight": randn(64, 64), "1.weight": randn(64)}
    source = folder(tmp_path / "in", {name: t + 1 for name, t in made.items()}, 2)
    index = source / "model.safetensors.index.json"
    for shard in [*source.glob("model-*")][shards:]:
        shard.unlink()
    folder(source, made, 1)
    out = tmp_path / "out"
    quantize_checkpoint(source, out, device="cpu")
    assert torch.equal(everything(out)["1.weight"], made["1.weight"])
    assert not (out / index.name).exists()
    shutil.copy(index, out)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.RMSNorm(64)).to(BF16)
    assert load_compressed_tensors(model, out).replaced == ["0"]


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name in ("a", "b"):
        folder(source, {"up.weight": randn(64, 64)}, 1)
        (source / "model.safetensors").rename(source / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"up\.weight: .* got it in a\.safetensors and b\."):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_files_of_json_that_are_broken(file: str, text: str, load: bool, tmp_path: Path) -> None:
    """Both functions that read a folder say the same."""
    about = {"quantization_config": {"quant_method": "compressed-tensors"}} if load else {}
    source = folder(tmp_path / "in", tensors(), **about)
    (source / file).write_text(text)

    def read() -> None:
        if load:
            load_compressed_tensors(nn.Sequential(nn.Linear(8, 8)), source)
        else:
            quantize_checkpoint(source, tmp_path / "out", device="cpu")

    if file == "config.json" and text[:2] not in ("{", "[]") and not load:
        read()  # nothing in it is needed
        return
    says = rf"{re.escape(file)}: expected (JSON|a JSON object|a weight_map|a file)|quant_method in"
    with pytest.raises(ValueError, match=says):
        read()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_descriptions_that_are_broken(file: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", tensors(), 1)
    key = "quantization_config" if file == "config.json" else "quantization"
    (source / file).write_text(json.dumps({key: ["nvfp4"]}))
    with pytest.raises(ValueError, match=rf"{key} in .*{file}: expected a JSON object, got \["):
        load_compressed_tensors(nn.Sequential(nn.Linear(8, 8)), source)


ENTRY = {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ([1], "expected a JSON object as header, got a list"),
        ({"a.weight": {}}, "a.weight in .*: expected dtype, shape and data_offsets, got"),
        ({"a.weight": 3}, "a.weight in .*: expected dtype, shape and data_offsets, got 3"),
        ({"a.weight": ENTRY | {"data_offsets": [-32, 0]}}, "offset of 0 or more, got .* at -32"),
        ({"a.weight": ENTRY | {"shape": [-4, -4]}}, r"got \(-4, -4\) at 0"),
    ],
)
def test_headers_that_are_broken(header: Any, says: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", tensors(), 1)
    (file,) = source.glob("*.safetensors")
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(ValueError, match=says):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", 3])
def test_files_are_beside_their_index(name: Any, tmp_path: Path) -> None:
    """Nothing is read or written elsewhere."""
    source = folder(tmp_path / "in", tensors())
    index = json.dumps({"weight_map": {"a.weight": name}})
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="expected names of files beside it"):
        quantize_checkpoint(source, tmp_path / "out", device="cpu")
    described = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (source / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="expected names of files beside it"):
        load_compressed_tensors(nn.Sequential(nn.Linear(8, 8)), source)


def test_other_dtypes_are_named(tmp_path: Path) -> None:
    made = {"a.weight": randn(64, 64), "b.weight": randn(64, 64).double()}
    done = quantize_checkpoint(folder(tmp_path / "in", made, 1), tmp_path / "out", device="cpu")
    assert done.why == {"b.weight": "it is torch.float64"}
    assert done.left == {"b.weight": 64 * 64}


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    made = tensors()
    made["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    source = folder(tmp_path / "in", made)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight in .* got NaN"):
        quantize_checkpoint(source, tmp_path / "out", format="int8")
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").glob("*.tmp"))
    # Roundings that take long look at all weights before they begin.
    with pytest.raises(ValueError, match="got NaN"):
        quantize_checkpoint(source, tmp_path / "slow", rounding="mse", restart=True)
    assert not list((tmp_path / "slow.partial").glob("*.safetensors"))


def test_copied_tensors_that_are_not_finite(tmp_path: Path) -> None:
    """Parameters; limits and masks, which are buffers, may be infinite."""

    def quantize(changed: dict[str, Tensor], **how: Any) -> Path:
        source = folder(tmp_path / "in", tensors() | changed, 1)
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        quantize_checkpoint(source, out, device="cpu", restart=True, **how)
        return out

    limits = {"input_max": torch.tensor(torch.inf), "mask": torch.full((2, 2), -torch.inf)}
    found = everything(quantize(limits))
    assert all(torch.equal(found[name], tensor) for name, tensor in limits.items())
    norm, embedding = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
    for name, value in (
        (norm, -torch.inf),
        (embedding, torch.nan),
        ("lm_head.weight", torch.inf),
        ("input_max", torch.nan),
        ("mask", torch.nan),
        ("b.bias", torch.inf),
    ):
        broken = {**tensors(), **limits}.get(name, torch.zeros(3)).clone()
        broken.view(-1)[-1] = value
        says = rf"{re.escape(name)} in .*model\.safetensors: expected finite .* Get the file again"
        with pytest.raises(ValueError, match=says):
            quantize({name: broken})
        with pytest.raises(ValueError, match=says):  # before what takes long
            quantize({name: broken}, rounding="mse", progress=_only("whether all"))
        found = everything(quantize({name: broken}, ignore=name.removesuffix(".weight")))
        assert torch.equal(found[name].nan_to_num(3), broken.nan_to_num(3))


def _only(start: str) -> Any:
    """Of all steps, those with a name that begins so."""

    def check(read: int, total: int, step: str) -> None:
        assert step.startswith(start)

    return check


def test_kept_formats_that_are_not_finite(tmp_path: Path) -> None:
    def refused(name: str, format: str, **how: Any) -> None:
        save_file(made, source / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{re.escape(name)} in .*: expected finite weights"):
            quantize_checkpoint(source, tmp_path / "out", format=format, restart=True, **how)

    q = jitquant.quantize_block(randn(128, 128))
    made = {"a.weight": q.data.clone(), "a.weight_scale_inv": q.scale_inv.clone()}
    source = folder(tmp_path / "in", made, 1)
    made["a.weight"].view(torch.uint8)[3, 4] = 0xFF
    refused("a.weight", "fp8_block")
    refused("a.weight", "int8")
    made["a.weight"] = q.data
    made["a.weight_scale_inv"][0, 0] = torch.inf
    refused("a.weight_scale_inv", "fp8_block")
    at = "model.layers.0.mlp.experts.down_proj"
    codes, scales = jitquant.quantize_mxfp4(randn(2, 64, 96))
    blocks = codes.view(torch.uint8).view(2, 64, -1, 16)
    made = {f"{at}_blocks": blocks, f"{at}_scales": scales.view(torch.uint8).clone()}
    source = folder(tmp_path / "gpt", made, 1, model_type="gpt_oss")
    made[f"{at}_scales"][1, 2, 0] = 0xFF
    refused(f"{at}_scales", "mxfp4")
    refused(f"{at}_scales", "mxfp4", layout="gpt-oss")
    refused(at, "int8")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_nan_of_eight_bits(dtype: Any) -> None:
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    for one, value in zip(codes, codes.float(), strict=True):
        assert has_nan(one, True) is not bool(value.isfinite())
        assert has_nan(one, False) is bool(value.isnan())
    assert not has_nan(codes[:0], True)
    assert not has_nan(torch.tensor(3), True)


def test_no_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", tensors())
    usage = type("Usage", (), {"free": 100})
    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint_folder.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(OSError, match="a disk with 100 bytes free and"):
            quantize_checkpoint(source, tmp_path / "out")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for method in ("write", "_write"):  # the latter in the writer's thread
        with monkeypatch.context() as patch:
            patch.setattr(Writer, method, full)
            with pytest.raises(OSError, match=r"no space left for .* the same call goes on"):
                quantize_checkpoint(source, tmp_path / "out")
        assert not list((tmp_path / "out.partial").glob("*.tmp"))
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("call", [0, 1, 2])
def test_no_space_when_a_file_is_closed(
    call: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which happens while the next one is written."""
    source, out = folder(tmp_path / "in", tensors()), tmp_path / "out"
    files = sorted(p.name for p in source.glob("*.safetensors"))
    calls: list[str] = []

    def close(writer: Writer) -> str:
        calls.append(writer.path.name)
        if len(calls) > call:
            raise OSError(28, "No space left on device")
        return whole(writer)

    whole = Writer.close
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "close", close)
        with pytest.raises(OSError, match=r"no space left for .* the same call goes on"):
            quantize_checkpoint(source, out)
    left = sorted(p.name for p in (tmp_path / "out.partial").iterdir())
    assert left == [*files[:call], "progress.json"]
    seen: list[str] = []
    quantize_checkpoint(source, out, progress=lambda *at: seen.append(at[2]))
    assert {*seen} == {*files[call:]}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What is read from now on: file, begin and number of bytes."""
    read: list[tuple[str, int, int]] = []

    def read_bytes(path: Path, begin: int, values: Tensor) -> None:
        whole(path, begin, values)
        read.append((path.name, begin, len(values)))

    whole = _reader.read_bytes
    monkeypatch.setattr(_reader, "read_bytes", read_bytes)
    return read


KINDS = ("bf16", "fp8", "gpt-oss", "mxfp4")
EACH = [(kind, format) for kind in KINDS for format in ("nvfp4a16", "mxfp4", "fp8_row")]


@pytest.mark.parametrize(("kind", "format"), [*EACH, ("gpt-oss", None), ("mxfp4", None)])
def test_everything_is_read_once(
    kind: str, format: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With None: in the layout of gpt-oss."""
    in_layout: Any = {"format": "mxfp4", "layout": "gpt-oss", "device": "cpu"}
    if kind == "gpt-oss":
        source = of_gpt_oss(tmp_path / "in", 1)
    elif kind == "mxfp4":
        of_gpt_oss(tmp_path / "bf16", 1)
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "in", **in_layout)
        source = tmp_path / "in"
    else:
        made = tensors(times=2)
        if kind == "fp8":
            q = jitquant.quantize_block(made["model.layers.0.mlp.up_proj.weight"])
            made["model.layers.0.mlp.up_proj.weight"] = q.data
            made["model.layers.0.mlp.up_proj.weight_scale_inv"] = q.scale_inv
        source = folder(tmp_path / "in", made, 1)
    how = in_layout if format is None else {"format": format}
    read = counted(monkeypatch)
    quantize_checkpoint(source, tmp_path / "out", **how)
    assert len(read) == len({*read})
    sizes = [entry.size for entry in read_header(source / "model.safetensors").values()]
    assert sum(size for _, _, size in read) == sum(sizes)


def test_the_next_tensors_are_read_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also those of the next file; and the last ones are written."""
    made = {f"layers.{i}.up_proj.weight": randn(64, 64, seed=i) for i in range(32)}
    source = folder(tmp_path / "in", made, 2)
    read, size = counted(monkeypatch), 2 * 64 * 64
    ahead: list[int] = []

    def progress(at: int, total: int, _: str) -> None:
        wanted = min(at + 2 * size, total)  # an eighth of a file is two of its tensors
        for _ in range(1000):
            if sum(count for _, _, count in read) >= wanted:
                break
            time.sleep(0.01)
        ahead.append(sum(count for _, _, count in read) - at)

    done = quantize_checkpoint(source, tmp_path / "out", progress=progress)
    assert ahead == [2 * size] * 30 + [size, 0]
    assert done.seconds.keys() == {"reading", "quantizing", "writing"}
    assert all(seconds > 0 for seconds in done.seconds.values())


def test_what_a_reader_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not more than it may, or one part; in any order; and what it did not expect."""
    made = {str(i): torch.full((size,), i) for i, size in enumerate([4, 4, 9, 1, 0, 1, 1])}
    save_file(made, tmp_path / "x")
    parts = {
        name: Part(tmp_path / "x", entry) for name, entry in read_header(tmp_path / "x").items()
    }
    monkeypatch.setattr(_reader, "_CHUNK", 24)
    with closing(Reader()) as reader:
        for order in ("0123456", "1032654", "6543210", "0"):
            reader.expect({parts[n]: torch.device("cpu") for n in "012346"}, 64)
            for name in order:
                held = [part.entry.size for part in reader._begun]
                assert sum(held) <= 64 or len(held) == 1
                assert torch.equal(reader.read(parts[name]), made[name])
        assert torch.equal(reader.read(parts["0"]), made["0"])  # what was read once is forgotten
        (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-8])
        with pytest.raises(OSError, match=r"x ended after \d+ bytes"):
            reader.read(parts[max(parts, key=lambda name: parts[name].entry.begin)])


def test_a_file_that_cannot_be_read_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = folder(tmp_path / "in", tensors())

    def broken(path: Path, begin: int, values: Tensor) -> None:
        if "00002-of" in path.name and begin > 1000:
            raise OSError(5, "Input/output error", str(path))
        whole(path, begin, values)

    whole = _reader.read_bytes
    with monkeypatch.context() as patch:
        patch.setattr(_reader, "read_bytes", broken)
        with pytest.raises(OSError, match=r"Input/output error: .*00002-of"):
            quantize_checkpoint(source, tmp_path / "out")
    assert not list((tmp_path / "out.partial").glob("*.tmp"))
    quantize_checkpoint(source, tmp_path / "out")


def test_the_reader_and_the_writer(tmp_path: Path) -> None:
    made = {
        "a": randn(3, 5),
        "empty": torch.empty(0, 4),
        "codes": torch.arange(6, dtype=torch.uint8).view(2, 3),
        "scalar": torch.tensor(2.5),
    }
    writer = Writer(tmp_path / "x", {n: (t.dtype, tuple(t.shape)) for n, t in made.items()})
    assert not (tmp_path / "x").exists()
    with pytest.raises(
        ValueError, match=r"name: expected .*, the next tensor of the layout, got codes"
    ):
        writer.write("codes", made["codes"])
    for name, tensor in made.items():
        for part in tensor.split(1) if name == "codes" else [tensor]:
            writer.write(name, part)
    digest = writer.close()
    assert hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest() == digest
    read, entries = load_file(tmp_path / "x"), read_header(tmp_path / "x")
    reader = Reader()
    for name, tensor in made.items():
        assert torch.equal(read[name], tensor)
        assert torch.equal(reader.read(Part(tmp_path / "x", entries[name])), tensor)
    reader.close()


def test_fused_layers_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their common scale needs all of them; what is small enough is kept, and gives the same."""
    at = "model.layers.0.self_attn"
    made = {f"{at}.{n}_proj.weight": randn(64, 64, seed=i) for i, n in enumerate("qkv")}
    source = folder(tmp_path / "in", made, 1)
    for kept, count in ((_checkpoint_work._KEPT, 3), (0, 5)):
        read: list[str] = []
        values = _checkpoint_work.Source.values

        def counted(*args: Any, read: list[str] = read, values: Any = values) -> Tensor:
            read.append(args[1].name)
            found: Tensor = values(*args)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(_checkpoint_work, "_KEPT", kept)
            patch.setattr(_checkpoint_work.Source, "values", counted)
            quantize_checkpoint(source, tmp_path / f"out{kept}")
        assert len(read) == count
    one, other = (tmp_path / f"out{kept}" for kept in (_checkpoint_work._KEPT, 0))
    assert (one / "SHA256SUMS").read_text() == (other / "SHA256SUMS").read_text()


@pytest.mark.parametrize("rounding", ["mse", "gptq"])
def test_samples_are_those_of_fused_layers(
    rounding: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rows that a gsa is searched with are not kept: a model may have thousands of matrices."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(6)))
    source = folder(tmp_path / "in", {f"{n}.weight": m.weight for n, m in model.named_children()})
    samples: list[weakref.ref[Tensor]] = []

    def sample(weight: Tensor, weights: int) -> Tensor:
        made = _rounding.sample(weight, weights)
        samples.append(weakref.ref(made))
        return made

    monkeypatch.setattr(_checkpoint_work, "sample", sample)
    alive: list[int] = []
    quantize_checkpoint(
        source,
        tmp_path / "out",
        rounding=rounding,
        calibration=calibrate(model, [randn(8, 64)]) if rounding == "gptq" else None,
        progress=lambda *_: alive.append(sum(ref() is not None for ref in samples)),
    )
    assert len(samples) == (6 if rounding == "mse" else 0)
    assert max(alive) <= 1


MEMORY = """
import resource, sys, torch
from jitquant.nn import quantize_checkpoint
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
quantize_checkpoint(sys.argv[1] + "/small", sys.argv[2] + "/small")
before = peak()
quantize_checkpoint(sys.argv[1] + "/large", sys.argv[2] + "/large")
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_one_matrix(tmp_path: Path) -> None:
    """Eight files, each of eight matrices: the peak over that of one matrix is less than a file."""
    size = 1024
    made = {f"layers.{i}.up_proj.weight": randn(size, size, seed=i) for i in range(64)}
    folder(tmp_path / "in" / "small", {"layers.0.up_proj.weight": randn(size, size)}, 1)
    source = folder(tmp_path / "in" / "large", made, 8)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    file = (source / "model-00001-of-00008.safetensors").stat().st_size
    assert int(done.stdout) < file, done.stdout


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", tensors())
    amaxes = tmp_path / "amax.json"
    amaxes.write_text(json.dumps({n.removesuffix(".weight"): 3.0 for n in tensors()}))

    def run(out: str, *how: str) -> tuple[int, str, str]:
        code = main(["quantize", str(source), str(tmp_path / out), *how])
        said = capsys.readouterr()
        return code, said.out, said.err

    fused = ("--fused-layers", "q_proj,o_proj", "--fused-layers", "gate_proj, up_proj")
    how = ("--format", "nvfp4", "--input-amax", str(amaxes), "--ignore", "re:.*layers.1", *fused)
    code, said, errors = run("a", *how)
    assert code == 0, errors
    assert "3 files" in said
    assert "parameters in nvfp4" in said
    assert "named in ignore" in said
    assert "model.layers.0.mlp.up_proj.input_global_scale" in everything(tmp_path / "a")
    assert "model.layers.1.mlp.up_proj.weight" in everything(tmp_path / "a")
    name = "model.layers.0.{}_proj.weight_global_scale"
    scales = {n: everything(tmp_path / "a")[name.format(n)].item() for n in NAMES}
    assert scales["self_attn.q"] == scales["self_attn.o"] != scales["self_attn.k"]
    assert scales["mlp.gate"] == scales["mlp.up"]
    code, said, errors = run("c", "--rounding", "mse", "--fp8-share", "0.5")
    assert code == 0, errors
    assert "unchanged" in said
    _, _, errors = run("d", "--rounding", "gptq", "--calibration", str(tmp_path / "none"))
    assert "none" in errors
    code, _, errors = run("b", "--format", "nvfp4")
    assert code == 1
    assert "nvfp4a16" in errors


def test_scaling_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = randn(40, 96)
    source = folder(tmp_path / "in", {"a.weight": weight}, 1)
    command = ["quantize", str(source), str(tmp_path / "out"), "--scaling"]
    assert main([*command, "floor"]) == 1
    assert "scaling: expected 'even' with format 'nvfp4a16'" in capsys.readouterr().err
    assert main([*command, "floor", "--format", "mxfp4"]) == 0
    _, scales = jitquant.quantize_mxfp4(weight, scaling="floor")
    assert torch.equal(everything(tmp_path / "out")["a.weight_scale"], scales.view(torch.uint8))


@pytest.mark.parametrize("text", ["{bad", "[1.0]", '{"a": "x"}', '{"a": null}'])
def test_amaxes_of_the_command_that_are_broken(text: str, tmp_path: Path) -> None:
    from jitquant.cli.quantize import _amaxes

    (tmp_path / "amax.json").write_text(text)
    with pytest.raises(ValueError, match=r"--input-amax: expected JSON such as .*amax\.json, got"):
        _amaxes(str(tmp_path / "amax.json"))


def test_fused_layers_of_the_command() -> None:
    from jitquant.cli.quantize import _families

    assert _families(None) == {}
    assert _families(["none"]) == {"fused_layers": ()}
    assert _families(["a, b", "c,d,e"]) == {"fused_layers": [["a", "b"], ["c", "d", "e"]]}
    for wrong in (["q_proj"], ["a,b", "none"], ["a,,b"]):
        with pytest.raises(ValueError, match="--fused-layers: expected two or more names"):
            _families(wrong)


class Attention(nn.Module):
    """Siblings with one gsa, layers of their own, and columns that are no whole blocks of FP8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"q_proj": (128, 48), "k_proj": (128, 320), "o_proj": (320, 256)}
        for name, size in (sizes | {"up": (256, 128), "down": (128, 128)}).items():
            setattr(self, name, nn.Linear(*size, bias=False, dtype=BF16))
        with torch.no_grad():
            self.k_proj.weight.mul_(3)
            self.down.weight[:, ::16] *= 40  # what four bits take badly

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.o_proj(self.k_proj(x) * self.q_proj(x).sum(-1, True))))
        return y

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "llama"}')
        return folder


def batches() -> list[Tensor]:
    return [randn(64, 128, seed=i) * torch.linspace(0.1, 3, 128, dtype=BF16) for i in range(3)]


def same_files(out: Path, model: nn.Module) -> None:
    """The bits of what a converted model saves."""
    save_compressed_tensors(model, out.with_name("saved"))
    got, want = (load_file(path / "model.safetensors") for path in (out, out.with_name("saved")))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    described = [
        json.loads((path / "config.json").read_text())["quantization_config"]
        for path in (out, out.with_name("saved"))
    ]
    for config in described:
        groups = config.pop("config_groups").values()
        config["groups"] = {g["format"]: g | {"targets": sorted(g["targets"])} for g in groups}
    assert described[0] == described[1]


@pytest.mark.parametrize("rounding", in_quick(2, ["4over6", "mse", "gptq"]))
def test_roundings_are_those_of_convert(rounding: Any, tmp_path: Path) -> None:
    """Bit for bit what the converted model saves; a layer that is not calibrated is as "mse"."""
    model, known = Attention(), None
    source = model.save(tmp_path / "source")
    if rounding == "gptq":
        known = calibrate(model, batches(), ignore="up")
        known.save(tmp_path / "known.safetensors")
    out = tmp_path / "out"
    file = None if known is None else tmp_path / "known.safetensors"
    done = quantize_checkpoint(source, out, rounding=rounding, calibration=file)
    assert done.uncalibrated == (["up"] if known else [])
    assert ("not in the calibration, rounded as mse: up" in str(done)) == (known is not None)
    convert(model, "nvfp4a16", rounding=rounding, calibration=known)
    same_files(out, model)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4a16"])
def test_a_share_stays_in_fp8(format: Any, calibrated: bool, tmp_path: Path) -> None:
    """As `convert` has it: the same matrices, and the files of both formats."""
    model = Attention()
    source, out = model.save(tmp_path / "source"), tmp_path / "out"
    known = calibrate(model, batches())
    how: dict[str, Any] = {"calibration": known} if calibrated else {}
    amaxes = {} if calibrated or format == "nvfp4a16" else {"input_amax": known.input_amax()}
    done = quantize_checkpoint(source, out, format=format, fp8_share=0.4, **how, **amaxes)
    assert len(done.in_fp8) == 2
    assert "o_proj" not in done.in_fp8  # of 320 columns
    assert done.bytes_after == sum(t.nbytes for t in everything(out).values())
    assert f"in FP8: {done.in_fp8[0]} and 1 more" in str(done)
    recipe = "nvfp4" if format == "nvfp4" else "nvfp4a16"
    found = convert(Attention(), recipe, fp8_share=0.4, **how)
    assert found.sqnr == pytest.approx(done.sqnr)
    rest = [n for n in done.sqnr if n not in done.in_fp8]
    static = format == "nvfp4"
    convert(model, recipe, targets=rest, calibration=known, static_input_scales=static)
    convert(model, "fp8_block")
    same_files(out, model)
    back = Attention()
    load_compressed_tensors(back, out)
    x = batches()[0]
    assert sqnr(back(x).detach(), model(x).detach()) > 25


def test_amaxes_beside_a_calibration(tmp_path: Path) -> None:
    """Those that are given come first."""
    model, out = Attention(), tmp_path / "out"
    source, known = model.save(tmp_path / "source"), calibrate(model, batches(), ignore="up")

    def quantize(amaxes: dict[str, float] | float) -> None:
        quantize_checkpoint(source, out, format="nvfp4", calibration=known, input_amax=amaxes)

    for amax in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(
            ValueError, match=rf"of up: .* number, got {amax}\. Measure it with rep"
        ):
            quantize({"up": amax})
    with pytest.raises(ValueError, match=r"number, got 0\.0\. Measure it with report"):
        quantize(0.0)
    with pytest.raises(ValueError, match=r"of up: .* got None\. Calibrate with .* input_amax"):
        quantize({"down": 3.0})
    quantize({"up": 3.0, "down": 4.0})
    scales = everything(out)
    for name, amax in {
        "up": 3.0,
        "down": 4.0,
        "o_proj": known.layers["o_proj"].amax.item(),
    }.items():
        assert scales[f"{name}.input_global_scale"].item() == pytest.approx(2688 / amax)


def test_amaxes_at_the_ends_of_float32(tmp_path: Path) -> None:
    """The smallest is that of `convert`, whose gsa has a reciprocal."""
    source = Attention().save(tmp_path / "source")
    for out, amax in (("tiny", 1e-36), ("huge", 3e38)):
        quantize_checkpoint(source, tmp_path / out, format="nvfp4", input_amax=amax, device="cpu")
        for name, tensor in everything(tmp_path / out).items():
            if name.endswith("global_scale"):
                assert tensor.isfinite(), name
                assert tensor > 0, name
    with pytest.raises(ValueError, match=r"expected a positive float32 number, got 1e\+39"):
        quantize_checkpoint(source, tmp_path / "out", format="nvfp4", input_amax=1e39)


@pytest.mark.slow
def test_a_killed_call_knows_what_stays_in_fp8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model is not read once more to choose."""
    source = folder(tmp_path / "in", tensors(times=4))
    how: dict[str, Any] = {"fp8_share": 0.3, "rounding": "mse"}
    want = quantize_checkpoint(source, tmp_path / "whole", **how)
    assert want.in_fp8

    def stop(read: int, total: int, file: str) -> None:
        if file.startswith("model-00002"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", progress=stop, **how)
    monkeypatch.setattr(_checkpoint_work.Work, "lowest", None)
    done = quantize_checkpoint(source, tmp_path / "out", **how)
    assert done.in_fp8 == want.in_fp8
    assert done.files == want.files


def test_accuracy_is_for_nvfp4(tmp_path: Path) -> None:
    def call(**how: Any) -> None:
        quantize_checkpoint(tmp_path, tmp_path / "out", **how)

    with pytest.raises(
        ValueError, match="rounding: expected 'nearest' with format 'int8', got 'mse'"
    ):
        call(format="int8", rounding="mse")
    with pytest.raises(
        ValueError, match=r"fp8_share: expected 0 with format 'fp8_block', got 0\.1"
    ):
        call(format="fp8_block", fp8_share=0.1)
    with pytest.raises(
        ValueError, match="rounding: expected one of 'nearest', '4over6', 'mse', 'gptq', got 'best'"
    ):
        call(rounding="best")
    with pytest.raises(
        ValueError, match=r"fp8_share: expected a number from 0 to 1, such as 0\.05, got 5"
    ):
        call(fp8_share=5)
    with pytest.raises(
        ValueError, match="calibration: expected one with rounding 'gptq', got None"
    ):
        call(rounding="gptq")
    with pytest.raises(ValueError, match=r"fp8_share: expected 0 with layout 'modelopt', got 0\.1"):
        call(format="nvfp4", layout="modelopt", fp8_share=0.1, input_amax=1.0)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(
        ValueError, match=r"calibration: expected a file that Calibration\.save wrote, got"
    ):
        call(calibration=tmp_path / "other.safetensors")
    model = Attention()
    source = model.save(tmp_path / "source")
    known = calibrate(nn.ModuleDict({"a": model})["a"], batches())
    known.layers = {f"model.{name}": found for name, found in known.layers.items()}
    with pytest.raises(
        ValueError, match="calibration: expected layers named as in the folder, such as down, got"
    ):
        quantize_checkpoint(source, tmp_path / "out", rounding="gptq", calibration=known)
    with pytest.raises(ValueError, match="calibration: expected layers named as in the folder"):
        quantize_checkpoint(source, tmp_path / "out", format="nvfp4", calibration=known)
    known.layers = {"up": calibrate(model, batches()).layers["down"]}
    with pytest.raises(
        ValueError, match="calibration: expected 256 elements in each input of up, got 128"
    ):
        quantize_checkpoint(source, tmp_path / "out", rounding="gptq", calibration=known)
