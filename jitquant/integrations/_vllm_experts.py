"""vLLM: experts in NVFP4 with this project's products; see `jitquant.integrations.vllm`.

vLLM chooses a backend for experts in `oracle.nvfp4`, whose list cannot be extended from outside.
So the three functions that its quantization methods imported from there are replaced in them, and
pass on to vLLM's own whatever `JitquantNvFp4Experts` does not support.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import vllm.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import nvfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
from vllm.platforms import current_platform

from jitquant.formats import NVFP4_BLOCK
from jitquant.nn._matmul import HOPPER
from jitquant.nn.experts import NVFP4Experts, SwiGLUExperts

Shape = tuple[int, ...]


class Backend(Enum):
    """Beside vLLM's ``NvFp4MoeBackend``."""

    JITQUANT = "JITQUANT"


class JitquantNvFp4Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Experts with ``silu(gate) * up`` by `jitquant.nn.NVFP4Experts`: W4A16, like Marlin.

    The weights are not repacked, and scales of activations in a checkpoint are ignored.
    """

    @staticmethod
    def is_supported_config(cls: Any, moe_config: Any, *rest: Any) -> tuple[bool, str | None]:
        """vLLM's checks, and what these products lack."""
        sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        for lacks, what in (
            (moe_config.has_bias, "biases"),
            (moe_config.swiglu_limit is not None, "a limit of SwiGLU"),
            (any(size % NVFP4_BLOCK for size in sizes), f"sizes of {sizes}"),
        ):
            if lacks:
                return False, f"kernel does not support {what}"
        found: tuple[bool, str | None] = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, *rest
        )
        return found

    @staticmethod
    def activation_format() -> Any:
        """Rows of tokens, not batches by expert."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cuda() and current_platform.is_device_capability(HOPPER))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return bool(weight_key == kNvfp4Static)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    def finalize_weight_and_reduce_impl(self) -> Any:
        """`apply` returns weighted sums."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[Shape, Shape, Shape]:
        """The result is all that vLLM allocates."""
        return (0,), (0,), (M, K)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Takes what the layer has; nothing is copied.

        Args:
            layer: with ``w13_weight`` uint8 (E, 2 I, H / 2), gates before ups, ``w2_weight`` uint8
                (E, H, I / 2), and their scales in the quantization's config.
        """
        up, down = layer.w13_weight, layer.w2_weight
        experts = SwiGLUExperts(up.shape[0], 2 * up.shape[2], 2 * down.shape[2])
        parts = {
            "gate_up_proj_packed": up.data,
            "gate_up_proj_scale": self.w1_scale.data,
            "gate_up_proj_gsa": self.g1_alphas.data,
            "down_proj_packed": down.data,
            "down_proj_scale": self.w2_scale.data,
            "down_proj_gsa": self.g2_alphas.data,
        }
        self.experts = NVFP4Experts.from_parts(experts, parts)
        self.experts.weight_only = True

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the weighted sums of (M, H) rows to ``output``.

        Args:
            hidden_states: (M, H), bfloat16 or float16; with ``apply_router_weight_on_input``
                already multiplied by the weights.
            topk_weights, topk_ids: (M, k).
            expert_map: the index of each expert in this process; -1 for those of others.
        """
        ids = topk_ids if expert_map is None else expert_map[topk_ids]
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.copy_(self.experts(hidden_states, ids, weights))


def select_nvfp4_moe_backend(config: Any, weight_key: Any, activation_key: Any) -> Any:
    """vLLM's function of this name, which tries `JitquantNvFp4Experts` first."""
    ours, wanted = JitquantNvFp4Experts, config.moe_backend == "auto"
    if wanted and not envs.VLLM_TEST_FORCE_FP8_MARLIN:
        keys = (weight_key, activation_key, ours.activation_format())
        if ours.is_supported_config(ours, config, *keys)[0]:
            return Backend.JITQUANT, ours
    return oracle.select_nvfp4_moe_backend(config, weight_key, activation_key)


def convert_to_nvfp4_moe_kernel_format(*, nvfp4_backend: Any, **parts: Any) -> Any:
    """vLLM's function of this name, which leaves weights for `Backend.JITQUANT` as they are."""
    if nvfp4_backend is not Backend.JITQUANT:
        return oracle.convert_to_nvfp4_moe_kernel_format(nvfp4_backend=nvfp4_backend, **parts)
    names = ("w13", "w13_scale", "w13_scale_2", None, "w2", "w2_scale", "w2_scale_2", None)
    return tuple(None if name is None else parts[name].contiguous() for name in names)


def make_nvfp4_moe_quant_config(*, backend: Any, **how: Any) -> Any:
    """vLLM's function of this name; for `Backend.JITQUANT` activations stay as they are."""
    if backend is not Backend.JITQUANT:
        return oracle.make_nvfp4_moe_quant_config(backend=backend, **how)
    return nvfp4_w4a16_moe_quant_config(
        g1_alphas=how["w13_scale_2"],
        g2_alphas=how["w2_scale_2"],
        w1_scale=how["w13_scale"],
        w2_scale=how["w2_scale"],
    )


def register() -> None:
    """Makes vLLM use `JitquantNvFp4Experts` where it is supported. May be called again."""
    for function in (
        select_nvfp4_moe_backend,
        convert_to_nvfp4_moe_kernel_format,
        make_nvfp4_moe_quant_config,
    ):
        for module in (compressed_tensors, modelopt):
            setattr(module, function.__name__, function)
