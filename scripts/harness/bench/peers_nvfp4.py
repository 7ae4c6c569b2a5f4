"""The ops of NVFP4 as vLLM, FlashInfer, torchao and FBGEMM have them; see `peers`."""

from __future__ import annotations

from harness.bench import peers_vllm
from harness.bench.peer import EPS, Peer, inverse, module

NVFP4_PEERS: dict[str, dict[str, Peer]] = {
    "quantize-given": {
        "vllm": lambda x, gsa: peers_vllm.nvfp4_given(x, inverse(gsa)),
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
        "vllm": lambda fused, gsa: peers_vllm.silu_nvfp4(fused, inverse(gsa)),
        "flashinfer": lambda fused, gsa: module(
            "flashinfer.quantization"
        ).silu_and_mul_nvfp4_quantize(fused, inverse(gsa)),
    },
    # Their global scale is 1, here each row has its own gsa.
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
