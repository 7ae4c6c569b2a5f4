"""Groups, blocks, MXFP8 and both orientations: the reference's bits, and how the kernels run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jitquant import reference
from jitquant.formats import GROUP_RECIPES, GROUP_SIZES, as_bytes
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

from .helpers import module, randn, room_for, same, views

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2, torch.int8)


def quantize(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    where = "quantize_both" if name.endswith("_both") else name
    out: tuple[Tensor, ...] = getattr(module(where), name)(*args, **kwargs)
    return out


def check(name: str, *args: Any, what: str = "", **kwargs: Any) -> None:
    """The kernel's results are those of the reference on the CPU."""
    there = [a.cpu() if isinstance(a, Tensor) else a for a in args]
    expected = getattr(reference, name)(*there, **kwargs)
    same(quantize(name, *args, **kwargs), expected, what=f"{name} {what} {kwargs}")


def _every_value(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit type: in order, and each among 255 others of any magnitude."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    mixed = values.reshape(256, 256).T.reshape(-1)
    return torch.cat((values, mixed)).reshape(256, 512).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(dtype: torch.dtype) -> None:
    x = _every_value(dtype)
    for fmt, recipe, scales in itertools.product(FORMATS, GROUP_RECIPES, ("float32", "ue8m0")):
        check("quantize_per_token_group", x, 16, dtype=fmt, recipe=recipe, scale_format=scales)
        check("quantize_block", x, 16, 16, dtype=fmt, recipe=recipe, scale_format=scales)
        check("quantize_per_token_group_both", x, 16, dtype=fmt, recipe=recipe, scale_format=scales)
        check("quantize_block_both", x, 16, 16, dtype=fmt, recipe=recipe, scale_format=scales)
    for fmt in (E4M3, E5M2):
        check("quantize_mxfp8", x, dtype=fmt)
        check("quantize_mxfp8_both", x, dtype=fmt)


def _magnitudes() -> Tensor:
    """fp32 rows of every magnitude, ends of the range and specials among them."""
    exponents = torch.arange(-150, 128).repeat_interleave(40).float()
    x = torch.ldexp(1 + torch.rand(exponents.numel(), 32), exponents[:, None])
    x *= torch.randn(exponents.numel(), 32).sign()
    x[::7] *= torch.rand(x[::7].shape) ** 8
    x = x.clamp(-torch.finfo().max, torch.finfo().max)
    x[5::11, 3] = float("inf")
    x[9::13, 8] = float("nan")
    return x.cuda()


@pytest.mark.parametrize("eps", [None, 1e-32, 1e30])
def test_every_magnitude_of_fp32(eps: float | None) -> None:
    """The divisions are made without the checks of the compiler's: their bits at the ends."""
    x = _magnitudes()
    for fmt, recipe, scales in itertools.product(FORMATS, GROUP_RECIPES, ("float32", "ue8m0")):
        check(
            "quantize_per_token_group",
            x,
            16,
            dtype=fmt,
            recipe=recipe,
            scale_format=scales,
            eps=eps,
        )
    if eps is None:
        for fmt in (E4M3, E5M2):
            check("quantize_mxfp8", x, dtype=fmt)
            check("quantize_mxfp8_both", x[:500], dtype=fmt)


@pytest.mark.parametrize("bounds", [(None, 96.0), (-20.5, None), (-17.0, 64.0)])
def test_bounds_of_elements(bounds: tuple[float | None, float | None]) -> None:
    x = _magnitudes()
    for fmt, recipe, scales in itertools.product(FORMATS, GROUP_RECIPES, ("float32", "ue8m0")):
        how: dict[str, Any] = {"dtype": fmt, "recipe": recipe, "scale_format": scales}
        how |= {"fp8_min": bounds[0], "fp8_max": bounds[1]}
        check("quantize_per_token_group", x, 16, **how)
        check("quantize_per_token_group_both", x[:300], 16, **how)
        check("quantize_block", x, 16, 16, **how)
        check("quantize_block_both", x[:300], 16, 16, **how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes_sizes_and_layouts(dtype: torch.dtype) -> None:
    """Rows and columns around the tiles' edges, and enough rows that a thread takes several."""
    for rows, cols in ((1, 16), (3, 1), (5, 129), (127, 260), (129, 384), (4, 7168), (3001, 520)):
        x = randn(rows, cols, dtype=dtype)
        for i, size in enumerate(GROUP_SIZES):
            for layout in ("row", "column", "column_tma"):
                scales = ("float32", "ue8m0_packed")[i % 2]
                options = {"dtype": FORMATS[i % 3], "scale_layout": layout, "scale_format": scales}
                check("quantize_per_token_group", x, size, what=f"{rows}x{cols}", **options)
                if rows < 3000:
                    check(
                        "quantize_per_token_group_both", x, size, what=f"{rows}x{cols}", **options
                    )
        for side in (16, 32, 64, 128):
            for layout in ("row", "row_padded"):
                check("quantize_block", x, side, side, dtype=E4M3, scale_layout=layout)
                check("quantize_block_both", x, side, side, dtype=E4M3, scale_layout=layout)
        for layout in ("linear", "swizzled_128x4"):
            check("quantize_mxfp8", x, dtype=E4M3, scale_layout=layout)
            if rows < 3000:
                check("quantize_mxfp8_both", x, dtype=E5M2, scale_layout=layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_groups_and_blocks_of_128(dtype: torch.dtype) -> None:
    """The kernel that has these alone: inside, at the edges, more tiles than fit at once."""
    for rows, cols in ((128, 128), (16, 16), (144, 400), (263, 272), (1037, 2064), (2048, 4608)):
        x = randn(rows, cols, dtype=dtype)
        x[rows // 2, : cols // 3] = float("nan")
        x[rows // 3, cols // 2] = float("inf")
        x[:, cols // 4] = 0
        for fmt, recipe in itertools.product(FORMATS, GROUP_RECIPES):
            scales = ("float32", "ue8m0")[rows % 3 == 2]
            options = {"dtype": fmt, "recipe": recipe, "scale_format": scales}
            for layout in ("row", "column"):
                check("quantize_per_token_group_both", x, 128, scale_layout=layout, **options)
            check("quantize_block_both", x, 128, 128, **options)
            if rows > 1000:
                break


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_many_rows_that_a_thread_has_two_blocks(dtype: torch.dtype) -> None:
    """Whole blocks, in rows with and without padding to a group, of one and of several batches."""
    for shape in ((420, 7168), (4, 110, 7184)):
        x = randn(*shape, dtype=dtype)
        x.view(-1)[77], x.view(-1)[-1] = float("nan"), float("inf")
        for i, (size, layout) in enumerate(
            itertools.product(GROUP_SIZES, ("row", "column", "column_tma"))
        ):
            options = {
                "dtype": FORMATS[i % 3],
                "scale_layout": layout,
                "scale_format": ("float32", "ue8m0_packed", "ue8m0")[i // 2 % 3],
                "recipe": GROUP_RECIPES[i // 3 % 3],
            }
            check("quantize_per_token_group", x, size, what=str(shape), **options)
        counts = torch.full(shape[:-2] or (1,), 100, device="cuda")
        check("quantize_per_token_group", x, 128, counts, dtype=E4M3, what=f"{shape} counts")
        for layout in ("linear", "swizzled_128x4"):
            check("quantize_mxfp8", x, dtype=E4M3, scale_layout=layout)


def test_views_are_read_in_place() -> None:
    x = randn(70, 144)
    for name, view in views().items():
        v = view(x)
        check("quantize_per_token_group", v, 64, dtype=E4M3, what=name)
        check("quantize_block", v, 32, 32, dtype=E4M3, what=name)
        check("quantize_per_token_group_both", v, 32, dtype=E4M3, what=name)
        check("quantize_block_both", v, 32, 32, dtype=E4M3, what=name)
        check("quantize_mxfp8", v, dtype=E4M3, what=name)


def test_out_writes_its_rows_and_nothing_else() -> None:
    x = randn(37, 200)
    for name, args in (
        ("quantize_per_token_group", (64,)),
        ("quantize_mxfp8", ()),
        ("quantize_block", (16, 16)),
        ("quantize_per_token_group_both", (64,)),
        ("quantize_block_both", (64, 64)),
    ):
        expected = getattr(reference, name)(x.cpu(), *args, dtype=E4M3)
        where = "quantize_both" if name.endswith("_both") else name
        for pitch, shift in ((256, 0), (203, 1)):
            memory = torch.full((39 * pitch,), 0xAB, dtype=torch.uint8, device="cuda")
            data = memory[pitch + shift :].as_strided((37, 200), (pitch, 1))
            names = ["data", "scale_inv", "data_t", "scale_inv_t"][: len(expected)]
            buffers = {
                n: torch.empty_like(t, device="cuda") for n, t in zip(names, expected, strict=True)
            }
            buffers["data"] = data
            getattr(module(where), name).out(x, *args, dtype=E4M3, **buffers)
            same([data.contiguous(), *list(buffers.values())[1:]], expected, what=name)
            rest = torch.ones_like(memory, dtype=torch.bool)
            rest[pitch + shift :].as_strided((37, 200), (pitch, 1)).fill_(False)
            assert bool((memory[rest] == 0xAB).all()), (name, pitch)


@pytest.mark.parametrize("scale_layout", ["row", "column", "column_tma"])
def test_rows_past_the_count_are_left_alone(scale_layout: str) -> None:
    kernel = module("quantize_per_token_group").quantize_per_token_group
    for experts, rows in ((5, 131), (300, 3), (3, 2000)):
        x = randn(experts, rows, 512)
        counts = torch.randint(-1, rows + 2, (experts,), device="cuda")
        for e in range(experts):
            x[e, max(int(counts[e]), 0) :] = float("nan")
        options = {"dtype": E4M3, "scale_layout": scale_layout}
        check("quantize_per_token_group", x, 128, counts, **options)
        whole = kernel(x, 128, counts, **options)
        buffers = [torch.full_like(t.view(torch.uint8), 0x5A).view(t.dtype) for t in whole]
        kernel.out(
            x, 128, counts, zero_padding=False, data=buffers[0], scale_inv=buffers[1], **options
        )
        there = torch.arange(rows, device="cuda") < counts[:, None]
        assert torch.equal(buffers[0].view(torch.uint8)[there], whole[0].view(torch.uint8)[there])
        assert bool((buffers[0].view(torch.uint8)[~there] == 0x5A).all())
        untouched = torch.tensor([0x5A] * 4, dtype=torch.uint8).view(torch.float32).item()
        got, want = (
            t if scale_layout == "row" else t.transpose(-1, -2) for t in (buffers[1], whole[1])
        )
        assert torch.equal(got[:, :rows][there], want[:, :rows][there])
        assert bool((got[:, :rows][~there] == untouched).all())
        assert bool((got[:, rows:] == 0).all())


def _calls() -> dict[str, Callable[[Tensor], object]]:
    group, block = (
        module("quantize_per_token_group").quantize_per_token_group,
        module("quantize_block").quantize_block,
    )
    both, counts = module("quantize_both"), torch.tensor([77], device="cuda")
    mxfp8 = module("quantize_mxfp8").quantize_mxfp8
    swizzled = {"dtype": E4M3, "scale_layout": "swizzled_128x4"}
    return {
        "group": lambda x: group(x, 128, dtype=E4M3),
        "packed": lambda x: group(
            x, 64, dtype=E4M3, scale_format="ue8m0_packed", scale_layout="column_tma"
        ),
        "counts": lambda x: group(x, 128, counts, dtype=torch.int8),
        "block": lambda x: block(x, 128, 128, dtype=E4M3, scale_layout="row_padded"),
        "mxfp8": lambda x: mxfp8(x, **swizzled),
        "both": lambda x: both.quantize_per_token_group_both(x, 128, dtype=E4M3),
        "block both": lambda x: both.quantize_block_both(x, 128, 128, dtype=E4M3),
        "both 256": lambda x: both.quantize_per_token_group_both(x, 256, dtype=E4M3),
        "mxfp8 both": lambda x: both.quantize_mxfp8_both(x, **swizzled),
    }


def test_one_launch_that_can_be_captured_and_never_waits() -> None:
    x = randn(300, 1000)
    for name, call in _calls().items():
        assert count_launches(call, x) == 1, name
        assert_no_sync(call, x)
        assert_capturable(call, x, replays=2)


def test_no_rows() -> None:
    for shape in ((0, 64), (3, 0, 64)):
        x = randn(*shape)
        check("quantize_per_token_group", x, 16, dtype=E4M3, scale_layout="column_tma")
        check("quantize_mxfp8", x, dtype=E4M3, scale_layout="swizzled_128x4")
        check("quantize_block", x, 16, 16, dtype=E4M3)


def test_many_rows_of_blocks() -> None:
    x = randn(16 * 70_000, 16)
    check("quantize_block", x, 16, 16, dtype=E4M3)
    check("quantize_per_token_group_both", x[:140_000], 16, dtype=E4M3)
    check("quantize_block_both", x[:140_000], 16, 16, dtype=E4M3)
    check("quantize_per_token_group", randn(70_000, 2, 16), 16, dtype=E4M3, scale_layout="column")


# With how often 25,856 rows have to be repeated for more than 65,535 tiles below each other.
MANY_TILES = [
    ("quantize_mxfp8", (), 326, {"scale_layout": "linear"}),
    ("quantize_mxfp8", (), 326, {"scale_layout": "swizzled_128x4"}),
    ("quantize_mxfp8_both", (), 326, {"scale_layout": "linear"}),
    ("quantize_mxfp8_both", (), 326, {"scale_layout": "swizzled_128x4"}),
    ("quantize_per_token_group_both", (128,), 326, {"scale_layout": "row"}),
    ("quantize_per_token_group_both", (256,), 650, {"scale_layout": "row"}),
    ("quantize_block_both", (128, 128), 326, {"scale_layout": "row"}),
    ("quantize_block_both", (16, 16), 326, {"scale_layout": "row"}),
]


def _check_repeated(name: str, x: Tensor, times: int, *args: int, **options: Any) -> None:
    """``x`` so many times below itself has its results so many times."""
    got = quantize(name, x.repeat(times, *[1] * (x.dim() - 1)), *args, dtype=E4M3, **options)
    expected = []
    for i, t in enumerate(getattr(reference, name)(x.cpu(), *args, dtype=E4M3, **options)):
        t = as_bytes(t).cuda()
        if i < 2:
            t = t.repeat(times, *[1] * (t.dim() - 1))
        elif i == 3 and options["scale_layout"] == "swizzled_128x4":
            t = t.repeat(times, 1).view(len(t), -1)  # tiles follow each other
        else:
            t = t.repeat(1, times)
        expected.append(t)
    same(got, expected, what=f"{name} {args} {options}")


@pytest.mark.parametrize(("name", "args", "times", "options"), MANY_TILES)
def test_many_tiles(name: str, args: tuple[int, ...], times: int, options: dict[str, Any]) -> None:
    _check_repeated(name, randn(256 * 101, 16), times, *args, **options)


def test_many_matrices() -> None:
    for rows, cols, side in ((16, 16, 16), (3, 40, 32)):
        _check_repeated("quantize_block", randn(137, rows, cols), 512, side, side)


def _beyond() -> tuple[Tensor, int]:
    """A matrix of more than 2^31 elements, zeros but for its first and last rows, and its rows."""
    rows, cols = 2**19 + 130, 4096
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-256:] = randn(256, cols)
    x[:256] = randn(256, cols)
    return x, rows


def test_more_than_2_to_the_31_elements() -> None:
    room_for(24)
    x, rows = _beyond()
    tail = slice(rows - rows % 128 - 128, rows)
    for name, args, size in (
        ("quantize_per_token_group", (128,), 128),
        ("quantize_mxfp8", (), 32),
        ("quantize_block", (128, 128), 128),
        ("quantize_per_token_group_both", (128,), 128),
        ("quantize_block_both", (128, 128), 128),
        ("quantize_mxfp8_both", (), 32),
    ):
        layout = {"scale_layout": "row"} if "group" in name else {}
        got = quantize(name, x, *args, dtype=E4M3, **layout)
        for part in (slice(0, 128), tail):
            expected = getattr(reference, name)(x[part].cpu(), *args, dtype=E4M3, **layout)
            first = part.start // size
            start = first if "block" in name else part.start
            groups = slice(start, start + len(expected[1]))
            same([got[0][part], got[1][groups]], expected[:2], what=name)
            if len(got) > 2:
                same(
                    [got[2][:, part].contiguous(),
                     as_bytes(got[3])[:, first : first + expected[3].shape[1]].contiguous()],
                    expected[2:],
                    what=f"{name} transposed",
                )  # fmt: skip
        del got


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("quantize_mxfp8", 32, {"scale_layout": "swizzled_128x4"}),
        ("quantize_per_token_group", 128, {"scale_layout": "row"}),
        ("quantize_per_token_group", 128, {"scale_layout": "column"}),
        ("quantize_per_token_group", 128, {"scale_layout": "row", "scale_format": "ue8m0_packed"}),
        (
            "quantize_per_token_group",
            16,
            {"scale_layout": "column_tma", "scale_format": "ue8m0_packed"},
        ),
    ],
)
def test_scales_of_more_than_2_to_the_31_elements(
    name: str, size: int, options: dict[str, Any]
) -> None:
    """Wherever they lie, and back."""
    room_for(16)
    x, rows = _beyond()
    args = () if name == "quantize_mxfp8" else (size,)
    layout = {"scale_layout": options["scale_layout"]}
    data, scales = quantize(name, x, *args, dtype=E4M3, **options)
    values = module("dequantize").dequantize(data, scales, 1, size, **layout)
    for part in (slice(0, 128), slice(2**19 - 128, 2**19), slice(2**19, rows)):
        codes, factors = getattr(reference, name)(x[part].cpu(), *args, dtype=E4M3, **options)
        same([values[part]], reference.dequantize(codes, factors, 1, size, **layout))
        if "column" in layout["scale_layout"]:
            mine, factors = scales[:, part].contiguous(), factors[:, : len(codes)].contiguous()
        else:
            mine = scales[part.start : part.start + len(factors)]
        same([data[part], mine], [codes, factors])


def test_bad_arguments_are_refused() -> None:
    x, codes = randn(4, 64), torch.zeros(4, 64, dtype=torch.int8, device="cuda")
    back = module("dequantize").dequantize
    for call, match in (
        (lambda: quantize("quantize_per_token_group", x, 48, dtype=E4M3), "group_size"),
        (lambda: quantize("quantize_per_token_group", x, 16, dtype=torch.bfloat16), "dtype"),
        (lambda: quantize("quantize_per_token_group", x, 16, dtype=E4M3, eps=0.0), "eps"),
        (lambda: quantize("quantize_per_token_group", x, 16, dtype=E4M3, recipe="mx"), "recipe"),
        (lambda: quantize("quantize_block", x, 16, 32, dtype=E4M3), "block"),
        (lambda: quantize("quantize_mxfp8", x, dtype=torch.int8), "dtype"),
        (
            lambda: quantize("quantize_per_token_group_both", x[None], 16, dtype=E4M3),
            "M and K >= 1",
        ),
        (lambda: quantize("quantize_per_token_group", x, 16, x, dtype=E4M3), "counts"),
        (lambda: back(codes, torch.ones(4, 6, device="cuda"), 1, 12), "multiple of 16"),
        (lambda: back(codes, torch.ones(4, 4, device="cuda"), -1, 16), "0 or more"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call()
