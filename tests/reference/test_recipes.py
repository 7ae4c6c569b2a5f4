"""The recipes against the oracle, and what numerics.md promises of zeros, NaN and infinities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, GRANULARITIES, RECIPES, inputs, randn, specials
from torch import Tensor

from jitquant import reference

from . import oracle

U8 = torch.uint8


def rows_of(x: Tensor) -> np.ndarray:
    return x.float().reshape(-1, x.shape[-1]).numpy()


def assert_equals_oracle(
    x: Tensor,
    recipe: str,
    granularity: str = "tensor",
    divisor: float = 2688.0,
    gsa: Tensor | None = None,
) -> None:
    want = oracle.quantize(
        rows_of(x), recipe, granularity, divisor, None if gsa is None else gsa.numpy()
    )
    if gsa is None:
        x_fp4, x_sf, got_gsa = reference.quantize_nvfp4(
            x, divisor, granularity=granularity, recipe=recipe
        )
        np.testing.assert_array_equal(got_gsa.numpy(), want[2])
    else:
        x_fp4, x_sf = reference.quantize_nvfp4_from_gsa(x, gsa, recipe=recipe)
    groups = want[1].shape[1]
    np.testing.assert_array_equal(x_sf.view(U8).reshape(-1, groups).numpy(), want[1])
    packed = x_fp4.view(U8).reshape(-1, groups * 8).numpy()
    np.testing.assert_array_equal(packed, oracle.pack(want[0]))


SMALL = [k for k in inputs() if k not in ("no_rows", "no_rows_3d", "tiles")]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("label", SMALL)
def test_equals_oracle(label: str, recipe: str, granularity: str) -> None:
    for dtype in DTYPES:
        assert_equals_oracle(inputs()[label](dtype, "cpu"), recipe, granularity)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "gsa", [0.0, 1e-45, 1e-40, 3e-39, 1e-20, 0.0013, 1.0, 1e30, 8.6e37, 3.4e38, math.inf, math.nan]
)
def test_given_gsa_equals_oracle(gsa: float, recipe: str) -> None:
    for dtype in DTYPES:
        assert_equals_oracle(specials(dtype), recipe, gsa=torch.tensor([gsa]))


def test_gsa_a_row_equals_oracle() -> None:
    x = randn(4, 40)
    assert_equals_oracle(x, "te", gsa=torch.tensor([0.0, 1e-3, 2.0, 1e-42]))


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-8, 8, width=32),
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-40, 3.4028235e38]),
    st.integers(-48, 48).map(lambda n: n / 8),
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 3),
    cols=st.integers(1, 35),
    dtype=st.sampled_from(DTYPES),
    recipe=st.sampled_from(RECIPES),
    granularity=st.sampled_from(GRANULARITIES),
    exponent=st.integers(-60, 60),
    data=st.data(),
)
def test_made_up_inputs_equal_oracle(
    rows: int,
    cols: int,
    dtype: torch.dtype,
    recipe: str,
    granularity: str,
    exponent: int,
    data: st.DataObject,
) -> None:
    values = data.draw(st.lists(FLOATS, min_size=rows * cols, max_size=rows * cols))
    x = (torch.tensor(values, dtype=torch.float32) * 2.0**exponent).to(dtype).reshape(rows, cols)
    assert_equals_oracle(x, recipe, granularity)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    recipe=st.sampled_from(RECIPES),
    gsa=st.floats(0, 3.4028234663852886e38, width=32),
    values=st.lists(FLOATS, min_size=16, max_size=48),
)
def test_made_up_gsa_equals_oracle(
    dtype: torch.dtype, recipe: str, gsa: float, values: list[float]
) -> None:
    assert_equals_oracle(torch.tensor(values).to(dtype), recipe, gsa=torch.tensor([gsa]))


@settings(max_examples=50, deadline=None)
@given(divisor=st.floats(2.0**-10, 1e5, width=32), seed=st.integers(0, 1000))
def test_made_up_divisor_equals_oracle(divisor: float, seed: int) -> None:
    assert_equals_oracle(randn(2, 20, seed=seed), "te", divisor=divisor)


def test_scale_is_not_the_reciprocal_of_gsa() -> None:
    # Why a computed gsa cannot be handed on as gsa alone: 1 / (A / 2688) is not 2688 / A.
    a = torch.linspace(0.5, 40, 5000)
    d = torch.tensor(2688.0)
    assert 0.1 < (torch.div(d, a) != torch.div(torch.tensor(1.0), a / d)).float().mean() < 0.5


def test_computed_gsa_given_back() -> None:
    # Where 2688 / A happens to be 1 / gsa the two paths agree bit for bit; elsewhere S differs by
    # an ulp, which moves few codes.
    agree, moved, total = 0, 0, 0
    for seed in range(20):
        x = randn(8, 64, seed=seed)
        x_fp4, x_sf, gsa = reference.quantize_nvfp4(x)
        again = reference.quantize_nvfp4_from_gsa(x, gsa)
        a = x.float().abs().amax()
        if torch.div(torch.tensor(2688.0), a) == torch.div(torch.tensor(1.0), gsa):
            assert torch.equal(again[0].view(U8), x_fp4.view(U8))
            assert torch.equal(again[1].view(U8), x_sf.view(U8))
            agree += 1
        moved += int((again[0].view(U8) != x_fp4.view(U8)).sum())
        total += x_fp4.numel()
    assert agree > 0
    assert moved / total < 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_row_granularity_is_a_tensor_a_row(recipe: str) -> None:
    x = randn(6, 40) * torch.logspace(-5, 5, 6)[:, None].bfloat16()
    whole = reference.quantize_nvfp4(x, granularity="row", recipe=recipe)
    for m in range(6):
        row = reference.quantize_nvfp4(x[m], recipe=recipe)
        assert torch.equal(whole[0][m].view(U8), row[0].view(U8))
        assert torch.equal(whole[1][m].view(U8), row[1].view(U8))
        assert torch.equal(whole[2][m : m + 1], row[2])


@pytest.mark.parametrize("label", ["row_stride", "odd_stride", "every_other", "expanded"])
def test_strides_do_not_matter(label: str) -> None:
    x = inputs()[label](torch.bfloat16, "cpu")
    for a, b in zip(
        reference.quantize_nvfp4(x), reference.quantize_nvfp4(x.contiguous()), strict=True
    ):
        assert torch.equal(a.view(U8), b.view(U8))


def test_leading_dimensions() -> None:
    x = randn(2, 3, 2, 24)
    deep = reference.quantize_nvfp4(x, granularity="row")
    flat = reference.quantize_nvfp4(x.reshape(12, 24), granularity="row")
    assert deep[0].shape == (2, 3, 2, 16)
    assert deep[1].shape == (2, 3, 2, 2)
    assert deep[2].shape == (12,)
    for a, b in zip(deep, flat, strict=True):
        assert torch.equal(a.reshape(-1).view(U8), b.reshape(-1).view(U8))
    swapped = reference.quantize_nvfp4(x.transpose(0, 2))
    again = reference.quantize_nvfp4(x)
    assert torch.equal(swapped[0].view(U8).transpose(0, 2), again[0].view(U8))


@pytest.mark.parametrize("cols", [1, 15, 16, 17, 31, 33])
def test_padding_is_zeros(cols: int) -> None:
    x = randn(5, cols)
    padded = torch.nn.functional.pad(x, (0, -cols % 16))
    for a, b in zip(reference.quantize_nvfp4(x), reference.quantize_nvfp4(padded), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))
    (back,) = reference.dequantize_nvfp4(*reference.quantize_nvfp4(x), cols=cols)
    assert back.shape == x.shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_stays_in_its_block(recipe: str) -> None:
    x = randn(4, 64)
    clean = reference.quantize_nvfp4(x, recipe=recipe)
    assert x[2, 20].abs() < x.abs().amax()
    x[2, 20] = math.nan
    x_fp4, x_sf, gsa = reference.quantize_nvfp4(x, recipe=recipe)
    assert torch.equal(gsa, clean[2])
    assert x_sf.view(U8)[2, 1] == 0x7F
    assert not x_fp4.view(U8)[2, 8:16].any()
    (back,) = reference.dequantize_nvfp4(x_fp4, x_sf, gsa)
    block = torch.zeros(4, 64, dtype=torch.bool)
    block[2, 16:32] = True
    assert torch.equal(back.isnan(), block)
    (expected,) = reference.dequantize_nvfp4(*clean)
    assert torch.equal(back[~block], expected[~block])


def test_infinity_saturates() -> None:
    x = randn(2, 32)
    x[0, 3], x[1, 20] = math.inf, -math.inf
    x_fp4, x_sf, gsa = reference.quantize_nvfp4(x)
    assert gsa.item() == math.inf
    codes = reference.unpack_e2m1(x_fp4)
    assert codes[0, 3] == 7
    assert codes[1, 20] == 15
    assert x_sf.view(U8)[0, 0] == 126
    assert not x_sf.float().isnan().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_block_beside_others(recipe: str) -> None:
    x = randn(2, 48)
    x[0, 16:32] = 0.0
    x[1, 16:32] = -0.0
    x_fp4, x_sf, gsa = reference.quantize_nvfp4(x, recipe=recipe)
    assert x_sf.view(U8)[:, 1].tolist() == [0, 0]
    codes = reference.unpack_e2m1(x_fp4)
    assert codes[0, 16:32].tolist() == [0] * 16
    assert codes[1, 16:32].tolist() == [8] * 16
    (back,) = reference.dequantize_nvfp4(x_fp4, x_sf, gsa)
    assert not back[:, 16:32].any()


def test_block_scales_below_two_to_minus_nine_are_rounded_not_flushed() -> None:
    # 2^-9 is the smallest E4M3; scales from 2^-10 (exclusive) up round to it.
    x = torch.zeros(1, 48)
    x[0, 0] = 448.0 * 6.0
    x[0, 16], x[0, 32] = 6.0 * 2.0**-9 * 0.75, 6.0 * 2.0**-10 * 0.99
    _, x_sf, _ = reference.quantize_nvfp4(x)
    assert x_sf.view(U8)[0].tolist() == [126, 1, 0]


@pytest.mark.parametrize(("recipe", "code"), [("te", 7), ("vllm", 0)])
def test_codes_in_a_block_with_scale_zero(recipe: str, code: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, 1e-4
    x_fp4, x_sf, _ = reference.quantize_nvfp4(x, recipe=recipe)
    assert x_sf.view(U8)[0, 1] == 0
    assert reference.unpack_e2m1(x_fp4)[0, 16] == code


def test_subnormal_tensor_does_not_divide_by_zero() -> None:
    x = torch.full((2, 16), 1e-44)
    for granularity in GRANULARITIES:
        parts = reference.quantize_nvfp4(x, granularity=granularity)
        (back,) = reference.dequantize_nvfp4(*parts, dtype=torch.float32)
        assert back.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_signal_to_noise(recipe: str, dtype: torch.dtype) -> None:
    x = randn(256, 512, dtype=dtype)
    parts = reference.quantize_nvfp4(x, recipe=recipe)
    (back,) = reference.dequantize_nvfp4(*parts, dtype=torch.float32)
    noise = (back.double() - x.double()).square().mean()
    assert 20.0 < 10 * torch.log10(x.double().square().mean() / noise) < 22.0


def test_the_recipes_differ_a_little() -> None:
    x = randn(256, 512)
    te, vllm = (reference.quantize_nvfp4(x, recipe=r) for r in ("te", "vllm"))
    different = (te[1].view(U8) != vllm[1].view(U8)).double().mean()
    assert different < 0.01
    assert torch.equal(te[2], vllm[2])


def test_te_flush_drops_the_codes_of_scales_that_underflow() -> None:
    x = randn(64, 64, dtype=torch.float32)
    x[:, 16:32] *= 1e-6
    te, flush = (reference.quantize_nvfp4(x, recipe=r) for r in ("te", "te_flush"))
    assert torch.equal(te[1].view(U8), flush[1].view(U8))
    zero = (te[1].view(U8) == 0).repeat_interleave(8, dim=1)
    assert zero.sum() == 64 * 8
    assert not (flush[0].view(U8)[zero] & 0x77).any()  # but for signs
    assert (te[0].view(U8)[zero] & 0x77 == 0x77).all()
    assert torch.equal(te[0].view(U8)[~zero], flush[0].view(U8)[~zero])


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 17), (0, 1)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_rows(shape: tuple[int, ...], granularity: str) -> None:
    x_fp4, x_sf, gsa = reference.quantize_nvfp4(torch.zeros(shape), granularity=granularity)
    groups = -(-shape[-1] // 16)
    assert x_fp4.shape == (*shape[:-1], groups * 8)
    assert x_sf.shape == (*shape[:-1], groups)
    assert gsa.tolist() == ([0.0] if granularity == "tensor" else [])
    (back,) = reference.dequantize_nvfp4(x_fp4, x_sf, gsa, cols=shape[-1])
    assert back.shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_gsa(dtype: torch.dtype) -> None:
    x = randn(3, 5, 17, dtype=dtype)
    x[1, 2, 3] = math.nan
    (gsa,) = reference.amax_gsa(x)
    want = np.float32(np.nanmax(np.abs(x.float().numpy()))) / np.float32(2688)
    assert gsa.tolist() == [float(want)]
    assert reference.amax_gsa(x, 6.0)[0].item() == pytest.approx(float(want) * 448)
    assert reference.amax_gsa(torch.full((4,), math.nan))[0].item() == 0.0
