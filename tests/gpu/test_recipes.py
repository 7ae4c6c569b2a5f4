"""Recipes for training and rotation on a GPU: peers' bits, captures, random bytes, the layer."""

from __future__ import annotations

from typing import Any

import golden_recipes as golden
import pytest
import torch
from samples import OPS

import jitquant
from jitquant import reference
from jitquant.nn import NVFP4TrainingLinear, NVFP4TrainingRecipe
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

from .helpers import randn, same


@pytest.mark.parametrize(("case", "recipe"), golden.CASES)
def test_peer_vectors(case: str, recipe: str) -> None:
    golden.assert_equals_golden(case, recipe, lambda name: _tuple_of(OPS[name].default), "cuda")


def _tuple_of(function: Any) -> golden.Function:
    def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        results = function(*args, **kwargs)
        return results if isinstance(results, tuple) else (results,)

    return call


@pytest.mark.parametrize(
    "recipe",
    [
        {"rotate": "te"},
        {"rotate": "128"},
        {"select": "4over6_mae", "e4m3_max": 256},
        {"select": "4over6_mse", "e4m3_max": 448, "block": "16x16"},
        {"rounding": "stochastic"},
    ],
)
def test_large_tensors_are_the_cpus(recipe: dict[str, Any]) -> None:
    x, state = randn(1029, 7168), torch.tensor([3, 1 << 35])
    on_cpu, on_gpu = dict(recipe), dict(recipe)
    if "rounding" in recipe:
        on_cpu["rng_state"], on_gpu["rng_state"] = state, state.cuda()
    want = jitquant.quantize_nvfp4(x.cpu(), **on_cpu)
    got = jitquant.quantize_nvfp4(x, **on_gpu)
    same((got.x_fp4, got.x_sf, got.gsa), (want.x_fp4, want.x_sf, want.gsa))


@pytest.mark.parametrize("shape", [(1024, 7168), (256, 528), (144, 80)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_both_is_the_cpus(shape: tuple[int, int], rounding: str) -> None:
    x, state = randn(*shape), torch.tensor([3, 9])
    on_cpu: dict[str, Any] = {"rotate": "te", "rounding": rounding}
    on_gpu = dict(on_cpu)
    if rounding == "stochastic":
        on_cpu["rng_state"], on_gpu["rng_state"] = state, state.cuda()
    for got, want in zip(
        jitquant.quantize_nvfp4_both(x, **on_gpu),
        jitquant.quantize_nvfp4_both(x.cpu(), **on_cpu),
        strict=True,
    ):
        same((got.x_fp4, got.x_sf, got.gsa), (want.x_fp4, want.x_sf, want.gsa))


@pytest.mark.parametrize("rotate", ["32", "64", "128", "256"])
def test_rotations_of_many_rows_are_the_cpus(rotate: str) -> None:
    x = randn(1029, 7168)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        how: dict[str, Any] = {"rotate": rotate, "dtype": dtype}
        for size in (32, 128):
            want = jitquant.quantize_per_token_group(x.cpu(), size, **how)
            got = jitquant.quantize_per_token_group(x, size, **how)
            same((got.data, got.scale_inv), (want.data, want.scale_inv), what=f"{size} {dtype}")
        want_rows = jitquant.quantize_fp8(x.cpu(), granularity="row", **how)
        got_rows = jitquant.quantize_fp8(x, granularity="row", **how)
        same((got_rows.data, got_rows.scale_inv), (want_rows.data, want_rows.scale_inv))
    same(jitquant.quantize_mxfp4(x, rotate=rotate), jitquant.quantize_mxfp4(x.cpu(), rotate=rotate))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rope_a_rotation_and_the_cast_are_one_launch(dtype: torch.dtype) -> None:
    """Queries of DeepSeek's indexer: 64 heads of 128, of which 64 columns are embedded."""
    x, angles = randn(257, 64, 128), torch.randn(257, 32)
    tables = angles.cos(), angles.sin()
    on_gpu: Any = {"rope": tuple(t.cuda() for t in tables), "rotate": "128", "dtype": dtype}
    want = jitquant.quantize_per_token_group(x.cpu(), rope=tables, rotate="128", dtype=dtype)
    got = jitquant.quantize_per_token_group(x, **on_gpu)
    same((got.data, got.scale_inv), (want.data, want.scale_inv))
    assert count_launches(lambda: jitquant.quantize_per_token_group(x, **on_gpu)) == 1
    assert_no_sync(lambda: jitquant.quantize_per_token_group(x, **on_gpu))
    if dtype == torch.float8_e4m3fn:
        row = jitquant.quantize_fp8(x, granularity="row", **on_gpu)
        wanted = jitquant.quantize_fp8(x.cpu(), granularity="row", rope=tables, rotate="128")
        same((row.data, row.scale_inv), (wanted.data, wanted.scale_inv))


@pytest.mark.parametrize("how", [{"rotate": "128"}, {}, {"rotate": "te", "interleaved": True}])
def test_rope_and_a_rotation_before_four_bits(how: dict[str, Any]) -> None:
    """MXFP4, and NVFP4 with a given gsa, take one launch; a computed gsa takes another."""
    x, angles = randn(257, 64, 128), torch.randn(257, 32)
    tables = angles.cos(), angles.sin()
    on_cpu: Any = {"rope": tables, **how}
    on_gpu: Any = {"rope": tuple(t.cuda() for t in tables), **how}
    same(jitquant.quantize_mxfp4(x, **on_gpu), jitquant.quantize_mxfp4(x.cpu(), **on_cpu))
    for scale in ("tensor", "row"):
        want = jitquant.quantize_nvfp4(x.cpu(), granularity=scale, **on_cpu)
        got = jitquant.quantize_nvfp4(x, granularity=scale, **on_gpu)
        same((got.x_fp4, got.x_sf, got.gsa), (want.x_fp4, want.x_sf, want.gsa))
    assert count_launches(lambda: jitquant.quantize_nvfp4(x, **on_gpu)) == 2
    gsa = torch.tensor([0.002], device="cuda")
    for call in (
        lambda: jitquant.quantize_mxfp4(x, **on_gpu),
        lambda: jitquant.quantize_nvfp4(x, gsa, **on_gpu),
    ):
        assert count_launches(call) == 1
        assert_no_sync(call)
        assert_capturable(call)


def test_two_launches_that_do_not_synchronize() -> None:
    x, state = randn(512, 1024), torch.tensor([1, 0], device="cuda")
    for call in (
        lambda t: jitquant.quantize_nvfp4(t, rotate="te"),
        lambda t: jitquant.quantize_nvfp4(t, select="4over6_mae"),
        lambda t: jitquant.quantize_nvfp4(t, rounding="stochastic", rng_state=state),
        lambda t: jitquant.quantize_nvfp4_both(t, rotate="te"),
    ):
        assert count_launches(call, x) == 2
        assert_no_sync(call, x)
        assert_capturable(call, x)
    assert count_launches(jitquant.quantize_mxfp4, x) == 1
    assert_capturable(jitquant.quantize_mxfp4, x)


def test_a_captured_graph_draws_anew_at_each_replay() -> None:
    x, state = randn(64, 256), torch.tensor([1, 0], device="cuda")

    def step() -> torch.Tensor:
        q = jitquant.quantize_nvfp4(x, rounding="stochastic", rng_state=state)
        state[1].add_(1)
        return q.x_fp4_bytes

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes = step()
    state[1] = 0
    for offset in range(3):
        graph.replay()
        wanted = reference.quantize_nvfp4_recipe(
            x.cpu(),
            x.cpu().float().abs().amax().reshape(1),
            rounding="stochastic",
            rng_state=torch.tensor([1, offset]),
        )
        assert torch.equal(codes.cpu(), wanted[0].view(torch.uint8))


def test_a_training_step_is_the_cpus() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(256, 384)
    found = []
    x = torch.randn(200, 256)
    for device in ("cpu", "cuda"):
        linear = torch.nn.Linear(256, 384, device=device)
        linear.load_state_dict(plain.state_dict())
        layer = NVFP4TrainingLinear.from_linear(linear)
        layer.seed_rounding(4)
        given = x.to(device).detach().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        assert given.grad is not None
        assert layer.weight.grad is not None
        found.append([t.detach().cpu() for t in (y, given.grad, layer.weight.grad)])
    for got, want in zip(found[1], found[0], strict=True):
        # Gradients are quantized after sums whose order differs.
        assert float((got - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("shape", [(256, 256, 384), (144, 80, 48)])
def test_products_are_those_of_the_quantized_operands(shape: tuple[int, int, int]) -> None:
    """By tiles, and of a K that those do not take."""
    rows, cols, out = shape
    layer = NVFP4TrainingLinear(cols, out, bias=False, device="cuda")
    state = layer.rng_state.clone()
    x, grad = randn(rows, cols).requires_grad_(), randn(rows, out)
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(x)
    y.backward(grad)
    xq, xq_t = jitquant.quantize_nvfp4_both(x.detach(), rotate="te")
    wq, wq_t = jitquant.quantize_nvfp4_both(layer.weight.detach(), block="16x16")
    gq, gq_t = jitquant.quantize_nvfp4_both(
        grad, rotate="te", rounding="stochastic", rng_state=state
    )
    for got, a, b in ((y, xq, wq), (x.grad, gq, wq_t), (layer.weight.grad, gq_t, xq_t)):
        want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
        limit = 2e-6 if got.dtype == torch.float32 else 3e-3
        assert float((got - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_training_step_draws_anew(compiled: bool) -> None:
    """Replays have the gradients of as many eager steps, each with bytes of its own."""
    torch._dynamo.reset()
    layer = NVFP4TrainingLinear(256, 128, device="cuda")
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    x, grad = randn(256, 256), randn(256, 128)

    def step(run: Any = call) -> torch.Tensor:
        layer.weight.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        y.backward(grad)
        assert layer.weight.grad is not None
        return layer.weight.grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    layer.seed_rounding(4)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append(captured.clone())
    assert not torch.equal(replayed[0], replayed[1])
    layer.seed_rounding(4)
    for got in replayed:
        torch.testing.assert_close(got, step(layer), rtol=1e-5, atol=1e-5)
    assert int(layer.rng_state[1]) == 3


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4TrainingRecipe(),
        NVFP4TrainingRecipe("none", False, "1x16"),
        NVFP4TrainingRecipe(select="4over6_mae", e4m3_max=256),
    ],
)
def test_a_training_step_does_not_synchronize(recipe: NVFP4TrainingRecipe) -> None:
    layer = NVFP4TrainingLinear(256, 128, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    x, grad = randn(256, 256).requires_grad_(), randn(256, 128)

    def step() -> None:
        layer(x).backward(grad)

    assert_no_sync(step)
