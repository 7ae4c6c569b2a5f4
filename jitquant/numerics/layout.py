"""Memory layouts of block scales: row-major, or in the 128x4 tiles that cuBLASLt reads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import swizzled_shape


def swizzle_128x4(scales: Tensor) -> Tensor:
    """Stores row-major scales in 128x4 tiles, the bytes of each tile together.

    The byte of scale (m, k) is at
    ``((m // 128) * (Kp // 4) + k // 4) * 512 + (m % 32) * 16 + ((m % 128) // 32) * 4 + k % 4``,
    which is the layout of block scaling factors in cuBLAS' documentation.

    Args:
        scales: (rows, groups), one byte an element.

    Returns:
        Contiguous (ceil(rows / 128) * 128, ceil(groups / 4) * 4) of the same dtype; padding is 0.
    """
    rows, groups = scales.shape
    rows_p, groups_p = swizzled_shape(rows, groups)
    padded = functional.pad(scales.view(torch.uint8), (0, groups_p - groups, 0, rows_p - rows))
    tiles = padded.reshape(rows_p // 128, 4, 32, groups_p // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows_p, groups_p).contiguous().view(scales.dtype)


def unswizzle_128x4(swizzled: Tensor, rows: int, groups: int) -> Tensor:
    """Undoes `swizzle_128x4`: (rows, groups), row major and contiguous, without the padding."""
    rows_p, groups_p = swizzled_shape(rows, groups)
    tiles = swizzled.view(torch.uint8).reshape(rows_p // 128, groups_p // 4, 32, 4, 4)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(rows_p, groups_p)
    return padded[:rows, :groups].contiguous().view(swizzled.dtype)


def stored_scales(scales: Tensor, leading: tuple[int, ...], scale_layout: str) -> Tensor:
    """Scales (rows, groups) in a layout; if it is linear, the rows as ``leading``."""
    if scale_layout == "swizzled_128x4":
        return swizzle_128x4(scales)
    return scales.reshape(*leading, scales.shape[1]).contiguous()
