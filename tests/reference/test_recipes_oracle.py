"""Recipes for training and rotation against the oracle: made-up inputs in every combination."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import DTYPES, GRANULARITIES, inputs, randn, specials
from torch import Tensor

import jitquant
from jitquant import reference
from jitquant.formats import (
    E4M3_MAXIMA,
    MXFP4_SCALINGS,
    RECIPES,
    ROTATIONS,
    ROUNDINGS,
    SCALE_LAYOUTS,
    SELECTS,
    STATIC_SELECTS,
    WEIGHT_BLOCKS,
)
from jitquant.numerics import recipes
from jitquant.numerics.layout import unswizzle_128x4

from . import oracle, oracle_recipes

U8 = torch.uint8
STATES = ((0, 0), (7, 2**32 - 1), (-1, 2**32), (2**63 - 1, 2**63 - 1), (-(2**63), 3 << 40))


def fp32(x: Tensor) -> np.ndarray:
    return x.float().reshape(-1, x.shape[-1]).numpy().astype(np.float32)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def linear(x_sf: Tensor, rows: int, groups: int, layout: str) -> np.ndarray:
    if layout == "swizzled_128x4":
        x_sf = unswizzle_128x4(x_sf, rows, groups)
    return x_sf.view(U8).reshape(rows, groups).numpy()


def equal(got: Tensor, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(U8).reshape(want.shape).numpy(), want)


def bytes_of(how: dict[str, Any], rows: int, blocks: int, t: bool = False) -> np.ndarray | None:
    if how.get("rounding", "nearest") == "nearest":
        return None
    if "random_bytes" in how:
        given = how["random_bytes"].reshape(rows, -1).numpy()
        made = np.zeros((rows, 16 * blocks), np.uint8)
        made[:, : given.shape[1]] = given
        return made
    return oracle_recipes.draws(tuple(how["rng_state"].tolist()), rows, blocks, t)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """One pair after another."""
    y, half = x.copy(), cos.shape[1]
    each = len(x) // len(cos)
    with np.errstate(all="ignore"):
        for m, k in np.ndindex(len(x), half):
            i, j = (2 * k, 2 * k + 1) if interleaved else (k, k + half)
            c, s = cos[m // each, k], sin[m // each, k]
            y[m, i] = x[m, i] * c - x[m, j] * s
            y[m, j] = x[m, j] * c + x[m, i] * s
    return y


def rotated(x: np.ndarray, how: dict[str, Any], dtype: torch.dtype) -> np.ndarray:
    """After RoPE and the transform, if there are any."""
    signs = how.get("signs")
    if "rope" in how:
        x = rope(x, *(t.numpy() for t in how["rope"]), how["interleaved"])
    return oracle_recipes.hadamard(
        x, how.get("rotate", "none"), None if signs is None else signs.numpy(), name_of(dtype)
    )


def amaxes(v: np.ndarray, granularity: str) -> np.ndarray:
    each = [oracle.amax_of(v)] if granularity == "tensor" else [oracle.amax_of(r) for r in v]
    return np.array(each, np.float32)


def assert_nvfp4(x: Tensor, how: dict[str, Any]) -> None:
    """The public function, and the ops that it calls."""
    v = rotated(fp32(x), how, x.dtype)
    rows, groups = v.shape[0], -(-v.shape[1] // 16)
    given = how.get("gsa")
    if isinstance(given, float):
        given = torch.tensor([given])
    codes, scales, gsa = oracle_recipes.nvfp4(
        v,
        amaxes(v, how.get("granularity", "tensor")),
        gsa=None if given is None else given.numpy(),
        tile_rows=16 if how.get("block") == "16x16" else 1,
        r=bytes_of(how, rows, groups),
        select=how.get("select", "none"),
        e4m3_max=how.get("e4m3_max", 448),
        recipe=how.get("recipe", "te"),
    )
    q = jitquant.quantize_nvfp4(x, **how)
    assert q.recipe == how.get("recipe", "te")
    np.testing.assert_array_equal(q.gsa.numpy(), gsa)
    np.testing.assert_array_equal(linear(q.x_sf, rows, groups, q.scale_layout), scales)
    equal(q.x_fp4, oracle.pack(codes))


def assert_mxfp4(x: Tensor, how: dict[str, Any]) -> None:
    v = rotated(fp32(x), how, x.dtype)
    rows, groups = v.shape[0], -(-v.shape[1] // 32)
    r = bytes_of(how, rows, 2 * groups)
    codes, scales = oracle_recipes.mxfp4(v, how.get("scaling", "rceil"), r)
    x_fp4, x_sf = jitquant.quantize_mxfp4(x, **how)
    layout = how.get("scale_layout", "linear")
    np.testing.assert_array_equal(linear(x_sf, rows, groups, layout), scales)
    equal(x_fp4, oracle.pack(codes))


def assert_both(x: Tensor, how: dict[str, Any]) -> None:
    first, second = jitquant.quantize_nvfp4_both(x, **how)
    bytes_, gsa = how.get("random_bytes", (None, None)), how.get("gsa")
    gsa = gsa if isinstance(gsa, tuple) else (gsa, gsa)
    for t, part in enumerate((first, second)):
        own = {k: v for k, v in how.items() if t or k not in ("rotate", "signs")}
        own |= {"random_bytes": bytes_[t]} if bytes_[t] is not None else {}
        assert_part(part, fp32(x.T if t else x), {**own, "gsa": gsa[t]}, x.dtype, t > 0)


def assert_part(q: Any, x: np.ndarray, how: dict[str, Any], dtype: torch.dtype, t: bool) -> None:
    v = rotated(x, how, dtype)
    rows, groups = v.shape[0], -(-v.shape[1] // 16)
    tile = how.get("block") == "16x16"
    # A tile's choice depends on its rows in x.
    source = v.T if tile and t else v
    padded = np.zeros((-(-source.shape[0] // 16) * 16, source.shape[1]), np.float32)
    padded[: len(source)] = source
    codes, scales, gsa = oracle_recipes.nvfp4(
        padded if tile and t else source,
        amaxes(v, "tensor"),
        gsa=None if how["gsa"] is None else how["gsa"].numpy(),
        tile_rows=16 if tile else 1,
        r=bytes_of(how, rows, groups, t),
        select=how.get("select", "none"),
        e4m3_max=how.get("e4m3_max", 448),
    )
    if tile and t:
        codes = codes.T[:rows]
        scales = scales[::16].T.repeat(16, 0)[:rows]
    np.testing.assert_array_equal(q.gsa.numpy(), gsa)
    np.testing.assert_array_equal(linear(q.x_sf, rows, groups, q.scale_layout), scales)
    equal(q.x_fp4, oracle.pack(codes))


VALUES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-8, 8, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-127, 3.4028235e38]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(-48, 48).map(lambda n: n / 8),
)


@st.composite
def tensors(draw: st.DrawFn, multiple: int = 1, most: int = 40, least: int = 1) -> Tensor:
    """Rows of values on one scale, some of them special."""
    rows = draw(st.integers(least, 20))
    cols = multiple * draw(st.integers(1, max(1, most // multiple)))
    dtype = draw(st.sampled_from(DTYPES))
    exponent = draw(st.sampled_from([0, 0, 0, -20, -126, -140, 10, 100, 120]))
    kind = draw(st.sampled_from(["normal", "ties", "zero", "equal"]))
    x = randn(rows, cols, dtype=torch.float32, seed=draw(st.integers(0, 2**16)))
    if kind == "ties":
        x = (x * 8).round() / 4
    elif kind == "zero":
        x = x * 0
    elif kind == "equal":
        x = x.sign() * draw(st.sampled_from([1.0, 6.0, 4.0, 1.75, 3.0]))
    x = x * 2.0**exponent
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, rows - 1)), draw(st.integers(0, cols - 1))
        x[at] = torch.tensor(draw(VALUES), dtype=torch.float64).float()
    return x.to(dtype)


@st.composite
def rotations(draw: st.DrawFn, accepted: tuple[str, ...]) -> dict[str, Any]:
    rotate = draw(st.sampled_from(accepted))
    how: dict[str, Any] = {"rotate": rotate}
    n = recipes.hadamard_size(rotate)
    if n and draw(st.booleans()):
        bits = draw(st.integers(0, 2**n - 1))
        how["signs"] = torch.tensor([1 - 2 * (bits >> i & 1) for i in range(n)], dtype=torch.int8)
    return how


def embedding(draw: Any, x: Tensor) -> dict[str, Any]:
    """Tables for some of the columns, or nothing."""
    sizes = [s for s in (32, 64, x.shape[1]) if s <= x.shape[1] and s % 32 == 0]
    if not sizes or not draw(st.booleans()):
        return {}
    positions = draw(st.sampled_from([p for p in (1, 2, 5, len(x)) if len(x) % p == 0]))
    half = draw(st.sampled_from(sizes)) // 2
    angles = randn(positions, half, dtype=torch.float32, seed=half) * 3
    return {"rope": (angles.cos(), angles.sin()), "interleaved": draw(st.booleans())}


def rounding(draw: Any, x: Tensor | None) -> dict[str, Any]:
    """Stochastic, with a state or, for a shape, with bytes."""
    if x is None or draw(st.booleans()):
        return {
            "rounding": "stochastic",
            "rng_state": torch.tensor(draw(st.sampled_from(STATES))),
        }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    given = torch.randint(256, tuple(x.shape), dtype=U8, generator=generator)
    return {"rounding": "stochastic", "random_bytes": given}


SWEEP = settings(max_examples=80, deadline=None)


@SWEEP
@given(data=st.data())
def test_nvfp4_in_every_combination(data: st.DataObject) -> None:
    """Each either is what the oracle gives or a ValueError that the combination calls for."""
    how = data.draw(rotations(ROTATIONS))
    n = recipes.hadamard_size(how["rotate"])
    x = data.draw(tensors(n or 1, 64))
    how |= embedding(data.draw, x)
    how["block"] = data.draw(st.sampled_from(WEIGHT_BLOCKS))
    how["granularity"] = data.draw(st.sampled_from(GRANULARITIES))
    how["select"] = data.draw(st.sampled_from(SELECTS))
    how["recipe"] = data.draw(st.sampled_from(RECIPES))
    how["e4m3_max"] = data.draw(st.sampled_from(E4M3_MAXIMA))
    how["scale_layout"] = data.draw(st.sampled_from(SCALE_LAYOUTS))
    if data.draw(st.sampled_from(ROUNDINGS)) == "stochastic":
        how |= rounding(data.draw, x)
    if data.draw(st.booleans()):
        values = st.floats(0, 2.0**127, width=32) | st.floats(2.0**-14, 10, width=32)
        count = data.draw(st.sampled_from([1, len(x)]))
        how["gsa"] = torch.tensor([data.draw(values) for _ in range(count)])
        how["granularity"] = "tensor" if count == 1 else "row"
    tile = how["block"] == "16x16"
    refused = (
        (tile and n > 16)
        or (tile and how["granularity"] == "row")
        or ("rounding" in how and how["select"] not in ("none", *STATIC_SELECTS))
        or (how["recipe"] == "vllm" and how["select"] != "none")
    )
    if refused:
        with pytest.raises(ValueError, match=r": expected .*, got "):
            jitquant.quantize_nvfp4(x, **how)
    else:
        assert_nvfp4(x, how)


@SWEEP
@given(data=st.data())
def test_mxfp4_in_every_combination(data: st.DataObject) -> None:
    how = data.draw(rotations(ROTATIONS))
    x = data.draw(tensors(recipes.hadamard_size(how["rotate"]) or 1, 64))
    how |= embedding(data.draw, x)
    how["scaling"] = data.draw(st.sampled_from(MXFP4_SCALINGS))
    how["scale_layout"] = data.draw(st.sampled_from(SCALE_LAYOUTS))
    if data.draw(st.sampled_from(ROUNDINGS)) == "stochastic":
        how |= rounding(data.draw, x)
    assert_mxfp4(x, how)


@SWEEP
@given(data=st.data())
def test_both_in_every_combination(data: st.DataObject) -> None:
    how = data.draw(rotations(("none", "te")))
    x = data.draw(tensors())
    if how["rotate"] == "te":
        x = x.repeat(16, 1)[: len(x) // 16 * 16 + 16] if data.draw(st.booleans()) else x
    how["block"] = data.draw(st.sampled_from(WEIGHT_BLOCKS))
    how["select"] = data.draw(st.sampled_from(SELECTS))
    how["e4m3_max"] = data.draw(st.sampled_from(E4M3_MAXIMA))
    how["scale_layout"] = data.draw(st.sampled_from(SCALE_LAYOUTS))
    if data.draw(st.sampled_from(ROUNDINGS)) == "stochastic":
        how |= rounding(data.draw, None)
        if data.draw(st.booleans()):
            generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
            how["rng_state"] = None
            how["random_bytes"] = tuple(
                torch.randint(256, tuple(like.shape), dtype=U8, generator=generator)
                for like in (x, x.T)
            )
    if data.draw(st.booleans()):
        values = st.floats(0, 2.0**127, width=32) | st.floats(2.0**-14, 10, width=32)
        one, other = (torch.tensor([data.draw(values)]) for _ in range(2))
        how["gsa"] = one if how["block"] == "16x16" or data.draw(st.booleans()) else (one, other)
    if (
        (how["rotate"] == "te" and len(x) % 16)
        or (how["block"] == "16x16" and (how["rotate"] == "te" or "rounding" in how))
        or ("rounding" in how and how["select"] not in ("none", *STATIC_SELECTS))
    ):
        with pytest.raises(ValueError, match=r": expected .*, got "):
            jitquant.quantize_nvfp4_both(x, **how)
    else:
        assert_both(x, how)


@pytest.mark.parametrize("gsa", [0.0, 1e-45, 1e-40, 3e-39, 0.0013, 1.0, 8.6e37, 3.4e38, math.inf])
@pytest.mark.parametrize("select", ["none", "4over6_mae", "4over6_mse", "static_4"])
def test_given_gsa(gsa: float, select: str) -> None:
    for dtype in DTYPES:
        x = specials(dtype)
        how = {"gsa": torch.tensor([gsa]), "select": select, "e4m3_max": 256}
        assert_nvfp4(x, how)
        if select in ("none", *STATIC_SELECTS):  # others are not rounded so
            x = torch.tensor([[math.inf, -math.inf, 1.0] + [0.0] * 13, [1e30] * 16], dtype=dtype)
            bytes_ = torch.full(x.shape, 200, dtype=U8)
            assert_nvfp4(x, how | {"rounding": "stochastic", "random_bytes": bytes_})
    x = randn(4, 48)
    assert_nvfp4(x, {"gsa": 0.001, "rotate": "te"})
    q = jitquant.quantize_nvfp4(x, torch.tensor([math.nan]), select=select, e4m3_max=256)
    assert bool((q.x_sf_bytes == 0x7F).all())
    assert not bool(q.x_fp4_bytes.any())


SPECIAL = [k for k in inputs() if k not in ("no_rows", "no_rows_3d", "tiles")]


@pytest.mark.parametrize("label", SPECIAL)
def test_special_inputs(label: str) -> None:
    for dtype, select in itertools.product(DTYPES, ("none", "4over6_mae", "4over6_mse")):
        x = inputs()[label](dtype, "cpu")
        if x.numel() > 4096:
            x = x[..., :3, : min(x.shape[-1], 200)]
        assert_nvfp4(x, {"select": select, "e4m3_max": 256})
    for dtype, scaling in itertools.product(DTYPES, MXFP4_SCALINGS):
        x = inputs()[label](dtype, "cpu")
        if x.numel() > 4096:
            x = x[..., :3, : min(x.shape[-1], 200)]
        assert_mxfp4(x, {"scaling": scaling})


def test_every_exponent_and_mantissas_at_its_borders() -> None:
    """An MXFP4 block's amax at, below and above what each mode rounds at, of all binades."""
    mantissas = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
    bits = [e << 23 | m for e in range(256) for m in mantissas]
    b = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    x = torch.zeros(len(bits), 32)
    x[:, 5], x[:, 20] = -b, b / 3
    for scaling in MXFP4_SCALINGS:
        assert_mxfp4(x, {"scaling": scaling})


def errors(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Of each row of 16 with the amax as 6, and as 4."""
    blocks, a = x[:, None, :], x.abs().amax().reshape(1, 1)
    S = recipes.scales_from_amax(a, 1536.0)[0]
    base = torch.div(recipes.block_amax(blocks, 1), torch.tensor(6.0)) * S
    found = []
    for factor in (1.0, 1.5):
        s = recipes.decode_e4m3(recipes.encode_e4m3(base * factor))
        full = torch.tensor(1536.0)
        found.append(recipes._candidate(blocks, s, S, a, full, rule, 1)[1][:, 0])
    return found[0], found[1]


def nearly_equal(rule: str, seed: int) -> Tensor:
    """Rows of 16 whose two errors are equal or a few ulp apart.

    Between a row that takes 4 and one that takes 6 there is one that is undecided: errors change
    steadily along the way, which is halved until there are no more numbers on it.
    """
    x = randn(200, 16, dtype=torch.float32, seed=seed)
    x[:, 0] = 6.0  # the amaxes of blocks and tensor stay
    six, four = errors(x, rule)
    low, high = x[four < six], x[four >= six]
    count = min(len(low), len(high))
    low, high = low[:count], high[:count]
    for _ in range(40):
        middle = (low + high) / 2
        six, four = errors(middle, rule)
        takes = (four < six)[:, None]
        low, high = torch.where(takes, middle, low), torch.where(takes, high, middle)
    return torch.cat((low, high))


@pytest.mark.parametrize("rule", ["4over6_mae", "4over6_mse", "4over6_mae_fast", "4over6_abs_max"])
def test_nearly_equal_errors(rule: str) -> None:
    for seed in range(4):
        x = nearly_equal(rule, seed)
        six, four = errors(x, rule)
        assert len(x) >= 8
        assert float(((four - six).abs() <= 5e-7 * six).float().mean()) > 0.5
        assert bool((four < six).any())
        assert bool((four >= six).any())
        for dtype in (torch.float32, torch.bfloat16):
            assert_nvfp4(x.to(dtype), {"select": rule, "e4m3_max": 256})


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 2**63 - 1),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 4),
    columnwise=st.booleans(),
)
@example(seed=-1, offset=2**32, rows=1, blocks=2, columnwise=True)
@example(seed=1, offset=2**63 - 1, rows=2, blocks=1, columnwise=False)
def test_draws(seed: int, offset: int, rows: int, blocks: int, columnwise: bool) -> None:
    got = recipes.random_bytes(torch.tensor([seed, offset]), rows, blocks, columnwise)
    want = oracle_recipes.draws((seed, offset), rows, blocks, columnwise)
    np.testing.assert_array_equal(got.numpy(), want)


def test_stochastic_rounding_of_all_bytes_near_codes() -> None:
    """At each code, an ulp beside it, and beyond 6, with all bytes."""
    around = [0.0, -0.0, 1e-45, 2.0**-126, 2.0**-30, 6.4, 7.0, 8.0, 9.0, 1e30, math.inf]
    for code in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        at = np.float32(code)
        around += [at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(9))]
    for v in (np.array(around, np.float32), -np.array(around, np.float32)):
        values = np.repeat(v[:, None], 256, 1)
        r = np.tile(np.arange(256, dtype=np.uint8), (len(v), 1))
        got = recipes.stochastic_e2m1(torch.tensor(values), torch.tensor(r))
        np.testing.assert_array_equal(got.numpy(), oracle_recipes.stochastic(values, r))


def test_the_op_is_the_function() -> None:
    """References take what the public functions compute."""
    x = randn(5, 48)
    a = reference.rotated_amax(x, rotate="te")[0]
    parts = reference.quantize_nvfp4_recipe(x, a, rotate="te")
    q = jitquant.quantize_nvfp4(x, rotate="te")
    equal(parts[0], q.x_fp4_bytes.numpy())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_that_are_embedded_and_rotated(data: st.DataObject) -> None:
    """FP8 rows, FP8 and INT8 groups of fp32 values are those of what the oracle makes of x."""
    how = data.draw(rotations(ROTATIONS))
    n = recipes.hadamard_size(how["rotate"])
    x = data.draw(tensors(max(n, 32), 64))
    how |= embedding(data.draw, x)
    want = torch.tensor(rotated(fp32(x), how, x.dtype))
    elements = data.draw(st.sampled_from([torch.int8, torch.float8_e4m3fn]))
    size = data.draw(st.sampled_from([16, 128]))
    rest = {"dtype": elements, "recipe": data.draw(st.sampled_from(["te", "deepgemm"]))}
    got = jitquant.quantize_per_token_group(x, size, **rest, **how)
    plain = jitquant.quantize_per_token_group(want, size, **rest)
    equal(got.data, plain.data.view(U8).numpy())
    np.testing.assert_array_equal(got.scale_inv.numpy(), plain.scale_inv.numpy())
    got = jitquant.quantize_fp8(x, granularity="row", **how)
    plain = jitquant.quantize_fp8(want, granularity="row")
    equal(got.data, plain.data.view(U8).numpy())
    np.testing.assert_array_equal(got.scale_inv.numpy(), plain.scale_inv.numpy())
