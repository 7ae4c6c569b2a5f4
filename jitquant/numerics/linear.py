"""Products with a weight in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.numerics.fp8 import inverse_power_of_two, power_of_two
from jitquant.numerics.nvfp4 import dequantize_nvfp4, encode_e4m3

_BIAS = 127


def without_gsa(codes: Tensor, scales: Tensor) -> Tensor:
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
    values = x.float() if x_sf is None else without_gsa(x, x_sf)
    if dtype is None:
        dtype = x.dtype if x_sf is None else torch.bfloat16
    return (_product(values, without_gsa(w_fp4, w_sf), w_gsa, x_gsa, bias, residual, dtype),)


def _product(
    x: Tensor,
    weight: Tensor,
    w_factor: Tensor,
    x_factor: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``x W^T`` in fp32, times the factors of W and of x, plus bias and residual.

    Args:
        x: fp32 (..., K).
        weight: fp32 (N, K'), K' >= K.
        w_factor: (1,) or (N,).
        x_factor: one element or one for each row of x, or None.
        bias: (N,) or None.
        residual: (..., N) or None.
        dtype: of the result.
    """
    leading, cols = x.shape[:-1], x.shape[-1]
    with torch.autocast(weight.device.type, enabled=False):  # which would round both to bf16
        y = torch.mm(x.reshape(-1, cols), weight[:, :cols].t()) * w_factor
    if x_factor is not None:
        y = y * x_factor.reshape(-1, 1)
    if bias is not None:
        y = y + bias.float()
    y = y.reshape(*leading, weight.shape[0])
    if residual is not None:
        y = y + residual.float()
    return y.to(dtype)


def refold_e4m3(w_fp4: Tensor, w_sf: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in NVFP4 as E4M3 with a power of two for each row: W without its gsa is near
    ``data * scale_inv``.

    ``1 / scale_inv`` is the largest power of two that keeps 6 times the row's largest block scale
    within E4M3, so nothing saturates. What code times scale is then has up to six significant bits
    and E4M3 four: it is rounded once, to nearest even, and exact where E4M3 has it. A block scale
    that is NaN gives NaN with the code's sign, and counts as 480 here.

    Args:
        w_fp4: codes (N, K / 2).
        w_sf: E4M3 scales (N, K / 16).

    Returns:
        ``data`` E4M3 (N, K) and ``scale_inv`` fp32 (N,), 2^-12 to 2^3.
    """
    most = (w_sf.view(torch.uint8).int() & 0x7F).amax(dim=1)
    # A mantissa of 1.25 or more times 6 needs one power of two more than 1.125 does.
    exponent = 13 - ((most + 6) >> 3).clamp(min=1)
    values = without_gsa(w_fp4, w_sf) * power_of_two(exponent + _BIAS)[:, None]
    ones = torch.full_like(w_sf.view(torch.uint8), 0x38).view(w_sf.dtype)
    negative = values.isnan() & without_gsa(w_fp4, ones).signbit()
    data = encode_e4m3(values).view(torch.uint8) | negative.to(torch.uint8) << 7
    return data.view(torch.float8_e4m3fn), inverse_power_of_two(exponent + _BIAS)


def nvfp4_refold(w_fp4: Tensor, w_sf: Tensor, w_gsa: Tensor) -> tuple[Tensor, Tensor]:
    """`refold_e4m3` with the gsa in scale_inv, ``gsa * scale_inv`` rounded once."""
    data, scale_inv = refold_e4m3(w_fp4, w_sf)
    return data, w_gsa * scale_inv


def nvfp4_linear_fp8(
    x: Tensor,
    x_scale_inv: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor]:
    """``x W^T`` of FP8 matrices: x as given, W from `refold_e4m3`.

    Sums are in fp32, times ``gsa * scale_inv`` of the row of W and scale_inv of the row of x, plus
    the bias, and rounded to bf16. The residual is added to that.

    Args:
        x: E4M3 (..., K).
        x_scale_inv: one element, or one for each row of x: what its elements are multiplied with.
        w_fp4: codes (N, K' / 2), where K' is K up to a multiple of 16.
        w_sf: E4M3 scales (N, K' / 16).
        w_gsa: (1,).
        bias: (N,).
        residual: (..., N), added last.
        dtype: of the result; default bfloat16.
    """
    weight, scale_inv = nvfp4_refold(w_fp4, w_sf, w_gsa)
    bias = None if bias is None else bias.bfloat16()
    operands = x.float(), weight.float(), scale_inv, x_scale_inv
    product = _product(*operands, bias, None, torch.bfloat16)
    if residual is not None:
        return (residual + product.to(residual.dtype),)
    return (product if dtype is None else product.to(dtype),)
