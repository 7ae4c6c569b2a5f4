"""What the plug-ins for inference engines share: a linear's product, and how it is computed."""

from __future__ import annotations

import os
from typing import cast

from torch import Tensor

from jitquant.formats import COMPUTES, Compute, one_of
from jitquant.nn._nvfp4_mm import nvfp4_mm_bytes


def compute() -> Compute:
    """``JITQUANT_COMPUTE``: "exact", or "fp8" for 256 rows and more.

    Raises:
        ValueError: it is something else.
    """
    chosen = os.environ.get("JITQUANT_COMPUTE", "exact")
    one_of("JITQUANT_COMPUTE", chosen, COMPUTES)
    return cast(Compute, chosen)


def product(
    x: Tensor, weight: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, compute: Compute
) -> Tensor:
    """``x @ weight.T + bias`` with x as it is: W4A16.

    Args:
        x: (..., K), bfloat16 or float16.
        weight: codes uint8 (N, K / 2), scales (N, K / 16), and gsa fp32 (1,).
        bias: (N,) or None.
        compute: as for `jitquant.nvfp4_linear`.

    Returns:
        (..., N) of x's dtype.
    """
    rows = x if x.stride(-1) == 1 else x.contiguous()
    values = rows.reshape(-1, x.shape[-1]), None, None, "linear"
    y = nvfp4_mm_bytes(values, (*weight, "linear"), bias, None, x.dtype, compute)
    return y.view(*x.shape[:-1], y.shape[-1])
