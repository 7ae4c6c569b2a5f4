"""The ops of 8-bit formats that are measured.

`cast` is what one pass over a tensor costs at least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import jitquant
from harness.bench import plain_fp8 as plain
from harness.bench.op import Op, Quantized, vector

GROUP = 128


def _scale(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.full((1,), 37.5, device=device),)


def _weight(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (vector(n, dtype, device),)


def _weight_and_scale(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (*_weight(n, dtype, device), *_scale(n, dtype, device))


def _written(floats: Callable[[int, int], int]) -> Callable[[int, int, int], int]:
    """Bytes of the elements and of as many fp32."""
    return lambda m, n, _: m * n + 4 * floats(m, n)


def _tiles(size: int, of: int = GROUP) -> int:
    """How many there are of a size, the last of which may be shorter."""
    return -(-size // of)


def _both(scales: Callable[[int, int], int]) -> Callable[[int, int, int], int]:
    """Bytes of a matrix and its transpose, scales of both included."""
    return lambda m, n, _: 2 * m * n + scales(m, n) + scales(n, m)


def _rmsnorm_residual(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return jitquant.rmsnorm_quantize_fp8(x, weight, residual=residual)


FP8_OPS = (
    Op(
        "cast",
        "quantize_fp8(x, scale=s, amax=False)",
        ("quantize_fp8",),
        lambda x, scale: jitquant.quantize_fp8(x, scale=scale, amax=False),
        plain.cast,
        1,
        _written(lambda m, n: 1),
        extra=_scale,
    ),
    Op(
        "fp8-tensor",
        "quantize_fp8(x)",
        ("quantize_fp8",),
        lambda x: jitquant.quantize_fp8(x),
        plain.quantize,
        2,
        _written(lambda m, n: 2),
    ),
    Op(
        "fp8-tensor-given",
        "quantize_fp8(x, scale=s)",
        ("quantize_fp8",),
        lambda x, scale: jitquant.quantize_fp8(x, scale=scale),
        lambda x, scale: plain.ragged_given(x, scale, 1),
        1,
        _written(lambda m, n: 2),
        extra=_scale,
    ),
    Op(
        "fp8-row",
        "quantize_fp8(x, granularity='row')",
        ("quantize_fp8",),
        lambda x: jitquant.quantize_fp8(x, granularity="row"),
        lambda x: plain.quantize(x, "row"),
        1,
        _written(lambda m, n: 2 * m),
    ),
    Op(
        "fp8-group",
        f"quantize_per_token_group(x, {GROUP})",
        ("quantize_per_token_group",),
        lambda x: jitquant.quantize_per_token_group(x, GROUP),
        plain.group,
        1,
        _written(lambda m, n: m * (n // GROUP)),
    ),
    Op(
        "fp8-group-16",
        "quantize_per_token_group(x, 16)",
        ("quantize_per_token_group",),
        lambda x: jitquant.quantize_per_token_group(x, 16),
        plain.group_16,
        1,
        _written(lambda m, n: m * (n // 16)),
    ),
    Op(
        "fp8-group-vllm",
        f"quantize_per_token_group(x, {GROUP}, recipe='vllm')",
        ("quantize_per_token_group",),
        lambda x: jitquant.quantize_per_token_group(x, GROUP, recipe="vllm"),
        plain.group_vllm,
        1,
        _written(lambda m, n: m * _tiles(n)),
    ),
    Op(
        "fp8-group-tma",
        f"quantize_per_token_group(x, {GROUP}, scale_layout='column_tma')",
        ("quantize_per_token_group",),
        lambda x: jitquant.quantize_per_token_group(x, GROUP, scale_layout="column_tma"),
        plain.group_tma,
        1,
        _written(lambda m, n: 4 * _tiles(m, 4) * _tiles(n)),
    ),
    Op(
        "fp8-group-packed",
        f"quantize_per_token_group(x, {GROUP}, scale_format='ue8m0_packed', "
        "scale_layout='column_tma')",
        ("quantize_per_token_group",),
        lambda x: jitquant.quantize_per_token_group(
            x, GROUP, scale_format="ue8m0_packed", scale_layout="column_tma"
        ),
        plain.group_packed,
        1,
        _written(lambda m, n: 4 * _tiles(m, 4) * _tiles(n, 4 * GROUP)),
    ),
    Op(
        "fp8-group-both",
        f"quantize_per_token_group_both(x, {GROUP})",
        ("quantize_both",),
        lambda x: jitquant.quantize_per_token_group_both(x, GROUP),
        plain.group_both,
        1,
        _both(lambda m, n: 4 * m * _tiles(n)),
    ),
    Op(
        "fp8-block",
        f"quantize_block(w, ({GROUP}, {GROUP}))",
        ("quantize_block",),
        lambda w: jitquant.quantize_block(w, (GROUP, GROUP)),
        plain.block,
        1,
        _written(lambda m, n: _tiles(m) * _tiles(n)),
    ),
    Op(
        "fp8-block-both",
        f"quantize_block_both(w, ({GROUP}, {GROUP}))",
        ("quantize_both",),
        lambda w: jitquant.quantize_block_both(w, (GROUP, GROUP)),
        plain.block_both,
        1,
        _both(lambda m, n: 4 * _tiles(m) * _tiles(n)),
    ),
    Op(
        "int8-row",
        "quantize_fp8(x, granularity='row', dtype=torch.int8)",
        ("quantize_fp8",),
        lambda x: jitquant.quantize_fp8(x, granularity="row", dtype=torch.int8),
        plain.row_int8,
        1,
        _written(lambda m, n: 2 * m),
    ),
    Op(
        "int8-group",
        f"quantize_per_token_group(x, {GROUP}, dtype=torch.int8)",
        ("quantize_per_token_group",),
        lambda x: jitquant.quantize_per_token_group(x, GROUP, dtype=torch.int8),
        plain.group_int8,
        1,
        _written(lambda m, n: m * (n // GROUP)),
    ),
    Op(
        "mxfp8",
        "quantize_mxfp8(x)",
        ("quantize_mxfp8",),
        lambda x: jitquant.quantize_mxfp8(x),
        plain.mxfp8,
        1,
        lambda m, n, _: m * n + m * (n // 32),
    ),
    Op(
        "mxfp8-swizzled",
        "quantize_mxfp8(x, scale_layout='swizzled_128x4')",
        ("quantize_mxfp8",),
        lambda x: jitquant.quantize_mxfp8(x, scale_layout="swizzled_128x4"),
        plain.mxfp8_swizzled,
        1,
        lambda m, n, _: m * n + 128 * _tiles(m, 128) * 4 * _tiles(n, 128),
    ),
    Op(
        "mxfp8-both",
        "quantize_mxfp8_both(x)",
        ("quantize_both",),
        lambda x: jitquant.quantize_mxfp8_both(x),
        plain.mxfp8_both,
        1,
        _both(lambda m, n: m * _tiles(n, 32)),
    ),
    Op(
        "fp8-rmsnorm",
        "rmsnorm_quantize_fp8(x, weight)",
        ("rmsnorm_quantize",),
        lambda x, weight: jitquant.rmsnorm_quantize_fp8(x, weight),
        plain.rmsnorm,
        1,
        _written(lambda m, n: 3 * m),
        extra=_weight,
    ),
    Op(
        "fp8-rmsnorm-given",
        "rmsnorm_quantize_fp8(x, weight, scale=s, amax=False)",
        ("rmsnorm_quantize",),
        lambda x, weight, scale: jitquant.rmsnorm_quantize_fp8(x, weight, scale=scale, amax=False),
        plain.rmsnorm_given,
        1,
        _written(lambda m, n: m + 1),
        extra=_weight_and_scale,
    ),
    Op(
        "fp8-rmsnorm-group",
        f"rmsnorm_quantize_per_token_group(x, weight, {GROUP})",
        ("rmsnorm_quantize_per_token_group",),
        lambda x, weight: jitquant.rmsnorm_quantize_per_token_group(x, weight, GROUP),
        plain.rmsnorm_group,
        1,
        _written(lambda m, n: m * (n // GROUP) + m),
        extra=_weight,
    ),
    Op(
        "fp8-rmsnorm-residual",
        "rmsnorm_quantize_fp8(x, weight, residual=r)",
        ("rmsnorm_quantize",),
        _rmsnorm_residual,
        plain.rmsnorm_residual,
        1,
        lambda m, n, element: m * n * (1 + element) + 12 * m,
        extra=_weight,
        shapes=lambda m, n: ((m, n), (m, n)),
    ),
    Op(
        "fp8-rmsnorm-residual-given",
        "rmsnorm_quantize_fp8(x, weight, residual=r, scale=s, amax=False)",
        ("rmsnorm_quantize",),
        lambda x, residual, weight, scale: jitquant.rmsnorm_quantize_fp8(
            x, weight, residual=residual, scale=scale, amax=False
        ),
        plain.rmsnorm_residual_given,
        1,
        lambda m, n, element: m * n * (1 + element) + 4 * (m + 1),
        extra=_weight_and_scale,
        shapes=lambda m, n: ((m, n), (m, n)),
    ),
    Op(
        "fp8-rmsnorm-residual-group",
        f"rmsnorm_quantize_per_token_group(x, weight, {GROUP}, residual=r)",
        ("rmsnorm_quantize_per_token_group",),
        lambda x, residual, weight: jitquant.rmsnorm_quantize_per_token_group(
            x, weight, GROUP, residual=residual
        ),
        plain.rmsnorm_residual_group,
        1,
        lambda m, n, element: m * n * (1 + element) + 4 * m * (_tiles(n) + 1),
        extra=_weight,
        shapes=lambda m, n: ((m, n), (m, n)),
    ),
    Op(
        "fp8-silu",
        "swiglu_quantize_fp8(fused)",
        ("swiglu_quantize",),
        lambda fused: jitquant.swiglu_quantize_fp8(fused),
        plain.swiglu,
        1,
        _written(lambda m, n: 2 * m),
        shapes=lambda m, n: ((m, 2 * n),),
    ),
    Op(
        "fp8-silu-given",
        "swiglu_quantize_fp8(fused, scale=s, amax=False)",
        ("swiglu_quantize",),
        lambda fused, scale: jitquant.swiglu_quantize_fp8(fused, scale=scale, amax=False),
        plain.swiglu_given,
        1,
        _written(lambda m, n: 1),
        extra=_scale,
        shapes=lambda m, n: ((m, 2 * n),),
    ),
    Op(
        "fp8-silu-group",
        f"swiglu_quantize_per_token_group(fused, {GROUP})",
        ("swiglu_quantize_per_token_group",),
        lambda fused: jitquant.swiglu_quantize_per_token_group(fused, GROUP),
        plain.swiglu_group,
        1,
        _written(lambda m, n: m * (n // GROUP)),
        shapes=lambda m, n: ((m, 2 * n),),
    ),
    Op(
        "fp8-dequantize",
        "quantize_per_token_group(x).dequantize()",
        ("dequantize", "quantize_per_token_group"),
        lambda q: q.dequantize(),
        lambda q: plain.dequantize_group(q.data, q.scale_inv),
        1,
        lambda m, n, _: 2 * m * n,
        quantized=Quantized(
            lambda x: jitquant.quantize_per_token_group(x, GROUP),
            lambda m, n: m * n + 4 * m * (n // GROUP),
        ),
    ),
)
