"""The swizzled scale layout against its formula, one byte at a time."""

from __future__ import annotations

import pytest
import torch
from samples import randn

from jitquant import reference

SHAPES = [(1, 1), (5, 3), (128, 4), (129, 5), (256, 8), (300, 13), (32, 448)]


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_every_byte_is_where_the_formula_says(rows: int, groups: int) -> None:
    scales = torch.randint(1, 256, (rows, groups), dtype=torch.uint8)
    swizzled = reference.swizzle_128x4(scales)
    rows_p, groups_p = -(-rows // 128) * 128, -(-groups // 4) * 4
    assert swizzled.shape == (rows_p, groups_p) == reference.swizzled_shape(rows, groups)
    memory = swizzled.reshape(-1).tolist()
    expected = [0] * (rows_p * groups_p)
    for m in range(rows):
        for k in range(groups):
            offset = (
                ((m // 128) * (groups_p // 4) + k // 4) * 512
                + (m % 32) * 16
                + ((m % 128) // 32) * 4
                + k % 4
            )
            expected[offset] = int(scales[m, k])
    assert memory == expected


@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_there_and_back(rows: int, groups: int) -> None:
    scales = torch.randint(0, 256, (rows, groups), dtype=torch.uint8)
    back = reference.unswizzle_128x4(reference.swizzle_128x4(scales), rows, groups)
    assert torch.equal(back, scales)


def test_dtype_is_kept() -> None:
    scales = torch.ones(3, 2).to(torch.float8_e4m3fn)
    swizzled = reference.swizzle_128x4(scales)
    assert swizzled.dtype == torch.float8_e4m3fn
    assert swizzled.is_contiguous()


@pytest.mark.parametrize("shape", [(5, 40), (2, 70, 16), (130, 100), (0, 32), (48,)])
def test_the_layout_changes_nothing_but_the_place(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    linear = reference.quantize_nvfp4(x)
    swizzled = reference.quantize_nvfp4(x, scale_layout="swizzled_128x4")
    rows, groups = x.numel() // shape[-1], -(-shape[-1] // 16)
    assert torch.equal(linear[0].view(torch.uint8), swizzled[0].view(torch.uint8))
    back = reference.unswizzle_128x4(swizzled[1], rows, groups)
    assert torch.equal(back.view(torch.uint8), linear[1].view(torch.uint8).reshape(rows, groups))
    (a,) = reference.dequantize_nvfp4(*linear)
    (b,) = reference.dequantize_nvfp4(*swizzled, scale_layout="swizzled_128x4")
    assert torch.equal(a, b)
