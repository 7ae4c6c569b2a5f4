"""The ops: ``torch.ops.jitquant`` and the public functions over them.

Importing this registers the ops; it compiles nothing and touches no GPU.
"""

from __future__ import annotations

from jitquant.ops import _sharded, blockwise, experts, fp8, linear, mxfp8, nvfp4, ragged, recipes
from jitquant.ops.blockwise import (
    quantize_block,
    quantize_block_both,
    quantize_per_token_group,
    quantize_per_token_group_both,
    rmsnorm_quantize_per_token_group,
    swiglu_quantize_per_token_group,
)
from jitquant.ops.experts import nvfp4_experts, nvfp4_grouped_linear
from jitquant.ops.fp8 import (
    dequantize,
    quantize_fp8,
    rmsnorm_quantize_fp8,
    swiglu_quantize_fp8,
)
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
from jitquant.ops.ragged import dequantize_ragged, quantize_ragged, quantize_ragged_grad
from jitquant.ops.recipes import dequantize_mxfp4, quantize_mxfp4, quantize_nvfp4_both
from jitquant.ops.schema import Op

__all__ = [
    "ALL_OPS",
    "Op",
    "amax_gsa",
    "deinterleave_quantize_nvfp4",
    "dequantize",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "dequantize_ragged",
    "mhc_rmsnorm_quantize_nvfp4",
    "nvfp4_experts",
    "nvfp4_grouped_linear",
    "nvfp4_linear",
    "quantize_block",
    "quantize_block_both",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_mxfp8_both",
    "quantize_nvfp4",
    "quantize_nvfp4_both",
    "quantize_per_token_group",
    "quantize_per_token_group_both",
    "quantize_ragged",
    "quantize_ragged_grad",
    "quantize_weight_nvfp4",
    "rmsnorm_quantize_fp8",
    "rmsnorm_quantize_nvfp4",
    "rmsnorm_quantize_per_token_group",
    "swiglu_quantize_fp8",
    "swiglu_quantize_per_token_group",
]

ALL_OPS: tuple[Op, ...] = (
    _sharded.AMAX,
    *nvfp4.OPS,
    *fp8.OPS,
    *blockwise.OPS,
    *mxfp8.OPS,
    *ragged.OPS,
    *linear.OPS,
    *recipes.OPS,
    *experts.OPS,
)
"""Every declared op."""
