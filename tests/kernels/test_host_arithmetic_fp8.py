"""The arithmetic of the 8-bit kernels, compiled for the CPU and swept: the reference's bits."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from host_code import compiled, link
from sweeps import all_bf16, all_bf16_arrangements, all_fp16, same_floats
from torch import Tensor

from jitquant.formats import ACTIVATIONS, FP8_DTYPES, GROUP_DTYPES, GROUP_RECIPES, QUANTIZED_MAX
from jitquant.numerics import fp8, mxfp8, ragged

ROOT = Path(__file__).parents[2]
by_dtype = pytest.mark.parametrize("dtype", GROUP_DTYPES, ids=lambda d: str(d)[6:])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    warnings, include = ("-Wall", "-Werror"), f"-I{ROOT / 'kernels_cu' / 'include'}"
    source = Path(__file__).with_name("host_arithmetic_fp8.cpp")
    library = tmp_path_factory.mktemp("host") / "host_arithmetic_fp8.so"
    link([compiled(["-O2", *warnings, include, source])], library)
    lib = ctypes.CDLL(str(library))
    lib.count_wrong_quotients.restype = ctypes.c_int64
    lib.count_wrong_whole_quotients.restype = ctypes.c_int64
    lib.scale_offset.restype = ctypes.c_int64
    return lib


def p(t: Tensor) -> ctypes.c_void_p:
    assert t.is_contiguous()
    return ctypes.c_void_p(t.data_ptr())


def size(n: int) -> ctypes.c_int64:
    return ctypes.c_int64(n)


def number(x: float) -> ctypes.c_float:
    return ctypes.c_float(x)


def u8(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


@by_dtype
@pytest.mark.parametrize("values", [all_bf16(), all_fp16()], ids=["bf16", "fp16"])
def test_elements_equal_the_reference(
    host: ctypes.CDLL, values: Tensor, dtype: torch.dtype
) -> None:
    x = values.float().reshape(-1).contiguous()
    codes = torch.empty(x.numel(), dtype=torch.uint8)
    host.encode(p(x), size(x.numel()), GROUP_DTYPES.index(dtype), p(codes))
    assert torch.equal(codes, u8(fp8.encode(x, dtype)))


@by_dtype
def test_elements_around_every_tie(host: ctypes.CDLL, dtype: torch.dtype) -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].double()
    middles = ((codes[1:] + codes[:-1]) / 2).float()
    bits = middles.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    x = bits.view(torch.float32).reshape(-1)
    x = torch.cat((x, -x, codes.float(), -codes.float()))
    x = torch.nn.functional.pad(x, (0, -x.numel() % 4))
    got = torch.empty(x.numel(), dtype=torch.uint8)
    host.encode(p(x), size(x.numel()), GROUP_DTYPES.index(dtype), p(got))
    assert torch.equal(got, u8(fp8.encode(x, dtype)))


@by_dtype
def test_decoding_is_pytorchs(host: ctypes.CDLL, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = torch.empty(256)
    host.decode(p(codes), size(256), GROUP_DTYPES.index(dtype), p(got))
    assert same_floats(got, codes.view(dtype).float())


def test_powers_of_two(host: ctypes.CDLL) -> None:
    power, inverse, e8m0 = torch.empty(256), torch.empty(256), torch.empty(256)
    host.powers(p(power), p(inverse), p(e8m0))
    e = torch.arange(256, dtype=torch.int32)
    exact = torch.tensor([2.0 ** (i - 127) for i in range(255)], dtype=torch.float64)
    assert torch.equal(power[:255].double(), exact)
    assert power[255] == math.inf
    exact = torch.tensor([2.0 ** (127 - i) for i in range(256)], dtype=torch.float64)
    assert torch.equal(inverse.double(), exact)
    assert torch.equal(power, fp8.power_of_two(e))
    assert torch.equal(inverse, fp8.inverse_power_of_two(e))
    assert same_floats(e8m0, fp8.decode_e8m0(e.to(torch.uint8)))


def test_exponents_of_every_magnitude(host: ctypes.CDLL) -> None:
    around = torch.arange(-2, 3, dtype=torch.int32)
    powers = torch.arange(256, dtype=torch.int32)[:, None] << 23
    bits = torch.cat(((powers + around).reshape(-1), 0x400000 + around, torch.tensor([0x7FC00000])))
    s = bits[(bits > 0) & (bits <= 0x7FC00000)].to(torch.int32).view(torch.float32)
    s = torch.cat((s, torch.tensor([0.0]), all_bf16().float().abs().reshape(-1)))
    ue8m0, rceil = (torch.empty(s.numel(), dtype=torch.int32) for _ in range(2))
    host.exponents(p(s), size(s.numel()), p(ue8m0), p(rceil))
    assert torch.equal(ue8m0, fp8.ue8m0_exponent(s))
    assert torch.equal(rceil, mxfp8.e8m0_rceil(s))


def host_groups(
    host: ctypes.CDLL, x: Tensor, dtype: torch.dtype, eps: float, recipe: str, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    groups = x.numel() // 16
    codes = torch.empty((groups, 16), dtype=torch.uint8)
    scale_inv, exponent = torch.empty(groups), torch.empty(groups, dtype=torch.int32)
    host.quantize_groups(
        p(x),
        size(groups),
        GROUP_DTYPES.index(dtype),
        number(eps),
        GROUP_RECIPES.index(recipe),
        ctypes.c_bool(ue8m0),
        p(codes),
        p(scale_inv),
        p(exponent),
    )
    return codes, scale_inv, exponent


@by_dtype
@pytest.mark.parametrize("recipe", GROUP_RECIPES)
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("eps", [1e-10, 1e-4, 1e-32, 3.0])
def test_every_bf16_in_groups(
    host: ctypes.CDLL, dtype: torch.dtype, recipe: str, ue8m0: bool, eps: float
) -> None:
    for values in all_bf16_arrangements():
        x = values.float().contiguous()
        codes, scale_inv, exponent = host_groups(host, x, dtype, eps, recipe, ue8m0)
        b = x.abs().amax(dim=1)
        want, want_scale = fp8.quantize_tiles(x, b, dtype, eps, recipe, ue8m0)
        assert same_floats(scale_inv, want_scale)
        assert torch.equal(codes, u8(want))
        if ue8m0:
            assert torch.equal(exponent, fp8.ue8m0_exponent(want_scale))


@by_dtype
@pytest.mark.parametrize("recipe", GROUP_RECIPES)
def test_fp32_of_all_magnitudes_in_groups(
    host: ctypes.CDLL, dtype: torch.dtype, recipe: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, 16, generator=generator)
    x *= torch.logspace(-38, 37, 40_000)[:, None]
    codes, scale_inv, _ = host_groups(host, x, dtype, 1e-32, recipe, False)
    want, want_scale = fp8.quantize_tiles(x, x.abs().amax(dim=1), dtype, 1e-32, recipe, False)
    assert torch.equal(scale_inv, want_scale)
    assert torch.equal(codes, u8(want))


@pytest.mark.parametrize("at_codes", [False, True], ids=["anywhere", "at-codes"])
def test_quotients_are_correctly_rounded(host: ctypes.CDLL, at_codes: bool) -> None:
    n = size(20_000_000)
    assert host.count_wrong_quotients(n, ctypes.c_uint32(1), ctypes.c_bool(at_codes)) == 0


def test_whole_quotients_by_a_multiplication(host: ctypes.CDLL) -> None:
    powers = [2**i + j for i in range(31) for j in (-1, 0, 1)]
    for divisor in {*range(1, 2000), *powers, 7168, 10**9 + 7, 2**31 - 1} - {0}:
        wrong = host.count_wrong_whole_quotients(ctypes.c_uint32(divisor), ctypes.c_uint32(500))
        assert wrong == 0, divisor


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=lambda d: str(d)[6:])
def test_every_bf16_in_mx_blocks(host: ctypes.CDLL, dtype: torch.dtype) -> None:
    for values in all_bf16_arrangements():
        x = values.float().reshape(2048, 32).contiguous()
        codes, exponent = (
            torch.empty(2048, 32, dtype=torch.uint8),
            torch.empty(2048, dtype=torch.int32),
        )
        format_, unused = GROUP_DTYPES.index(dtype), torch.empty(2048)
        host.quantize_mx(p(x), size(2048), format_, p(codes), p(unused), p(exponent))
        data, scales = mxfp8.quantize_mxfp8(x, dtype=dtype)
        assert torch.equal(codes, u8(data))
        assert torch.equal(exponent, u8(scales).reshape(-1).int())


@by_dtype
def test_tensor_scale_of_every_amax(host: ctypes.CDLL, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(0, 0x7F800000, (300_000,), generator=generator, dtype=torch.int32)
    least = torch.tensor([1e-45, 3.4028235e38, 1.3e-36])
    a = torch.cat((all_bf16().float().reshape(-1), spread.view(torch.float32), least)).abs()
    scale, scale_inv = torch.empty_like(a), torch.empty_like(a)
    top = QUANTIZED_MAX[dtype]
    host.tensor_scales(p(a), size(a.numel()), GROUP_DTYPES.index(dtype), p(scale), p(scale_inv))
    want = fp8.scale_from_amax(a, top)
    assert torch.equal(scale, want)
    assert torch.equal(scale_inv, fp8.scale_inv_of(want, a, dtype))
    bounded = torch.empty_like(a)
    host.bounded(p(a), size(a.numel()), number(0.25), number(1.5), p(bounded))
    assert same_floats(bounded, a.clamp(0.25, 1.5))


@pytest.mark.parametrize("activation", range(1, len(ACTIVATIONS)), ids=ACTIVATIONS[1:])
def test_activations(host: ctypes.CDLL, activation: int) -> None:
    ends = torch.tensor([0.0, 80.0, 1.5e13, 3e38, torch.inf, torch.nan])
    x = torch.cat((torch.linspace(-12, 12, 4001), ends, -ends))
    value, slope = torch.empty_like(x), torch.empty_like(x)
    host.activations(p(x), size(x.numel()), activation, p(value), p(slope))
    name = ACTIVATIONS[activation]
    for got, want in (
        (value, ragged.activated(x, name)),
        (slope, ragged.activation_derivative(x, name)),
    ):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6, equal_nan=True)
        if name in ("relu", "srelu"):
            assert same_floats(got, want)


@pytest.mark.parametrize("layout", ["row", "column", "column_tma"])
def test_where_scales_lie(host: ctypes.CDLL, layout: str) -> None:
    batches, rows, cols = 3, 6, 5
    values = torch.arange(batches * rows * cols, dtype=torch.float32) + 1
    stored = fp8.store_scales(values.reshape(-1, cols), (batches, rows), "float32", layout)
    flat = stored.reshape(-1)
    stored_rows = 8 if layout == "column_tma" else rows
    for i in range(values.numel()):
        batch, row, col = i // (rows * cols), i // cols % rows, i % cols
        where = (size(v) for v in (stored_rows, cols, batch, row, col))
        assert flat[host.scale_offset(int(layout != "row"), *where)] == values[i]


@pytest.mark.parametrize(
    ("offsets", "sizes", "numel"),
    [
        ([0, 5, 5, 9], None, 9),
        ([0, 8, 16], [3, 8], 16),
        ([-4, 3, 100, 200], [9, 900, 5], 20),
        ([7, 3, 5], None, 9),
        ([0, 4, 8], [-1, 2**62], 8),
    ],
)
def test_bounds_of_groups(
    host: ctypes.CDLL, offsets: list[int], sizes: list[int] | None, numel: int
) -> None:
    at = torch.tensor(offsets)
    lengths = None if sizes is None else torch.tensor(sizes)
    start, stop = (torch.empty(len(offsets) - 1, dtype=torch.int64) for _ in range(2))
    pointer: Any = None if lengths is None else p(lengths)
    for row in (1, 16):
        shape = (size(start.numel()), size(numel * row), size(row))
        host.all_bounds(p(at), pointer, *shape, p(start), p(stop))
        want = ragged.segment_bounds(at, lengths, numel * row, row)
        assert torch.equal(start, want[0])
        assert torch.equal(stop, want[1])
