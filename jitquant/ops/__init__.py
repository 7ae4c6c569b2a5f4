"""The ops: ``torch.ops.jitquant`` and the public functions over them.

Importing this registers the ops; it compiles nothing and touches no GPU.
"""

from __future__ import annotations

from jitquant.ops._declare import Op
from jitquant.ops._table import ALL_OPS
from jitquant.ops.nvfp4 import (
    amax_gsa,
    deinterleave_quantize_nvfp4,
    dequantize_nvfp4,
    mhc_rmsnorm_quantize_nvfp4,
    quantize_nvfp4,
    quantize_weight_nvfp4,
    rmsnorm_quantize_nvfp4,
)

__all__ = [
    "ALL_OPS",
    "Op",
    "amax_gsa",
    "deinterleave_quantize_nvfp4",
    "dequantize_nvfp4",
    "mhc_rmsnorm_quantize_nvfp4",
    "quantize_nvfp4",
    "quantize_weight_nvfp4",
    "rmsnorm_quantize_nvfp4",
]
