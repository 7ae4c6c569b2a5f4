"""Which layers `convert` takes, by name, and which of them share a scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jitquant.nn import convert
from jitquant.nn._targets import families, left_by_default, matches

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("lm_head", {"lm_head", "model.lm_head"}),
        ("model.layers.0.*", {"model.layers.0.mlp.gate", "model.layers.0.q_proj"}),
        ("*_proj", {"model.layers.0.q_proj"}),
        (r"re:.*mlp\.gate$", {"model.layers.0.mlp.gate"}),
        ("model", set()),
    ],
)
def test_patterns(pattern: str, names: set[str]) -> None:
    everything = ["lm_head", "model.lm_head", "model.layers.0.mlp.gate", "model.layers.0.q_proj"]
    assert {name for name in everything if matches(name, (pattern,))} == names


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("lm_head", True),
        ("layers.0.mlp.gate", True),
        ("layers.0.mlp.shared_expert_gate", True),
        ("layers.0.router.layer", True),
        ("layers.0.mlp.gate.wg", True),
        ("layers.61.eh_proj", True),
        ("layers.61.shared_head.head", True),
        ("layers.0.self_attn.indexer.weights_proj", True),
        ("layers.0.self_attn.indexer.wk", True),
        ("layers.0.self_attn.indexer.wq_b", False),
        ("layers.0.self_attn.wk", False),
        ("layers.0.pooling.head", False),
        ("layers.1.mlp.gate.base_layer", False),
        ("layers.1.mlp.gate", False),
        ("layers.2.mlp.gate", True),
        ("layers.0.mlp.gate_proj", False),
        ("head", False),
    ],
)
def test_heads_and_routers_are_left_alone(name: str, left: bool) -> None:
    """A gate beside an up of its shape is a projection."""
    shapes = {"layers.1.mlp.gate": (8, 4), "layers.1.mlp.up": (8, 4)}
    shapes |= {f"layers.1.mlp.{n}.base_layer": (8, 4) for n in ("gate", "up")}
    shapes |= {"layers.2.mlp.gate": (2, 4), "layers.2.mlp.up": (8, 4), name: (8, 4)}
    if name == "layers.2.mlp.gate":
        shapes[name] = (2, 4)
    assert (left_by_default(name, shapes) is not None) is left


def test_families() -> None:
    shapes = {f"a.{n}_proj": (8, 4) for n in "qkvo"} | {"a.up_proj": (8, 4), "b.gate_proj": (8, 4)}
    shapes |= {"c.w1": (8, 4), "c.w3": (8, 4), "c.w2": (4, 8), "seq_proj": (8, 4)}
    assert families(shapes, shapes) == [["a.q_proj", "a.k_proj", "a.v_proj"], ["c.w1", "c.w3"]]
    assert families(shapes, shapes, [("q_proj", "o_proj")]) == [["a.q_proj", "a.o_proj"]]
    assert families(shapes, shapes | {"c.w3": (8, 2)}, [("w1", "w3")]) == []
    assert families(shapes, shapes, ()) == []


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q_proj": nn.Linear(16, 16), "o_proj": nn.Linear(16, 16)})
        self.mlp = nn.ModuleDict({"gate": nn.Linear(16, 4), "down_proj": nn.Linear(16, 16)})
        self.lm_head = nn.Linear(16, 32)


@pytest.mark.parametrize(
    ("how", "replaced"),
    [
        ({}, ["attn.q_proj", "attn.o_proj", "mlp.down_proj"]),
        ({"targets": "attention"}, ["attn.q_proj", "attn.o_proj"]),
        ({"targets": "mlp"}, ["mlp.down_proj"]),
        ({"targets": "mlp", "ignore": ()}, ["mlp.gate", "mlp.down_proj"]),
        ({"targets": ("q_proj", "re:lm_")}, ["attn.q_proj"]),
        ({"targets": ("attention", "down_proj")}, ["attn.q_proj", "attn.o_proj", "mlp.down_proj"]),
        ({"ignore": "o_proj"}, ["attn.q_proj", "mlp.gate", "mlp.down_proj", "lm_head"]),
        ({"filter": lambda name, _: "attn" in name}, ["attn.q_proj", "attn.o_proj"]),
    ],
    ids=["default", "attention", "mlp", "ignore none", "patterns", "both", "ignore", "filter"],
)
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_block"])
def test_convert_takes_them(recipe: str, how: dict[str, object], replaced: list[str]) -> None:
    done = convert(Tiny().to(BF16), recipe, **how)
    assert done.replaced == replaced
    assert set(done.replaced) | set(done.skipped) == {
        *("attn.q_proj", "attn.o_proj", "mlp.gate", "mlp.down_proj", "lm_head")
    }


def test_reasons() -> None:
    done = convert(Tiny().to(BF16), "nvfp4")
    assert done.skipped == {
        "mlp.gate": "a router, left alone by default",
        "lm_head": "a head, left alone by default",
    }
    assert convert(Tiny(), "nvfp4", targets="mlp").skipped["lm_head"] == "none of targets"
    assert convert(Tiny(), "nvfp4", ignore="lm*").skipped["lm_head"] == "named in ignore"


@pytest.mark.parametrize("ignore", [None, (), "dt_proj"])
def test_what_mamba_multiplies_by_itself(ignore: object) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 16, "time_step_rank": 16}
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=16, **sizes)).to(BF16)
    done = convert(mamba.eval(), "nvfp4", ignore=ignore)  # type: ignore[arg-type]
    read = "backbone.layers.0.mixer.dt_proj"
    assert done.skipped[read] == "its weight is read past its forward"
    assert "backbone.layers.0.mixer.in_proj" in done.replaced
    with torch.no_grad():
        assert mamba(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()


def test_errors() -> None:
    with pytest.raises(
        TypeError,
        match=r"filter: expected a function .* got 'lm_head'.*by name use ignore=",
    ):
        convert(Tiny(), "nvfp4", filter="lm_head")
    with pytest.raises(TypeError, match="ignore: expected a name or a pattern, or several, got 3"):
        convert(Tiny(), "nvfp4", ignore=3)
    with pytest.raises(
        ValueError, match=r"ignore: expected a regular expression after 're:', got 're:\('"
    ):
        convert(Tiny(), "nvfp4", ignore=["re:("])
