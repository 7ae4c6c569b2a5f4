"""The ops of many tensors in one buffer that are measured, and those of one tensor beside them.

All groups have as many elements, so what they cost over the one tensor is finding them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import jitquant
from harness.bench import plain_fp8 as plain
from harness.bench.op import Op, packed_bytes
from harness.bench.ops_fp8 import FP8_OPS, _scale, _written
from harness.bench.ops_nvfp4 import NVFP4_OPS

GROUPS = (8, 64, 1024)


@functools.lru_cache
def _offsets(groups: int, rows: int, device: torch.device) -> Tensor:
    return torch.tensor([i * rows // groups for i in range(groups + 1)], device=device)


def _fp8(groups: int) -> Op:
    """The tensor of "fp8-tensor" as so many tensors."""
    return Op(
        f"fp8-ragged-{groups}",
        f"quantize_ragged(x, offsets) of {groups} groups",
        ("quantize_ragged",),
        lambda x: jitquant.quantize_ragged(x, _offsets(groups, x.shape[0], x.device)),
        lambda x: plain.ragged(x, groups),
        lambda m, n: ((m, n),),
        2,
        _written(lambda m, n: 2 * groups),
    )


def _nvfp4(groups: int) -> Op:
    """The tensor of "quantize-tensor" as so many tensors."""
    return Op(
        f"nvfp4-ragged-{groups}",
        f"quantize_ragged(x, offsets, format='nvfp4') of {groups} groups",
        ("quantize_ragged_nvfp4",),
        lambda x: jitquant.quantize_ragged(
            x, _offsets(groups, x.shape[0], x.device), format="nvfp4"
        ),
        lambda x: plain.ragged_nvfp4(x, groups),
        lambda m, n: ((m, n),),
        2,
        lambda m, n, _: packed_bytes(m, n, 2 * groups),
    )


def _mxfp8(groups: int) -> Op:
    """The tensor of "mxfp8" as so many tensors."""
    return Op(
        f"mxfp8-ragged-{groups}",
        f"quantize_ragged(x, offsets, format='mxfp8') of {groups} groups",
        ("quantize_ragged_mxfp8",),
        lambda x: jitquant.quantize_ragged(
            x, _offsets(groups, x.shape[0], x.device), format="mxfp8"
        ),
        lambda x: (plain.mxfp8(x)[0], plain.mxfp8(x)[1].flatten()),
        lambda m, n: ((m, n),),
        1,
        lambda m, n, _: m * n + m * n // 32,
    )


def _fp8_given(groups: int) -> Op:
    """With the scales given, and the amaxes made: of delayed scaling."""
    return Op(
        f"fp8-ragged-{groups}-given",
        f"quantize_ragged(x, offsets, scale=s) of {groups} groups",
        ("quantize_ragged",),
        lambda x, scale: jitquant.quantize_ragged(
            x, _offsets(groups, x.shape[0], x.device), scale=scale
        ),
        lambda x, scale: plain.ragged_given(x, scale, groups),
        lambda m, n: ((m, n),),
        1,
        _written(lambda m, n: 2 * groups),
        lambda *shape: (_scale(*shape)[0].expand(groups).contiguous(),),
    )


def _gradient(groups: int) -> Op:
    """Gradients times the derivative of SiLU, and the sums of their columns; groups are rows."""
    return Op(
        f"fp8-ragged-grad-{groups}",
        f"quantize_ragged_grad(grad, offsets, act_input=x, activation='silu') of {groups} groups",
        ("quantize_ragged_grad",),
        lambda grad, x: jitquant.quantize_ragged_grad(
            grad,
            _offsets(groups, grad.shape[0], grad.device),
            act_input=x,
            activation="silu",
            dtype=torch.float8_e4m3fn,
        ),
        lambda grad, x: plain.ragged_gradient(grad, x, groups),
        lambda m, n: ((m, n), (m, n)),
        2,
        _written(lambda m, n: 2 * groups + groups * n),
    )


_ONE = {op.name: op for op in (*NVFP4_OPS, *FP8_OPS)}
RAGGED_OPS = (
    _ONE["quantize-tensor"],
    *(_nvfp4(groups) for groups in GROUPS),
    _ONE["fp8-tensor"],
    *(_fp8(groups) for groups in GROUPS),
    _ONE["mxfp8"],
    _mxfp8(64),
    _ONE["fp8-tensor-given"],
    *(_fp8_given(groups) for groups in GROUPS),
    *(_gradient(groups) for groups in (8, 64)),
)
