"""A call of every public function with all its arrays, for tests of DLPack on the CPU and a GPU."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import one_tensor
import torch
from samples import randn
from torch import Tensor

import jitquant
from jitquant.nn import grouped_linear

Wrap = Callable[[Tensor], Any]
"""What makes an array of a tensor, on the device of the test."""

OF_CONTAINERS = ("dequantize", "dequantize_nvfp4", "dequantize_ragged")
"""Functions that take no array, only what others returned."""


def _values(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=torch.float32, seed=seed)


def _weights(device: torch.device, experts: int, n: int, k: int) -> Any:
    stack = _values(experts * n, k, seed=7).to(device)
    q = jitquant.quantize_nvfp4(stack, granularity="row")
    groups = k // 16
    return jitquant.NVFP4Tensor(
        q.x_fp4_bytes.view(experts, n, k // 2).view(torch.float4_e2m1fn_x2),
        q.x_sf.view(experts, n, groups),
        q.gsa,
        None,
        k,
        "linear",
        "row",
    )


def calls(a: Wrap, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls by the name of the function; a norm's residual is returned with the result."""
    x, rows = _values(8, 128), _values(8, 256)
    signs = torch.where(_values(16) > 0, 1, -1).to(torch.int8)
    ends = torch.tensor([3, 3, 8])
    offsets = torch.tensor([0, 3, 3, 8])
    state = torch.tensor([7, 0])
    counts = torch.tensor([2, 4])
    one = torch.tensor([0.01])
    one_weight = jitquant.quantize_weight_nvfp4(_values(32, 128, seed=5).to(device))
    routing = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])

    def with_residual(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        residual = a(_values(8, 128, seed=9))
        q = function(*args, residual=residual, **kwargs)
        return q, torch.from_dlpack(residual)

    def mxfp4() -> Any:
        q = jitquant.quantize_mxfp4(_values(8, 128).to(device))
        codes, scales = (t.view(torch.uint8) for t in q)
        return jitquant.dequantize_mxfp4(a(codes), a(scales), torch.float32)

    whole = _values(128, 256)
    alone = {
        name: functools.partial(lambda function: function(a(whole)), function)
        for name, function in one_tensor.functions().items()
    }
    return alone | {
        "deinterleave_quantize_nvfp4": lambda: jitquant.deinterleave_quantize_nvfp4(
            a(rows), 128, a(one)
        ),
        "dequantize_mxfp4": mxfp4,
        "mhc_rmsnorm_quantize_nvfp4": lambda: jitquant.mhc_rmsnorm_quantize_nvfp4(
            a(_values(8, 2, 128)), a(_values(8, 2)), a(torch.ones(128))
        ),
        "nvfp4_experts": lambda: jitquant.nvfp4_experts(
            a(_values(4, 64).bfloat16()),
            _weights(device, 3, 64, 64),
            _weights(device, 3, 64, 32),
            a(routing),
            a(torch.full((4, 2), 0.5)),
        ),
        "nvfp4_grouped_linear": lambda: jitquant.nvfp4_grouped_linear(
            a(x.bfloat16()), _weights(device, 3, 32, 128), a(ends)
        ),
        "nvfp4_linear": lambda: jitquant.nvfp4_linear(
            a(x.bfloat16()),
            one_weight,
            a(_values(32).bfloat16()),
            residual=a(_values(8, 32).bfloat16()),
        ),
        "quantize_fp8": lambda: jitquant.quantize_fp8(a(x), scale=a(one)),
        "quantize_mxfp4": lambda: jitquant.quantize_mxfp4(
            a(x), rotate="te", signs=a(signs), rounding="stochastic", rng_state=a(state)
        ),
        "quantize_nvfp4": lambda: jitquant.quantize_nvfp4(
            a(x), rotate="te", signs=a(signs), rounding="stochastic", rng_state=a(state)
        ),
        "quantize_nvfp4_both": lambda: jitquant.quantize_nvfp4_both(
            a(_values(32, 128)),
            rotate="te",
            signs=a(signs),
            rounding="stochastic",
            rng_state=a(state),
        ),
        "quantize_per_token_group": lambda: jitquant.quantize_per_token_group(
            a(_values(2, 4, 128)), counts=a(counts)
        ),
        "quantize_ragged": lambda: jitquant.quantize_ragged(
            a(x), a(offsets), scale=a(torch.ones(3))
        ),
        "quantize_ragged_grad": lambda: jitquant.quantize_ragged_grad(
            a(x), a(offsets), scale=a(torch.ones(3))
        ),
        "quantize_weight_nvfp4": lambda: jitquant.quantize_weight_nvfp4(a(rows), gsa=a(one)),
        "ragged_offsets": lambda: jitquant.ops.ragged.ragged_offsets(
            a(torch.tensor([3, 0, 5])), a(torch.tensor([128, 128, 128]))
        ),
        "rmsnorm_quantize_fp8": lambda: with_residual(
            jitquant.rmsnorm_quantize_fp8, a(x), a(torch.ones(128))
        ),
        "rmsnorm_quantize_nvfp4": lambda: with_residual(
            jitquant.rmsnorm_quantize_nvfp4, a(x), a(torch.ones(128))
        ),
        "rmsnorm_quantize_per_token_group": lambda: with_residual(
            jitquant.rmsnorm_quantize_per_token_group, a(x), a(torch.ones(128))
        ),
        "grouped_linear": lambda: grouped_linear(
            jitquant.quantize_nvfp4(a(x)), _weights(device, 3, 32, 128), a(ends)
        ),
    }


def public_functions() -> set[str]:
    """Names of the functions that take arrays."""
    names = {n for n in jitquant.ops.__all__ if n[0].islower()}
    functions = {n for n in names if isinstance(getattr(jitquant.ops, n), types.FunctionType)}
    return functions - set(OF_CONTAINERS) | {"grouped_linear"}


def parts(result: Any) -> list[Tensor]:
    """The tensors of a result, those of a byte an element or less as bytes."""
    if isinstance(result, tuple):
        return [part for each in result for part in parts(each)]
    if isinstance(result, Tensor) and type(result) is Tensor:
        return [result.view(torch.uint8) if result.element_size() == 1 else result]
    fields = [getattr(result, n, None) for n in ("data", "x_fp4_bytes", "x_sf", "gsa")]
    fields += [getattr(result, n, None) for n in ("stored_scales", "amax", "scale_inv")]
    return [part for f in fields if isinstance(f, Tensor) for part in parts(f)]
