"""Products with a weight in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.numerics.nvfp4 import dequantize_nvfp4


def _without_gsa(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times block scales in fp32, which is exact."""
    one = torch.ones(1, dtype=torch.float32, device=codes.device)
    return dequantize_nvfp4(codes, scales, one, dtype=torch.float32)[0]


def nvfp4_linear(
    x: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    x_sf: Tensor | None = None,
    x_gsa: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``x W^T`` with sums in fp32, then the gsas, bias and residual, each rounded once.

    A code times its block scale is exact in bf16, fp16 and fp32, so the products and their sum are
    those of the dequantized tensors without their gsas. The order of the sum is the device's.

    Args:
        x: (..., K) of bf16 or fp16; or with ``x_sf`` the codes (..., K / 2).
        w_fp4: codes (N, K' / 2), where K' is K up to a multiple of 16.
        w_sf: E4M3 scales (N, K' / 16).
        w_gsa: (1,).
        x_sf: scales (..., K' / 16) of x, or None.
        x_gsa: (1,), or one for each row of x.
        bias: (N,).
        residual: (..., N), added last.
        dtype: of the result.
    """
    weight = _without_gsa(w_fp4, w_sf)
    values = x.float() if x_sf is None else _without_gsa(x, x_sf)
    leading, cols = values.shape[:-1], values.shape[-1]
    with torch.autocast(weight.device.type, enabled=False):  # which would round both to bf16
        y = torch.mm(values.reshape(-1, cols), weight[:, :cols].t()) * w_gsa
    if x_gsa is not None:
        y = y * x_gsa.reshape(-1, 1)
    if bias is not None:
        y = y + bias.float()
    y = y.reshape(*leading, weight.shape[0])
    if residual is not None:
        y = y + residual.float()
    if dtype is None:
        dtype = x.dtype if x_sf is None else torch.bfloat16
    return (y.to(dtype),)
