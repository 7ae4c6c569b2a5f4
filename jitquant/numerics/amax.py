"""The amax of a tensor as a separate op: the first half of a quantization over many ranks."""

from __future__ import annotations

from torch import Tensor

from jitquant.numerics.fp8 import amax_keep_nan
from jitquant.numerics.nvfp4 import amax as amax_of_numbers
from jitquant.numerics.nvfp4 import rows_of
from jitquant.numerics.sources import deinterleave


def amax(
    x: Tensor,
    *,
    granularity: str = "tensor",
    keep_nan: bool = False,
    run: int = 0,
    activate: bool = False,
) -> tuple[Tensor]:
    """Largest magnitude of ``x`` (..., N), or of a gate-and-up projection: (1,) or (rows,).

    Args:
        x: (..., N).
        granularity: "tensor" or "row".
        keep_nan: whether NaN propagates, as in FP8; otherwise NaNs are ignored.
        run: 0; or gate and up columns come in turns of this many, and the magnitudes are those of
            the gate.
        activate: with a run, of ``silu(gate) * up``.
    """
    if run:
        values = deinterleave(x, x.shape[-1] // 2, run, "swiglu" if activate else "select")
    else:
        values = rows_of(x)
    return ((amax_keep_nan if keep_nan else amax_of_numbers)(values, granularity),)
