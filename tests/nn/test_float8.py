"""`Float8BlockwiseLinear` on the CPU: numerics, gradients, the cached weight, compilation."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jitquant import reference
from jitquant.nn import Float8BlockwiseLinear, _weights, float8
from jitquant.tensors.fp8 import QuantizedTensor

from .helpers import sqnr

BF16 = torch.bfloat16


def layer(
    cols: int = 256, out: int = 384, *, bias: bool = True, dtype: torch.dtype = BF16
) -> Float8BlockwiseLinear:
    made = Float8BlockwiseLinear(cols, out, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(randn(out, cols, seed=1) * cols**-0.5)
        if bias:
            made.bias.copy_(randn(out, seed=2))
    return made


def linear_of(made: Float8BlockwiseLinear) -> nn.Linear:
    """An ``nn.Linear`` with its parameters."""
    linear = nn.Linear(made.in_features, made.out_features, device="meta", dtype=made.weight.dtype)
    linear.weight, linear.bias = made.weight, made.bias
    return linear


def outliers(*shape: int, seed: int = 0) -> Tensor:
    """Normal values with one column in 64 a hundred times as large, as activations of LLMs have."""
    x = randn(*shape, dtype=torch.float32, seed=seed)
    x[..., ::64] *= 100
    return x.to(BF16)


def passes(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = f(x)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad


def against_float64(
    made: Float8BlockwiseLinear, x: Tensor, grad: Tensor
) -> tuple[float, float, float]:
    """SQNR in dB of output, dX and dW."""
    made.zero_grad()
    y, grad_x = passes(made, x, grad)
    weight = made.weight.detach().double()
    g, x2 = grad.double().flatten(0, -2), x.double().flatten(0, -2)
    want = x.double() @ weight.T
    if made.bias is not None:
        want += made.bias.detach().double()
        assert sqnr(made.bias.grad, g.sum(0)) > 40
    return (
        sqnr(y, want),
        sqnr(grad_x.flatten(0, -2), g @ weight),
        sqnr(made.weight.grad, g.T @ x2),
    )


def test_scales_that_are_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all operands of a step, if asked for, or as GPUs from 10.0 on have them."""
    scales: list[Tensor] = []
    real = float8.fp8_mm

    def noted(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        scales.extend((a.scale_inv, b.scale_inv))
        return real(a, b, dtype)

    made, x, grad = layer(), outliers(130, 256), randn(130, 384)
    exact_scales = against_float64(made, x, grad)
    monkeypatch.setattr(float8, "fp8_mm", noted)
    given = Float8BlockwiseLinear.from_linear(linear_of(made), scale_format="ue8m0")
    assert min(against_float64(given, x, grad)) > min(exact_scales) - 1
    assert len(scales) == 6
    mantissas = torch.cat([scale.flatten() for scale in scales]).frexp()[0]
    assert set(mantissas.tolist()) == {0.0, 0.5}  # padding is 0
    given.zero_grad()
    want = (*passes(given, x, grad), given.weight.grad)
    monkeypatch.setattr(float8, "block_scale_format", lambda device: "ue8m0")
    there = Float8BlockwiseLinear.from_linear(linear_of(made))
    there.weight.grad = None
    assert all(map(torch.equal, (*passes(there, x, grad), there.weight.grad), want))
    exported = torch.export.export(there.eval(), (x,)).module()
    assert torch.equal(exported(x), want[0])
    with pytest.raises(ValueError, match=r"scale_format: expected .*'ue8m0'.*got 'e8m0'"):
        Float8BlockwiseLinear(16, 16, scale_format="e8m0")  # type: ignore[arg-type]


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that are quantized, in turn."""
    calls: list[Tensor] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(w: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(w)
            return real(w, *args, **kwargs)

        return call

    for name in ("quantize_block", "quantize_block_both"):
        monkeypatch.setattr(_weights, name, counted(getattr(_weights, name)))
    return calls


@pytest.mark.parametrize(
    ("leading", "cols", "out"),
    [((256,), 384, 256), ((2, 3, 50), 300, 200), ((1,), 128, 640), ((7,), 72, 1), ((130,), 1, 17)],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_accuracy(leading: tuple[int, ...], cols: int, out: int, bias: bool) -> None:
    made = layer(cols, out, bias=bias)
    ratios = against_float64(made, randn(*leading, cols), randn(*leading, out, seed=5))
    # A sum of few products has the noise of few.
    assert min(ratios) >= (25 if min(*leading, cols, out) > 100 else 20), ratios


@pytest.mark.parametrize("where", ["x", "grad", "both"])
def test_accuracy_with_outliers(where: str, record_property: Callable[[str, object], None]) -> None:
    x = outliers(256, 512) if where != "grad" else randn(256, 512)
    grad = outliers(256, 384, seed=5) if where != "x" else randn(256, 384, seed=5)
    ratios = against_float64(layer(512, 384), x, grad)
    record_property("sqnr_db", ratios)
    # Floating point in small groups: noise stays proportional to the values that carry the sum.
    assert min(ratios) >= 25, ratios


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_products_are_those_of_the_quantized_operands(dtype: torch.dtype) -> None:
    """Against the definition, from the reference's quantizers and float64.

    The weight's gradient has the precision of the weight, also if that of x is less.
    """
    made, x, grad = (
        layer(300, 200, bias=False, dtype=torch.float32),
        randn(150, 300, dtype=dtype),
        randn(150, 200, dtype=dtype),
    )

    def values(t: Tensor, rows: int) -> Tensor:
        how = {"dtype": torch.float8_e4m3fn, "eps": 1e-32}
        if rows == 1:
            data, scale = reference.quantize_per_token_group(t, 128, **how)
            scale = scale.repeat_interleave(128, 1)
        else:
            data, scale = reference.quantize_block(t, 128, 128, **how)
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return data.double() * scale[: t.shape[0], : t.shape[1]].double()

    with torch.autocast("cpu", enabled=dtype == BF16):
        y, grad_x = passes(made, x, grad)
    w = values(made.weight.detach(), 128)
    of_x = 110 if dtype == torch.float32 else 45
    assert sqnr(y, values(x, 1) @ w.T) > of_x
    assert sqnr(grad_x, values(grad, 1) @ w) > of_x
    want = values(grad.T.contiguous(), 1) @ values(x.T.contiguous(), 1).T
    assert sqnr(made.weight.grad, want) > 110


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12])
def test_magnitude_of_gradients_and_weights_does_not_matter(scale: float) -> None:
    made, x, grad = layer(dtype=torch.float32), randn(128, 256).float(), randn(128, 384).float()
    assert min(against_float64(made, x, grad * scale)[1:]) > 25
    made = layer(dtype=torch.float32, bias=False)
    with torch.no_grad():
        made.weight.mul_(scale)
    assert min(against_float64(made, x, grad)) > 25


def test_zeros_are_no_nan() -> None:
    made = layer(bias=False)
    with torch.no_grad():
        made.weight[:128] = 0
    x, grad = randn(256, 256), randn(256, 384)
    x[:, :128], grad[:128] = 0, 0
    y, grad_x = passes(made, x, grad)
    assert (y[:, :128] == 0).all()
    assert (grad_x[:128] == 0).all()
    assert made.weight.grad is not None
    assert (made.weight.grad[:, :128] == 0).all()
    for t in (y, grad_x, made.weight.grad):
        assert t.isfinite().all()
    y, grad_x = passes(made, torch.zeros_like(x), torch.zeros_like(grad))
    assert (y == 0).all()
    assert (grad_x == 0).all()


def test_nan_is_not_hidden() -> None:
    x = randn(4, 256)
    x[1, 3] = torch.nan
    y = layer()(x)
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


def test_no_rows() -> None:
    made = layer()
    x = randn(3, 0, 256).requires_grad_()
    y = made(x)
    assert y.shape == (3, 0, 384)
    assert y.dtype == BF16
    y.sum().backward()
    assert x.grad is not None
    assert (made.weight.grad == 0).all()


def test_strides() -> None:
    made = layer(bias=False)
    x = randn(256, 6, seed=3).T
    grad = torch.ones(1).to(BF16).expand(6, 384)
    want = passes(made, x.contiguous(), grad.contiguous())
    made.zero_grad()
    x = x.detach().requires_grad_()
    y = made(x)
    y.backward(grad)
    assert torch.equal(y, want[0])
    assert torch.equal(x.grad, want[1])


def test_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[int, int]] = []
    real = float8.fp8_mm

    def counted(a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        products.append((a.shape[0], b.shape[0]))
        return real(a, b, dtype)

    monkeypatch.setattr(float8, "fp8_mm", counted)
    made, x = layer(), randn(128, 256)
    made(x).sum().backward()
    assert products == [(128, 384), (384, 256)]  # no gradient of the input
    products.clear()
    made.requires_grad_(False)
    made(x.requires_grad_()).sum().backward()
    assert products == [(128, 384), (128, 256)]  # none of the weight
    assert not made(x.detach()).requires_grad


def test_backward_keeps_no_copy_in_bf16() -> None:
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    made = layer(bias=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        made(randn(512, 256).requires_grad_())
    assert {t.dtype for t in kept} == {torch.float8_e4m3fn, torch.float32}
    assert sum(t.nbytes for t in kept if t.dtype == torch.float32) < 0.05 * 512 * 256


def test_training_follows_bf16() -> None:
    """A student learns what a teacher computes, from the same seed, in FP8 and in bf16."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)).requires_grad_(
        False
    )
    plain = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)).to(BF16)
    fp8 = copy.deepcopy(plain)
    fp8[0], fp8[2] = (Float8BlockwiseLinear.from_linear(fp8[i]) for i in (0, 2))
    losses = []
    for student in (plain, fp8):
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
        curve = []
        for step in range(20):
            x = randn(128, 128, seed=step)
            loss = (student(x).float() - teacher(x.float())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        losses.append(curve)
    want, got = (sum(curve[-5:]) for curve in losses)
    assert want < 0.6 * sum(losses[0][:5])  # it learned
    assert abs(got - want) < 0.03 * want


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


class WritesToData(torch.optim.Optimizer):
    """An optimizer that leaves no trace in a version counter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "data"])
def test_weight_is_quantized_once_a_step(name: str, quantized: list[Tensor]) -> None:
    made, x = layer(), randn(64, 256)
    optimizer = OPTIMIZERS[name](made.parameters()) if name != "data" else None
    optimizer = optimizer or WritesToData(made.parameters())
    for step in range(3):
        for _ in range(3):  # accumulation
            made(x).float().square().mean().backward()
        with torch.no_grad():
            made(x)
        assert len(quantized) == step + 1
        optimizer.step()
        optimizer.zero_grad()
        fresh = layer()
        fresh.load_state_dict(made.state_dict())
        assert torch.equal(made(x), fresh(x))
        quantized.pop()  # that of the fresh one
    assert len(quantized) == 3 + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.add_(1),
        lambda m: setattr(m, "weight", nn.Parameter(m.weight + 1)),
        lambda m: setattr(m.weight, "data", m.weight + 1),
        lambda m: m.load_state_dict({"weight": m.weight + 1, "bias": m.bias}),
        lambda m: m.load_state_dict({"weight": m.weight + 1, "bias": m.bias}, assign=True),
        lambda m: (m.weight.data.add_(1), m.weight_changed()),
        lambda m: (m.state_dict(), m.weight.data.add_(1)),
        lambda m: (m.weight.data.add_(1), m.eval()),
        lambda m: (m.train(), m.weight.data.add_(1)),
        lambda m: m.float(),
    ],
    ids=[
        "in_place",
        "parameter",
        "data",
        "load",
        "assign",
        "told",
        "saved",
        "eval",
        "train",
        "dtype",
    ],
)
@torch.no_grad()
@torch.autocast("cpu")  # or a layer in fp32 would refuse x
def test_every_change_is_seen(change: Callable[[Any], Any], quantized: list[Tensor]) -> None:
    made, x = layer(), randn(4, 256)
    before = made(x)
    made(x)
    assert len(quantized) == 1
    change(made)
    after = made(x)
    assert len(quantized) == 2
    fresh = copy.deepcopy(made)
    assert torch.equal(fresh(x), after)
    assert len(quantized) == 3
    assert torch.equal(before, after) == (made.weight.dtype == torch.float32)


def test_backward_is_of_the_weight_that_forward_had() -> None:
    made, x, grad = layer(), randn(64, 256), randn(64, 384)
    want = passes(made, x, grad)[1]
    x.requires_grad_()
    y = made(x)
    with torch.no_grad():
        made.weight.zero_()
        made(x)  # the cache moves on
    y.backward(grad)
    assert torch.equal(x.grad, want)


def test_accumulated_gradients_are_the_sum() -> None:
    made, grads = layer(), []
    batches = [(randn(64, 256, seed=s), randn(64, 384, seed=9 + s)) for s in range(2)]
    for x, grad in batches:
        made.zero_grad()
        passes(made, x, grad)
        grads.append(made.weight.grad.clone())
    made.zero_grad()
    for x, grad in batches:
        passes(made, x, grad)
    assert torch.equal(made.weight.grad, grads[0] + grads[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, quantized: list[Tensor]) -> None:
    block = nn.Sequential(layer(256, 384), nn.GELU(), layer(384, 256))
    x, grad = randn(2, 64, 256), randn(2, 64, 256, seed=4)
    want = passes(block, x, grad)
    grads = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    got = passes(lambda t: checkpoint(block, t, use_reentrant=reentrant), x, grad)
    assert all(map(torch.equal, got, want))
    assert all(torch.equal(p.grad, g) for p, g in zip(block.parameters(), grads, strict=True))
    assert len(quantized) == 2  # one of each layer


def test_inference_mode(quantized: list[Tensor]) -> None:
    made, x = layer(), randn(8, 256)
    want = made(x)
    with torch.inference_mode():
        assert torch.equal(made(x), want)
        inside = layer()
        assert torch.equal(inside(x), want)
        inside.weight.zero_()
        assert torch.equal(inside(x), inside.bias.expand(8, -1))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    made = layer(dtype=torch.float32)
    x = randn(64, 256).float().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y = made(x)
    assert y.dtype == dtype
    grad = randn(64, 384)
    y.backward(grad.to(dtype))
    assert x.grad.dtype == made.weight.grad.dtype == made.bias.grad.dtype == torch.float32
    # The products themselves are not cast: they are those without autocast, rounded.
    plain, plain_grad = passes(made, x, grad.to(dtype).float())
    assert sqnr(y, plain) > 45
    assert sqnr(x.grad, plain_grad) > 100


def test_state_dict_is_that_of_linear() -> None:
    linear = nn.Linear(256, 384, dtype=BF16)
    made = Float8BlockwiseLinear.from_linear(linear.eval())
    assert made.weight is linear.weight
    assert made.bias is linear.bias
    assert not made.training
    made(randn(4, 256))
    ours, theirs = made.state_dict(), linear.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other = nn.Linear(256, 384, dtype=BF16)
    other.load_state_dict(ours)
    back = Float8BlockwiseLinear(256, 384, dtype=BF16)
    back.load_state_dict(other.state_dict())
    assert torch.equal(back(randn(4, 256)), made(randn(4, 256)))


def test_copies_and_pickles_have_no_cache() -> None:
    made, x = layer(), randn(4, 256)
    y = made(x)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other._cache._kept is None
        assert torch.equal(other(x), y)
    assert len(pickle.dumps(made)) < made.weight.nbytes + 4000


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    made = layer(200, 136)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (130, 131, 256) if dynamic else (130,):
        x, grad = randn(2, rows, 200), randn(2, rows, 136, seed=4)
        made.zero_grad()
        want = (*passes(made, x, grad), made.weight.grad.clone())
        made.zero_grad()
        got = (*passes(compiled, x, grad), made.weight.grad.clone())
        assert all(map(torch.equal, got, want))
        with torch.no_grad():  # which the compiled layer sees
            made.weight.mul_(-1)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_code_that_takes_itself_for_exported_has_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As PyTorch 2.11 compiles ``torch.compiler.is_exporting``."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    made, x, grad = layer(), randn(128, 256), randn(128, 384)
    want = (*passes(made, x, grad), made.weight.grad.clone())
    made.zero_grad()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, (*passes(compiled, x, grad), made.weight.grad), want))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compile_a_step_with_inductor() -> None:
    made, x = layer(128, 128), randn(128, 128)
    twin = copy.deepcopy(made)
    compiled = torch.compile(lambda t: made(torch.relu(t)).float().square().mean(), fullgraph=True)
    for f, m in ((compiled, made), (lambda t: twin(torch.relu(t)).float().square().mean(), twin)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            f(x).backward()
            optimizer.step()
    assert sqnr(made.weight.detach(), twin.weight.detach()) > 40


def test_errors() -> None:
    made = layer()
    with pytest.raises(
        ValueError, match=r"x: expected shape \(\.\.\., 256\), got shape \(4, 255\)"
    ):
        made(randn(4, 255))
    with pytest.raises(ValueError, match=r"x: expected shape \(\.\.\., 256\), got shape \(\)"):
        made(torch.zeros(()))
    with pytest.raises(
        TypeError, match=r"x: expected bfloat16, float16 or float32, got torch\.float64"
    ):
        made(torch.zeros(4, 256, dtype=torch.float64))
    says = (
        r"x: expected torch\.bfloat16, as the layer has, got torch\.float32\. Call "
        r"x\.to\(torch\.bfloat16\) or layer\.to\(torch\.float32\), or use torch\.autocast"
    )
    for rows in (4, 0):
        with pytest.raises(TypeError, match=says):
            made(torch.zeros(rows, 256))
    with torch.autocast("cpu"):
        assert made(torch.zeros(4, 256)).dtype == BF16
    with pytest.raises(TypeError, match=r"x: expected torch\.float32, .* got torch\.bfloat16"):
        made.float()(randn(4, 256))
    with pytest.raises(
        TypeError,
        match=r"linear: expected torch\.nn\.Linear itself, got NonDynamicallyQuantizableLinear",
    ):
        Float8BlockwiseLinear.from_linear(nn.MultiheadAttention(16, 2).out_proj)
    with pytest.raises(
        TypeError,
        match=r"linear\.weight: expected bfloat16, float16 or float32, got torch\.float64",
    ):
        Float8BlockwiseLinear.from_linear(nn.Linear(4, 4, dtype=torch.float64))


def test_no_second_derivative() -> None:
    x = randn(4, 256).requires_grad_()
    y = layer()(x).float().square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_without_memory() -> None:
    made = layer().to("meta")
    y = made(torch.empty(3, 256, dtype=BF16, device="meta", requires_grad=True))
    assert y.shape == (3, 384)
    assert y.requires_grad


def test_imported_when_asked_for() -> None:
    code = """
import sys, torch, jitquant
assert not any(name.startswith("jitquant.nn") for name in sys.modules)
assert not hasattr(torch.ops.jitquant, "fp8_mm")
hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
jitquant.nn.NVFP4Linear(16, 16)
assert torch.ops.jitquant.fp8_mm and "nn" in dir(jitquant)
assert "torch._dynamo" not in sys.modules  # it takes as long as torch itself
assert not hooks
jitquant.nn.Float8BlockwiseLinear(16, 16), jitquant.nn.Float8BlockwiseLinear(16, 16)
assert len(hooks) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("size", [96, 128])
def test_an_exported_program_takes_any_number_of_rows(size: int) -> None:
    made = layer(size, size)
    rows = {0: torch.export.Dim("rows", min=1, max=1000)}
    program = torch.export.export(made, (randn(4, size),), dynamic_shapes=(rows,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for count in (1, 128, 200):
        x = randn(count, size, seed=count)
        assert torch.equal(again(x), made(x))
