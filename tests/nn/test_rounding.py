"""How weights are rounded, beside brute force and a GPTQ in float64 that solves for each column."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import randn
from torch import Tensor

from jitquant.nn import _rounding
from jitquant.nn._rounding import WeightRounding, output_noise, quantized_weights, shared_gsa

from .helpers import sqnr

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def inputs(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Correlated, and of several magnitudes."""
    mixed = randn(rows, cols, dtype=torch.float32, seed=seed) @ (
        torch.eye(cols) + 0.4 * randn(cols, cols, dtype=torch.float32, seed=seed + 1)
    )
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(seed))
    return mixed * torch.logspace(-1, 1, cols)[order]


def noise(weight: Tensor, x: Tensor, rounding: str) -> Tensor:
    """Of each output, by the product itself."""
    moment = x.T @ x
    q = quantized_weights([weight], rounding, [moment])[0]
    return (x.double() @ (q.dequantize(torch.float32).double() - weight.double()).T).square().sum(0)


def test_scales_that_are_searched_are_the_best_of_all() -> None:
    """All 126 scales of each block and all codes: none is better by much, most are not better."""
    values = randn(64, 32, dtype=torch.float32) * torch.logspace(-1, 0, 64)[:, None]
    gsa = shared_gsa([values])
    codes, scales = _rounding.searched(values, gsa)
    got = (_rounding.dequantized(codes, scales, gsa) - values).double().square()
    got = got.view(64, 2, 16).sum(2)
    units = E4M3 * gsa.double()
    grid = (units[:, None] * E2M1).view(-1, 1, 1, 1, 16)
    x = values.double().view(64, 2, 16, 1)
    best = (grid - x).square().amin(-1).sum(-1).amin(0)
    assert (got >= best * (1 - 1e-6)).all()
    assert (got <= best * 1.1).all()
    assert (got <= best * (1 + 1e-5)).double().mean() > 0.95


def test_four_over_six_is_the_better_of_two() -> None:
    values = randn(96, 64, dtype=torch.float32)
    q = quantized_weights([values], "4over6")[0]
    assert q.gsa.item() == pytest.approx(values.abs().max().item() / 1536, rel=1e-6)
    unit = q.x_sf.double() * q.gsa.double()
    amax = values.double().view(96, 4, 16).abs().amax(2)
    kind = (amax / unit - 4).abs() < (amax / unit - 6).abs()
    assert 0.05 < kind.double().mean() < 0.95  # both are there
    errors = []
    for top in (6, 4):
        scale = (amax / top / q.gsa.double()).to(torch.float8_e4m3fn).double() * q.gsa.double()
        grid = scale[:, :, None, None] * E2M1
        errors.append((grid - values.double().view(96, 4, 16, 1)).square().amin(-1).sum(-1))
    got = (q.dequantize(torch.float32) - values).double().view(96, 4, 16).square().sum(-1)
    assert (got <= torch.minimum(*errors) * (1 + 1e-4)).all()


def test_each_rounding_is_better_than_the_one_before() -> None:
    weight, x = randn(128, 96, dtype=torch.float32, seed=5), inputs(512, 96)
    noises = [noise(weight, x, r).sum().item() for r in _rounding.WEIGHT_ROUNDINGS]
    assert noises == sorted(noises, reverse=True)
    assert noises[3] < 0.5 * noises[0]
    exact = weight
    q = [quantized_weights([weight], r)[0].dequantize(torch.float32) for r in ("nearest", "mse")]
    assert sqnr(q[1], exact) > sqnr(q[0], exact) + 0.5


@pytest.mark.parametrize("rounding", ["nearest", "4over6", "mse", "gptq"])
def test_rounding_is_the_same_under_another_default_dtype(
    rounding: WeightRounding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitquant.nn._rounding._SAMPLE", 64 * 300)
    weight, x = randn(700, 64, dtype=torch.float32), inputs(90, 64)
    moment = x.T @ x
    want = quantized_weights([weight], rounding, [moment])[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = quantized_weights([weight], rounding, [moment])[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.gsa, want.gsa)
    assert torch.equal(got.x_fp4.view(torch.uint8), want.x_fp4.view(torch.uint8))
    assert torch.equal(got.x_sf_bytes, want.x_sf_bytes)


def slow_gptq(weight: Tensor, moment: Tensor, gsa: float) -> Tensor:
    """In float64, from the definition: what is not rounded yet is solved for after each column.

    Returns:
        The dequantized weight.
    """
    n = weight.shape[0]
    w = weight.double()
    h = moment.double() / moment.double().diagonal().mean()
    h = h + torch.diag(0.01 * h.diagonal().mean() + (h.diagonal() == 0).double())
    undamped = moment.double().diagonal().view(-1, 16).sum(1)
    turns = undamped.argsort(descending=True, stable=True)
    order = [16 * int(t) + i for t in turns for i in range(16)]
    error = torch.zeros_like(w)  # of the columns that are rounded
    made = torch.zeros_like(w)
    for place, column in enumerate(order):
        done, rest = order[:place], order[place:]
        moved = -error[:, done] @ h[done][:, rest] @ torch.linalg.inv(h[rest][:, rest])
        now = w[:, rest] + moved
        if place % 16 == 0:
            weights = []
            for i in range(16):
                left = order[place + i :]
                weights.append(1 / torch.linalg.inv(h[left][:, left])[0, 0])
            block = now[:, :16]
            base = (block.abs().amax(1) / 6 / gsa).to(torch.float8_e4m3fn).view(torch.uint8)
            scale = torch.zeros(n, dtype=torch.float64)
            for row in range(n):
                steps = [int(base[row]) + i for i in range(-2, 7)]
                units = E4M3[[min(max(c, 1), 126) - 1 for c in steps]] * gsa
                errors = (units[:, None, None] * E2M1 - block[row, :, None]).square().amin(-1)
                scale[row] = units[(errors * torch.stack(weights)).sum(1).argmin()]
        grid = scale[:, None] * E2M1
        best = (grid - now[:, :1]).abs().argmin(1)
        made[:, column] = grid.gather(1, best[:, None])[:, 0]
        error[:, column] = made[:, column] - w[:, column]
    return made


@pytest.mark.parametrize("rows", [200, 20])  # 20 inputs leave directions that are not seen
def test_gptq_is_that_in_float64(rows: int) -> None:
    weight, x = randn(12, 48, dtype=torch.float32, seed=3), inputs(rows, 48)
    moment, gsa = x.T @ x, shared_gsa([weight])
    codes, scales = _rounding.gptq(weight, moment, gsa)
    got = _rounding.dequantized(codes, scales, gsa)
    want = slow_gptq(weight, moment, gsa.item())
    # A value at a midpoint may go the other way in fp32, and with it the rest of its row.
    same = torch.isclose(got.double(), want, rtol=1e-5, atol=1e-7).all(1)
    assert same.double().mean() >= 0.9
    assert got.double().sub(want).square().sum() < 0.02 * want.square().sum()


def test_long_rows_pass_on_errors_from_chunk_to_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(24, 160, dtype=torch.float32), inputs(512, 160)
    moment, gsa = x.T @ x, shared_gsa([weight])
    want = _rounding.gptq(weight, moment, gsa)
    monkeypatch.setattr(_rounding, "_CHUNK", 16)
    got = _rounding.gptq(weight, moment, gsa)
    assert (got[0] == want[0]).double().mean() > 0.95  # sums are in another order


def test_gptq_on_a_tiny_matrix_beside_all_codes() -> None:
    """Three columns, so that all codes with all scales can be tried."""
    weight = randn(6, 3, dtype=torch.float32, seed=2)
    x = inputs(64, 3, seed=4)
    moment = (x.T @ x).double()
    q = quantized_weights([weight], "gptq", [x.T @ x])[0]
    got = output_noise(q.dequantize(torch.float32) - weight, moment)
    values = torch.tensor(list(itertools.product(sorted(set(E2M1.tolist())), repeat=3)))
    best = torch.full((6,), torch.inf, dtype=torch.float64)
    for unit in E4M3 * q.gsa.double():
        for row in range(6):
            error = values.double() * unit - weight[row].double()
            best[row] = min(best[row], output_noise(error.float(), moment).min())
    assert (got >= best * (1 - 1e-4)).all()
    nearest = noise(weight, x, "nearest")
    assert got.sum() < nearest.sum()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_gptq_is_never_worse_than_nearest(data: st.DataObject) -> None:
    """Whatever the inputs: few, none, with dead columns, enormous; fused layers that differ."""
    seed = data.draw(st.integers(0, 10**6))
    rows, cols = data.draw(st.sampled_from([1, 3, 40])), data.draw(st.integers(1, 70))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.tensor([data.draw(st.integers(-12, 8)) for _ in range(2)])
    weights = [
        (torch.randn(n, cols, generator=generator) * data.draw(st.sampled_from([0, 1, 1e-3, 50])))
        for n in (5, 2)
    ]
    weights = [w.to(dtype) for w in weights]
    x = torch.randn(rows, cols, generator=generator) ** 3 * scales[0]
    x[:, torch.rand(cols, generator=generator) < data.draw(st.sampled_from([0, 0.5, 1]))] = 0
    moment = x.T @ x
    got = quantized_weights(weights, "gptq", [moment, moment])
    want = quantized_weights(weights, "nearest")
    assert torch.equal(got[0].gsa, got[1].gsa)
    for weight, mine, theirs in zip(weights, got, want, strict=True):
        mine.validate()
        errors = [q.dequantize(torch.float32) - weight.float() for q in (mine, theirs)]
        noises = [output_noise(e, moment).sum() for e in errors]
        assert noises[0] <= noises[1] * (1 + 1e-5) + 1e-300


@pytest.mark.parametrize("power", [-100, 83, 120])
@pytest.mark.parametrize("rounding", ["nearest", "mse", "gptq"])
def test_magnitudes_whose_squares_fp32_does_not_have(rounding: WeightRounding, power: int) -> None:
    weight, x = randn(24, 64, dtype=torch.float32), inputs(90, 64)
    moments = [x.T @ x]
    want = quantized_weights([weight], rounding, moments)[0]
    got = quantized_weights([weight * 2.0**power], rounding, moments)[0]
    assert torch.equal(got.gsa, want.gsa * 2.0**power)
    assert torch.equal(got.x_fp4_bytes, want.x_fp4_bytes)
    assert torch.equal(got.x_sf_bytes, want.x_sf_bytes)


@pytest.mark.parametrize("rounding", _rounding.WEIGHT_ROUNDINGS)
def test_the_reciprocal_of_a_gsa_is_finite(rounding: WeightRounding) -> None:
    weight = randn(24, 64, dtype=torch.float32) * 1e-37
    q = quantized_weights([weight], rounding)[0]
    assert (1 / q.gsa).isfinite()
    assert sqnr(q.dequantize(torch.float32), weight) > 19
    assert quantized_weights([0 * weight], rounding)[0].gsa == 0


def test_siblings_have_one_gsa_and_weights_without_inputs_are_rounded_as_mse() -> None:
    first, second = randn(32, 64, dtype=torch.float32), 8 * randn(16, 64, dtype=torch.float32)
    for rounding in _rounding.WEIGHT_ROUNDINGS:
        made = quantized_weights([first, second], rounding)
        assert torch.equal(made[0].gsa, made[1].gsa)
        assert made[0].gsa >= second.abs().max() / 2688 * (1 - 1e-6)
        assert sqnr(made[0].dequantize(torch.float32), first) > 18
    without = quantized_weights([first], "gptq", [None])[0]
    mse = quantized_weights([first], "mse")[0]
    assert torch.equal(without.x_fp4_bytes, mse.x_fp4_bytes)
    assert torch.equal(without.x_sf.view(torch.uint8), mse.x_sf.view(torch.uint8))
