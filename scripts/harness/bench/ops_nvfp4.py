"""The ops of NVFP4 that are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import jitquant
from harness.bench import plain
from harness.bench.op import Op, Quantized, packed_bytes, vector
from jitquant.numerics import recipes as numerics

HYPER_CONNECTIONS = 4


def _gsa(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.full((1,), 4.0 / plain.DIVISOR, device=device),)


def _deinterleave(op: Any) -> Callable[..., Any]:
    def run(fused: Tensor, gsa: Tensor | None = None) -> Any:
        return jitquant.deinterleave_quantize_nvfp4(fused, fused.shape[1] // 2, gsa, op=op)

    return run


def _plain_dequantize(q: Any) -> Tensor:
    return plain.dequantize(q.x_fp4.view(torch.uint8), q.x_sf, q.gsa)


def _rmsnorm_residual(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return jitquant.rmsnorm_quantize_nvfp4(x, weight, residual=residual)


def _state(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.tensor([1, 0], device=device),)


def _recipe(name: str, *, state: bool = False, **recipe: Any) -> Op:
    """`quantize_nvfp4` by a recipe for training or rotation, beside its definition."""
    said = ", ".join(f"{key}={value!r}" for key, value in recipe.items())

    def run(x: Tensor, *rest: Tensor) -> Any:
        more = {"rng_state": rest[0]} if state else {}
        return jitquant.quantize_nvfp4(x, **recipe, **more)

    def definition(x: Tensor, *rest: Tensor) -> Any:
        more = {"rng_state": rest[0]} if state else {}
        amax = numerics.rotated_amax(x, rotate=recipe.get("rotate", "none"))[0]
        return numerics.quantize_nvfp4_recipe(x, amax, **recipe, **more)

    return Op(
        name,
        f"quantize_nvfp4(x, {said})",
        ("quantize_nvfp4_recipe",),
        run,
        definition,
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
        extra=_state if state else lambda *_: (),
    )


RECIPES = (
    _recipe("recipe-te", rotate="te"),
    _recipe("recipe-64", rotate="64"),
    _recipe("recipe-4over6", select="4over6_mae", e4m3_max=256),
    _recipe("recipe-stochastic", state=True, rounding="stochastic"),
)
"""By recipes for training and rotation."""

NVFP4_OPS = (
    Op(
        "quantize-tensor",
        "quantize_nvfp4(x)",
        ("fused_amax_quantize",),
        lambda x: jitquant.quantize_nvfp4(x),
        plain.quantize,
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
    ),
    Op(
        "quantize-row",
        "quantize_nvfp4(x, granularity='row')",
        ("fused_amax_quantize",),
        lambda x: jitquant.quantize_nvfp4(x, granularity="row"),
        lambda x: plain.quantize(x, "row"),
        1,
        lambda m, n, _: packed_bytes(m, n, m),
    ),
    Op(
        "quantize-given",
        "quantize_nvfp4(x, gsa)",
        ("fused_amax_quantize", "quantize_nvfp4"),
        lambda x, gsa: jitquant.quantize_nvfp4(x, gsa),
        plain.quantize_given,
        1,
        lambda m, n, _: packed_bytes(m, n, 0),
        extra=_gsa,
    ),
    Op(
        "swiglu",
        "deinterleave_quantize_nvfp4(fused, N, op='swiglu')",
        ("deinterleave_quantize",),
        _deinterleave("swiglu"),
        plain.swiglu,
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
        shapes=lambda m, n: ((m, 2 * n),),
    ),
    Op(
        "swiglu-given",
        "deinterleave_quantize_nvfp4(fused, N, gsa, op='swiglu')",
        ("deinterleave_quantize",),
        _deinterleave("swiglu"),
        plain.swiglu_given,
        1,
        lambda m, n, _: packed_bytes(m, n, 0),
        extra=_gsa,
        shapes=lambda m, n: ((m, 2 * n),),
    ),
    Op(
        # 8 columns of gate and 8 of up share a sector of memory, so all of fused is read.
        "select",
        "deinterleave_quantize_nvfp4(fused, N, op='select')",
        ("deinterleave_quantize",),
        _deinterleave("select"),
        plain.select,
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
        shapes=lambda m, n: ((m, 2 * n),),
    ),
    Op(
        "select-given",
        "deinterleave_quantize_nvfp4(fused, N, gsa, op='select')",
        ("deinterleave_quantize",),
        _deinterleave("select"),
        plain.select_given,
        1,
        lambda m, n, _: packed_bytes(m, n, 0),
        extra=_gsa,
        shapes=lambda m, n: ((m, 2 * n),),
    ),
    Op(
        "rmsnorm",
        "rmsnorm_quantize_nvfp4(x, weight)",
        ("fused_rmsnorm_quantize",),
        lambda x, weight: jitquant.rmsnorm_quantize_nvfp4(x, weight),
        plain.rmsnorm,
        1,
        lambda m, n, _: packed_bytes(m, n, 2 * m),
        extra=lambda n, dtype, device: (vector(n, dtype, device),),
    ),
    Op(
        "rmsnorm-residual",
        "rmsnorm_quantize_nvfp4(x, weight, residual=r)",
        ("fused_rmsnorm_quantize",),
        _rmsnorm_residual,
        plain.rmsnorm_residual,
        1,
        lambda m, n, element: packed_bytes(m, n, 2 * m) + m * n * element,
        extra=lambda n, dtype, device: (vector(n, dtype, device),),
        shapes=lambda m, n: ((m, n), (m, n)),
    ),
    Op(
        "mhc",
        f"mhc_rmsnorm_quantize_nvfp4(X, A, weight), {HYPER_CONNECTIONS} hyper-connections",
        ("fused_mhc_rmsnorm_quantize",),
        lambda x, a, weight: jitquant.mhc_rmsnorm_quantize_nvfp4(x, a, weight),
        plain.mhc,
        1,
        lambda m, n, _: packed_bytes(m, n, 2 * m),
        extra=lambda n, dtype, device: (vector(n, dtype, device),),
        shapes=lambda m, n: ((m, HYPER_CONNECTIONS, n), (m, HYPER_CONNECTIONS)),
    ),
    Op(
        "dequantize",
        "dequantize_nvfp4(q)",
        ("dequant_nvfp4", "fused_amax_quantize"),
        lambda q: jitquant.dequantize_nvfp4(q),
        _plain_dequantize,
        1,
        lambda m, n, _: 2 * m * n,
        quantized=Quantized(jitquant.quantize_nvfp4, lambda m, n: packed_bytes(m, n, 1)),
    ),
    *RECIPES,
)
