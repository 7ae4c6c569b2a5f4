"""What an eager call costs the host, beside ``torch.abs`` in the same run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import jitquant
from harness import timing
from jitquant import NVFP4Tensor, QuantizedActivation, QuantizedRaggedTensor, QuantizedTensor

MODULES = (
    "deinterleave_quantize",
    "dequant_nvfp4",
    "fused_amax_quantize",
    "fused_rmsnorm_quantize",
    "quantize_nvfp4",
    "quantize_weight_nvfp4",
    "dequantize",
    "quantize_block",
    "quantize_fp8",
    "quantize_per_token_group",
    "quantize_mxfp8",
    "quantize_both",
    "quantize_ragged",
    "quantize_ragged_nvfp4",
    "quantize_ragged_grad",
    "rmsnorm_quantize",
    "rmsnorm_quantize_per_token_group",
    "swiglu_quantize",
    "swiglu_quantize_per_token_group",
)
ROUNDS = 5
"""Each call is timed this often, all calls in turn; the median counts."""


@dataclass(frozen=True)
class HostCall:
    """A call that makes its results, and the same call into buffers."""

    name: str
    new: Callable[[], Any]
    into: Callable[[], Any]


@dataclass(frozen=True)
class HostRow:
    """Microseconds of host time, and ratios to `torch.abs` with and without ``out=``.

    ``compiled_us`` is a `torch.compile`d function that makes the call with new results.
    """

    name: str
    us: float
    ratio: float
    out_us: float
    out_ratio: float
    compiled_us: float | None


def calls(m: int, n: int, device: torch.device) -> tuple[HostCall, ...]:
    """The calls that are timed, on (m, n) in bf16; `torch.abs`, which they are held against, first.

    Args:
        m: rows.
        n: columns.
        device: a GPU.
    """
    x = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    y, residual = torch.empty_like(x), torch.zeros_like(x)
    fused = torch.randn(m, 2 * n, device=device, dtype=torch.bfloat16)
    weight = torch.ones(n, device=device, dtype=torch.bfloat16)
    gsa = torch.full((1,), 0.002, device=device)
    out = QuantizedActivation.empty((m, n), device=device)
    rows = QuantizedActivation.empty((m, n), device=device, granularity="row")
    normed = QuantizedActivation.empty((m, n), device=device, granularity="row", inv_rms=True)
    quantize, rmsnorm = jitquant.quantize_nvfp4, jitquant.rmsnorm_quantize_nvfp4
    deinterleave, dequantize = jitquant.deinterleave_quantize_nvfp4, jitquant.dequantize_nvfp4
    normed_tensor = QuantizedActivation.empty((m, n), device=device, inv_rms=True)
    weight_out = NVFP4Tensor.empty((m, n), device=device)
    given = quantize(x, gsa)
    return (
        HostCall("torch.abs(x)", lambda: torch.abs(x), lambda: torch.abs(x, out=y)),
        HostCall("quantize_nvfp4(x)", lambda: quantize(x), lambda: quantize(x, out=out)),
        HostCall(
            "quantize_nvfp4(x, gsa)", lambda: quantize(x, gsa), lambda: quantize(x, gsa, out=out)
        ),
        HostCall(
            "quantize_nvfp4(x, granularity='row')",
            lambda: quantize(x, granularity="row"),
            lambda: quantize(x, granularity="row", out=rows),
        ),
        HostCall(
            "rmsnorm_quantize_nvfp4(x, weight)",
            lambda: rmsnorm(x, weight),
            lambda: rmsnorm(x, weight, out=normed),
        ),
        HostCall(
            "rmsnorm_quantize_nvfp4(x, weight, residual=r)",
            lambda: rmsnorm(x, weight, residual=residual),
            lambda: rmsnorm(x, weight, residual=residual, out=normed),
        ),
        HostCall(
            "rmsnorm_quantize_nvfp4(x, weight, granularity='tensor')",
            lambda: rmsnorm(x, weight, granularity="tensor"),
            lambda: rmsnorm(x, weight, granularity="tensor", out=normed_tensor),
        ),
        HostCall(
            "quantize_weight_nvfp4(w)",
            lambda: jitquant.quantize_weight_nvfp4(x),
            lambda: jitquant.quantize_weight_nvfp4(x, out=weight_out),
        ),
        HostCall(
            "deinterleave_quantize_nvfp4(fused, N)",
            lambda: deinterleave(fused, n),
            lambda: deinterleave(fused, n, out=out),
        ),
        HostCall(
            "deinterleave_quantize_nvfp4(fused, N, gsa)",
            lambda: deinterleave(fused, n, gsa),
            lambda: deinterleave(fused, n, gsa, out=out),
        ),
        HostCall(
            "dequantize_nvfp4(q)", lambda: dequantize(given), lambda: dequantize(given, out=y)
        ),
    )


def calls_8_bit(m: int, n: int, device: torch.device) -> tuple[HostCall, ...]:
    """The same of the 8-bit formats, without `torch.abs`.

    Args:
        m: rows.
        n: columns.
        device: a GPU.
    """
    x = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    fused = torch.randn(m, 2 * n, device=device, dtype=torch.bfloat16)
    weight = torch.ones(n, device=device, dtype=torch.bfloat16)
    y, scale = torch.empty_like(x), torch.ones(1, device=device)
    empty = functools.partial(QuantizedTensor.empty, (m, n), device=device)
    tensor, rows, groups = empty(), empty(format="fp8_row"), empty(format="fp8_group")
    blocks, mx = empty(format="fp8_block"), empty(format="mxfp8")
    normed = empty(format="fp8_row", inv_rms=True)
    normed_groups = empty(format="fp8_group", inv_rms=True)
    fp8, group, mxfp8 = (
        jitquant.quantize_fp8,
        jitquant.quantize_per_token_group,
        jitquant.quantize_mxfp8,
    )
    block, silu = jitquant.quantize_block, jitquant.swiglu_quantize_fp8
    rmsnorm, rmsnorm_group = (
        jitquant.rmsnorm_quantize_fp8,
        jitquant.rmsnorm_quantize_per_token_group,
    )
    silu_group = jitquant.swiglu_quantize_per_token_group
    static, static_normed = empty(amax=False), empty(amax=False, inv_rms=True)
    both = jitquant.quantize_per_token_group_both
    both_out = both(x)
    offsets = torch.tensor([0, m], device=device)
    ragged = functools.partial(QuantizedRaggedTensor.empty, (m, n), offsets)
    ragged_fp8, ragged_nvfp4 = ragged(), ragged(format="nvfp4")
    ragged_grad = ragged(dtype=torch.float8_e5m2, dbias=True)
    given = group(x)
    return (
        HostCall("quantize_fp8(x)", lambda: fp8(x), lambda: fp8(x, out=tensor)),
        HostCall(
            "quantize_fp8(x, scale=s)",
            lambda: fp8(x, scale=scale),
            lambda: fp8(x, scale=scale, out=tensor),
        ),
        HostCall(
            "quantize_fp8(x, scale=s, amax=False)",
            lambda: fp8(x, scale=scale, amax=False),
            lambda: fp8(x, scale=scale, amax=False, out=static),
        ),
        HostCall(
            "quantize_fp8(x, granularity='row')",
            lambda: fp8(x, granularity="row"),
            lambda: fp8(x, granularity="row", out=rows),
        ),
        HostCall(
            "quantize_per_token_group(x, 128)", lambda: group(x), lambda: group(x, out=groups)
        ),
        HostCall(
            "quantize_per_token_group_both(x, 128)", lambda: both(x), lambda: both(x, out=both_out)
        ),
        HostCall("quantize_mxfp8(x)", lambda: mxfp8(x), lambda: mxfp8(x, out=mx)),
        HostCall("quantize_block(w)", lambda: block(x), lambda: block(x, out=blocks)),
        HostCall(
            "rmsnorm_quantize_fp8(x, weight)",
            lambda: rmsnorm(x, weight),
            lambda: rmsnorm(x, weight, out=normed),
        ),
        HostCall(
            "rmsnorm_quantize_fp8(x, weight, scale=s, amax=False)",
            lambda: rmsnorm(x, weight, scale=scale, granularity="tensor", amax=False),
            lambda: rmsnorm(
                x, weight, scale=scale, granularity="tensor", amax=False, out=static_normed
            ),
        ),
        HostCall(
            "rmsnorm_quantize_per_token_group(x, weight, 128)",
            lambda: rmsnorm_group(x, weight),
            lambda: rmsnorm_group(x, weight, out=normed_groups),
        ),
        HostCall("swiglu_quantize_fp8(fused)", lambda: silu(fused), lambda: silu(fused, out=rows)),
        HostCall(
            "swiglu_quantize_per_token_group(fused, 128)",
            lambda: silu_group(fused),
            lambda: silu_group(fused, out=groups),
        ),
        HostCall(
            "quantize_ragged(x, offsets)",
            lambda: jitquant.quantize_ragged(x, offsets),
            lambda: jitquant.quantize_ragged(x, offsets, out=ragged_fp8),
        ),
        HostCall(
            "quantize_ragged(x, offsets, format='nvfp4')",
            lambda: jitquant.quantize_ragged(x, offsets, format="nvfp4"),
            lambda: jitquant.quantize_ragged(x, offsets, format="nvfp4", out=ragged_nvfp4),
        ),
        HostCall(
            "quantize_ragged_grad(grad, offsets)",
            lambda: jitquant.quantize_ragged_grad(x, offsets),
            lambda: jitquant.quantize_ragged_grad(x, offsets, out=ragged_grad),
        ),
        HostCall(
            "quantize_per_token_group(x).dequantize()",
            lambda: given.dequantize(torch.bfloat16),
            lambda: jitquant.dequantize(given, out=y),
        ),
    )


def run(m: int, n: int, device: torch.device, *, compiled: bool = True) -> list[HostRow]:
    """The rows of the table, `torch.abs` first.

    Args:
        m: rows.
        n: columns.
        device: a GPU.
        compiled: whether to time the calls under ``torch.compile`` too.
    """
    timed = (*calls(m, n, device), *calls_8_bit(m, n, device))
    variants: dict[tuple[int, str], Callable[[], Any]] = {}
    for i, call in enumerate(timed):
        variants[i, "new"], variants[i, "into"] = call.new, call.into
        if compiled:
            variants[i, "compiled"] = torch.compile(call.new, fullgraph=True, dynamic=False)
    times = timing.host_medians_us(variants, rounds=ROUNDS)
    base, base_out = times[0, "new"], times[0, "into"]
    return [
        HostRow(
            call.name,
            times[i, "new"],
            times[i, "new"] / base,
            times[i, "into"],
            times[i, "into"] / base_out,
            times.get((i, "compiled")),
        )
        for i, call in enumerate(timed)
    ]
