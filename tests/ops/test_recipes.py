"""The public functions with recipes for training and rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import byte_view, randn

import jitquant
from jitquant import NVFP4Tensor, QuantizedActivation, QuantizedTensor, reference

STATE = torch.tensor([7, 0])


@pytest.mark.parametrize(
    "recipe",
    [
        {"rotate": "te"},
        {"rotate": "32"},
        {"rounding": "stochastic", "rng_state": STATE},
        {"select": "4over6_mse", "e4m3_max": 256},
        {"select": "4over6_mae", "rotate": "16", "granularity": "row"},
        {"block": "16x16"},
    ],
)
def test_a_recipe_is_an_amax_and_an_op(recipe: dict[str, Any]) -> None:
    x = randn(2, 24, 64)
    rotation = {k: v for k, v in recipe.items() if k in ("rotate", "granularity")}
    amax = reference.rotated_amax(x, **rotation)[0]
    want = reference.quantize_nvfp4_recipe(x, amax, **recipe)
    q = jitquant.quantize_nvfp4(x, **recipe)
    q.validate()
    out = QuantizedActivation.empty(x.shape, granularity=q.granularity)
    assert jitquant.quantize_nvfp4(x, **recipe, out=out) is out
    for made in (q, out):
        assert made.shape == (2, 24, 64)
        for got, wanted in zip((made.x_fp4, made.x_sf, made.gsa), want, strict=True):
            assert torch.equal(byte_view(got), byte_view(wanted))


def test_blocks_of_16_rows_are_those_of_weights() -> None:
    w = randn(40, 64)
    got = jitquant.quantize_nvfp4(w, block="16x16")
    want = jitquant.quantize_weight_nvfp4(w, block="16x16")
    assert torch.equal(got.x_fp4_bytes, want.x_fp4_bytes)
    assert torch.equal(got.x_sf_bytes, want.x_sf_bytes)


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_both_and_mxfp4_write_to_buffers(layout: Any) -> None:
    x = randn(32, 80)
    for how in ({"rotate": "te"}, {"block": "16x16"}, {"select": "4over6_mae", "e4m3_max": 256}):
        want = jitquant.quantize_nvfp4_both(x, **how, scale_layout=layout)
        out = tuple(NVFP4Tensor.empty(shape, scale_layout=layout) for shape in ((32, 80), (80, 32)))
        assert jitquant.quantize_nvfp4_both(x, **how, scale_layout=layout, out=out) is out
        for part, wanted in zip(out, want, strict=True):
            part.validate()
            for field in ("x_fp4", "x_sf", "gsa"):
                assert torch.equal(
                    byte_view(getattr(part, field)), byte_view(getattr(wanted, field))
                )
    want_fp4, want_sf = jitquant.quantize_mxfp4(x, scale_layout=layout)
    codes, scales = torch.empty_like(want_fp4), torch.empty_like(want_sf)
    made = jitquant.quantize_mxfp4(x, scale_layout=layout, out=(codes, scales))
    assert made[0] is codes
    assert made[1] is scales
    assert torch.equal(byte_view(codes), byte_view(want_fp4))
    assert torch.equal(byte_view(scales), byte_view(want_sf))


def test_buffers_that_do_not_fit() -> None:
    x = randn(32, 80)

    def pair(*shapes: tuple[int, int], **how: Any) -> tuple[NVFP4Tensor, ...]:
        return tuple(NVFP4Tensor.empty(shape, **how) for shape in shapes)

    fits: Any = pair((32, 80), (80, 32))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (fits[0], TypeError, "out: expected a tuple of two NVFP4Tensors, got NVFP4Tensor"),
        (fits[:1], TypeError, "out: expected a tuple of two NVFP4Tensors, got tuple of 1"),
        ((fits[0], None), TypeError, r"out\[1\]: expected an NVFP4Tensor, got NoneType"),
        (
            pair((32, 80), (32, 80)),
            ValueError,
            r"out\[1\]\.shape: expected \(80, 32\) for this call, got \(32, 80\)",
        ),
        (pair((32, 80), (80, 32), granularity="row"), ValueError, r"out\[0\].granularity"),
        (pair((32, 80), (80, 32), scale_layout="swizzled_128x4"), ValueError, "scale_layout"),
    ]
    for out, error, words in wrong:
        with pytest.raises(error, match=words):
            jitquant.quantize_nvfp4_both(x, out=out)
    square: Any = pair((32, 32), (32, 32))
    square[1].x_fp4 = square[0].x_fp4
    with pytest.raises(ValueError, match="memory of its own"):
        jitquant.quantize_nvfp4_both(randn(32, 32), out=square)
    codes, scales = jitquant.quantize_mxfp4(x)
    for out, error, words in (
        (codes, TypeError, "out: expected a tuple of x_fp4 and x_sf, got Tensor"),
        ((codes, None), TypeError, r"out: expected a torch\.Tensor to write to, got NoneType"),
        (
            (codes[:16], scales),
            ValueError,
            r"out\.x_fp4: expected shape \(32, 48\) for this call, got shape \(16, 48\)",
        ),
        (
            (scales, codes),
            TypeError,
            r"out\.x_fp4: expected torch\.float4_e2m1fn_x2 for this call, got",
        ),
    ):
        with pytest.raises(error, match=words):
            jitquant.quantize_mxfp4(x, out=out)  # type: ignore[arg-type]


@pytest.mark.parametrize("gsa", [0.002, torch.tensor([0.002]), torch.tensor([[0.002]])])
def test_a_given_gsa_goes_with_a_recipe(gsa: Any) -> None:
    x = randn(24, 64)
    want = reference.quantize_nvfp4_recipe(x, torch.tensor([0.002]), rotate="te", from_gsa=True)
    q = jitquant.quantize_nvfp4(x, gsa, rotate="te")
    out = NVFP4Tensor.empty(x.shape)
    jitquant.quantize_nvfp4(x, gsa, rotate="te", out=out)
    for made in (q, out):
        for got, wanted in zip((made.x_fp4, made.x_sf, made.gsa), want, strict=True):
            assert torch.equal(byte_view(got), byte_view(wanted))
    assert q.gsa.tolist() == [pytest.approx(0.002)]
    rows = torch.linspace(0.001, 0.003, 24)
    q = jitquant.quantize_nvfp4(x, rows, select="4over6_mae", e4m3_max=256)
    assert q.granularity == "row"
    assert torch.equal(q.gsa, rows)


@pytest.mark.parametrize("rotate", ["none", "16"])
def test_the_gsa_of_the_buffers_may_be_given(rotate: Any) -> None:
    how: dict[str, Any] = {"rotate": rotate, "select": "4over6_mae"}
    x, q = randn(32, 48), jitquant.quantize_nvfp4(randn(32, 48) * 2, **how)
    gsa = q.gsa.clone()
    want = jitquant.quantize_nvfp4(x, gsa, **how)
    assert jitquant.quantize_nvfp4(x, q.gsa, **how, out=q) is q
    assert torch.equal(q.dequantize(), want.dequantize())
    both = jitquant.quantize_nvfp4_both(randn(32, 48) * 2)
    for pick in ((0, 1), (1, 0)):
        first, second = (both[i].gsa.clone() for i in pick)
        wanted = jitquant.quantize_nvfp4_both(x, gsa=(first, second))
        pair = (both[pick[0]].gsa, both[pick[1]].gsa)
        jitquant.quantize_nvfp4_both(x, gsa=pair, out=both)
        for part, other in zip(both, wanted, strict=True):
            assert torch.equal(part.dequantize(), other.dequantize())
    wanted = jitquant.quantize_nvfp4_both(x, gsa=both[1].gsa.clone())
    jitquant.quantize_nvfp4_both(x, gsa=both[1].gsa, out=both)
    for part, other in zip(both, wanted, strict=True):
        assert torch.equal(part.dequantize(), other.dequantize())


def test_a_given_gsa_is_not_written_by_a_recipe() -> None:
    x, gsa = randn(32, 32), torch.tensor([0.01])
    q = jitquant.quantize_nvfp4(x, gsa)
    jitquant.quantize_nvfp4(x, rotate="16", out=q)
    pair = (jitquant.quantize_nvfp4(x, gsa), jitquant.quantize_nvfp4(x, gsa))
    jitquant.quantize_nvfp4_both(x * 3, out=pair)
    assert torch.equal(gsa, torch.tensor([0.01]))
    for got, want in (
        (q, jitquant.quantize_nvfp4(x, rotate="16")),
        *zip(pair, jitquant.quantize_nvfp4_both(x * 3), strict=True),
    ):
        assert torch.equal(got.dequantize(), want.dequantize())


@pytest.mark.parametrize("rotate", ["none", "te"])
def test_a_given_gsa_and_bytes_of_both(rotate: Any) -> None:
    """Each is what the function for one matrix gives."""
    x, generator = randn(32, 80), torch.Generator().manual_seed(1)
    sides = (x, x.T.contiguous())
    random_bytes: Any = tuple(
        torch.randint(256, tuple(side.shape), dtype=torch.uint8, generator=generator)
        for side in sides
    )
    rounding: Any = {"rounding": "stochastic"}
    both = jitquant.quantize_nvfp4_both(x, rotate=rotate, **rounding, random_bytes=random_bytes)
    given: Any = (0.002, torch.tensor([[0.003]]))
    with_gsa = jitquant.quantize_nvfp4_both(
        x, rotate=rotate, **rounding, random_bytes=random_bytes, gsa=given
    )
    out: Any = tuple(NVFP4Tensor.empty(shape) for shape in ((32, 80), (80, 32)))
    jitquant.quantize_nvfp4_both(x, rotate=rotate, gsa=given, out=out)
    for t, (side, own) in enumerate(zip(sides, random_bytes, strict=True)):
        turn = rotate if t else "none"
        for made, how in (
            (both[t], {**rounding, "random_bytes": own}),
            (with_gsa[t], {**rounding, "random_bytes": own, "gsa": given[t]}),
            (out[t], {"gsa": given[t], "e4m3_max": 448}),
        ):
            want = jitquant.quantize_nvfp4(side, rotate=turn, **how)
            for field in ("x_fp4", "x_sf", "gsa"):
                assert torch.equal(byte_view(getattr(made, field)), byte_view(getattr(want, field)))


def test_one_gsa_serves_both() -> None:
    x, gsa = randn(32, 80), torch.tensor([0.002])
    for how in ({}, {"block": "16x16"}, {"select": "4over6_mse", "e4m3_max": 256}):
        one = jitquant.quantize_nvfp4_both(x, gsa=gsa, **how)
        for part, side in zip(one, (x, x.T), strict=True):
            part.validate()
            assert torch.equal(part.gsa, gsa)
            want = jitquant.quantize_nvfp4(side.contiguous(), gsa, **how)
            assert torch.equal(part.x_sf_bytes, want.x_sf_bytes)
            if "block" not in how:
                assert torch.equal(part.x_fp4_bytes, want.x_fp4_bytes)


def test_rope_and_a_rotation_before_eight_bits() -> None:
    """As DeepSeek's indexer: 64 of 128 columns are embedded, then all are rotated."""
    x, angles = randn(6, 4, 128), randn(6, 32, dtype=torch.float32, seed=3)
    rope = angles.cos(), angles.sin()
    tables = {"cos": rope[0], "sin": rope[1], "interleaved": True}
    how: Any = {"rotate": "128", "rope": rope, "interleaved": True}
    for dtype in (torch.float8_e4m3fn, torch.int8):
        want = reference.rotate_quantize_per_token_group(
            x, 128, dtype=dtype, rotate="128", **tables
        )
        q = jitquant.quantize_per_token_group(x, dtype=dtype, **how)
        buffers = QuantizedTensor.empty(x.shape, format=q.format, dtype=dtype)
        assert jitquant.quantize_per_token_group(x, dtype=dtype, **how, out=buffers) is buffers
        for made in (q, buffers):
            assert torch.equal(byte_view(made.data), byte_view(want[0]))
            assert torch.equal(made.scale_inv, want[1])
    want = reference.rotate_quantize_fp8(x, dtype=torch.float8_e4m3fn, rotate="128", **tables)
    row = jitquant.quantize_fp8(x, granularity="row", **how)
    given = jitquant.quantize_fp8(x, scale=2.0, **how)
    group = jitquant.quantize_fp8(x, granularity="1x128", **how)
    assert torch.equal(byte_view(row.data), byte_view(want[0]))
    assert given.scale_inv.tolist() == [0.5]
    wanted = jitquant.quantize_per_token_group(x, **how)
    assert torch.equal(byte_view(group.data), byte_view(wanted.data))


def test_rope_and_a_rotation_before_four_bits() -> None:
    x, angles = randn(6, 4, 128), randn(6, 32, dtype=torch.float32, seed=3)
    rope = angles.cos(), angles.sin()
    tables: Any = {"cos": rope[0], "sin": rope[1], "interleaved": True}
    how: Any = {"rope": rope, "interleaved": True}
    for rotate in ("none", "128"):
        amax = reference.rotated_amax(x, rotate=rotate, **tables)[0]
        assert float(amax.max()) != float(x.abs().max())
        want = reference.quantize_nvfp4_recipe(x, amax, rotate=rotate, **tables)
        q = jitquant.quantize_nvfp4(x, rotate=rotate, **how)
        out = NVFP4Tensor.empty(x.shape)
        assert jitquant.quantize_nvfp4(x, rotate=rotate, **how, out=out) is out
        for made in (q, out):
            for got, wanted in zip((made.x_fp4, made.x_sf, made.gsa), want, strict=True):
                assert torch.equal(byte_view(got), byte_view(wanted))
        given = jitquant.quantize_nvfp4(x, q.gsa, rotate=rotate, **how)
        assert given.gsa.tolist() == q.gsa.tolist()
        want = reference.quantize_mxfp4(x, rotate=rotate, **tables)
        parts = jitquant.quantize_mxfp4(x, rotate=rotate, **how)
        for got, wanted in zip(parts, want, strict=True):
            assert torch.equal(byte_view(got), byte_view(wanted))


def test_an_offset_that_moves_draws_anew() -> None:
    x, state = randn(32, 64), STATE.clone()

    def codes() -> torch.Tensor:
        q = jitquant.quantize_nvfp4(x, rounding="stochastic", rng_state=state)
        return q.x_fp4_bytes.clone()

    first = codes()
    assert torch.equal(codes(), first)
    state[1] += 1
    assert not torch.equal(codes(), first)


def test_mxfp4_comes_back() -> None:
    x = randn(5, 100)
    for layout in ("linear", "swizzled_128x4"):
        parts = jitquant.quantize_mxfp4(x, scaling="even", scale_layout=layout)
        y = jitquant.dequantize_mxfp4(*parts, cols=100, scale_layout=layout)
        assert y.shape == x.shape
        assert y.dtype == torch.bfloat16
        assert float((y - x).float().norm() / x.float().norm()) < 0.15
        out = torch.empty(5, 100, dtype=torch.float32)
        assert jitquant.dequantize_mxfp4(*parts, cols=100, scale_layout=layout, out=out) is out
        torch.testing.assert_close(out.bfloat16(), y, rtol=0, atol=0)


def test_compiles() -> None:
    x = randn(16, 64)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        q = jitquant.quantize_nvfp4(x, rotate="te", rounding="stochastic", rng_state=state)
        return q.dequantize()

    want = jitquant.quantize_nvfp4(x, rotate="te", rounding="stochastic", rng_state=STATE)
    assert torch.equal(call(x, STATE), want.dequantize())
