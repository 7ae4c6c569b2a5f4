"""Arguments for the FP8, INT8, MXFP8 and ragged ops; `samples` joins them to its own."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from samples import (
    DTYPES,
    WRITABLE,
    Arguments,
    Sample,
    cycle,
    derived,
    inputs,
    randn,
    row_count,
    specials,
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

Device = torch.device | str

MATRICES = [k for k in inputs() if k not in ("one_row", "four_dims", "transposed_leading")]
MATRICES = [k for k in MATRICES if not k.startswith("no_rows")]


def short(dtype: torch.dtype) -> str:
    return str(dtype)[6:].replace("float8_", "")


def _scale(d: Device, count: int = 1) -> Tensor:
    return torch.linspace(3.0, 200.0, max(count, 1))[:count].to(d)


def _fp8_samples() -> list[Sample]:
    out = []
    # granularity, given, scale_ub, with_amax
    ways = (
        ("tensor", None, None, True),
        ("row", None, None, True),
        ("tensor", "tensor", None, True),
        ("row", "tensor", None, True),
        ("tensor", "number", None, False),
        ("row", None, 1.5, True),
        ("tensor", None, 0.75, True),
        ("tensor", "tensor", None, False),
    )
    way_of = cycle(ways)
    for i, ((label, make), dtype) in enumerate(itertools.product(inputs().items(), DTYPES)):
        for j in (i, i + 3, i + 6):
            ((granularity, given, bound, with_amax),) = way_of(j)
            fp8 = FP8_DTYPES[(i + j // 8) % 2]

            def arguments(
                d, make=make, dtype=dtype, g=granularity, given=given, b=bound, a=with_amax, f=fp8
            ) -> Arguments:
                x = make(dtype, d)
                scale = _scale(d, row_count(x) if g == "row" else 1) if given == "tensor" else None
                value = 37.5 if given == "number" else None
                keywords = {"scale_value": value, "scale_ub": b, "granularity": g, "with_amax": a}
                return (x, scale), {"dtype": f, **keywords}

            name = f"{label}-{short(dtype)}-{short(fp8)}-{granularity}-{given}-{bound}-{with_amax}"
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


def _keywords(combination: tuple[Any, ...]) -> dict[str, Any]:
    names = ("dtype", "scale_format", "scale_layout", "recipe", "eps")
    return dict(zip(names, combination, strict=True))


def _described(keywords: dict[str, Any]) -> str:
    return "-".join(short(v) if isinstance(v, torch.dtype) else str(v) for v in keywords.values())


_GROUP_WAYS = cycle(GROUP_DTYPES, SCALE_FORMATS, GROUP_SCALE_LAYOUTS, GROUP_RECIPES, (None, 0.01))


def _group_samples() -> list[Sample]:
    out = []
    for i, ((label, make), dtype) in enumerate(itertools.product(inputs().items(), DTYPES)):
        for j in range(3):
            keywords = _keywords(_GROUP_WAYS(29 * (3 * i + j)))
            size = GROUP_SIZES[(i + j) % 5]
            out.append(
                Sample(
                    "quantize_per_token_group",
                    f"{label}-{short(dtype)}-{size}-{_described(keywords)}",
                    lambda d, m=make, t=dtype, s=size, k=keywords: ((m(t, d), s), dict(k)),
                )
            )
    # A few groups that are no multiple of four, so that the last packed element has padding.
    for size, cols, layout in itertools.product((16, 128), (300, 512), GROUP_SCALE_LAYOUTS):
        keywords = _keywords((GROUP_DTYPES[0], "ue8m0_packed", layout, "deepgemm", None))
        out.append(
            Sample(
                "quantize_per_token_group",
                f"packed-{size}-{cols}-{layout}",
                lambda d, s=size, c=cols, k=keywords: ((randn(2, 7, c).to(d), s), dict(k)),
            )
        )
    return [*out, *_counted("quantize_per_token_group", 1)]


def _counted(op: str, factor: int) -> list[Sample]:
    """Experts with a count of rows each; ``factor`` times the columns go in."""
    out = []
    counts = ([3, 0, 9, 5], [0, 0, 0, 0], [9, 9, 9, 9], [-1, 20, 1, 2])
    for i, (count, layout) in enumerate(itertools.product(counts, GROUP_SCALE_LAYOUTS)):
        scale_format = SCALE_FORMATS[(i + i // 3) % 3]
        keywords = _keywords((GROUP_DTYPES[i % 3], scale_format, layout, "te", None))

        def arguments(d, count=count, k=keywords, fp32=i % 2) -> Arguments:
            x = randn(4, 9, factor * 72)
            for e, c in enumerate(count):
                x[e, max(c, 0) :] = float("nan")  # rows past the count influence nothing
            numbers = torch.tensor(count, dtype=torch.int64 if fp32 else torch.int32)
            return (x.to(d), 32, numbers.to(d)), dict(k)

        out.append(Sample(op, f"counts-{i}-{_described(keywords)}", arguments, factor == 1))
    return out


# The first element of rows of 64, and how far the next row is.
SILU_PLACES = {"apart": (16, 96), "odd_stride": (3, 69), "misaligned": (1, 64), "both": (1, 80)}


def _silu_samples() -> tuple[list[Sample], list[Sample]]:
    fp8, group = [], []
    shapes = (((5,), 64), ((3,), 40), ((2, 3), 24), ((4,), 21), ((130,), 48), ((0,), 16), ((), 16))
    for i, ((leading, cols), dtype) in enumerate(itertools.product(shapes, DTYPES)):
        interleave = (0, cols, 8 if cols % 8 == 0 else 7)[i % 3]
        given = i % 2

        def fused(d, leading=leading, cols=cols, dtype=dtype) -> Tensor:
            return randn(*leading, 2 * cols, dtype=dtype).to(d)

        def make_fp8(d, x=fused, n=interleave, given=given, i=i) -> Arguments:
            granularity = "tensor" if given else "row"
            keywords = {"dtype": FP8_DTYPES[i % 2], "interleave": n, "granularity": granularity}
            return (x(d), _scale(d) if given else None), {**keywords, "with_amax": i % 4 != 3}

        keywords = _keywords(_GROUP_WAYS(29 * i)) | {"interleave": interleave}
        size = GROUP_SIZES[i % 5]
        name = f"{leading}x{cols}-{short(dtype)}-{interleave}"
        fp8.append(Sample("swiglu_quantize_fp8", f"{name}-{given}", make_fp8, False))
        group.append(
            Sample(
                "swiglu_quantize_per_token_group",
                f"{name}-{size}-{_described(keywords)}",
                lambda d, x=fused, s=size, k=keywords: ((x(d), s), dict(k)),
                False,
            )
        )
    ways = itertools.product(SILU_PLACES.items(), DTYPES, (0, 8))
    for i, ((place, (first, pitch)), dtype, interleave) in enumerate(ways):

        def apart(d, first=first, pitch=pitch, dtype=dtype) -> Tensor:
            memory = randn(first + 6 * pitch, dtype=dtype).to(d)
            return memory.as_strided((2, 3, 64), (3 * pitch, pitch, 1), first)

        def make_apart(d, x=apart, n=interleave, i=i) -> Arguments:
            keywords = {"dtype": FP8_DTYPES[i % 2], "interleave": n}
            return (x(d), None), {**keywords, "granularity": "row"}

        keywords = _keywords(_GROUP_WAYS(29 * i)) | {"interleave": interleave}
        name = f"{place}-{short(dtype)}-{interleave}"
        fp8.append(Sample("swiglu_quantize_fp8", name, make_apart, False))
        group.append(
            Sample(
                "swiglu_quantize_per_token_group",
                f"{name}-{_described(keywords)}",
                lambda d, x=apart, k=keywords: ((x(d), 16), dict(k)),
                False,
            )
        )
    return fp8, [*group, *_counted("swiglu_quantize_per_token_group", 2)]


def _norm_samples() -> tuple[list[Sample], list[Sample]]:
    fp8, group = [], []
    for i, (label, dtype) in enumerate(itertools.product(WRITABLE, DTYPES)):
        make = inputs()[label]
        weight_dtype = torch.float32 if i % 2 else dtype
        residual, given = i % 4 < 2, i % 3 == 0

        def tensors(d, make=make, dtype=dtype, w=weight_dtype, residual=residual):
            x = make(dtype, d)
            weight = randn(x.shape[-1], dtype=w, seed=5).to(d)
            added = randn(*x.shape, dtype=dtype, seed=6).to(d) if residual else None
            return x, weight, added

        def make_fp8(d, tensors=tensors, given=given, i=i) -> Arguments:
            x, weight, added = tensors(d)
            keywords = {"dtype": FP8_DTYPES[i % 2], "granularity": "tensor" if given else "row"}
            scale = _scale(d) if given else None
            return (x, weight, scale), {"residual": added, **keywords}

        def make_group(d, tensors=tensors, i=i) -> Arguments:
            x, weight, added = tensors(d)
            keywords = _keywords(_GROUP_WAYS(29 * i))
            keywords["amax_eps"] = keywords.pop("eps")
            return (x, weight, GROUP_SIZES[i % 5], 1e-5), {"residual": added, **keywords}

        name = f"{label}-{short(dtype)}-{residual}"
        fp8.append(Sample("rmsnorm_quantize_fp8", f"{name}-{given}", make_fp8))
        group.append(Sample("rmsnorm_quantize_per_token_group", name, make_group))
    return fp8, group


def _block_samples() -> list[Sample]:
    out = []
    ways = cycle(
        BLOCK_SHAPES, GROUP_DTYPES, SCALE_FORMATS[:2], BLOCK_SCALE_LAYOUTS, GROUP_RECIPES, (None,)
    )
    shapes = ((130, 300), (128, 256), (5, 1), (1, 40), (2, 70, 33), (0, 48), (33, 520))
    for i, (shape, dtype) in enumerate(itertools.product(shapes, DTYPES)):
        for j in range(4):
            block, *rest = ways(31 * (4 * i + j) + j)
            keywords = _keywords(tuple(rest))
            out.append(
                Sample(
                    "quantize_block",
                    f"{'x'.join(map(str, shape))}-{short(dtype)}-{block[0]}-{_described(keywords)}",
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
    ways = cycle(
        BLOCK_SHAPES, GROUP_DTYPES, SCALE_FORMATS[:2], BLOCK_SCALE_LAYOUTS, GROUP_RECIPES, (None,)
    )
    for i, (label, dtype) in enumerate(itertools.product(MATRICES, DTYPES)):
        block, *rest = ways(31 * i)
        keywords = _keywords(tuple(rest))
        make = inputs()[label]
        out.append(
            Sample(
                "quantize_block_both",
                f"{label}-{short(dtype)}-{block[0]}-{_described(keywords)}",
                lambda d, m=make, t=dtype, b=block, k=keywords: ((m(t, d), *b), dict(k)),
            )
        )
    for i, (label, dtype) in enumerate(itertools.product(MATRICES, DTYPES)):
        keywords = _keywords(_GROUP_WAYS(29 * i))
        size = GROUP_SIZES[i % 5]
        make = inputs()[label]
        out.append(
            Sample(
                "quantize_per_token_group_both",
                f"{label}-{short(dtype)}-{size}-{_described(keywords)}",
                lambda d, m=make, t=dtype, s=size, k=keywords: ((m(t, d), s), dict(k)),
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


GROUPS: dict[str, tuple[list[int], list[int] | None, tuple[int, ...]]] = {
    "one": ([0, 96], None, (96,)),
    "three": ([0, 32, 32, 112], None, (112,)),
    "padded": ([0, 32, 48, 48, 128], [17, 1, 0, 77], (128,)),
    "gap_before_and_after": ([16, 48, 64], None, (5, 16)),
    "none": ([0], None, (32,)),
    "empty_buffer": ([0, 0, 0], None, (0, 8)),
    "beyond_the_buffer": ([-16, 32, 1000], None, (4, 16)),
    "sizes_beyond": ([0, 16, 64], [900, 900], (4, 16)),
    "single_elements": (list(range(65)), None, (64,)),
    "many": ([16 * i for i in range(258)], [16 - i % 5 for i in range(257)], (257, 16)),
    "buffer_no_multiple_of_16": ([0, 16, 37], None, (37,)),
}


def _ragged_samples() -> list[list[Sample]]:
    fp8, grad, nvfp4, back, back4 = [], [], [], [], []
    for i, ((label, (offsets, sizes, shape)), dtype) in enumerate(
        itertools.product(GROUPS.items(), DTYPES)
    ):
        f, given = FP8_DTYPES[i % 2], i % 3 == 1
        activation = ACTIVATIONS[i % len(ACTIVATIONS)]

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

        def make_fp8(d, where=where, values=values, scales=some_scales, f=f) -> Arguments:
            at, sizes = where(d)
            return (values(d), at, scales(d)), {"sizes": sizes, "dtype": f}

        def make_grad(
            d, where=where, values=values, scales=some_scales, f=f, i=i, activation=activation
        ) -> Arguments:
            at, sizes = where(d)
            x = None if activation == "none" else values(d, seed=1)
            keywords = {"sizes": sizes, "act_input": x, "activation": activation}
            return (values(d, i=0), at, scales(d)), {
                **keywords,
                "with_dbias": i % 5 > 0,
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

        def make_back4(d, where=where, values=values, t=(None, *DTYPES)[i % 4]) -> Arguments:
            at, sizes = where("cpu")
            x = values("cpu", i=0)
            parts = reference.quantize_ragged_nvfp4(x, at, sizes=sizes)
            at, sizes = where(d)
            codes, scales = (p.view(torch.uint8).to(d) for p in parts[:2])
            keywords = {"numel": x.numel(), "sizes": sizes, "dtype": t}
            return (codes, scales, parts[2].to(d), at), keywords

        name = f"{label}-{short(dtype)}-{given}"
        exact_grad = activation in ("none", "relu", "srelu") and i % 5 == 0
        fp8.append(Sample("quantize_ragged_fp8", name, make_fp8))
        grad.append(Sample("quantize_ragged_grad_fp8", name, make_grad, exact_grad))
        nvfp4.append(Sample("quantize_ragged_nvfp4", name, make_nvfp4))
        back.append(Sample("dequantize_ragged_fp8", name, make_back))
        back4.append(Sample("dequantize_ragged_nvfp4", name, make_back4))
    return [fp8, grad, nvfp4, back, back4]


def fp8_samples() -> dict[str, list[Sample]]:
    """Samples of each op, by its name."""
    groups = [
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
    for sample in itertools.chain(*groups):
        by_op.setdefault(sample.op, []).append(sample)
    return by_op
