"""`report`: what each format costs, and that the model is left as it was."""

from __future__ import annotations

import builtins
import json
import math
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant import reference
from jitquant.nn import Float8BlockwiseLinear, MXFP4Linear, NVFP4Linear, _report, report

from .helpers import sqnr

FORMATS = ("nvfp4", "nvfp4_fp8", "fp8_block", "fp8_row", "int8")


class Refolded:
    """What a product in FP8 multiplies by."""

    def __init__(self, w: Tensor) -> None:
        q = jitquant.quantize_weight_nvfp4(w)
        data, scale_inv = reference.nvfp4_refold(q.x_fp4, q.x_sf, q.gsa)
        self.values = data.float() * scale_inv[:, None]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


class Gated(nn.Module):
    """Layers that are called in another order than they were made, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(96, 64)
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96)
        self.unused = nn.Linear(64, 64)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x * scale)) * self.up(x * scale))
        return y


@pytest.fixture
def model() -> Gated:
    torch.manual_seed(0)
    return Gated().to(torch.bfloat16)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("chunk", [1 << 26, 96 * 7])
def test_what_is_measured(model: Gated, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, from the public functions."""
    monkeypatch.setattr(_report, "_CHUNK", chunk)
    x = randn(5, 6, 64)
    found = report(model, x)
    assert found.formats == FORMATS
    assert [layer.name for layer in found.layers] == ["gate", "up", "down"]
    assert found.skipped == {"unused": "its forward was not called"}
    gate = found.layers[0]
    assert (gate.tokens, gate.in_features, gate.out_features) == (30, 64, 96)
    assert gate.input_amax == x.abs().max().item()
    w, rows, int8 = model.gate.weight.detach(), x.reshape(30, 64), {"dtype": torch.int8}
    pairs: dict[str, tuple[Any, Any]] = {
        "nvfp4": (jitquant.quantize_nvfp4(rows), jitquant.quantize_weight_nvfp4(w)),
        "nvfp4_fp8": (jitquant.quantize_fp8(rows, granularity="row"), Refolded(w)),
        "fp8_block": (jitquant.quantize_per_token_group(rows), jitquant.quantize_block(w)),
        "fp8_row": tuple(jitquant.quantize_fp8(t, granularity="row") for t in (rows, w)),
        "int8": (
            jitquant.quantize_per_token_group(rows, **int8),
            jitquant.quantize_block(w, **int8),
        ),
    }
    for name, (a, b) in pairs.items():
        a, b = a.dequantize(torch.float32), b.dequantize(torch.float32)
        assert gate.activation[name] == pytest.approx(sqnr(a, rows))
        assert gate.weight[name] == pytest.approx(sqnr(b, w))
        assert gate.output[name] == pytest.approx(sqnr(a @ b.T, rows.float() @ w.float().T))
    for layer in found.layers:
        assert layer.output["nvfp4"] < layer.output["fp8_row"] < layer.output["int8"]


def test_what_fp8_products_of_a_weight_in_nvfp4_lose() -> None:
    """At most 0.3 dB of the weight's SQNR, whatever its rows are like."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 96, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    with torch.no_grad():
        layers[0].weight.normal_(std=0.02)
        layers[1].weight.copy_(torch.distributions.StudentT(3.0).sample((96, 1024)) * 0.02)
        layers[2].weight.normal_().mul_(torch.logspace(0, -5, 96)[:, None])
    for layer in layers:
        found = report(layer, randn(8, 1024), formats=("nvfp4", "nvfp4_fp8")).layers[0]
        assert found.fp8_loss == found.weight["nvfp4"] - found.weight["nvfp4_fp8"]
        assert 0.1 < found.fp8_loss < 0.3
        assert found.output["nvfp4_fp8"] > found.output["nvfp4"]  # which rounds x to four bits


def test_the_change_by_fp8_products_has_a_sign() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2))).bfloat16()
    nn.init.normal_(model[1].weight)
    found = report(model, randn(8, 512), formats=("nvfp4", "nvfp4_fp8"))
    uniform, normal = (layer.fp8_loss for layer in found.layers)
    assert uniform < 0 < normal
    assert (
        f"FP8 products change the SQNR of weights by {-(uniform + normal) / 2:+.2f} dB, "
        f"at worst -{normal:.2f} (1)" in str(found)
    )


def test_a_layer_that_is_called_twice_is_one(model: Gated) -> None:
    x = randn(10, 64)
    model.up = model.gate
    found = report(nn.Sequential(model, model), x)
    assert [(layer.name, layer.tokens) for layer in found.layers] == [
        ("0.gate", 40),
        ("0.down", 20),
    ]
    with torch.no_grad():
        amax = max(x.abs().max().item(), model(x).abs().max().item())
    assert found.layers[0].input_amax == amax


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "mapping", "user"])
def test_inputs(model: Gated, form: str) -> None:
    x = randn(4, 64)
    inputs: Any = {
        "tensor": x,
        "tuple": (x, 1.0),
        "list": [x],
        "mapping": {"x": x, "scale": 1.0},
        "user": UserDict(x=x),  # what tokenizers give
    }[form]
    assert report(model, inputs).as_dict() == report(model, x).as_dict()


def test_the_model_is_left_alone(model: Gated) -> None:
    x = randn(4, 64).requires_grad_()
    model.train()
    before, state = model(x).detach(), {k: v.clone() for k, v in model.state_dict().items()}
    found = report(model, x)
    assert found.layers
    assert model.training
    assert hooks_of(model) == 0
    assert x.grad is None
    assert torch.equal(model(x), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("where", ["model", "hook", "registration"])
def test_hooks_are_removed_whatever_happens(
    model: Gated, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x: Any = randn(4, 64)
    if where == "model":
        x = randn(4, 65)
    elif where == "hook":
        monkeypatch.setitem(_report.FORMATS, "int8", (lambda x: 1 / 0, lambda w: w))
    else:
        monkeypatch.setattr(model.unused, "register_forward_pre_hook", None)
    with pytest.raises((RuntimeError, ZeroDivisionError, TypeError, ValueError)):
        report(model, x)
    assert hooks_of(model) == 0


def test_what_is_skipped() -> None:
    class Mine(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good = nn.Linear(32, 32)
            self.eight = Float8BlockwiseLinear(32, 32)
            self.four = NVFP4Linear.from_linear(nn.Linear(32, 32))
            self.shared = MXFP4Linear.from_linear(nn.Linear(32, 32))
            self.mine = Mine(32, 32)
            self.wide = nn.Linear(32, 32, dtype=torch.float64)
            self.absent = nn.Linear(32, 32, device="meta")
            self.left = nn.Linear(32, 32)
            self.rowless = nn.Linear(32, 32)
            self.attention = nn.MultiheadAttention(32, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.mine(self.four(self.shared(self.eight(self.good(input=x)))))
            self.rowless(x[:0])
            self.wide(x.double())
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]

    with torch.no_grad():
        found = report(Model().eval(), randn(8, 32).float(), filter=lambda name, _: name != "left")
    assert [layer.name for layer in found.layers] == ["good", "eight"]
    assert found.skipped == {
        "four": "its weight is in NVFP4 already",
        "shared": "its weight is in MXFP4 already",
        "mine": "it is a Mine, which may compute something else",
        "wide": "its weight is torch.float64",
        "absent": "its weight is on meta, without values",
        "left": "refused by filter",
        "rowless": "its input had no rows",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, which may compute "
        "something else",
    }
    assert "not measured: left: refused by filter" in str(found)


def test_infinite_inputs_as_json() -> None:
    found = report(nn.Sequential(nn.Linear(16, 16)), torch.full((4, 16), math.inf))
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert plain["layers"][0]["input_amax"] is None


def test_an_input_that_cannot_be_quantized() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    found = report(model, randn(4, 16).double())
    assert found.skipped == {"0": "its input is torch.float64"}
    assert math.isnan(found.mean("nvfp4"))
    assert "not measured: 0: its input is torch.float64" in str(found)
    with pytest.raises(ValueError, match="report: expected layers that were measured, got none"):
        found.picture("nowhere.png")


def test_autocast_does_not_reach_the_measure(model: Gated) -> None:
    single, x = model.float(), randn(4, 64).float()
    plain = report(single, x).layers[0].output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = report(single, x).layers[0].output
    assert plain == cast


def test_exact_values() -> None:
    """Values that a format holds have no noise; means leave them out."""
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(128))
    found = report(model, torch.ones(3, 128), formats=["fp8_row", "nvfp4"])
    assert found.layers[0].output["nvfp4"] == math.inf
    assert math.isnan(found.mean("nvfp4"))
    assert found.lowest("nvfp4") == math.inf
    assert json.loads(json.dumps(found.as_dict()))["layers"][0]["output"]["nvfp4"] is None


def test_table_and_picture(model: Gated, tmp_path: Path) -> None:
    found = report(nn.ModuleDict({"a": model}).a, randn(8, 64))
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    for name in (*FORMATS, "gate", "8x64x96", "mean", "lowest"):
        assert name in text
    assert f"{found.layers[1].output['int8']:.1f}" in text
    losses = [layer.fp8_loss for layer in found.layers]
    most = max(losses)
    name = found.layers[losses.index(most)].name
    assert f" dB, at worst {-most:+.2f} ({name})" in text
    of_weights = found.table("weight")
    assert of_weights.title == "SQNR of the weight in dB"
    *_, change = of_weights.columns
    assert list(change.cells)[:3] == [f"{-loss:+.2f}" for loss in losses]
    assert found.as_dict()["layers"][0]["fp8_loss"] == losses[0]
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        found.picture(tmp_path / f"p{ending}")
        assert (tmp_path / f"p{ending}").read_bytes().startswith(start)
    found.picture(tmp_path / "w.png", of="weight")
    assert _report._short(["m.l.0.a.q", "m.l.1.b"]) == ["0.a.q", "1.b"]
    assert _report._short(["a.b"]) == ["b"]


def test_without_matplotlib(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    found = report(model, randn(8, 64), formats="fp8_row")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"a picture needs matplotlib.*pip install matplotlib"):
        found.picture("nowhere.png")


def test_errors(model: Gated) -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got int"):
        report(3, randn(4, 64))
    with pytest.raises(
        ValueError, match="formats: expected one of 'nvfp4', 'nvfp4_fp8', 'fp8_block', 'fp8_row',"
    ):
        report(model, randn(4, 64), formats=["fp4"])
    found = report(model, randn(4, 64), formats=["int8"])
    assert math.isnan(found.layers[0].fp8_loss)
    assert found.as_dict()["layers"][0]["fp8_loss"] is None
    assert "FP8 products" not in str(found)
    with pytest.raises(ValueError, match="format: expected 'int8', got 'nvfp4'"):
        found.mean("nvfp4")
    with pytest.raises(
        ValueError, match="of: expected one of 'output', 'activation', 'weight', got 'bias'"
    ):
        found.table("bias")


def test_what_is_counted() -> None:
    """Also what no linear has, such as experts of three dimensions."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.lm_head = nn.Linear(32, 16), nn.Linear(16, 8, bias=False)
            self.experts = nn.Parameter(torch.zeros(4, 16, 32))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.lm_head(self.inner(x))
            return y

    found = report(Model(), torch.randn(4, 32), filter=lambda name, _: name == "inner")
    assert found.elements == 32 * 16
    assert found.left == {"experts": 4 * 16 * 32, "inner.bias": 16, "lm_head.weight": 16 * 8}
    assert found.model_elements == found.elements + sum(found.left.values())
    assert (found.weight_bytes, found.model_bytes) == (4 * 512, 4 * 2704)
    assert "512 of 2,704 parameters measured (18.9%), 0.0 MiB of 0.0 MiB" in str(found)
    assert "not measured: experts: 2,048 parameters in no linear" in str(found)
