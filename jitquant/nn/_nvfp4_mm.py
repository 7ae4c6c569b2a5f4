"""The product of NVFP4 matrices as an op: on the tensor cores where PyTorch has it, or exact.

Nothing is allocated but the result and, where they are not given, the bytes of `scratch_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from jitquant.formats import CODES_PER_BYTE, FP4_DTYPE, NVFP4_BLOCK, ceil_to
from jitquant.nn._matmul import has_nvfp4, register
from jitquant.numerics.layout import swizzle_128x4
from jitquant.ops.linear import LINEAR
from jitquant.ops.nvfp4 import dequantize_nvfp4
from jitquant.tensors.nvfp4 import QuantizedActivation

_ALIGNMENT = 256  # bytes: what cuBLAS and the kernels like best

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a part of a buffer of bytes."""


def nvfp4_arguments(
    x: QuantizedActivation, w: QuantizedActivation, dtype: torch.dtype
) -> dict[str, Any]:
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
    return has_nvfp4(device) and n % NVFP4_BLOCK == 0 and packed % NVFP4_BLOCK == 0


_FEW_ROWS = 64
"""Up to so many rows of x the weight is multiplied as it is stored, 16 rows at a time: on an H200 a
dequantized weight is faster from there on."""


def _multiplies_as_stored(x: QuantizedActivation, w: QuantizedActivation) -> bool:
    device = w.device
    return (
        device.type == "cuda"
        and not has_nvfp4(device)
        and x.scale_layout == w.scale_layout == "linear"
        and x.num_tokens <= _FEW_ROWS
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _exact(device: torch.device) -> torch.dtype:
    """What holds a code times its scale as it is: they have six significant bits."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def scratch_parts(rows: int, w: Tensor) -> tuple[Part, ...]:
    """What a product of (rows, K) by (N, K) needs besides its operands and its result.

    Args:
        rows: as above.
        w: the codes of (N, K).

    Returns:
        The product in fp32; where there is no scaled_mm for it, also a gsa of one, and both
        operands without their gsas.
    """
    n, packed = w.shape
    product: Part = ((rows, n), torch.float32)
    if _on_tensor_cores(w.device, n, packed):
        return (product,)
    k, exact = packed * CODES_PER_BYTE, _exact(w.device)
    return product, ((1,), torch.float32), ((rows, k), exact), ((n, k), exact)


def bytes_of_parts(parts: Sequence[Part]) -> int:
    """Bytes of a buffer that `carve` takes these parts from."""
    return sum(ceil_to(math.prod(shape) * dtype.itemsize, _ALIGNMENT) for shape, dtype in parts)


def carve(buffer: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Tensors in the memory of a uint8 buffer, one after the other."""
    made, begin = [], 0
    for shape, dtype in parts:
        size = math.prod(shape) * dtype.itemsize
        made.append(buffer[begin : begin + size].view(dtype).view(shape))
        begin += ceil_to(size, _ALIGNMENT)
    return made


def _nvfp4_mm_out(
    x_fp4: Tensor,
    x_sf: Tensor,
    x_gsa: Tensor,
    x_layout: str,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    w_layout: str,
    bias: Tensor | None,
    out: Tensor,
    scratch: Tensor,
) -> None:
    x = QuantizedActivation(x_fp4.view(FP4_DTYPE), x_sf, x_gsa, scale_layout=x_layout)
    w = QuantizedActivation(w_fp4.view(FP4_DTYPE), w_sf, w_gsa, scale_layout=w_layout)
    if _multiplies_as_stored(x, w):
        LINEAR.out(x_fp4, w_fp4, w_sf, w_gsa, x_sf, x_gsa, bias=bias, dtype=out.dtype, y=out)
        return
    y = out.view(-1, w_fp4.shape[0])
    product, *exact = carve(scratch, scratch_parts(y.shape[0], w_fp4))
    if y.dtype == torch.float32:
        product = y
    if exact:
        _exact_product(x, w, exact, product)
        scaled = False
    else:
        scaled = x_gsa.numel() == 1
        if scaled and bias is None:  # what is rounded once more is kept in fp32
            product = y
        scaled_mm_into(product, **nvfp4_arguments(x, w, product.dtype))
    if not scaled:
        product.mul_(x_gsa.reshape(-1, 1)).mul_(w_gsa)
    if bias is not None:
        product.add_(bias)
    if product is not y:
        y.copy_(product)


def _exact_product(
    x: QuantizedActivation, w: QuantizedActivation, memory: list[Tensor], product: Tensor
) -> None:
    """``x @ w.T`` without the gsas: each product is exact, only the sum in fp32 rounds."""
    one, a, b = memory
    one.fill_(1)
    for q, values in ((x, a), (w, b)):
        shape = (*q.x_fp4.shape[:-1], values.shape[1])
        dequantize_nvfp4(replace(q, gsa=one), out=values.view(shape))
    with torch.autocast(a.device.type, enabled=False):
        if a.dtype == torch.float32:
            torch.mm(a, b.t(), out=product)
        else:
            torch.ops.aten.mm.dtype_out(a, b.t(), torch.float32, out=product)


def _nvfp4_mm(*arguments: Any) -> Tensor:
    out = _nvfp4_mm_fake(*arguments)
    scratch = _new_scratch(math.prod(out.shape[:-1]), arguments[4])
    written: Any = (out, scratch)
    _nvfp4_mm_out(*arguments[:-1], *written)
    return out


def _new_scratch(rows: int, w: Tensor) -> Tensor:
    size = bytes_of_parts(scratch_parts(rows, w))
    return torch.empty(size, dtype=torch.uint8, device=w.device)


def _nvfp4_mm_fake(*arguments: Any) -> Tensor:
    x, w, dtype = arguments[0], arguments[4], arguments[-1]
    made: Tensor = x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype)
    return made


def _nvfp4_mm_out_fake(*_: Any) -> None:
    pass


_OPERANDS = (
    "Tensor x_fp4, Tensor x_sf, Tensor x_gsa, str x_layout, Tensor w_fp4, Tensor w_sf,"
    " Tensor w_gsa, str w_layout, Tensor? bias"
)
_NVFP4_MM = register(
    f"nvfp4_mm({_OPERANDS}, ScalarType dtype) -> Tensor", _nvfp4_mm, _nvfp4_mm_fake
)
_NVFP4_MM_OUT = register(
    f"nvfp4_mm_out({_OPERANDS}, Tensor(a!) out, Tensor(b!) scratch) -> ()",
    _nvfp4_mm_out,
    _nvfp4_mm_out_fake,
)


def nvfp4_mm(
    x: QuantizedActivation,
    w: QuantizedActivation,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """``x @ w.T + bias`` with fp32 accumulation, rounded once.

    Args:
        x: (..., K), packed along K, of any scale layout and granularity.
        w: (N, K), packed along K, with one gsa.
        bias: (N,) or None.
        dtype: of the result.
        out: contiguous (..., N) of that dtype to write to.
        scratch: uint8, at least the bytes of `scratch_parts`, written over.

    Returns:
        (..., N), or ``out``.
    """
    operands = (
        *(x.x_fp4_bytes, x.x_sf, x.gsa, x.scale_layout),
        *(w.x_fp4_bytes, w.x_sf, w.gsa, w.scale_layout),
        bias,
    )
    if out is None and scratch is None:
        result: Tensor = _NVFP4_MM(*operands, dtype)
        return result
    if out is None:
        shape = (*x.x_fp4.shape[:-1], w.x_fp4.shape[0])
        out = torch.empty(shape, dtype=dtype, device=x.device)
    if scratch is None:
        scratch = _new_scratch(x.num_tokens, w.x_fp4)
    _NVFP4_MM_OUT(*operands, out, scratch)
    return out
