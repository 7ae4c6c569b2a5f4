"""Arguments that take kernels the ways that the small samples of all tests do not.

More values than a cluster holds, rows enough for a walk over rows to go round, rows too long to be
held, groups that are whole and aligned, more than one thread block for a group. What is large is so
for devices of one to three multiprocessors.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from samples import COMPILED_OPS, DTYPES, GRANULARITIES, SAMPLES, Sample, randn
from samples_experts import more_experts
from samples_recipes import signs_of, tables
from torch import Tensor

from jitquant import reference
from jitquant.formats import (
    BLOCK_SHAPES,
    FP8_DTYPES,
    GROUP_DTYPES,
    GROUP_RECIPES,
    GROUP_SIZES,
    RECIPES,
    SCALE_LAYOUTS,
)


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Decades from row to row, and among the rows zeros, ties, NaN, infinities."""
    x = randn(*shape, dtype=torch.float32, seed=seed).reshape(-1, shape[-1])
    rows, cols = x.shape
    x *= torch.logspace(-4, 4, rows)[torch.randperm(rows, generator=torch.manual_seed(seed))][
        :, None
    ]
    if rows > 8:
        x[1] = 0.0
        x[2, cols // 2] = math.nan
        x[3] = math.nan
        x[4, -1] = -math.nan
        x[5, 0] = math.inf
        x[6] = torch.tensor([0.5, 1.5, 2.5, 3.5, 5.0, -0.0, -6.0])[torch.arange(cols) % 7]
        x[7, : cols // 2] *= 1e-4
    return x.reshape(shape).to(dtype)


def _finite(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=dtype, seed=seed)


def _strided(x: Tensor) -> Tensor:
    """The same values in strided rows, each aligned to 16 bytes."""
    memory = torch.full((*x.shape[:-1], x.shape[-1] + 16), 1e4, dtype=x.dtype)
    return memory[..., : x.shape[-1]].copy_(x)


def _gsa(rows: int | None = None) -> Tensor:
    return torch.tensor([0.0013]) if rows is None else torch.linspace(0.2, 3.0, rows) * 1e-3


def _case(
    op: str, what: Any, args: tuple[Any, ...], /, *, exact: bool = True, **kwargs: Any
) -> Sample:
    def make(_: torch.device | str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copied = {n: v.clone() if n == "residual" else v for n, v in kwargs.items()}
        return args, copied

    return Sample(op, "-".join(str(w).replace("torch.", "") for w in what), make, exact)


def _amaxes() -> Iterator[Sample]:
    # The largest value in one place after the other, so that each maximum of a part decides once.
    shape, step = (230, 512), 256 * 16
    for place, dtype in itertools.product(range(0, math.prod(shape), step), DTYPES):
        x = _finite(shape, dtype)
        x.view(-1)[place + place // step % 16] = -50.0
        what = (dtype, place)
        yield _case("amax_gsa", what, (x,))
        yield _case("quantize_nvfp4", what, (x,), scale_layout=SCALE_LAYOUTS[place // step % 2])
        yield _case("quantize_fp8", what, (x, None), dtype=FP8_DTYPES[0])
        strided, weight = _strided(x)[:, :-16], torch.ones(shape[1], dtype=dtype)
        yield _case("amax_gsa", (*what, "strided"), (strided,))
        yield _case("quantize_fp8", (*what, "strided"), (strided, None), dtype=FP8_DTYPES[1])
        yield _case("rmsnorm_quantize_nvfp4", what, (x, weight))
    # Contiguous, strided, and more than one step of the grid.
    for dtype, rotate, rows in itertools.product(DTYPES, ("te", "64", "128"), (5, 300)):
        x = _finite((rows, 256), dtype, rows)
        for strided in (False, True):
            given = _strided(x) if strided else x
            what = (dtype, rotate, rows, strided)
            yield _case("rotated_amax", what, (given,), rotate=rotate)


def _nvfp4() -> Iterator[Sample]:
    # Rows of one warp and of many, held and reread; a tail; more rows than a tile of scales.
    shapes = ((70, 384), (140, 256), (3, 8208), (2, 17408), (1100, 100), (600, 32))
    ways = itertools.cycle(itertools.product(SCALE_LAYOUTS, (False, True), RECIPES))
    for dtype, shape, repeat in itertools.product(DTYPES, shapes, range(2)):
        layout, strided, recipe = next(ways)
        if repeat == 0 and shape == shapes[0]:
            next(ways)  # so that the shapes of each dtype go other ways
        x = _values(shape, dtype)
        x = _strided(x) if strided else x
        how = {"recipe": recipe, "scale_layout": layout}
        what = (*shape, dtype, layout, recipe, strided)
        for granularity in ("tensor", "row"):
            yield _case(
                "quantize_nvfp4", (*what, granularity), (x,), granularity=granularity, **how
            )
        gsa = _gsa(len(x) if repeat else None)
        yield _case("quantize_nvfp4_from_gsa", (*what, len(gsa)), (x, gsa), **how)
    # A given amax of 0 of a tensor, or of a row, that is not zero.
    for recipe, count in itertools.product(RECIPES, (1, 9)):
        args = (_values((9, 80), DTYPES[2]), torch.zeros(count))
        what = ("no amax", recipe, count)
        yield _case("quantize_nvfp4_from_amax", what, args, recipe=recipe)
    for dtype, layout in itertools.product(DTYPES, SCALE_LAYOUTS):
        # More pieces of work than a persistent grid takes; the last is partial.
        x, how = _values((529, 528), dtype), {"scale_layout": layout}
        yield _case("quantize_nvfp4", (529, 528, dtype, layout), (x,), **how)
        yield _case("quantize_nvfp4_from_gsa", (529, 528, dtype, layout), (x, _gsa(None)), **how)
        x = _strided(_values((20, 64), dtype))
        yield _case("quantize_nvfp4_from_gsa", (20, 64, dtype, layout), (x, _gsa(None)), **how)
        w, what = _values((140, 320), dtype), (dtype, layout)
        for block in ("1x16", "16x16"):
            how = {"block": block, "scale_layout": layout}
            yield _case("quantize_weight_nvfp4", (*what, block), (w,), **how)
        for op, (rows, cols) in itertools.product(
            ("select", "swiglu"), ((230, 512), (140, 512), (70, 384))
        ):
            fused = _values((rows, 2 * cols), dtype)
            fused = fused if op == "select" else fused.nan_to_num(0.0, 0.0, 0.0)
            for granularity in ("tensor", "row"):
                run = 8 if (rows == 70) == (granularity == "row") else cols
                yield _case(
                    "deinterleave_quantize_nvfp4",
                    (*what, op, rows, cols, run, granularity),
                    (fused, cols, run),
                    exact=op == "select",
                    op=op,
                    scale_layout=layout,
                    granularity=granularity,
                )
        parts = reference.quantize_nvfp4(_finite((130, 640), dtype), scale_layout=layout)
        codes, scales = (t.view(torch.uint8) for t in parts[:2])
        for gsa in (parts[2], _gsa(130)):
            how = {"cols": 640, "scale_layout": layout, "dtype": dtype}
            yield _case("dequantize_nvfp4", (*what, len(gsa)), (codes, scales, gsa), **how)
        codes, scales, gsa = reference.quantize_weight_nvfp4(_finite((70, 320), dtype), dim=0)
        args = (codes.view(torch.uint8), scales.view(torch.uint8), gsa)
        how = {"cols": 70, "dim": 0, "dtype": dtype}
        yield _case("dequantize_nvfp4", (*what, "columns"), args, **how)


def _nvfp4_norms() -> Iterator[Sample]:
    ways = itertools.cycle(itertools.product(SCALE_LAYOUTS, (None, 1), ("tensor", "row")))
    shapes = ((70, 384), (140, 256), (3, 8208), (2, 17408), (2, 33792), (70, 95))
    for shape, dtype, _ in itertools.product(shapes, DTYPES, range(2)):
        layout, added, granularity = next(ways)
        x, weight = _finite(shape, dtype), _finite(shape[-1:], dtype, 5)
        residual = None if added is None else {"residual": _finite(shape, dtype, 6)}
        how = {"scale_layout": layout, **(residual or {})}
        what = (*shape, dtype, layout, granularity, added)
        name = "rmsnorm_quantize_nvfp4"
        yield _case(name, what, (x, weight), granularity=granularity, **how)
        gsa = _gsa(len(x) if granularity == "row" else None)
        yield _case(f"{name}_from_gsa", what, (x, weight, gsa), **how)
    for shape, dtype in itertools.product(((40, 4, 640), (2, 3, 8208)), DTYPES):
        layout, _, granularity = next(ways)
        X, A = _finite(shape, dtype), _finite(shape[:2], dtype, 7)
        args = (X, A, _finite(shape[-1:], dtype, 8))
        how = {"granularity": granularity, "scale_layout": layout}
        yield _case("mhc_rmsnorm_quantize_nvfp4", (*shape, dtype), args, **how)


def _fp8() -> Iterator[Sample]:
    # One of more than the L2 cache is taken to hold.
    shapes = ((140, 256), (3, 8208), (2, 33792), (70, 84), (529, 528))
    fp8 = itertools.cycle(GROUP_DTYPES)
    for shape, dtype, strided in itertools.product(shapes, DTYPES, (False, True)):
        x, f = _values(shape, dtype), next(fp8)
        x = _strided(x) if strided else x
        what = (*shape, dtype, strided)
        scale = torch.linspace(3.0, 200.0, len(x))
        for granularity, given in itertools.product(("tensor", "row"), (None, scale)):
            given = given[:1] if given is not None and granularity == "tensor" else given
            yield _case(
                "quantize_fp8",
                (*what, granularity, given is None),
                (x, given),
                dtype=f,
                granularity=granularity,
            )
        weight = _finite(shape[-1:], dtype, 5)
        residual = {"residual": _finite(shape, dtype, 6)} if strided else {}
        args = (_finite(shape, dtype), weight, None)
        yield _case("rmsnorm_quantize_fp8", what, args, dtype=f, granularity="row", **residual)
        how = {"dtype": f, "interleave": (0, 8)[shape[1] % 16 == 0]}
        fused = _finite((shape[0], 2 * shape[1]), dtype)
        fused = _strided(fused) if strided else fused
        for granularity, given in (("row", None), ("tensor", scale[:1])):
            args = (fused, given)
            name = (*what, granularity)
            yield _case(
                "swiglu_quantize_fp8", name, args, exact=False, granularity=granularity, **how
            )
        for each in GROUP_DTYPES:
            how |= {"dtype": each, "granularity": "tensor", "with_amax": False}
            args = (fused, scale[:1])
            yield _case("swiglu_quantize_fp8", (*what, each), args, exact=False, **how)


def _dequantize() -> Iterator[Sample]:
    for dtype, elements in itertools.product(DTYPES, GROUP_DTYPES):
        # More values than a thread of each multiprocessor has eighths, and fewer.
        for shape in ((140, 320), (3, 272)):
            x = _finite(shape, torch.float32)
            data, scale_inv = reference.quantize_per_token_group(x, 16, dtype=elements)[:2]
            args, how = (data, scale_inv, 1, 16), {"scale_layout": "row", "dtype": dtype}
            yield _case("dequantize", (*shape, dtype, elements), args, **how)


def _groups() -> Iterator[Sample]:
    formats = itertools.cycle(("float32", "ue8m0", "ue8m0_packed"))
    layouts = itertools.cycle(("row", "column", "column_tma"))
    recipes = itertools.cycle(("te", "deepgemm", "vllm", "vllm"))
    for dtype, elements, size in itertools.product(DTYPES, GROUP_DTYPES, (16, 128)):
        counts = torch.tensor([41, 0, 17], dtype=torch.int32)
        for shape, of in (((70, 320), None), ((3, 41, 256), counts), ((3, 41, 256), None)):
            how = {"dtype": elements, "scale_format": next(formats), "scale_layout": next(layouts)}
            how |= {"recipe": next(recipes)}
            what = (*shape, dtype, size, of is not None, *how.values())
            args = (_values(shape, dtype), size, of)
            yield _case("quantize_per_token_group", what, args, **how)
            if of is not None:
                yield _case(
                    "quantize_per_token_group", (*what, "rest"), args, zero_padding=False, **how
                )
            fused = _finite((*shape[:-1], 2 * shape[-1]), dtype)
            how |= {"interleave": 8 if size == 16 else 0}
            for gates in (fused, _strided(fused)):
                name = (*what, gates.stride(-2))
                args = (gates, size, of)
                yield _case("swiglu_quantize_per_token_group", name, args, exact=False, **how)
    for dtype, f, layout in itertools.product(DTYPES, FP8_DTYPES, SCALE_LAYOUTS):
        how = {"dtype": f, "scale_layout": layout}
        yield _case("quantize_mxfp8", (dtype, f, layout), (_values((140, 320), dtype),), **how)
        x = _values((140, 160), dtype)
        yield _case("quantize_mxfp8_both", (dtype, f, layout), (x,), **how)
    # Rows of the transpose that begin at any distance from a multiple of 16 bytes.
    for dtype, rows in itertools.product(DTYPES, (129, 150, 263)):
        x = _values((rows, 144), dtype)
        yield _case("quantize_mxfp8_both", (dtype, rows), (x,), dtype=FP8_DTYPES[rows % 2])
        how = {"dtype": GROUP_DTYPES[rows % 3], "scale_layout": "column"}
        yield _case("quantize_per_token_group_both", (dtype, rows), (x, 128), **how)
    # The same with less than 16 bytes in all, and with many tiles below each other, of which a
    # thread block has one, two or four: the last one several, or a part of one.
    for rows, dtype in ((5, DTYPES[0]), (1805, DTYPES[0]), (3095, DTYPES[1]), (6161, DTYPES[2])):
        x = _values((rows, 16), dtype)
        yield _case("quantize_mxfp8_both", (dtype, rows), (x,), dtype=FP8_DTYPES[0])
        yield _case("quantize_block_both", (dtype, rows), (x, 128, 128), dtype=FP8_DTYPES[1])
    for dtype, elements, cols in itertools.product(DTYPES, GROUP_DTYPES, (272, 250)):
        x, how = _values((160, cols), dtype), {"dtype": elements, "recipe": next(recipes)}
        what = (cols, dtype, elements, how["recipe"])
        for side in (16, 128):
            yield _case("quantize_block", (*what, side), (x, side, side), **how)
        yield _case("quantize_block_both", what, (x, 128, 128), **how)
        yield _case("quantize_per_token_group_both", (*what, 256), (x, 256), **how)
        yield _case("quantize_per_token_group_both", what, (x, 128), **how, scale_layout="row")
    # One row of squares, of few values, the last square incomplete: by a kernel of their own.
    few = itertools.product(DTYPES, GROUP_DTYPES, ((1, 272), (3, 256), (33, 240), (128, 48)))
    scales = itertools.cycle((("float32", "te"), ("ue8m0", "deepgemm"), ("ue8m0", "vllm")))
    for dtype, elements, shape in few:
        scale_format, recipe = next(scales)
        how = {"dtype": elements, "scale_format": scale_format, "recipe": recipe}
        what = ("few", *shape, dtype, elements, scale_format, recipe)
        yield _case("quantize_block", what, (_values(shape, dtype), 128, 128), **how)
    rows = itertools.product(DTYPES, ((140, 272), (2, 272), (40, 250)), ("te", "vllm"))
    for (dtype, shape, recipe), added in itertools.product(rows, (False, True)):
        args = (_finite(shape, dtype), _finite(shape[-1:], dtype, 5), 128, 1e-5)
        for elements in (torch.float8_e4m3fn, torch.int8):
            how = {"dtype": elements, "recipe": recipe}
            how |= {"residual": _finite(shape, dtype, 6)} if added else {}
            what = (*shape, dtype, elements, recipe, added)
            yield _case("rmsnorm_quantize_per_token_group", what, args, **how)


def _bounded() -> Iterator[Sample]:
    bounds = itertools.cycle(((None, 96.0), (-20.5, None), (-17.0, 64.0), (0.0, 112.0)))
    recipes = itertools.cycle(GROUP_RECIPES)
    for dtype, elements, cols in itertools.product(DTYPES, GROUP_DTYPES, (256, 250)):
        x, (low, high) = _values((130, cols), dtype), next(bounds)
        how = {"dtype": elements, "recipe": next(recipes), "fp8_min": low, "fp8_max": high}
        what = ("bounded", cols, dtype, elements)
        yield _case("quantize_per_token_group", what, (x, 32), **how)
        yield _case("quantize_per_token_group_both", what, (x, 128), **how)
        yield _case("quantize_block", what, (x, 128, 128), **how)
        yield _case("quantize_block_both", what, (x, 128, 128), **how)
        yield _case("swiglu_quantize_per_token_group", what, (x, 16), exact=False, **how)
        args = (_finite((3, cols), dtype), _finite((cols,), dtype, 5), 32, 1e-5)
        yield _case("rmsnorm_quantize_per_token_group", what, args, **how)


def _many_segments() -> Iterator[Sample]:
    # Ranges of more tiles than those that come first, and hundreds of segments in a piece of one.
    close = torch.arange(50_003, 53_000, 7)
    offsets = torch.cat((torch.tensor([0, 20_000]), close, torch.tensor([110_000, 170_000])))
    x = randn(170_000, dtype=torch.float32) * torch.logspace(-3, 3, 170_000)
    args = (x.bfloat16(), offsets)
    yield _case("quantize_ragged_fp8", "many", args, dtype=torch.float8_e4m3fn)
    yield _case("quantize_ragged_nvfp4", "many", args)
    # Segments of a few rows of a few columns: many in a step, and some of them in two ranges.
    ends = (torch.arange(70) % 12).cumsum(0)
    for cols, scale in itertools.product((1, 5, 16), (None, torch.linspace(3.0, 200.0, 69))):
        args = (_finite((int(ends[-1]) + 2, cols), torch.bfloat16), ends, scale)
        what = (cols, scale is None)
        yield _case("quantize_ragged_grad_fp8", what, args, dtype=torch.float8_e5m2)


def _ragged() -> Iterator[Sample]:
    # A segment over several ranges, one of a few elements, an empty one, a gap, one to the end.
    offsets = torch.tensor([0, 30000, 30016, 30016, 47003, 60000])
    sizes = torch.tensor([29000, 16, 0, 16987, 13000])
    scale = torch.linspace(3.0, 200.0, 5)
    fp8 = itertools.cycle(FP8_DTYPES)
    for dtype, of, given in itertools.product(DTYPES, (None, sizes), (None, scale)):
        x = randn(60000, dtype=torch.float32) * torch.logspace(-3, 3, 60000)
        x[11], x[35000] = math.nan, math.inf
        args, f = (x.to(dtype), offsets, given), next(fp8)
        what = (dtype, of is None, given is None)
        yield _case("quantize_ragged_fp8", what, args, sizes=of, dtype=f)
        acted, how = (_finite((60000,), dtype, 2), offsets, given), {"activation": "silu"}
        name = (*what, "silu")
        yield _case("quantize_ragged_fp8", name, acted, exact=False, sizes=of, dtype=f, **how)
        aligned = offsets // 16 * 16
        args = (x.to(dtype), aligned, given)
        lengths = None if of is None else torch.minimum(of, aligned.diff())
        yield _case("quantize_ragged_nvfp4", what, args, sizes=lengths)
        rows = torch.tensor([0, 300, 300, 310, 500, 600])
        for cols, activation in ((96, "none"), (100, "silu")):
            shape = (600, cols)
            acts = None if activation == "none" else _finite(shape, dtype, 1)
            yield _case(
                "quantize_ragged_grad_fp8",
                (*what, cols, activation),
                (_finite(shape, dtype), rows, given),
                exact=False,
                act_input=acts,
                activation=activation,
                dtype=f,
            )
        parts = reference.quantize_ragged_fp8(x.to(dtype), offsets, sizes=of, dtype=f)
        args = (*parts[:2], offsets)
        yield _case("dequantize_ragged_fp8", what, args, sizes=of, dtype=dtype)


def _around_one_block() -> Iterator[Sample]:
    """Buffers of the most values, segments, rows and sums that one thread block takes, and more."""
    fp8 = itertools.cycle(FP8_DTYPES)
    for dtype, (numel, count), given in itertools.product(
        DTYPES, ((8192, 512), (8193, 9), (700, 513), (8192, 1), (5, 3), (0, 2)), (False, True)
    ):
        # Many of a few elements, empty ones at the beginning and before the last, a tail.
        ends = torch.linspace(-0.2, 0.97, count + 1).clamp(min=0) ** 2 * numel
        offsets, sizes = ends.long(), (ends.diff() * 0.9).long()
        offsets[-2] = offsets[-1]
        memory = randn(numel + 1, dtype=torch.float32) * torch.logspace(-3, 3, numel + 1)
        memory[numel // 2], memory[numel // 3] = math.nan, -math.inf
        scale = torch.linspace(3.0, 200.0, count) if given else None
        # Aligned or not.
        for where, of in ((0, None), (1, sizes)):
            x, f, what = memory.to(dtype)[where:][:numel], next(fp8), (dtype, numel, count, given)
            yield _case("quantize_ragged_fp8", what, (x, offsets, scale), sizes=of, dtype=f)
            acted = (x.nan_to_num(0.5, 1.0, 1.0), offsets, scale)
            how: dict[str, Any] = {"activation": "srelu"}
            yield _case("quantize_ragged_fp8", what, acted, sizes=of, dtype=f, **how)
            aligned = offsets // 16 * 16
            lengths = None if of is None else torch.minimum(of, aligned.diff())
            yield _case("quantize_ragged_nvfp4", what, (x, aligned, scale), sizes=lengths)
            how = {"act_input": x.flip(0), "activation": "relu", "with_dbias": False}
            if numel > 0:
                args = (x, offsets, scale)
                yield _case("quantize_ragged_grad_fp8", what, args, sizes=of, dtype=f, **how)
    shapes = ((128, 64), (129, 16), (1, 8192), (1, 8208), (2, 4001), (128, 33), (60, 1), (0, 7))
    for dtype, (rows, cols), given in itertools.product(DTYPES, shapes, (False, True)):
        most = max(1, min(512, 65536 // cols))
        for count in {4, most, most + 1}:
            ends = (torch.linspace(-0.2, 0.97, count + 1).clamp(min=0) * rows).long()
            ends[-1] = rows  # no tail, else a row more
            scale = torch.linspace(3.0, 200.0, count) if given else None
            # Sums of small integers, exact in every order.
            x = (torch.arange(rows * cols).reshape(rows, cols) * 7 % 9 - 4).to(dtype)
            what = (dtype, rows, cols, count, given)
            args, f = (x, ends - (count % 2), scale), next(fp8)
            yield _case("quantize_ragged_grad_fp8", what, args, dtype=f)
            if count == 4:
                how = {"act_input": -x, "activation": "srelu", "sizes": ends.diff() // 2}
                yield _case("quantize_ragged_grad_fp8", what, args, dtype=f, **how)


def _samples_in_more() -> Iterator[Sample]:
    """The small samples, followed by so many rows that one thread block does not take them."""
    for op in ("quantize_ragged_fp8", "quantize_ragged_nvfp4", "quantize_ragged_grad_fp8"):
        for sample in SAMPLES[op]:
            (x, *others), how = sample.make("cpu")
            longer = [
                t if t is None else torch.cat((t, t.new_ones(_rows_past_a_block(t), *t.shape[1:])))
                for t in (x, how.get("act_input"))
            ]
            how |= {"act_input": longer[1]} if "act_input" in how else {}
            yield _case(op, (sample.label,), (longer[0], *others), exact=sample.exact, **how)


def _rows_past_a_block(x: Tensor) -> int:
    return -(-33000 // max(1, math.prod(x.shape[1:])))


def _buffer(made: random.Random) -> tuple[Tensor, Tensor, int]:
    """Offsets, sizes and the buffer's elements: segments of nothing, of few, within a step, over
    ranges; with gaps, and something before and behind them."""
    count, longest = made.choice((1, 3, 32, 65, 300)), made.choice((12, 1200, 40_000))
    decay = made.choice((1, 12))  # alike, or few large ones
    sizes = [int(longest * made.random() ** decay) for _ in range(count)]
    most = max(1, sum(sizes) // 60_000)
    sizes = [0 if made.random() < 0.15 else size // most for size in sizes]
    gaps = [made.choice((3, 16, 1000)) if made.random() < 0.1 else 0 for _ in sizes]
    gaps[made.randrange(count)] += made.choice((0, 0, 20_000, 40_000))
    ends = itertools.accumulate(map(sum, zip(sizes, gaps, strict=True)))
    first = made.choice((0, 5, 700))
    offsets = torch.tensor([first, *(first + end for end in ends)])
    return offsets, torch.tensor(sizes), int(offsets[-1]) + made.choice((0, 7, 9000))


def _any_segments(seed: int, count: int) -> Iterator[Sample]:
    made = random.Random(seed)
    for i in range(count):
        dtype, f = made.choice(DTYPES), made.choice(FP8_DTYPES)
        offsets, sizes, numel = _buffer(made)
        of = made.choice((None, sizes))
        scale = made.choice((None, torch.linspace(0.3, 9.0, len(sizes))))
        where = made.choice((0, 0, 1, 8))  # aligned or not
        memory = randn(numel + where + 1, dtype=torch.float32, seed=i)
        memory *= torch.logspace(-3, 3, memory.numel())
        if i % 4 == 0:
            memory[made.randrange(numel + 1)] = math.nan
        x = memory.to(dtype)[where:-1]
        if numel == 0:
            continue
        yield _case("quantize_ragged_fp8", (i, f), (x, offsets, scale), sizes=of, dtype=f)
        aligned = offsets // 16 * 16
        lengths = None if of is None else torch.minimum(of, aligned.diff())
        yield _case("quantize_ragged_nvfp4", (i,), (x, aligned, scale), sizes=lengths)
        parts = reference.quantize_ragged_fp8(x, offsets, sizes=of, dtype=f)
        args = (*parts[:2], offsets)
        yield _case("dequantize_ragged_fp8", (i,), args, sizes=of, dtype=dtype)
        # Ranges are whole rows there, so a segment of few elements may lie in several.
        cols = made.choice((1, 3, 7, 16, 40, 500))
        rows = torch.tensor([made.randrange(9 if cols < 100 else 60) for _ in range(80)])
        ends = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
        grad = _finite((int(ends[-1]) + made.choice((1, 40)), cols), dtype, i)
        args = (grad, ends, made.choice((None, torch.linspace(0.3, 9.0, 80))))
        # Of few rows a sum is the same in whatever order it is made, but for an ulp.
        sums = i % 2 == 0
        keywords = {"dtype": f, "with_dbias": sums}
        yield _case("quantize_ragged_grad_fp8", (i, cols), args, exact=not sums, **keywords)


def _placed(made: random.Random, rows: int, cols: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows anywhere in memory: of one batch or several, with gaps, or one row for all."""
    batches = made.choice((1, 1, 2, 3))
    gap, offset = made.choice((0, 0, 0, 1, 6, 8, 16)), made.choice((0, 0, 0, 1, 4, 8))
    pitch = made.choice((cols + gap, cols + gap, cols + gap, 0))
    step = rows * pitch + made.choice((0, 0, 8, 5))
    reach = offset + (batches - 1) * step + max(rows - 1, 0) * pitch + cols
    memory = randn(reach, dtype=torch.float32, seed=seed) * 2.0 ** made.randint(-12, 8)
    for value in made.choices((math.nan, math.inf, 0.0, -0.0, 1e-7, -3e4, 3e4), k=seed % 4):
        memory[made.randrange(reach)] = value
    if made.random() < 0.2:
        memory = memory.mul(2).round()
    x = memory.to(dtype).as_strided((batches, rows, cols), (step, pitch, 1), offset)
    return x if batches > 1 else x[0]


def _drawn(generator: torch.Generator, choices: tuple[float, ...], *shape: int) -> Tensor:
    return torch.tensor(choices)[torch.randint(len(choices), shape, generator=generator)]


def _drawn_rows(generator: torch.Generator, rows: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Any codes, with scales of 1/2, 1 and 2."""
    codes = torch.randint(256, (rows, 8 * blocks), dtype=torch.uint8, generator=generator)
    return codes, _drawn(generator, (0x30, 0x38, 0x40), rows, blocks).to(torch.uint8)


def _any_products(seed: int, count: int) -> Iterator[Sample]:
    # Sums of few multiples of 1/8 are exact in every order, so all bits agree. A third, which the
    # test has on a device of compute capability 9.0, are in tiles; the others have few rows and a
    # long k.
    made, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for i in range(count):
        if i % 3 == 1:
            rows, n, blocks = made.randint(12, 140), made.randint(1, 700), 4 * made.randint(1, 14)
        else:
            rows = made.choice((1, 2, 5, 9, 16))
            n, blocks = made.randint(1, 150), made.randint(257, 800)
        w = (*_drawn_rows(generator, n, blocks), torch.tensor([0.5]))
        how: dict[str, Any] = {"dtype": torch.float32}
        if made.random() < 0.3:
            how["bias"] = _drawn(generator, (0.0, -3.0, 2.0), n)
        if made.random() < 0.2:
            how["residual"] = _drawn(generator, (0.0, 7.0), rows, n)
        # Longer sums of products of two codes are not exact.
        if made.random() < 0.25 and blocks <= 512:
            x, how["x_sf"] = _drawn_rows(generator, rows, blocks)
            how["x_gsa"] = torch.tensor([2.0])
        else:
            cols, pitch = 16 * blocks - made.choice((0, 0, 3, 8)), 16 * blocks + made.choice((0, 8))
            x = _drawn(generator, (-2.0, -1.0, 0.0, 1.0, 2.0), rows, pitch)[:, :cols]
            x = x.to(made.choice(DTYPES[:2]))
        yield _case("nvfp4_linear", (i, rows, n, 16 * blocks, x.dtype), (x, *w), **how)


# What an op may take beside its tensor, by name.
_MORE: dict[str, Callable[[random.Random], Any]] = {
    "amax": lambda made: torch.tensor([made.choice((0.0, 1e-30, 0.7, 3e4))]),
    "gsa": lambda made: torch.tensor([made.choice((0.0, 1e-38, 2e-3, 3e38))]),
    "group_size": lambda made: made.choice(GROUP_SIZES),
    "block_rows": lambda made: made.choice(BLOCK_SHAPES)[0],
    "dtype": lambda made: made.choice(GROUP_DTYPES),
}
_MAYBE: dict[str, tuple[Any, ...]] = {
    "keep_nan": (False, True),
    "with_amax": (False, True),
    "dim": (-1, 0),
    "scale_value": (None, None, 37.5),
    "fp8_max": (None, None, None, 96.0),
}


def _any_tensors(seed: int, count: int) -> Iterator[Sample]:
    # Of every op that needs little beside a tensor, whatever its choices are.
    made = random.Random(seed)
    needed = {
        name: [a.name for a in op.default._schema.arguments if not a.has_default_value()]
        for name, op in COMPILED_OPS.items()
    }
    known = {"x", "w", "block_cols", *_MORE}
    names = [name for name, arguments in needed.items() if known.issuperset(arguments)]
    for i in range(count):
        op = COMPILED_OPS[name := made.choice(names)]
        rows = round(made.choice((9, 300, 1300)) ** made.random()) - made.choice((0, 0, 0, 1))
        cols = round(min(20_000, 60_000 // max(rows, 1)) ** made.random())
        unit = made.choice((1, 8, 16, 256, 256 if "rotate" in op.names else 1))
        x = _placed(made, rows, -(-cols // unit) * unit, made.choice(DTYPES), i)
        if x.dim() > 2 and ("both" in name or "weight" in name):
            x = x[-1]
        how = {key: made.choice(of) for key, of in (op.choices | _MAYBE).items() if key in op.names}
        how |= {key: _MORE[key](made) for key in needed[name] if key in _MORE}
        if "block_rows" in how:
            how["block_cols"] = how["block_rows"]
        if "rounding" in how:
            how["rounding"] = "nearest"
        if "mxfp8" in name:
            how["dtype"] = FP8_DTYPES[i % 2]
        if "signs" in op.names and how["rotate"] != "none" and i % 2:
            how["signs"] = signs_of(how["rotate"])
        try:
            op.plan(x, **how)
        except (TypeError, ValueError):
            continue  # what does not fit together
        said = [value for value in how.values() if not isinstance(value, Tensor)]
        what = (i, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, *said)
        yield _case(name, what, (x,), **how)


def _odd_widths() -> Iterator[Sample]:
    # Rows begin at every distance from a multiple of four bytes.
    ways = itertools.cycle(itertools.product(GROUP_DTYPES, FP8_DTYPES))
    # The last have thread blocks of several warps, and more rows than one multiprocessor has those.
    for dtype, (rows, cols) in itertools.product(DTYPES, ((12, 35), (12, 50), (24, 2065))):
        x, weight, what = _values((rows, cols), dtype), _finite((cols,), dtype, 5), (cols, dtype)
        elements, f = next(ways)
        for granularity, given in (("tensor", torch.tensor([3.0])), ("row", None)):
            how = {"dtype": f, "granularity": granularity}
            yield _case("quantize_fp8", (*what, granularity), (x, given), **how)
        yield _case("quantize_per_token_group", what, (x, 16, None), dtype=elements)
        yield _case("quantize_block", what, (x, 16, 16), dtype=elements)
        yield _case("quantize_mxfp8_both", what, (_finite((32, cols), dtype),), dtype=f)
        y = _finite((rows, cols), dtype)
        how = {"residual": _finite((rows, cols), dtype, 6)}
        yield _case("rmsnorm_quantize_nvfp4", what, (y, weight), **how)
        args = (y, weight, None)
        yield _case("rmsnorm_quantize_fp8", what, args, dtype=f, granularity="row", **how)
        data, scale_inv = reference.quantize_per_token_group(y, 16, dtype=elements)[:2]
        yield _case("dequantize", what, (data, scale_inv, 1, 16), scale_layout="row", dtype=dtype)
        codes, scales, gsa = reference.quantize_nvfp4(y)
        args = (codes.view(torch.uint8), scales.view(torch.uint8), gsa)
        yield _case("dequantize_nvfp4", what, args, cols=cols, dtype=dtype)


def _anywhere() -> Iterator[Sample]:
    # Rows that begin at every distance from a multiple of 16 bytes, and of 128; of a part of a warp
    # and of several; too long to be held.
    ways = itertools.cycle(itertools.product(SCALE_LAYOUTS, GRANULARITIES))
    shapes = ((9, 17), (11, 1043), (11, 2064), (2, 33003))
    for dtype, (rows, cols), offset in itertools.product(DTYPES, shapes, (0, 1, 6, 27)):
        layout, granularity = next(ways)
        # An even distance between rows with an offset, an odd one without.
        memory = _values((rows, cols + (30 if offset else 6)), dtype, offset)
        x, what = memory[:, offset : offset + cols], (cols, dtype, offset)
        how = {"scale_layout": layout}
        yield _case("quantize_nvfp4", what, (x,), granularity="row", **how)
        y = _finite((rows, cols + 31), dtype, offset)[:, offset : offset + cols]
        weight = _finite((cols + 1,), (dtype, torch.float32)[offset % 2], 5)[1:]
        how |= {"granularity": granularity}
        yield _case("rmsnorm_quantize_nvfp4", what, (y, weight), **how)
        f, elements = FP8_DTYPES[offset % 2], GROUP_DTYPES[(cols + offset) % 3]
        how = {"granularity": "row", "dtype": elements}
        yield _case("quantize_fp8", what, (x, None), **how)
        yield _case("rmsnorm_quantize_fp8", what, (y, weight, None), **how)
        args = (y, weight, 128)
        yield _case("rmsnorm_quantize_per_token_group", what, args, dtype=FP8_DTYPES[0])
        fused = _finite((rows, 2 * cols + 31), dtype, offset)[:, offset : offset + 2 * cols]
        how = {"exact": False, "interleave": 0 if cols % 16 else 8}
        yield _case("swiglu_quantize_fp8", what, (fused, None), dtype=f, **how)
        args = (fused, 16, None)
        yield _case("swiglu_quantize_per_token_group", what, args, dtype=elements, **how)


def _long() -> Iterator[Sample]:
    # Rows that a cluster of thread blocks holds, of two sizes.
    for dtype, cols in itertools.product(DTYPES, (18464, 32752)):
        x, y, what = _values((3, cols), dtype), _finite((3, cols), dtype), (cols, dtype, "long")
        for layout in SCALE_LAYOUTS:
            how = {"granularity": "row", "scale_layout": layout}
            yield _case("quantize_nvfp4", (*what, layout), (x,), **how)
            fused = _values((2, 2 * cols), dtype)
            args = (fused, cols, 8)
            yield _case("deinterleave_quantize_nvfp4", (*what, layout), args, op="select", **how)
        yield _case("quantize_fp8", what, (x, None), granularity="row", dtype=FP8_DTYPES[0])
        args = (_finite((2, 2 * cols), dtype), None)
        yield _case("swiglu_quantize_fp8", what, args, dtype=FP8_DTYPES[1], exact=False)
        weight = _finite((cols,), dtype, 5)
        yield from _norms(what, y, weight)
        yield from _norms((*what, "added"), y, weight, _finite((3, cols), dtype, 6))
    # More than eight rows for the one multiprocessor of a device, and rows that are rotated first.
    # Rows of 384 columns are too short for a thread block each; with a residual those of
    # 2048 are not.
    for dtype in DTYPES:
        how, what = {"granularity": "row"}, (dtype, "long", "many")
        for cols, granularity in ((384, "row"), (1744, "row"), (2048, "row"), (2048, "tensor")):
            args = _finite((70, cols), dtype), _finite((cols,), dtype, 5)
            way = {"granularity": granularity}
            yield _case("rmsnorm_quantize_nvfp4", (*what, cols, granularity), args, **way)
        x, weight = _finite((9, 2048), dtype), _finite((2048,), dtype, 5)
        added = _finite((9, 2048), dtype, 6)
        yield _case("rmsnorm_quantize_nvfp4", (*what, 2048), (x, weight), residual=added, **how)
        x, weight = _finite((9, 18496), dtype), _finite((18496,), dtype, 5)
        yield _case("quantize_nvfp4", what, (x,), **how)
        yield _case("rmsnorm_quantize_nvfp4", what, (x, weight), **how)
        fused = _values((9, 2 * 2048), dtype)
        yield _case("deinterleave_quantize_nvfp4", what, (fused, 2048, 8), op="select", **how)
        widths = ((9, 1024), (9, 18496), (3, 24640))
        for (rows, cols), embeds in itertools.product(widths, (False, True)):
            more = {"rotate": "64", "dtype": FP8_DTYPES[0], **how}
            more |= tables(rows, 64, 0) if embeds else {}
            args = (_finite((rows, cols), dtype), None)
            yield _case("rotate_quantize_fp8", (*what, cols, embeds), args, **more)


def _rotations() -> Iterator[Sample]:
    # Two blocks a lane: more than a thread has one of, even for three multiprocessors; rows whose
    # blocks end within a step, or that are padded to whole groups; rows of some lanes, of a thread
    # block, and of a cluster.
    turns = itertools.count()
    for rotate, dtype in itertools.product(("16", "32", "64", "128", "256"), DTYPES[:2]):
        size = int(rotate)
        for group_size in (16, 32, 64, 128):
            turn = next(turns)
            cols = 512 if turn % 2 else 256 + size
            how = {"rotate": rotate, "dtype": GROUP_DTYPES[turn % 3]}
            how |= {"signs": signs_of(rotate)} if turn % 4 == 0 else {}
            x, numbers = _values((3, -(-26_000 // cols), cols), dtype), torch.tensor([20, 90, 0])
            args = (x, group_size, numbers if turn % 5 == 0 else None)
            what = (rotate, dtype, group_size, cols)
            yield _case("rotate_quantize_per_token_group", what, args, **how)
        for rows, cols in ((3, 7168), (9, 1024), (40, 256), (2, 20480)):
            turn = next(turns)
            how = {"rotate": rotate, "dtype": GROUP_DTYPES[turn % 3]}
            how |= {"signs": signs_of(rotate)} if turn % 4 == 0 else {}
            x, what = _values((rows, cols), dtype), (rotate, dtype, rows, cols)
            yield _case("rotate_quantize_fp8", what, (x, None), granularity="row", **how)
        for rows, cols in ((33, 256), (7, 3 * size), (300, 512)):
            how = {"rotate": rotate, "signs": signs_of(rotate) if next(turns) % 3 == 0 else None}
            x, what = _values((rows, cols), dtype), (rotate, dtype, rows, cols)
            yield _case("rotated_amax", what, (x,), **how)
            yield _case("quantize_nvfp4_recipe", what, (x, torch.tensor([3.5])), **how)
            if cols % 32 == 0:
                yield _case("quantize_mxfp4", what, (x,), **how)


def _longest() -> Iterator[Sample]:
    # Rows whose sums are of more than 64 chunks, and those that only a cluster of eight holds.
    for dtype, cols in zip(DTYPES, (53264, 65520, 40976), strict=True):
        x, what, how = _finite((2, cols), dtype), (cols, dtype, "long"), {"granularity": "row"}
        yield _case("quantize_nvfp4", what, (x,), **how)
        fused = _values((2, 2 * cols), dtype)
        args = (fused, cols, 8)
        yield _case("deinterleave_quantize_nvfp4", what, args, op="select", **how)
        yield _case("quantize_fp8", what, (x, None), dtype=FP8_DTYPES[0], **how)
        weight = _finite((cols,), dtype, 5)
        for added in ({}, {"residual": _finite((2, cols), dtype, 6)}):
            more = (*what, bool(added))
            yield _case("rmsnorm_quantize_nvfp4", more, (x, weight), **how, **added)
            args = (x, weight, None)
            yield _case("rmsnorm_quantize_fp8", more, args, dtype=FP8_DTYPES[1], **how, **added)
            args = (x, weight, 128)
            name = "rmsnorm_quantize_per_token_group"
            yield _case(name, more, args, dtype=FP8_DTYPES[0], **added)


def _norms(
    what: Any, x: Tensor, weight: Tensor, added: Tensor | None = None, eps: float = 1e-6
) -> Iterator[Sample]:
    """Every op that begins with a norm; of wide factors, too."""

    def residual() -> dict[str, Tensor]:
        return {} if added is None else {"residual": added}

    name = "rmsnorm_quantize_nvfp4"
    for granularity, recipe in zip(itertools.cycle(GRANULARITIES), RECIPES, strict=False):
        how = {"granularity": granularity, "recipe": recipe, **residual()}
        how["scale_layout"] = SCALE_LAYOUTS[granularity == "row"]
        yield _case(name, (*what, granularity, recipe), (x, weight, eps), **how)
        args = (x, weight, torch.tensor([2.0**-100]), eps)
        yield _case(f"{name}_from_gsa", (*what, recipe, granularity), args, recipe=recipe)
    if added is None:
        args = (x[..., None, :], torch.full((*x.shape[:-1], 1), 0.5), weight, eps)
        yield _case("mhc_rmsnorm_quantize_nvfp4", what, args)
    scales: tuple[tuple[Tensor | None, str, bool], ...] = (
        (None, "row", True),
        (torch.tensor([3e37]), "tensor", True),
        (torch.tensor([3e37]), "tensor", False),
        (torch.tensor([1e-30]), "tensor", False),
    )
    for scale, granularity, amax in scales:
        how = {"dtype": torch.float8_e4m3fn, "granularity": granularity, "with_amax": amax}
        args = (x, weight, scale, eps)
        yield _case("rmsnorm_quantize_fp8", (*what, scale, amax), args, **how, **residual())
    for recipe, form in (("te", "float32"), ("vllm", "float32"), ("deepgemm", "ue8m0")):
        how = {"dtype": torch.float8_e4m3fn, "recipe": recipe, "scale_format": form}
        args = (x, weight, 64, eps)
        for amax_eps in (None, 1e-32) if recipe == "te" else (None,):
            how["amax_eps"] = amax_eps
            yield _case(
                "rmsnorm_quantize_per_token_group",
                (*what, recipe, amax_eps),
                args,
                **how,
                **residual(),
            )


# Rows that lanes of a warp have, that a block of threads holds, that it reads again.
_NORM_SHAPES = ((40, 64), (9, 272), (3, 1552), (2, 8208), (5, 35), (2, 1043))


def _edges() -> Iterator[Sample]:
    dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.float32, torch.bfloat16))
    for (rows, cols), dtype in zip(_NORM_SHAPES, dtypes, strict=False):
        base = _finite((rows, cols), torch.float32)
        ones, wide = torch.ones(cols), torch.logspace(-20, 20, cols)
        # Products, or squares, that overflow; values so small that their scales are zero.
        huge = base.clone()
        huge[0], huge[1] = base[0].sign() * 3e38, base[1].sign() * 1e25
        huge[1, 3], huge[-1, 0] = 2e30, math.inf
        infinite, not_a_number = wide.clone(), ones.clone()
        infinite[1], not_a_number[3] = math.inf, math.nan
        outlier = base * torch.where(torch.arange(cols) // 16 % 3 == 0, 1.0, 1e-9)
        added = _finite((rows, cols), dtype, 6)
        for name, x, weight in (
            ("huge", huge, 10 * ones),
            ("wide", huge, wide),
            ("infinite", base, infinite),
            ("nan", base, not_a_number),
            ("tiny", base * 1e-36, base[0] / 8),
            ("outlier", outlier, ones),
        ):
            of = weight.to(dtype) if rows % 2 else weight
            yield from _norms((name, cols, dtype), x.to(dtype), of)
        yield from _norms(("added", cols, dtype), huge.to(dtype), 10 * ones, added)
        yield from _norms(("factors", cols, dtype), (base * 1e-38).to(dtype), ones, None, 1e-12)


def _ties() -> Iterator[Sample]:
    # Whole numbers, of which a code's scale makes many that lie half way between two codes.
    made = torch.Generator().manual_seed(9)
    for (rows, cols), dtype in zip(
        _NORM_SHAPES * 2, itertools.cycle((*DTYPES, DTYPES[0], DTYPES[2])), strict=False
    ):
        x = torch.randint(-6, 7, (rows, cols + 3), generator=made).to(dtype)
        weight = torch.ones(cols, dtype=dtype)
        for name, values in (("aligned", x[:, :cols].clone()), ("apart", x[:, 3:])):
            yield from _norms((name, cols, dtype), values, weight)
        # silu(64) is 64, so that no exponential shows.
        up = torch.randint(-6, 7, (rows, 2 * cols + 3), generator=made).to(dtype)
        up[:, :cols] = 64.0
        fused = up[:, : 2 * cols].clone()
        for granularity, layout in itertools.product(GRANULARITIES, SCALE_LAYOUTS):
            how = {"op": "swiglu", "scale_layout": layout}
            what = (granularity, layout, cols, dtype)
            args = (fused, cols, 0)
            name = "deinterleave_quantize_nvfp4"
            yield _case(name, what, args, granularity=granularity, **how)
            yield _case(f"{name}_from_gsa", what, (*args, torch.tensor([0.021])), **how)
            yield _case(name, ("apart", *what), (up[:, : 2 * cols], cols, 0), **how)


def _small_gates() -> Iterator[Sample]:
    # 1 / (1 + e^88) is subnormal, and a product with it need not be small.
    for rows, cols in _NORM_SHAPES:
        up = torch.linspace(0.5, 2.0, rows * cols).reshape(rows, cols) * 1e38
        fused = torch.cat((torch.full((rows, cols), -88.0), up), 1)
        how: dict[str, Any] = {"exact": False}
        args = (fused, cols, 0)
        name = "deinterleave_quantize_nvfp4"
        yield _case(name, (cols,), args, op="swiglu", **how)
        how["dtype"] = torch.float8_e4m3fn
        yield _case("swiglu_quantize_fp8", (cols,), (fused, None), **how)
        yield _case("swiglu_quantize_per_token_group", (cols,), (fused, 64, None), **how)


def _few_rows() -> Iterator[Sample]:
    # At most one row per SM: every source and case that has kernels of its own.
    e4m3, shapes = FP8_DTYPES[0], ((1, 16), (1, 528), (2, 4096), (1, 16384))
    for dtype, shape in itertools.product(DTYPES, shapes):
        x, weight = _finite(shape, dtype), _finite(shape[-1:], dtype, 5)
        how: dict[str, Any] = {"dtype": e4m3, "granularity": "row"}
        yield _case("quantize_fp8", (*shape, dtype), (x, None), **how)
        fused = _finite((shape[0], 2 * shape[1]), dtype, 7)
        yield _case("swiglu_quantize_fp8", (*shape, dtype), (fused, None), exact=False, **how)
        for added in ({}, {"residual": _finite(shape, dtype, 6)}):
            what = (*shape, dtype, bool(added))
            yield _case("rmsnorm_quantize_fp8", what, (x, weight, None), **how, **added)
            given = {"dtype": e4m3, "granularity": "tensor", "with_amax": False, **added}
            args = (x, weight, torch.tensor([37.5]))
            yield _case("rmsnorm_quantize_fp8", (*what, "given"), args, **given)
            args = (x, weight, 128)
            name = "rmsnorm_quantize_per_token_group"
            yield _case(name, what, args, dtype=e4m3, recipe="te", **added)


FAMILIES: dict[str, Callable[[], Iterator[Sample]]] = {
    "amaxes": _amaxes,
    "nvfp4": _nvfp4,
    "nvfp4 norms": _nvfp4_norms,
    "fp8": _fp8,
    "few rows": _few_rows,
    "dequantize": _dequantize,
    "groups": _groups,
    "bounded elements": _bounded,
    "many segments": _many_segments,
    "ragged": _ragged,
    "around one block": _around_one_block,
    "samples in more": _samples_in_more,
    "any segments": functools.partial(_any_segments, 11, 50),
    "any tensors": functools.partial(_any_tensors, 21, 600),
    "odd widths": _odd_widths,
    "anywhere": _anywhere,
    "long": _long,
    "longest": _longest,
    "rotations": _rotations,
    "experts": lambda: iter(more_experts()[::2]),
    "edges": lambda: itertools.islice(_edges(), None, None, 7),
    "ties": _ties,
    "small gates": _small_gates,
}
MORE: dict[str, Callable[[], Iterator[Sample]]] = {
    "many more segments": functools.partial(_any_segments, 12, 200),
    "many more tensors": functools.partial(_any_tensors, 22, 700),
    "all edges": _edges,
    "any products": functools.partial(_any_products, 3, 80),
    "all experts": lambda: iter(more_experts()[1::2]),
}
"""Of the same kind, but too many for each run of the tests."""
