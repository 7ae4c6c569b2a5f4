"""`NVFP4Linear` on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.nn import NVFP4Linear, _matmul, _nvfp4_mm, convert
from jitquant.tensors.nvfp4 import QuantizedActivation

from .helpers import sqnr

BF16 = torch.bfloat16


def linear(cols: int = 256, out: int = 384, *, bias: bool = True, dtype: Any = BF16) -> nn.Linear:
    made = nn.Linear(cols, out, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(randn(out, cols, seed=1) * cols**-0.5)
        if bias:
            made.bias.copy_(randn(out, seed=2))
    return made.eval()


def expected(made: NVFP4Linear, q: QuantizedActivation) -> Tensor:
    """What the layer stands for, in float64."""
    y = q.dequantize(torch.float32).double() @ made.weight.dequantize(torch.float32).double().T
    return y if made.bias is None else y + made.bias.double()


@pytest.mark.parametrize("leading", [(64,), (2, 3, 5), (1,), ()], ids=str)
@pytest.mark.parametrize(("cols", "out"), [(256, 384), (100, 7), (16, 1), (1, 33)])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_forward(leading: tuple[int, ...], cols: int, out: int, granularity: Any) -> None:
    made = NVFP4Linear.from_linear(linear(cols, out), granularity=granularity)
    x = randn(*leading, cols)
    y = made(x)
    assert y.shape == (*leading, out)
    assert y.dtype == BF16
    want = expected(made, jitquant.quantize_nvfp4(x, granularity=granularity))
    assert torch.equal(y, want.to(BF16)) or sqnr(y, want) > 45  # a rounding to bf16
    assert sqnr(made.float()(x.float()), want) > 110  # exact but for the sum in fp32


@pytest.mark.parametrize("training", [False, True])
def test_the_input_has_the_gradient_of_the_dequantized_weight(training: bool) -> None:
    made = NVFP4Linear.from_linear(linear(100, 56)).train(training)
    before = nn.Linear(24, 100, dtype=BF16)
    x, grad = randn(2, 5, 24), randn(2, 5, 56, seed=1)
    h = before(x)
    h.retain_grad()
    y = made(h)
    y.backward(grad)
    assert torch.equal(y.detach(), made(h.detach()))
    assert torch.equal(h.grad, grad @ made.weight.dequantize(BF16))
    assert before.weight.grad is not None
    assert all(p.grad is None for p in made.parameters())
    with torch.no_grad():
        assert not made(h).requires_grad
    with pytest.raises(RuntimeError, match="requires grad, and a call with out="):
        made(h, out=torch.empty_like(y))


def test_the_gradient_under_autocast_and_compiled() -> None:
    made = NVFP4Linear.from_linear(linear(64, 32))
    x = randn(8, 64).float().requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        y = made(x)
    assert y.dtype == BF16
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    want, x.grad = x.grad, None
    x = x.detach().to(BF16).requires_grad_()
    torch.compile(made, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert sqnr(x.grad, want) > 40


def test_dtypes_are_those_of_a_linear() -> None:
    made, x = NVFP4Linear.from_linear(linear(64, 32)), randn(8, 64)
    with pytest.raises(
        TypeError, match=r"x: expected torch\.bfloat16, as the layer has, got torch\.float32"
    ):
        made(x.float())
    with torch.autocast("cpu", dtype=BF16):
        assert made(x.float()).dtype == BF16


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_pickle(scale_layout: Any) -> None:
    made, x = NVFP4Linear.from_linear(linear(64, 32), scale_layout=scale_layout), randn(8, 64)
    for back in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert back.weight_scale.dtype == torch.float8_e4m3fn
        assert torch.equal(back(x), made(x))


def test_an_exported_program_is_saved() -> None:
    made, x = NVFP4Linear.from_linear(linear(64, 32)), randn(8, 64)
    program = torch.export.export(made, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again, other = torch.export.load(file).module(), randn(5, 64, seed=2)
    assert torch.equal(again(other), made(other))


def test_against_the_linear() -> None:
    plain = linear()
    ratio = sqnr(NVFP4Linear.from_linear(plain)(randn(512, 256)), plain(randn(512, 256)).detach())
    assert 15 < ratio < 25, ratio  # two operands of four bits


PRODUCERS = {
    "tensor": lambda x: jitquant.quantize_nvfp4(x),
    "row": lambda x: jitquant.quantize_nvfp4(x, granularity="row"),
    "static": lambda x: jitquant.quantize_nvfp4(x, 0.002),
    "vllm": lambda x: jitquant.quantize_nvfp4(x, recipe="vllm"),
    "swizzled": lambda x: jitquant.quantize_nvfp4(x, scale_layout="swizzled_128x4"),
    "swizzled_rows": lambda x: jitquant.quantize_nvfp4(
        x, granularity="row", scale_layout="swizzled_128x4"
    ),
    "norm": lambda x: jitquant.rmsnorm_quantize_nvfp4(x, torch.ones(x.shape[-1], dtype=x.dtype)),
    "swiglu": lambda x: jitquant.deinterleave_quantize_nvfp4(
        torch.cat((x, x), -1), x.shape[-1], interleave=0
    ),
    "mhc": lambda x: jitquant.mhc_rmsnorm_quantize_nvfp4(
        torch.stack((x, x), -2),
        torch.ones(*x.shape[:-1], 2, dtype=x.dtype),
        torch.ones(x.shape[-1], dtype=x.dtype),
    ),
    "one_row_gsa": lambda x: jitquant.quantize_nvfp4(x, torch.rand(x[..., 0].numel()) / 500 + 1e-3),
    "buffers": lambda x: jitquant.quantize_nvfp4(x, out=QuantizedActivation.empty(x.shape)),
    "slice": lambda x: jitquant.quantize_nvfp4(torch.cat((x, x)))[: len(x)],
}


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_any_producer(producer: str, scale_layout: Any) -> None:
    made = NVFP4Linear.from_linear(linear(104, 72), scale_layout=scale_layout)
    q = PRODUCERS[producer](randn(2, 65, 104))
    y = made.run_from_quantized(q, dtype=torch.float32)
    assert y.shape == (2, 65, 72)
    assert sqnr(y, expected(made, q)) > 110


def test_one_activation_feeds_three() -> None:
    q = jitquant.quantize_nvfp4(x := randn(4, 256))
    for out in (64, 32, 48):
        made = NVFP4Linear.from_linear(linear(256, out))
        assert torch.equal(made.run_from_quantized(q), made(x))


def test_weight_is_packed() -> None:
    plain = linear(4096, 256)
    made = NVFP4Linear.from_linear(plain)
    # What is held: storages, however large the views of them are.
    stored = sum(b.untyped_storage().nbytes() for b in made.buffers())
    assert stored == 4096 * 256 * 0.5625 + 4
    assert stored < 0.3 * plain.weight.untyped_storage().nbytes()
    assert not [t for t in vars(made).values() if isinstance(t, Tensor)]  # and nowhere else
    assert [name for name, _ in made.named_parameters()] == ["bias"]
    want = jitquant.quantize_weight_nvfp4(plain.weight.detach())
    assert torch.equal(made.weight.x_fp4_bytes, want.x_fp4_bytes)
    assert torch.equal(made.weight.x_sf_bytes, want.x_sf_bytes)
    assert torch.equal(made.weight.gsa, want.gsa)
    made.weight.validate()


def test_the_linear_is_left_alone() -> None:
    plain = linear()
    before = plain.weight.detach().clone()
    made = NVFP4Linear.from_linear(plain)
    with torch.no_grad():
        made.bias.zero_()
    assert plain.bias.abs().sum() > 0
    assert torch.equal(plain.weight, before)


@pytest.mark.parametrize("source", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("target", ["linear", "swizzled_128x4"])
def test_state_dict(source: Any, target: Any, tmp_path: Path) -> None:
    """The same in every layout, through torch.save and safetensors."""
    made = NVFP4Linear.from_linear(linear(104, 72), scale_layout=source)
    state, x = made.state_dict(), randn(4, 104)
    assert list(state) == ["bias", "weight_packed", "weight_scale", "weight_gsa"]
    assert state["weight_scale"].shape == (72, 7)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    save_file(state, tmp_path / "layer.safetensors")
    for loaded in (torch.load(file), load_file(tmp_path / "layer.safetensors")):
        back = NVFP4Linear(104, 72, dtype=BF16, scale_layout=target)
        back.load_state_dict(loaded)
        assert back.scale_layout == target
        assert torch.equal(back(x), made(x))
    with torch.device("meta"):
        empty = nn.Sequential(NVFP4Linear(104, 72, dtype=BF16, scale_layout=target))
    empty.load_state_dict({f"0.{name}": part for name, part in state.items()}, assign=True)
    assert torch.equal(empty(x), made(x))
    with pytest.raises(RuntimeError, match="weight_scale"):
        NVFP4Linear(120, 72, scale_layout=target).load_state_dict(state)


def test_a_state_dict_that_does_not_fit_leaves_no_static_input() -> None:
    made, x = NVFP4Linear.from_linear(linear()), randn(4, 256)
    want = made(x)
    with pytest.raises(RuntimeError, match="size mismatch for input_gsa"):
        made.load_state_dict({**made.state_dict(), "input_gsa": torch.ones(3)})
    assert made.input_gsa is None
    assert torch.equal(made(x), want)


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_to(scale_layout: Any) -> None:
    made = NVFP4Linear.from_linear(linear(), scale_layout=scale_layout)
    bytes_before = [b.view(torch.uint8).clone() for b in made.buffers()]
    for move in (
        lambda m: m.half(),
        lambda m: m.to(torch.float32),
        lambda m: m.type(torch.float16),
        lambda m: m.bfloat16(),
    ):
        move(made)
        assert made.bias.dtype == made.dtype
        assert made.weight_scale.dtype == torch.float8_e4m3fn
        assert made.weight_gsa.dtype == torch.float32
        for buffer, before in zip(made.buffers(), bytes_before, strict=True):
            assert torch.equal(buffer.view(torch.uint8), before)
    x = randn(4, 256)
    assert torch.equal(copy.deepcopy(made)(x), made(x))
    assert made.to("meta")(x.to("meta")).shape == (4, 384)
    assert made.to_empty(device="cpu").weight_scale.shape == bytes_before[1].shape


def test_dtype() -> None:
    made, q = NVFP4Linear.from_linear(linear(bias=False)), jitquant.quantize_nvfp4(randn(4, 256))
    assert made.run_from_quantized(q).dtype == BF16
    assert made.half().run_from_quantized(q).dtype == torch.float16
    assert made.run_from_quantized(q, dtype=torch.float32).dtype == torch.float32
    with torch.autocast("cpu", dtype=BF16):
        assert made(randn(4, 256).float()).dtype == BF16
        exact = made.run_from_quantized(q, dtype=torch.float32)
    assert torch.equal(exact, made.run_from_quantized(q, dtype=torch.float32))


def test_out() -> None:
    made, x = NVFP4Linear.from_linear(linear()), randn(2, 3, 256)
    out = torch.full((2, 3, 384), torch.nan, dtype=BF16)
    assert made(x, out=out) is out
    assert torch.equal(out, made(x))
    q = jitquant.quantize_nvfp4(x)
    wide = torch.full((2, 3, 384), torch.nan)
    assert made.run_from_quantized(q, out=wide) is wide
    assert torch.equal(wide, made.run_from_quantized(q, dtype=torch.float32))


@pytest.mark.parametrize("leading", [(3, 2), (5,), ()], ids=str)
@pytest.mark.parametrize("weight_only", [False, True])
def test_residual(leading: tuple[int, ...], weight_only: bool) -> None:
    """It is added to the sum before the one rounding."""
    made = NVFP4Linear.from_linear(linear(104, 72), weight_only=weight_only)
    x, residual = randn(*leading, 104), randn(*leading, 72, seed=3)
    wide = made.run_from_quantized(q := jitquant.quantize_nvfp4(x), dtype=torch.float32)
    got = made.run_from_quantized(q, residual=residual)
    assert torch.equal(got, (wide + residual.float()).to(BF16))
    if weight_only:
        wide = x.float() @ made.weight.dequantize(torch.float32).T + made.bias.float()
    assert sqnr(made(x, residual=residual), wide + residual.float()) > 45
    out = torch.empty_like(residual)
    assert made(x, residual=residual, out=out) is out
    assert torch.equal(out, made(x, residual=residual))


def test_gradient_of_a_residual_beside_a_quantized_input() -> None:
    made = NVFP4Linear.from_linear(linear(104, 72))
    q, residual = jitquant.quantize_nvfp4(randn(3, 104)), randn(3, 72, seed=3).requires_grad_()
    y = made.run_from_quantized(q, residual=residual)
    assert torch.equal(y, made.run_from_quantized(q, residual=residual.detach()))
    y.backward(grad := randn(3, 72, seed=4))
    assert residual.grad is not None
    assert torch.equal(residual.grad, grad)
    with pytest.raises(RuntimeError, match="a call with out= has no gradient"):
        made.run_from_quantized(q, residual=residual, out=torch.empty_like(residual))


@pytest.mark.parametrize("assign", [False, True])
def test_scales_that_are_loaded_as_bytes(assign: bool) -> None:
    made, other = (NVFP4Linear.from_linear(linear(bias=False)) for _ in range(2))
    state = made.state_dict()
    with torch.no_grad():
        other.weight_scale.view(torch.uint8).zero_()
    as_bytes = {**state, "weight_scale": state["weight_scale"].view(torch.uint8)}
    other.load_state_dict(as_bytes, assign=assign)
    assert other.weight_scale.dtype == made.weight_scale.dtype
    assert torch.equal(other(randn(3, 256)), made(randn(3, 256)))
    before = other.weight_packed.clone()
    wrong = {**state, "weight_packed": torch.zeros_like(before), "weight_gsa": torch.ones(1).half()}
    with pytest.raises(
        RuntimeError, match=r"weight_gsa: expected torch.float32, got torch.float16"
    ):
        other.load_state_dict(wrong, assign=assign)
    assert torch.equal(other.weight_packed, before)


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_weight_only(scale_layout: Any, dtype: torch.dtype) -> None:
    how = {"scale_layout": scale_layout, "weight_only": True}
    made = NVFP4Linear.from_linear(linear(100, 72, dtype=dtype), **how)
    weight = made.weight.dequantize(torch.float32).double()
    for x in (randn(3, 5, 100), randn(6, 4, 100)[::2, ::3], randn(100, 5).t(), randn(0, 100)):
        x = x.to(dtype)
        y = made(x)
        assert y.dtype == dtype
        assert y.shape == (*x.shape[:-1], 72)
        assert sqnr(y, x.double() @ weight.T + made.bias.double()) > 45
    assert "weight_only=True" in repr(made)
    with pytest.raises(
        TypeError, match=r"x: expected bfloat16 or float16 with weight_only, got torch\.float32"
    ):
        made.float()(randn(3, 100).float())
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(made(randn(3, 100).float()), made(randn(3, 100)))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_many_rows_in_fp8(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 256 rows on, and with the numbers of the op on a device that has no kernels for it."""
    made = NVFP4Linear.from_linear(linear(100, 72, dtype=dtype), weight_only=True, compute="fp8")
    exact = NVFP4Linear.from_linear(linear(100, 72, dtype=dtype), weight_only=True)
    few, many = randn(255, 100).to(dtype), randn(4, 64, 100).to(dtype)
    assert torch.equal(made(few), exact(few))
    want = jitquant.nvfp4_linear(many, made.weight, made.bias, compute="fp8")
    assert torch.equal(made(many), want)
    out = torch.empty_like(want)
    assert made(many, out=out) is out
    assert torch.equal(out, want)
    assert 25 < sqnr(want, exact(many)) < 40
    monkeypatch.setattr(_nvfp4_mm, "takes_fp8", lambda *_: False)
    residual = randn(4, 64, 72).to(dtype)
    without = made(many, residual=residual)
    want = jitquant.nvfp4_linear(many, made.weight, made.bias, residual=residual, compute="fp8")
    # Rounded where the kernels round: what differs are sums in another order.
    assert (without != want).float().mean() < 0.01
    swizzled = NVFP4Linear.from_linear(
        linear(100, 72, dtype=dtype),
        weight_only=True,
        compute="fp8",
        scale_layout="swizzled_128x4",
    )
    assert torch.equal(swizzled(many), made(many))
    assert "compute='fp8'" in repr(made)
    with pytest.raises(
        ValueError, match="compute: expected 'exact' without weight_only, got 'fp8'"
    ):
        NVFP4Linear(64, 64, compute="fp8")


def test_weight_only_keeps_linear_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitquant.nn.nvfp4.has_microscaling", lambda device: True)
    assert NVFP4Linear(64, 64, weight_only=True).scale_layout == "linear"


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("bias", [False, True])
def test_joined(scale_layout: Any, bias: bool) -> None:
    """The values of every weight, in one product."""
    gsa = torch.tensor([0.001])
    how = {"scale_layout": scale_layout, "granularity": "row", "gsa": gsa}
    layers = [NVFP4Linear.from_linear(linear(104, n, bias=bias), **how) for n in (40, 130, 7)]
    made = NVFP4Linear.joined(layers)
    weights = torch.cat([layer.weight.dequantize(torch.float32) for layer in layers])
    assert torch.equal(made.weight.dequantize(torch.float32), weights)
    assert made.scale_layout == scale_layout
    assert not made.training
    q = jitquant.quantize_nvfp4(randn(5, 104))
    apart = torch.cat([layer.run_from_quantized(q) for layer in layers], dim=-1)
    torch.testing.assert_close(made.run_from_quantized(q), apart)


def test_what_cannot_be_joined() -> None:
    made = NVFP4Linear.from_linear(linear(64, 32))
    other = NVFP4Linear.from_linear(linear(64, 32, bias=False))
    with pytest.raises(ValueError, match="layers: expected one or more layers, got none"):
        NVFP4Linear.joined([])
    with pytest.raises(
        ValueError, match=r"layers\[1\]\.in_features: expected 64, as layers\[0\] has, got 32"
    ):
        NVFP4Linear.joined([made, NVFP4Linear.from_linear(linear(32, 32))])
    with pytest.raises(
        ValueError, match=r"layers: expected a bias in all layers or in none, got layers\[0\] and"
    ):
        NVFP4Linear.joined([made, other])
    wide = linear(64, 32)
    with torch.no_grad():
        wide.weight.mul_(3)
    with pytest.raises(
        ValueError,
        match=r"layers\[1\]\.weight_gsa: .* as layers\[0\] has, .*one call of convert",
    ):
        NVFP4Linear.joined([made, NVFP4Linear.from_linear(wide)])


def test_zeros_and_no_rows() -> None:
    plain = linear(bias=False)
    made = NVFP4Linear.from_linear(plain)
    assert (made(torch.zeros(3, 256, dtype=BF16)) == 0).all()
    assert made(torch.zeros(2, 0, 256, dtype=BF16)).shape == (2, 0, 384)
    with torch.no_grad():
        plain.weight.zero_()
    assert (NVFP4Linear.from_linear(plain)(randn(3, 256)) == 0).all()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.slow
def test_compile() -> None:
    made = NVFP4Linear.from_linear(linear(104, 72), granularity="row")
    other = NVFP4Linear.from_linear(linear(104, 40))

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        q = jitquant.quantize_nvfp4(x + 1)
        return made(x + 1), other.run_from_quantized(q)

    with torch.no_grad():
        got = torch.compile(f, fullgraph=True)(randn(5, 104))
        assert all(map(torch.equal, got, f(randn(5, 104))))


@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_with_out() -> None:
    made = NVFP4Linear.from_linear(linear(104, 72))
    as_it_is = NVFP4Linear.from_linear(linear(104, 72), weight_only=True)
    residual = randn(5, 72, seed=3)

    def f(x: Tensor, *out: Tensor) -> None:
        made(x, out=out[0])
        made.run_from_quantized(jitquant.quantize_nvfp4(x), residual=residual, out=out[1])
        as_it_is(x, residual=residual, out=out[2])

    got, want = (tuple(torch.empty(5, 72, dtype=BF16) for _ in range(3)) for _ in range(2))
    with torch.no_grad():
        torch.compile(f, fullgraph=True)(randn(5, 104), *got)
        f(randn(5, 104), *want)
    assert all(map(torch.equal, got, want))


def test_the_layout_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NVFP4Linear(64, 64).scale_layout == "linear"
    monkeypatch.setattr("jitquant.nn.nvfp4.has_microscaling", lambda device: True)
    assert NVFP4Linear(64, 64).scale_layout == "swizzled_128x4"
    assert _matmul.has_microscaling(torch.device("cpu")) is False


def test_errors() -> None:
    made = NVFP4Linear.from_linear(linear())
    x = randn(4, 256)
    q = jitquant.quantize_nvfp4(x)
    with pytest.raises(
        ValueError, match=r"x: expected shape \(\.\.\., 256\), got shape \(4, 255\)"
    ):
        made(x[:, :255])
    with pytest.raises(
        TypeError, match=r"x: expected torch\.bfloat16, as the layer has, got torch\.float64"
    ):
        made(x.double())
    with pytest.raises(TypeError, match=r"x: expected a torch\.Tensor, got NVFP4Tensor"):
        made(q)
    with pytest.raises(TypeError, match="q: expected an NVFP4Tensor, got Tensor"):
        made.run_from_quantized(x)
    with pytest.raises(
        ValueError, match=r"q: expected shape \(\.\.\., 256\), got shape \(4, 240\)"
    ):
        made.run_from_quantized(jitquant.quantize_nvfp4(x[:, :240]))
    with pytest.raises(
        ValueError, match=r"q\.dim: expected -1 \(packed along the last dimension\), got 0"
    ):
        made.run_from_quantized(jitquant.quantize_weight_nvfp4(x.T.contiguous(), dim=0))
    with pytest.raises(
        ValueError, match="q: expected a tensor on cpu, as the layer is, got one on meta"
    ):
        made.run_from_quantized(q.to("meta"))
    with pytest.raises(
        TypeError, match=r"dtype: expected bfloat16, float16 or float32, got torch\.float64"
    ):
        made.run_from_quantized(q, dtype=torch.float64)
    for out, error in (
        (torch.empty(4, 384), TypeError),
        (torch.empty(4, 383, dtype=BF16), ValueError),
        (torch.empty(384, 4, dtype=BF16).T, ValueError),
    ):
        with pytest.raises(error, match="out"):
            made(x, out=out)
    for name in ("out", "residual"):
        for call, of in ((made, x), (made.run_from_quantized, q)):
            with pytest.raises(TypeError, match=rf"{name}: expected a torch\.Tensor, got list"):
                call(of, **{name: [1]})
    for arguments in ({"in_features": 0}, {"granularity": "block"}, {"scale_layout": "row"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            NVFP4Linear(**{"in_features": 16, "out_features": 16, **arguments})
    with pytest.raises(TypeError, match=r"torch\.float64"):
        NVFP4Linear(16, 16, dtype=torch.float64)
    with pytest.raises(
        TypeError,
        match=r"linear: expected torch\.nn\.Linear itself, got NonDynamicallyQuantizableLinear",
    ):
        NVFP4Linear.from_linear(nn.MultiheadAttention(16, 2).out_proj)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("weight: expected an NVFP4Tensor, got Tensor", {"weight": randn(128, 64)}),
        (
            "weight.scale_layout: expected 'linear', got 'swizzled_128x4'",
            {
                "weight": jitquant.quantize_weight_nvfp4(
                    randn(128, 64), scale_layout="swizzled_128x4"
                )
            },
        ),
        (
            "weight.granularity: expected 'tensor', got 'row'",
            {"weight": jitquant.quantize_nvfp4(randn(128, 64), granularity="row")},
        ),
        (
            "weight.shape: expected (128, 64), got (16, 64)",
            {"weight": jitquant.quantize_weight_nvfp4(randn(16, 64))},
        ),
        (
            "weight.dim: expected -1, got 0",
            {"weight": jitquant.quantize_weight_nvfp4(randn(128, 64), dim=0)},
        ),
        ("input_gsa: expected a torch.Tensor, got float", {"input_gsa": 0.1}),
        ("input_gsa: expected float32, got torch.int64", {"input_gsa": torch.tensor([1])}),
        ("input_gsa: expected shape (1,), amax / 2688", {"input_gsa": torch.ones(2)}),
    ],
)
def test_parts_that_do_not_fit_the_linear(words: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        NVFP4Linear.from_linear(linear(64, 128), **arguments)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("static", [False, True])
def test_inputs_by_4over6(granularity: Any, static: bool) -> None:
    """As `quantize_nvfp4` selects their scales: closer to the exact product, exported too."""
    how: dict[str, Any] = {"granularity": granularity}
    if static:
        how["input_gsa"] = torch.tensor([0.002])
    nearest = NVFP4Linear.from_linear(linear(96, 64), **how)
    made = NVFP4Linear.from_linear(linear(96, 64), input_select="4over6_mse", **how)
    x = randn(300, 96)
    gsa = how.get("input_gsa")
    q = jitquant.quantize_nvfp4(x, gsa, granularity=granularity, select="4over6_mse")
    assert torch.equal(made(x), made.run_from_quantized(q))
    want = x.float() @ made.weight.dequantize(torch.float32).T + made.bias.float()
    assert sqnr(made(x), want) > sqnr(nearest(x), want) + 0.3
    assert NVFP4Linear.joined([made, made]).input_select == "4over6_mse"
    with pytest.raises(
        ValueError,
        match=r"layers\[1\]\.input_select: expected '4over6_mse', as layers\[0\] has, got 'none'",
    ):
        NVFP4Linear.joined([made, nearest])
    exported = torch.export.export(made, (x,)).module()
    assert torch.equal(exported(x), made(x))


def test_input_select_is_for_inputs_that_are_quantized() -> None:
    with pytest.raises(
        ValueError, match="input_select: expected 'none' with weight_only=True and recipe='te', got"
    ):
        NVFP4Linear(32, 32, weight_only=True, input_select="static_4")
    with pytest.raises(
        ValueError,
        match="input_select: expected 'none' with weight_only=False and recipe='vllm', got",
    ):
        NVFP4Linear(32, 32, recipe="vllm", input_select="4over6_mae")
    with pytest.raises(
        ValueError, match="input_select: expected one of 'none', '4over6_mae', '4over6_mse',"
    ):
        NVFP4Linear(32, 32, input_select="best")
    model = nn.Sequential(linear(32, 32))
    with pytest.raises(
        ValueError, match="input_select: expected 'none' with recipe 'fp8_block', got '4over6_mae'"
    ):
        convert(model, "fp8_block", input_select="4over6_mae")
    convert(model, "nvfp4", input_select="4over6_mae")
    assert model[0].input_select == "4over6_mae"
