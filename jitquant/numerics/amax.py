"""The amax of values as a separate op: the first half of a quantization over many ranks."""

from __future__ import annotations

from torch import Tensor

from jitquant.numerics.fp8 import amax_keep_nan
from jitquant.numerics.nvfp4 import amax as amax_of_numbers


def amax(v: Tensor, granularity: str, keep_nan: bool) -> tuple[Tensor]:
    """The largest magnitude of fp32 values (rows, N): (1,) or (rows,).

    Args:
        v: the values.
        granularity: "tensor" or "row".
        keep_nan: whether NaN propagates, as in FP8; otherwise NaNs are ignored.
    """
    return ((amax_keep_nan if keep_nan else amax_of_numbers)(v, granularity),)
