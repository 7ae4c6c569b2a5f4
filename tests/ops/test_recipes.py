"""The public functions with recipes for training and rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import byte_view, randn

import jitquant
from jitquant import QuantizedActivation, reference

STATE = torch.tensor([7, 0])


@pytest.mark.parametrize(
    "recipe",
    [
        {"rotate": "te"},
        {"rotate": "32"},
        {"rounding": "stochastic", "rng_state": STATE},
        {"select": "4over6_mse", "top": 256},
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
