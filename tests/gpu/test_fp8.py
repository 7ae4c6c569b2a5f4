"""FP8 with one scale for a tensor or a row, and the way back: bits, launches, strides, sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import DTYPES
from torch import Tensor

from jitquant import reference
from jitquant.formats import FP8_DTYPES, GROUP_DTYPES
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

from .helpers import SHAPES, adversarial, module, randn, room_for, same, views

E4M3, E5M2 = FP8_DTYPES
# Of up to 7168 blocks of 16 values, where a GPU has clusters of blocks.
ONE = 1 if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else 2


def _quantize(x: Tensor, scale: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    return module("quantize_fp8").quantize_fp8(x, scale, **{"dtype": E4M3, **options})


def _scales(rows: int) -> Tensor:
    return torch.linspace(3.0, 200.0, rows, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", GROUP_DTYPES)
def test_every_16_bit_value(dtype: torch.dtype, fp8: torch.dtype) -> None:
    every = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
    for x in (every.view(256, 256), every.view(4096, 16), every[1:].view(5, 13107)):
        same(_quantize(x, dtype=fp8), reference.quantize_fp8(x, dtype=fp8))
        for scale in (1.0, 0.37, 448.0, 1e-38, 3e38):
            given = torch.tensor([scale], device="cuda")
            same(
                _quantize(x, given, dtype=fp8),
                reference.quantize_fp8(x, given, dtype=fp8),
                what=f"scale {scale}",
            )
        for most, least in ((None, None), (1.0, None), (8.0, 0.5)):
            options = {"dtype": fp8, "granularity": "row", "scale_ub": most, "amax_eps": least}
            same(_quantize(x, **options), reference.quantize_fp8(x, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_awkward_tensors(dtype: torch.dtype, granularity: str) -> None:
    for i, (rows, cols) in enumerate((*SHAPES, (700, 100), (300, 1040))):
        fp8 = GROUP_DTYPES[i % 3]
        options = {"dtype": fp8, "granularity": granularity}
        scale = _scales(rows if granularity == "row" else 1)
        for name, x in adversarial(rows, cols, dtype).items():
            what = f"{rows}x{cols} {name} {options}"
            same(_quantize(x, **options), reference.quantize_fp8(x, **options), what=what)
            expected = reference.quantize_fp8(x, scale, **options)
            same(_quantize(x, scale, **options), expected, what=f"{what} given")
            got = _quantize(x, scale, with_amax=False, **options)
            same(got[:2], expected[:2], what=f"{what} given, no amax")
            assert got[2].shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype) -> None:
    for rows, cols in ((6, 48), (130, 80), (300, 1024), (33, 100)):
        x = randn(rows, cols, dtype=dtype)
        for name, view in views().items():
            for granularity in ("tensor", "row"):
                expected = reference.quantize_fp8(x, dtype=E4M3, granularity=granularity)
                what = f"{name} {rows}x{cols} {granularity}"
                same(_quantize(view(x), granularity=granularity), expected, what=what)
                wide = torch.full((rows, cols + 24), 0xAB, dtype=torch.uint8, device="cuda")
                for start in (16, 3):
                    wide.fill_(0xAB)
                    data = wide[:, start : start + cols].view(E4M3)
                    rest = {"scale_inv": torch.empty_like(expected[1], device="cuda")}
                    rest["amax"] = torch.empty_like(rest["scale_inv"])
                    module("quantize_fp8").quantize_fp8.out(
                        view(x), dtype=E4M3, granularity=granularity, data=data, **rest
                    )
                    same((data, rest["scale_inv"], rest["amax"]), expected, what=what)
                    assert bool((wide[:, :start] == 0xAB).all())
                    assert bool((wide[:, start + cols :] == 0xAB).all())


def _pipelines() -> dict[str, tuple[Callable[..., object], Callable[[], list[Tensor]], int]]:
    """Per call: the function, its arguments, its launches."""
    one, rows = _scales(1), _scales(150)
    back = module("dequantize").dequantize
    data, scale_inv, _ = _quantize(randn(150, 768))

    def x() -> list[Tensor]:
        return [randn(150, 768)]

    return {
        "tensor": (_quantize, x, 2),
        "tensor small": (_quantize, lambda: [randn(4, 768)], ONE),
        "row": (lambda t: _quantize(t, granularity="row"), x, 1),
        "given": (lambda t: _quantize(t, one), x, 2),
        "given small": (lambda t: _quantize(t, one), lambda: [randn(4, 768)], 1),
        "given, no amax": (lambda t: _quantize(t, one, with_amax=False), x, 1),
        "number": (lambda t: _quantize(t, scale_value=3.0), x, 2),
        "given rows": (lambda t: _quantize(t, rows, granularity="row"), x, 1),
        "given rows, no amax": (
            lambda t: _quantize(t, rows, granularity="row", with_amax=False), x, 1),
        "odd": (_quantize, lambda: [randn(150, 777)], 2),
        "odd, given": (lambda t: _quantize(t, one), lambda: [randn(150, 777)], 2),
        "dequantize": (lambda t: back(data, scale_inv, 0, 0), x, 1),
    }  # fmt: skip


def test_launches_are_exact_captured_and_never_waited_for() -> None:
    for name, (fn, arguments, launches) in _pipelines().items():
        assert count_launches(fn, *arguments()) == launches, name
        assert_no_sync(fn, *arguments())
        assert_capturable(fn, *arguments(), replays=3)


def test_one_launch_up_to_7168_blocks() -> None:
    for shape, launches in [
        *(((1, 16 * blocks), ONE) for blocks in (1, 31, 512, 513, 4097, 7168)),
        *(((rows, 7168), ONE) for rows in (2, 3, 9, 16)),
        *(((1, 16 * 7168 + 1), 2), ((17, 7168), 2), ((1100, 100), 2)),
    ]:
        x = randn(*shape)
        same(_quantize(x), reference.quantize_fp8(x, dtype=E4M3), what=str(shape))
        assert count_launches(_quantize, x) == launches, shape


def test_streams_at_once() -> None:
    inputs = [randn(500 + 37 * i, 1024, scale=10.0**i) for i in range(6)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        results = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append((_quantize(x), _quantize(x, _scales(1)), _quantize(x)))
        torch.cuda.synchronize()
        for x, (first, given, second) in zip(inputs, results, strict=True):
            expected = reference.quantize_fp8(x, dtype=E4M3)
            same(first, expected)
            same(second, expected)
            same(given, reference.quantize_fp8(x, _scales(1), dtype=E4M3))


def test_empty_tensors() -> None:
    for shape in ((0, 64), (3, 0, 64), (0, 17)):
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        for granularity in ("tensor", "row"):
            options = {"dtype": E4M3, "granularity": granularity}
            same(_quantize(x, **options), reference.quantize_fp8(x, **options))
            scale = _scales(0 if granularity == "row" else 1)
            same(_quantize(x, scale, **options), reference.quantize_fp8(x, scale, **options))


def test_bad_arguments_reach_no_kernel() -> None:
    x, scale = randn(4, 64), _scales(1)
    data, scale_inv, _ = _quantize(x)
    back = module("dequantize").dequantize
    cases: list[tuple[str, Callable[[], object]]] = [
        ("x: expected bfloat16, .* got torch.int32", lambda: _quantize(x.int())),
        ("dtype: expected float8_e4m3fn", lambda: _quantize(x, dtype=torch.half)),
        ("granularity: .* got 'block'", lambda: _quantize(x, granularity="block")),
        ("scale: expected float32, got torch.float16", lambda: _quantize(x, scale.half())),
        ("scale: expected 4 elements", lambda: _quantize(x, scale, granularity="row")),
        ("scale: expected a tensor on cuda", lambda: _quantize(x, scale.cpu())),
        (
            "scale: expected a tensor or a number, got both",
            lambda: _quantize(x, scale, scale_value=2.0),
        ),
        ("scale: expected a finite number .* got 0.0", lambda: _quantize(x, scale_value=0.0)),
        (
            "scale: expected a tensor with granularity 'row'",
            lambda: _quantize(x, scale_value=2.0, granularity="row"),
        ),
        (
            "scale_ub: expected None beside a scale, got 1.0",
            lambda: _quantize(x, scale, scale_ub=1.0),
        ),
        ("scale_ub: .* got inf", lambda: _quantize(x, scale_ub=float("inf"))),
        ("data: expected float8.* got torch.bfloat16", lambda: back(x, scale_inv, 0, 0)),
        ("scale_inv: expected shape", lambda: back(data, scale_inv, 1, 0)),
        ("scale_layout: .* got 'x'", lambda: back(data, scale_inv, 1, 64, scale_layout="x")),
        ("multiple of 16", lambda: back(data, scale_inv, 1, 8)),
    ]
    for message, call in cases:
        with pytest.raises(RuntimeError, match=message):
            call()
    wrong = torch.empty(4, 63, dtype=E4M3, device="cuda")
    with pytest.raises(RuntimeError, match="data: expected shape"):
        module("quantize_fp8").quantize_fp8.out(
            x, dtype=E4M3, data=wrong, scale_inv=scale, amax=_scales(1)
        )
    same([scale], [_scales(1)])


def _tensors_of_eight_bits(cols: int) -> dict[str, tuple[tuple[Tensor, Tensor, int, int], str]]:
    """Elements with their scales, as (data, scale_inv, block rows and columns) and the layout."""
    x = torch.randn(2, 70, cols) * torch.logspace(-3, 3, 70)[:, None]
    made: dict[str, tuple[tuple[Tensor, Tensor, int, int], str]] = {}
    for i, fp8 in enumerate((E4M3, E5M2, torch.int8)):
        for j, form in enumerate(("float32", "ue8m0", "ue8m0_packed")):
            layout = ("row", "column", "column_tma")[(i + j) % 3]
            size = (16, 128, 32)[(i + 2 * j) % 3]
            parts = reference.quantize_per_token_group(
                x, size, dtype=fp8, scale_format=form, scale_layout=layout
            )
            made[f"{fp8} {form} {layout} {size}"] = ((*parts, 1, size), layout)
        for layout in ("row", "row_padded"):
            parts = reference.quantize_block(x, 32, 32, dtype=fp8, scale_layout=layout)
            made[f"{fp8} block {layout}"] = ((*parts, 32, 32), layout)
        if fp8 != torch.int8:
            for layout in ("linear", "swizzled_128x4"):
                parts = reference.quantize_mxfp8(x, dtype=fp8, scale_layout=layout)
                made[f"{fp8} mx {layout}"] = ((*parts, 1, 32), layout)
            parts = reference.quantize_fp8(x, dtype=fp8, granularity="row")[:2]
            made[f"{fp8} row"] = ((*parts, 1, 0), "row")
            parts = reference.quantize_fp8(x, dtype=fp8)[:2]
            made[f"{fp8} tensor"] = ((*parts, 0, 0), "row")
    return made


@pytest.mark.parametrize("cols", [1, 40, 333, 512])
def test_dequantize(cols: int) -> None:
    back = module("dequantize").dequantize
    for name, ((data, scale_inv, *block), layout) in _tensors_of_eight_bits(cols).items():
        for dtype in (None, *DTYPES):
            options = {"scale_layout": layout, "dtype": dtype}
            expected = reference.dequantize(data, scale_inv, *block, **options)
            on_gpu = data.cuda()
            wide = torch.empty(2, 75, cols + 9, dtype=torch.uint8, device="cuda")
            apart = wide[:, 3:73, 5 : 5 + cols].view(data.dtype)
            apart.view(torch.uint8).copy_(on_gpu.view(torch.uint8))
            for t in (on_gpu, apart):
                got = back(t, scale_inv.cuda(), *block, **options)
                same([got], expected, what=f"{name} {dtype}")


def test_dequantize_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(256, 1)
    exponents = torch.arange(256, dtype=torch.uint8, device="cuda")[:, None].repeat(1, 8)
    for fp8 in (E4M3, E5M2, torch.int8):
        for dtype in DTYPES:
            args = (codes.view(fp8), exponents, 1, 32)
            got = module("dequantize").dequantize(*args, dtype=dtype)
            same([got], reference.dequantize(*args, dtype=dtype), what=f"{fp8} {dtype}")


@pytest.mark.parametrize("cols", [16, 65536])
def test_beyond_two_to_the_31_elements(cols: int) -> None:
    """2^32 elements and a row: the first, the middle and the last row, against the reference."""
    room_for(40)
    rows = 2**32 // cols + 1
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    probes = [0, rows // 2, rows - 1]
    for i in probes:
        x[i] = randn(cols, scale=i % 7 + 1)
    expected = reference.quantize_fp8(x[probes], dtype=E4M3)
    data, scale_inv, amax = _quantize(x)
    same(
        [data.view(torch.uint8)[probes], scale_inv, amax],
        [e.view(torch.uint8) if i == 0 else e for i, e in enumerate(expected)],
    )
    out = module("dequantize").dequantize(data, scale_inv, 0, 0)
    same([out[probes]], reference.dequantize(*expected[:2], 0, 0))
    del out, data
    scale = _scales(1)
    given = _quantize(x, scale)
    same([given[2]], [expected[2]])
    del given
    data, scale_inv, amax = _quantize(x, granularity="row")
    expected = reference.quantize_fp8(x[probes], dtype=E4M3, granularity="row")
    same([data.view(torch.uint8)[probes]], [expected[0].view(torch.uint8)])
    same([scale_inv[probes], amax[probes]], expected[1:])
