"""What the tests of layers measure with."""

from __future__ import annotations

import math

import torch
from samples import randn
from torch import Tensor, nn


def sqnr(got: Tensor, want: Tensor) -> float:
    """Signal to quantization noise, in dB; infinite where there is no noise."""
    noise = (got.double() - want.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(want.double().square().sum().item() / noise)


def spread(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Rows and columns of several magnitudes: a scale in the wrong place is seen."""
    x = randn(rows, cols, dtype=torch.float32, seed=seed)
    return x * torch.logspace(-1, 1, rows)[:, None] * torch.logspace(-1, 1, cols)


class UnknownExperts(nn.Module):
    """The weights of two experts in a module whose forward is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 64, 32))
        self.down_proj = nn.Parameter(torch.randn(2, 32, 32))
