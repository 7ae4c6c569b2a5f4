"""Arguments for every op, made once for all tests: of the CPU path, of ``out=``, of the kernels.

``SAMPLES[name]`` lists the samples of an op of ``torch.ops.jitquant``; ``sample.make(device)``
gives its positional and keyword arguments, the same values on every device.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitquant import reference
from jitquant.formats import GRANULARITIES, RECIPES
from jitquant.formats import SCALE_LAYOUTS as LAYOUTS
from jitquant.ops import ALL_OPS, KERNEL_OPS, Op

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS: dict[str, Op] = {op.name: op for op in ALL_OPS}
COMPILED_OPS: dict[str, Op] = {op.name: op for op in KERNEL_OPS}
"""Without those that are made of other ops."""


@dataclass(frozen=True)
class Sample:
    """Arguments of an op.

    Attributes:
        op: the op's name.
        label: what is special.
        make: from a device to (args, kwargs).
        exact: the kernel's results are the reference's bit for bit; not so where the order of a sum
            over rows or the exponential function shows.
    """

    op: str
    label: str
    make: Callable[[torch.device | str], Arguments]
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values on the CPU, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def specials(dtype: torch.dtype) -> Tensor:
    """Blocks with NaN, infinities, zeros of both signs, subnormals, ties and extremes."""
    x = randn(12, 48, dtype=torch.float32, seed=3)
    big = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal
    x[0, 5] = math.nan
    x[1] = math.nan
    x[2, 7] = -math.nan
    x[3] = 0.0
    x[4] = -0.0
    x[5] = tiny * torch.linspace(-2, 2, 48)
    x[6, ::2] = tiny / 4
    x[7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(6)
    x[8] = -x[7]
    x[9, 3], x[9, 20] = big, -big
    x[10, 16:32] = 0.0
    x[11] *= 1e-4
    return x.to(dtype)


def inputs() -> dict[str, Callable[[torch.dtype, torch.device | str], Tensor]]:
    """Tensors (..., N) to quantize, by what is special of them."""

    def contiguous(*shape: int) -> Callable[[torch.dtype, torch.device | str], Tensor]:
        return lambda dtype, device: randn(*shape, dtype=dtype).to(device)

    def with_infinity(dtype: torch.dtype, device: torch.device | str) -> Tensor:
        x = specials(dtype)
        x[9, 4], x[10, 40] = math.inf, -math.inf
        return x.to(device)

    return {
        "rows": contiguous(7, 64),
        "one_row": contiguous(48),
        "tail": contiguous(5, 19),
        "one_column": contiguous(3, 1),
        "tiles": contiguous(130, 80),
        "four_dims": contiguous(2, 3, 2, 24),
        "no_rows": contiguous(0, 32),
        "no_rows_3d": contiguous(2, 0, 17),
        "row_stride": lambda t, d: randn(6, 96, dtype=t).to(d)[:, 32:80],
        "odd_stride": lambda t, d: randn(5, 39, dtype=t).to(d)[:, 3:36],
        "every_other": lambda t, d: randn(9, 32, dtype=t).to(d)[::2],
        "expanded": lambda t, d: randn(1, 32, dtype=t).to(d).expand(4, 32),
        "transposed_leading": lambda t, d: randn(3, 4, 32, dtype=t).to(d).transpose(0, 1),
        "specials": lambda t, d: specials(t).to(d),
        "infinity": with_infinity,
        "zeros": lambda t, d: torch.zeros(4, 32, dtype=t).to(d),
        "decades": lambda t, d: (
            (randn(16, 64, dtype=torch.float32) * torch.logspace(-4, 4, 16)[:, None]).to(t).to(d)
        ),
    }


def _gsa(device: torch.device | str, rows: int | None = None) -> Tensor:
    if rows is None:
        return torch.tensor([0.0013], device=device)
    return (torch.linspace(0.2, 3.0, max(rows, 1))[:rows] * 1e-3).to(device)


def row_count(x: Tensor, trailing: int = 1) -> int:
    """Rows of a tensor with ``trailing`` dimensions that are no rows."""
    return math.prod(x.shape[: x.dim() - trailing])


def ways(**values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Keyword arguments: each combination of ``values`` once, then again from the start.

    The order is shuffled, the same in every process, so that a short list of inputs meets each
    value of each argument. With ``recipe=RECIPES, dim=(-1, 0)`` an item is such as
    ``{"recipe": "te", "dim": 0}``.
    """
    combinations = [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]
    random.Random(0).shuffle(combinations)
    return (dict(keywords) for keywords in itertools.cycle(combinations))


def described(keywords: dict[str, Any]) -> str:
    """The values, for a label."""
    return "-".join(
        str(v).removeprefix("torch.").removeprefix("float8_") for v in keywords.values()
    )


def _weight(x: Tensor, turn: int) -> Tensor:
    dtype = torch.float32 if turn % 2 else x.dtype
    return randn(x.shape[-1], dtype=dtype, seed=5).to(x.device)


def _residual(x: Tensor, turn: int) -> Tensor | None:
    return randn(*x.shape, dtype=x.dtype, seed=6).to(x.device) if turn % 2 else None


OTHERS: dict[str, Callable[[Tensor, int], Any]] = {
    "weight": _weight,
    "residual": _residual,
    "gsa": lambda x, turn: _gsa(x.device, row_count(x) if turn % 2 else None),
}
"""Arguments beside the tensor that is quantized, by name, and what they are in each turn."""

WRITABLE = tuple(k for k in inputs() if k != "expanded")
"""Inputs that a residual can be like, which is written."""


def derived(name: str, *, times: int = 1, kept: Iterable[str] | None = None) -> list[Sample]:
    """Samples of an op by its record: the inputs in all dtypes, its choices and others in turn.

    Args:
        name: of the op, whose first argument is the tensor that is quantized.
        times: samples of an input.
        kept: labels of inputs; None: all.
    """
    op = OPS[name]
    choices: dict[str, tuple[Any, ...]] = dict(op.choices)
    if "dtype" in op.names:
        choices["dtype"] = getattr(op.accepts["dtype"], "accepted")  # noqa: B009
    options = ways(**choices)
    others = [key for key in op.names if key in OTHERS]
    taken = {a.name for a in op.default._schema.arguments if not a.kwarg_only}
    labels = list(inputs()) if kept is None else list(kept)
    out = []
    for i, (label, dtype, again) in enumerate(itertools.product(labels, DTYPES, range(times))):
        keywords = next(options)

        def make(d, i=i, label=label, dtype=dtype, keywords=keywords) -> Arguments:
            x = inputs()[label](dtype, d)
            made = {key: OTHERS[key](x, i // 2) for key in others}
            first = (x, *(made.pop(key) for key in others if key in taken))
            return first, {**made, **keywords}

        label = f"{label}-{str(dtype)[6:]}-{described(keywords)}-{again}"
        out.append(Sample(name, label, make))
    return out


def _amax_samples() -> list[Sample]:
    divisor = Sample("amax_gsa", "divisor", lambda d: ((randn(4, 32).to(d), 6.0), {}))
    return [*derived("amax_gsa"), divisor]


def _quantize_samples() -> tuple[list[Sample], list[Sample]]:
    dynamic = derived("quantize_nvfp4", times=3)
    static = derived("quantize_nvfp4_from_gsa", times=3)
    for value in (1e-42, 0.002, 3e38):
        dynamic.append(
            Sample(
                "quantize_nvfp4",
                f"number-{value}",
                lambda d, v=value: ((randn(5, 40).to(d),), {"gsa_value": v}),
            )
        )
    for value in (0.0, 1e-42, 0.002, 3e38, math.nan, math.inf):
        static.append(
            Sample(
                "quantize_nvfp4_from_gsa",
                f"value-{value}",
                lambda d, v=value: ((randn(5, 40).to(d), torch.tensor([v]).to(d)), {}),
            )
        )
    dynamic.append(
        Sample("quantize_nvfp4", "divisor", lambda d: ((randn(5, 40).to(d), 1344.0), {}))
    )
    return dynamic, static


def _deinterleave_samples() -> tuple[list[Sample], list[Sample]]:
    dynamic, static = [], []
    # rows, intermediate, run
    shapes = (
        ((5,), 32, 8),
        ((3,), 40, 8),
        ((130,), 64, 8),
        ((2, 3), 24, 4),
        ((4,), 21, 7),
        ((6,), 48, 16),
        ((5,), 35, 0),
        ((0,), 16, 8),
        ((), 16, 8),
    )
    options = ways(recipe=RECIPES, scale_layout=LAYOUTS, granularity=GRANULARITIES)
    for (leading, inter, run), dtype, op in itertools.product(shapes, DTYPES, ("select", "swiglu")):
        keywords = {"op": op, **next(options)}
        name = f"{leading}x{inter}-run{run}-{str(dtype)[6:]}-{described(keywords)}"
        granularity = keywords.pop("granularity")

        def fused(d, leading=leading, inter=inter, dtype=dtype):
            return randn(*leading, 2 * inter, dtype=dtype).to(d)

        def make_dynamic(d, x=fused, inter=inter, run=run, k=keywords, g=granularity):
            return (x(d), inter, run), {"granularity": g, **k}

        def make_static(d, x=fused, inter=inter, run=run, k=keywords, g=granularity):
            t = x(d)
            return (t, inter, run, _gsa(d, row_count(t) if g == "row" else None)), dict(k)

        exact = op == "select"
        dynamic.append(Sample("deinterleave_quantize_nvfp4", name, make_dynamic, exact))
        static.append(Sample("deinterleave_quantize_nvfp4_from_gsa", name, make_static, exact))
    dynamic.append(
        Sample(
            "deinterleave_quantize_nvfp4",
            "row_stride",
            lambda d: ((randn(6, 80).to(d)[:, 8:72], 32, 8), {}),
        )
    )
    dynamic.append(
        Sample(
            "deinterleave_quantize_nvfp4",
            "number",
            lambda d: ((randn(6, 64).to(d), 32, 8), {"gsa_value": 0.01}),
        )
    )
    return dynamic, static


def _norm_samples() -> tuple[list[Sample], list[Sample]]:
    name = "rmsnorm_quantize_nvfp4"
    dynamic = derived(name, kept=WRITABLE)
    static = derived(f"{name}_from_gsa", kept=WRITABLE)
    dynamic.append(
        Sample(
            "rmsnorm_quantize_nvfp4",
            "number-eps",
            lambda d: ((randn(6, 64).to(d), randn(64).to(d), 0.1), {"gsa_value": 0.01}),
        )
    )
    static.append(
        Sample(
            "rmsnorm_quantize_nvfp4_from_gsa",
            "eps",
            lambda d: ((randn(6, 64).to(d), randn(64).to(d), _gsa(d), 0.1), {}),
        )
    )
    return dynamic, static


def _mhc_samples() -> tuple[list[Sample], list[Sample]]:
    dynamic, static = [], []
    shapes = ((5, 4, 64), (3, 1, 33), (130, 2, 48), (2, 3, 8, 32), (0, 4, 32), (4, 32))
    options = ways(
        recipe=RECIPES, scale_layout=LAYOUTS, granularity=GRANULARITIES, fp32=(False, True)
    )
    for shape, dtype in itertools.product(shapes, DTYPES):
        keywords = next(options)
        name = f"{'x'.join(map(str, shape))}-{str(dtype)[6:]}-{described(keywords)}"
        granularity, fp32 = keywords.pop("granularity"), keywords.pop("fp32")

        def tensors(d, shape=shape, dtype=dtype, fp32=fp32):
            mix_dtype = torch.float32 if fp32 else dtype
            X = randn(*shape, dtype=dtype).to(d)
            A = randn(*shape[:-1], dtype=mix_dtype, seed=7).to(d)
            return X, A, randn(shape[-1], dtype=mix_dtype, seed=8).to(d)

        def make_dynamic(d, tensors=tensors, k=keywords, g=granularity):
            return tensors(d), {"granularity": g, **k}

        def make_static(d, tensors=tensors, k=keywords, g=granularity):
            X, A, weight = tensors(d)
            return (X, A, weight, _gsa(d, row_count(X, 2) if g == "row" else None)), dict(k)

        dynamic.append(Sample("mhc_rmsnorm_quantize_nvfp4", name, make_dynamic))
        static.append(Sample("mhc_rmsnorm_quantize_nvfp4_from_gsa", name, make_static))
    dynamic.append(
        Sample(
            "mhc_rmsnorm_quantize_nvfp4",
            "strided-number",
            lambda d: (
                (
                    randn(4, 6, 64).to(d)[:, ::2, :40],
                    randn(4, 3, seed=7).to(d),
                    randn(40, seed=8).to(d),
                ),
                {"gsa_value": 0.02},
            ),
        )
    )
    return dynamic, static


def _weight_samples() -> tuple[list[Sample], list[Sample]]:
    dynamic, static = [], []
    shapes = ((32, 64), (17, 40), (130, 96), (5, 1), (1, 16), (48, 33))
    options = ways(block=("1x16", "16x16"), dim=(-1, 0), scale_layout=LAYOUTS, recipe=RECIPES)
    for shape, dtype, turn in itertools.product(shapes, DTYPES, range(3)):
        keywords = next(options)
        if keywords["dim"] == 0:
            keywords["scale_layout"] = "linear"
        name = f"{shape[0]}x{shape[1]}-{str(dtype)[6:]}-{described(keywords)}-{turn}"

        def weight(d, shape=shape, dtype=dtype):
            return randn(*shape, dtype=dtype).to(d)

        dynamic.append(
            Sample(
                "quantize_weight_nvfp4", name, lambda d, w=weight, k=keywords: ((w(d),), dict(k))
            )
        )
        static.append(
            Sample(
                "quantize_weight_nvfp4_from_gsa",
                name,
                lambda d, w=weight, k=keywords: ((w(d), _gsa(d)), dict(k)),
            )
        )
    for block, dim in itertools.product(("1x16", "16x16"), (-1, 0)):
        keywords = {"block": block, "dim": dim}
        dynamic += [
            Sample(
                "quantize_weight_nvfp4",
                f"specials-{block}-{dim}",
                lambda d, k=keywords: ((specials(torch.bfloat16).to(d),), dict(k)),
            ),
            Sample(
                "quantize_weight_nvfp4",
                f"row_stride-{block}-{dim}",
                lambda d, k=keywords: (
                    (randn(33, 70).to(d)[:, 5:55],),
                    {"gsa_value": 0.01, **k},
                ),
            ),
        ]
    return dynamic, static


def _dequantize_samples() -> list[Sample]:
    out = []
    shapes = ((5, 64), (48,), (3, 19), (130, 80), (2, 3, 24), (0, 32))
    options = ways(granularity=GRANULARITIES, scale_layout=LAYOUTS)
    for shape, dtype in itertools.product(shapes, (None, *DTYPES)):
        granularity, layout = next(options).values()

        def make(d, shape=shape, dtype=dtype, granularity=granularity, layout=layout):
            parts = reference.quantize_nvfp4(
                randn(*shape), granularity=granularity, scale_layout=layout
            )
            # As bytes: PyTorch's own checks of an op cannot compare these dtypes.
            x_fp4, x_sf = (t.view(torch.uint8).to(d) for t in parts[:2])
            keywords = {"cols": shape[-1], "scale_layout": layout, "dtype": dtype}
            return (x_fp4, x_sf, parts[2].to(d)), keywords

        name = f"{'x'.join(map(str, shape))}-{str(dtype)[6:]}-{granularity}-{layout}"
        out.append(Sample("dequantize_nvfp4", name, make))

    def columns(d: torch.device | str) -> Arguments:
        x_fp4, x_sf, gsa = reference.quantize_weight_nvfp4(randn(40, 21), dim=0)
        codes, scales = (t.view(torch.uint8).to(d) for t in (x_fp4, x_sf))
        return (codes, scales, gsa.to(d)), {"cols": 40, "dim": 0}

    def all_bytes(d: torch.device | str) -> Arguments:
        codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
        scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
        return (codes.to(d), scales.to(d), _gsa(d, 256)), {"dtype": torch.float32}

    return [
        *out,
        Sample("dequantize_nvfp4", "dim0", columns),
        Sample("dequantize_nvfp4", "all_bytes", all_bytes),
    ]


def _all() -> dict[str, list[Sample]]:
    lists = [_amax_samples(), _dequantize_samples()]
    for pair in (
        _quantize_samples(),
        _deinterleave_samples(),
        _norm_samples(),
        _mhc_samples(),
        _weight_samples(),
    ):
        lists += pair
    return {group[0].op: group for group in lists}


from samples_experts import expert_samples  # noqa: E402 - it uses what stands above
from samples_fp8 import fp8_samples  # noqa: E402
from samples_linear import linear_samples  # noqa: E402
from samples_recipes import recipe_samples  # noqa: E402
from samples_sharded import sharded_samples  # noqa: E402

_WHOLE: dict[str, list[Sample]] = {**_all(), **fp8_samples()}
SAMPLES: dict[str, list[Sample]] = {
    **_WHOLE,
    **sharded_samples(_WHOLE),
    **linear_samples(),
    **recipe_samples(),
}
SAMPLES |= expert_samples()
SAMPLES |= {op.name: derived(op.name) for op in ALL_OPS if op.name not in SAMPLES}
ALL_SAMPLES: list[Sample] = [sample for group in SAMPLES.values() for sample in group]


def poisoned_buffers(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Buffers for the ``out`` overload, full of a byte that no result should keep."""
    plan = op.plan(*args, **kwargs)
    buffers = {}
    for name, result in zip(op.results, plan.results, strict=True):
        buffer = torch.empty(result.shape, dtype=result.dtype, device=plan.device)
        if buffer.numel():
            buffer.view(torch.uint8).fill_(0xA5)
        buffers[name] = buffer
    return buffers


def byte_view(t: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, NaN of one sign and payload in floats."""
    if t.dtype.itemsize > 1 and t.is_floating_point():
        t = torch.where(t.isnan(), torch.full_like(t, math.nan), t)
    return t.reshape(-1).view(torch.uint8)


def assert_nearly(got: Tensor, expected: Tensor, result: str, what: str = "") -> None:
    """One result of a fusion, on the CPU: all but a few codes are those of the reference."""
    if expected.dtype == torch.float4_e2m1fn_x2:
        got, expected = reference.unpack_e2m1(got), reference.unpack_e2m1(expected)
    elif not expected.is_floating_point() or expected.dtype.itemsize == 1:
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    else:
        # A sum of both signs may be small beside its terms; what is rounded before it may differ.
        number = expected[expected.isfinite()].abs()
        part = {"dbias": 1e-6, "y": 1e-6, "mixture": 1e-3}.get(result, 0.0)
        atol = part * float(number.amax()) if number.numel() > 0 else 0.0
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol, equal_nan=True)
        return
    wrong = (got != expected).sum()
    assert wrong <= max(2, 1e-3 * got.numel()), f"{what} {result}: {wrong} of {got.numel()} differ"
