"""What recipes for training and rotation have to do to numbers, whatever their bits are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor

from jitquant import reference
from jitquant.formats import TE_SIGNS
from jitquant.numerics import nvfp4, recipes

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _state(seed: int, offset: int = 0) -> Tensor:
    return torch.tensor([seed, offset])


def _values(x: Tensor, **kwargs: Any) -> Tensor:
    """``x`` after NVFP4, rotated back."""
    rotate = kwargs.get("rotate", "none")
    a = recipes.rotated_amax(x, rotate=rotate)[0]
    parts = recipes.quantize_nvfp4_recipe(x, a, **kwargs)
    back = nvfp4.dequantize_nvfp4(*parts, cols=x.shape[1], dtype=torch.float32)[0]
    if rotate == "te":  # signs come before H, so after it on the way back
        back = recipes.hadamard(back, "16", None, torch.float32)
        return back * torch.tensor(TE_SIGNS).repeat(x.shape[1] // 16)
    return recipes.hadamard(back, rotate, None, torch.float32)


def _relative(error: Tensor, x: Tensor) -> float:
    return float(error.double().square().sum() / x.double().square().sum())


def _slow(wanted: float, kwargs: dict[str, Any]) -> Any:
    return pytest.param(wanted, kwargs, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("wanted", "kwargs"),
    [
        (0.00904, {}),
        (0.01243, {"block": "16x16"}),
        (0.01888, {"rounding": "stochastic", "rng_state": _state(1)}),
        (0.00964, {"select": "static_4"}),
        (0.00756, {"select": "4over6_mse", "e4m3_max": 256}),
        (0.00780, {"select": "4over6_mae", "e4m3_max": 256}),
        _slow(0.00756, {"select": "4over6_mse", "e4m3_max": 448}),
        _slow(0.00780, {"select": "4over6_mae", "e4m3_max": 448}),
        _slow(0.00798, {"select": "4over6_abs_max", "e4m3_max": 256}),
        _slow(0.00798, {"select": "4over6_abs_max", "e4m3_max": 448}),
        _slow(0.01239, {"select": "4over6_mse", "e4m3_max": 256, "block": "16x16"}),
        (0.01240, {"select": "4over6_mae", "e4m3_max": 256, "block": "16x16"}),
        _slow(0.01239, {"select": "4over6_mse", "e4m3_max": 448, "block": "16x16"}),
        _slow(0.01240, {"select": "4over6_mae", "e4m3_max": 448, "block": "16x16"}),
        (0.00904, {"rotate": "te"}),
        _slow(0.01243, {"rotate": "te", "block": "16x16"}),
        _slow(0.01888, {"rotate": "te", "rounding": "stochastic", "rng_state": _state(2)}),
        _slow(0.00780, {"rotate": "te", "select": "4over6_mae", "e4m3_max": 256}),
    ],
)
def test_error_of_nvfp4_on_normal_values(wanted: float, kwargs: dict[str, Any]) -> None:
    x = randn(512, 1024, dtype=torch.float32, seed=11)
    assert _relative(_values(x, **kwargs) - x, x) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("rotate", ["16", "32", "64", "128", "256"])
def test_a_rotation_of_normal_values_changes_no_error(rotate: str) -> None:
    x = randn(512, 1024, dtype=torch.float32, seed=12)
    assert _relative(_values(x, rotate=rotate) - x, x) == pytest.approx(0.00904, rel=0.01)


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [("floor", 0.01322), ("even", 0.01251), ("rceil", 0.01333), ("ceil", 0.02079)],
)
def test_error_of_mxfp4_on_normal_values(scaling: str, wanted: float) -> None:
    x = randn(1024, 1024, dtype=torch.float32, seed=13)
    parts = recipes.quantize_mxfp4(x, scaling=scaling)
    y = recipes.dequantize_mxfp4(*parts, dtype=torch.float32)[0]
    assert _relative(y - x, x) == pytest.approx(wanted, rel=0.01)


@pytest.mark.slow
def test_how_many_blocks_take_four() -> None:
    x = randn(1024, 1024, dtype=torch.float32, seed=14)
    for rule, share in (("mse", 0.45), ("mae", 0.34)):
        a = recipes.rotated_amax(x)[0].amax().reshape(1)
        blocks = x.reshape(1024, 64, 16)
        chosen = recipes.four_over_six(blocks, a, f"4over6_{rule}", 256)[1].view(torch.uint8)
        six = recipes.four_over_six(blocks, a * (448 / 256), "static_6", 448)[1].view(torch.uint8)
        assert float((chosen != six).float().mean()) == pytest.approx(share, abs=0.01)


def test_philox_gives_the_words_of_its_authors() -> None:
    """The known answers of Random123 1.14, kat_vectors."""
    for counter, key, wanted in (
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ):
        words = recipes.philox(
            tuple(torch.tensor(c) for c in counter),  # type: ignore[arg-type]
            tuple(torch.tensor(k) for k in key),  # type: ignore[arg-type]
        )
        assert [f"{w:08x}" for w in words.tolist()] == wanted.split()


def test_random_bytes_hang_on_their_place_alone() -> None:
    whole = recipes.random_bytes(_state(5, 7), 8, 6)
    assert torch.equal(recipes.random_bytes(_state(5, 7), 4, 3), whole[:4, :48])
    columns = recipes.random_bytes(_state(5, 7), 8, 6, columnwise=True)
    later = recipes.random_bytes(_state(5, 8), 8, 6)
    for other in (columns, later, recipes.random_bytes(_state(6, 7), 8, 6)):
        assert float((other == whole).float().mean()) < 0.03
    for offset in (2**32 - 1, 2**32, 2**63 - 1):  # all 63 bits count
        assert not torch.equal(recipes.random_bytes(_state(5, offset), 8, 6), whole)


def _chi_square(counts: Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected).square() / expected).sum())


def test_random_bytes_are_uniform_and_independent() -> None:
    # Of 255 degrees of freedom the statistic is above 330 once in 1000.
    first = recipes.random_bytes(_state(21), 512, 64)
    assert _chi_square(torch.bincount(first.flatten().int(), minlength=256).double()) < 330
    columns = recipes.random_bytes(_state(21), 512, 64, columnwise=True)
    others = {
        "columns": columns,
        "columns of the same elements": recipes.random_bytes(_state(21), 1024, 32, True).T,
        "replay": recipes.random_bytes(_state(21, 1), 512, 64),
        "neighbor": first.roll(1, 1),
        "row": first.roll(1, 0),
    }
    for name, other in others.items():
        # The upper four bits of both: 256 pairs, all as frequent.
        pairs = (first >> 4).int() * 16 + (other >> 4).int()
        assert _chi_square(torch.bincount(pairs.flatten(), minlength=256).double()) < 330, name


def test_stochastic_rounding_over_all_bytes() -> None:
    """Unbiased but for the cut of the probability to 1 / 256, at every code and between them."""
    r = torch.arange(256, dtype=torch.uint8)
    for v in torch.cat((torch.linspace(0, 6, 481), torch.tensor([0.1, 1.7, 2.3, 5.1]))):
        low = int((v >= E2M1).sum()) - 1
        high = min(low + 1, 7)
        for sign in (1, -1):
            q = recipes.stochastic_e2m1(v.repeat(256) * sign, r)
            up = int(((q & 7) == high).sum())
            assert bool((((q & 7) == low) | ((q & 7) == high)).all())
            step = float(E2M1[high] - E2M1[low])
            if high > low:
                fraction = float(v - E2M1[low]) / step
                assert up == math.floor(256 * fraction + 1e-4)
                bias = float(E2M1[(q & 7).long()].double().mean()) - float(v)
                assert -step / 256 - 1e-6 < bias <= 1e-6
            assert bool(((q & 8) == (8 if sign < 0 else 0)).all())


def test_stochastic_rounding_draws_each_code_as_often_as_it_should() -> None:
    """A chi-square over 255 places between each two codes, with the bytes that a call draws."""
    draws, places = 1024, torch.arange(1, 256)
    r = recipes.random_bytes(_state(31), 7 * 255, draws // 16).reshape(7, 255, draws)
    statistic = 0.0
    for interval, (low, high) in enumerate(itertools.pairwise(E2M1.tolist())):
        v = (low + (high - low) * places / 256)[:, None].expand(255, draws)
        codes = recipes.stochastic_e2m1(v, r[interval])
        up = (E2M1[(codes & 7).long()] == high).sum(1).double()
        wanted = draws * places / 256
        statistic += float(((up - wanted).square() / (wanted * (1 - places / 256))).sum())
    # Of 1785 degrees of freedom: the deviation is 60. Once in a million it is 5 times that.
    assert abs(statistic - 1785) < 5 * math.sqrt(2 * 1785)


@pytest.mark.parametrize("rotate", ["16", "32", "64", "128", "256"])
def test_a_rotation_undoes_itself(rotate: str) -> None:
    n = int(rotate)
    v = randn(6, 3 * n, dtype=torch.float32, seed=41)
    signs = torch.where(randn(n, dtype=torch.float32, seed=42) > 0, 1, -1)
    y = recipes.hadamard(v, rotate, None, torch.float32)
    torch.testing.assert_close(
        recipes.hadamard(y, rotate, None, torch.float32), v, rtol=0, atol=1e-5
    )
    y = recipes.hadamard(v, rotate, signs, torch.float32)
    back = recipes.hadamard(y, rotate, None, torch.float32) * signs.repeat(3)
    torch.testing.assert_close(back, v, rtol=0, atol=1e-5)
    i = torch.arange(n)
    bits = sum((i[:, None] >> k & i[None, :] >> k & 1) for k in range(8))
    matrix = (1 - 2 * (bits % 2)).float() / math.sqrt(n)
    wanted = ((v.reshape(6, 3, n) * signs) @ matrix).reshape(6, -1)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "size", "most"),
    [("fp8_ue8m0", 20, 0.25), ("mxfp4", 20, 0.25), ("int8", 50, 0.25), ("fp8", 20, 0.4)],
)
def test_a_rotation_keeps_products_of_queries_and_keys(kind: str, size: float, most: float) -> None:
    """DeepSeek's indexer rotates by 128, then quantizes; two channels of both are outliers.

    Its format is FP8 with a power of two for 128 channels. With fp32 scales an amax is exact, and
    outliers have less of the error, so a rotation gains less.
    """
    outliers = torch.ones(128)
    outliers[[5, 70]] = size

    def values(x: Tensor, rotate: str) -> Tensor:
        if kind == "mxfp4":
            parts = recipes.quantize_mxfp4(x, rotate=rotate, scaling="even")
            return recipes.dequantize_mxfp4(*parts, dtype=torch.float32)[0]
        how: dict[str, Any] = {"rotate": rotate}
        how["dtype"] = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        if kind == "fp8_ue8m0":
            how["scale_format"] = "ue8m0"
        data, scale = reference.rotate_quantize_per_token_group(x, 128, **how)
        return data.float() * scale

    for seed in range(51, 57, 2):
        q = randn(256, 128, dtype=torch.float32, seed=seed) * outliers
        k = randn(256, 128, dtype=torch.float32, seed=seed + 1) * outliers
        wanted = q.double() @ k.double().T
        rms = {
            rotate: (values(q, rotate).double() @ values(k, rotate).double().T - wanted).norm()
            for rotate in ("128", "none")
        }
        assert float(rms["128"] / rms["none"]) < most
