"""`jitquant.integrations.transformers` with the library itself, on models of random weights."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nn.helpers import sqnr
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounterWithBackend

import jitquant
from jitquant.nn import (
    Float8BlockwiseExperts,
    Float8BlockwiseLinear,
    MXFP4Linear,
    NVFP4Experts,
    NVFP4Linear,
    calibrate,
    convert,
    quantize_checkpoint,
    save_compressed_tensors,
)

transformers = pytest.importorskip("transformers", minversion="5.0")
from jitquant.integrations.transformers import (  # noqa: E402
    JitquantConfig,
    JitquantQuantizer,
    jitquant_layers,
)
from jitquant.nn._while_loading import WhileLoading  # noqa: E402

BF16 = torch.bfloat16
TOKENS = torch.arange(40).reshape(2, 20)
Auto = transformers.AutoModelForCausalLM


def model(kind: str = "Llama", **given: Any) -> Any:
    torch.manual_seed(0)
    more = {} if kind == "Llama" else {"num_local_experts": 3, "num_experts_per_tok": 3}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **{"num_hidden_layers": 2, **more, **given},
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(BF16).eval()


@pytest.fixture(params=["Llama", "Mixtral", "GptOss"])
def folder(request: Any, tmp_path: Path) -> Path:
    model(request.param).save_pretrained(tmp_path / "bf16")
    return tmp_path / "bf16"


def logits(of: Any) -> torch.Tensor:
    with torch.no_grad():
        return of(TOKENS).logits


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
def test_quantized_while_it_is_loaded(folder: Path, recipe: Any, tmp_path: Path) -> None:
    plain = Auto.from_pretrained(folder, dtype=BF16).eval()
    exact = logits(plain)
    made = Auto.from_pretrained(folder, quantization_config=JitquantConfig(recipe), dtype=BF16)
    convert(plain, recipe)
    assert torch.equal(logits(made), logits(plain))
    assert sqnr(logits(made), exact) > (20 if recipe == "fp8_block" else 10)
    assert type(made.lm_head) is torch.nn.Linear
    assert made.hf_quantizer.done.elements > 0.8 * made.hf_quantizer.done.model_elements

    made.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    with jitquant_layers():
        back = Auto.from_pretrained(tmp_path / "saved", dtype=BF16)
    assert {n: type(m) for n, m in back.named_modules()} == {
        n: type(m) for n, m in made.named_modules()
    }
    assert sqnr(logits(back), logits(made)) > (50 if recipe == "nvfp4" else 25)
    assert not any(t.is_meta for t in (*back.parameters(), *back.buffers()))
    assert back.hf_quantizer.done.replaced == made.hf_quantizer.done.replaced

    back.save_pretrained(tmp_path / "again")
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("saved", "again"))
    assert one.keys() == other.keys()
    if recipe == "nvfp4":
        for name, tensor in one.items():
            assert sqnr(other[name].float(), tensor.float()) > 100, name


def live_bytes() -> int:
    """Memory of the bf16 matrices and stacks that are younger than the last ``gc.freeze``."""
    gc.collect()
    sizes = {}
    for each in gc.get_objects():
        is_tensor = type(each) in (torch.Tensor, torch.nn.Parameter)
        if is_tensor and not each.is_meta and each.dtype == BF16 and each.dim() > 1:
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("Llama", "nvfp4"),
        ("Llama", "mxfp4"),
        pytest.param("Mixtral", "nvfp4", marks=pytest.mark.slow),
        pytest.param("GptOss", "nvfp4a16", marks=pytest.mark.slow),
    ],
)
def test_one_group_of_weights_is_in_memory(
    kind: str, recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the linears those that share a gsa, of experts a tensor; nothing is left at the end."""
    plain = model(kind, num_hidden_layers=6)
    whole = sum(p.nbytes for p in plain.parameters())
    stack = max((p.nbytes for p in plain.parameters() if p.dim() == 3), default=0)
    plain.save_pretrained(tmp_path)
    plain = Auto.from_pretrained(tmp_path, dtype=BF16)
    done = convert(plain, recipe)
    rest = sum(p.nbytes for p in plain.parameters() if p.dim() > 1)
    seen = []
    take = WhileLoading.take

    def watched(self: WhileLoading, *arguments: Any) -> bool:
        seen.append(live_bytes())  # the weight that is taken is among them
        return take(self, *arguments)

    gc.freeze()
    try:
        monkeypatch.setattr(WhileLoading, "take", watched)
        config = JitquantConfig(recipe)
        made = Auto.from_pretrained(tmp_path, quantization_config=config, dtype=BF16)
        monkeypatch.undo()
        left = live_bytes()
    finally:
        gc.unfreeze()
    assert torch.equal(logits(made), logits(plain))
    assert made.hf_quantizer.done == done
    gate_and_up = 2 * 128 * 256 * BF16.itemsize
    placeholders = BF16.itemsize * len(seen)
    # An expert's matrices are read one by one and then stacked, by transformers.
    assert max(seen) <= rest + max(gate_and_up, 3 * stack) + placeholders
    assert max(seen) < whole / 2
    assert left <= rest
    assert not any(bool(t.isnan().any()) for t in made.parameters())


def test_what_is_not_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    """Layers in FP8 need their weights, so they are read as ever, and nothing changes."""
    model().save_pretrained(tmp_path)
    ways: list[dict[str, Any]] = [{"recipe": "fp8_block"}, {"recipe": "nvfp4", "fp8_share": 0.3}]
    for how in ways:
        config: Any = JitquantConfig(**how)
        loading = WhileLoading(config.plan(), model())
        assert not loading.wants(model(), "model.layers.0.mlp.down_proj.weight")
        made = Auto.from_pretrained(tmp_path, quantization_config=config, dtype=BF16)
        want = Auto.from_pretrained(tmp_path, dtype=BF16)
        convert(want, **how)
        assert torch.equal(logits(made), logits(want))


def test_tied_and_incomplete_weights_while_they_are_loaded(tmp_path: Path) -> None:
    model(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    tied = Auto.from_pretrained(tmp_path / "tied", dtype=BF16)
    config = JitquantConfig(ignore=())  # the head would be quantized, if it were alone
    made = Auto.from_pretrained(tmp_path / "tied", quantization_config=config, dtype=BF16)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    convert(tied, "nvfp4", ignore=())
    assert torch.equal(logits(made), logits(tied))

    plain = model()
    plain.save_pretrained(tmp_path / "lost")
    tensors = load_file(tmp_path / "lost" / "model.safetensors")
    lost = tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, tmp_path / "lost" / "model.safetensors", {"format": "pt"})
    made = Auto.from_pretrained(tmp_path / "lost", quantization_config=JitquantConfig(), dtype=BF16)
    q, k, v = (getattr(made.model.layers[1].self_attn, f"{n}_proj") for n in "qkv")
    assert torch.equal(q.weight_gsa, k.weight_gsa)
    assert torch.equal(q.weight_gsa, v.weight_gsa)
    assert sqnr(q.weight.dequantize(), plain.model.layers[1].self_attn.q_proj.weight) > 15

    tensors["model.layers.1.self_attn.k_proj.weight"] = lost[:-1]
    save_file(tensors, tmp_path / "lost" / "model.safetensors", {"format": "pt"})
    how = {"quantization_config": JitquantConfig(), "dtype": BF16}
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # transformers' own
        Auto.from_pretrained(tmp_path / "lost", **how)
    made = Auto.from_pretrained(tmp_path / "lost", ignore_mismatched_sizes=True, **how)
    assert isinstance(made.model.layers[1].self_attn.k_proj, NVFP4Linear)
    assert bool(logits(made).isfinite().all())


def test_biases_and_weights_that_are_not_finite(tmp_path: Path) -> None:
    plain = model(attention_bias=True)
    with torch.no_grad():
        for name, bias in plain.named_parameters():
            if name.endswith("bias"):
                bias.normal_()
    plain.save_pretrained(tmp_path)
    made = Auto.from_pretrained(tmp_path, quantization_config=JitquantConfig(), dtype=BF16)
    plain = Auto.from_pretrained(tmp_path, dtype=BF16)
    convert(plain, "nvfp4")
    assert torch.equal(logits(made), logits(plain))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"weight of model\.layers\.1\.mlp\.up_proj: expected"):
        Auto.from_pretrained(tmp_path, quantization_config=JitquantConfig(), dtype=BF16)


def test_no_offload(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    for places in (["cpu", "disk"], ["cpu", 0]):
        names = ("model", "lm_head")
        with pytest.raises(ValueError, match="device_map: expected GPUs that hold the whole model"):
            Auto.from_pretrained(
                tmp_path,
                quantization_config=JitquantConfig(),
                device_map=dict(zip(names, places, strict=True)),
            )


def test_sizes_for_a_device_map(tmp_path: Path) -> None:
    """Layers are placed by what they take once they are quantized."""
    made = model()
    quantizer = JitquantQuantizer(JitquantConfig("mxfp4"), pre_quantized=False)
    quantizer._loading = WhileLoading(quantizer.quantization_config.plan(), made)
    for name, size in (("model.layers.0.mlp.up_proj.weight", 0.59375), ("lm_head.weight", 2)):
        assert quantizer.param_element_size(made, name, made.get_parameter(name)) == size


@pytest.mark.parametrize("format", ["nvfp4a16", "fp8_block", "modelopt"])
def test_folders_of_quantize_checkpoint(folder: Path, format: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if format == "modelopt":
        quantize_checkpoint(folder, out, format="nvfp4", layout="modelopt", input_amax=64)
    else:
        quantize_checkpoint(folder, out, format=format)
    with jitquant_layers():
        made = Auto.from_pretrained(out, dtype=BF16)
    plain = Auto.from_pretrained(folder, dtype=BF16).eval()
    recipe: Any = "nvfp4" if format == "modelopt" else format
    done = convert(plain, recipe)
    assert made.hf_quantizer.done.replaced == done.replaced
    kinds = {type(m) for m in made.modules()}
    fp8 = {Float8BlockwiseLinear, Float8BlockwiseExperts}
    assert kinds & (fp8 if format == "fp8_block" else {NVFP4Linear, NVFP4Experts})
    for layer in plain.modules():
        if format == "modelopt" and isinstance(layer, (NVFP4Linear, NVFP4Experts)):
            for name in layer.quantized:
                if name.endswith("input_gsa"):
                    setattr(layer, name, torch.tensor([64 / 2688]))
    assert sqnr(logits(made), logits(plain)) > (25 if format == "fp8_block" else 50)


def test_folders_of_models_that_initialize_the_weights_of_their_linears(tmp_path: Path) -> None:
    """SigLIP's attention initializes q_proj.weight itself, Mamba 2's mixer out_proj.weight."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = transformers.SiglipVisionConfig(
        **sizes, num_attention_heads=4, image_size=16, patch_size=8
    )
    made = transformers.SiglipVisionModel(config).to(BF16).eval()
    convert(made, "nvfp4a16")
    made.save_pretrained(tmp_path)
    with jitquant_layers():
        again = type(made).from_pretrained(tmp_path, dtype=BF16)
    image = torch.ones(1, 3, 16, 16, dtype=BF16)
    with torch.no_grad():
        assert torch.equal(again(image).pooler_output, made(image).pooler_output)


@pytest.mark.parametrize("apart", [False, True])
def test_folders_of_llama_4(apart: bool, tmp_path: Path) -> None:
    """Its experts are in one tensor, or, as llm-compressor writes them, in one for each matrix."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Llama4TextConfig(
        vocab_size=64, num_hidden_layers=1, num_local_experts=2, **sizes, **heads
    )
    made = transformers.Llama4ForCausalLM(config).to(BF16).eval()
    convert(made, "nvfp4a16")
    made.save_pretrained(tmp_path)
    if apart:
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        at = "model.layers.0.feed_forward.experts"
        up, down = (tensors.pop(f"{at}.{name}") for name in ("gate_up_proj", "down_proj"))
        for e in range(2):
            for name, matrix in zip(("gate", "up"), up[e].chunk(2, 1), strict=True):
                tensors[f"{at}.{e}.{name}_proj.weight"] = matrix.T.contiguous()
            tensors[f"{at}.{e}.down_proj.weight"] = down[e].T.contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    with jitquant_layers():
        again = type(made).from_pretrained(tmp_path, dtype=BF16).eval()
    assert sqnr(logits(again), logits(made)) > 35


def test_inputs_of_experts_with_static_scales(tmp_path: Path) -> None:
    """From a calibration to files and back; `quantize_checkpoint` finds the same scales."""
    model("Mixtral").save_pretrained(tmp_path / "bf16")
    made = Auto.from_pretrained(tmp_path / "bf16", dtype=BF16).eval()
    found = calibrate(made, [TOKENS])
    exact = logits(made)
    done = convert(made, "nvfp4", calibration=found, static_input_scales=True)
    assert done.uncalibrated == []
    experts = made.model.layers[0].mlp.experts
    known = [f for n, f in found.layers.items() if n.startswith("model.layers.0.mlp.experts.down")]
    assert torch.equal(experts.down_proj_input_gsa, torch.stack([f.gsa for f in known]).amax(0))
    assert sqnr(logits(made), exact) > 10
    state = made.state_dict()
    again = Auto.from_pretrained(tmp_path / "bf16", dtype=BF16).eval()
    convert(again, "nvfp4")
    again.load_state_dict(state)
    assert torch.equal(logits(again), logits(made))

    made.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.1.{}.input_global_scale"
    assert saved[name.format("w2")] == 1 / experts.down_proj_input_gsa
    assert saved[name.format("w1")] == saved[name.format("w3")]
    with jitquant_layers():
        back = Auto.from_pretrained(tmp_path / "saved", dtype=BF16)
    assert sqnr(logits(back), logits(made)) > 50
    for name, gsa in made.named_buffers():
        if name.endswith("input_gsa"):
            assert torch.equal(back.get_buffer(name), gsa)

    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", format="nvfp4", calibration=found)
    with jitquant_layers():
        other = Auto.from_pretrained(tmp_path / "out", dtype=BF16)
    for name, gsa in made.named_buffers():
        if name.endswith("input_gsa"):
            torch.testing.assert_close(other.get_buffer(name), gsa, rtol=3e-7, atol=0)
    other.save_pretrained(tmp_path / "again")  # which refused experts with static scales
    with jitquant_layers():
        once_more = Auto.from_pretrained(tmp_path / "again", dtype=BF16)
    assert sqnr(logits(once_more), logits(other)) > 50


def test_an_expert_that_no_token_chose(tmp_path: Path) -> None:
    made = model("Mixtral")
    made.save_pretrained(tmp_path / "bf16")
    found = calibrate(made, [TOKENS])
    place = "model.layers.0.mlp.experts.down_proj"
    found.layers[f"{place}.0"].amax.fill_(96.0)
    del found.layers[f"{place}.2"]
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", format="nvfp4", calibration=found)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for expert in (0, 2):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w2.input_global_scale"
        assert saved[name].item() == 2688 / 96


@pytest.mark.slow
def test_gptq_of_experts_that_files_name_otherwise(tmp_path: Path) -> None:
    made = model("Mixtral")
    made.save_pretrained(tmp_path / "bf16")
    done = quantize_checkpoint(
        tmp_path / "bf16",
        tmp_path / "out",
        rounding="gptq",
        calibration=calibrate(made, [TOKENS]),
    )
    assert done.uncalibrated == []


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts_in_mxfp4(kind: str, tmp_path: Path) -> None:
    """They become `NVFP4Experts` with the same values, and are saved as such."""
    made = model(kind)
    made.save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", format="mxfp4")
    with jitquant_layers():
        back = Auto.from_pretrained(tmp_path / "out", dtype=BF16)
    kinds = {type(m) for m in back.modules()}
    assert {MXFP4Linear, NVFP4Experts} <= kinds
    ours, theirs = (m.model.layers[1].mlp.experts for m in (back, made))
    assert ours.weight_only
    for name in ("gate_up_proj", "down_proj"):
        weight = theirs.get_parameter(name).detach()
        weight = weight.transpose(-2, -1) if kind == "GptOss" else weight
        codes, scales = jitquant.quantize_mxfp4(weight.flatten(0, 1).contiguous(), scaling="even")
        want = jitquant.dequantize_mxfp4(codes, scales, dtype=torch.float32).view(weight.shape)
        assert torch.equal(ours.weight(name).dequantize(torch.float32), want)
    back.save_pretrained(tmp_path / "again")
    with jitquant_layers():
        other = Auto.from_pretrained(tmp_path / "again", dtype=BF16)
    assert torch.equal(logits(other), logits(back))


def test_folders_without_a_layer_say_who_reads_them(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", format="int8")
    with jitquant_layers(), pytest.raises(ValueError, match=r"transformers alone .* read it"):
        Auto.from_pretrained(tmp_path / "out", dtype=BF16)
    exact = logits(Auto.from_pretrained(tmp_path / "bf16", dtype=BF16))
    pytest.importorskip("compressed_tensors")
    assert sqnr(logits(Auto.from_pretrained(tmp_path / "out", dtype=BF16)), exact) > 20


def test_products_in_fp8(folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(folder, tmp_path / "out")
    with jitquant_layers("fp8"):
        made = Auto.from_pretrained(tmp_path / "out", dtype=BF16)
    with jitquant_layers():
        exact = Auto.from_pretrained(tmp_path / "out", dtype=BF16)
    for model, compute in ((made, "fp8"), (exact, "exact")):
        assert {m.compute for m in model.modules() if isinstance(m, NVFP4Linear)} == {compute}


def test_the_library_of_the_layout_reads_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    made = model()
    convert(made, "nvfp4")
    save_compressed_tensors(made, tmp_path)
    with jitquant_layers():
        pass
    other = Auto.from_pretrained(tmp_path, dtype=BF16)
    assert not any(isinstance(m, NVFP4Linear) for m in other.modules())
    assert sqnr(logits(other), logits(made)) > 14


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="recipe: expected one of 'fp8_block', 'nvfp4', 'nvfp4a16',"
    ):
        JitquantConfig("int3")
    model().save_pretrained(tmp_path)
    config = JitquantConfig("nvfp4", targets="mlp", ignore="down_proj")
    made = Auto.from_pretrained(tmp_path, quantization_config=config, dtype=BF16)
    converted = {n for n, m in made.named_modules() if isinstance(m, NVFP4Linear)}
    assert converted == {f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up")}


def test_layers_that_share_a_scale(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    made = Auto.from_pretrained(tmp_path, quantization_config=JitquantConfig(), dtype=BF16)
    config = JitquantConfig(fused_layers=[("q_proj", "k_proj"), ("gate_proj", "up_proj")])
    assert JitquantConfig.from_dict(config.to_dict()).fused_layers == config.fused_layers
    own = Auto.from_pretrained(tmp_path, quantization_config=config, dtype=BF16)
    for of, shared in ((made, True), (own, False)):
        q, k, v = (getattr(of.model.layers[0].self_attn, f"{n}_proj").weight_gsa for n in "qkv")
        assert torch.equal(q, k)
        assert torch.equal(q, v) == shared
    with pytest.raises(TypeError, match="fused_layers: expected a list of tuples"):
        JitquantConfig(fused_layers=("q_proj", "k_proj"))  # type: ignore[arg-type]


def test_scaling_of_what_is_loaded(folder: Path) -> None:
    config = JitquantConfig("mxfp4", scaling="ceil")
    assert JitquantConfig.from_dict(config.to_dict()).scaling == "ceil"
    made = Auto.from_pretrained(folder, quantization_config=config, dtype=BF16)
    want, even = (Auto.from_pretrained(folder, dtype=BF16) for _ in range(2))
    convert(want, "mxfp4", scaling="ceil")
    convert(even, "mxfp4")
    assert torch.equal(logits(made), logits(want))
    assert not torch.equal(logits(made), logits(even))
    with pytest.raises(ValueError, match="scaling: expected 'even' with recipe 'nvfp4', got"):
        JitquantConfig(scaling="ceil")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("nvfp4a16", {"compute": "fp8", "targets": "attention"}),
        ("nvfp4", {"static_input_scales": True, "input_select": "4over6_mse"}),
    ],
)
def test_accuracy_of_what_is_loaded(recipe: Any, how: dict[str, Any], tmp_path: Path) -> None:
    """The calibration comes from a file, as a config is text; all of it is as `convert` has it."""
    plain, folder = model(), tmp_path / "plain"
    plain.save_pretrained(folder)
    found = calibrate(plain, [TOKENS])
    found.save(tmp_path / "found.safetensors")
    how = how | {"rounding": "gptq", "fp8_share": 0.2}
    config = JitquantConfig(recipe, calibration=tmp_path / "found.safetensors", **how)
    assert JitquantConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    made = Auto.from_pretrained(folder, quantization_config=config, dtype=BF16)
    want = Auto.from_pretrained(folder, dtype=BF16)
    done = convert(want, recipe, calibration=found, **how)
    assert done.in_fp8
    assert made.hf_quantizer.done.in_fp8 == done.in_fp8
    assert repr(made) == repr(want)
    assert torch.equal(logits(made), logits(want))


def test_arguments_that_do_not_go_together() -> None:
    with pytest.raises(
        ValueError, match="calibration: expected one with rounding 'gptq', got None"
    ):
        JitquantConfig(rounding="gptq")
    with pytest.raises(
        ValueError, match=r"fp8_share: expected 0 with recipe 'fp8_block', got 0\.1"
    ):
        JitquantConfig("fp8_block", fp8_share=0.1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        JitquantConfig(calibration="nowhere")


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    made = model()
    convert(made, "nvfp4")
    save_compressed_tensors(made, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_packed"
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
    with jitquant_layers(), pytest.raises((ValueError, KeyError), match="up_proj"):
        Auto.from_pretrained(tmp_path, dtype=BF16)


def test_it_generates_with_a_static_cache(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    made = Auto.from_pretrained(tmp_path, quantization_config=JitquantConfig(), dtype=BF16)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    static = made.generate(TOKENS[:, :4], cache_implementation="static", **how)
    assert torch.equal(static, made.generate(TOKENS[:, :4], **how))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4a16", "fp8_block"])
def test_it_generates_under_compile(recipe: Any) -> None:
    """The whole forward is one graph: one for the prompt, and one for every token after it."""
    made = model(num_hidden_layers=1)
    convert(made, recipe)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = made.generate(TOKENS[:, :4], cache_implementation="static", **how)
    counted = CompileCounterWithBackend("aot_eager")
    made.forward = torch.compile(made.forward, fullgraph=True, backend=counted)
    got = made.generate(TOKENS[:, :4], cache_implementation="static", **how)
    assert torch.equal(got, want)
    assert counted.frame_count == 2


@pytest.mark.parametrize("name", ["igonre", "filter"])
def test_a_config_takes_no_other_arguments(name: str) -> None:
    with pytest.raises(TypeError, match=f"arguments of jitquant.nn.convert.* got {name!r}"):
        JitquantConfig("nvfp4a16", **{name: ("x",)})
