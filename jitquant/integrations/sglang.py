"""sglang: NVFP4 linears and experts with this project's products, on Hopper instead of Marlin.

sglang calls `register` in each of its processes, through the entry point "jitquant" of
``sglang.srt.plugins``; installing both packages is enough. ``SGLANG_PLUGINS`` without "jitquant"
turns it off. ``JITQUANT_COMPUTE=fp8`` multiplies 256 rows and more of linears in FP8. Written for
sglang 0.5.23.

Experts keep sglang's kernels if they have another activation than ``silu(gate) * up``, a limit of
it or biases, sizes that are not multiples of 64, more than 1024 experts or more than 64 for a
token, or if the server has LoRA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor, nn

from jitquant.integrations import _sglang_experts as of_experts
from jitquant.integrations._engines import compute, product
from jitquant.loader import NvccNotFoundError
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import find_nvcc
from jitquant.nn._matmul import is_hopper

COMPUTE = compute()
_LOGGER = logging.getLogger(__name__)
_QUANTIZATION = "sglang.srt.layers.quantization"
USERS = (
    f"{_QUANTIZATION}.modelopt_quant",
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4",
)
"""The modules that import sglang's two functions for linears by Marlin with NVFP4."""
EXPERTS_USERS = (f"{_QUANTIZATION}.marlin_utils_fp4", f"{_QUANTIZATION}.modelopt_quant")
"""Where sglang's function is found that prepares experts for Marlin with NVFP4."""
EXPERTS = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"
"""The module that multiplies by experts with Marlin."""


def prepare(original: Callable[[Any], None], layer: Any) -> None:
    """Around ``prepare_nvfp4_layer_for_marlin``: on Hopper the weight stays as it is stored.

    Args:
        original: sglang's function.
        layer: with ``weight`` uint8 (N, K / 2), ``weight_scale`` (N, K / 16) and
            ``weight_global_scale``, the factor that dequantizes.
    """
    if not is_hopper(layer.weight.device):
        original(layer)
        return
    gsa = layer.weight_global_scale.detach().to(torch.float32).reshape(1)
    for name, data in (
        ("weight", layer.weight.data.contiguous()),
        ("weight_scale", layer.weight_scale.data.contiguous()),
        ("weight_global_scale", gsa),
    ):
        setattr(layer, name, nn.Parameter(data, requires_grad=False))
    layer.workspace = None


def apply(
    original: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global_scale: Tensor,
    workspace: Tensor | None,
    size_n: int,
    size_k: int,
    bias: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Around ``apply_fp4_marlin_linear``: the product of a weight that `prepare` left as it is."""
    parts = weight, weight_scale, weight_global_scale
    if weight.dtype != torch.uint8:  # Marlin's are int32
        return original(input, *parts, workspace, size_n, size_k, bias, **more)
    return product(input, parts, bias, COMPUTE)


def register() -> None:
    """Hooks these functions into sglang. Without nvcc nothing changes, with a warning."""
    try:
        find_nvcc(Memo())
    except NvccNotFoundError as error:
        _LOGGER.warning("jitquant: NVFP4 layers keep sglang's kernels, because %s", error)
        return
    hooks: dict[str, Callable[..., Any]] = {f"{EXPERTS}.fused_marlin_moe": of_experts.experts}
    for module in USERS:
        hooks[f"{module}.prepare_nvfp4_layer_for_marlin"] = prepare
        hooks[f"{module}.apply_fp4_marlin_linear"] = apply
    for module in EXPERTS_USERS:
        hooks[f"{module}.prepare_moe_nvfp4_layer_for_marlin"] = of_experts.prepare
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
