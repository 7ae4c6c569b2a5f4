"""FP8 and INT8 against the oracle, and what numerics.md promises beside."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, inputs, randn, specials
from sweeps import all_bf16, all_bf16_arrangements, all_fp16
from torch import Tensor

from jitquant import reference
from jitquant.formats import (
    FP8_DTYPES,
    GROUP_DTYPES,
    GROUP_EPS,
    GROUP_RECIPES,
    GROUP_SCALE_LAYOUTS,
    GROUP_SIZES,
    QUANTIZED_MAX,
    SCALE_FORMATS,
)
from jitquant.numerics.fp8 import encode, scale_from_amax
from jitquant.ops import quantize_block, quantize_per_token_group

from . import oracle_fp8 as oracle

U8 = torch.uint8
E4M3, E5M2 = FP8_DTYPES
by_dtype = pytest.mark.parametrize("dtype", GROUP_DTYPES, ids=lambda d: str(d)[6:])
by_fp8 = pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: str(d)[6:])
FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-8, 8, width=32),
    st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-40, 3.4028235e38]),
    st.integers(-64, 64).map(lambda n: n / 8),
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def rows_of(x: Tensor) -> np.ndarray:
    return x.float().reshape(-1, x.shape[-1]).numpy()


def same_bytes(got: Tensor, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.contiguous().view(U8).reshape(-1).numpy(), want.reshape(-1))


def same_floats(got: Tensor, want: np.ndarray) -> None:
    got = got.reshape(-1).numpy()
    want = want.reshape(-1)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    number = ~np.isnan(want)
    np.testing.assert_array_equal(got[number].view(np.int32), want[number].view(np.int32))


# ---- elements ----------------------------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("values", [all_bf16(), all_fp16()], ids=["bf16", "fp16"])
def test_every_16_bit_float(dtype: torch.dtype, values: Tensor) -> None:
    x = values.float()
    same_bytes(encode(x, dtype), oracle.encode(x.numpy(), name_of(dtype)))


@by_dtype
def test_around_every_value_and_tie(dtype: torch.dtype) -> None:
    values = oracle.VALUES.get(name_of(dtype), np.arange(128.0))
    points = np.concatenate((values, (values[1:] + values[:-1]) / 2, [values[-1] * 1.1]))
    x = points.astype(np.float32)
    near = [x]
    for direction in (-np.inf, np.inf):
        step = x
        for _ in range(4):
            step = np.nextafter(step, np.float32(direction))
            near.append(step)
    x = np.concatenate(near)
    x = np.concatenate((x, -x))
    same_bytes(encode(torch.from_numpy(x), dtype), oracle.encode(x, name_of(dtype)))


def test_saturation_and_nan() -> None:
    x = torch.tensor([6e4, 1e30, math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0])
    assert encode(x, E5M2).view(U8).tolist() == [0x7B, 0x7B, 0x7B, 0xFB, 0x7F, 0x7F, 0, 0x80]
    assert encode(x, E4M3).view(U8).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0, 0x80]
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -2.5, 126.6, 1e9, -math.inf, math.nan])
    assert encode(x, torch.int8).tolist() == [0, 2, 2, 0, -2, 127, 127, -128, 0]


# ---- one scale for the tensor or for a row -----------------------------------------------------


def assert_fp8(
    x: Tensor,
    dtype: torch.dtype,
    granularity: str,
    bound: float | None = None,
    eps: float | None = None,
) -> None:
    v, name = rows_of(x), name_of(dtype)
    a = oracle.amax(v, axis=1) if granularity == "row" else oracle.amax(v).reshape(1)
    used = a if bound is None else np.where(a > np.float32(bound), np.float32(bound), a)
    used = used if eps is None else np.where(used < np.float32(eps), np.float32(eps), used)
    scale = oracle.tensor_scale(used, name)
    data, scale_inv, amax = reference.quantize_fp8(
        x, dtype=dtype, granularity=granularity, scale_ub=bound, amax_eps=eps
    )
    same_floats(amax, a)
    same_floats(scale_inv, oracle.tensor_scale_inv(scale, used, name))
    with np.errstate(all="ignore"):
        same_bytes(data, oracle.encode(v * scale[:, None], name))
    assert data.shape == x.shape
    assert scale_inv.shape == amax.shape == ((*x.shape[:-1], 1) if granularity == "row" else (1,))


@by_dtype
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_fp8_equals_oracle(dtype: torch.dtype, granularity: str) -> None:
    for (label, make), given_dtype in itertools.product(inputs().items(), DTYPES):
        if label.startswith("no_rows"):
            continue
        x = make(given_dtype, "cpu")
        assert_fp8(x, dtype, granularity)
        assert_fp8(x, dtype, granularity, 0.7)
        assert_fp8(x, dtype, granularity, 3.0, 1.5)


@by_dtype
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_fp8_of_every_bf16(dtype: torch.dtype, granularity: str) -> None:
    for x in all_bf16_arrangements():
        assert_fp8(x, dtype, granularity)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 40),
    given_dtype=st.sampled_from(DTYPES),
    dtype=st.sampled_from(FP8_DTYPES),
    granularity=st.sampled_from(["tensor", "row"]),
    bound=st.one_of(st.none(), st.floats(2.0**-20, 2.0**20, width=32)),
    exponent=st.integers(-120, 100),
    data=st.data(),
)
def test_made_up_fp8(
    rows: int,
    cols: int,
    given_dtype: torch.dtype,
    dtype: torch.dtype,
    granularity: str,
    bound: float | None,
    exponent: int,
    data: st.DataObject,
) -> None:
    values = data.draw(st.lists(FLOATS, min_size=rows * cols, max_size=rows * cols))
    x = (torch.tensor(values) * 2.0**exponent).to(given_dtype).reshape(rows, cols)
    assert_fp8(x, dtype, granularity, bound)


@pytest.mark.parametrize(
    ("a", "scale"),
    [
        (0.0, 1.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
        (1e-45, 3.4028234663852886e38),
        (1e-37, 3.4028234663852886e38),
        (448.0, 1.0),
        (2.0, 224.0),
    ],
)
def test_scale_of_an_amax(a: float, scale: float) -> None:
    assert scale_from_amax(torch.tensor([a]), 448.0).item() == scale


def test_scale_inv_is_not_the_quotient_of_amax() -> None:
    a = torch.linspace(0.1, 20, 10_000)
    scale_inv = torch.div(torch.ones(()), scale_from_amax(a, 448.0))
    assert 0.2 < (scale_inv != a / torch.tensor(448.0)).float().mean() < 0.3


@pytest.mark.parametrize("scale", [0.25, 3.7, 1e-42, 3.4e38, 0.0, math.inf, math.nan])
@by_fp8
def test_given_scale(scale: float, dtype: torch.dtype) -> None:
    for x in (specials(torch.bfloat16), randn(3, 20, dtype=torch.float32)):
        data, scale_inv, amax = reference.quantize_fp8(x, torch.tensor([scale]), dtype=dtype)
        with np.errstate(all="ignore"):
            same_bytes(data, oracle.encode(rows_of(x) * np.float32(scale), name_of(dtype)))
            same_floats(scale_inv, np.array([np.float32(1) / np.float32(scale)]))
        same_floats(amax, oracle.amax(rows_of(x)).reshape(1))


def test_scale_given_back_gives_the_same() -> None:
    for x in (randn(9, 40), randn(9, 40) * 1e-30, torch.zeros(2, 3)):
        data, scale_inv, amax = reference.quantize_fp8(x, dtype=E4M3)
        scale = scale_from_amax(amax, 448.0)
        again = reference.quantize_fp8(x, scale, dtype=E4M3)
        assert torch.equal(again[0].view(U8), data.view(U8))
        assert torch.equal(again[1], scale_inv)
        assert torch.equal(again[2], amax)


def test_scale_a_row() -> None:
    x, scale = randn(2, 3, 20), torch.tensor([1.0, 2.0, 0.5, 3.0, 100.0, 1e-3])
    data, scale_inv, amax = reference.quantize_fp8(x, scale, dtype=E4M3, granularity="row")
    assert scale_inv.shape == amax.shape == (2, 3, 1)
    for i, row in enumerate(x.reshape(6, 20)):
        one = reference.quantize_fp8(row, scale[i : i + 1], dtype=E4M3)
        assert torch.equal(data.reshape(6, 20)[i].view(U8), one[0].view(U8))
        assert scale_inv.reshape(-1)[i] == one[1]
        assert amax.reshape(-1)[i] == one[2]
    assert reference.quantize_fp8(x, scale, dtype=E4M3, granularity="row", with_amax=False)[
        2
    ].shape == (0,)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_nan_and_infinity(granularity: str) -> None:
    x = randn(3, 20)
    x[1, 4] = math.nan
    data, scale_inv, amax = reference.quantize_fp8(x, dtype=E4M3, granularity=granularity)
    bad = 0 if granularity == "tensor" else 1
    assert amax.reshape(-1)[bad].isnan()
    assert scale_inv.reshape(-1)[bad] == 1
    assert data.view(U8)[1, 4] == 0x7F
    assert data.float().isnan().sum() == 1
    x[1, 4] = -math.inf
    data, scale_inv, amax = reference.quantize_fp8(x, dtype=E4M3, granularity=granularity)
    assert amax.reshape(-1)[bad] == math.inf
    assert scale_inv.reshape(-1)[bad] == 1
    assert data.float()[1, 4] == -448


# ---- groups ------------------------------------------------------------------------------------


def assert_groups(
    x: Tensor,
    size: int,
    dtype: torch.dtype,
    recipe: str,
    scale_format: str,
    layout: str,
    eps: float | None,
) -> None:
    v, name = rows_of(x), name_of(dtype)
    rows, cols = v.shape
    count = -(-cols // size)
    padded = np.zeros((rows, count * size), np.float32)
    padded[:, :cols] = v
    codes, scale_inv, exponent = oracle.groups(
        padded.reshape(-1, size),
        name,
        recipe,
        scale_format != "float32",
        GROUP_EPS[recipe] if eps is None else eps,
    )
    data, stored = reference.quantize_per_token_group(
        x,
        size,
        dtype=dtype,
        scale_format=scale_format,
        scale_layout=layout,
        eps=eps,
        recipe=recipe,
    )
    assert data.shape == x.shape
    same_bytes(data, codes.reshape(rows, -1)[:, :cols])
    # Every scale is where the layout has it, and nothing but zeros is anywhere else.
    leading = x.shape[:-1] or (1,)
    batches, tall = math.prod(leading[:-1]), leading[-1]
    packed = scale_format == "ue8m0_packed"
    cells = stored.clone().view(U8).reshape(-1).numpy() if packed else stored.reshape(-1).numpy()
    wide = -(-count // 4) if packed else count
    stored_rows = -(-tall // 4) * 4 if layout == "column_tma" else tall
    assert stored.numel() == batches * stored_rows * wide
    want = np.zeros(cells.shape, cells.dtype)
    for i, (batch, row, group) in enumerate(
        itertools.product(range(batches), range(tall), range(count))
    ):
        column = group // 4 if packed else group
        if layout == "row":
            at = (batch * tall + row) * wide + column
        else:
            at = (batch * wide + column) * stored_rows + row
        if packed:
            want[4 * at + group % 4] = exponent[i]
        else:
            want[at] = scale_inv[i]
    np.testing.assert_array_equal(cells, want)


WAYS = list(itertools.product(GROUP_DTYPES, GROUP_RECIPES, SCALE_FORMATS, GROUP_SCALE_LAYOUTS))


@pytest.mark.parametrize("size", GROUP_SIZES)
def test_groups_equal_oracle(size: int) -> None:
    turn = itertools.cycle(WAYS)
    for (label, make), given_dtype in itertools.product(inputs().items(), DTYPES):
        if label.startswith("no_rows"):
            continue
        for _ in range(4):
            assert_groups(make(given_dtype, "cpu"), size, *next(turn), None)


@pytest.mark.parametrize("recipe", GROUP_RECIPES)
@by_dtype
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
def test_every_bf16_in_groups(dtype: torch.dtype, recipe: str, scale_format: str) -> None:
    for x in all_bf16_arrangements():
        v = x.float().numpy()
        codes, scale_inv, exponent = oracle.groups(
            v, name_of(dtype), recipe, scale_format != "float32", GROUP_EPS[recipe]
        )
        data, stored = reference.quantize_per_token_group(
            x, 16, dtype=dtype, recipe=recipe, scale_format=scale_format
        )
        same_bytes(data, codes)
        if scale_format == "ue8m0_packed":
            np.testing.assert_array_equal(stored.reshape(-1).numpy(), exponent)
        else:
            same_floats(stored, scale_inv)


@pytest.mark.parametrize("bounds", [(-448.0, 224.0), (-20.0, 96.0), (0.0, 16.0)])
@by_dtype
def test_bounds_of_elements(dtype: torch.dtype, bounds: tuple[float, float]) -> None:
    """As vLLM's and SGLang's ``fp8_min`` and ``fp8_max``: 224 is what they take on ROCm."""
    low, high = max(bounds[0], -QUANTIZED_MAX[dtype]), min(bounds[1], QUANTIZED_MAX[dtype])
    x = randn(40, 64, dtype=torch.float32)
    x[3, 5], x[7, 2] = math.nan, -math.inf
    for recipe, scale_format in itertools.product(GROUP_RECIPES, SCALE_FORMATS[:2]):
        ue8m0 = scale_format != "float32"
        eps = GROUP_EPS[recipe]
        how = {"recipe": recipe, "scale_format": scale_format, "fp8_min": low, "fp8_max": high}
        tiles = x.reshape(-1, 16).numpy()
        codes, scales, _ = oracle.groups(tiles, name_of(dtype), recipe, ue8m0, eps, (low, high))
        q = quantize_per_token_group(x, 16, dtype=dtype, **how)
        same_bytes(q.data, codes)
        same_floats(q.scale_inv, scales)
        plain = torch.where(x.isfinite(), x, 0)
        finite = quantize_per_token_group(plain, 16, dtype=dtype, **how).data.float()
        assert low <= finite.min()
        assert finite.max() <= high
        tile = x[:16, 16:32].reshape(1, -1).numpy()
        codes, scales, _ = oracle.groups(tile, name_of(dtype), recipe, ue8m0, eps, (low, high))
        q = quantize_block(x, (16, 16), dtype=dtype, **how)
        same_bytes(q.data[:16, 16:32], codes)
        same_floats(q.scale_inv[0, 1], scales)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=2),
    cols=st.integers(1, 70),
    size=st.sampled_from(GROUP_SIZES),
    given_dtype=st.sampled_from(DTYPES),
    way=st.sampled_from(WAYS),
    eps=st.one_of(st.none(), st.floats(2.0**-100, 2.0**20, width=32)),
    exponent=st.integers(-110, 100),
    data=st.data(),
)
def test_made_up_groups(
    shape: list[int],
    cols: int,
    size: int,
    given_dtype: torch.dtype,
    way: tuple[torch.dtype, str, str, str],
    eps: float | None,
    exponent: int,
    data: st.DataObject,
) -> None:
    count = math.prod(shape) * cols
    values = data.draw(st.lists(FLOATS, min_size=count, max_size=count))
    x = (torch.tensor(values) * 2.0**exponent).to(given_dtype).reshape(*shape, cols)
    assert_groups(x, size, *way, eps)


@pytest.mark.parametrize("recipe", GROUP_RECIPES)
@by_dtype
def test_zeros_never_become_nan(recipe: str, dtype: torch.dtype) -> None:
    for scale_format in SCALE_FORMATS:
        for zero in (torch.zeros(3, 40), -torch.zeros(3, 40)):
            data, stored = reference.quantize_per_token_group(
                zero, 32, dtype=dtype, recipe=recipe, scale_format=scale_format
            )
            (back,) = reference.dequantize(data, stored, 1, 32)
            assert torch.equal(back, zero.bfloat16())


@pytest.mark.parametrize("recipe", GROUP_RECIPES)
@by_dtype
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
def test_nan_stays_in_its_group(recipe: str, dtype: torch.dtype, scale_format: str) -> None:
    x = randn(2, 64)
    keywords = {"dtype": dtype, "recipe": recipe, "scale_format": scale_format}
    (clean,) = reference.dequantize(*reference.quantize_per_token_group(x, 16, **keywords), 1, 16)
    x[1, 20] = math.nan
    (back,) = reference.dequantize(*reference.quantize_per_token_group(x, 16, **keywords), 1, 16)
    group = torch.zeros(2, 64, dtype=torch.bool)
    group[1, 16:32] = True
    assert torch.equal(back.isnan(), group)
    assert torch.equal(back[~group], clean[~group])


def test_power_of_two_scales() -> None:
    x = randn(8, 512)
    for recipe in GROUP_RECIPES:
        _, exact = reference.quantize_per_token_group(x, 128, dtype=E4M3, recipe=recipe)
        data, scales = reference.quantize_per_token_group(
            x, 128, dtype=E4M3, recipe=recipe, scale_format="ue8m0"
        )
        assert (torch.frexp(scales)[0] == 0.5).all()
        assert (scales >= exact).all()
        assert (scales < 2 * exact).all()
        assert data.float().abs().amax() <= 448
        _, packed = reference.quantize_per_token_group(
            x, 128, dtype=E4M3, recipe=recipe, scale_format="ue8m0_packed"
        )
        exponents = packed.view(U8).reshape(8, 4).float()
        assert torch.equal(torch.exp2(exponents - 127), scales)


def test_int8_is_rounded_not_truncated() -> None:
    x = randn(64, 512, dtype=torch.float32)
    data, scales = reference.quantize_per_token_group(x, 128, dtype=torch.int8)
    (back,) = reference.dequantize(data, scales, 1, 128, dtype=torch.float32)
    noise = (back.double() - x.double()).square().mean()
    assert 10 * torch.log10(x.double().square().mean() / noise) > 42
    step = scales.repeat_interleave(128, dim=1)
    assert ((back - x).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("cols", [1, 15, 127, 129, 300])
def test_a_ragged_group_is_filled_with_zeros(cols: int) -> None:
    x = randn(3, cols)
    padded = torch.nn.functional.pad(x, (0, -cols % 128))
    data, scales = reference.quantize_per_token_group(x, 128, dtype=E4M3)
    want, want_scales = reference.quantize_per_token_group(padded, 128, dtype=E4M3)
    assert torch.equal(data.view(U8), want[:, :cols].view(U8))
    assert torch.equal(scales, want_scales)


@pytest.mark.parametrize("layout", GROUP_SCALE_LAYOUTS)
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts(layout: str, scale_format: str, dtype: torch.dtype) -> None:
    x = randn(4, 6, 80)
    counts = torch.tensor([2, 0, 6, 99], dtype=dtype)
    keywords = {"dtype": E4M3, "scale_layout": layout, "scale_format": scale_format}
    want = reference.quantize_per_token_group(x, 32, **keywords)
    poisoned = x.clone()
    there = torch.arange(6) < counts[:, None]
    poisoned[~there] = math.nan
    got = reference.quantize_per_token_group(poisoned, 32, counts, **keywords)
    rows = there[:, :, None].expand(-1, -1, want[0].shape[-1])
    assert torch.equal(got[0].view(U8), want[0].view(U8) * rows)
    scales, full = (s if layout == "row" else s.transpose(1, 2)[:, :6] for s in (got[1], want[1]))
    assert torch.equal(scales, full * there[:, :, None])
    if layout == "column_tma":
        assert not got[1][:, :, 6:].any()


# ---- blocks and both orientations --------------------------------------------------------------


@by_dtype
@pytest.mark.parametrize("recipe", GROUP_RECIPES)
@pytest.mark.parametrize("scale_format", SCALE_FORMATS[:2])
@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (33, 50), (130, 40), (2, 17, 35)])
def test_blocks_equal_oracle(
    shape: tuple[int, ...], scale_format: str, recipe: str, dtype: torch.dtype
) -> None:
    w = randn(*shape, dtype=torch.float32)
    w.view(-1)[-1] = math.nan
    for tall, wide in ((16, 16), (32, 32)):
        keywords = {"dtype": dtype, "recipe": recipe, "scale_format": scale_format}
        data, scales = reference.quantize_block(w, tall, wide, **keywords)
        _, padded = reference.quantize_block(w, tall, wide, scale_layout="row_padded", **keywords)
        for e, matrix in enumerate(w.reshape(-1, *shape[-2:])):
            for i, j in itertools.product(
                range(-(-shape[-2] // tall)), range(-(-shape[-1] // wide))
            ):
                part = (slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide))
                tile = matrix[part].reshape(1, -1).numpy()
                codes, scale, _ = oracle.groups(
                    tile, name_of(dtype), recipe, scale_format != "float32", GROUP_EPS[recipe]
                )
                same_bytes(data.reshape(-1, *shape[-2:])[e][part], codes)
                same_floats(scales.reshape(-1, *scales.shape[-2:])[e, i, j], scale)
        assert padded.shape[-1] % 4 == 0
        assert torch.equal(padded[..., : scales.shape[-1]].nan_to_num(), scales.nan_to_num())
        assert not padded[..., scales.shape[-1] :].any()


@pytest.mark.parametrize("layout", GROUP_SCALE_LAYOUTS)
@by_dtype
def test_both_orientations(layout: str, dtype: torch.dtype) -> None:
    x = randn(70, 130)
    keywords = {"dtype": dtype, "scale_layout": layout, "recipe": "deepgemm"}
    data, scales, data_t, scales_t = reference.quantize_per_token_group_both(x, 32, **keywords)
    for got, want in zip(
        (data, scales, data_t, scales_t),
        (
            *reference.quantize_per_token_group(x, 32, **keywords),
            *reference.quantize_per_token_group(x.T.contiguous(), 32, **keywords),
        ),
        strict=True,
    ):
        assert torch.equal(got.view(U8), want.view(U8))
    assert data_t.shape == (130, 70)
    assert data_t.is_contiguous()


@pytest.mark.parametrize("layout", ["row", "row_padded"])
@by_dtype
def test_both_orientations_of_blocks(layout: str, dtype: torch.dtype) -> None:
    w = randn(70, 130)
    keywords = {"dtype": dtype, "scale_layout": layout, "recipe": "vllm"}
    data, scales, data_t, scales_t = reference.quantize_block_both(w, 32, 32, **keywords)
    want, want_scales = reference.quantize_block(w, 32, 32, **keywords)
    assert torch.equal(data.view(U8), want.view(U8))
    assert torch.equal(scales, want_scales)
    assert torch.equal(data_t.view(U8), want.view(U8).T)
    assert torch.equal(scales_t[:, :3], want_scales.T[:5])
    assert not scales_t[:, 3:].any()
    assert data_t.is_contiguous()


# ---- fused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleave", [0, 4, 20])
def test_swiglu(interleave: int) -> None:
    gate, up = randn(3, 20, dtype=torch.float32), randn(3, 20, dtype=torch.float32, seed=1)
    run = interleave or 20
    turns = torch.stack((gate.reshape(3, -1, run), up.reshape(3, -1, run)), dim=2)
    v = reference.swiglu(turns.reshape(3, 40), interleave)
    want = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(v.double(), want, rtol=1e-6, atol=1e-7)
    data, scale_inv, amax = reference.swiglu_quantize_fp8(
        turns.reshape(3, 40), dtype=E4M3, interleave=interleave
    )
    again = reference.quantize_fp8(v, dtype=E4M3, granularity="row")
    assert torch.equal(data.view(U8), again[0].view(U8))
    assert torch.equal(scale_inv, again[1])
    assert torch.equal(amax, v.abs().amax(dim=1, keepdim=True))
    grouped = reference.swiglu_quantize_per_token_group(
        turns.reshape(3, 40), 16, dtype=E4M3, interleave=interleave
    )
    for a, b in zip(grouped, reference.quantize_per_token_group(v, 16, dtype=E4M3), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))


@pytest.mark.parametrize("residual", [False, True])
def test_rmsnorm(residual: bool) -> None:
    x, weight = randn(5, 48), randn(48, seed=1)
    added = randn(5, 48, seed=2) if residual else None
    v = (x.float() + added.float()).bfloat16() if residual else x
    y, inv_rms = reference.rmsnorm(v.float(), weight, 1e-5)
    fp8 = reference.rmsnorm_quantize_fp8(
        x, weight, eps=1e-5, residual=None if added is None else added.clone(), dtype=E4M3
    )
    kept = None if added is None else added.clone()
    group = reference.rmsnorm_quantize_per_token_group(
        x, weight, 16, 1e-5, residual=kept, dtype=E4M3
    )
    if kept is not None:
        assert torch.equal(kept, v)
    wanted = reference.quantize_fp8(y, dtype=E4M3, granularity="row")
    for a, b in zip(fp8, (*wanted, inv_rms), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))
    wanted = reference.quantize_per_token_group(y, 16, dtype=E4M3)
    for a, b in zip(group, (*wanted, inv_rms), strict=True):
        assert torch.equal(a.view(U8), b.view(U8))


# ---- dequantization ----------------------------------------------------------------------------


@by_dtype
def test_dequantize_is_one_product(dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    scales = np.array([1.0, 0.37, 1e-40, 3e38, 0.0, np.inf, np.nan], np.float32)
    data = torch.from_numpy(codes).repeat(len(scales), 1).view(dtype)
    (got,) = reference.dequantize(
        data, torch.from_numpy(scales)[:, None], 1, 0, dtype=torch.float32
    )
    values = torch.from_numpy(codes).view(dtype).float().numpy()
    if dtype != E5M2:  # which has infinities
        np.testing.assert_array_equal(values, oracle.decode(codes, name_of(dtype)))
    with np.errstate(all="ignore"):
        same_floats(got, values[None, :] * scales[:, None])


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("layout", GROUP_SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", [(40,), (5, 70), (2, 3, 33), (0, 16), (2, 0, 16)])
def test_dequantize_reads_every_layout(
    shape: tuple[int, ...], layout: str, scale_format: str
) -> None:
    x = randn(*shape)
    row = reference.quantize_per_token_group(
        x, 16, dtype=E4M3, scale_format="float32" if scale_format == "float32" else "ue8m0"
    )
    stored = reference.quantize_per_token_group(
        x, 16, dtype=E4M3, scale_format=scale_format, scale_layout=layout
    )
    (want,) = reference.dequantize(*row, 1, 16, dtype=torch.float32)
    (got,) = reference.dequantize(*stored, 1, 16, scale_layout=layout, dtype=torch.float32)
    assert torch.equal(got, want)
    assert got.shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_signal_to_noise(dtype: torch.dtype) -> None:
    x = randn(256, 512, dtype=dtype)
    expected = {E4M3: 31.0, E5M2: 25.0, torch.int8: 42.0}
    for elements, floor in expected.items():
        for recipe in GROUP_RECIPES:
            parts = reference.quantize_per_token_group(x, 128, dtype=elements, recipe=recipe)
            (back,) = reference.dequantize(*parts, 1, 128, dtype=torch.float32)
            noise = (back.double() - x.double()).square().mean()
            assert 10 * torch.log10(x.double().square().mean() / noise) > floor
