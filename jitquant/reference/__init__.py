"""The definition of every op in plain PyTorch: specification, CPU backend and oracle in one.

Nothing here is tuned: each function is the recipe of ``docs/numerics.md``, one operation a line, in
fp32. Everything runs on the device of its input, so the same functions check a kernel on its GPU.
Arguments are taken as valid; ``jitquant.ops`` checks them.
"""

from __future__ import annotations

from jitquant.reference.elements import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from jitquant.reference.fused import (
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
from jitquant.reference.layout import swizzle_128x4, swizzled_shape, unswizzle_128x4
from jitquant.reference.nvfp4 import (
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
    "deinterleave",
    "deinterleave_quantize_nvfp4",
    "deinterleave_quantize_nvfp4_static",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "hyper_connection_sum",
    "mhc_rmsnorm_quantize_nvfp4",
    "mhc_rmsnorm_quantize_nvfp4_static",
    "pack_e2m1",
    "quantize_nvfp4",
    "quantize_nvfp4_static",
    "quantize_weight_nvfp4",
    "quantize_weight_nvfp4_static",
    "rmsnorm",
    "rmsnorm_quantize_nvfp4",
    "rmsnorm_quantize_nvfp4_static",
    "swizzle_128x4",
    "swizzled_shape",
    "unpack_e2m1",
    "unswizzle_128x4",
]
