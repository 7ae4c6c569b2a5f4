"""Single elements: fp32 to E2M1 and E4M3 codes and back, and the packing of two codes in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.formats import (
    CODES_PER_BYTE,
    E2M1_SIGN_BIT,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_NAN,
    FP4_DTYPE,
    SCALE_DTYPE,
)


def constant(value: float, like: Tensor) -> Tensor:
    """A 0-dim fp32 tensor on the device of ``like``.

    Scalars that take part in a division are made tensors: PyTorch replaces ``scalar / tensor`` by a
    reciprocal and a product, and on CUDA ``tensor / scalar`` as well, which rounds twice.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def encode_e2m1(x: Tensor) -> Tensor:
    """Rounds to the nearest E2M1 code, ties to the even code; saturates at +-6.

    Each magnitude is compared with the seven midpoints in full precision, so it is rounded once.
    Rounding to half steps first and through a table after is wrong on an eighth of [0, 6].

    Args:
        x: fp32, any shape.

    Returns:
        uint8 of the same shape, codes 0..15. The sign bit is that of ``x``, for zero too; NaN gives
        code 0.
    """
    m = x.abs()
    code = (m > 0.25).to(torch.uint8)
    code += m >= 0.75
    code += m > 1.25
    code += m >= 1.75
    code += m > 2.5
    code += m >= 3.5
    code += m > 5.0
    code.add_(x.signbit(), alpha=E2M1_SIGN_BIT)
    return code.masked_fill_(x.isnan(), 0)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Value of uint8 codes 0..15 as fp32 of the same shape; code 8 is -0."""
    values = (*E2M1_VALUES, *(-v for v in E2M1_VALUES))
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def pack_e2m1(codes: Tensor, dim: int = -1) -> Tensor:
    """Packs uint8 codes in pairs along ``dim``, the even index in the low nibble.

    Args:
        codes: uint8, the size of ``dim`` even.
        dim: -1 (the last dimension) or 0.

    Returns:
        ``float4_e2m1fn_x2``, contiguous, ``dim`` half as long.
    """
    if dim == 0:
        packed = codes[0::2] | (codes[1::2] << 4)
    else:
        packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    # A uint8 view, as PyTorch has few float4_e2m1fn_x2 kernels.
    return packed.contiguous().view(FP4_DTYPE)


def unpack_e2m1(x_fp4: Tensor, dim: int = -1) -> Tensor:
    """Undoes `pack_e2m1`: uint8 codes 0..15, ``dim`` twice as long."""
    packed = x_fp4.view(torch.uint8)
    pairs = torch.stack((packed & 15, packed >> 4), dim=1 if dim == 0 else -1)
    if dim == 0:
        return pairs.reshape(CODES_PER_BYTE * packed.shape[0], *packed.shape[1:])
    return pairs.reshape(*packed.shape[:-1], CODES_PER_BYTE * packed.shape[-1])


def encode_e4m3(x: Tensor) -> Tensor:
    """Rounds to the nearest E4M3 value, ties to even; saturates at +-448; NaN becomes 0x7F.

    ``Tensor.to(float8_e4m3fn)`` alone turns what is beyond 464 into NaN.

    Args:
        x: fp32, any shape.

    Returns:
        ``float8_e4m3fn`` of the same shape.
    """
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(SCALE_DTYPE).view(torch.uint8)
    return codes.masked_fill_(x.isnan(), E4M3_NAN).view(SCALE_DTYPE)


def decode_e4m3(scales: Tensor) -> Tensor:
    """Value of ``float8_e4m3fn`` scales (or of their bytes as uint8) as fp32 of the same shape."""
    return scales.view(SCALE_DTYPE).to(torch.float32)
