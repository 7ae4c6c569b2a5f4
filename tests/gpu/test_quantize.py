"""quantize, amax and dequantize: the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import DTYPES, GRANULARITIES, LAYOUTS, RECIPES
from sweeps import GSA_GRID, all_bf16_arrangements, all_fp16

from jitquant import reference

from .helpers import SHAPES, adversarial, module, randn, same, views


def _dynamic(x: torch.Tensor, what: str = "", **options: object) -> None:
    got = module("fused_amax_quantize").amax_quantize_nvfp4(x, **options)
    same(got, reference.quantize_nvfp4(x, **options), what=f"{what} {options}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scale_layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dynamic(dtype: torch.dtype, granularity: str, scale_layout: str, recipe: str) -> None:
    options = {"granularity": granularity, "scale_layout": scale_layout, "recipe": recipe}
    for shape in SHAPES:
        for name, x in adversarial(*shape, dtype).items():
            _dynamic(x, f"{shape} {name}", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_views_are_read_in_place(dtype: torch.dtype, granularity: str) -> None:
    for rows, cols in ((5, 64), (6, 100), (40, 7168)):
        x = randn(rows, cols, dtype=dtype)
        for name, view in views().items():
            _dynamic(view(x), name, granularity=granularity)
    cube = randn(4, 6, 8, 5, 48, dtype=dtype)
    for name, x in {
        "transposed": cube[0].transpose(0, 1),
        "two gaps": cube[:, ::2, 3, ::2],
        "three gaps": cube[::2, ::2, ::3, 0],
        "expanded": cube[0, 0, 0, :1].expand(9, 48),
        "broadcast": cube[0, :1, :, 0].expand(3, 8, 48),
        "one row": cube[0, 0, 0, 0],
    }.items():
        _dynamic(x, name, granularity=granularity)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_layout", LAYOUTS)
def test_rows_anywhere(dtype: torch.dtype, scale_layout: str) -> None:
    """Rows that begin at every distance from a multiple of 16 bytes, held and too long for it."""
    options = {"granularity": "row", "scale_layout": scale_layout}
    for rows, cols in ((3, 5), (130, 1043), (2600, 7171), (2, 33003)):
        memory = randn(rows, cols + 9, dtype=dtype, scale=3)
        memory[::7, 3::50] = float("nan")
        memory[1::9] = 0
        for offset in range(9):
            _dynamic(memory[:, offset : offset + cols], f"{cols} {offset}", **options)
        _dynamic(memory[:, 1:], f"{cols + 8} columns", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_layout", LAYOUTS)
def test_many_long_rows(dtype: torch.dtype, scale_layout: str) -> None:
    """More than stay on a GPU: some have a block of threads to themselves, or a cluster of them."""
    for rows, cols in ((4300, 2064), (2003, 7168), (1300, 16400), (300, 53264)):
        x = randn(rows, cols, dtype=dtype, scale=3)
        x[::7, 3::50] = float("nan")
        x[1::9] = 0
        x[-1, -1] = float("inf")
        _dynamic(x, f"{rows} x {cols}", granularity="row", scale_layout=scale_layout)


def test_more_than_three_gaps_is_refused() -> None:
    x = randn(4, 6, 8, 10, 48)[::2, ::2, ::2, ::2]
    with pytest.raises(RuntimeError, match=r"at most three leading dimensions.*x.contiguous\(\)"):
        module("fused_amax_quantize").amax_quantize_nvfp4(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_bf16_and_fp16_with_a_grid_of_gsa(recipe: str) -> None:
    for x in (*all_bf16_arrangements(), all_fp16()):
        for gsa in GSA_GRID:
            scale = torch.tensor([gsa], device="cuda")
            expected = reference.quantize_nvfp4_from_gsa(x, scale.cpu(), recipe=recipe)
            got = module("quantize_nvfp4").quantize_nvfp4(x.cuda(), scale, recipe=recipe)
            same(got, expected, what=f"gsa {gsa}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_given_gsa(dtype: torch.dtype, scale_layout: str, recipe: str) -> None:
    options = {"scale_layout": scale_layout, "recipe": recipe}
    for rows, cols in SHAPES:
        x = randn(rows, cols, dtype=dtype, scale=3)
        one = torch.tensor([0.0017], device="cuda")
        per_row = torch.rand(rows, device="cuda") * 0.01
        spaced = torch.rand(rows, 3, device="cuda")[:, 1]
        for gsa in (one, one[0], per_row, spaced):
            expected = reference.quantize_nvfp4_from_gsa(x, gsa, **options)
            same(module("quantize_nvfp4").quantize_nvfp4(x, gsa, **options), expected)
            buffered = module("fused_amax_quantize").quantize_nvfp4_from_buffer(x, gsa, **options)
            same(buffered, expected)
        got = module("fused_amax_quantize").amax_quantize_nvfp4(x, gsa_value=0.0017, **options)
        same(got, reference.quantize_nvfp4(x, gsa_value=0.0017, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_swizzled_scales_of_many_rows(dtype: torch.dtype, recipe: str) -> None:
    """Enough for a kernel of its own on any GPU, with rows and columns that fill no tile."""
    options = {"scale_layout": "swizzled_128x4", "recipe": recipe}
    gsa = torch.tensor([0.0017], device="cuda")
    for rows, cols, gap in ((3201, 7168, 0), (2600, 7104, 16), (60033, 208, 0)):
        x = randn(rows, cols + gap, dtype=dtype, scale=3)[:, :cols]
        x[::7, 3::50] = float("nan")
        x[1::9] = 0
        expected = reference.quantize_nvfp4_from_gsa(x, gsa, **options)
        same(module("quantize_nvfp4").quantize_nvfp4(x, gsa, **options), expected)
        _dynamic(x, f"{rows} x {cols}", **options)
    both = randn(3201, 2 * 7104, dtype=dtype)
    k = {"op": "select", **options}
    got = module("deinterleave_quantize").deinterleave_quantize_nvfp4(both, 7104, 16, gsa, **k)
    same(got, reference.deinterleave_quantize_nvfp4_from_gsa(both, 7104, 16, gsa, **k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_layout", LAYOUTS)
def test_many_short_rows(dtype: torch.dtype, scale_layout: str) -> None:
    """Enough for a kernel of its own, which has 4 to 32 lanes a row."""
    options = {"granularity": "row", "scale_layout": scale_layout}
    for cols, gap in ((16, 0), (80, 8), (96, 0), (384, 0), (528, 16), (1040, 0), (2048, 0)):
        for name, x in adversarial(7001, cols + gap, dtype).items():
            _dynamic(x[:, :cols], f"{cols} {name}", **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_gsa(dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (4096, 7168), (1, 1), (3000, 1000)):
        for name, x in adversarial(*shape, dtype).items():
            got = module("amax_gsa").compute_amax_gsa(x, 2688.0)
            same([got], reference.amax_gsa(x, 2688.0), what=f"{shape} {name}")
    x = randn(33, 7168, dtype=dtype)
    same([module("amax_gsa").compute_amax_gsa(x, 1536.0)], reference.amax_gsa(x, 1536.0))
    for view in views().values():
        same([module("amax_gsa").compute_amax_gsa(view(x))], reference.amax_gsa(x))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 1100),
    dtype=st.sampled_from(DTYPES),
    granularity=st.sampled_from(GRANULARITIES),
    scale_layout=st.sampled_from(LAYOUTS),
    recipe=st.sampled_from(RECIPES),
    divisor=st.sampled_from([2688.0, 1536.0, 1.0, 7e4]),
    scale=st.floats(-30, 30),
    gap=st.integers(0, 40),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    rows: int,
    cols: int,
    dtype: torch.dtype,
    granularity: str,
    scale_layout: str,
    recipe: str,
    divisor: float,
    scale: float,
    gap: int,
    offset: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    scale = 2.0 ** (scale if dtype is not torch.float16 else scale / 4)
    storage = torch.randn(rows * (cols + gap) + offset, device="cuda") * scale
    x = storage.to(dtype)[offset:].as_strided((rows, cols), (cols + gap, 1), offset)
    _dynamic(
        x,
        divisor=divisor,
        granularity=granularity,
        scale_layout=scale_layout,
        recipe=recipe,
    )


@pytest.mark.parametrize("scale_layout", LAYOUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_dequantize(scale_layout: str, granularity: str) -> None:
    for rows, cols in SHAPES:
        for name, x in adversarial(rows, cols, torch.bfloat16).items():
            parts = reference.quantize_nvfp4(x, granularity=granularity, scale_layout=scale_layout)
            for dtype in DTYPES:
                options = {"cols": cols, "scale_layout": scale_layout, "dtype": dtype}
                got = module("dequant_nvfp4").dequant_nvfp4(*parts, **options)
                same([got], reference.dequantize_nvfp4(*parts, **options), what=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_odd_widths(dtype: torch.dtype) -> None:
    """More rows than are at work at once, of fewer halves of a block than a warp has, and more."""
    for rows, cols in ((40001, 3), (70000, 39), (5000, 1043)):
        parts = reference.quantize_nvfp4(randn(rows, cols), granularity="row")
        got = module("dequant_nvfp4").dequant_nvfp4(*parts, cols=cols, dtype=dtype)
        same([got], reference.dequantize_nvfp4(*parts, cols=cols, dtype=dtype), what=f"{cols}")


def test_dequantize_every_code_and_scale() -> None:
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).cuda()
    x_sf = scales.view(torch.float8_e4m3fn).reshape(256, 1)
    codes = (torch.arange(8) * 2 + (torch.arange(8) * 2 + 1) * 16).to(torch.uint8).cuda()
    x_fp4 = codes.expand(256, 8).contiguous().view(torch.float4_e2m1fn_x2)
    for gsa in GSA_GRID:
        parts = (x_fp4, x_sf, torch.tensor([gsa], device="cuda"))
        for dtype in DTYPES:
            got = module("dequant_nvfp4").dequant_nvfp4(*parts, dtype=dtype)
            same([got], reference.dequantize_nvfp4(*parts, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", ["1x16", "16x16"])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weight(dtype: torch.dtype, block: str, dim: int, recipe: str) -> None:
    kernel = module("quantize_weight_nvfp4")
    for rows, cols in ((16, 16), (1, 33), (40, 17), (130, 100), (384, 1536), (1000, 256)):
        for name, w in adversarial(rows, cols, dtype).items():
            for layout in LAYOUTS if dim == -1 else ("linear",):
                options = {"block": block, "dim": dim, "recipe": recipe, "scale_layout": layout}
                what = f"{rows}x{cols} {name} {options}"
                expected = reference.quantize_weight_nvfp4(w, **options)
                got = kernel.quantize_weight_nvfp4(w, **options)
                same(got, expected, what=what)
                gsa = torch.tensor([0.002], device="cuda")
                same(
                    kernel.quantize_weight_nvfp4_from_gsa(w, gsa, **options),
                    reference.quantize_weight_nvfp4_from_gsa(w, gsa, **options),
                    what=what,
                )
                got = kernel.quantize_weight_nvfp4(w, gsa_value=0.002, **options)
                same(got[:2], kernel.quantize_weight_nvfp4_from_gsa(w, gsa, **options))
        parts = kernel.quantize_weight_nvfp4(w, block=block, dim=dim)
        options = {"cols": rows if dim == 0 else cols, "dim": dim, "dtype": dtype}
        got = module("dequant_nvfp4").dequant_nvfp4(*parts, **options)
        same([got], reference.dequantize_nvfp4(*parts, **options))
