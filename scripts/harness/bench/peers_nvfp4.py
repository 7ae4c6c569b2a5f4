"""The ops of NVFP4 as vLLM, FlashInfer, torchao and FBGEMM have them; see `peers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.bench.peer import EPS, Peer, inverse, module, vllm_ops


def _vllm_silu(fused: Tensor, gsa: Tensor) -> Any:
    rows, cols = fused.shape[0], fused.shape[1] // 2
    codes = fused.new_empty(rows, cols // 2, dtype=torch.uint8)
    # Swizzled: 128 rows by 4 scales, which are an int32.
    scales = fused.new_empty(-(-rows // 128) * 128, -(-cols // 64), dtype=torch.int32)
    vllm_ops("silu_and_mul_nvfp4_quant")(codes, scales, fused, inverse(gsa))
    return codes, scales


NVFP4_PEERS: dict[str, dict[str, Peer]] = {
    "quantize-given": {
        "vllm": lambda x, gsa: module("vllm._custom_ops").scaled_fp4_quant(
            x, inverse(gsa), is_sf_swizzled_layout=False
        ),
        "flashinfer": lambda x, gsa: module("flashinfer").fp4_quantize(
            x, inverse(gsa), is_sf_swizzled_layout=False
        ),
        "torchao": lambda x, gsa: module(
            "torchao.prototype.mx_formats.kernels"
        ).triton_quantize_nvfp4(x, gsa),
        "fbgemm": lambda x, gsa: module(
            "fbgemm_gpu.experimental.gemm.triton_gemm.fp4_quantize"
        ).triton_scale_nvfp4_quant(x, inverse(gsa)),
    },
    "swiglu-given": {
        "vllm": _vllm_silu,
        "flashinfer": lambda fused, gsa: module(
            "flashinfer.quantization"
        ).silu_and_mul_nvfp4_quantize(fused, inverse(gsa)),
    },
    # Their global scale is 1, where here each row has a gsa of its own.
    "rmsnorm": {
        "flashinfer": lambda x, weight: module("flashinfer.norm").rmsnorm_fp4quant(
            x, weight, eps=EPS
        ),
    },
    "rmsnorm-residual": {
        "flashinfer": lambda x, residual, weight: module("flashinfer.norm").add_rmsnorm_fp4quant(
            x, residual, weight, eps=EPS
        ),
    },
}
