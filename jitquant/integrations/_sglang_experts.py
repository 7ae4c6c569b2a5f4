"""sglang: experts in NVFP4 with this project's products; see `jitquant.integrations.sglang`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jitquant.nn._matmul import is_hopper
from jitquant.ops.experts import EXPERTS, MOST_EXPERTS, MOST_TOP_K

_TILE = 64  # sizes are multiples of it where weights are decoded once for many rows

LIMITS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
"""Fields of sglang's ``MoeRunnerConfig`` that change ``silu(gate) * up``."""


def supports(layer: Any) -> bool:
    """Whether `jitquant.nvfp4_experts` computes what a layer of experts does.

    Args:
        layer: with ``w13_weight`` uint8 (E, 2 I, H / 2), gates before ups, and ``w2_weight`` uint8
            (E, H, I / 2).
    """
    config, up, down = layer.moe_runner_config, layer.w13_weight, layer.w2_weight
    return (
        bool(config.is_gated)
        and config.activation == "silu"
        and all(getattr(config, name, None) is None for name in LIMITS)
        and all(getattr(layer, name, None) is None for name in ("w13_bias", "w2_bias"))
        and up.shape[0] <= MOST_EXPERTS
        and (config.top_k is None or config.top_k <= MOST_TOP_K)
        and up.shape[1] == 4 * down.shape[2]
        and all(2 * weight.shape[2] % _TILE == 0 for weight in (up, down))
        and not _has_lora()
    )


def _has_lora() -> bool:
    """Whether the server runs adapters, whose products read Marlin's weights."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return bool(args.enable_lora or args.lora_paths)


def prepare(original: Callable[..., None], layer: Any, group_size: int | None = None) -> None:
    """Around ``prepare_moe_nvfp4_layer_for_marlin``: on Hopper weights stay as they are stored.

    Args:
        original: sglang's function.
        layer: with ``w13_weight`` and ``w2_weight`` as for `supports`, ``w13_weight_scale`` and
            ``w2_weight_scale``, and ``w13_weight_scale_2`` and ``w2_weight_scale_2`` (E,), the
            factors that dequantize.
        group_size: 16.
    """
    if not (is_hopper(layer.w13_weight.device) and supports(layer)):
        original(layer, group_size)
        return
    for name in ("w13", "w2"):
        gsa = getattr(layer, f"{name}_weight_scale_2").detach().to(torch.float32).contiguous()
        for part, data in (
            ("weight", getattr(layer, f"{name}_weight").data.contiguous()),
            ("weight_scale", getattr(layer, f"{name}_weight_scale").data.contiguous()),
            ("weight_scale_2", gsa),
        ):
            setattr(layer, f"{name}_{part}", nn.Parameter(data, requires_grad=False))
    layer.workspace = None


def experts(
    original: Callable[..., Tensor],
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_scale: Tensor,
    w2_scale: Tensor,
    gating_output: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Around ``fused_marlin_moe``: the products of weights that `prepare` left as they are.

    Returns:
        (T, H); with ``no_combine`` the weighted outputs of each expert (T, k, H).
    """
    if w1.dtype != torch.uint8:  # Marlin's are int32
        return original(
            hidden_states=hidden_states,
            w1=w1,
            w2=w2,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            gating_output=gating_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            **more,
        )
    ids = topk_ids
    if expert_map is not None:  # -1: another process has the expert, or no one the row
        ids = torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)])
    rows, k = ids.shape
    x, weights = hidden_states, topk_weights
    apart = bool(more.get("no_combine"))
    if apart:
        x, ids, weights = x.repeat_interleave(k, 0), ids.reshape(-1, 1), weights.reshape(-1, 1)
    factor = more.get("routed_scaling_factor")
    if factor is not None and not apart:
        weights = weights * factor
    arguments = {
        "x": x,
        "gate_up_fp4": w1,
        "gate_up_sf": w1_scale,
        "gate_up_gsa": more["w1_global_scale"],
        "down_fp4": w2,
        "down_sf": w2_scale,
        "down_gsa": more["w2_global_scale"],
        "topk_ids": ids.contiguous(),
        "topk_weights": weights.contiguous(),
        "dtype": None,
    }
    y = EXPERTS.one_tensor(arguments, None)
    return y.view(rows, k, -1) if apart else y
