"""NVFP4TrainingLinear on the CPU: its products, what its recipe turns off, and that it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor, nn
from torch.nn import functional

import jitquant
from jitquant.nn import NVFP4TrainingLinear, NVFP4TrainingRecipe


def _pair(**recipe: Any) -> tuple[nn.Linear, NVFP4TrainingLinear]:
    torch.manual_seed(3)
    plain = nn.Linear(48, 80, dtype=torch.float32)
    layer = NVFP4TrainingLinear.from_linear(plain, recipe=NVFP4TrainingRecipe(**recipe))
    layer.seed_rounding(5)
    return plain, layer


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_the_products_are_those_of_the_quantized_operands() -> None:
    _, layer = _pair()
    x = randn(3, 21, 48, dtype=torch.float32).requires_grad_()
    grad = randn(3, 21, 80, dtype=torch.float32, seed=4)
    state = layer.rng_state.clone()
    y = layer(x)
    y.backward(grad)
    assert int(layer.rng_state[1]) == 1

    rows = functional.pad(x.detach().reshape(63, 48), (0, 0, 0, 1))
    grads = functional.pad(grad.reshape(63, 80), (0, 0, 0, 1))
    xq, xq_t = jitquant.quantize_nvfp4_both(rows, rotate="te")
    wq, wq_t = jitquant.quantize_nvfp4_both(layer.weight.detach(), block="16x16")
    gq, gq_t = jitquant.quantize_nvfp4_both(
        grads, rotate="te", rounding="stochastic", rng_state=state
    )

    def values(q: Any) -> Tensor:
        return q.dequantize(torch.float32).double()

    want = (values(xq) @ values(wq).T)[:63].reshape(3, 21, 80) + layer.bias
    torch.testing.assert_close(y, want.float(), rtol=1e-4, atol=1e-4)
    assert x.grad is not None
    want = (values(gq) @ values(wq_t).T)[:63].reshape(3, 21, 48)
    torch.testing.assert_close(x.grad, want.float(), rtol=1e-4, atol=1e-4)
    want = values(gq_t) @ values(xq_t).T
    torch.testing.assert_close(layer.weight.grad, want.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, grad.sum(dim=(0, 1)))
    # Quantized twice the weight is one matrix.
    assert torch.equal(values(wq), values(wq_t).T)


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"rotate": "none"},
        {"stochastic": False},
        {"weight_block": "1x16"},
        {"select": "4over6_mae", "top": 256},
    ],
)
def test_it_is_near_a_linear(recipe: dict[str, Any]) -> None:
    plain, layer = _pair(**recipe)
    x, grad = randn(64, 48, dtype=torch.float32), randn(64, 80, dtype=torch.float32, seed=4)
    found = []
    for module in (plain, layer):
        given = x.clone().requires_grad_()
        module.zero_grad()
        y = module(given)
        y.backward(grad)
        assert given.grad is not None
        assert module.weight.grad is not None
        found.append((y.detach(), given.grad, module.weight.grad.clone()))
    for got, want in zip(found[1], found[0], strict=True):
        assert 0.01 < _error(got, want) < 0.25


def test_stochastic_gradients_are_right_on_average() -> None:
    plain, layer = _pair(weight_block="1x16", rotate="none")
    x, grad = randn(16, 48, dtype=torch.float32), randn(16, 80, dtype=torch.float32, seed=4)
    wq_t = jitquant.quantize_nvfp4_both(plain.weight.detach())[1].dequantize(torch.float32)
    want = grad @ wq_t.T
    total, draws = torch.zeros_like(x), 64
    for i in range(draws):
        given = x.clone().requires_grad_()
        layer(given).backward(grad)
        assert given.grad is not None
        if i == 0:
            first = _error(given.grad, want)
        total += given.grad
    # What is left is what saturates.
    assert _error(total / draws, want) < 0.4 * first


def test_it_keeps_the_state_dict_and_counts_under_autocast() -> None:
    plain, layer = _pair()
    assert list(layer.state_dict()) == list(plain.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(randn(16, 48, dtype=torch.float32))
    assert y.dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    state = layer.rng_state.clone()
    layer(randn(0, 48, dtype=torch.float32))
    assert torch.equal(layer.rng_state, state)
    with pytest.raises(ValueError, match="in_features"):
        layer(randn(4, 47, dtype=torch.float32))
    with pytest.raises(TypeError, match=r"torch\.nn\.Linear itself"):
        NVFP4TrainingLinear.from_linear(layer)


def test_it_compiles() -> None:
    _, layer = _pair()
    x = randn(32, 48, dtype=torch.float32)
    compiled = torch.compile(layer, backend="aot_eager")
    found = []
    for call in (compiled, layer):
        layer.seed_rounding(5)
        layer.weight.grad = None
        # Two forwards before a backward, each with bytes of its own.
        (call(x) + call(2 * x)).square().mean().backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
        assert int(layer.rng_state[1]) == 2
    torch.testing.assert_close(found[0], found[1])


def test_it_trains() -> None:
    """A two-layer network learns a function about as well as in fp32."""
    x = randn(256, 64, dtype=torch.float32)
    target = torch.tanh(x @ randn(64, 16, dtype=torch.float32, seed=8) / 8)
    ends = {}
    for name in ("plain", "nvfp4"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
        if name == "nvfp4":
            for i in (0, 2):
                model[i] = NVFP4TrainingLinear.from_linear(model[i])
                model[i].seed_rounding(i)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        first = 0.0
        for step in range(60):
            loss = functional.mse_loss(model(x), target)
            first = first or loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ends[name] = loss.item()
            assert step < 60
        assert ends[name] < 0.15 * first
    assert ends["nvfp4"] < ends["plain"] + 0.02
