"""`calibrate`, and what `convert` makes of it: GPTQ, static scales of inputs, a share in FP8."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.nn import (
    Calibration,
    Float8BlockwiseLinear,
    NVFP4Experts,
    NVFP4Linear,
    calibrate,
    convert,
    load_compressed_tensors,
    quantize_checkpoint,
    save_compressed_tensors,
)
from jitquant.nn._compressed_tensors import compressed_tensors
from jitquant.nn._rounding import output_noise

from .helpers import sqnr

BF16 = torch.bfloat16


class Block(nn.Module):
    """A gated MLP after a mixing of its inputs, so that they are correlated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.gate_proj, self.up_proj = (nn.Linear(64, 160, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(160, 64)
        self.unused = nn.Linear(64, 64)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        y: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    made = Block().to(BF16).eval()
    with torch.no_grad():
        made.gate_proj.weight.mul_(4)
        made.down_proj.weight[:, :4].mul_(20)
    return made


def batches(count: int = 3) -> list[Tensor]:
    return [randn(40, 32, seed=i) * (1 + i) for i in range(count)]


def test_what_is_summed_up(model: Block) -> None:
    before = list(model.state_dict())
    found = calibrate(model, batches(), ignore="down_proj")
    with torch.no_grad():
        x = torch.cat([model.first(b) for b in batches()])
    of = found.layers["up_proj"]
    assert of.rows == 120
    assert of.moment.dtype == torch.float32
    torch.testing.assert_close(of.moment.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-3)
    assert of.amax.item() == x.abs().max().item()
    errors = [jitquant.quantize_nvfp4(p).dequantize(torch.float32) - p.float() for p in x.split(40)]
    torch.testing.assert_close(of.noise, torch.cat(errors).square().sum(0))
    many = calibrate(nn.Sequential(model.up_proj), [x.repeat(40, 1)]).layers["0"]
    torch.testing.assert_close(many.noise.sum(), 40 * of.noise.sum(), rtol=0.1, atol=0)
    assert of.gsa.item() == pytest.approx(of.amax.item() / 2688)
    assert found.skipped == {"down_proj": "named in ignore", "unused": "its forward was not called"}
    assert found.input_amax()["up_proj"] == x.abs().max().item()
    assert list(model.state_dict()) == before
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_padding_does_not_count(model: Block) -> None:
    x, mask = randn(4, 10, 32), torch.ones(4, 10, dtype=torch.int64)
    mask[1, 6:], mask[3, :2] = 0, 0
    x[mask == 0] = 1000.0
    found = calibrate(model, [{"x": x, "attention_mask": mask}])
    want = calibrate(model, [x[mask == 1]])
    for name, of in found.layers.items():
        torch.testing.assert_close(of.moment, want.layers[name].moment)
        assert torch.equal(of.amax, want.layers[name].amax)


class Flattened(nn.Module):
    """Gives its linear the tokens of all sequences in one dimension, as shared experts get them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(0, 1))
        return y


@pytest.mark.parametrize("value", [1000.0, torch.nan])
@pytest.mark.parametrize("kept", [1, 3])  # 3: packed sequences are numbered
def test_padding_does_not_count_in_one_dimension(value: float, kept: int) -> None:
    x, mask = randn(4, 10, 32), torch.full((4, 10), kept)
    mask[1, 6:], mask[3, :2] = 0, 0
    x[mask == 0] = value
    model = Flattened().to(BF16)
    found = calibrate(model, [{"x": x, "attention_mask": mask}]).layers["linear"]
    want = calibrate(nn.Sequential(model.linear), [x[mask > 0]]).layers["0"]
    torch.testing.assert_close(found.moment, want.moment)
    assert torch.equal(found.amax, want.amax)


def test_the_sqnr_is_that_of_the_outputs(model: Block) -> None:
    """The estimate from moments beside the product of quantized operands itself."""
    x = randn(2000, 64)
    linear = model.up_proj
    found = calibrate(nn.Sequential(linear), [x]).layers["0"]
    q = jitquant.quantize_weight_nvfp4(linear.weight.detach())
    exact = x.double() @ linear.weight.detach().double().T
    w, v = (
        q.dequantize(torch.float32).double(),
        jitquant.quantize_nvfp4(x).dequantize(torch.float32),
    )
    assert found.sqnr(linear.weight, q) == pytest.approx(sqnr(v.double() @ w.T, exact), abs=0.3)
    want = sqnr(x.double() @ w.T, exact)
    assert found.sqnr(linear.weight, q, weight_only=True) == pytest.approx(want, abs=0.01)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4a16"])
def test_gptq_brings_outputs_closer(model: Block, recipe: str) -> None:
    x, found = torch.cat(batches()), calibrate(model, batches())
    plain = {n: m.weight.detach().float() for n, m in model.named_modules() if hasattr(m, "weight")}
    errors = {}
    for rounding in ("nearest", "gptq"):
        made = copy.deepcopy(model)
        done = convert(made, recipe, rounding=rounding, calibration=found)
        assert torch.equal(made.gate_proj.weight_gsa, made.up_proj.weight_gsa)
        errors[rounding] = {}
        for name, of in found.layers.items():
            e = getattr(made, name).weight.dequantize(torch.float32) - plain[name]
            errors[rounding][name] = ((e @ of.moment) * e).sum().item()
        errors[rounding]["all"] = -sqnr(made(x).detach(), model(x).detach())
    assert done.uncalibrated == ["unused"]
    assert "not in the calibration: unused" in str(done)
    assert all(errors["gptq"][n] < 0.7 * errors["nearest"][n] for n in found.layers)
    assert errors["gptq"]["all"] < errors["nearest"]["all"] - (0.5 if recipe == "nvfp4" else 2)


def test_static_scales_of_inputs(model: Block, tmp_path) -> None:
    found, x = calibrate(model, batches()), batches()[0]
    dynamic, unquantized = copy.deepcopy(model), copy.deepcopy(model)
    convert(model, "nvfp4", calibration=found, static_input_scales=True, ignore="unused")
    convert(dynamic, "nvfp4", ignore="unused")
    amax = found.layers["up_proj"].amax
    assert torch.equal(model.gate_proj.input_gsa, amax / 2688)
    assert torch.equal(model.gate_proj.input_gsa, model.up_proj.input_gsa)
    h = randn(4, 64)
    q = jitquant.quantize_nvfp4(h, model.up_proj.input_gsa)
    assert torch.equal(model.up_proj(h), model.up_proj.run_from_quantized(q))
    assert not torch.equal(model.up_proj(h), dynamic.up_proj(h))
    assert sqnr(model(x).detach(), unquantized(x).detach()) > 12
    joined = NVFP4Linear.joined([model.gate_proj, model.up_proj])
    assert torch.equal(joined(h)[:, 160:], model.up_proj(h))
    with pytest.raises(
        ValueError, match="layers: expected one input_gsa, as they share an input, got several"
    ):
        NVFP4Linear.joined([model.gate_proj, dynamic.up_proj])
    # A state_dict and a change of dtype keep them.
    dynamic.load_state_dict(model.state_dict())
    assert torch.equal(dynamic(x), model(x))
    assert dynamic.half().up_proj.input_gsa.dtype == torch.float32
    # Files have what engines want, and come back as they were.
    tensors, config = compressed_tensors(model)
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert tensors["up_proj.input_global_scale"].item() == pytest.approx(2688 / amax.item())
    save_compressed_tensors(model, tmp_path)
    again = Block().to(BF16).eval()
    load_compressed_tensors(again, tmp_path)
    torch.testing.assert_close(again.up_proj.input_gsa, model.up_proj.input_gsa)
    assert sqnr(again(x).detach(), model(x).detach()) > 35


def test_inputs_that_are_zero_in_one_of_fused_layers() -> None:
    """The static scale that they share is that of the other one."""
    both = nn.ModuleDict({name: nn.Linear(32, 16, dtype=BF16) for name in ("gate_proj", "up_proj")})
    x = randn(4, 32)
    both.forward = lambda x: both["gate_proj"](x * 0) + both["up_proj"](x)  # type: ignore
    found = calibrate(both, [x])
    convert(both, "nvfp4", calibration=found, static_input_scales=True)
    for linear in both.children():
        assert torch.equal(linear.input_gsa, found.layers["up_proj"].gsa)


def test_some_layers_with_static_scales_cannot_be_saved(model: Block) -> None:
    convert(model, "nvfp4", calibration=calibrate(model, batches()), static_input_scales=True)
    with pytest.raises(
        ValueError,
        match=r"unused: expected a static scale of its input, as other layers have it, got none\. "
        r"Leave the layer out when converting, or run it when calibrating, or pass input_amax$",
    ):
        compressed_tensors(model)


def test_static_scales_beside_layers_that_quantize_weights_alone(model: Block, tmp_path) -> None:
    """A file of both schemes, read as it was saved."""
    found = calibrate(model, batches())
    convert(model, "nvfp4a16", targets="down_proj")
    convert(model, "nvfp4", calibration=found, static_input_scales=True, ignore="unused")
    save_compressed_tensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "nvfp4-pack-quantized"
    groups = {len(g["targets"]): g["input_activations"] for g in config["config_groups"].values()}
    assert groups[1] is None
    assert groups[3]["dynamic"] == "local"
    assert "down_proj.input_global_scale" not in load_file(tmp_path / "model.safetensors")
    again = Block().to(BF16).eval()
    load_compressed_tensors(again, tmp_path)
    assert again.down_proj.weight_only
    assert not again.up_proj.weight_only
    x = batches()[0]
    assert sqnr(again(x).detach(), model(x).detach()) > 35


@pytest.mark.parametrize("linears", ["static", "amaxes"])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4a16"])
def test_experts_without_static_scales(recipe: Any, linears: str) -> None:
    model = mixture("Qwen3Moe", num_experts=4, moe_intermediate_size=48, mlp_only_layers=[])
    found = calibrate(model, [_tokens(0)])
    static = linears == "static"
    convert(model, recipe, targets="experts")
    convert(model, "nvfp4", calibration=found, static_input_scales=static)
    amaxes = None if static else found.input_amax()
    if recipe == "nvfp4":
        hint = "calibrating" + ("" if static else ", or leave out input_amax")
        with pytest.raises(ValueError, match=rf"experts\.gate_up_proj: expected .*{hint}$"):
            compressed_tensors(model, amaxes)
        return
    tensors, config = compressed_tensors(model, amaxes)
    experts, rest = sorted(config["config_groups"].values(), key=lambda g: -len(g["targets"]))
    assert all(".experts." in name for name in experts["targets"])
    assert experts["input_activations"] is None
    assert rest["input_activations"]["dynamic"] == "local"
    scaled = {n.removesuffix(".input_global_scale") for n in tensors if "input_global" in n}
    assert scaled == set(rest["targets"])


def test_a_share_stays_in_fp8(model: Block, tmp_path) -> None:
    found = calibrate(model, batches())
    before = copy.deepcopy(model)
    done = convert(model, "nvfp4", calibration=found, fp8_share=0.2, ignore="unused")
    assert set(done.sqnr) == {"first", "gate_proj", "up_proj", "down_proj"}
    worst = min(("first", "down_proj"), key=done.sqnr.__getitem__)
    assert done.in_fp8 == [worst]
    assert type(getattr(model, worst)) is Float8BlockwiseLinear
    assert f"in FP8: {worst}: {done.sqnr[worst]:.1f} dB in NVFP4" in str(done)
    save_compressed_tensors(model, tmp_path)
    again = Block().to(BF16).eval()
    load_compressed_tensors(again, tmp_path)
    assert type(getattr(again, worst)) is Float8BlockwiseLinear
    assert type(again.gate_proj) is NVFP4Linear
    # Siblings go together, if they fit.
    made = copy.deepcopy(before)
    with torch.no_grad():
        made.up_proj.weight.fill_(5)  # beside 6 in a block it becomes 4 or 6
        made.up_proj.weight[:, ::16] = 6
    done = convert(made, "nvfp4", fp8_share=0.5, ignore="unused")
    assert done.sqnr["up_proj"] < min(done.sqnr["first"], done.sqnr["down_proj"])
    assert done.in_fp8 == ["gate_proj", "up_proj"]
    everything = copy.deepcopy(before)
    assert len(convert(everything, "nvfp4", fp8_share=1.0).in_fp8) == 5


def test_errors(model: Block) -> None:
    found = calibrate(model, batches())
    with pytest.raises(
        ValueError, match="rounding: expected one of 'nearest', '4over6', 'mse', 'gptq', got 'best'"
    ):
        convert(model, "nvfp4", rounding="best")
    with pytest.raises(
        ValueError, match="calibration: expected one with rounding 'gptq', got None"
    ):
        convert(model, "nvfp4", rounding="gptq")
    with pytest.raises(
        ValueError, match="calibration: expected one with static_input_scales, got None"
    ):
        convert(model, "nvfp4", static_input_scales=True)
    with pytest.raises(
        ValueError, match="static_input_scales: expected False with recipe 'nvfp4a16', got True"
    ):
        convert(model, "nvfp4a16", static_input_scales=True, calibration=found)
    with pytest.raises(
        ValueError, match="rounding: expected 'nearest' with recipe 'fp8_block', got"
    ):
        convert(model, "fp8_block", rounding="mse")
    with pytest.raises(
        ValueError, match=r"fp8_share: expected a number from 0 to 1, such as 0\.05, got 5"
    ):
        convert(model, "nvfp4", fp8_share=5)
    with pytest.raises(TypeError, match="calibration: expected what calibrate returned, got dict"):
        convert(model, "nvfp4", rounding="gptq", calibration={})
    found.layers["first"], found.layers["up_proj"] = found.layers["up_proj"], found.layers["first"]
    with pytest.raises(
        ValueError,
        match=r"calibration: expected 32 elements in each input of first, got moment of .*64",
    ):
        convert(model, "nvfp4", rounding="gptq", calibration=found)
    assert type(model.first) is nn.Linear
    with pytest.raises(
        TypeError, match=r"batches: expected an iterable of batches, got Tensor.*\[batch\]"
    ):
        calibrate(model, batches()[0])
    with pytest.raises(ValueError, match="batches: expected one or more batches, got none"):
        calibrate(model, [])
    with pytest.raises(
        ValueError,
        match=r"input of first: expected finite values .*add 'first' to ignore, which",
    ):
        calibrate(model, [torch.full((2, 32), torch.nan, dtype=BF16)])


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        ("moment", torch.full((160, 160), torch.nan), "finite values in moment of down_proj, got"),
        ("moment", torch.ones(160, 3), r"160 .* of down_proj, got moment of shape \(160, 3\)"),
        ("noise", torch.ones(3), r"160 .* of down_proj, got noise of shape \(3,\), not \(160,\)"),
        ("noise", torch.full((160,), torch.inf), "finite values in noise of down_proj, got"),
        ("amax", torch.tensor([torch.nan]), "finite values in amax of down_proj, got"),
        ("amax", torch.tensor(1.0), r"160 .* of down_proj, got amax of shape \(\)"),
        (
            "moment",
            -torch.eye(160),
            r"that down_proj can be .* \(moment: expected x\.T @ x",
        ),
    ],
)
def test_statistics_that_are_wrong(model: Block, part: str, values: Tensor, says: str) -> None:
    """Of a layer after others: no layer is replaced."""
    found, before = calibrate(model, batches()), dict(model.named_modules())
    setattr(found.layers["down_proj"], part, values)
    with pytest.raises(ValueError, match=says):
        convert(model, "nvfp4", rounding="gptq", calibration=found)
    assert dict(model.named_modules()) == before


def test_statistics_of_experts_that_are_wrong() -> None:
    model = mixture()
    found, name = calibrate(model, [_tokens(0)]), "model.layers.0.mlp.experts.down_proj"
    moment = found.layers[f"{name}.1"].moment
    moment[3, 4] = torch.inf
    with pytest.raises(ValueError, match=rf"finite values in moment of {name}\.1, got NaN or"):
        convert(model, "nvfp4", rounding="gptq", calibration=found)
    moment.copy_(-torch.eye(len(moment)))
    with pytest.raises(ValueError, match=r"that model\.layers\.0\.mlp\.experts can be"):
        convert(model, "nvfp4", rounding="gptq", calibration=found)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    convert(model, "nvfp4", calibration=found)  # no moment is read


def test_inputs_that_are_tiny() -> None:
    """The gsa of their static scale has a reciprocal, which files need."""
    model = nn.Sequential(nn.Linear(32, 16))
    found = calibrate(model, [torch.full((2, 32), 1e-37)])
    convert(model, "nvfp4", calibration=found, static_input_scales=True)
    assert model[0].input_gsa == torch.finfo(torch.float32).tiny
    assert compressed_tensors(model)[0]["0.input_global_scale"].isfinite()


def test_a_share_in_fp8_of_weights_whose_squares_overflow(model: Block) -> None:
    want = convert(copy.deepcopy(model), "nvfp4", fp8_share=0.5).sqnr
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0**80)
    assert convert(model, "nvfp4", fp8_share=0.5).sqnr == pytest.approx(want)


def mixture(kind: str = "Mixtral", **sizes: Any) -> Any:
    """A small model with experts of three dimensions."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        **({"num_local_experts": 4, "num_experts_per_tok": 2} | sizes),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(BF16).eval()
    if not hasattr(model.model.layers[0].mlp.experts, "gate_up_proj"):
        pytest.skip("transformers has experts as linears")
    return model


def _tokens(seed: int, sequences: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 64, (sequences, 32), generator=generator)


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_what_experts_get(kind: str) -> None:
    """Each the tokens that chose it and no padding; gate, activation and biases are included."""
    model, tokens = mixture(kind), _tokens(0)
    mask = torch.ones_like(tokens)
    mask[:, 20:] = 0
    experts = model.model.layers[0].mlp.experts
    for name, bias in experts.named_parameters():
        if name.endswith("_bias"):
            bias.data.normal_()
    calls: list[tuple[Tensor, ...]] = []
    handle = experts.register_forward_pre_hook(lambda _, args: calls.append(args))
    found = calibrate(model, [{"input_ids": tokens, "attention_mask": mask}])
    handle.remove()
    ((x, index, _),) = calls
    real, rows = mask.flatten().bool(), 0
    transposed = kind == "GptOss"
    for e in range(4):
        mine = x[real & (index == e).any(1)].float()
        of_up = found.layers[f"model.layers.0.mlp.experts.gate_up_proj.{e}"]
        assert of_up.rows == len(mine)
        rows += of_up.rows
        torch.testing.assert_close(of_up.moment, mine.T @ mine)
        assert of_up.amax == mine.abs().max()
        weight = experts.gate_up_proj.detach()[e].float()
        h = mine @ (weight if transposed else weight.T)
        if transposed:
            h = h + experts.gate_up_proj_bias.detach()[e].float()
        h = experts._apply_gate(h)
        of_down = found.layers[f"model.layers.0.mlp.experts.down_proj.{e}"]
        assert of_down.rows == of_up.rows
        torch.testing.assert_close(of_down.moment, h.T @ h, rtol=0.05, atol=0.01 * len(h))
    assert rows == 2 * int(real.sum())


@pytest.mark.parametrize("dead", [[1], [0, 1, 2, 3]])
def test_experts_whose_inputs_are_zero(dead: list[int], tmp_path: Path) -> None:
    """They change nothing for the others. Only if all are zero is the gsa 1."""
    model = mixture("Qwen3Moe", num_experts=4, moe_intermediate_size=48, mlp_only_layers=[])
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj.data[dead] = 0
    found = calibrate(model, [_tokens(0)])
    place = "model.layers.0.mlp.experts.down_proj"
    amaxes = [found.layers[f"{place}.{e}"].amax for e in range(4)]
    assert [e for e in range(4) if amaxes[e] == 0] == dead
    want = max(amaxes) / 2688 if len(dead) < 4 else torch.ones(1)
    model.save_pretrained(tmp_path / "plain")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "out", format="nvfp4", calibration=found)
    loaded = copy.deepcopy(model)
    load_compressed_tensors(loaded, tmp_path / "out")
    convert(model, "nvfp4", calibration=found, static_input_scales=True)
    for made in (model, loaded):
        gsa = made.model.layers[0].mlp.experts.down_proj_input_gsa
        torch.testing.assert_close(gsa, want, rtol=1e-6, atol=0)


def test_names_in_the_files_of_a_vision_model(tmp_path: Path) -> None:
    """Those of Llava's language model begin otherwise in memory."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**sizes, vocab_size=64)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text)
    )
    model = model.to(BF16).eval()
    model.save_pretrained(tmp_path / "plain")
    found = calibrate(model, [{"input_ids": _tokens(0)}])
    found.save(tmp_path / "found")
    how: dict[str, Any] = {"format": "nvfp4", "targets": "re:.*language"}
    quantize_checkpoint(tmp_path / "plain", tmp_path / "out", calibration=tmp_path / "found", **how)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("layers.0.mlp.down_proj", "layers.0.self_attn.o_proj"):
        want = 2688 / found.layers[f"model.language_model.{name}"].amax
        got = tensors[f"language_model.model.{name}.input_global_scale"]
        torch.testing.assert_close(got, want)
    convert(model, "nvfp4", calibration=found, static_input_scales=True, targets="re:.*language")


def test_gptq_brings_experts_closer() -> None:
    model = mixture()
    found = calibrate(model, [_tokens(i, 32) for i in range(2)])
    experts, inputs = model.model.layers[0].mlp.experts, []
    handle = experts.register_forward_pre_hook(lambda _, args: inputs.append(args))
    with torch.no_grad():
        model(_tokens(9, 32))
        handle.remove()
        want, made = experts(*inputs[0]), {}
        for rounding in ("mse", "gptq"):
            other = copy.deepcopy(model)
            done = convert(
                other, "nvfp4a16", rounding=rounding, calibration=found, targets="experts"
            )
            made[rounding] = sqnr(other.model.layers[0].mlp.experts(*inputs[0]), want)
            assert done.uncalibrated == []
    assert made["gptq"] > made["mse"] + 0.5
    for name in [*found.layers]:
        if "experts" in name:
            del found.layers[name]
    other = copy.deepcopy(model)
    done = convert(other, "nvfp4a16", rounding="gptq", calibration=found)
    assert done.uncalibrated == ["model.layers.0.mlp.experts"]


def test_experts_of_a_folder_by_gptq(tmp_path: Path) -> None:
    """Their matrices are one by one there; an expert that no token chose is rounded as "mse"."""
    model = mixture(
        "Qwen3Moe", num_experts=4, moe_intermediate_size=48, mlp_only_layers=[], head_dim=32
    )
    model.save_pretrained(tmp_path / "plain")
    found = calibrate(model, [_tokens(i) for i in range(2)])
    name = "model.layers.0.mlp.experts"
    del found.layers[f"{name}.down_proj.2"]
    found.save(tmp_path / "found.safetensors")
    kept = Calibration.load(tmp_path / "found.safetensors")
    assert kept.skipped == found.skipped
    assert kept.layers.keys() == found.layers.keys()
    for key, one in found.layers.items():
        assert kept.layers[key].rows == one.rows
        assert torch.equal(kept.layers[key].moment, one.moment)
    done = quantize_checkpoint(
        tmp_path / "plain",
        tmp_path / "out",
        rounding="gptq",
        calibration=tmp_path / "found.safetensors",
    )
    assert done.uncalibrated == [f"{name}.2.down_proj"]
    exact = model.model.layers[0].mlp.experts.down_proj.detach().float()
    load_compressed_tensors(model, tmp_path / "out")
    got = model.model.layers[0].mlp.experts.weight("down_proj").dequantize(torch.float32)
    for e in range(4):
        moment = found.layers.get(f"{name}.down_proj.{e}", found.layers[f"{name}.down_proj.0"])
        nearest = jitquant.quantize_weight_nvfp4(exact[e]).dequantize(torch.float32)
        errors = [output_noise(q - exact[e], moment.moment).sum() for q in (got[e], nearest)]
        assert errors[0] < (errors[1] if e == 2 else 0.8 * errors[1])


def test_no_expert_of_a_folder_stays_in_fp8(tmp_path: Path) -> None:
    """An engine takes one scheme for the experts of a layer; `convert` leaves them alone too."""
    made = mixture("Qwen3Moe", mlp_only_layers=[], head_dim=64, moe_intermediate_size=128)
    model = copy.deepcopy(made)
    model.save_pretrained(tmp_path / "plain")
    done = quantize_checkpoint(tmp_path / "plain", tmp_path / "out", fp8_share=0.5)
    assert done.in_fp8 == ["model.layers.0.self_attn.o_proj"]  # alone it has 128 columns
    assert not any("experts" in name for name in done.sqnr)
    assert done.sqnr == pytest.approx(convert(model, "nvfp4a16", fp8_share=0.5).sqnr)
    load_compressed_tensors(made, tmp_path / "out")
    assert isinstance(made.model.layers[0].mlp.experts, NVFP4Experts)


def test_experts_are_rounded_too() -> None:
    model = mixture()
    exact = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    errors = []
    for rounding in ("nearest", "4over6", "mse"):
        made = copy.deepcopy(model)
        convert(made, "nvfp4", rounding=rounding)
        experts = made.model.layers[0].mlp.experts
        got = experts.weight("gate_up_proj").dequantize(torch.float32)
        errors.append((got - exact.float()).square().sum().item())
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("about", [None, [], {}, "no JSON", "[]", "3", '{"rows": 3}', "no tensors"])
def test_files_that_are_broken(about: Any, tmp_path: Path) -> None:
    path, key = tmp_path / "found.safetensors", "jitquant_calibration"
    if about == "no tensors":
        about = '{"rows": {"up": 4}, "skipped": {}}'
    given = {key: about} if isinstance(about, str) else about
    header = json.dumps({"__metadata__": given}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    in_it = "which rows, skipped or a tensor is" if isinstance(about, str) else ""
    says = f"expected .* Calibration.save wrote, got .*{in_it}"
    with pytest.raises(ValueError, match=says):
        Calibration.load(path)
