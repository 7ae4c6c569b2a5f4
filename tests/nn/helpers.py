"""What the tests of layers measure with."""

from __future__ import annotations

import math

from torch import Tensor


def sqnr(got: Tensor, want: Tensor) -> float:
    """Signal to quantization noise, in dB; infinite where there is no noise."""
    noise = (got.double() - want.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(want.double().square().sum().item() / noise)
