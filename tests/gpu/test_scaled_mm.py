"""Scales as torch's scaled_mm takes them: products are those of the dequantized operands."""

from __future__ import annotations

import pytest
import torch
from samples import randn
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

import jitquant
from jitquant import QuantizedTensor

GROUP, BLOCK = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
# Neither square nor a multiple of four blocks: a transposed or unpadded scale is found out.
SHAPES = pytest.mark.parametrize(("m", "n", "k"), [(256, 640, 384), (384, 512, 1152)])

if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("blockwise scaled_mm needs sm_90", allow_module_level=True)


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """(M, K) and (N, K), the second with rows and columns of several magnitudes."""
    x, w = randn(m, k, dtype=torch.float32), randn(n, k, dtype=torch.float32, seed=1)
    return x, w * torch.logspace(-1, 1, n)[:, None] * torch.logspace(-1, 1, k)


def assert_product(
    a: QuantizedTensor,
    kind_a: ScalingType,
    b: QuantizedTensor,
    kind_b: ScalingType,
) -> None:
    """``a @ b.T`` of operands on the CPU, to the rounding of a bfloat16 result."""
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().T
    a, b = a.to("cuda"), b.to("cuda")
    scale_a = a.scale_inv.T if kind_a is BLOCK else a.scale_inv
    scale_b = b.scale_inv.T if kind_b in (BLOCK, ScalingType.RowWise) else b.scale_inv
    got = scaled_mm(
        a.data, b.data.t(), scale_a, kind_a, scale_b, kind_b, output_dtype=torch.bfloat16
    )
    noise = (got.cpu().double() - want).square().mean()
    assert 10 * torch.log10(want.square().mean() / noise) > 50


@SHAPES
def test_groups_and_blocks(m: int, n: int, k: int) -> None:
    x, w = operands(m, n, k)
    rowwise, _ = jitquant.quantize_per_token_group_both(x)
    blocks = jitquant.quantize_block(w, scale_layout="row_padded")
    assert_product(rowwise, GROUP, blocks, BLOCK)
    assert_product(blocks, BLOCK, rowwise, GROUP)


@SHAPES
def test_a_weight_gradient(m: int, n: int, k: int) -> None:
    x, _ = operands(m, n, k)
    _, x_columns = jitquant.quantize_per_token_group_both(x)
    _, grad_columns = jitquant.quantize_per_token_group_both(randn(m, n))
    assert_product(grad_columns, GROUP, x_columns, GROUP)


@SHAPES
def test_rows_and_tensors(m: int, n: int, k: int) -> None:
    x, w = operands(m, n, k)
    for granularity, kind in (("row", ScalingType.RowWise), ("tensor", ScalingType.TensorWise)):
        a, b = (jitquant.quantize_fp8(t, granularity=granularity) for t in (x, w))
        assert_product(a, kind, b, kind)
