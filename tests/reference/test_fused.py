"""Weights, deinterleave, RMSNorm and mHC against plain indexing and float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, randn

from jitquant import reference
from jitquant.numerics import sources

from . import oracle

U8 = torch.uint8


@pytest.mark.parametrize("shape", [(32, 64), (17, 40), (5, 1), (48, 33)])
@pytest.mark.parametrize("recipe", ["te", "vllm", "te_flush"])
def test_16x16_blocks(shape: tuple[int, int], recipe: str) -> None:
    w = randn(*shape, dtype=torch.float32)
    x_fp4, x_sf, gsa = reference.quantize_weight_nvfp4(w, block="16x16", recipe=recipe)
    codes, scales, want_gsa = oracle.quantize(w.numpy(), recipe, tile_rows=16)
    np.testing.assert_array_equal(x_sf.view(U8).numpy(), scales)
    np.testing.assert_array_equal(x_fp4.view(U8).numpy(), oracle.pack(codes))
    np.testing.assert_array_equal(gsa.numpy(), want_gsa)


def test_16x16_scale_is_repeated_and_keeps_nan() -> None:
    w = randn(40, 32)
    w[3, 17] = math.nan
    x_fp4, x_sf, _ = reference.quantize_weight_nvfp4(w, block="16x16")
    scales = x_sf.view(U8)
    assert (scales[:16] == scales[0]).all()
    assert (scales[32:] == scales[32]).all()
    assert (scales[:16, 1] == 0x7F).all()
    assert (scales[16:, 1] != 0x7F).all()
    assert not x_fp4.view(U8)[:16, 8:16].any()


def test_16x16_is_the_same_transposed() -> None:
    w = randn(48, 80)
    values = reference.dequantize_nvfp4(*reference.quantize_weight_nvfp4(w, block="16x16"))[0]
    turned = reference.dequantize_nvfp4(
        *reference.quantize_weight_nvfp4(w.T.contiguous(), block="16x16")
    )[0]
    assert torch.equal(values, turned.T)


@pytest.mark.parametrize("block", ["1x16", "16x16"])
@pytest.mark.parametrize("shape", [(32, 24), (40, 7), (1, 16), (16, 1)])
def test_dim_0_is_dim_1_of_the_transpose(shape: tuple[int, int], block: str) -> None:
    w = randn(*shape)
    x_fp4, x_sf, gsa = reference.quantize_weight_nvfp4(w, block=block, dim=0)
    turned = reference.quantize_weight_nvfp4(w.T.contiguous(), block=block)
    groups = -(-shape[0] // 16)
    assert x_fp4.shape == (groups * 8, shape[1])
    assert x_sf.shape == (groups, shape[1])
    assert x_fp4.is_contiguous()
    assert x_sf.is_contiguous()
    assert torch.equal(x_fp4.view(U8), turned[0].view(U8).T)
    assert torch.equal(x_sf.view(U8), turned[1].view(U8).T)
    assert torch.equal(gsa, turned[2])
    (back,) = reference.dequantize_nvfp4(x_fp4, x_sf, gsa, cols=shape[0], dim=0)
    (want,) = reference.dequantize_nvfp4(*turned, cols=shape[0])
    assert torch.equal(back, want.T)


def test_1x16_weight_is_an_activation() -> None:
    w = randn(33, 40)
    for a, b in zip(reference.quantize_weight_nvfp4(w), reference.quantize_nvfp4(w), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))


@pytest.mark.parametrize(("inter", "run"), [(32, 8), (21, 7), (40, 8), (24, 1), (16, 16)])
def test_deinterleave_indices(inter: int, run: int) -> None:
    x = torch.arange(3 * 2 * inter, dtype=torch.float32).reshape(3, 2 * inter) / 64
    gate = torch.empty(3, inter)
    up = torch.empty(3, inter)
    for c in range(inter):
        column = (c // run) * 2 * run + c % run
        gate[:, c], up[:, c] = x[:, column], x[:, column + run]
    assert torch.equal(reference.deinterleave(x, inter, run, "select"), gate)
    swiglu = reference.deinterleave(x, inter, run, "swiglu")
    torch.testing.assert_close(swiglu, torch.nn.functional.silu(gate) * up)
    halves = torch.cat((gate, up), dim=1)
    assert torch.equal(reference.deinterleave(halves, inter, 0, "select"), gate)
    assert torch.equal(reference.deinterleave(halves, inter, 0, "swiglu"), swiglu)


def test_deinterleave_amax_is_that_of_the_values() -> None:
    x = randn(4, 64)
    x[0, 8] = 1000.0  # an up column, which select leaves out
    _, _, gsa = reference.deinterleave_quantize_nvfp4(x, 32, 8)
    gate = reference.deinterleave(x, 32, 8, "select")
    assert gsa.item() == (gate.abs().amax() / 2688).item()
    plain = reference.quantize_nvfp4(gate)
    fused = reference.deinterleave_quantize_nvfp4(x, 32, 8)
    for a, b in zip(plain, fused, strict=True):
        assert torch.equal(a.view(U8), b.view(U8))
    static = reference.deinterleave_quantize_nvfp4_from_gsa(x, 32, 8, torch.tensor([0.01]))
    want = reference.quantize_nvfp4_from_gsa(gate, torch.tensor([0.01]))
    assert torch.equal(static[0].view(U8), want[0].view(U8))


def test_swiglu_at_the_ends() -> None:
    gate = torch.tensor([[0.0, 100.0, -100.0, -1000.0, math.inf, math.nan, -0.0, 1e-40]])
    got = reference.deinterleave(torch.cat((gate, torch.full_like(gate, 2.0)), 1), 8, 0, "swiglu")
    assert got[0, :5].tolist() == [0.0, 200.0, pytest.approx(-7.4e-42, rel=0.1), 0.0, math.inf]
    assert got[0, 5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 100), (1, 7168), (4, 1)])
def test_rmsnorm_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    v = x.double().reshape(-1, shape[-1])
    inv = (v.square().mean(1) + 1e-6).rsqrt()
    y, inv_rms = reference.rmsnorm(v.float(), weight, 1e-6)
    torch.testing.assert_close(inv_rms.double(), inv, rtol=3e-7, atol=0)
    torch.testing.assert_close(y.double(), v * inv[:, None] * weight.double(), rtol=6e-7, atol=0)


def _add(a: float, b: float) -> float:
    return nearest_fp32(Fraction(a) + Fraction(b))


def _halves(sums: list[float]) -> float:
    """The sum of 2^n numbers: i and i + 2^(n - 1) first."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [_add(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def _sum_of_squares(v: list[float], run: int) -> float:
    """The order of docs/numerics.md, one exact fraction after another."""

    def of_run(values: list[float]) -> float:
        total = 0.0
        for x in values:
            total = nearest_fp32(Fraction(x) ** 2 + Fraction(total))
        return total

    def of_block(values: list[float]) -> float:
        runs = [of_run(values[i : i + run]) for i in range(0, 16, run)]
        return _add(*runs) if run == 8 else _add(_add(*runs[:2]), _add(*runs[2:]))

    v = v + [0.0] * (-len(v) % 512)
    blocks = [of_block(v[i : i + 16]) for i in range(0, len(v), 16)]
    chunks = [_halves(blocks[i : i + 32]) for i in range(0, len(blocks), 32)]
    sums = [0.0] * 64
    for i, chunk in enumerate(chunks):
        sums[i % 64] = _add(sums[i % 64], chunk)
    return _halves(sums)


@pytest.mark.parametrize("cols", [1, 40, 530, 1100, pytest.param(33000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", [4, 8])
def test_squares_are_added_in_the_documented_order(cols: int, run: int) -> None:
    v = randn(1, cols, dtype=torch.float32) * torch.logspace(-3, 2, cols)
    total = _sum_of_squares(v[0].tolist(), run)
    assert sources.sum_of_squares(v, run).item() == total
    over_cols = nearest_fp32(Fraction(1, cols))
    eps = np.float32(1e-6).item()
    mean = nearest_fp32(Fraction(total) * Fraction(over_cols) + Fraction(eps))
    root = np.sqrt(np.float32(mean))
    _, inv_rms = reference.rmsnorm(v, torch.ones(cols), 1e-6, run=run)
    assert inv_rms.item() == (np.float32(1) / root).item()


def test_weighted_is_rounded_toward_zero() -> None:
    v, w = randn(1000, dtype=torch.float32), randn(1000, dtype=torch.float32, seed=1)
    v[0], w[0], v[1], w[1] = 3e38, -10.0, 1e-30, 1e-15
    got = sources.weighted(v, w)
    for product, a, b in zip(got.tolist(), v.tolist(), w.tolist(), strict=True):
        exact = abs(Fraction(a) * Fraction(b))
        assert Fraction(abs(product)) <= exact
        if abs(product) < torch.finfo(torch.float32).max:
            assert exact < Fraction(np.nextafter(np.float32(abs(product)), np.float32(3e38)).item())
        assert math.copysign(1.0, product) == math.copysign(1.0, a) * math.copysign(1.0, b)
    assert got[0] == -torch.finfo(torch.float32).max
    special = sources.weighted(
        torch.tensor([math.inf, math.inf, 1.0]), torch.tensor([2.0, 0.0, math.nan])
    )
    assert special[0] == math.inf
    assert bool(special[1:].isnan().all())


def test_rmsnorm_is_pytorchs() -> None:
    x, weight = randn(6, 384, dtype=torch.float32), randn(384, dtype=torch.float32, seed=1)
    y, _ = reference.rmsnorm(x, weight, 1e-5)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (384,), weight, 1e-5))


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_rmsnorm_quantize_is_nearly_its_parts(granularity: str) -> None:
    """But for elements, which are multiplied with inv_rms and their factor in one."""
    x, weight = randn(50, 3, 400), randn(400, seed=1)
    got = reference.rmsnorm_quantize_nvfp4(x, weight, granularity=granularity)
    y, inv_rms = reference.rmsnorm(x.float().reshape(150, 400), weight, 1e-6, run=8)
    want = reference.quantize_nvfp4(y.reshape(50, 3, 400), granularity=granularity)
    for a, b in zip(got[1:], (*want[1:], inv_rms), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))
    assert (got[0].view(U8) != want[0].view(U8)).sum() <= 2


def test_factor_of_a_norm_that_is_not_a_normal_number() -> None:
    # enc * inv_rms overflows; the values times inv_rms do not.
    x = torch.linspace(1.0, 6.0, 16)[None] * 1e-39
    codes, _, _, inv_rms = reference.rmsnorm_quantize_nvfp4(x, torch.ones(16), 1e-12)
    plain = reference.quantize_nvfp4(x * inv_rms, granularity="row")[0]
    assert torch.equal(codes.view(U8), plain.view(U8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    x, residual = randn(5, 48, dtype=dtype), randn(5, 48, dtype=dtype, seed=2)
    weight = randn(48, dtype=dtype, seed=1)
    total = (x.float() + residual.float()).to(dtype)
    kept = x.clone()
    got = reference.rmsnorm_quantize_nvfp4(x, weight, residual=residual)
    assert torch.equal(residual, total)
    assert torch.equal(x, kept)
    for a, b in zip(got, reference.rmsnorm_quantize_nvfp4(total, weight), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 3),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([1.0, 2.0**-24, 2.0**-40]),
)
def test_fma_rounds_once(triples: list[tuple[float, float, float]], shrink: float) -> None:
    a, b, c = torch.tensor(triples, dtype=torch.float32).T
    # Near-cancellation and sums far apart are where two roundings show.
    c = torch.where(torch.arange(len(triples)) % 2 == 0, -(a * b) * shrink, c)
    c = torch.where(c.isfinite(), c, torch.zeros_like(c))
    got = sources._fma(a, b, c)
    for i in range(len(triples)):
        exact = Fraction(a[i].item()) * Fraction(b[i].item()) + Fraction(c[i].item())
        assert got[i].item() == nearest_fp32(exact)


def nearest_fp32(exact: Fraction) -> float:
    """The fp32 nearest to a fraction, ties to even, by way of integers alone."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    steps = round(magnitude / quantum)  # Python rounds ties to even
    value = steps * quantum
    value = math.inf if value >= Fraction(2) ** 128 else float(value)
    return math.copysign(value, exact)


def test_fma_midpoint_that_two_roundings_miss() -> None:
    # a * b = 1 + 2^-24 up to 2^-60 below: fp64 rounds to the midpoint, which fp32 ties to even.
    a, b = torch.tensor([1.0 + 2.0**-23]), torch.tensor([1.0])
    c = torch.tensor([2.0**-24 - 2.0**-48])
    assert sources._fma(a, b, c).item() == nearest_fp32(Fraction(a.item()) + Fraction(c.item()))
    big, small = torch.tensor([2.0**12 + 1]), torch.tensor([2.0**-60])
    product = Fraction(big.item()) ** 2
    want = nearest_fp32(product + Fraction(2) ** -60)
    assert sources._fma(big, big, small).item() == want
    assert float(np.float32(float(product) + 2.0**-60)) != want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_hyper_connection_sum(streams: int, dtype: torch.dtype) -> None:
    X, A = randn(3, 2, streams, 40, dtype=dtype), randn(3, 2, streams, dtype=dtype, seed=1)
    got = reference.hyper_connection_sum(X, A)
    want = torch.einsum("abhn,abh->abn", X.double(), A.double()).reshape(6, 40)
    assert got.shape == (6, 40)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    if streams == 1:
        assert torch.equal(got, (A.float()[..., None] * X.float()).reshape(6, 40))


def test_mhc_is_its_parts() -> None:
    X, A, weight = randn(5, 4, 48), randn(5, 4, seed=1), randn(48, seed=2)
    v = reference.hyper_connection_sum(X, A)
    y, inv_rms = reference.rmsnorm(v, weight, 1e-6)
    got = reference.mhc_rmsnorm_quantize_nvfp4(X, A, weight)
    want = (*reference.quantize_nvfp4(y, granularity="row"), inv_rms)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(U8), b.view(U8))


def test_one_stream_of_weight_one_is_rmsnorm() -> None:
    x, weight = randn(5, 48), randn(48, seed=2)
    got = reference.mhc_rmsnorm_quantize_nvfp4(x[:, None], torch.ones(5, 1), weight)
    for a, b in zip(got, reference.rmsnorm_quantize_nvfp4(x, weight), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))
