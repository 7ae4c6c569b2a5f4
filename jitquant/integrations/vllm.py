"""vLLM: NVFP4 linears and experts with this project's products, on Hopper instead of Marlin.

vLLM calls `register` in each of its processes, through the entry point "jitquant" of
``vllm.general_plugins``; installing both packages is enough. ``VLLM_PLUGINS`` without "jitquant"
turns it off, ``VLLM_DISABLED_KERNELS=JitquantNvFp4LinearKernel,JitquantNvFp4Experts`` either part.
``--linear-backend`` and ``--moe-backend`` override it. ``JITQUANT_COMPUTE=fp8`` multiplies 256 rows
and more in FP8 (``compute="fp8"`` of `jitquant.nvfp4_linear`); experts stay exact. Written for vLLM
0.25.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import NvFp4LinearKernel, register_linear_kernel
from vllm.platforms import PlatformEnum, current_platform

from jitquant.integrations._engines import compute, product
from jitquant.loader import NvccNotFoundError
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import find_nvcc
from jitquant.nn._matmul import HOPPER

_LOGGER = logging.getLogger(__name__)


class JitquantNvFp4LinearKernel(NvFp4LinearKernel):  # type: ignore[misc]
    """``x @ weight.T + bias`` by `jitquant.nvfp4_linear`: W4A16, like Marlin.

    The weight is not repacked. A static activation scale in a checkpoint is ignored, because Hopper
    has no FP4 tensor cores.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """On compute capability 9.0."""
        if not current_platform.is_cuda():
            return False, "jitquant's products need CUDA"
        if compute_capability is None:
            found = current_platform.get_device_capability()
            compute_capability = None if found is None else found.to_int()
        if compute_capability != 10 * HOPPER[0] + HOPPER[1]:
            return False, "jitquant's products need compute capability 9.0"
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Always: vLLM's layers in NVFP4 are all alike."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Takes what the layer has; nothing is repacked.

        Args:
            layer: with ``weight`` uint8 (N, K / 2), ``weight_scale`` (N, K / 16) and
                ``weight_global_scale``, the factor that dequantizes.
        """
        for name in ("weight", "weight_scale"):
            data = getattr(layer, name).data
            setattr(layer, name, nn.Parameter(data.contiguous(), requires_grad=False))
        gsa = layer.weight_global_scale.detach().to(torch.float32).reshape(1)
        layer.weight_global_scale = nn.Parameter(gsa, requires_grad=False)
        layer.jitquant_compute = compute()

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product.

        Args:
            layer: as it is after `process_weights_after_loading`.
            x: (..., K), bfloat16 or float16.
            bias: (N,) or None.

        Returns:
            (..., N) of x's dtype.
        """
        weight = layer.weight, layer.weight_scale, layer.weight_global_scale
        return product(x, weight, bias, layer.jitquant_compute)


def register() -> None:
    """Makes vLLM use `JitquantNvFp4LinearKernel` and `JitquantNvFp4Experts` where they are
    supported. May be called again.

    They precede vLLM's own kernels. For weight-only checkpoints vLLM uses Marlin by name, so that
    name is redirected to the linear kernel. Without nvcc nothing changes, with a warning.
    """
    kernel = JitquantNvFp4LinearKernel
    if not kernel.is_supported()[0]:
        return
    compute()  # refused here, not when a layer is loaded
    try:
        find_nvcc(Memo())
    except NvccNotFoundError as error:
        _LOGGER.warning("jitquant: NVFP4 layers keep vLLM's kernels, because %s", error)
        return
    from vllm.model_executor.layers.quantization import modelopt

    from jitquant.integrations import _vllm_experts

    if kernel.__name__ not in envs.VLLM_DISABLED_KERNELS:
        platform = PlatformEnum.CUDA
        known = linear._POSSIBLE_NVFP4_KERNELS
        if kernel not in known.get(platform, ()):
            register_linear_kernel(kernel, platform, "nvfp4")
            known[platform].insert(0, known[platform].pop())
        for module in (linear, modelopt):
            module.MarlinNvFp4LinearKernel = kernel
    if _vllm_experts.JitquantNvFp4Experts.__name__ not in envs.VLLM_DISABLED_KERNELS:
        _vllm_experts.register()
