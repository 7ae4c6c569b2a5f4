"""The product in FP8, and the arguments of scaled_mm, read as cuBLASLt reads them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

import jitquant
from jitquant.nn import _matmul
from jitquant.tensors.fp8 import QuantizedTensor

from .helpers import spread, sqnr

# No two sizes alike, one tile, and a number of tiles that is not a multiple of four.
SHAPES = pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 640, 384), (384, 512, 1152), (128, 256, 128), (512, 128, 512)]
)


def fp8_operands(m: int, n: int, k: int, **how: Any) -> tuple[QuantizedTensor, QuantizedTensor]:
    a = jitquant.quantize_per_token_group(spread(m, k), scale_layout="column", **how)
    return a, jitquant.quantize_block(spread(n, k, 1), scale_layout="row_padded", **how)


def factors(scale: Tensor, recipe: Any, rows: int, cols: int) -> Tensor:
    """Scale of each element of an operand (rows, K), by the shapes and strides that PyTorch checks
    (aten/src/ATen/native/cuda/ScaledBlas.cpp): read by address, not by view."""
    assert scale.dtype == torch.float32
    row, col = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    memory = scale.as_strided((scale.untyped_storage().nbytes() // 4,), (1,), 0)
    if recipe is ScalingType.BlockWise1x128:
        assert scale.shape == (rows, cols // 128)
        assert scale.stride() == (1, rows)
        return memory[scale.storage_offset() + row + (col // 128) * rows]
    assert recipe is ScalingType.BlockWise128x128
    leading = (cols // 128 + 3) // 4 * 4
    assert scale.shape == (leading, rows // 128)
    assert scale.stride() == (1, leading)
    return memory[scale.storage_offset() + col // 128 + (row // 128) * leading]


def mxfp8_factors(scale: Tensor, rows: int, cols: int) -> Tensor:
    """The same for E8M0 per 32 elements, tile addresses as in cuBLAS' documentation."""
    assert scale.dtype == torch.float8_e8m0fnu
    assert scale.is_contiguous()
    groups = cols // 32
    assert scale.numel() == -(-rows // 128) * 128 * -(-groups // 4) * 4
    m, g = torch.arange(rows)[:, None], torch.arange(groups)[None, :]
    address = (m // 128 * -(-groups // 4) + g // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + g % 4
    return scale.flatten().double()[address].repeat_interleave(32, dim=1)


def as_cublas_reads(arguments: dict[str, Any]) -> Tensor:
    """The FP8 product of scaled_mm's arguments, in float64."""
    a, b = arguments["mat_a"], arguments["mat_b"]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    (m, k), n = a.shape, b.shape[1]
    if arguments["scale_recipe_a"] is ScalingType.BlockWise1x32:
        assert arguments["scale_recipe_b"] is ScalingType.BlockWise1x32
        assert arguments["swizzle_a"] == arguments["swizzle_b"] == SwizzleType.SWIZZLE_32_4_4
        a = a.double() * mxfp8_factors(arguments["scale_a"], m, k)
        return a @ (b.t().double() * mxfp8_factors(arguments["scale_b"], n, k)).T
    a = a.double() * factors(arguments["scale_a"], arguments["scale_recipe_a"], m, k)
    b = b.t().double() * factors(arguments["scale_b"], arguments["scale_recipe_b"], n, k)
    return a @ b.T


@SHAPES
def test_groups_by_blocks(m: int, n: int, k: int) -> None:
    a, b = fp8_operands(m, n, k)
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
    got = as_cublas_reads(_matmul.fp8_arguments(a, b, torch.bfloat16))
    assert sqnr(got, want) > 120
    assert sqnr(_matmul.fp8_mm(a, b, torch.float32), want) > 110


@SHAPES
def test_groups_by_groups(m: int, n: int, k: int) -> None:
    a = jitquant.quantize_per_token_group(spread(m, k), scale_layout="column")
    b = jitquant.quantize_per_token_group(spread(n, k, 1), scale_layout="column")
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
    got = as_cublas_reads(_matmul.fp8_arguments(a, b, torch.bfloat16))
    assert sqnr(got, want) > 120
    assert sqnr(_matmul.fp8_mm(a, b, torch.float32), want) > 110


@SHAPES
@pytest.mark.parametrize("in_blocks", [False, True])
def test_powers_of_two_are_scales_of_mxfp8(m: int, n: int, k: int, in_blocks: bool) -> None:
    a, b = fp8_operands(m, n, k, scale_format="ue8m0")
    if not in_blocks:
        x = spread(n, k, 1)
        b = jitquant.quantize_per_token_group(x, scale_layout="column", scale_format="ue8m0")
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
    got = as_cublas_reads(_matmul.mxfp8_arguments(a, b, torch.bfloat16))
    assert torch.equal(got, want)


def test_scales_of_mxfp8_at_the_ends() -> None:
    x = torch.zeros(128, 512, dtype=torch.float32)
    x[0, 128:256] = torch.finfo(torch.float32).max
    x[1, 256:384] = float("nan")
    for q in (
        jitquant.quantize_per_token_group(x, scale_layout="column", scale_format="ue8m0"),
        jitquant.quantize_block(x, scale_layout="row_padded", scale_format="ue8m0"),
    ):
        factors = mxfp8_factors(_matmul._mxfp8_scales(q), *x.shape)
        rows, cols = q.block[0], q.block[1]
        want = q.scale_inv.double()[:, : 512 // cols]
        want = want.repeat_interleave(rows, dim=0).repeat_interleave(cols, dim=1)
        torch.testing.assert_close(factors, want, rtol=0, atol=0, equal_nan=True)


def test_an_untransposed_scale_is_found_out() -> None:
    a, b = fp8_operands(128, 512, 512)  # where the wrong order has the right shape
    arguments = _matmul.fp8_arguments(a, b, torch.bfloat16)
    want = as_cublas_reads(arguments)
    wrong = as_cublas_reads(arguments | {"scale_b": b.scale_inv.t().contiguous().t()})
    assert sqnr(wrong, want) < 40  # the right order has more than 120


def test_where_scaled_mm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, cuda, fp8, nvfp4 in (
        (8, "13.0", False, False),
        (9, "12.8", False, False),
        (9, "12.9", True, False),
        (9, "13.0", True, False),
        (10, "13.0", False, True),
        (12, "13.0", False, True),
    ):
        monkeypatch.setattr(_matmul, "_capability", lambda _, major=major: (major, 0))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        device = torch.device("cuda", 0)
        assert (_matmul.has_fp8_blockwise(device), _matmul.has_microscaling(device)) == (fp8, nvfp4)
    assert not _matmul.has_fp8_blockwise(torch.device("cpu"))
    assert not _matmul.has_microscaling(torch.device("cpu"))


@pytest.mark.parametrize("where", ["has_fp8_blockwise", "has_microscaling"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_called_on_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, where: str
) -> None:
    """The path to scaled_mm, with scaled_mm replaced by a reading of its arguments."""
    calls = []

    def scaled_mm(*, output_dtype: torch.dtype, **arguments: Any) -> Tensor:
        calls.append(output_dtype)
        return as_cublas_reads(arguments).to(output_dtype)

    a, b = fp8_operands(256, 640, 384, scale_format="ue8m0")
    want = _matmul.fp8_mm(a, b, dtype)
    monkeypatch.setattr(_matmul, where, lambda device: True)
    monkeypatch.setattr(_matmul, "scaled_mm", scaled_mm)
    got = _matmul.fp8_mm(a, b, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert calls == [torch.bfloat16 if dtype == torch.bfloat16 else torch.float32]
    _matmul.fp8_mm(*fp8_operands(256, 640, 384), dtype)  # of 10.0 no scales in fp32
    assert len(calls) == (2 if where == "has_fp8_blockwise" else 1)


def test_opcheck() -> None:
    # Without test_schema: PyTorch cannot compare these dtypes.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    a, b = fp8_operands(128, 256, 128)
    parts = (a.data, a.stored_scales, b.data, b.stored_scales, 128, "float32", torch.bfloat16)
    torch.library.opcheck(torch.ops.jitquant.fp8_mm.default, parts, test_utils=checks)


def test_is_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not _matmul.is_hopper(torch.device("cpu"))
    for found, is_it in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(_matmul, "_capability", lambda _, found=found: found)
        assert _matmul.is_hopper(cuda) is is_it
        assert _matmul.major(cuda) == found[0]
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert _matmul.capability(cuda) == (0, 0)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("error")
def test_a_compiled_function_knows_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_matmul, "_capability", functools.cache(lambda index: (9 + index, 0)))

    def f(x: Tensor) -> Tensor:
        first, second = (torch.device("cuda", index) for index in range(2))
        x = x + 1 if _matmul.is_hopper(first) else x
        return x + _matmul.major(second) if _matmul.block_scale_format(second) == "ue8m0" else x

    assert torch.compile(f, fullgraph=True, backend="eager")(torch.zeros(1)) == 11
