"""`NVFP4Linear` on the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.nn import NVFP4Linear, Workspace, _matmul
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
    assert sqnr(made(x.float()), want) > 110  # exact but for the sum in fp32
    assert not made(x.requires_grad_()).requires_grad


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
        torch.cat((x, x), -1), x.shape[-1], halves=True
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


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_to(scale_layout: Any) -> None:
    made = NVFP4Linear.from_linear(linear(), scale_layout=scale_layout)
    bytes_before = [b.view(torch.uint8).clone() for b in made.buffers()]
    for move in (lambda m: m.half(), lambda m: m.to(torch.float32), lambda m: m.bfloat16()):
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


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("leading", [(3, 2), (5,), ()], ids=str)
def test_workspace(granularity: Any, scale_layout: Any, leading: tuple[int, ...]) -> None:
    """One for layers of several sizes, over whatever an earlier call left in it."""
    how = {"granularity": granularity, "scale_layout": scale_layout}
    layers = nn.Sequential(
        NVFP4Linear.from_linear(linear(104, 72), **how),
        NVFP4Linear.from_linear(linear(72, 304, bias=False), **how),
    )
    workspace = Workspace(layers, rows=6)
    assert workspace.buffer.numel() == max(layer.workspace_bytes(6) for layer in layers)
    workspace.buffer.fill_(255)
    for layer in (layers[1], layers[0], layers[1]):
        x = randn(*leading, layer.in_features)
        out = torch.full((*leading, layer.out_features), torch.nan, dtype=BF16)
        assert layer(x, out=out, workspace=workspace) is out
        assert torch.equal(out, layer(x))
        assert torch.equal(layer(x, workspace=workspace), out)
        q = jitquant.quantize_nvfp4(x, granularity=granularity)
        out.fill_(torch.nan)
        assert layer.run_from_quantized(q, out=out, workspace=workspace) is out
        assert torch.equal(out, layer.run_from_quantized(q))
    assert layers[0](randn(0, 104), workspace=workspace).shape == (0, 72)


def test_workspace_errors() -> None:
    small, large = (NVFP4Linear.from_linear(linear(64, out)) for out in (32, 96))
    workspace = Workspace([small], rows=4)
    with pytest.raises(ValueError, match=r"workspace has \d+ bytes on cpu; accepted .* 5 rows"):
        small(randn(5, 64), workspace=workspace)
    with pytest.raises(ValueError, match="at least"):
        large(randn(4, 64), workspace=workspace)
    with pytest.raises(ValueError, match="on meta"):
        copy.deepcopy(small).to("meta")(randn(4, 64).to("meta"), workspace=workspace)
    with pytest.raises(ValueError, match="rows is 0"):
        Workspace(small, rows=0)
    with pytest.raises(ValueError, match="are none"):
        Workspace(nn.Linear(3, 3), rows=1)
    with pytest.raises(ValueError, match="are on cpu, meta"):
        Workspace([small, large.to("meta")], rows=1)


def test_zeros_and_no_rows() -> None:
    plain = linear(bias=False)
    made = NVFP4Linear.from_linear(plain)
    assert (made(torch.zeros(3, 256, dtype=BF16)) == 0).all()
    assert made(torch.zeros(2, 0, 256, dtype=BF16)).shape == (2, 0, 384)
    with torch.no_grad():
        plain.weight.zero_()
    assert (NVFP4Linear.from_linear(plain)(randn(3, 256)) == 0).all()


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
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
    workspace = Workspace(made, rows=5)
    workspace.buffer.fill_(255)

    def f(x: Tensor, out: Tensor) -> None:
        made(x, out=out, workspace=workspace)
        q = jitquant.quantize_nvfp4(x)
        made.run_from_quantized(q, out=out, workspace=workspace)

    with torch.no_grad():
        torch.compile(f, fullgraph=True)(randn(5, 104), out := torch.empty(5, 72, dtype=BF16))
    assert torch.equal(out, made(randn(5, 104)))
    assert (workspace.buffer == 255).all()  # Inductor plans memory itself


def test_the_layout_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NVFP4Linear(64, 64).scale_layout == "linear"
    monkeypatch.setattr("jitquant.nn.nvfp4.has_nvfp4", lambda device: True)
    assert NVFP4Linear(64, 64).scale_layout == "swizzled_128x4"
    assert _matmul.has_nvfp4(torch.device("cpu")) is False


def test_errors() -> None:
    made = NVFP4Linear.from_linear(linear())
    x = randn(4, 256)
    q = jitquant.quantize_nvfp4(x)
    with pytest.raises(ValueError, match=r"x has shape \(4, 255\); accepted is \(\.\.\., 256\)"):
        made(x[:, :255])
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        made(x.double())
    with pytest.raises(TypeError, match="q is Tensor; accepted is a QuantizedActivation"):
        made.run_from_quantized(x)
    with pytest.raises(ValueError, match=r"q has shape \(4, 240\)"):
        made.run_from_quantized(jitquant.quantize_nvfp4(x[:, :240]))
    with pytest.raises(ValueError, match=r"q\.dim is 0"):
        made.run_from_quantized(jitquant.quantize_weight_nvfp4(x.T.contiguous(), dim=0))
    with pytest.raises(ValueError, match="q is on meta"):
        made.run_from_quantized(q.to("meta"))
    with pytest.raises(TypeError, match=r"dtype is torch\.float64"):
        made.run_from_quantized(q, dtype=torch.float64)
    for out, error in (
        (torch.empty(4, 384), TypeError),
        (torch.empty(4, 383, dtype=BF16), ValueError),
        (torch.empty(384, 4, dtype=BF16).T, ValueError),
    ):
        with pytest.raises(error, match="out"):
            made(x, out=out)
    with pytest.raises(RuntimeError, match="NVFP4Linear has no gradient"):
        made.train()(x.requires_grad_())
    for arguments in ({"in_features": 0}, {"granularity": "block"}, {"scale_layout": "row"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            NVFP4Linear(**{"in_features": 16, "out_features": 16, **arguments})
    with pytest.raises(TypeError, match=r"torch\.float64"):
        NVFP4Linear(16, 16, dtype=torch.float64)
    with pytest.raises(TypeError, match="accepted is torch"):
        NVFP4Linear.from_linear(nn.MultiheadAttention(16, 2).out_proj)
