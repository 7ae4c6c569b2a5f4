"""RMSNorm and silu(gate) * up in front of the eight-bit quantizers.

A norm has the reference's bits. An exponential differs in its last bits, so a value that sits on a
rounding boundary may fall on the other side: of random values, at most 1e-3 of the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import DTYPES, OPS
from torch import Tensor

from jitquant import reference
from jitquant.formats import FP8_DTYPES
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

from .helpers import module, randn, room_for, same, views

E4M3, E5M2 = FP8_DTYPES
# Of the last, some have groups that end before half of a thread's blocks do.
SHAPES = (
    *((1, 16), (3, 17), (5, 384), (130, 2048), (64, 7168), (3, 28672)),
    *((3, 48), (300, 1040), (2, 18432), (300, 20480), (3, 53264), (9, 272)),
)


def _close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str = "") -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape, what
        b = b.to(a.device)
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=0, equal_nan=True, msg=what)
            continue
        a, b = (t.view(torch.uint8) for t in (a, b))
        differing = int((a != b).sum())
        assert differing <= max(2, 1e-3 * a.numel()), f"{what} result {i}: {differing} bytes differ"


def _both(residual: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if residual is None:
        return None, None
    return residual.clone(), residual.clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm_fp8(dtype: torch.dtype, with_residual: bool) -> None:
    kernel = module("rmsnorm_quantize").rmsnorm_quantize_fp8
    scale = torch.tensor([31.0], device="cuda")
    for i, (rows, cols) in enumerate(SHAPES):
        x = randn(rows, cols, dtype=dtype, scale=2)
        weight = (1 + 0.1 * torch.randn(cols, device="cuda")).to((dtype, torch.float32)[i % 2])
        residual = randn(rows, cols, dtype=dtype) if with_residual else None
        per_row = torch.linspace(5.0, 90.0, rows, device="cuda")
        for given, options in (
            (None, {"granularity": "row"}),
            (None, {"granularity": "row", "scale_ub": 1.5}),
            (scale, {"granularity": "tensor"}),
            (scale, {"granularity": "tensor", "with_amax": False}),
            (None, {"granularity": "tensor", "scale_value": 7.5}),
            (per_row, {"granularity": "row"}),
        ):
            mine, theirs = _both(residual)
            options = {"dtype": FP8_DTYPES[i % 2], **options}
            got = kernel(x, weight, given, residual=mine, **options)
            expected = reference.rmsnorm_quantize_fp8(x, weight, given, residual=theirs, **options)
            same(got, expected, what=f"{rows}x{cols} {options}")
            if mine is not None and theirs is not None:
                same([mine], [theirs], what="residual")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("scale_layout", ["row", "column", "column_tma"])
def test_rmsnorm_group(dtype: torch.dtype, with_residual: bool, scale_layout: str) -> None:
    kernel = module("rmsnorm_quantize_per_token_group").rmsnorm_quantize_per_token_group
    for i, (rows, cols) in enumerate(SHAPES):
        x = randn(rows, cols, dtype=dtype, scale=2)
        weight = (1 + 0.1 * torch.randn(cols, device="cuda")).to((dtype, torch.float32)[i % 2])
        residual = randn(rows, cols, dtype=dtype) if with_residual else None
        for j, form in enumerate(("float32", "ue8m0", "ue8m0_packed")):
            options = {
                "dtype": (E4M3, E5M2, torch.int8)[(i + j) % 3],
                "scale_format": form,
                "scale_layout": scale_layout,
                "recipe": ("te", "deepgemm", "vllm")[(i + j // 2) % 3],
            }
            size = (16, 32, 64, 128, 256)[(i + 2 * j) % 5]
            mine, theirs = _both(residual)
            got = kernel(x, weight, size, residual=mine, **options)
            expected = reference.rmsnorm_quantize_per_token_group(
                x, weight, size, residual=theirs, **options
            )
            same(got, expected, what=f"{rows}x{cols} {size} {options}")
            if mine is not None and theirs is not None:
                same([mine], [theirs], what="residual")


def test_rmsnorm_of_nothing_and_of_specials() -> None:
    weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    x = randn(6, 64)
    x[1] = 0
    x[2, 3] = float("nan")
    x[3, 3] = float("inf")
    kernels = module("rmsnorm_quantize")
    got = kernels.rmsnorm_quantize_fp8(x, weight, dtype=E4M3)
    same(got, reference.rmsnorm_quantize_fp8(x, weight, dtype=E4M3))
    same(
        module("rmsnorm_quantize_per_token_group").rmsnorm_quantize_per_token_group(
            x, weight, 16, dtype=E4M3
        ),
        reference.rmsnorm_quantize_per_token_group(x, weight, 16, dtype=E4M3),
    )
    empty = torch.empty(0, 64, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor([3.0], device="cuda")
    for given, granularity in ((None, "row"), (scale, "tensor")):
        options = {"dtype": E4M3, "granularity": granularity}
        same(
            kernels.rmsnorm_quantize_fp8(empty, weight, given, **options),
            reference.rmsnorm_quantize_fp8(empty, weight, given, **options),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [0, 8])
def test_swiglu_fp8(dtype: torch.dtype, interleave: int) -> None:
    kernel = module("swiglu_quantize").swiglu_quantize_fp8
    scale = torch.tensor([31.0], device="cuda")
    for i, (rows, cols) in enumerate(((1, 16), (5, 24), (33, 104), (130, 2048), (64, 7168))):
        fused = randn(rows, 2 * cols, dtype=dtype, scale=2)
        per_row = torch.linspace(5.0, 90.0, rows, device="cuda")
        for given, options in (
            (None, {"granularity": "row"}),
            (None, {"granularity": "row", "scale_ub": 1.5}),
            (scale, {"granularity": "tensor"}),
            (scale, {"granularity": "tensor", "with_amax": False}),
            (None, {"granularity": "tensor", "scale_value": 7.5}),
            (per_row, {"granularity": "row"}),
            (per_row, {"granularity": "row", "with_amax": False}),
        ):
            options = {"dtype": FP8_DTYPES[i % 2], "interleave": interleave, **options}
            got = kernel(fused, given, **options)
            expected = reference.swiglu_quantize_fp8(fused, given, **options)
            _close(got, expected, f"{rows}x{cols} {options}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [0, 8])
@pytest.mark.parametrize("scale_layout", ["row", "column", "column_tma"])
def test_swiglu_group(dtype: torch.dtype, interleave: int, scale_layout: str) -> None:
    kernel = module("swiglu_quantize_per_token_group").swiglu_quantize_per_token_group
    for i, shape in enumerate(
        ((1, 16), (5, 24), (33, 104), (3, 11, 272), (130, 2048), (64, 7168), (70, 34))
    ):
        *leading, cols = shape
        fused = randn(*leading, 2 * cols, dtype=dtype, scale=2)
        for j, form in enumerate(("float32", "ue8m0", "ue8m0_packed")):
            options = {
                "dtype": (E4M3, E5M2, torch.int8)[(i + j) % 3],
                "interleave": 2 if cols % 8 else interleave,
                "scale_format": form,
                "scale_layout": scale_layout,
                "recipe": ("te", "deepgemm", "vllm")[(i + j // 2) % 3],
            }
            size = (16, 32, 64, 128, 256)[(i + 2 * j) % 5]
            got = kernel(fused, size, **options)
            expected = reference.swiglu_quantize_per_token_group(fused, size, **options)
            _close(got, expected, f"{shape} {size} {options}")


@pytest.mark.parametrize("scale_layout", ["row", "column", "column_tma"])
def test_swiglu_group_of_experts(scale_layout: str) -> None:
    """Rows past the count are not read; their results are zero, or left alone if asked."""
    kernel = module("swiglu_quantize_per_token_group").swiglu_quantize_per_token_group
    options = {"dtype": E4M3, "scale_layout": scale_layout}
    for experts, rows, cols in ((5, 131, 512), (300, 3, 128), (2, 900, 136)):
        fused = randn(experts, rows, 2 * cols)
        counts = torch.randint(-1, rows + 2, (experts,), device="cuda")
        there = torch.arange(rows, device="cuda") < counts[:, None]
        fused[~there] = float("nan")
        whole = kernel(fused, 128, counts, **options)
        _close(whole, reference.swiglu_quantize_per_token_group(fused, 128, counts, **options))
        left = [torch.full_like(t.view(torch.uint8), 0x5A).view(t.dtype) for t in whole]
        kernel.out(
            fused, 128, counts, zero_padding=False, data=left[0], scale_inv=left[1], **options
        )
        data, expected = left[0].view(torch.uint8), whole[0].view(torch.uint8)
        assert torch.equal(data[there], expected[there])
        assert bool((data[~there] == 0x5A).all())
        scales, wanted = (
            t if scale_layout == "row" else t.transpose(-1, -2)[:, :rows]
            for t in (left[1], whole[1])
        )
        assert torch.equal(scales[there], wanted[there])


def test_swiglu_group_of_specials() -> None:
    kernel = module("swiglu_quantize_per_token_group").swiglu_quantize_per_token_group
    fused = randn(8, 256)
    fused[1] = 0
    fused[2, 3] = float("nan")
    fused[3, 130] = float("inf")
    fused[4, :128] = -200.0
    fused[5, :128] = 200.0
    fused[6, 7] = float("-inf")
    _close(
        kernel(fused, 16, dtype=E4M3),
        reference.swiglu_quantize_per_token_group(fused, 16, dtype=E4M3),
    )
    empty = fused[:0]
    same(
        kernel(empty, 16, dtype=E4M3),
        reference.swiglu_quantize_per_token_group(empty, 16, dtype=E4M3),
    )


FUSED = (
    "swiglu_quantize_fp8",
    "swiglu_quantize_per_token_group",
    "rmsnorm_quantize_fp8",
    "rmsnorm_quantize_per_token_group",
)


def _arguments(name: str, x: Tensor, size: int) -> list[Any]:
    """Of a function of FUSED: what follows its tensor."""
    norm = [torch.linspace(0.5, 1.5, x.shape[1], device="cuda")] if "rmsnorm" in name else []
    return [*norm, *([size] if "group" in name else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_strides(name: str, dtype: torch.dtype) -> None:
    kernel = OPS[name].compiled()
    for rows, cols in ((6, 48), (300, 1024), (33, 35)):
        x = randn(rows, 2 * cols if "swiglu" in name else cols, dtype=dtype, scale=2)
        more = _arguments(name, x, 32)
        expected = OPS[name].reference(x, *more, dtype=E4M3)
        for label, view in views().items():
            what = f"{label} {rows}x{cols}"
            _close(kernel.default(view(x), *more, dtype=E4M3), expected, what)
            for start in (16, 3):
                wide = torch.full((rows, cols + 32), 0xAB, dtype=torch.uint8, device="cuda")
                buffers = {
                    result: torch.empty_like(t, device="cuda")
                    for result, t in zip(OPS[name].results, expected, strict=True)
                }
                buffers["data"] = wide[:, start : start + cols].view(E4M3)
                kernel.out(view(x), *more, dtype=E4M3, **buffers)
                _close(tuple(buffers.values()), expected, what)
                assert bool((wide[:, :start] == 0xAB).all()), what
                assert bool((wide[:, start + cols :] == 0xAB).all()), what


@pytest.mark.parametrize("name", FUSED)
def test_more_than_2_to_the_31_elements(name: str) -> None:
    """Zeros but for the first and the last row and those around 2^31 of what goes in and out."""
    room_for(16)
    swiglu = "swiglu" in name
    rows, cols = 2**19 + 600, 8192 if swiglu else 4096
    around = {2**18 - 1, 2**18, 2**19 - 1, 2**19, 2**31 // 4095, 2**31 // 4094}
    probes = sorted({0, *around, rows - 1})
    memory = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    added = None if swiglu else torch.zeros_like(memory)
    for i in probes:
        memory[i] = randn(cols)
    for part in (slice(None), slice(1, -1)):  # aligned and not
        x, kwargs, few = memory[:, part], {}, {}
        if added is not None:
            added[probes] = randn(len(probes), cols)
            kwargs = {"residual": added[:, part]}
            few = {"residual": added[probes][:, part]}
        more = _arguments(name, x, 128)
        got = OPS[name].compiled().default(x, *more, dtype=E4M3, **kwargs)
        expected = OPS[name].reference(x[probes], *more, dtype=E4M3, **few)
        codes = got[0].view(torch.uint8)
        _close((codes[probes], *(t[probes] for t in got[1:])), expected, name)
        assert codes.count_nonzero() == codes[probes].count_nonzero()
        if added is not None:
            same([added[probes][:, part]], [few["residual"]], what="residual")


def _pipelines() -> dict[str, tuple[Callable[..., object], Callable[[], list[Tensor]], int]]:
    """Per call: the function, its arguments, its launches."""
    norm, silu = module("rmsnorm_quantize"), module("swiglu_quantize")
    norm_group = module("rmsnorm_quantize_per_token_group").rmsnorm_quantize_per_token_group
    silu_group = module("swiglu_quantize_per_token_group").swiglu_quantize_per_token_group
    scale, counts = torch.tensor([31.0], device="cuda"), torch.tensor([77], device="cuda")
    weight = torch.rand(768, device="cuda").bfloat16()

    def x() -> list[Tensor]:
        return [randn(150, 768)]

    def with_residual() -> list[Tensor]:
        return [randn(150, 768), randn(150, 768)]

    fp8 = {"dtype": E4M3}
    static = {"dtype": E4M3, "granularity": "tensor"}
    return {
        "norm row": (lambda t: norm.rmsnorm_quantize_fp8(t, weight, **fp8), x, 1),
        "norm given": (lambda t: norm.rmsnorm_quantize_fp8(t, weight, scale, **static), x, 2),
        "norm residual": (
            lambda t, r: norm.rmsnorm_quantize_fp8(t, weight, residual=r, **fp8), with_residual, 1),
        "norm group": (
            lambda t, r: norm_group(t, weight, 128, residual=r, **fp8),
            with_residual, 1),
        "silu row": (lambda t: silu.swiglu_quantize_fp8(t, **fp8), x, 1),
        "silu given": (lambda t: silu.swiglu_quantize_fp8(t, scale, **static), x, 1),
        "silu given, no amax": (
            lambda t: silu.swiglu_quantize_fp8(t, scale, with_amax=False, **static), x, 1),
        "silu group": (lambda t: silu_group(t, 128, **fp8), x, 1),
        "silu group, ragged": (lambda t: silu_group(t[:, :700], 128, counts, **fp8), x, 1),
    }  # fmt: skip


def test_launches_are_exact_captured_and_never_waited_for() -> None:
    for name, (fn, arguments, launches) in _pipelines().items():
        assert count_launches(fn, *arguments()) == launches, name
        assert_no_sync(fn, *arguments())
        assert_capturable(fn, *arguments(), replays=3)


def test_bad_arguments_reach_no_kernel() -> None:
    norm, silu = module("rmsnorm_quantize"), module("swiglu_quantize")
    norm_group = module("rmsnorm_quantize_per_token_group").rmsnorm_quantize_per_token_group
    silu_group = module("swiglu_quantize_per_token_group").swiglu_quantize_per_token_group
    x, weight = randn(4, 64), torch.ones(64, device="cuda")
    cases: list[tuple[str, Callable[[], object]]] = [
        ("weight: expected shape", lambda: norm.rmsnorm_quantize_fp8(x, weight[:5], dtype=E4M3)),
        ("without a scale",
         lambda: norm.rmsnorm_quantize_fp8(x, weight, dtype=E4M3, granularity="tensor")),
        ("residual: expected x's shape",
         lambda: norm.rmsnorm_quantize_fp8(x, weight, dtype=E4M3, residual=randn(2, 64))),
        ("residual: .* shares with x",
         lambda: norm.rmsnorm_quantize_fp8(x, weight, dtype=E4M3, residual=x)),
        ("group_size: expected one of", lambda: norm_group(x, weight, 24, dtype=E4M3)),
        ("amax_eps: .* got 0.0",
         lambda: norm_group(x, weight, 16, dtype=E4M3, amax_eps=0.0)),
        ("gate and up", lambda: silu.swiglu_quantize_fp8(x[:, :63], dtype=E4M3)),
        ("interleave: expected 0 .* or a divisor of 32",
         lambda: silu.swiglu_quantize_fp8(x, dtype=E4M3, interleave=5)),
        (r"expected shape \(\.\.\., 2 \* N\)", lambda: silu_group(x[:, :63], 16, dtype=E4M3)),
        ("group_size: expected one of", lambda: silu_group(x, 48, dtype=E4M3)),
        ("counts: expected 1 numbers", lambda: silu_group(x, 16, weight.long()[:3], dtype=E4M3)),
        ("interleave: expected 0 .* or a divisor of 32",
         lambda: silu_group(x, 16, dtype=E4M3, interleave=5)),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(RuntimeError, match=message):
            call()
