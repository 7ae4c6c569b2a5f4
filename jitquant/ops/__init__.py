"""The ops: ``torch.ops.jitquant`` and the public functions over them.

Importing this registers the ops; it compiles nothing and touches no GPU.
"""

from __future__ import annotations

from jitquant.ops._table import NVFP4_OPS
from jitquant.ops._table_fp8 import FP8_OPS
from jitquant.ops._table_grouped import GROUPED_OPS
from jitquant.ops._table_linear import LINEAR_OPS
from jitquant.ops._table_sharded import SHARDED_OPS
from jitquant.ops.fp8 import (
    dequantize,
    quantize_block,
    quantize_block_both,
    quantize_fp8,
    quantize_group,
    quantize_group_both,
    rmsnorm_quantize_fp8,
    rmsnorm_quantize_group,
    silu_mul_quantize_fp8,
    silu_mul_quantize_group,
)
from jitquant.ops.grouped import dequantize_grouped, quantize_grouped, quantize_grouped_grad
from jitquant.ops.linear import nvfp4_linear
from jitquant.ops.mxfp8 import quantize_mxfp8, quantize_mxfp8_both
from jitquant.ops.nvfp4 import (
    amax_gsa,
    deinterleave_quantize_nvfp4,
    dequantize_nvfp4,
    mhc_rmsnorm_quantize_nvfp4,
    quantize_nvfp4,
    quantize_weight_nvfp4,
    rmsnorm_quantize_nvfp4,
)
from jitquant.ops.schema import Op

__all__ = [
    "ALL_OPS",
    "Op",
    "amax_gsa",
    "deinterleave_quantize_nvfp4",
    "dequantize",
    "dequantize_grouped",
    "dequantize_nvfp4",
    "mhc_rmsnorm_quantize_nvfp4",
    "nvfp4_linear",
    "quantize_block",
    "quantize_block_both",
    "quantize_fp8",
    "quantize_group",
    "quantize_group_both",
    "quantize_grouped",
    "quantize_grouped_grad",
    "quantize_mxfp8",
    "quantize_mxfp8_both",
    "quantize_nvfp4",
    "quantize_weight_nvfp4",
    "rmsnorm_quantize_fp8",
    "rmsnorm_quantize_group",
    "rmsnorm_quantize_nvfp4",
    "silu_mul_quantize_fp8",
    "silu_mul_quantize_group",
]

ALL_OPS: tuple[Op, ...] = (*NVFP4_OPS, *FP8_OPS, *GROUPED_OPS, *SHARDED_OPS, *LINEAR_OPS)
"""Every declared op."""
