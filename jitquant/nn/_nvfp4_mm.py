"""The product with a weight in NVFP4 as an op: scaled_mm where PyTorch has it, or nvfp4_linear."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from jitquant.formats import (
    CODES_PER_BYTE,
    FP4_DTYPE,
    NVFP4_BLOCK,
    Compute,
    Granularity,
    Recipe,
    ScaleLayout,
    Select,
)
from jitquant.nn._matmul import has_microscaling, major, register
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4
from jitquant.numerics.linear import refold_e4m3
from jitquant.ops.fp8 import quantize_fp8
from jitquant.ops.linear import LINEAR, LINEAR_FP8, takes_fp8
from jitquant.ops.nvfp4 import quantize_nvfp4
from jitquant.ops.nvfp4_dequantize import dequantize_nvfp4
from jitquant.tensors.nvfp4 import NVFP4Tensor


def nvfp4_arguments(x: NVFP4Tensor, w: NVFP4Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of ``torch.nn.functional.scaled_mm`` for ``x @ w.T``.

    Block scales go in as 128x4 tiles, swizzled here where they are linear. One gsa of each is the
    second level of its scales. With a gsa for each row of ``x`` there is no second level, and the
    product is still to be multiplied by the gsas of both.

    Args:
        x: (..., K), packed along K.
        w: (N, K), packed along K.
        dtype: of the product.
    """
    one = x.gsa.numel() == 1
    swizzles = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    recipes = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    arguments: dict[str, Any] = {"output_dtype": dtype}
    for side, q in (("a", x), ("b", w)):
        codes = q.x_fp4.reshape(-1, q.x_fp4.shape[-1])
        scales = q.x_sf
        if q.scale_layout == "linear":
            scales = swizzle_128x4(scales.reshape(codes.shape[0], -1))
        arguments[f"mat_{side}"] = codes if side == "a" else codes.t()
        arguments[f"scale_{side}"] = [scales, q.gsa] if one else [scales]
        arguments[f"scale_recipe_{side}"] = recipes if one else recipes[:1]
        arguments[f"swizzle_{side}"] = swizzles if one else swizzles[:1]
    return arguments


def scaled_mm_into(
    out: Tensor,
    *,
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: list[Tensor],
    scale_recipe_a: list[ScalingType],
    scale_b: list[Tensor],
    scale_recipe_b: list[ScalingType],
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    output_dtype: torch.dtype,
) -> None:
    """``torch.nn.functional.scaled_mm`` into memory that is there, which it cannot do itself."""
    torch.ops.aten._scaled_mm_v2.out(
        *(mat_a, mat_b),
        *(scale_a, [r.value for r in scale_recipe_a], [s.value for s in swizzle_a]),
        *(scale_b, [r.value for r in scale_recipe_b], [s.value for s in swizzle_b]),
        *(None, output_dtype),
        out=out,
    )


def _on_tensor_cores(device: torch.device, n: int, packed: int) -> bool:
    # cuBLASLt wants rows of 16 bytes.
    return has_microscaling(device) and n % NVFP4_BLOCK == 0 and packed % NVFP4_BLOCK == 0


MOST_ROWS_AS_STORED = 64
"""Up to so many rows of x a GPU without warpgroup products multiplies the weight as it is
stored, 16 rows at a time: from there on a dequantized weight is faster."""

FP8_ROWS = 256
"""From so many rows of x on, a product that may be in FP8 is: below, bytes bound it, not sums."""


def _has_warpgroups(device: torch.device, packed: int) -> bool:
    """Whether `jitquant.nvfp4_linear` takes any number of rows at the speed of tensor cores."""
    return major(device) == 9 and packed * CODES_PER_BYTE % 64 == 0


def _multiplies_as_stored(device: torch.device, rows: int, packed: int) -> bool:
    """Whether `jitquant.nvfp4_linear` takes a product of so many rows."""
    if device.type != "cuda" or _has_warpgroups(device, packed):
        return True
    return rows <= MOST_ROWS_AS_STORED and major(device) >= 8


def _linear(scales: Tensor, layout: str, leading: tuple[int, ...], packed: int) -> Tensor:
    if layout == "linear":
        return scales
    groups = packed * CODES_PER_BYTE // NVFP4_BLOCK
    return unswizzle_128x4(scales, math.prod(leading), groups).view(*leading, groups)


def _nvfp4_mm_out(
    x: Tensor,
    x_sf: Tensor | None,
    x_gsa: Tensor | None,
    x_layout: str,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    w_layout: str,
    bias: Tensor | None,
    residual: Tensor | None,
    compute: str,
    out: Tensor,
) -> None:
    n, packed = w_fp4.shape
    if compute == "fp8" and x_sf is None and math.prod(x.shape[:-1]) >= FP8_ROWS:
        _fp8_product(x, (w_fp4, _linear(w_sf, w_layout, (n,), packed), w_gsa), bias, residual, out)
        return
    if x_sf is not None and x_gsa is not None and _on_tensor_cores(x.device, n, packed):
        q = NVFP4Tensor(x.view(FP4_DTYPE), x_sf, x_gsa, scale_layout=x_layout)
        w = NVFP4Tensor(w_fp4.view(FP4_DTYPE), w_sf, w_gsa, scale_layout=w_layout)
        _scaled_product(q, w, bias, residual, out)
        return
    w_sf = _linear(w_sf, w_layout, (n,), packed)
    if x_sf is not None:
        x_sf = _linear(x_sf, x_layout, tuple(x.shape[:-1]), packed)
    rows = math.prod(x.shape[:-1])
    if _multiplies_as_stored(x.device, rows, packed):
        operands = (x, w_fp4, w_sf, w_gsa, x_sf, x_gsa)
        LINEAR.out(*operands, bias=bias, residual=residual, dtype=out.dtype, y=out)
        return
    product = _dequantized_product(x, x_sf, w_fp4, w_sf).mul_(w_gsa)
    if x_gsa is not None:
        product.mul_(x_gsa.reshape(-1, 1))
    _finish(product, bias, residual, out.view(-1, n))


def _fp8_product(
    x: Tensor,
    weight: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """``x @ w.T + bias + residual`` in FP8; without kernels for it, of the same numbers and rounded
    where they round: the bias and the product with it to bf16, before a residual is added."""
    q = quantize_fp8(x, granularity="row")
    w_fp4, w_sf, w_gsa = weight
    if takes_fp8(x.device, out.shape[-1], x.shape[-1]):
        operands = (q.data, q.scale_inv, *weight)
        LINEAR_FP8.out(*operands, bias=bias, residual=residual, dtype=out.dtype, y=out)
        return
    values, scale_inv = refold_e4m3(w_fp4, w_sf)
    a, b = q.data.view(-1, x.shape[-1]), values[:, : x.shape[-1]]
    product = _wide_product(a.bfloat16(), b.bfloat16())  # in which E4M3 is exact
    product.mul_(w_gsa * scale_inv).mul_(q.scale_inv.view(-1, 1))
    if bias is not None:
        product.add_(bias.bfloat16())
    rounded = product.bfloat16().to(out.dtype)
    _finish(rounded, None, residual, out.view(-1, out.shape[-1]))


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` in fp32 of bf16 or fp16: each product is exact, only the sum rounds."""
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type == "cuda":
            return torch.mm(a, b.t(), out_dtype=torch.float32)
        return torch.mm(a.float(), b.float().t())


def _finish(product: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor) -> None:
    """``y = product + bias + residual``, by way of ``product``."""
    if bias is not None:
        product.add_(bias)
    if residual is not None:
        product.add_(residual.view(y.shape))
    if product is not y:
        y.copy_(product)


def _scaled_product(
    x: NVFP4Tensor,
    w: NVFP4Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    y = out.view(-1, out.shape[-1])
    scaled = x.gsa.numel() == 1
    # What is rounded once more is kept in fp32.
    once = y.dtype == torch.float32 or (scaled and bias is None and residual is None)
    product = y if once else torch.empty_like(y, dtype=torch.float32)
    scaled_mm_into(product, **nvfp4_arguments(x, w, product.dtype))
    if not scaled:
        product.mul_(x.gsa.reshape(-1, 1)).mul_(w.gsa)
    _finish(product, bias, residual, y)


def _without_gsa(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, K) of codes times their scales, which is exact: they have six significant bits."""
    one = torch.ones(1, dtype=torch.float32, device=codes.device)
    q = NVFP4Tensor(codes.view(FP4_DTYPE), scales, one)
    return dequantize_nvfp4(q, dtype).view(-1, q.shape[-1])


def _dequantized_product(x: Tensor, x_sf: Tensor | None, w_fp4: Tensor, w_sf: Tensor) -> Tensor:
    """``x @ w.T`` without the gsas, in fp32."""
    a = x.reshape(-1, x.shape[-1]) if x_sf is None else _without_gsa(x, x_sf, torch.bfloat16)
    return _wide_product(a, _without_gsa(w_fp4, w_sf, a.dtype)[:, : a.shape[1]])


def _nvfp4_mm(*arguments: Any) -> Tensor:
    out = _nvfp4_mm_meta(*arguments)
    operands: tuple[Any, ...] = (*arguments[:-1], out)
    _nvfp4_mm_out(*operands)
    return out


def _nvfp4_mm_meta(*arguments: Any) -> Tensor:
    x, w, dtype = arguments[0], arguments[4], arguments[-1]
    made: Tensor = x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype)
    return made


_OPERANDS = (
    "Tensor x, Tensor? x_sf, Tensor? x_gsa, str x_layout, Tensor w_fp4, Tensor w_sf, Tensor w_gsa,"
    " str w_layout, Tensor? bias, Tensor? residual, str compute"
)
_NVFP4_MM = register(
    f"nvfp4_mm({_OPERANDS}, ScalarType dtype) -> Tensor", _nvfp4_mm, _nvfp4_mm_meta
)
_NVFP4_MM_OUT = register(
    f"nvfp4_mm_out({_OPERANDS}, Tensor(a!) out) -> ()", _nvfp4_mm_out, lambda *_: None
)


def _quantize_bytes(
    x: Tensor,
    gsa: Tensor | None,
    granularity: Granularity,
    recipe: Recipe,
    select: Select,
    scale_layout: ScaleLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    how: dict[str, Any] = {"granularity": granularity, "recipe": recipe, "select": select}
    q = quantize_nvfp4(x, gsa, scale_layout=scale_layout, **how)
    # An op does not return what it was given.
    return q.x_fp4_bytes, q.x_sf, q.gsa if gsa is None else q.gsa.clone()


_QUANTIZE_BYTES = register(
    "nvfp4_bytes(Tensor x, Tensor? gsa, str granularity, str recipe, str select, str scale_layout)"
    " -> (Tensor, Tensor, Tensor)",
    _quantize_bytes,
    _quantize_bytes,
)


def quantized_bytes(
    x: Tensor,
    gsa: Tensor | None,
    granularity: Granularity,
    recipe: Recipe,
    select: Select,
    scale_layout: ScaleLayout,
) -> tuple[Tensor, Tensor, Tensor]:
    """The codes as uint8, block scales and gsa of `jitquant.quantize_nvfp4`.

    For exported programs: ``torch.export.save`` has no name for ``float4_e2m1fn_x2``.

    Args:
        x, gsa, granularity, recipe, select, scale_layout: as there.
    """
    codes, scales, gsa = _QUANTIZE_BYTES(x, gsa, granularity, recipe, select, scale_layout)
    return codes, scales, gsa


def evenly_spaced(x: Tensor) -> Tensor:
    """``x`` (..., K), or a copy, with rows at one distance from each other, as products take it."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return rows.view(x.shape)


Operand = tuple[Tensor, Tensor | None, Tensor | None, str]
"""Codes as uint8, block scales, gsa and the layout of the scales; or values, None, None, any."""


def nvfp4_mm_bytes(
    x: Operand,
    w: Operand,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    compute: Compute = "exact",
) -> Tensor:
    """`nvfp4_mm` of operands whose codes are bytes."""
    result: Tensor = _NVFP4_MM(*x, *w, bias, residual, compute, dtype)
    return result


def nvfp4_mm(
    x: Tensor | NVFP4Tensor,
    w: NVFP4Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    residual: Tensor | None = None,
    compute: Compute = "exact",
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w.T + bias + residual`` with fp32 accumulation; rounded once, except in FP8.

    Args:
        x: (..., K), bfloat16 or float16, its rows at one distance from each other; or packed along
            K, of any scale layout and granularity.
        w: (N, K), packed along K, with one gsa.
        bias: (N,) or None.
        dtype: of the result.
        residual: contiguous (..., N) of that dtype, or None.
        compute: "fp8": an x that is not quantized is multiplied as `jitquant.nvfp4_linear` does it
            with that, from `FP8_ROWS` rows on: rounded to bf16 with the bias, then once more with
            a residual or for another dtype.
        out: contiguous (..., N) of that dtype to write to.

    Returns:
        (..., N), or ``out``.
    """
    weight: Operand = (w.x_fp4_bytes, w.x_sf, w.gsa, w.scale_layout)
    values: Operand
    if isinstance(x, NVFP4Tensor):
        values = (x.x_fp4_bytes, x.x_sf, x.gsa, x.scale_layout)
    else:
        values = (x, None, None, "linear")
    if out is None:
        return nvfp4_mm_bytes(values, weight, bias, residual, dtype, compute)
    _NVFP4_MM_OUT(*values, *weight, bias, residual, compute, out)
    return out
