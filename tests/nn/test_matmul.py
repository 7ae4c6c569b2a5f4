"""The two products, and the arguments of scaled_mm, read as cuBLASLt reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

import jitquant
from jitquant.nn import _matmul
from jitquant.quantized import QuantizedActivation
from jitquant.quantized_tensor import QuantizedTensor

from .helpers import sqnr

# No two sizes alike, one tile, and a number of tiles that is no multiple of four.
SHAPES = pytest.mark.parametrize(
    ("m", "n", "k"), [(256, 640, 384), (384, 512, 1152), (128, 256, 128), (512, 128, 512)]
)
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def spread(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Rows and columns of several magnitudes: a scale in the wrong place is seen."""
    x = randn(rows, cols, dtype=torch.float32, seed=seed)
    return x * torch.logspace(-1, 1, rows)[:, None] * torch.logspace(-1, 1, cols)


def fp8_operands(m: int, n: int, k: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    a = jitquant.quantize_group(spread(m, k), scale_layout="column")
    return a, jitquant.quantize_block(spread(n, k, 1), scale_layout="row_padded")


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


def as_cublas_reads(arguments: dict[str, Any]) -> Tensor:
    """The FP8 product of scaled_mm's arguments, in float64."""
    a, b = arguments["mat_a"], arguments["mat_b"]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    (m, k), n = a.shape, b.shape[1]
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
    a = jitquant.quantize_group(spread(m, k), scale_layout="column")
    b = jitquant.quantize_group(spread(n, k, 1), scale_layout="column")
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
    got = as_cublas_reads(_matmul.fp8_arguments(a, b, torch.bfloat16))
    assert sqnr(got, want) > 120
    assert sqnr(_matmul.fp8_mm(a, b, torch.float32), want) > 110


def test_an_untransposed_scale_is_found_out() -> None:
    a, b = fp8_operands(128, 512, 512)  # where the wrong order has the right shape
    arguments = _matmul.fp8_arguments(a, b, torch.bfloat16)
    want = as_cublas_reads(arguments)
    wrong = as_cublas_reads(arguments | {"scale_b": b.scale_inv.t().contiguous().t()})
    assert sqnr(wrong, want) < 40  # the right order has more than 120


@SHAPES
def test_transposed_blocks(m: int, n: int, k: int) -> None:
    w = jitquant.quantize_block(spread(n, k), scale_layout="row_padded")
    t = _matmul.transposed_blocks(w)
    t.validate()
    assert torch.equal(t.dequantize(torch.float32), w.dequantize(torch.float32).T)


def unpacked(codes: Tensor) -> Tensor:
    """Values of packed E2M1, the even element in the low nibble."""
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()
    return CODES[both % 8] * torch.where(both >= 8, -1.0, 1.0)


def as_cublas_reads_nvfp4(arguments: dict[str, Any]) -> Tensor:
    """The NVFP4 product of scaled_mm's arguments, in float64, tile addresses as in cuBLAS' docs."""
    operands = []
    for side in "ab":
        codes, scales = arguments[f"mat_{side}"], arguments[f"scale_{side}"]
        codes = codes if side == "a" else codes.t()
        assert codes.dtype == torch.float4_e2m1fn_x2
        assert codes.is_contiguous()
        values = unpacked(codes.view(torch.uint8)).double()
        rows, groups = values.shape[0], values.shape[1] // 16
        assert scales[0].is_contiguous()
        assert scales[0].numel() == -(-rows // 128) * 128 * -(-groups // 4) * 4
        recipes = [ScalingType.BlockWise1x16, ScalingType.TensorWise][: len(scales)]
        swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(scales)]
        assert arguments[f"scale_recipe_{side}"] == recipes
        assert arguments[f"swizzle_{side}"] == swizzles
        m, g = torch.arange(rows)[:, None], torch.arange(groups)[None, :]
        tile = (m // 128) * (-(-groups // 4)) + g // 4
        address = tile * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + g % 4
        values *= scales[0].double().flatten()[address].repeat_interleave(16, dim=1)
        operands.append(values * (scales[1].double() if len(scales) > 1 else 1))
    return operands[0] @ operands[1].T


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_nvfp4_arguments(layout: str, granularity: str) -> None:
    x = jitquant.quantize_nvfp4(spread(130, 96), granularity=granularity, scale_layout=layout)
    w = jitquant.quantize_weight_nvfp4(spread(80, 96, 1), scale_layout=layout)
    want = x.dequantize(torch.float32).double() @ w.dequantize(torch.float32).double().T
    got = as_cublas_reads_nvfp4(_matmul.nvfp4_arguments(x, w, torch.bfloat16))
    if granularity == "row":
        got = got * x.gsa[:, None].double() * w.gsa.double()
    assert sqnr(got, want) > 120


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
        assert (_matmul.has_fp8_blockwise(device), _matmul.has_nvfp4(device)) == (fp8, nvfp4)
    assert not _matmul.has_fp8_blockwise(torch.device("cpu"))
    assert not _matmul.has_nvfp4(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_called_on_sm_90(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The path to scaled_mm, with scaled_mm replaced by a reading of its arguments."""
    calls = []

    def scaled_mm(*, output_dtype: torch.dtype, **arguments: Any) -> Tensor:
        calls.append(output_dtype)
        return as_cublas_reads(arguments).to(output_dtype)

    a, b = fp8_operands(256, 640, 384)
    want = _matmul.fp8_mm(a, b, dtype)
    monkeypatch.setattr(_matmul, "has_fp8_blockwise", lambda device: True)
    monkeypatch.setattr(_matmul, "scaled_mm", scaled_mm)
    got = _matmul.fp8_mm(a, b, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert calls == [torch.bfloat16 if dtype == torch.bfloat16 else torch.float32]


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_is_called_on_sm_100(
    monkeypatch: pytest.MonkeyPatch, granularity: str, with_bias: bool
) -> None:
    def scaled_mm(*, output_dtype: torch.dtype, **arguments: Any) -> Tensor:
        calls.append(output_dtype)
        return as_cublas_reads_nvfp4(arguments).to(output_dtype)

    calls: list[torch.dtype] = []
    x = jitquant.quantize_nvfp4(randn(3, 5, 96), granularity=granularity)
    w = jitquant.quantize_weight_nvfp4(randn(80, 96, seed=1))
    bias = randn(80, seed=2) if with_bias else None
    want = _matmul.nvfp4_mm(x, w, bias, torch.bfloat16)
    monkeypatch.setattr(_matmul, "has_nvfp4", lambda device: True)
    monkeypatch.setattr(_matmul, "scaled_mm", scaled_mm)
    got = _matmul.nvfp4_mm(x, w, bias, torch.bfloat16)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    once = granularity == "tensor" and not with_bias
    assert calls == [torch.bfloat16 if once else torch.float32]
    odd = jitquant.quantize_weight_nvfp4(randn(72, 96))
    _matmul.nvfp4_mm(x, odd, None, torch.bfloat16)
    assert len(calls) == 1  # 72 rows are not what cuBLASLt takes


def test_opcheck() -> None:
    # Without test_schema: PyTorch cannot compare these dtypes.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    a, b = fp8_operands(128, 256, 128)
    parts = (a.data, a.stored_scales, b.data, b.stored_scales, 128, torch.bfloat16)
    torch.library.opcheck(torch.ops.jitquant.fp8_mm.default, parts, test_utils=checks)
    x: QuantizedActivation = jitquant.quantize_nvfp4(randn(2, 3, 32))
    w = jitquant.quantize_weight_nvfp4(randn(16, 32, seed=1))
    torch.library.opcheck(
        torch.ops.jitquant.nvfp4_mm.default,
        (
            *(x.x_fp4_bytes, x.x_sf, x.gsa, "linear"),
            *(w.x_fp4_bytes, w.x_sf, w.gsa, "linear"),
            *(None, torch.float32),
        ),
        test_utils=checks,
    )
