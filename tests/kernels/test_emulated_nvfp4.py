"""The NVFP4 kernels for many rows, on a device so small that its rows are many, and for rows that
lie between words of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick import in_quick
from samples import byte_view, randn
from torch import Tensor

from jitquant import reference
from jitquant.testing import bytes_of

from .emulated import Machine, poisoned

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SWIZZLED = "swizzled_128x4"
MODULES = (
    "quantize_nvfp4",
    "dequant_nvfp4",
    "fused_amax_quantize",
    "fused_rmsnorm_quantize",
    "deinterleave_quantize",
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(MODULES, tmp_path_factory.mktemp("nvfp4"))


def _values(rows: int, cols: int, gap: int, dtype: torch.dtype) -> Tensor:
    """Rows of many magnitudes, ``gap`` NaN apart; some are zero, infinite or hold NaN."""
    generator = torch.Generator().manual_seed(rows * cols)
    x = torch.randn(rows, cols + gap, generator=generator)
    x *= torch.logspace(-4, 3, rows)[:, None]
    x[1::9] = 0
    x[3, cols // 2] = x[5, 0] = x[7] = float("nan")
    x[4, 0] = float("inf")
    x[:, cols:] = float("nan")
    return x.to(dtype)[:, :cols]


def _check(machine: Machine, expected: tuple[Tensor, ...], call: str, *args: Any, **k: Any) -> None:
    """The call writes each byte of its results, as expected."""
    names = ("out",) if len(expected) == 1 else ("x_fp4", "x_sf", "gsa")[: len(expected)]
    outs = {name: poisoned(t) for name, t in zip(names, expected, strict=True)}
    module, function = call.split(".")
    machine.call(module, function, *args, **outs, **k)
    for (name, got), wanted in zip(outs.items(), expected, strict=True):
        if wanted.element_size() > 1:
            assert torch.equal(got.isnan(), wanted.isnan()), f"{name}: NaN elsewhere"
            got, wanted = got.nan_to_num(0.0), wanted.nan_to_num(0.0)
        wrong = (bytes_of(got) != bytes_of(wanted)).nonzero().flatten()
        assert wrong.numel() == 0, f"{name}: {wrong.numel()} bytes differ, first {wrong[:8]}"


@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(
    ("rows", "cols", "gap", "devices"),
    # On devices of 1, 2, 3 and 132 multiprocessors, the last of which has a warp for each sector.
    [
        (129, 4096, 0, (0, 1, 2)),  # a last tile of rows that is nearly empty
        (1000, 528, 0, (1, 2, 3)),  # columns of padding
        (640, 112, 16, (0, 1)),  # rows apart
        (513, 208, 8, (0, 2)),
        (257, 64, 0, (0, 1, 3)),  # steps of whole rows
        (2100, 16, 0, (0, 2)),  # more padding than values
        (33, 2064, 0, (0, 2)),
        (70, 1536, 16, (1, 3)),
        (8, 48, 0, (0, 3)),
        (10, 65552, 0, (0,)),  # rows of more tiles than warps
    ],
)
def test_swizzled_scales(
    machine: Machine, rows: int, cols: int, gap: int, devices: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, k = _values(rows, cols, gap, dtype), {"scale_layout": SWIZZLED}
    by_row = torch.linspace(1e-3, 0.3, rows)
    for recipe, gsa in (
        ("te", torch.tensor([0.003])),
        ("vllm", torch.tensor([1e-36])),
        (("te", "vllm")[rows % 2], by_row),
        (("vllm", "te")[rows % 2], None),
    ):
        if gsa is None:
            expected = reference.quantize_nvfp4(x, recipe=recipe, **k)
            call, inputs = "fused_amax_quantize.amax_quantize_nvfp4", (x,)
        else:
            expected = reference.quantize_nvfp4_from_gsa(x, gsa, recipe=recipe, **k)
            call, inputs = "quantize_nvfp4.quantize_nvfp4", (x, gsa)
        for device in devices:
            machine.use(device, descending=device == 1)
            _check(machine, expected, call, *inputs, recipe=recipe, **k)


@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(
    ("rows", "cols"), [(1, 16), (2, 64), (31, 48), (33, 208), (129, 384), (300, 96), (40, 7)]
)
def test_dequantize_swizzled_scales(
    machine: Machine, rows: int, cols: int, dtype: torch.dtype
) -> None:
    machine.use(1)
    generator = torch.Generator().manual_seed(rows)
    blocks = -(-cols // 16)

    def random_bytes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    codes = random_bytes(rows, blocks * 8).view(torch.float4_e2m1fn_x2)
    padded = random_bytes(-(-rows // 128) * 128, -(-blocks // 4) * 4)
    scales = padded.view(torch.float8_e4m3fn)
    for gsa in (torch.tensor([0.37]), torch.rand(rows, generator=generator)):
        k: dict[str, Any] = {"cols": cols, "scale_layout": SWIZZLED, "dtype": dtype}
        expected = reference.dequantize_nvfp4(codes, scales, gsa, **k)
        _check(machine, expected, "dequant_nvfp4.dequant_nvfp4", codes, scales, gsa, **k)


# Rows, columns and elements between rows, for 4 to 32 lanes a row, with one block or several each,
# of which a last one may be missing. Some kinds of rows hold fewer: the last ones are too long for
# their lanes.
SHORT_ROWS = (
    (33, 16, 0),
    (97, 80, 8),
    (260, 96, 0),
    (90, 192, 0),
    (77, 272, 0),
    (141, 384, 0),
    (70, 528, 16),
    (60, 768, 0),
    (50, 1024, 0),
    (40, 1040, 0),
    (37, 1536, 0),
    (33, 1552, 0),
)


@pytest.mark.parametrize("scale_layout", ["linear", SWIZZLED])
@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(
    ("rows", "cols", "gap"), [*SHORT_ROWS, (33, 2048, 0), (33, 2064, 0), (100, 2800, 16)]
)
def test_short_rows(
    machine: Machine, rows: int, cols: int, gap: int, dtype: torch.dtype, scale_layout: str
) -> None:
    machine.use(0)
    x = _values(rows, cols, gap, dtype)
    k = {"granularity": "row", "scale_layout": scale_layout}
    for recipe in ("te", "vllm"):
        expected = reference.quantize_nvfp4(x, recipe=recipe, **k)
        call = "fused_amax_quantize.amax_quantize_nvfp4"
        _check(machine, expected, call, x, recipe=recipe, **k)


@pytest.mark.parametrize("scale_layout", ["linear", SWIZZLED])
@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(("rows", "cols", "gap"), SHORT_ROWS)
def test_short_norms(
    machine: Machine, rows: int, cols: int, gap: int, dtype: torch.dtype, scale_layout: str
) -> None:
    machine.use(0)
    x = _values(rows, cols, gap, dtype)
    weight = torch.linspace(-2, 3, cols)
    no_number = weight.clone()
    no_number[3] = float("nan")
    for weights in (weight.to(dtype), weight, no_number):
        for granularity in ("row", "tensor"):
            k = {"granularity": granularity, "scale_layout": scale_layout}
            expected = reference.rmsnorm_quantize_nvfp4(x, weights, **k)
            _check_norm(machine, expected, "", x, weights, **k)


@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(("rows", "cols", "gap"), [*SHORT_ROWS, (33, 2064, 0)])
def test_short_rows_of_gate_and_up(
    machine: Machine, rows: int, cols: int, gap: int, dtype: torch.dtype
) -> None:
    machine.use(0)
    fused = _values(rows, 2 * cols, gap, dtype)
    for interleave, scale_layout in ((8, "linear"), (0, "linear"), (8, SWIZZLED)):
        # The gate alone, which leaves no bits open.
        k: dict[str, Any] = {"interleave": interleave, "op": "select"}
        k |= {"granularity": "row", "scale_layout": scale_layout}
        expected = reference.deinterleave_quantize_nvfp4(fused, cols, **k)
        call = "deinterleave_quantize.deinterleave_amax_quantize_nvfp4"
        _check(machine, expected, call, fused, cols, **k)


@pytest.mark.parametrize("scale_layout", ["linear", SWIZZLED])
@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(
    ("rows", "cols", "gap"), [(9, 16, 0), *SHORT_ROWS[3:9], (41, 1040, 32), (12, 3216, 16)]
)
def test_norms_of_many_rows_with_a_residual(
    machine: Machine, rows: int, cols: int, gap: int, dtype: torch.dtype, scale_layout: str
) -> None:
    machine.use(0)
    x = _values(rows, cols, gap, dtype)
    added = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.linspace(-2, 3, cols)
    no_number = weight.clone()
    no_number[3] = float("nan")
    gsa = torch.linspace(1e-3, 0.3, rows)
    for weights in (weight.to(dtype), weight, no_number):
        for given in (None, gsa, gsa[:1].clone()):
            k: dict[str, Any] = {"scale_layout": scale_layout}
            ours, theirs = added.clone(), added.clone()
            if given is None:
                k["granularity"] = "row"
                expected = reference.rmsnorm_quantize_nvfp4(x, weights, residual=theirs, **k)
                _check_norm(machine, expected, "", x, weights, residual=ours, **k)
            else:
                args = (x, weights, given)
                expected = reference.rmsnorm_quantize_nvfp4_from_gsa(*args, residual=theirs, **k)
                _check_norm(machine, expected, "_from_gsa", *args, residual=ours, **k)
            assert torch.equal(ours.nan_to_num(0.5), theirs.nan_to_num(0.5))


def test_short_rows_have_lanes_of_a_warp(machine: Machine) -> None:
    machine.use(0)
    for cols in (128, 384):
        x, weight = randn(64, cols), randn(cols)
        for granularity in ("row", "tensor"):
            k: dict[str, Any] = {"granularity": granularity}
            expected = reference.rmsnorm_quantize_nvfp4(x, weight, **k)
            _check_norm(machine, expected, "", x, weight, **k)
        k = {"granularity": "row"}
        theirs, ours = randn(64, cols, seed=1), randn(64, cols, seed=1)
        expected = reference.rmsnorm_quantize_nvfp4(x, weight, residual=theirs, **k)
        _check_norm(machine, expected, "", x, weight, residual=ours, **k)
        k |= {"interleave": 8, "op": "select"}
        expected = reference.deinterleave_quantize_nvfp4(x, cols // 2, **k)
        call = "deinterleave_quantize.deinterleave_amax_quantize_nvfp4"
        _check(machine, expected, call, x, cols // 2, **k)
    ran = [name for name, ran in machine.kernels().items() if ran and "Bf16" in name]
    for kernel in (
        "lane_norm_kernel<jitquant::Bf16, 2>",
        "lane_norm_kernel<jitquant::Bf16, 3>",
        "norm_piece_kernel<jitquant::Bf16>",
        "row_kernel<jitquant::ResidualSource<jitquant::Bf16>, true, jitquant::LaneTeam>",
        "row_kernel<jitquant::DeinterleaveSource<jitquant::Bf16>, false, jitquant::LaneTeam>",
    ):
        assert any(kernel in name for name in ran), kernel


def _check_norm(
    machine: Machine, expected: tuple[Tensor, ...], kind: str, *args: Any, **k: Any
) -> None:
    """The call writes each byte of its results, as expected."""
    out = [poisoned(t) for t in expected]
    names = ("x_fp4", "x_sf", "inv_rms") if kind else ("x_fp4", "x_sf", "gsa", "inv_rms")
    results = dict(zip(names, out, strict=True))
    machine.call("fused_rmsnorm_quantize", f"rmsnorm_quantize_nvfp4{kind}", *args, **results, **k)
    for name, got, wanted in zip(names, out, expected, strict=True):
        wrong = (byte_view(got) != byte_view(wanted)).nonzero().flatten()
        assert wrong.numel() == 0, f"{name}: {wrong.numel()} bytes differ, first {wrong[:8]}"


@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(
    ("rows", "cols", "gap"), [(8, 15, 0), (9, 33, 0), (40, 1001, 2), (9, 70, 1)]
)
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_between_words(
    machine: Machine, rows: int, cols: int, gap: int, offset: int, dtype: torch.dtype
) -> None:
    machine.use(1)
    memory = torch.full((rows * (cols + gap) + offset,), float("nan"), dtype=dtype)
    x = memory[offset:].as_strided((rows, cols), (cols + gap, 1), offset)
    x.copy_(_values(rows, cols, 0, dtype))
    for granularity in ("tensor", "row"):
        k: dict[str, Any] = {"granularity": granularity}
        expected = reference.quantize_nvfp4(x, **k)
        _check(machine, expected, "fused_amax_quantize.amax_quantize_nvfp4", x, **k)
    gsa = torch.tensor([0.01])
    static = reference.quantize_nvfp4_from_gsa(x, gsa)
    _check(machine, static, "quantize_nvfp4.quantize_nvfp4", x, gsa)
    options: dict[str, Any] = {"cols": cols, "dtype": dtype}
    values = reference.dequantize_nvfp4(*static, gsa, **options)
    _check(machine, values, "dequant_nvfp4.dequant_nvfp4", *static, gsa, **options)


@pytest.mark.parametrize("dtype", in_quick(2, DTYPES))
@pytest.mark.parametrize(("rows", "cols"), [(1, 17), (9, 1043), (3, 7171), (40, 35)])
def test_norms_read_nothing_past_the_end(
    machine: Machine, rows: int, cols: int, dtype: torch.dtype
) -> None:
    """Rows that are not whole, up to the last byte of the memory that they are in."""
    machine.use(0)
    x, weight = randn(rows, cols, dtype=dtype), randn(cols, dtype=dtype, seed=1)
    expected = reference.rmsnorm_quantize_nvfp4(x, weight)
    _check_norm(machine, expected, "", x, weight)
    every_second = torch.cat((x, x), 1).view(2 * rows, cols)[1::2]
    _check_norm(machine, expected, "", every_second, weight)
