"""NVFP4TrainingLinear on the CPU: its products, what its recipe turns off, and that it trains."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from reference import oracle, oracle_recipes
from samples import randn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import jitquant
from jitquant.nn import NVFP4TrainingLinear, NVFP4TrainingRecipe, convert, linears_in_last_blocks

from .helpers import UnknownExperts


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


def _quantized(
    x: np.ndarray, dtype: str, rotate: str = "none", tile: int = 1, **how: Any
) -> np.ndarray:
    """The values of NVFP4 by the oracle, in fp64; blocks are along the last dimension."""
    v = oracle_recipes.hadamard(x.astype(np.float32), rotate, None, dtype)
    a = np.array([oracle.amax_of(v)], np.float32)
    codes, scales, gsa = oracle_recipes.nvfp4(v, a, tile_rows=tile, **how)
    sign = np.where(codes & 8, -1.0, 1.0)
    values = sign * np.array([float(e) for e in oracle.E2M1_VALUES])[codes & 7]
    factors = np.array([float(oracle.e4m3_value(int(s))) for s in scales.ravel()])
    values *= factors.reshape(scales.shape).repeat(16, 1)
    return (values * np.float64(gsa[0]))[:, : x.shape[1]]


def _emulated(
    x: Tensor, weight: Tensor, grad: Tensor, state: tuple[int, int], recipe: NVFP4TrainingRecipe
) -> dict[str, np.ndarray]:
    """A training step of the recipe in fp64, x (M, K), weight (N, K), grad (M, N) as they are."""
    dtype = str(x.dtype).removeprefix("torch.")

    def rows(t: Tensor) -> np.ndarray:
        return functional.pad(t.float(), (0, 0, 0, -len(t) % 16)).numpy()

    xs, ws, gs = rows(x), weight.float().numpy(), rows(grad)
    chosen: Any = {"select": recipe.select, "e4m3_max": recipe.e4m3_max}
    of_x = {} if recipe.select_for == "weights" else chosen
    of_weight = {} if recipe.select_for == "inputs" else chosen

    def bits(t: np.ndarray, columnwise: bool) -> Any:
        if not recipe.stochastic:
            return None
        return oracle_recipes.draws(state, len(t), -(-t.shape[1] // 16), columnwise)

    forward = _quantized(ws, dtype, tile=16 if recipe.weight_block == "16x16" else 1, **of_weight)
    backward = forward.T
    if recipe.weight_block == "1x16":
        backward = _quantized(ws.T, dtype, **of_weight)
    g = _quantized(gs, dtype, r=bits(gs, False))
    g_t = _quantized(gs.T, dtype, recipe.rotate, r=bits(gs.T, True))
    x_t = _quantized(xs.T, dtype, recipe.rotate, **of_x)
    return {
        "y": (_quantized(xs, dtype, **of_x) @ forward.T)[: len(x)],
        "x.grad": (g @ backward.T)[: len(x)],
        "weight.grad": g_t @ x_t.T,
    }


@pytest.mark.parametrize("sizes", [(21, 48, 80), (32, 50, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4TrainingRecipe(),
        NVFP4TrainingRecipe(rotate="none"),
        NVFP4TrainingRecipe(stochastic=False),
        NVFP4TrainingRecipe(weight_block="1x16"),
        NVFP4TrainingRecipe(select="4over6_mae", e4m3_max=256),
        NVFP4TrainingRecipe(select="4over6_mae", e4m3_max=256, select_for="weights"),
        NVFP4TrainingRecipe("none", False, "1x16", "4over6_mse", 256, "inputs"),
        NVFP4TrainingRecipe("none", False, "1x16", "4over6_mse", 448),
    ],
    ids=["whole", "no_rotation", "nearest", "1x16", "4over6", "weights", "inputs", "all_else"],
)
def test_a_step_is_the_recipe_in_float64(
    recipe: NVFP4TrainingRecipe, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    m, k, n = sizes
    layer = NVFP4TrainingLinear(k, n, bias=False, dtype=dtype, recipe=recipe)
    state = (-3, 2**32 - 1)
    layer.rng_state.copy_(torch.tensor(state))
    x = randn(m, k, dtype=dtype, seed=1).requires_grad_()
    grad = randn(m, n, dtype=dtype, seed=2)
    y = layer(x)
    y.backward(grad)
    want = _emulated(x.detach(), layer.weight.detach(), grad, state, recipe)
    assert x.grad is not None
    assert layer.weight.grad is not None
    for name, got in (("y", y), ("x.grad", x.grad), ("weight.grad", layer.weight.grad)):
        # Sums of exact products in fp32, rounded to the dtype.
        limit = 2e-6 if dtype == torch.float32 else 3e-3
        assert got.dtype == dtype
        assert _error(got.detach(), torch.tensor(want[name])) < limit, name


def test_autocast_rounds_fp32_sums_once() -> None:
    """Master weights are fp32; the product is that of the recipe, rounded to bf16."""
    layer = NVFP4TrainingLinear(48, 80, bias=False, dtype=torch.float32)
    x = randn(32, 48, dtype=torch.float32).requires_grad_()
    grad = randn(32, 80)
    state = tuple(layer.rng_state.tolist())
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(grad)
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert (x.grad.dtype, layer.weight.grad.dtype) == (torch.float32, torch.float32)
    want = _emulated(
        x.detach().bfloat16(), layer.weight.detach(), grad, state, NVFP4TrainingRecipe()
    )
    rounded = torch.tensor(want["y"]).bfloat16()
    assert float((y != rounded).float().mean()) < 0.01
    assert _error(layer.weight.grad, torch.tensor(want["weight.grad"])) < 2e-6


def test_fp32_master_weights_keep_updates_that_bf16_loses() -> None:
    changed = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        layer = NVFP4TrainingLinear(32, 32, bias=False, dtype=dtype)
        nn.init.constant_(layer.weight, 1.0)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            layer(randn(32, 32, dtype=dtype)).square().sum().backward()
        optimizer.step()
        changed[dtype] = float((layer.weight != 1).float().mean())
    assert changed[torch.float32] > 0.9
    assert changed[torch.bfloat16] < 0.1


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(blocks))
        self.lm_head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def test_the_last_blocks_stay_as_they_are() -> None:
    model = _Model(3)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    kept = linears_in_last_blocks(model, 1)
    assert kept == ["blocks.2.up", "blocks.2.down"]
    assert linears_in_last_blocks(model, 0) == []
    flat = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert linears_in_last_blocks(flat, 1) == ["2"]
    for blocks in (4, -1):
        with pytest.raises(ValueError, match="blocks: expected a number from 0 to"):
            linears_in_last_blocks(model, blocks)
    with pytest.raises(ValueError, match="model: expected a ModuleList or Sequential"):
        linears_in_last_blocks(nn.Linear(8, 8), 1)
    with pytest.raises(TypeError, match="blocks: expected an int, got float"):
        linears_in_last_blocks(model, 1.0)  # type: ignore[arg-type]

    parameters = dict(model.named_parameters())
    recipe = NVFP4TrainingRecipe(rotate="none")
    done = convert(model, recipe, filter=lambda name, _: name not in kept)
    assert done.recipe == "nvfp4_training"
    assert done.replaced == [f"blocks.{i}.{part}" for i in range(2) for part in ("up", "down")]
    assert set(done.skipped) == {*kept, "lm_head"}
    layers = [m for m in model.modules() if type(m) is NVFP4TrainingLinear]
    assert len(layers) == 4
    assert all(layer.recipe is recipe for layer in layers)
    seeds = {int(layer.rng_state[0]) for layer in layers}
    assert len(seeds) == 4
    # The same parameters, and files of the same names.
    assert all(p is parameters[name] for name, p in model.named_parameters())
    model.load_state_dict(state)
    plain = _Model(3)
    plain.load_state_dict(model.state_dict())
    again = convert(model, recipe)
    assert "already" in again.skipped["blocks.0.up"]


def test_experts_are_left_alone() -> None:
    model = nn.ModuleDict({"experts": UnknownExperts(), "up": nn.Linear(32, 32)})
    done = convert(model, NVFP4TrainingRecipe())
    assert done.replaced == ["up"]
    assert list(done.skipped) == ["experts"]


def test_a_layer_from_meta_gets_a_seed() -> None:
    with torch.device("meta"):
        layer = NVFP4TrainingLinear(32, 16)
    assert layer.rng_state.is_meta
    with pytest.raises(ValueError, match="Seed it after"):
        layer.seed_rounding(3)
    seeds = []
    for _ in range(2):
        torch.manual_seed(5)
        # As to_empty(), but with known memory.
        layer.to("meta")._apply(lambda t: torch.full_like(t, -1, device="cpu"))
        seeds.append(layer.rng_state.tolist())
    assert seeds[0] == seeds[1] != [-1, -1]
    assert seeds[0][0] >= 0
    assert seeds[0][1] == 0
    layer.reset_parameters()
    layer(randn(16, 32, dtype=torch.float32)).sum().backward()
    assert int(layer.rng_state[1]) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_may_save_the_state(compiled: bool) -> None:
    """As docs/nvfp4-training.md says. Then two forwards may come before the backwards."""

    def policy(_: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        saved = op == torch.ops.jitquant.next_rng_state.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    layer = NVFP4TrainingLinear(32, 32)
    x, grad = (randn(16, 32, dtype=torch.float32, seed=seed) for seed in range(2))

    def recomputed(rows: Tensor) -> Any:
        return checkpoint(layer, rows, use_reentrant=False, context_fn=contexts)

    step = torch.compile(recomputed, backend="aot_eager") if compiled else recomputed
    found = []
    for run in (layer, step):
        layer.seed_rounding(5)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for y in [run(t) for t in inputs]:
            y.backward(grad)
        found.append([t.grad for t in inputs])
        assert int(layer.rng_state[1]) == 2
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_layer_that_is_assigned_to_from_meta_gets_a_seed() -> None:
    with torch.device("meta"):
        layer = NVFP4TrainingLinear(32, 16)
    plain = nn.Linear(32, 16)
    layer.load_state_dict(plain.state_dict(), assign=True)
    x = randn(16, 32, dtype=torch.float32)
    layer(x).sum().backward()
    assert layer.rng_state.tolist()[1] == 1


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        (1.5, TypeError, "seed: expected an int, got float"),
        ("7", TypeError, "seed: expected an int, got str"),
        (1 << 63, ValueError, r"seed: expected a number from -2\*\*63 to 2\*\*63 - 1, got 92233"),
    ],
)
def test_a_seed_is_an_int64(seed: Any, error: type[Exception], words: str) -> None:
    _, layer = _pair()
    with pytest.raises(error, match=words):
        layer.seed_rounding(seed)
    assert layer.rng_state.tolist() == [5, 0]
    for least_and_most in (-(1 << 63), np.int64((1 << 63) - 1)):
        layer.seed_rounding(least_and_most)
        assert int(layer.rng_state[0]) == least_and_most


@pytest.mark.parametrize("way", ["pickle", "copy", "buffer"])
def test_a_run_goes_on_with_its_random_bytes(way: str) -> None:
    """A copy has the state, as a layer has to which a state_dict and the buffer were copied."""
    _, layer = _pair()
    x, grad = randn(32, 48, dtype=torch.float32), randn(32, 80, dtype=torch.float32, seed=4)
    layer(x).backward(grad)
    if way == "pickle":
        again = pickle.loads(pickle.dumps(layer))
    elif way == "copy":
        again = copy.deepcopy(layer)
    else:
        again = NVFP4TrainingLinear(48, 80)
        again.load_state_dict(layer.state_dict())
        again.rng_state.copy_(layer.rng_state)
    assert again.recipe == layer.recipe
    grads = []
    for each in (layer, again):
        each.weight.grad = None
        each(x).backward(grad)
        grads.append(each.weight.grad)
        assert int(each.rng_state[1]) == 2
    assert torch.equal(*grads)


def test_only_what_wants_a_gradient_gets_one() -> None:
    """A frozen weight, and an input without a gradient, leave the other's as it is."""
    grads = []
    for frozen, wanted in ((False, True), (True, True), (False, False)):
        _, layer = _pair()
        layer.weight.requires_grad_(not frozen)
        x = randn(32, 48, dtype=torch.float32).requires_grad_(wanted)
        layer(x).backward(randn(32, 80, dtype=torch.float32, seed=4))
        grads.append((x.grad, layer.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert grads[1][1] is None
    assert torch.equal(grads[0][1], grads[2][1])


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"rotate": "none"},
        {"stochastic": False},
        {"weight_block": "1x16"},
        {"select": "4over6_mae", "e4m3_max": 256},
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


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ({"rotate": "128"}, ValueError),
        ({"stochastic": "no"}, TypeError),
        ({"weight_block": "32x32"}, ValueError),
        ({"select": "4over6"}, ValueError),
        ({"e4m3_max": 300}, ValueError),
        ({"select_for": "activations"}, ValueError),
    ],
)
def test_a_recipe_says_at_once_what_it_does_not_take(
    part: dict[str, Any], error: type[Exception]
) -> None:
    (name,) = part
    with pytest.raises(error, match=rf"^{name}: expected .+ got "):
        NVFP4TrainingRecipe(**part)


def test_a_recipe_is_not_a_name() -> None:
    with pytest.raises(TypeError, match="recipe: expected an NVFP4TrainingRecipe or None, got str"):
        NVFP4TrainingLinear(32, 32, recipe="te")  # type: ignore[arg-type]


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


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("backend", "autocast"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_it_compiles(backend: str, autocast: bool) -> None:
    """To one graph, with the same random bytes."""
    _, layer = _pair()
    model = nn.Sequential(layer, nn.GELU(), NVFP4TrainingLinear(80, 32, dtype=torch.float32))
    x = randn(32, 48, dtype=torch.float32)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    found = []
    for call in (compiled, model):
        model.zero_grad()
        for i in (0, 2):
            model[i].seed_rounding(5 + i)
        given = x.clone().requires_grad_()
        # Two forwards before a backward, each with bytes of its own.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = call(given) + call(2 * given)
        y.square().mean().backward()
        found.append([given.grad, *(p.grad.clone() for p in model.parameters())])
        assert [int(model[i].rng_state[1]) for i in (0, 2)] == [2, 2]
    for got, want in zip(*found, strict=True):
        assert _error(got, want) < 1e-5


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_it_draws_anew() -> None:
    """Gradients of one input by two steps differ, as they do without compiling."""
    _, layer = _pair()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, grad = randn(32, 48, dtype=torch.float32), randn(32, 80, dtype=torch.float32, seed=4)
    grads = {}
    for name, call in (("compiled", compiled), ("eager", layer)):
        layer.seed_rounding(5)
        for step in range(2):
            layer.weight.grad = None
            call(x).backward(grad)
            grads[name, step] = layer.weight.grad.clone()
    assert not torch.equal(grads["compiled", 0], grads["compiled", 1])
    for step in range(2):
        torch.testing.assert_close(grads["compiled", step], grads["eager", step])


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


def test_it_takes_the_dtype_of_its_weight() -> None:
    layer = NVFP4TrainingLinear(48, 80, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"x: expected torch\.bfloat16, .* got torch\.float32"):
        layer(randn(32, 48, dtype=torch.float32))
    with pytest.raises(TypeError, match=r"x: expected a torch\.Tensor, got list"):
        layer([1.0])
    with torch.autocast("cpu"):
        assert layer(randn(32, 48, dtype=torch.float32)).dtype == torch.bfloat16
