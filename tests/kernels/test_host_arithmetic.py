"""The arithmetic of the kernels, compiled for the CPU and swept: the bits of the reference."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from host_code import compiled, link
from sweeps import GSA_GRID, all_bf16, all_bf16_arrangements, all_fp16, same_floats
from torch import Tensor

from jitquant import reference
from jitquant.formats import FP4_DTYPE, FP32_MAX, INPUT_DTYPES, RECIPES, SCALE_DTYPE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    warnings, include = ("-Wall", "-Werror"), f"-I{ROOT / 'kernels_cu' / 'include'}"
    source = Path(__file__).with_name("host_arithmetic.cpp")
    library = tmp_path_factory.mktemp("host") / "host_arithmetic.so"
    link([compiled(["-O2", *warnings, include, source])], library)
    lib = ctypes.CDLL(str(library))
    lib.count_wrong_e2m1.restype = ctypes.c_int64
    lib.count_wrong_codes.restype = ctypes.c_int64
    lib.count_wrong_reciprocals.restype = ctypes.c_int64
    lib.reciprocal_root.restype = ctypes.c_float
    lib.swizzled_offset.restype = ctypes.c_int64
    lib.swizzled_offset.argtypes = [ctypes.c_int64] * 3
    lib.amax_ignoring_nan.restype = ctypes.c_float
    return lib


def _pointer(t: Tensor) -> ctypes.c_void_p:
    assert t.is_contiguous()
    return ctypes.c_void_p(t.data_ptr())


def _map(function: ctypes._CFuncPtr, x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    function(_pointer(x), _pointer(out), ctypes.c_int64(x.numel()))
    return out


def _host_quantize(
    host: ctypes.CDLL, x: Tensor, value: float, recipe: str, mode: int = 0, divisor: float = 2688.0
) -> tuple[Tensor, Tensor]:
    blocks = x.numel() // 16
    codes = torch.empty((blocks, 8), dtype=torch.uint8)
    scales = torch.empty(blocks, dtype=torch.uint8)
    host.quantize_blocks(
        _pointer(x),
        INPUT_DTYPES.index(x.dtype),
        ctypes.c_int64(blocks),
        mode,
        ctypes.c_float(value),
        ctypes.c_float(divisor),
        RECIPES.index(recipe),
        _pointer(codes),
        _pointer(scales),
    )
    return codes, scales


@pytest.mark.parametrize("exponent", [3, 127, 128, 251])
def test_reciprocals_are_correctly_rounded(host: ctypes.CDLL, exponent: int) -> None:
    assert host.count_wrong_reciprocals(exponent) == 0


def test_reciprocal_roots_at_the_ends(host: ctypes.CDLL) -> None:
    values = (0.0, 2.0**-149, 2.0**-126, FP32_MAX, math.inf)
    roots = [host.reciprocal_root(ctypes.c_float(a)) for a in values]
    assert roots == [math.inf, *(float(1 / np.sqrt(np.float32(a))) for a in values[1:])]
    assert math.isnan(host.reciprocal_root(ctypes.c_float(math.nan)))


# Every fp32 pattern from 0 to 8 and its negative, which holds every tie, and a stretch of the rest.
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0x3E000000, 0x41000000),
        (0xBF000000, 0xC1000000),
        (0x00000000, 0x00100000),
        (0x7F7F0000, 0x7FC10000),
        (0xFF7F0000, 0xFFC10000),
    ],
)
def test_e2m1_is_the_nearest_with_ties_to_even(host: ctypes.CDLL, first: int, last: int) -> None:
    assert host.count_wrong_e2m1(ctypes.c_uint32(first), ctypes.c_uint32(last)) == 0


@pytest.mark.parametrize("values", [all_bf16(), all_fp16()], ids=["bf16", "fp16"])
def test_elements_equal_the_reference(host: ctypes.CDLL, values: Tensor) -> None:
    x = values.float()
    number = ~torch.isnan(x)
    e2m1 = _map(host.encode_e2m1, x, torch.uint8)
    assert torch.equal(e2m1[number], reference.encode_e2m1(x).view(torch.uint8)[number])
    e4m3 = _map(host.encode_e4m3, x, torch.uint8)
    assert torch.equal(e4m3[number], reference.encode_e4m3(x).view(torch.uint8)[number])
    assert bool((e4m3[~number] & 0x7F == 0x7F).all())


def test_decoding_equals_the_formats(host: ctypes.CDLL) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert same_floats(
        _map(host.decode_e4m3, codes, torch.float32), codes.view(torch.float8_e4m3fn).float()
    )
    nibbles = _map(host.decode_e2m1, codes[:16], torch.float32)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = torch.tensor(magnitudes + [-m for m in magnitudes])
    assert same_floats(nibbles, expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gsa", GSA_GRID)
@pytest.mark.parametrize(
    "arrangements",
    [
        all_bf16_arrangements(),
        [x.float() for x in all_bf16_arrangements()],
        [all_fp16(), all_fp16().T.contiguous().reshape(-1, 16)],
    ],
    ids=["bf16", "bf16 as fp32", "fp16"],
)
def test_every_value_with_a_given_gsa(
    host: ctypes.CDLL, recipe: str, gsa: float, arrangements: list[Tensor]
) -> None:
    for x in arrangements:
        codes, scales = _host_quantize(host, x, gsa, recipe)
        x_fp4, x_sf = reference.quantize_nvfp4_from_gsa(x, torch.tensor([gsa]), recipe=recipe)
        assert torch.equal(scales, x_sf.view(torch.uint8).reshape(-1))
        assert torch.equal(codes, x_fp4.view(torch.uint8).reshape(-1, 8))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("where", ["near a half", "of an amax"])
def test_halves_go_to_even_codes(
    host: ctypes.CDLL, dtype: torch.dtype, bits: int, where: str
) -> None:
    """Products half way between two codes, and their neighbors on both sides."""
    values = torch.arange(2 ** (bits - 1), 2**bits)
    if bits > 8:
        values = values[torch.randperm(len(values), generator=torch.manual_seed(0))[:160]]
    if where == "near a half":
        # As many units in the last place away from what has such a product.
        exact = torch.cat([values, values / 5]).float() / 2**bits
        d = (exact.view(torch.int32)[:, None] + torch.arange(-12, 13)).view(torch.float32)
    else:
        stored = torch.arange(8, 16) / 8
        d = stored * (1 / (2688 / (values / 2**bits).float()))[:, None]
    d = d.flatten().contiguous()
    halves = ctypes.c_int64(0)
    wrong = host.count_wrong_codes(
        _pointer(d), ctypes.c_int64(d.numel()), INPUT_DTYPES.index(dtype), ctypes.byref(halves)
    )
    assert wrong == 0
    assert halves.value > 100


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("divisor", [2688.0, 1536.0])
@pytest.mark.parametrize("everything", [all_bf16(), all_fp16()], ids=["bf16", "fp16"])
def test_every_value_with_its_own_gsa(
    host: ctypes.CDLL, recipe: str, divisor: float, everything: Tensor
) -> None:
    finite = everything[torch.isfinite(everything.float()).all(dim=1)]
    unusual = everything[~torch.isfinite(everything.float()).all(dim=1)]
    inputs = [everything, finite, finite[:64], unusual, torch.zeros_like(finite[:2])]
    for x in [*inputs, *(x.float() for x in inputs)]:
        blocks = ctypes.c_int64(x.numel() // 16)
        amax = host.amax_ignoring_nan(_pointer(x), INPUT_DTYPES.index(x.dtype), blocks)
        codes, scales = _host_quantize(host, x, amax, recipe, 1, divisor)
        x_fp4, x_sf, gsa = reference.quantize_nvfp4(x, divisor, recipe=recipe)
        assert np.float32(amax) / np.float32(divisor) == gsa.item()
        assert torch.equal(scales, x_sf.view(torch.uint8).reshape(-1))
        assert torch.equal(codes, x_fp4.view(torch.uint8).reshape(-1, 8))


@pytest.mark.parametrize("gsa", [0.0, 1e-45, 3e-39, 1.0 / 2688.0, 0.7, 1e30, 3.4e38])
def test_every_code_with_every_scale_dequantizes(host: ctypes.CDLL, gsa: float) -> None:
    # A block of codes 0 to 15 and one of 15 to 0 for every scale.
    row = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    other = torch.tensor([0xEF, 0xCD, 0xAB, 0x89, 0x67, 0x45, 0x23, 0x01], dtype=torch.uint8)
    codes = torch.stack([row, other]).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat_interleave(2)
    out = torch.empty(512, 16)
    host.dequantize_blocks(
        _pointer(codes), _pointer(scales), ctypes.c_int64(512), ctypes.c_float(gsa), _pointer(out)
    )
    expected = reference.dequantize_nvfp4(
        codes.view(FP4_DTYPE),
        scales.view(SCALE_DTYPE).unsqueeze(1),
        torch.tensor([gsa]),
        dtype=torch.float32,
    )
    assert same_floats(out, expected[0])


def test_swizzle_equals_the_reference(host: ctypes.CDLL) -> None:
    rows, groups = 300, 10
    scales = torch.arange(rows * groups, dtype=torch.int32).to(torch.uint8).reshape(rows, groups)
    swizzled = reference.swizzle_128x4(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    flat, padded = swizzled.reshape(-1), swizzled.shape[1]
    for row in range(0, rows, 7):
        for block in range(groups):
            assert flat[host.swizzled_offset(row, block, padded)] == scales[row, block]
