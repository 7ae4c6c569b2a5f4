"""The definition of every op in plain PyTorch: specification, CPU backend and oracle in one.

Nothing here is tuned: each function is the recipe of ``docs/numerics.md``, one operation a line, in
fp32. Everything runs on the device of its input, so the same functions check a kernel on its GPU.
Arguments are taken as valid; ``jitquant.ops`` checks them.
"""

from __future__ import annotations

from jitquant.formats import swizzled_shape
from jitquant.numerics.elements import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from jitquant.numerics.fp8 import (
    decode_e8m0,
    dequantize,
    encode_e5m2,
    encode_int8,
    quantize_block,
    quantize_block_both,
    quantize_fp8,
    quantize_group,
    quantize_group_both,
    rmsnorm_quantize_fp8,
    rmsnorm_quantize_group,
    silu_mul,
    silu_mul_quantize_fp8,
    silu_mul_quantize_group,
)
from jitquant.numerics.fused import (
    deinterleave,
    deinterleave_quantize_nvfp4,
    deinterleave_quantize_nvfp4_static,
    hyper_connection_sum,
    mhc_rmsnorm_quantize_nvfp4,
    mhc_rmsnorm_quantize_nvfp4_static,
    rmsnorm,
    rmsnorm_quantize_nvfp4,
    rmsnorm_quantize_nvfp4_static,
)
from jitquant.numerics.grouped import (
    dequantize_grouped_fp8,
    dequantize_grouped_nvfp4,
    quantize_grouped_fp8,
    quantize_grouped_grad_fp8,
    quantize_grouped_nvfp4,
)
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4
from jitquant.numerics.linear import nvfp4_linear
from jitquant.numerics.mxfp8 import quantize_mxfp8, quantize_mxfp8_both
from jitquant.numerics.nvfp4 import (
    amax_gsa,
    dequantize_nvfp4,
    quantize_nvfp4,
    quantize_nvfp4_static,
    quantize_weight_nvfp4,
    quantize_weight_nvfp4_static,
)

__all__ = [
    "amax_gsa",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "deinterleave",
    "deinterleave_quantize_nvfp4",
    "deinterleave_quantize_nvfp4_static",
    "dequantize",
    "dequantize_grouped_fp8",
    "dequantize_grouped_nvfp4",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e5m2",
    "encode_int8",
    "hyper_connection_sum",
    "mhc_rmsnorm_quantize_nvfp4",
    "mhc_rmsnorm_quantize_nvfp4_static",
    "nvfp4_linear",
    "pack_e2m1",
    "quantize_block",
    "quantize_block_both",
    "quantize_fp8",
    "quantize_group",
    "quantize_group_both",
    "quantize_grouped_fp8",
    "quantize_grouped_grad_fp8",
    "quantize_grouped_nvfp4",
    "quantize_mxfp8",
    "quantize_mxfp8_both",
    "quantize_nvfp4",
    "quantize_nvfp4_static",
    "quantize_weight_nvfp4",
    "quantize_weight_nvfp4_static",
    "rmsnorm",
    "rmsnorm_quantize_fp8",
    "rmsnorm_quantize_group",
    "rmsnorm_quantize_nvfp4",
    "rmsnorm_quantize_nvfp4_static",
    "silu_mul",
    "silu_mul_quantize_fp8",
    "silu_mul_quantize_group",
    "swizzle_128x4",
    "swizzled_shape",
    "unpack_e2m1",
    "unswizzle_128x4",
]
