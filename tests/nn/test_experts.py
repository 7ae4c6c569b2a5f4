"""Experts whose weights are tensors of three dimensions, as transformers 5 has them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.nn import (
    Float8BlockwiseExperts,
    NVFP4Experts,
    convert,
    load_compressed_tensors,
    quantize_checkpoint,
    save_compressed_tensors,
)
from jitquant.nn.experts import refusal
from jitquant.numerics import recipes
from jitquant.ops import Op

from .helpers import sqnr

transformers = pytest.importorskip("transformers", minversion="5.0")
BF16 = torch.bfloat16
TOKENS = torch.arange(40).reshape(2, 20)


def mixture(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "Mixtral": {"num_local_experts": 3},
        "Qwen2Moe": {"num_experts": 3, "shared_expert_intermediate_size": 48},
        "Qwen3Moe": {"num_experts": 3},
        "GptOss": {"num_local_experts": 3, "head_dim": 16},
    }[kind]
    made = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **{"num_experts_per_tok": 2, **config, **more},
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(made)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts" in name:
                p.copy_(randn(*p.shape, seed=len(name)) * 0.1)
    return model.to(BF16).eval()


def routed(module: nn.Module, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    hidden = module.down_proj.shape[2 if module.is_transposed else 1]
    x = randn(11, hidden, seed=seed)
    scores = randn(11, 3, seed=seed + 1).float().softmax(-1)
    scores[:, 1] = 0  # an expert without tokens
    weights, index = scores.topk(2)
    return x, index, weights.to(BF16)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4a16", "fp8_block"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss"])
def test_a_model(kind: str, recipe: Any) -> None:
    model = mixture(kind, num_experts_per_tok=3)  # all of them: noise changes no choice
    parameters = sum(p.numel() for p in model.parameters())
    want = model(TOKENS).logits.detach()
    done = convert(model, recipe)
    experts = [m for m in model.modules() if isinstance(m, (NVFP4Experts, Float8BlockwiseExperts))]
    assert len(experts) == 2
    assert {f"model.layers.{i}.mlp.experts" for i in (0, 1)} <= set(done.replaced)
    assert not any(name.endswith("gate") for name in done.replaced)
    assert done.model_elements == parameters
    assert done.elements == parameters - sum(done.left.values())
    assert not any("experts.gate_up_proj" in n and "bias" not in n for n in done.left)
    assert done.elements > 0.85 * parameters
    with torch.no_grad():
        got = model(TOKENS).logits
    assert sqnr(got, want) > (18 if recipe == "fp8_block" else 7)


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_nvfp4_has_the_values_of_its_weights(kind: str) -> None:
    """Against the experts of transformers with the dequantized weights, and inputs that NVFP4 has
    exactly: what is left is the rounding of activations between the projections."""
    original = mixture(kind).model.layers[0].mlp.experts
    made, plain = NVFP4Experts(original), copy.deepcopy(original)
    for name in ("gate_up_proj", "down_proj"):
        values = made.weight(name).dequantize(torch.float32)
        source = plain.get_parameter(name)
        source.data = values.transpose(-2, -1).to(BF16) if made.is_transposed else values.to(BF16)
        own = original.get_parameter(name)
        own = own.transpose(-2, -1) if made.is_transposed else own
        each = jitquant.quantize_weight_nvfp4(own[1].detach().contiguous())
        assert torch.equal(made.get_buffer(f"{name}_packed")[1], each.x_fp4_bytes)
        assert torch.equal(made.get_buffer(f"{name}_scale")[1].float(), each.x_sf.float())
        assert torch.equal(made.get_buffer(f"{name}_gsa")[1], each.gsa[0])
    x, index, weights = routed(original)
    assert sqnr(made(x, index, weights), plain(x, index, weights).detach()) > 15
    assert torch.equal(pickle.loads(pickle.dumps(made))(x, index, weights), made(x, index, weights))
    assert made.half().get_buffer("down_proj_scale").dtype == torch.float8_e4m3fn
    assert made.get_buffer("down_proj_gsa").dtype == torch.float32


def test_many_rows_have_the_products_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mixture("Mixtral").model.layers[0].mlp.experts
    made = NVFP4Experts(original)
    few = made(*routed(original))
    monkeypatch.setattr("jitquant.nn.experts._DECODED", 0)
    assert sqnr(made(*routed(original)), few) > 30  # grouped_linear rounds once more


@pytest.mark.parametrize(("kind", "one_op"), [("Mixtral", True), ("GptOss", False)])
def test_few_tokens_as_they_are(kind: str, one_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one op if it has the gate and no bias, to the numbers of a product after the other."""
    original = mixture(kind).model.layers[0].mlp.experts
    made = NVFP4Experts(original, weight_only=True)
    x, index, weights = routed(original)
    index[3, 1] = 3  # an expert of another process
    ops, plain = [], Op.made

    def noted(op: Op, args: Any) -> Any:
        ops.append(op.name)
        return plain(op, args)

    monkeypatch.setattr(Op, "made", noted)
    got = made(x, index, weights)
    assert ("nvfp4_experts" in ops) == one_op
    assert ("nvfp4_grouped_linear" in ops) != one_op
    assert got.dtype == BF16
    ops.clear()
    with_gradient = made(x.clone().requires_grad_(), index, weights)
    assert "nvfp4_experts" not in ops
    assert sqnr(with_gradient.detach(), got) > 35


@pytest.mark.parametrize("make", [NVFP4Experts, Float8BlockwiseExperts])
def test_no_tokens(make: Any) -> None:
    original = mixture("Mixtral").model.layers[0].mlp.experts
    x, index, weights = (t[:0] for t in routed(original))
    assert make(original)(x, index, weights).shape == (0, 64)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4a16", "fp8_block"])
def test_ids_of_no_expert_are_ignored(recipe: str) -> None:
    original = mixture("Mixtral").model.layers[0].mlp.experts
    how = {"weight_only": recipe == "nvfp4a16"} if "nvfp4" in recipe else {}
    made = (NVFP4Experts if how else Float8BlockwiseExperts)(original, **how)
    x, index, weights = routed(original)
    index[3, 1], index[5, 0] = -1, 7
    without = weights.clone()
    without[3, 1] = without[5, 0] = 0
    for tokens in (x, x.clone().requires_grad_()):
        got = made(tokens, index, weights)
        assert torch.equal(got, made(tokens, index.clamp(0, 2), without))


def test_the_tokens_have_a_gradient() -> None:
    original = mixture("Mixtral").model.layers[0].mlp.experts
    x, index, weights = routed(original)
    grads = []
    for module in (original, NVFP4Experts(original), Float8BlockwiseExperts(original)):
        x = x.detach().requires_grad_()
        module(x, index, weights).float().square().sum().backward()
        grads.append(x.grad)
    assert sqnr(grads[1], grads[0]) > 10
    assert sqnr(grads[2], grads[0]) > 20


def test_fp8_takes_the_dtype_of_its_weights() -> None:
    made = Float8BlockwiseExperts(mixture("Mixtral").model.layers[0].mlp.experts)
    x, index, weights = routed(made)
    says = r"hidden_states: expected torch\.bfloat16, as the layer has, got torch\.float32"
    with pytest.raises(TypeError, match=says):
        made(x.float(), index, weights)
    with torch.autocast("cpu"):
        made(x.float(), index, weights)
    with pytest.raises(ValueError, match=r"hidden_states: expected shape \(\.\.\., 64\)"):
        made(x[:, :32], index, weights)
    with pytest.raises(ValueError, match=r"top_k_index and top_k_weights: expected shape \(T, k\)"):
        made(x[1:], index, weights)


def test_fp8_trains_and_sees_new_weights() -> None:
    original = mixture("Mixtral").model.layers[0].mlp.experts
    plain = copy.deepcopy(original)
    made = Float8BlockwiseExperts(original)
    assert made.gate_up_proj is original.gate_up_proj
    assert list(made.state_dict()) == list(original.state_dict())
    x, index, weights = routed(original)
    for module in (made, plain):
        module(x, index, weights).float().square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        assert sqnr(made.get_parameter(name).grad, plain.get_parameter(name).grad) > 20
    before = made(x, index, weights)
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    assert not torch.equal(made(x, index, weights), before)


@pytest.mark.parametrize(
    "change",
    [
        # As FSDP puts a gathered weight in: the same object, in the same place.
        lambda m: (m.down_proj.data.mul_(2), setattr(m, "down_proj", m.down_proj)),
        lambda m: (m.state_dict(), m.down_proj.data.mul_(2)),
        lambda m: (m.down_proj.data.mul_(2), m.train()),
    ],
    ids=["set", "saved", "train"],
)
def test_fp8_sees_weights_that_no_version_tells_of(change: Callable[[nn.Module], object]) -> None:
    made = Float8BlockwiseExperts(mixture("Mixtral").model.layers[0].mlp.experts)
    x, index, weights = routed(made)
    with torch.no_grad():
        before = made(x, index, weights)
        change(made)
        assert torch.equal(made(x, index, weights), 2 * before)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Mixtral", ("block_sparse_moe", "w1", "w3", "w2")),
        ("Qwen2Moe", ("mlp", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_files(kind: str, names: tuple[str, ...], recipe: Any, tmp_path: Path) -> None:
    """Under the names that the checkpoints of these models have, one matrix an expert."""
    model, exact = mixture(kind), mixture(kind)
    done = convert(model, recipe)
    save_compressed_tensors(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    owner, gate, up, down = names
    experts = exact.model.layers[1].mlp.experts
    fused, size = experts.gate_up_proj[2], experts.gate_up_proj.shape[1] // 2
    for name, want in ((gate, fused[:size]), (up, fused[size:]), (down, experts.down_proj[2])):
        base = f"model.layers.1.{owner}.experts.2.{name}"
        if recipe == "nvfp4":
            q = jitquant.NVFP4Tensor(
                tensors[f"{base}.weight_packed"].view(torch.float4_e2m1fn_x2),
                tensors[f"{base}.weight_scale"],
                1 / tensors[f"{base}.weight_global_scale"],
            )
            assert tensors[f"{base}.weight_global_scale"].shape == (1,)
        else:
            q = jitquant.quantize_block(want.detach().contiguous())
            assert torch.equal(tensors[f"{base}.weight"].float(), q.data.float())
            assert torch.equal(tensors[f"{base}.weight_scale"], q.scale_inv)
        assert sqnr(q.dequantize(torch.float32), want.detach()) > 15
    if recipe == "nvfp4":
        base = f"model.layers.0.{owner}.experts.0"
        scales = [tensors[f"{base}.{name}.weight_global_scale"] for name in (gate, up)]
        assert torch.equal(*scales)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{i}.{owner}.gate" for i in (0, 1)]
    shared = [f"model.layers.{i}.mlp.shared_expert_gate" for i in (0, 1)]
    assert sorted(config["ignore"]) == sorted(
        ["lm_head", *routers, *(shared if kind == "Qwen2Moe" else [])]
    )
    assert f"{routers[0]}.weight" in tensors

    with torch.device("meta"):
        back = type(model)(model.config).to(BF16).eval()
    read = load_compressed_tensors(back, tmp_path)
    assert read.replaced == done.replaced
    assert read.elements == done.elements
    with torch.no_grad():
        assert sqnr(back(TOKENS).logits, model(TOKENS).logits) > 50


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4a16", "fp8_block"])
def test_files_of_gpt_oss(recipe: Any, tmp_path: Path) -> None:
    """Its rows of gate and up come in turns, and it has biases; a matrix an expert in the files."""
    model, exact = mixture("GptOss"), mixture("GptOss")
    for of in (model, exact):
        for n, p in of.named_parameters():
            if n.endswith("_bias"):
                p.data = randn(*p.shape, seed=len(n))
    done = convert(model, recipe)
    model.save_pretrained(tmp_path / "a") if recipe != "fp8_block" else None
    save_compressed_tensors(model, tmp_path / "b")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    if recipe != "fp8_block":
        assert tensors.keys() == load_file(tmp_path / "a" / "model.safetensors").keys()
    experts = exact.model.layers[1].mlp.experts
    fused, down = experts.gate_up_proj[2].detach().t(), experts.down_proj[2].detach().t()
    bias = experts.gate_up_proj_bias[2].detach()
    parts = {
        "gate_proj": (fused[::2], bias[::2]),
        "up_proj": (fused[1::2], bias[1::2]),
        "down_proj": (down, experts.down_proj_bias[2].detach()),
    }
    gsa = jitquant.amax_gsa(fused.contiguous())
    for name, (weight, its_bias) in parts.items():
        base = f"model.layers.1.mlp.experts.2.{name}"
        assert torch.equal(tensors[f"{base}.bias"], its_bias)
        if recipe == "fp8_block":
            blocks = jitquant.quantize_block(weight.contiguous())
            assert torch.equal(tensors[f"{base}.weight"].float(), blocks.data.float())
            assert torch.equal(tensors[f"{base}.weight_scale"], blocks.scale_inv)
            continue
        shared = None if name == "down_proj" else gsa
        q = jitquant.quantize_weight_nvfp4(weight.contiguous(), gsa=shared)
        assert torch.equal(tensors[f"{base}.weight_packed"], q.x_fp4_bytes)
        assert torch.equal(tensors[f"{base}.weight_scale"].float(), q.x_sf.float())
        assert torch.equal(tensors[f"{base}.weight_global_scale"], 1 / q.gsa)
    assert not any("gate_up_proj" in name for name in tensors)

    with torch.device("meta"):
        back = type(model)(model.config).to(BF16).eval()
    read = load_compressed_tensors(back, tmp_path / "b")
    assert (read.replaced, read.elements) == (done.replaced, done.elements)
    with torch.no_grad():
        assert sqnr(back(TOKENS).logits, model(TOKENS).logits) > 50
    del tensors["model.layers.1.mlp.experts.2.up_proj.bias"]
    save_file(tensors, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.mlp\.experts\.2\.up_proj\.bias"):
        load_compressed_tensors(mixture("GptOss"), tmp_path / "b")


def test_mxfp4_files_of_gpt_oss(tmp_path: Path) -> None:
    """Experts in MXFP4, as gpt-oss is published, run in NVFP4 with the same values."""
    exact = mixture("GptOss")
    tensors = {n: t.clone() for n, t in exact.state_dict().items()}
    with torch.no_grad():
        for name, p in exact.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                codes, scales = jitquant.quantize_mxfp4(p.transpose(1, 2).contiguous())
                scales[0] = torch.full_like(scales[0].view(torch.uint8), 128).view(scales.dtype)
                p.copy_(jitquant.dequantize_mxfp4(codes, scales, BF16).transpose(1, 2))
                del tensors[name]
                blocks = codes.view(torch.uint8)
                tensors[f"{name}_blocks"] = blocks.view(*blocks.shape[:2], -1, 16)
                tensors[f"{name}_scales"] = scales.view(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    described = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with torch.device("meta"):
        read = type(exact)(exact.config).to(BF16).eval()
    done = load_compressed_tensors(read, tmp_path)
    assert len(done.replaced) == 2
    for mine, theirs in zip(read.model.layers, exact.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            values = mine.mlp.experts.weight(name).dequantize(BF16)
            weight = theirs.mlp.experts.get_parameter(name).transpose(1, 2)
            assert torch.equal(values.view(weight.shape), weight)
        assert mine.mlp.experts.weight_only
    with torch.no_grad():
        assert sqnr(read(TOKENS).logits, exact(TOKENS).logits) > 35
    del tensors["model.layers.1.mlp.experts.down_proj_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.mlp\.experts\.down_proj_bias"):
        load_compressed_tensors(mixture("GptOss"), tmp_path)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lack model\.layers\.0\.mlp\.experts\.down_proj_scales"):
        load_compressed_tensors(mixture("GptOss"), tmp_path)


def test_a_folder_in_the_layout_of_gpt_oss(tmp_path: Path) -> None:
    """Experts have the bits of the reference, for this project and for transformers; all else is as
    it was; the folder itself is written again byte for byte."""
    model = mixture("GptOss")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_bias"):
                p.copy_(randn(*p.shape, seed=len(name)))
    source, out, again = (tmp_path / name for name in ("in", "out", "again"))
    model.save_pretrained(source, max_shard_size="60KB")
    assert len([*source.glob("*.safetensors")]) > 2
    done = quantize_checkpoint(source, out, format="mxfp4", layout="gpt-oss", device="cpu")
    got = {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}
    wanted, values = dict(model.state_dict()), dict(model.state_dict())
    for name in [n for n in wanted if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = wanted.pop(name).transpose(1, 2)
        codes, scales = recipes.quantize_mxfp4(weight, scaling="even")
        wanted[f"{name}_blocks"] = codes.view(torch.uint8).view(*scales.shape, 16)
        wanted[f"{name}_scales"] = scales.view(torch.uint8)
        read = recipes.dequantize_mxfp4(codes, scales, dtype=BF16)[0]
        values[name] = read.transpose(1, 2)
        anew = recipes.quantize_mxfp4(read, scaling="even")  # gpt-oss that was dequantized
        assert torch.equal(recipes.dequantize_mxfp4(*anew, dtype=BF16)[0], read)
    assert got["model.layers.1.mlp.experts.gate_up_proj_blocks"].shape == (3, 192, 2, 16)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
    assert done.quantized == 2 * 3 * (192 * 64 + 96 * 64)
    assert not any(n.endswith("_bias") for n in done.left)
    assert (
        done.why["model.layers.0.self_attn.q_proj"] == "layout 'gpt-oss' has only experts in MXFP4"
    )
    assert json.loads((out / "config.json").read_text())["quantization_config"] == {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }

    how = transformers.Mxfp4Config(dequantize=True)
    theirs = type(model).from_pretrained(out, quantization_config=how, dtype=BF16)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    with torch.device("meta"):
        mine = type(model)(model.config).to(BF16).eval()
    assert len(load_compressed_tensors(mine, out).replaced) == 2
    for i, layer in enumerate(mine.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            read = layer.mlp.experts.weight(name).dequantize(BF16)
            want = values[f"model.layers.{i}.mlp.experts.{name}"].transpose(1, 2)
            assert torch.equal(read.view(want.shape), want)
    with torch.no_grad():
        assert sqnr(mine(TOKENS).logits, theirs(TOKENS).logits) > 35

    quantize_checkpoint(out, again, format="mxfp4", layout="gpt-oss", device="cpu")
    assert {p.name for p in again.iterdir()} == {p.name for p in out.iterdir()}
    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_fp8_files_with_power_of_two_scales(tmp_path: Path) -> None:
    """Scales in E8M0 are bytes, as those of MXFP4 are."""
    model = mixture("Qwen3Moe")
    done = convert(model, "fp8_block")
    save_compressed_tensors(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors")
    back = mixture("Qwen3Moe")
    assert load_compressed_tensors(back, tmp_path).replaced == done.replaced
    base = "model.layers.1.mlp.experts.2.down_proj"
    want = tensors[f"{base}.weight"].float() * tensors[f"{base}.weight_scale"].float()
    assert torch.equal(back.model.layers[1].mlp.experts.down_proj[2], want.to(BF16))


def test_save_pretrained_writes_what_is_read(tmp_path: Path) -> None:
    model = mixture("Mixtral")
    convert(model, "nvfp4")
    model.save_pretrained(tmp_path / "a")
    save_compressed_tensors(model, tmp_path / "b")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    back = mixture("Mixtral")
    load_compressed_tensors(back, tmp_path / "a")
    with torch.no_grad():
        assert sqnr(back(TOKENS).logits, model(TOKENS).logits) > 50


@pytest.mark.parametrize("recipe", ["nvfp4a16", "fp8_block"])
def test_files_of_a_model_that_compares_shapes(recipe: Any, tmp_path: Path) -> None:
    """transformers transposes the experts of Qwen3-VL if a parameter has another shape."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            **sizes,
            "vocab_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
            "moe_intermediate_size": 48,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    )

    def made() -> Any:
        torch.manual_seed(0)
        return transformers.Qwen3VLMoeForConditionalGeneration(config).to(BF16).eval()

    model = made()
    convert(model, recipe)
    save_compressed_tensors(model, tmp_path)
    at = "model.language_model.layers.0.mlp.experts"
    packed = "weight_packed" if recipe == "nvfp4a16" else "weight"
    written = load_file(tmp_path / "model.safetensors")
    assert {f"{at}.2.{n}_proj.{packed}" for n in ("gate", "up", "down")} <= written.keys()
    back = made()
    load_compressed_tensors(back, tmp_path)
    with torch.no_grad():
        got, want = (m(input_ids=TOKENS % 64).logits for m in (back, model))
    assert torch.equal(got, want) if recipe == "nvfp4a16" else sqnr(got, want) > 25


@pytest.mark.parametrize(
    ("kind", "expert"),
    [("Mixtral", "block_sparse_moe.experts.2.w2"), ("Qwen3Moe", "mlp.experts.2.down_proj")],
)
def test_experts_that_stay_as_they_are_are_ignored(kind: str, expert: str, tmp_path: Path) -> None:
    """Engines take one scheme for all but the names in ``ignore``."""
    model = mixture(kind)
    model.save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "c", format="nvfp4a16", targets="attention")
    convert(model, "nvfp4a16", targets="attention")
    model.save_pretrained(tmp_path / "a")
    save_compressed_tensors(model, tmp_path / "b")
    a, b, c = (
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]["ignore"]
        for name in "abc"
    )
    assert set(a) == set(b) == set(c) - {"model.embed_tokens"}
    assert f"model.layers.1.{expert}" in a
    assert len(a) == 1 + 2 * (1 + 3 * 3)  # the head; a router and three experts a layer
    back = mixture(kind)
    load_compressed_tensors(back, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, model(TOKENS).logits)


def test_a_state_dict_that_does_not_fit_leaves_no_static_input() -> None:
    made = NVFP4Experts(mixture("Mixtral").model.layers[0].mlp.experts)
    state = {**made.state_dict(), "down_proj_input_gsa": torch.ones(3)}
    with pytest.raises(RuntimeError, match="size mismatch for down_proj_input_gsa"):
        made.load_state_dict(state)
    assert made.down_proj_input_gsa is None


def test_what_is_refused() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.zeros(2, 16, 16))

    assert refusal(Mine()) == "its forward is not known"
    with pytest.raises(
        ValueError,
        match=r"original: expected the experts of transformers 5 \(gate_up_proj and down_proj",
    ):
        NVFP4Experts(Mine())
    experts = mixture("Mixtral").model.layers[0].mlp.experts
    for says, arguments in {
        "rounding: expected one of 'nearest', .*, got '4over7'": {"rounding": "4over7"},
        "input_gsas: expected one of 'gate_up_proj', 'down_proj', got 'up'": {
            "input_gsas": {"up": torch.ones(1)}
        },
        r"input_gsas\['down_proj'\]: expected shape \(1,\), .* got shape \(3,\)": {
            "input_gsas": {"down_proj": torch.ones(3)}
        },
    }.items():
        with pytest.raises(ValueError, match=says):
            NVFP4Experts(experts, **arguments)
    done = convert(nn.ModuleDict({"experts": Mine(), "x": nn.Linear(16, 16)}), "nvfp4")
    assert done.skipped == {"experts": "its forward is not known"}
    assert done.left == {"experts.down_proj": 512, "x.bias": 16}
    assert "unchanged: experts: its forward is not known" in str(done)
