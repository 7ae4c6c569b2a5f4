"""Many tensors in one buffer: each segment is what a tensor of its own gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, randn
from torch import Tensor

from jitquant import reference
from jitquant.formats import ACTIVATIONS, FP8_DTYPES, RECIPES
from jitquant.numerics.fp8 import scale_from_amax
from jitquant.numerics.ragged import activated, activation_derivative, segment_bounds

from . import oracle_fp8 as oracle

U8 = torch.uint8
E4M3, E5M2 = FP8_DTYPES


def spans(offsets: list[int], sizes: list[int] | None, numel: int) -> list[tuple[int, int]]:
    """Segments, found one by one."""
    out = []
    for i in range(len(offsets) - 1):
        start = min(max(offsets[i], 0), numel)
        stop = min(max(offsets[i + 1], 0), numel)
        if sizes is not None:
            stop = min(stop, start + max(sizes[i], 0))
        out.append((start, max(stop, start)))
    return out


def tensors(offsets: list[int], sizes: list[int] | None) -> tuple[Tensor, Tensor | None]:
    at = torch.tensor(offsets, dtype=torch.int64)
    return at, None if sizes is None else torch.tensor(sizes, dtype=torch.int64)


def assert_fp8(
    x: Tensor,
    offsets: list[int],
    sizes: list[int] | None,
    dtype: torch.dtype,
    scale: Tensor | None = None,
) -> None:
    at, lengths = tensors(offsets, sizes)
    data, scale_inv, amax = reference.quantize_ragged_fp8(x, at, scale, sizes=lengths, dtype=dtype)
    (back,) = reference.dequantize_ragged_fp8(
        data, scale_inv, at, sizes=lengths, dtype=torch.float32
    )
    flat, codes, values = x.reshape(-1), data.view(U8).reshape(-1), back.reshape(-1)
    inside = torch.zeros(flat.numel(), dtype=torch.bool)
    assert data.shape == back.shape == x.shape
    for i, (start, stop) in enumerate(spans(offsets, sizes, flat.numel())):
        inside[start:stop] = True
        given = None if scale is None else scale[i : i + 1]
        if start == stop:
            assert amax[i] == 0
            assert scale_inv[i] == (1 if given is None else 1 / given)
            continue
        want = reference.quantize_fp8(flat[start:stop], given, dtype=dtype)
        assert torch.equal(codes[start:stop], want[0].view(U8))
        torch.testing.assert_close(scale_inv[i : i + 1], want[1], rtol=0, atol=0)
        torch.testing.assert_close(amax[i : i + 1], want[2], rtol=0, atol=0, equal_nan=True)
        (part,) = reference.dequantize(want[0], want[1], 0, 0, dtype=torch.float32)
        torch.testing.assert_close(values[start:stop], part, rtol=0, atol=0, equal_nan=True)
    assert not codes[~inside].any()
    assert not values[~inside].any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_mxfp8_is_that_of_each_tensor(dtype: torch.dtype) -> None:
    """With rows of multiples of 32, by the oracle's blocks; padding is zero, and not read."""
    offsets, sizes = [0, 96, 96, 256, 320], [64, 0, 160, 32]
    x = randn(320, dtype=torch.float32) * torch.logspace(-20, 20, 320)
    for (start, stop), end in zip(spans(offsets, sizes, 320), offsets[1:], strict=True):
        x[stop:end] = math.nan if stop > start else x[stop:end]
    at, lengths = tensors(offsets, sizes)
    data, scales = reference.quantize_ragged_mxfp8(x, at, sizes=lengths, dtype=dtype)
    (back,) = reference.dequantize_ragged_mxfp8(
        data, scales, at, sizes=lengths, dtype=torch.float32
    )
    inside = torch.zeros(320, dtype=torch.bool)
    for start, stop in spans(offsets, sizes, 320):
        inside[start:stop] = True
        codes, exponents = oracle.mx_blocks(x[start:stop].reshape(-1, 32).numpy(), str(dtype)[6:])
        assert data[start:stop].view(U8).tolist() == codes.flatten().tolist()
        assert scales[start // 32 : stop // 32].view(U8).tolist() == exponents.tolist()
        values = oracle.decode(codes, str(dtype)[6:]) * np.exp2(exponents[:, None] - 127.0)
        np.testing.assert_array_equal(back[start:stop].numpy(), values.flatten().astype("float32"))
    assert not data[~inside].view(U8).any()
    assert not scales.view(U8)[~inside.view(-1, 32).any(1)].any()
    assert not back[~inside].any()
    rows = reference.quantize_ragged_mxfp8(
        x.view(10, 32), at // 32, sizes=lengths // 32, dtype=dtype
    )
    assert torch.equal(rows[0].view(U8).flatten(), data.view(U8))
    assert torch.equal(rows[1].view(U8), scales.view(U8))


def assert_nvfp4(
    x: Tensor,
    offsets: list[int],
    sizes: list[int] | None,
    recipe: str,
    scale: Tensor | None = None,
) -> None:
    """For segments that begin at multiples of 16."""
    at, lengths = tensors(offsets, sizes)
    x_fp4, x_sf, gsa, amax = reference.quantize_ragged_nvfp4(
        x, at, scale, sizes=lengths, recipe=recipe
    )
    flat, codes, scales = x.reshape(-1), x_fp4.view(U8), x_sf.view(U8)
    (back,) = reference.dequantize_ragged_nvfp4(
        x_fp4, x_sf, gsa, at, numel=flat.numel(), sizes=lengths, dtype=torch.float32
    )
    used = torch.zeros(scales.numel(), dtype=torch.bool)
    inside = torch.zeros(flat.numel(), dtype=torch.bool)
    for i, (start, stop) in enumerate(spans(offsets, sizes, flat.numel())):
        inside[start:stop] = True
        if start == stop:
            assert amax[i] == 0
            continue
        part = flat[start:stop]
        if scale is None:
            want = reference.quantize_nvfp4(part, recipe=recipe)
            torch.testing.assert_close(gsa[i : i + 1], want[2], rtol=0, atol=0)
        else:
            # A power of two, so that its reciprocal's reciprocal is itself.
            want = reference.quantize_nvfp4_from_gsa(part, 1 / scale[i : i + 1], recipe=recipe)
            assert gsa[i] == 1 / scale[i]
        assert amax[i] == part.float().nan_to_num(nan=0.0, posinf=math.inf).abs().amax()
        first, last = start // 16, -(-stop // 16)
        used[first:last] = True
        assert torch.equal(codes[8 * first : 8 * last], want[0].view(U8))
        assert torch.equal(scales[first:last], want[1].view(U8))
        (values,) = reference.dequantize_nvfp4(
            *want[:2], gsa[i : i + 1], cols=stop - start, dtype=torch.float32
        )
        torch.testing.assert_close(back[start:stop], values, rtol=0, atol=0, equal_nan=True)
    assert not scales[~used].any()
    assert not codes.reshape(-1, 8)[~used].any()
    assert not back[~inside].any()


def layout_of(lengths: list[int], align: int) -> tuple[list[int], list[int]]:
    """Offsets, aligned, and sizes of segments of these lengths."""
    offsets = [0]
    for length in lengths:
        offsets.append(-(-(offsets[-1] + length) // align) * align)
    return offsets, lengths


@pytest.mark.parametrize("count", [1, 3, 64, 65, 257, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_segments(count: int, dtype: torch.dtype) -> None:
    lengths = [(7 * i + 3) % 11 for i in range(count)]  # empty ones and single elements too
    assert count < 64 or {0, 1} <= set(lengths)
    offsets, sizes = layout_of(lengths, 16)
    x = randn(max(offsets[-1], 16), dtype=torch.float32)
    x = (x * torch.logspace(-5, 3, x.numel())).to(dtype)
    if count <= 257:
        assert_fp8(x, offsets, sizes, E4M3)
        assert_nvfp4(x, offsets, sizes, "te")
        return
    at, lengths_ = tensors(offsets, sizes)
    data, scale_inv, amax = reference.quantize_ragged_fp8(x, at, sizes=lengths_, dtype=E4M3)
    want = torch.zeros(count)
    for i, (start, stop) in enumerate(spans(offsets, sizes, x.numel())):
        if start < stop:
            want[i] = x[start:stop].float().abs().amax()
    assert torch.equal(amax, want)
    scale = scale_from_amax(want, 448.0)
    assert torch.equal(scale_inv, torch.div(torch.ones(()), scale))
    assert (data.float().abs() <= 448).all()


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.just(1)), min_size=0, max_size=12),
    align=st.sampled_from([1, 8, 16, 128]),
    with_sizes=st.booleans(),
    tail=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    fp8=st.sampled_from(FP8_DTYPES),
    recipe=st.sampled_from(RECIPES),
    static=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_made_up_segments(
    lengths: list[int],
    align: int,
    with_sizes: bool,
    tail: int,
    dtype: torch.dtype,
    fp8: torch.dtype,
    recipe: str,
    static: bool,
    seed: int,
) -> None:
    offsets, sizes = layout_of(lengths, align)
    x = randn(offsets[-1] + tail, dtype=torch.float32, seed=seed)
    x = (x * torch.logspace(-6, 4, max(x.numel(), 1))[: x.numel()]).to(dtype)
    if x.numel() and seed % 5 == 0:
        x[seed % x.numel()] = math.nan
    scale = torch.exp2(torch.arange(len(lengths)).float() - 3) if static else None
    assert_fp8(x, offsets, sizes if with_sizes else None, fp8, scale)
    if align % 16 == 0:
        assert_nvfp4(x, offsets, sizes if with_sizes else None, recipe, scale)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ([-5, 9, 1000], None),
        ([0, 16, 32], [900, -3]),
        ([40, 50, 60], None),
        ([0, 2**40, 2**41], [2**62, 2**62]),
    ],
)
def test_bounds_are_the_buffers(offsets: list[int], sizes: list[int] | None) -> None:
    x = randn(30)
    assert_fp8(x, offsets, sizes, E4M3)
    start, stop = segment_bounds(*tensors(offsets, sizes), 30)
    assert list(zip(start.tolist(), stop.tolist(), strict=True)) == spans(offsets, sizes, 30)


def test_a_segment_of_nan_and_infinity_is_alone() -> None:
    x = randn(96)
    at = torch.tensor([0, 32, 64, 96])
    clean = reference.quantize_ragged_fp8(x, at, dtype=E4M3)
    x[40], x[90] = math.nan, math.inf
    data, scale_inv, amax = reference.quantize_ragged_fp8(x, at, dtype=E4M3)
    assert amax[1].isnan()
    assert amax[2] == math.inf
    assert scale_inv[1:].tolist() == [1.0, 1.0]
    assert torch.equal(data[:32].view(U8), clean[0][:32].view(U8))
    assert scale_inv[0] == clean[1][0]


def test_a_block_that_reaches_beyond_its_segment() -> None:
    x = torch.full((48,), 3.0)
    x[20:32] = 1000.0  # no one's
    at, sizes = torch.tensor([0, 32, 48]), torch.tensor([20, 16])
    x_fp4, x_sf, gsa, amax = reference.quantize_ragged_nvfp4(x, at, sizes=sizes)
    assert amax.tolist() == [3.0, 3.0]
    assert x_fp4.view(U8)[10:16].tolist() == [0] * 6
    (back,) = reference.dequantize_ragged_nvfp4(
        x_fp4, x_sf, gsa, at, numel=48, sizes=sizes, dtype=torch.float32
    )
    assert torch.allclose(back[:20], torch.tensor(3.0))
    assert not back[20:32].any()


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_are_torchs_and_derivatives_autograds(activation: str) -> None:
    functions = {
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "qgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "srelu": lambda t: torch.relu(t).square(),
    }
    x = torch.linspace(-10, 10, 4001, dtype=torch.float64, requires_grad=True)
    y = functions[activation](x)
    got = activated(x.detach().float(), activation)
    torch.testing.assert_close(got.double(), y.detach(), rtol=1e-5, atol=1e-6)
    (want,) = torch.autograd.grad(y.sum(), x)
    got = activation_derivative(x.detach().float(), activation)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "qgelu", "gelu"])
def test_the_slope_of_a_gate_is_0_or_1_far_from_0(activation: str) -> None:
    # From 1.5e13 on, a part of gelu's derivative does not fit fp32; of qgelu's from 2e38 on.
    x = torch.tensor([1e4, 1.5e13, 2e38, 3.4028235e38, torch.inf])
    assert torch.equal(activation_derivative(x, activation), torch.ones(5))
    assert torch.equal(activation_derivative(-x, activation), torch.zeros(5))
    assert activation_derivative(torch.tensor([torch.nan]), activation).isnan()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("static", [False, True])
def test_gradient(activation: str, static: bool) -> None:
    rows, cols = [3, 0, 1, 5], 12
    offsets, sizes = [0, 4, 4, 5, 10], rows
    at, lengths = tensors(offsets, sizes)
    grad, x = randn(10, cols), randn(10, cols, seed=1)
    scale = torch.tensor([1.0, 2.0, 64.0, 0.3]) if static else None
    act_input = None if activation == "none" else x
    data, scale_inv, amax, dbias = reference.quantize_ragged_grad_fp8(
        grad, at, scale, sizes=lengths, act_input=act_input, activation=activation, dtype=E4M3
    )
    v = grad.float()
    if act_input is not None:
        v = v * activation_derivative(x.float(), activation)
    want = reference.quantize_ragged_fp8(v, at, scale, sizes=lengths, dtype=E4M3)
    for a, b in zip((data, scale_inv, amax), want, strict=True):
        assert torch.equal(a.view(U8), b.view(U8))
    assert dbias.shape == (4, cols)
    assert dbias.dtype == torch.float32
    first = 0
    for i, count in enumerate(rows):
        first = offsets[i]
        sums = v[first : first + count].double().sum(dim=0)
        torch.testing.assert_close(dbias[i].double(), sums, rtol=1e-7, atol=1e-12)
    without = reference.quantize_ragged_grad_fp8(
        grad, at, sizes=lengths, with_dbias=False, dtype=E4M3
    )
    assert without[3].shape == (0, cols)
