"""The ops of 8-bit formats as vLLM, FlashInfer, torchao and FBGEMM have them; see `peers`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from harness.bench import peers_vllm
from harness.bench.peer import EPS, Peer, inverse, module

E4M3 = torch.float8_e4m3fn
GROUP = 128


def _vllm_block(w: Tensor) -> Any:
    utils = module("vllm.utils.deep_gemm")
    return utils.per_block_cast_to_fp8(w, block_size=[GROUP, GROUP], use_ue8m0=False)


def _vllm_silu_row(fused: Tensor) -> Any:
    return module("vllm.model_executor.layers.fused_moe.silu_mul_token_quant").silu_mul_token_quant(
        fused
    )


def _flashinfer_rmsnorm_given(x: Tensor, weight: Tensor, scale: Tensor) -> Any:
    data = torch.empty_like(x, dtype=E4M3)
    module("flashinfer.norm").rmsnorm_quant(data, x, weight, inverse(scale), EPS)
    return data


def _flashinfer_rmsnorm_residual_given(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor
) -> Any:
    data = torch.empty_like(x, dtype=E4M3)
    module("flashinfer.norm").fused_add_rmsnorm_quant(
        data, x, residual, weight, inverse(scale), EPS
    )
    return data


@functools.cache
def compiled(fn: Peer) -> Peer:
    """What torchao has in plain PyTorch is made for ``torch.compile``."""
    return torch.compile(fn, dynamic=False)


def _scaled(x: Tensor, to_scale: Peer, to_fp8: Peer, **how: Any) -> Any:
    scale = to_scale(x, E4M3, **how)
    return to_fp8(x.float() * scale, E4M3), scale


def _torchao_fp8(x: Tensor, **how: Any) -> Any:
    utils = module("torchao.float8.float8_utils")
    return compiled(_scaled)(x, utils.tensor_to_scale, utils.to_fp8_saturated, **how)


def _torchao_row(x: Tensor) -> Any:
    by_row = module("torchao.float8.config").ScalingGranularity.AXISWISE
    return _torchao_fp8(x, scaling_granularity=by_row, axiswise_dim=-1)


def _torchao_mxfp8(x: Tensor) -> Any:
    mx = module("torchao.prototype.mx_formats.mx_tensor")
    return compiled(mx.to_mx)(x, E4M3, 32, mx.ScaleCalculationMode.RCEIL)


def _torchao_mxfp8_both(x: Tensor) -> Any:
    kernels = module("torchao.prototype.mx_formats.kernels")
    return kernels.triton_to_mxfp8_dim0(x, 32, "rceil"), kernels.triton_to_mxfp8_dim1(
        x, 32, "rceil"
    )


def _torchao_blockwise(*names: str) -> Peer:
    """Triton kernels of torchao's blockwise training, each of which makes one operand."""

    def run(x: Tensor) -> Any:
        kernels = module("torchao.prototype.blockwise_fp8_training.kernels")
        return [getattr(kernels, f"triton_fp8_blockwise_{name}")(x, GROUP) for name in names]

    return run


def _fbgemm(name: str) -> Peer:
    """A compiled op of FBGEMM."""

    def run(*args: Any) -> Any:
        module("fbgemm_gpu.experimental.gen_ai")
        return getattr(torch.ops.fbgemm, name)(*args)

    return run


def _fbgemm_triton(name: str) -> Peer:
    """A Triton kernel of FBGEMM."""
    package = "fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm"
    return lambda *args, **how: getattr(module(package), name)(*args, **how)


def _fbgemm_silu(fused: Tensor) -> Any:
    gate, up = fused.chunk(2, dim=-1)
    return module("fbgemm_gpu.experimental.gen_ai.moe.activation").silu_mul_quant(gate, up)


_TRITON_GROUP = _fbgemm_triton("triton_quantize_fp8_group")

FP8_PEERS: dict[str, dict[str, Peer]] = {
    "cast": {
        "vllm": lambda x, scale: peers_vllm.fp8_given(x, inverse(scale)),
        "fbgemm": lambda x, scale: _fbgemm("quantize_fp8_per_tensor_fixed_scale")(
            x, inverse(scale)
        ),
    },
    "fp8-tensor": {
        "vllm": peers_vllm.fp8_tensor,
        "torchao": _torchao_fp8,
        "fbgemm": _fbgemm("quantize_fp8_per_tensor"),
    },
    "fp8-row": {
        "vllm": peers_vllm.fp8_row,
        "torchao": _torchao_row,
        "fbgemm": _fbgemm_triton("triton_quantize_fp8_row"),
    },
    "fp8-group": {
        "vllm": peers_vllm.fp8_group,
        "torchao": _torchao_blockwise("act_quant_lhs"),
        "fbgemm": lambda x: _TRITON_GROUP(x, GROUP),
    },
    "fp8-group-16": {
        "vllm": lambda x: peers_vllm.fp8_group(x, 16),
        "fbgemm": lambda x: _TRITON_GROUP(x, 16),
    },
    "fp8-group-vllm": {"vllm": peers_vllm.fp8_group},
    "fp8-group-tma": {
        "vllm": lambda x: peers_vllm.fp8_group(x, tma=True),
        "fbgemm": lambda x: _TRITON_GROUP(x, GROUP, k_major=False),
    },
    "fp8-group-packed": {"vllm": peers_vllm.fp8_group_packed},
    "int8-row": {"vllm": peers_vllm.int8_row},
    "int8-group": {"vllm": peers_vllm.int8_group},
    "fp8-group-both": {"torchao": _torchao_blockwise("act_quant_lhs", "act_quant_transposed_lhs")},
    "fp8-block": {
        "vllm": _vllm_block,
        "torchao": _torchao_blockwise("weight_quant_rhs"),
        "fbgemm": lambda w: _fbgemm_triton("triton_quantize_fp8_block")(w, GROUP, GROUP),
    },
    "fp8-block-both": {
        "torchao": _torchao_blockwise("weight_quant_rhs", "weight_quant_transposed_rhs")
    },
    "mxfp8": {"torchao": _torchao_mxfp8},
    "mxfp8-both": {"torchao": _torchao_mxfp8_both},
    "fp8-rmsnorm": {"vllm": lambda x, weight: peers_vllm.rmsnorm_row(x, weight, EPS)},
    "fp8-rmsnorm-given": {
        "vllm": lambda x, weight, scale: peers_vllm.rmsnorm_given(x, weight, inverse(scale), EPS),
        "flashinfer": _flashinfer_rmsnorm_given,
    },
    "fp8-rmsnorm-group": {"vllm": lambda x, weight: peers_vllm.rmsnorm_group(x, weight, EPS)},
    "fp8-rmsnorm-residual": {
        "vllm": lambda x, residual, weight: peers_vllm.rmsnorm_row(x, weight, EPS, residual)
    },
    "fp8-rmsnorm-residual-given": {
        "vllm": lambda x, residual, weight, scale: peers_vllm.rmsnorm_residual_given(
            x, residual, weight, inverse(scale), EPS
        ),
        "flashinfer": _flashinfer_rmsnorm_residual_given,
    },
    "fp8-rmsnorm-residual-group": {
        "vllm": lambda x, residual, weight: peers_vllm.rmsnorm_group(x, weight, EPS, residual)
    },
    "fp8-silu": {"vllm": _vllm_silu_row, "fbgemm": _fbgemm_silu},
    "fp8-silu-given": {"vllm": lambda fused, scale: peers_vllm.silu_given(fused, inverse(scale))},
    "fp8-silu-group": {"vllm": peers_vllm.silu_group},
}
