"""Inputs that leave no bit pattern out, for the host-compiled arithmetic and for the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# 0 (what an all-zero tensor returns), subnormals, powers of two, values between them, the largest
# number, Inf and NaN.
GSA_GRID = (
    0.0,
    1e-45,
    1e-40,
    2.0**-126,
    3.7e-39,
    1e-30,
    6.1e-6,
    2.0**-12,
    0.00037,
    0.0119,
    0.25,
    0.7,
    1.0,
    1.0000001,
    3.1,
    448.0,
    2688.0,
    65504.0,
    1.7e18,
    2.0**127,
    3.4028235e38,
    math.inf,
    math.nan,
)


def all_bf16() -> Tensor:
    """(4096, 16): every bf16 once, neighbors in value in one block."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).reshape(4096, 16)


def all_bf16_arrangements() -> list[Tensor]:
    """Every bf16 in blocks of neighbors, of all magnitudes, and at random."""
    x = all_bf16()
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(0))
    return [x, x.reshape(16, 4096).T.contiguous(), x.reshape(-1)[order].reshape(4096, 16)]


def all_fp16() -> Tensor:
    """(4096, 16): every fp16 once."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.float16).reshape(4096, 16)


def same_floats(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, except that every NaN is one."""
    nan = torch.isnan(a)
    return bool(
        torch.equal(nan, torch.isnan(b))
        and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))
    )
