"""The ops of NVFP4 as vLLM and FBGEMM have them; see `peers`."""

from __future__ import annotations

from harness.bench import peers_vllm
from harness.bench.peer import Peer, inverse, module

NVFP4_PEERS: dict[str, dict[str, Peer]] = {
    "quantize-given": {
        "vllm": lambda x, gsa: peers_vllm.nvfp4_given(x, inverse(gsa)),
        "fbgemm": lambda x, gsa: module(
            "fbgemm_gpu.experimental.gemm.triton_gemm.fp4_quantize"
        ).triton_scale_nvfp4_quant(x, inverse(gsa)),
    },
    "swiglu-given": {"vllm": lambda fused, gsa: peers_vllm.silu_nvfp4(fused, inverse(gsa))},
}
