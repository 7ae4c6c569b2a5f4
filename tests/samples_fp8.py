"""Arguments for the FP8, INT8, MXFP8 and ragged ops; `samples` joins them to its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from samples import (
    DTYPES,
    WRITABLE,
    Arguments,
    Sample,
    derived,
    described,
    inputs,
    randn,
    row_count,
    specials,
    ways,
)
from torch import Tensor

from jitquant import reference
from jitquant.formats import (
    ACTIVATIONS,
    BLOCK_SCALE_LAYOUTS,
    BLOCK_SHAPES,
    FP8_DTYPES,
    GROUP_DTYPES,
    GROUP_RECIPES,
    GROUP_SCALE_LAYOUTS,
    GROUP_SIZES,
    RECIPES,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
)
from jitquant.numerics.ragged import row_of

Device = torch.device | str

MATRICES = [k for k in inputs() if k not in ("one_row", "four_dims", "transposed_leading")]
MATRICES = [k for k in MATRICES if not k.startswith("no_rows")]


def short(dtype: torch.dtype) -> str:
    return str(dtype)[6:].replace("float8_", "")


def _scale(d: Device, count: int = 1) -> Tensor:
    return torch.linspace(3.0, 200.0, max(count, 1))[:count].to(d)


def _fp8_samples() -> list[Sample]:
    out = []
    # granularity, given, bounds, with_amax
    kinds = (
        ("tensor", None, None, True),
        ("row", None, None, True),
        ("tensor", "tensor", None, True),
        ("row", "tensor", None, True),
        ("tensor", "number", None, False),
        ("row", None, (1.5, None), True),
        ("tensor", None, (0.75, 0.5), True),
        ("row", None, (None, 1.25), True),
        ("tensor", "tensor", None, False),
    )
    options = ways(kind=kinds, dtype=GROUP_DTYPES)
    for (label, make), dtype in itertools.product(inputs().items(), DTYPES):
        for _ in range(3):
            (granularity, given, bounds, with_amax), fp8 = next(options).values()

            def arguments(
                d, make=make, dtype=dtype, g=granularity, given=given, b=bounds, a=with_amax, f=fp8
            ) -> Arguments:
                x = make(dtype, d)
                scale = _scale(d, row_count(x) if g == "row" else 1) if given == "tensor" else None
                value = 37.5 if given == "number" else None
                most, least = b or (None, None)
                keywords = {"scale_ub": most, "amax_eps": least, "granularity": g, "with_amax": a}
                keywords["scale_value"] = value
                return (x, scale), {"dtype": f, **keywords}

            name = f"{label}-{short(dtype)}-{short(fp8)}-{granularity}-{given}-{bounds}-{with_amax}"
            out.append(Sample("quantize_fp8", name, arguments))
    for value in (1e-42, 3.4e38, float("inf"), float("nan"), 0.0, -2.0):
        out.append(
            Sample(
                "quantize_fp8",
                f"value-{value}",
                lambda d, v=value: (
                    (specials(torch.bfloat16).to(d), torch.tensor([v]).to(d)),
                    {"dtype": FP8_DTYPES[0]},
                ),
            )
        )
    return out


def _group_ways() -> Iterator[dict[str, Any]]:
    """What a function with a scale for each group takes beside its tensor."""
    return ways(
        dtype=GROUP_DTYPES,
        scale_format=SCALE_FORMATS,
        scale_layout=GROUP_SCALE_LAYOUTS,
        recipe=GROUP_RECIPES,
        eps=(None, 0.01),
        group_size=GROUP_SIZES,
    )


def _few_groups(function: str) -> list[Sample]:
    """Few groups of 128 without gaps, which have a kernel of their own."""
    out = []
    gated = function.startswith("swiglu")
    formats = itertools.cycle(("float32", "ue8m0"))
    interleaves = itertools.cycle((0, 8, 128))
    for dtype, elements, rows in itertools.product(DTYPES, GROUP_DTYPES, (1, 10)):

        def values(d: Device, dtype: torch.dtype = dtype, rows: int = rows) -> Tensor:
            x = randn(rows, 512 if gated else 384)
            if rows > 1 and not gated:
                x[1] = 0.0
                x[2, 130], x[3, 7], x[4, 200] = math.nan, math.inf, -math.inf
                x[5:8] *= torch.tensor([[1e-38], [1e-30], [1e30]])
            return x.to(dtype).to(d)

        keywords: dict[str, Any] = {"dtype": elements, "scale_format": next(formats)}
        keywords |= {"recipe": ("te", "deepgemm")[rows % 2]}
        keywords |= {"interleave": next(interleaves)} if gated else {}
        label = f"few-{rows}-{short(dtype)}-{described(keywords)}"

        def arguments(d: Device, values: Any = values, k: dict[str, Any] = keywords) -> Arguments:
            return (values(d), 128), dict(k)

        out.append(Sample(function, label, arguments, not gated))
    return out


def _group_samples() -> list[Sample]:
    out = []
    options = _group_ways()
    for (label, make), dtype, turn in itertools.product(inputs().items(), DTYPES, range(3)):
        keywords = next(options)
        out.append(
            Sample(
                "quantize_per_token_group",
                f"{label}-{short(dtype)}-{described(keywords)}-{turn}",
                lambda d, m=make, t=dtype, k=keywords: ((m(t, d),), dict(k)),
            )
        )
    # A few groups that are not a multiple of four, so that the last packed element has padding.
    for size, cols, layout in itertools.product((16, 128), (300, 512), GROUP_SCALE_LAYOUTS):
        keywords = {
            "dtype": GROUP_DTYPES[0],
            "scale_format": "ue8m0_packed",
            "scale_layout": layout,
            "recipe": "deepgemm",
        }
        out.append(
            Sample(
                "quantize_per_token_group",
                f"packed-{size}-{cols}-{layout}",
                lambda d, s=size, c=cols, k=keywords: ((randn(2, 7, c).to(d), s), dict(k)),
            )
        )
    return [
        *out,
        *_few_groups("quantize_per_token_group"),
        *_counted("quantize_per_token_group", 1),
    ]


def _counted(op: str, factor: int) -> list[Sample]:
    """Experts with a count of rows each; ``factor`` times the columns go in."""
    out = []
    counts = ([3, 0, 9, 5], [0, 0, 0, 0], [9, 9, 9, 9], [-1, 20, 1, 2])
    options = ways(
        dtype=GROUP_DTYPES, scale_format=SCALE_FORMATS, counts=(torch.int32, torch.int64)
    )
    for count, layout in itertools.product(counts, GROUP_SCALE_LAYOUTS):
        keywords = {"scale_layout": layout, **next(options)}
        label = f"counts-{'_'.join(map(str, count))}-{described(keywords)}"
        integer = keywords.pop("counts")

        def arguments(d, count=count, k=keywords, integer=integer) -> Arguments:
            x = randn(4, 9, factor * 72)
            for e, c in enumerate(count):
                x[e, max(c, 0) :] = float("nan")  # rows past the count influence nothing
            return (x.to(d), 32, torch.tensor(count, dtype=integer).to(d)), dict(k)

        out.append(Sample(op, label, arguments, factor == 1))
    return out


# The first element of rows of 64, and how far the next row is.
SILU_PLACES = {"apart": (16, 96), "odd_stride": (3, 69), "misaligned": (1, 64), "both": (1, 80)}


def _silu_samples() -> tuple[list[Sample], list[Sample]]:
    fp8, group = [], []
    shapes = (((5,), 64), ((3,), 40), ((2, 3), 24), ((4,), 21), ((130,), 48), ((0,), 16), ((), 16))
    options, fp8_options = (
        _group_ways(),
        ways(
            dtype=FP8_DTYPES, given=(False, True), with_amax=(True, True, False), columns=(0, 1, 2)
        ),
    )
    for (leading, cols), dtype in itertools.product(shapes, DTYPES):
        how = next(fp8_options)
        interleave = (0, cols, 8 if cols % 8 == 0 else 7)[how.pop("columns")]
        name = f"{leading}x{cols}-{short(dtype)}-{interleave}"
        label, given = f"{name}-{described(how)}", how.pop("given")
        how |= {"interleave": interleave, "granularity": "tensor" if given else "row"}

        def fused(d, leading=leading, cols=cols, dtype=dtype) -> Tensor:
            return randn(*leading, 2 * cols, dtype=dtype).to(d)

        def make_fp8(d, x=fused, given=given, k=how) -> Arguments:
            return (x(d), _scale(d) if given else None), dict(k)

        keywords = next(options)
        fp8.append(Sample("swiglu_quantize_fp8", label, make_fp8, False))
        group.append(
            Sample(
                "swiglu_quantize_per_token_group",
                f"{name}-{described(keywords)}",
                lambda d, x=fused, k={**keywords, "interleave": interleave}: ((x(d),), dict(k)),
                False,
            )
        )
    dtypes = ways(dtype=FP8_DTYPES)
    for (place, (first, pitch)), dtype, interleave in itertools.product(
        SILU_PLACES.items(), DTYPES, (0, 8)
    ):

        def apart(d, first=first, pitch=pitch, dtype=dtype) -> Tensor:
            memory = randn(first + 6 * pitch, dtype=dtype).to(d)
            return memory.as_strided((2, 3, 64), (3 * pitch, pitch, 1), first)

        how = {**next(dtypes), "interleave": interleave, "granularity": "row"}

        def make_apart(d, x=apart, k=how) -> Arguments:
            return (x(d), None), dict(k)

        keywords = {**next(options), "group_size": 16, "interleave": interleave}
        name = f"{place}-{short(dtype)}-{interleave}"
        fp8.append(Sample("swiglu_quantize_fp8", name, make_apart, False))
        group.append(
            Sample(
                "swiglu_quantize_per_token_group",
                f"{name}-{described(keywords)}",
                lambda d, x=apart, k=keywords: ((x(d),), dict(k)),
                False,
            )
        )
    few = _few_groups("swiglu_quantize_per_token_group")
    return fp8, [*group, *few, *_counted("swiglu_quantize_per_token_group", 2)]


def _norm_samples() -> tuple[list[Sample], list[Sample]]:
    fp8, group = [], []
    options = ways(
        dtype=FP8_DTYPES,
        granularity=("tensor", "row", "row"),
        residual=(False, True),
        fp32=(False, True),
    )
    group_options = _group_ways()
    for label, dtype in itertools.product(WRITABLE, DTYPES):
        make, how, keywords = inputs()[label], next(options), next(group_options)
        name = f"{label}-{short(dtype)}-{described(how)}"
        group_name = f"{label}-{short(dtype)}-{how['residual']}-{how['fp32']}-{described(keywords)}"
        residual, weight_dtype = how.pop("residual"), torch.float32 if how.pop("fp32") else dtype
        keywords["amax_eps"] = keywords.pop("eps")

        def tensors(d, make=make, dtype=dtype, w=weight_dtype, residual=residual):
            x = make(dtype, d)
            weight = randn(x.shape[-1], dtype=w, seed=5).to(d)
            added = randn(*x.shape, dtype=dtype, seed=6).to(d) if residual else None
            return x, weight, added

        def make_fp8(d, tensors=tensors, k=how) -> Arguments:
            x, weight, added = tensors(d)
            scale = _scale(d) if k["granularity"] == "tensor" else None
            return (x, weight, scale), {"residual": added, **k}

        def make_group(d, tensors=tensors, k=keywords) -> Arguments:
            x, weight, added = tensors(d)
            return (x, weight), {"eps": 1e-5, "residual": added, **k}

        fp8.append(Sample("rmsnorm_quantize_fp8", name, make_fp8))
        group.append(Sample("rmsnorm_quantize_per_token_group", group_name, make_group))
    return fp8, group


def _block_ways() -> Iterator[dict[str, Any]]:
    """What a function with a scale for each block takes beside its tensor."""
    return ways(
        block=BLOCK_SHAPES,
        dtype=GROUP_DTYPES,
        scale_format=SCALE_FORMATS[:2],
        scale_layout=BLOCK_SCALE_LAYOUTS,
        recipe=GROUP_RECIPES,
    )


def _block_samples() -> list[Sample]:
    out = []
    options = _block_ways()
    shapes = ((130, 300), (128, 256), (5, 1), (1, 40), (2, 70, 33), (0, 48), (33, 520))
    for shape, dtype, turn in itertools.product(shapes, DTYPES, range(4)):
        keywords = next(options)
        name = f"{'x'.join(map(str, shape))}-{short(dtype)}-{described(keywords)}-{turn}"
        block = keywords.pop("block")
        out.append(
            Sample(
                "quantize_block",
                name,
                lambda d, s=shape, t=dtype, b=block, k=keywords: (
                    (randn(*s, dtype=t).to(d), *b),
                    dict(k),
                ),
            )
        )
    for label in ("specials", "infinity", "row_stride", "odd_stride", "expanded", "zeros"):
        make = inputs()[label]
        out.append(
            Sample(
                "quantize_block",
                label,
                lambda d, m=make: (
                    (m(torch.bfloat16, d), 16, 16),
                    {"dtype": GROUP_DTYPES[0]},
                ),
            )
        )
    return out


def _both_samples() -> list[Sample]:
    out = []
    options, group_options = _block_ways(), _group_ways()
    for label, dtype in itertools.product(MATRICES, DTYPES):
        make, keywords = inputs()[label], next(options)
        name = f"{label}-{short(dtype)}-{described(keywords)}"
        block = keywords.pop("block")
        out.append(
            Sample(
                "quantize_block_both",
                name,
                lambda d, m=make, t=dtype, b=block, k=keywords: ((m(t, d), *b), dict(k)),
            )
        )
    for label, dtype in itertools.product(MATRICES, DTYPES):
        make, keywords = inputs()[label], next(group_options)
        out.append(
            Sample(
                "quantize_per_token_group_both",
                f"{label}-{short(dtype)}-{described(keywords)}",
                lambda d, m=make, t=dtype, k=keywords: ((m(t, d),), dict(k)),
            )
        )
    out.append(
        Sample(
            "quantize_per_token_group_both",
            "large",
            lambda d: ((randn(200, 330).to(d), 128), {"dtype": GROUP_DTYPES[0]}),
        )
    )
    return out


def _dequantize_samples() -> list[Sample]:
    out = []

    def add(name: str, dtype: torch.dtype | None, make: Any, block: tuple[int, int], layout: str):
        def arguments(d) -> Arguments:
            data, scales = make()[:2]
            return (data.to(d), scales.to(d), *block), {"scale_layout": layout, "dtype": dtype}

        out.append(Sample("dequantize", f"{name}-{len(out)}", arguments))

    shapes = ((5, 64), (48,), (3, 19), (2, 3, 24), (0, 32), (2, 130, 40))
    for i, (shape, dtype) in enumerate(itertools.product(shapes, (None, *DTYPES))):
        x, fp8, any8 = randn(*shape), FP8_DTYPES[i % 2], GROUP_DTYPES[i % 3]
        add("tensor", dtype, lambda x=x, f=fp8: reference.quantize_fp8(x, dtype=f), (0, 0), "row")
        add(
            "row",
            dtype,
            lambda x=x, f=fp8: reference.quantize_fp8(x, dtype=f, granularity="row"),
            (1, 0),
            "row",
        )
        layout, scale_format, size = GROUP_SCALE_LAYOUTS[i % 3], SCALE_FORMATS[i % 3], 16
        layout = GROUP_SCALE_LAYOUTS[(i // 3 + i) % 3]
        keywords = {"dtype": any8, "scale_format": scale_format, "scale_layout": layout}
        add(
            "group",
            dtype,
            lambda x=x, k=keywords: reference.quantize_per_token_group(x, 16, **k),
            (1, size),
            layout,
        )
        layout = SCALE_LAYOUTS[i % 2]
        add(
            "mxfp8",
            dtype,
            lambda x=x, f=fp8, k=layout: reference.quantize_mxfp8(x, dtype=f, scale_layout=k),
            (1, 32),
            layout,
        )
        if len(shape) > 1:
            layout = BLOCK_SCALE_LAYOUTS[i % 2]
            add(
                "block",
                dtype,
                lambda x=x, f=any8, k=layout: reference.quantize_block(
                    x, 32, 32, dtype=f, scale_layout=k
                ),
                (32, 32),
                layout,
            )
    for fp8 in FP8_DTYPES:

        def every(fp8=fp8) -> tuple[Tensor, Tensor]:
            codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(fp8)
            exponents = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
            return codes, exponents.view(torch.float8_e8m0fnu)

        add("all_bytes", torch.float32, every, (1, 32), "linear")
    return out


SEGMENTS: dict[str, tuple[list[int], list[int] | None, tuple[int, ...]]] = {
    "one": ([0, 96], None, (96,)),
    "three": ([0, 32, 32, 112], None, (112,)),
    "padded": ([0, 32, 48, 48, 128], [17, 1, 0, 77], (128,)),
    "gap_before_and_after": ([1, 3, 4], None, (5, 16)),
    "none": ([0], None, (32,)),
    "empty_buffer": ([0, 0, 0], None, (0, 8)),
    "beyond_the_buffer": ([-1, 2, 2**62], None, (4, 16)),
    "sizes_beyond": ([0, 1, 4], [900, 2**62], (4, 16)),
    "single_elements": (list(range(65)), None, (64,)),
    "many": ([16 * i for i in range(258)], [16 - i % 5 for i in range(257)], (257 * 16,)),
    "many_rows": (list(range(0, 516, 2)), [2 - i % 3 for i in range(257)], (3, 172, 16)),
    "buffer_no_multiple_of_16": ([0, 16, 37], None, (37,)),
}


def _ragged_samples() -> list[list[Sample]]:
    fp8, grad, nvfp4, mxfp8, back, back4, back8 = [], [], [], [], [], [], []
    for i, ((label, (offsets, sizes, shape)), dtype) in enumerate(
        itertools.product(SEGMENTS.items(), DTYPES)
    ):
        f, given = FP8_DTYPES[i % 2], i % 3 == 1
        activation = ACTIVATIONS[i % len(ACTIVATIONS)]
        sums = i % 5 > 0
        of_grad = (*shape, 5) if sums and len(shape) == 1 else shape  # sums are of rows

        def where(d, offsets=offsets, sizes=sizes) -> tuple[Tensor, Tensor | None]:
            lengths = None if sizes is None else torch.tensor(sizes).to(d)
            return torch.tensor(offsets).to(d), lengths

        def values(d, shape=shape, dtype=dtype, i=i, seed=0) -> Tensor:
            x = randn(*shape, dtype=torch.float32, seed=seed)
            x *= torch.logspace(-3, 3, x.numel()).reshape(x.shape)
            if i % 4 == 2 and x.numel():
                x.view(-1)[20] = float("nan")
            return x.to(dtype).to(d)

        def some_scales(d, where=where, given=given) -> Tensor | None:
            return _scale(d, len(where(d)[0]) - 1) if given else None

        def make_fp8(
            d, where=where, values=values, scales=some_scales, f=f, activation=activation
        ) -> Arguments:
            at, sizes = where(d)
            how = {"sizes": sizes, "dtype": f, "activation": activation}
            return (values(d), at, scales(d)), how

        def make_grad(
            d,
            where=where,
            values=values,
            of_grad=of_grad,
            scales=some_scales,
            f=f,
            sums=sums,
            activation=activation,
        ) -> Arguments:
            at, sizes = where(d)
            x = None if activation == "none" else values(d, of_grad, seed=1)
            keywords = {"sizes": sizes, "act_input": x, "activation": activation}
            return (values(d, of_grad, i=0), at, scales(d)), {
                **keywords,
                "with_dbias": sums,
                "dtype": f,
            }

        def make_nvfp4(d, where=where, values=values, scales=some_scales, i=i) -> Arguments:
            at, sizes = where(d)
            return (values(d), at, scales(d)), {"sizes": sizes, "recipe": RECIPES[i % 2]}

        def make_back(d, where=where, values=values, f=f, t=(None, *DTYPES)[i % 4]) -> Arguments:
            at, sizes = where("cpu")
            parts = reference.quantize_ragged_fp8(values("cpu", i=0), at, sizes=sizes, dtype=f)
            at, sizes = where(d)
            return (parts[0].to(d), parts[1].to(d), at), {"sizes": sizes, "dtype": t}

        def make_mxfp8(d, where=where, values=values, f=f) -> Arguments:
            at, sizes = where(d)
            return (values(d), at), {"sizes": sizes, "dtype": f}

        def make_back8(d, make=make_mxfp8, where=where, t=(None, *DTYPES)[i % 4]) -> Arguments:
            (x, at), how = make("cpu")
            data, scales = reference.quantize_ragged_mxfp8(x, at, **how)
            at, sizes = where(d)
            return (data.to(d), scales.to(d), at), {"sizes": sizes, "dtype": t}

        def make_back4(d, where=where, values=values, t=(None, *DTYPES)[i % 4]) -> Arguments:
            at, sizes = where("cpu")
            x = values("cpu", i=0)
            parts = reference.quantize_ragged_nvfp4(x, at, sizes=sizes)
            at, sizes = where(d)
            codes, scales = (p.view(torch.uint8).to(d) for p in parts[:2])
            keywords = {"numel": x.numel(), "row_size": row_of(x.shape), "sizes": sizes, "dtype": t}
            return (codes, scales, parts[2].to(d), at), keywords

        name = f"{label}-{short(dtype)}-{given}"
        exact = activation in ("none", "relu", "srelu")
        exact_grad = exact and not sums
        fp8.append(Sample("quantize_ragged_fp8", name, make_fp8, exact))
        grad.append(Sample("quantize_ragged_grad_fp8", name, make_grad, exact_grad))
        nvfp4.append(Sample("quantize_ragged_nvfp4", name, make_nvfp4))
        back.append(Sample("dequantize_ragged_fp8", name, make_back))
        back4.append(Sample("dequantize_ragged_nvfp4", name, make_back4))
        mxfp8.append(Sample("quantize_ragged_mxfp8", name, make_mxfp8))
        back8.append(Sample("dequantize_ragged_mxfp8", name, make_back8))
    return [fp8, grad, nvfp4, mxfp8, back, back4, back8]


def fp8_samples() -> dict[str, list[Sample]]:
    """Samples of each op, by its name."""
    lists = [
        _fp8_samples(),
        _group_samples(),
        *_silu_samples(),
        *_norm_samples(),
        _block_samples(),
        _both_samples(),
        derived("quantize_mxfp8", times=2),
        derived("quantize_mxfp8_both", kept=MATRICES),
        _dequantize_samples(),
        *_ragged_samples(),
    ]
    by_op: dict[str, list[Sample]] = {}
    for sample in itertools.chain(*lists):
        by_op.setdefault(sample.op, []).append(sample)
    return by_op
