"""Deinterleave, SwiGLU, RMSNorm and mHC in front of the quantizer.

"select" moves values and computes none: its bits are the reference's. SwiGLU goes through exp, of
which the GPU's and the CPU's differ in the last bits, and a norm sums squares in another order than
the reference, so 1 / rms may differ in its last bit. A value that sits on a rounding boundary then
falls on the other side: at most 1e-3 of the codes do, and the error of the result is the same.
"""

from __future__ import annotations

import pytest
import torch
from samples import DTYPES, GRANULARITIES, LAYOUTS, RECIPES
from torch import Tensor

from jitquant import reference

from .helpers import adversarial, module, randn, same


def _codes(x_fp4: Tensor) -> Tensor:
    return reference.unpack_e2m1(x_fp4)


def _sqnr(values: Tensor, got: Tensor) -> float:
    error = (values.double() - got.double()).square().sum()
    return float(10 * torch.log10(values.double().square().sum() / error))


def close(
    got: tuple[Tensor, ...], expected: tuple[Tensor, ...], values: Tensor, **meta: object
) -> None:
    """At most 1e-3 of the codes differ, and the SQNR is that of the reference within 0.02 dB."""
    differing = (_codes(got[0]) != _codes(expected[0])).float().mean().item()
    count = _codes(got[0]).numel()
    assert differing <= 1e-3 or differing * count <= 2, f"{differing:.2e} of the codes differ"
    torch.testing.assert_close(got[2], expected[2], rtol=1e-5, atol=0)
    if count >= 4096:
        cols = values.shape[-1]
        quality = [
            _sqnr(
                values,
                reference.dequantize_nvfp4(*p[:3], cols=cols, dtype=torch.float32, **meta)[0],
            )
            for p in (got, expected)
        ]
        assert abs(quality[0] - quality[1]) <= 0.02, quality


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale_layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_select(dtype: torch.dtype, granularity: str, scale_layout: str, recipe: str) -> None:
    kernel = module("deinterleave_quantize")
    options = {"op": "select", "scale_layout": scale_layout, "recipe": recipe}
    for rows, cols, run in (
        (1, 16, 8),
        (5, 24, 8),
        (33, 100, 4),
        (7, 96, 32),
        (130, 2048, 8),
        (3, 57, 3),
    ):
        for name, fused in adversarial(rows, 2 * cols, dtype).items():
            for interleave in (run, 0):
                what = f"{rows}x{cols} run {interleave} {name} {options}"
                got = kernel.deinterleave_amax_quantize_nvfp4(
                    fused, cols, interleave, granularity=granularity, **options
                )
                expected = reference.deinterleave_quantize_nvfp4(
                    fused, cols, interleave, granularity=granularity, **options
                )
                same(got, expected, what=what)
                count = rows if granularity == "row" else 1
                gsa = torch.full((count,), 0.003, device="cuda")
                expected = reference.deinterleave_quantize_nvfp4_from_gsa(
                    fused, cols, interleave, gsa, **options
                )
                same(
                    kernel.deinterleave_quantize_nvfp4(fused, cols, interleave, gsa, **options),
                    expected,
                )
                buffered = module("fused_amax_quantize").deinterleave_quantize_from_buffer
                same(buffered(fused, cols, interleave, gsa, **options), expected)


def test_select_ignores_the_up_columns() -> None:
    fused = randn(9, 64)
    runs = fused.view(9, 4, 2, 8)
    runs[:, :, 1] = 1e30
    _, _, gsa = module("deinterleave_quantize").deinterleave_amax_quantize_nvfp4(fused, 32, 8)
    same([gsa], reference.amax_gsa(runs[:, :, 0].reshape(9, 32)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("interleave", [8, 0])
def test_swiglu(dtype: torch.dtype, granularity: str, interleave: int) -> None:
    kernel = module("deinterleave_quantize")
    for rows, cols in ((1, 16), (5, 24), (33, 104), (130, 2048), (64, 7168)):
        fused = randn(rows, 2 * cols, dtype=dtype, scale=2)
        options = {"op": "swiglu", "granularity": granularity}
        got = kernel.deinterleave_amax_quantize_nvfp4(fused, cols, interleave, **options)
        expected = reference.deinterleave_quantize_nvfp4(fused, cols, interleave, **options)
        values = reference.deinterleave(fused, cols, interleave, "swiglu")
        close(got, expected, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale_layout", LAYOUTS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm(
    dtype: torch.dtype, granularity: str, scale_layout: str, with_residual: bool
) -> None:
    kernel = module("fused_rmsnorm_quantize")
    shapes = ((1, 16), (3, 17), (5, 384), (4400, 384), (4400, 1024), (130, 2048), (3, 28672))
    for rows, cols in (*shapes, (64, 7168), (1100, 5136), (600, 7171), (130, 1043)):
        for weight_dtype in (dtype, torch.float32):
            # Rows that lie apart where they are not aligned either.
            gap = cols % 2
            x = randn(rows, cols + gap, dtype=dtype, scale=2)[:, gap:]
            weight = (1 + 0.1 * torch.randn(cols, device="cuda")).to(weight_dtype)
            residual = randn(rows, cols, dtype=dtype) if with_residual else None
            mine = None if residual is None else residual.clone()
            theirs = None if residual is None else residual.clone()
            options = {"granularity": granularity, "scale_layout": scale_layout}
            got = kernel.rmsnorm_quantize_nvfp4(x, weight, 1e-6, residual=mine, **options)
            expected = reference.rmsnorm_quantize_nvfp4(x, weight, 1e-6, residual=theirs, **options)
            if residual is not None:
                same([mine], [theirs], what="residual")
            torch.testing.assert_close(got[3], expected[3], rtol=1e-6, atol=0)
            values = reference.rmsnorm(
                (x if theirs is None else theirs).float().reshape(rows, cols), weight, 1e-6
            )[0]
            close(got, expected, values, scale_layout=scale_layout)
            gsa = expected[2]
            mine = None if residual is None else residual.clone()
            static = kernel.rmsnorm_quantize_nvfp4_from_gsa(
                x, weight, gsa, residual=mine, scale_layout=scale_layout
            )
            close((static[0], static[1], gsa), expected, values, scale_layout=scale_layout)
            mine = None if residual is None else residual.clone()
            value = kernel.rmsnorm_quantize_nvfp4(
                x, weight, residual=mine, gsa_value=gsa[0].item(), scale_layout=scale_layout
            )
            assert value[2].tolist() == [gsa[0].item()]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [6, 4400])
def test_rmsnorm_of_nothing_and_of_specials(granularity: str, rows: int) -> None:
    weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    x = randn(rows, 64)
    x[1] = 0
    x[2, 3] = float("nan")
    x[3, 3] = float("inf")
    got = module("fused_rmsnorm_quantize").rmsnorm_quantize_nvfp4(
        x, weight, granularity=granularity
    )
    expected = reference.rmsnorm_quantize_nvfp4(x, weight, granularity=granularity)
    for mine, theirs in zip(got[:2], expected[:2], strict=True):
        mine, theirs = mine.cpu().view(torch.uint8), theirs.cpu().view(torch.uint8)
        special = slice(1, 4)
        same([mine[special]], [theirs[special]])
        # Numbers, as in any other fusion: of values times one many are ties.
        assert (mine != theirs).sum() <= 2 + mine.numel() // 200


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_mhc(dtype: torch.dtype, granularity: str, streams: int) -> None:
    kernel = module("fused_mhc_rmsnorm_quantize")
    for rows, cols in ((1, 16), (3, 17), (33, 384), (64, 7168), (2, 28672)):
        X = randn(rows, streams, cols, dtype=dtype)
        weight = torch.rand(cols, device="cuda").to(dtype) + 0.5
        for a_dtype in (dtype, torch.float32):
            A = torch.randn(rows, streams, device="cuda").to(a_dtype)
            got = kernel.mhc_rmsnorm_quantize_nvfp4(X, A, weight, granularity=granularity)
            expected = reference.mhc_rmsnorm_quantize_nvfp4(X, A, weight, granularity=granularity)
            values = reference.rmsnorm(reference.hyper_connection_sum(X, A), weight, 1e-6)[0]
            torch.testing.assert_close(got[3], expected[3], rtol=1e-6, atol=0)
            close(got, expected, values)
            static = kernel.mhc_rmsnorm_quantize_nvfp4_from_gsa(X, A, weight, expected[2])
            close((*static[:2], expected[2]), expected, values)
    gaps = randn(9, 2 * streams, 64, dtype=dtype)[::2, ::2]
    A = torch.rand(5, streams, device="cuda")
    weight = torch.ones(64, device="cuda")
    got = kernel.mhc_rmsnorm_quantize_nvfp4(gaps, A, weight, granularity=granularity)
    close(
        got,
        reference.mhc_rmsnorm_quantize_nvfp4(gaps, A, weight, granularity=granularity),
        reference.rmsnorm(reference.hyper_connection_sum(gaps, A), weight, 1e-6)[0],
    )


def test_mhc_sum_is_the_reference_to_the_bit() -> None:
    X, A = randn(40, 4, 512), torch.rand(40, 4, device="cuda")
    weight = torch.ones(512, device="cuda")
    got = module("fused_mhc_rmsnorm_quantize").mhc_rmsnorm_quantize_nvfp4(X, A, weight)
    v = reference.hyper_connection_sum(X, A)
    plain = reference.rmsnorm_quantize_nvfp4(v, weight)
    assert (_codes(got[0]) != _codes(plain[0])).float().mean() <= 1e-3
