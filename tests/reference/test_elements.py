"""Rounding to E2M1 and E4M3, exhaustively, against tables of exact fractions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from jitquant import reference

from . import oracle


def every_16_bit(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e4m3_of_every_16_bit_float(dtype: torch.dtype) -> None:
    x = every_16_bit(dtype)
    got = reference.encode_e4m3(x).view(torch.uint8)
    want = torch.tensor([oracle.e4m3(v) for v in x.numpy()], dtype=torch.uint8)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e2m1_of_every_16_bit_float(dtype: torch.dtype) -> None:
    x = every_16_bit(dtype)
    got = reference.encode_e2m1(x)
    want = [0 if np.isnan(v) else oracle.e2m1(v) for v in x.numpy()]
    assert torch.equal(got, torch.tensor(want, dtype=torch.uint8))


def neighborhood(points: list[Fraction]) -> torch.Tensor:
    """Each point as fp32 and the eight fp32 numbers on either side of it, both signs."""
    values = []
    for point in points:
        v = np.float32(float(point))
        below = above = v
        values.append(v)
        for _ in range(8):
            below, above = (
                np.nextafter(below, np.float32(-9e9)),
                np.nextafter(above, np.float32(9e9)),
            )
            values += [below, above]
    x = torch.tensor(np.array(values))
    return torch.cat((x, -x))


def midpoints(values: list[Fraction]) -> list[Fraction]:
    return [(a + b) / 2 for a, b in itertools.pairwise(values)]


def test_e2m1_around_every_value_and_midpoint() -> None:
    x = neighborhood(oracle.E2M1_VALUES + midpoints(oracle.E2M1_VALUES))
    want = torch.tensor([oracle.e2m1(v) for v in x.numpy()], dtype=torch.uint8)
    assert torch.equal(reference.encode_e2m1(x), want)


def test_e4m3_around_every_value_and_midpoint() -> None:
    x = neighborhood(oracle.E4M3_VALUES + midpoints(oracle.E4M3_VALUES) + [Fraction(464)])
    want = torch.tensor([oracle.e4m3(v) for v in x.numpy()], dtype=torch.uint8)
    assert torch.equal(reference.encode_e4m3(x).view(torch.uint8), want)


def test_e2m1_against_float64_on_a_fine_grid() -> None:
    x = torch.linspace(-7, 7, 400_001, dtype=torch.float64).float()
    values = torch.tensor([float(v) for v in oracle.E2M1_VALUES], dtype=torch.float64)
    distance = (x.double().abs()[:, None] - values).abs()
    best = distance.amin(dim=1, keepdim=True)
    nearest = distance == best
    # Of two nearest the even code.
    even = nearest & (torch.arange(8) % 2 == 0)
    want = torch.where(nearest.sum(1) == 2, even.int().argmax(1), nearest.int().argmax(1))
    assert torch.equal(reference.encode_e2m1(x).int() & 7, want.int())


@pytest.mark.parametrize(
    ("tie", "value"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_e2m1_ties(tie: float, value: float) -> None:
    codes = reference.encode_e2m1(torch.tensor([tie, -tie]))
    assert reference.decode_e2m1(codes).tolist() == [value, -value]


def test_e2m1_rounds_once() -> None:
    # Rounded to half steps 2.6 is 2.5, a tie that goes to 2.
    assert reference.decode_e2m1(reference.encode_e2m1(torch.tensor([2.6]))).item() == 3.0
    x = torch.linspace(0, 6, 60_001)
    once = reference.decode_e2m1(reference.encode_e2m1(x))
    twice = reference.decode_e2m1(reference.encode_e2m1((x * 2).round() / 2))
    assert 0.12 < (once != twice).double().mean() < 0.13


def test_e2m1_specials() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 6.1, -3e38])
    assert reference.encode_e2m1(x).tolist() == [0, 8, 7, 15, 0, 0, 8, 7, 15]


def test_e4m3_saturates_and_keeps_nan() -> None:
    x = torch.tensor([448.0, 464.0, 464.1, 1e30, math.inf, -1e30, math.nan, -math.nan, 0.0, -0.0])
    codes = reference.encode_e4m3(x).view(torch.uint8)
    assert codes.tolist() == [126, 126, 126, 126, 126, 254, 127, 127, 0, 128]


def test_decode() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    want = torch.tensor([float(oracle.e4m3_value(c)) for c in range(256)])
    torch.testing.assert_close(reference.decode_e4m3(codes), want, rtol=0, atol=0, equal_nan=True)
    values = reference.decode_e2m1(codes[:16])
    assert values.tolist()[:8] == [float(v) for v in oracle.E2M1_VALUES]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("dim", [-1, 0])
def test_packing(dim: int) -> None:
    codes = torch.arange(64, dtype=torch.uint8).reshape(8, 8) % 16
    packed = reference.pack_e2m1(codes, dim)
    assert packed.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(reference.unpack_e2m1(packed, dim), codes)
    first, second = (codes[0, 0], codes[1, 0]) if dim == 0 else (codes[0, 0], codes[0, 1])
    assert packed.view(torch.uint8)[0, 0] == first + 16 * second


def test_dequantize_every_code_with_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None, :].repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    for gsa in (1.0, 0.0013, 1e-40, 3e38, 0.0, math.inf, math.nan):
        (got,) = reference.dequantize_nvfp4(codes, scales, torch.tensor([gsa]), dtype=torch.float32)
        value = np.array(
            [float(v) for v in oracle.E2M1_VALUES] + [-float(v) for v in oracle.E2M1_VALUES],
            np.float32,
        )
        nibbles = np.stack((codes.numpy() & 15, codes.numpy() >> 4), axis=-1).reshape(256, 512)
        s = np.array([oracle.e4m3_value(c) for c in range(256)], np.float32)
        with np.errstate(all="ignore"):
            want = (value[nibbles] * s[:, None]) * np.float32(gsa)
        np.testing.assert_array_equal(got.numpy(), want)
        finite = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got.numpy())[finite], np.signbit(want)[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_rounds_once_to_the_output(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    parts = reference.quantize_nvfp4(x)
    (exact,) = reference.dequantize_nvfp4(*parts, dtype=torch.float32)
    (rounded,) = reference.dequantize_nvfp4(*parts, dtype=dtype)
    assert torch.equal(rounded, exact.to(dtype))
