"""The ops of many tensors in one buffer that are measured, and those of one tensor beside them.

All segments have as many elements, so what they cost over the one tensor is finding them.
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

SEGMENTS = (8, 64, 1024)


@functools.lru_cache
def _offsets(segments: int, rows: int, device: torch.device) -> Tensor:
    return torch.tensor([i * rows // segments for i in range(segments + 1)], device=device)


def _fp8(segments: int) -> Op:
    """The tensor of "fp8-tensor" as so many tensors."""
    return Op(
        f"fp8-ragged-{segments}",
        f"quantize_ragged(x, offsets) of {segments} segments",
        ("quantize_ragged",),
        lambda x: jitquant.quantize_ragged(x, _offsets(segments, x.shape[0], x.device)),
        lambda x: plain.ragged(x, segments),
        2,
        _written(lambda m, n: 2 * segments),
    )


def _nvfp4(segments: int) -> Op:
    """The tensor of "quantize-tensor" as so many tensors."""
    return Op(
        f"nvfp4-ragged-{segments}",
        f"quantize_ragged(x, offsets, format='nvfp4') of {segments} segments",
        ("quantize_ragged_nvfp4",),
        lambda x: jitquant.quantize_ragged(
            x, _offsets(segments, x.shape[0], x.device), format="nvfp4"
        ),
        lambda x: plain.ragged_nvfp4(x, segments),
        2,
        lambda m, n, _: packed_bytes(m, n, 2 * segments),
    )


def _mxfp8(segments: int) -> Op:
    """The tensor of "mxfp8" as so many tensors."""
    return Op(
        f"mxfp8-ragged-{segments}",
        f"quantize_ragged(x, offsets, format='mxfp8') of {segments} segments",
        ("quantize_ragged_mxfp8",),
        lambda x: jitquant.quantize_ragged(
            x, _offsets(segments, x.shape[0], x.device), format="mxfp8"
        ),
        lambda x: (plain.mxfp8(x)[0], plain.mxfp8(x)[1].flatten()),
        1,
        lambda m, n, _: m * n + m * n // 32,
    )


def _fp8_given(segments: int) -> Op:
    """With the scales given, and the amaxes made: of delayed scaling."""
    return Op(
        f"fp8-ragged-{segments}-given",
        f"quantize_ragged(x, offsets, scale=s) of {segments} segments",
        ("quantize_ragged",),
        lambda x, scale: jitquant.quantize_ragged(
            x, _offsets(segments, x.shape[0], x.device), scale=scale
        ),
        lambda x, scale: plain.ragged_given(x, scale, segments),
        1,
        _written(lambda m, n: 2 * segments),
        extra=lambda *shape: (_scale(*shape)[0].expand(segments).contiguous(),),
    )


def _gradient(segments: int) -> Op:
    """Gradients times the derivative of SiLU, and the sums of their columns; segments are rows."""
    return Op(
        f"fp8-ragged-grad-{segments}",
        "quantize_ragged_grad(grad, offsets, act_input=x, activation='silu') of "
        f"{segments} segments",
        ("quantize_ragged_grad",),
        lambda grad, x: jitquant.quantize_ragged_grad(
            grad,
            _offsets(segments, grad.shape[0], grad.device),
            act_input=x,
            activation="silu",
            dtype=torch.float8_e4m3fn,
        ),
        lambda grad, x: plain.ragged_gradient(grad, x, segments),
        2,
        _written(lambda m, n: 2 * segments + segments * n),
        shapes=lambda m, n: ((m, n), (m, n)),
    )


_ONE = {op.name: op for op in (*NVFP4_OPS, *FP8_OPS)}
RAGGED_OPS = (
    _ONE["quantize-tensor"],
    *(_nvfp4(segments) for segments in SEGMENTS),
    _ONE["fp8-tensor"],
    *(_fp8(segments) for segments in SEGMENTS),
    _ONE["mxfp8"],
    _mxfp8(64),
    _ONE["fp8-tensor-given"],
    *(_fp8_given(segments) for segments in SEGMENTS),
    *(_gradient(segments) for segments in (8, 64)),
)
