"""Deinterleave, SwiGLU, RMSNorm and mHC in front of the quantizer.

"select" moves values and computes none, and a norm sums squares in the reference's order: their
bits are the reference's. SwiGLU goes through exp, of which the GPU's and the CPU's differ in the
last bits. A value that sits on a rounding boundary then falls on the other side: at most 1e-3 of
the codes of random values do, and the error of the result is the same.
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
    shapes = (
        (1, 16),
        (3, 17),
        (5, 384),
        (4400, 384),
        (4400, 1024),
        (130, 2048),
        (3, 28672),
        (3, 53264),
    )
    for rows, cols in (*shapes, (64, 7168), (1100, 5136), (600, 7171), (130, 1043)):
        for weight_dtype in (dtype, torch.float32):
            # Strided rows that are not aligned either.
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
            same(got, expected, what=f"{rows}x{cols}")
            gsa = expected[2]

            def added(residual: Tensor | None = residual) -> Tensor | None:
                return None if residual is None else residual.clone()

            # 1 / gsa is not always the S that gsa came with.
            static = kernel.rmsnorm_quantize_nvfp4_from_gsa(
                x, weight, gsa, residual=added(), scale_layout=scale_layout
            )
            expected = reference.rmsnorm_quantize_nvfp4_from_gsa(
                x, weight, gsa, residual=added(), scale_layout=scale_layout
            )
            same(static, expected, what=f"{rows}x{cols} static")
            how = {"gsa_value": gsa[0].item(), "scale_layout": scale_layout}
            value = kernel.rmsnorm_quantize_nvfp4(x, weight, residual=added(), **how)
            expected = reference.rmsnorm_quantize_nvfp4(x, weight, residual=added(), **how)
            same(value, expected, what=f"{rows}x{cols} value")


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
    same(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_ties_go_to_even_codes_wherever_rows_lie(dtype: torch.dtype, granularity: str) -> None:
    norm, fused = module("fused_rmsnorm_quantize"), module("deinterleave_quantize")
    for rows, cols in ((4400, 384), (130, 2048), (64, 7168), (1100, 7168), (3, 28672)):
        memory = torch.randint(-6, 7, (rows, cols + 3), device="cuda").to(dtype)
        weight = torch.ones(cols, device="cuda", dtype=dtype)
        how = {"granularity": granularity}
        for x in (memory[:, :cols].contiguous(), memory[:, 3:]):
            got = norm.rmsnorm_quantize_nvfp4(x, weight, **how)
            same(got, reference.rmsnorm_quantize_nvfp4(x, weight, **how), what=f"{rows}x{cols}")
            # silu(64) is 64, so that no exponential shows.
            pair = torch.cat((torch.full_like(x, 64.0), x), 1)
            for fused_rows in (pair, torch.nn.functional.pad(pair, (0, 3))[:, : 2 * cols]):
                args, options = (fused_rows, cols, 0), {"op": "swiglu", **how}
                got = fused.deinterleave_amax_quantize_nvfp4(*args, **options)
                expected = reference.deinterleave_quantize_nvfp4(*args, **options)
                same(got, expected, what=f"swiglu {rows}x{cols}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_at_the_ends_of_fp32(dtype: torch.dtype) -> None:
    norm, fp8 = module("fused_rmsnorm_quantize"), module("rmsnorm_quantize")
    for rows, cols in ((4400, 384), (130, 2048), (64, 7168), (1100, 7168)):
        base, ones = randn(rows, cols, dtype=dtype), torch.ones(cols, device="cuda")
        huge = base.clone()
        huge[0] = base[0].sign() * 3e38
        huge[1, 3], huge[2, 0], huge[3, 5] = 2e30, float("inf"), float("nan")
        nan = ones.clone()
        nan[3] = float("nan")
        wide = torch.logspace(-20, 20, cols, device="cuda")
        for x, weight in ((huge, 10 * ones), (huge, wide), (base, nan), (base * 1e-36, ones / 8)):
            for granularity in GRANULARITIES:
                how = {"granularity": granularity}
                got = norm.rmsnorm_quantize_nvfp4(x, weight, **how)
                same(got, reference.rmsnorm_quantize_nvfp4(x, weight, **how))
            how = {"dtype": torch.float8_e4m3fn}
            got = fp8.rmsnorm_quantize_fp8(x, weight, **how)
            same(got, reference.rmsnorm_quantize_fp8(x, weight, **how))


def test_swiglu_of_a_small_gate() -> None:
    gate, up = torch.full((40, 64), -88.0), torch.linspace(0.5, 2.0, 40 * 64).view(40, 64) * 1e38
    fused = torch.cat((gate, up), 1).cuda()
    kernel = module("deinterleave_quantize").deinterleave_amax_quantize_nvfp4
    *_, gsa = kernel(fused, 64, 0, op="swiglu")
    values = reference.deinterleave(fused, 64, 0, "swiglu")
    torch.testing.assert_close(gsa, values.abs().amax()[None] / 2688, rtol=1e-5, atol=0)


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
            same(got, expected, what=f"{rows}x{cols}")
            gsa = expected[2]
            static = kernel.mhc_rmsnorm_quantize_nvfp4_from_gsa(X, A, weight, gsa)
            expected = reference.mhc_rmsnorm_quantize_nvfp4_from_gsa(X, A, weight, gsa)
            same(static, expected, what=f"{rows}x{cols} static")
    gaps = randn(9, 2 * streams, 64, dtype=dtype)[::2, ::2]
    A = torch.rand(5, streams, device="cuda")
    weight = torch.ones(64, device="cuda")
    got = kernel.mhc_rmsnorm_quantize_nvfp4(gaps, A, weight, granularity=granularity)
    same(got, reference.mhc_rmsnorm_quantize_nvfp4(gaps, A, weight, granularity=granularity))
