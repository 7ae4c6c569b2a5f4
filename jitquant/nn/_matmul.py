"""Products of quantized matrices, as two ops: on the tensor cores where PyTorch has them, or exact.

Both are opaque to ``torch.compile``: Inductor's lowering of ``scaled_mm`` does not know every scale
layout, and which path is taken is decided where the op runs. ``fp8_mm`` and ``nvfp4_mm`` in
``torch.ops.jitquant`` check nothing; the modules do.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from jitquant.formats import FP4_DTYPE, NVFP4_BLOCK
from jitquant.ops._declare import LIBRARY
from jitquant.quantized import QuantizedActivation
from jitquant.quantized_tensor import QuantizedTensor
from jitquant.reference.layout import ceil_div, swizzle_128x4

TILE = 128
"""Elements that share a scale; all sizes of an `fp8_mm` are multiples of it.

Each size is what one of the three products of a layer sums over, and scaled_mm was run on an H200
with multiples of 128 alone.
"""


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _major(device: torch.device) -> int:
    """Of a CUDA device's compute capability; 0 for all else."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)[0]


def has_fp8_blockwise(device: torch.device) -> bool:
    """Whether scaled_mm takes 1x128 and 128x128 scales there: sm_90 and CUDA 12.9 or newer."""
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return _major(device) == 9 and cuda >= (12, 9)


def has_nvfp4(device: torch.device) -> bool:
    """Whether scaled_mm takes NVFP4 there: sm_100 or newer."""
    return _major(device) >= 10


def output_dtype(x: Tensor) -> torch.dtype:
    """Of the product of ``x``: autocast's where autocast is enabled on its device, else its own."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def groups(data: Tensor, scales: Tensor) -> QuantizedTensor:
    """A matrix with 1x128 scales in layout "column", from its parts."""
    return QuantizedTensor(data, scales, None, None, "fp8_group", (1, TILE), "float32", "column")


def blocks(data: Tensor, scales: Tensor) -> QuantizedTensor:
    """A matrix with 128x128 scales in layout "row_padded", from its parts."""
    tile = (TILE, TILE)
    return QuantizedTensor(data, scales, None, None, "fp8_block", tile, "float32", "row_padded")


def fp8_arguments(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of scaled_mm for ``a @ b.T``.

    Args:
        a: (M, K) in groups, layout "column": its scales go in as (M, K / 128), strides (1, M).
        b: (N, K) in groups, layout "column", or in blocks, layout "row_padded": the scales of
            blocks go in transposed, as (K / 128 up to a multiple of 4, N / 128), strides (1, that).
            Untransposed they have the same shape for some sizes, and the product is wrong.
        dtype: of the product.
    """
    in_blocks = b.block[0] == TILE
    return {
        "mat_a": a.data,
        "mat_b": b.data.t(),
        "scale_a": a.scale_inv,
        "scale_recipe_a": ScalingType.BlockWise1x128,
        "scale_b": b.scale_inv.t() if in_blocks else b.scale_inv,
        "scale_recipe_b": ScalingType.BlockWise128x128 if in_blocks else ScalingType.BlockWise1x128,
        "output_dtype": dtype,
    }


def nvfp4_arguments(
    x: QuantizedActivation, w: QuantizedActivation, dtype: torch.dtype
) -> dict[str, Any]:
    """The arguments of scaled_mm for ``x @ w.T``.

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


def fp8_product(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` of the values that ``a`` and ``b`` stand for, in fp32, rounded once."""
    with torch.autocast(a.device.type, enabled=False):
        product = a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()
    return product.to(dtype)


def nvfp4_product(x: QuantizedActivation, w: QuantizedActivation) -> Tensor:
    """``x @ w.T`` without the gsas, as fp32 (rows, N).

    An E2M1 code times an E4M3 scale has six significant bits, so bf16 holds it as it is and each
    product is exact: only the sum in fp32 rounds.
    """
    exact = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    one = torch.ones(1, dtype=torch.float32, device=x.device)
    a, b = (replace(q, gsa=one, cols=None).dequantize(exact) for q in (x, w))
    a = a.reshape(-1, a.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        if exact == torch.bfloat16:
            return torch.mm(a, b.t(), out_dtype=torch.float32)
        return torch.mm(a, b.t())


def _fp8_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    left = groups(a, a_scales)
    right = groups(b, b_scales) if b_rows == 1 else blocks(b, b_scales)
    if not has_fp8_blockwise(a.device):
        return fp8_product(left, right, dtype)
    # float16 is rounded from the sum in fp32.
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return scaled_mm(**fp8_arguments(left, right, wide)).to(dtype)


def _nvfp4_mm(
    x_fp4: Tensor,
    x_sf: Tensor,
    x_gsa: Tensor,
    x_layout: str,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    w_layout: str,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    x = QuantizedActivation(x_fp4.view(FP4_DTYPE), x_sf, x_gsa, scale_layout=x_layout)
    w = QuantizedActivation(w_fp4.view(FP4_DTYPE), w_sf, w_gsa, scale_layout=w_layout)
    shape = (*x_fp4.shape[:-1], w_fp4.shape[0])
    # cuBLASLt wants rows of 16 bytes.
    aligned = w_fp4.shape[0] % NVFP4_BLOCK == 0 and w_fp4.shape[1] % NVFP4_BLOCK == 0
    if has_nvfp4(x_fp4.device) and aligned and x_fp4.numel() > 0:
        scaled = x_gsa.numel() == 1
        last = scaled and bias is None  # what is rounded once more is kept in fp32
        wide = dtype if last else torch.float32
        product = scaled_mm(**nvfp4_arguments(x, w, wide))
    else:
        product, scaled = nvfp4_product(x, w), False
    if not scaled:
        product = product * x_gsa.reshape(-1, 1) * w_gsa
    if bias is not None:
        product = product + bias
    return product.to(dtype).reshape(shape)


def _fp8_mm_fake(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _nvfp4_mm_fake(x_fp4: Tensor, *rest: Any) -> Tensor:
    shape = (*x_fp4.shape[:-1], rest[3].shape[0])
    return x_fp4.new_empty(shape, dtype=rest[-1])


def _register(schema: str, implementation: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, implementation, key)
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"jitquant::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.jitquant, name).default


_FP8_MM = _register(
    "fp8_mm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int b_rows, ScalarType dtype)"
    " -> Tensor",
    _fp8_mm,
    _fp8_mm_fake,
)
_NVFP4_MM = _register(
    "nvfp4_mm(Tensor x_fp4, Tensor x_sf, Tensor x_gsa, str x_layout, Tensor w_fp4, Tensor w_sf,"
    " Tensor w_gsa, str w_layout, Tensor? bias, ScalarType dtype) -> Tensor",
    _nvfp4_mm,
    _nvfp4_mm_fake,
)


def fp8_mm(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` with fp32 accumulation.

    Args:
        a: (M, K) in groups of 128, layout "column"; see `groups`.
        b: (N, K) in groups, or in blocks of 128x128, layout "row_padded"; see `blocks`.
        dtype: of the result.

    Returns:
        (M, N).
    """
    result: Tensor = _FP8_MM(a.data, a.stored_scales, b.data, b.stored_scales, b.block[0], dtype)
    return result


def nvfp4_mm(
    x: QuantizedActivation, w: QuantizedActivation, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``x @ w.T + bias`` with fp32 accumulation, rounded once.

    Args:
        x: (..., K), packed along K, of any scale layout and granularity.
        w: (N, K), packed along K, with one gsa.
        bias: (N,) or None.
        dtype: of the result.

    Returns:
        (..., N).
    """
    result: Tensor = _NVFP4_MM(
        *(x.x_fp4_bytes, x.x_sf, x.gsa, x.scale_layout),
        *(w.x_fp4_bytes, w.x_sf, w.gsa, w.scale_layout),
        *(bias, dtype),
    )
    return result


def transposed_blocks(w: QuantizedTensor) -> QuantizedTensor:
    """The transpose of a matrix in 128x128 blocks: the same values, its rows contiguous."""
    rows, cols = w.shape
    row_tiles, col_tiles = ceil_div(rows, TILE), ceil_div(cols, TILE)
    data = w.data.view(torch.uint8).t().contiguous().view(w.dtype)
    scales = w.stored_scales[:, :col_tiles].t()
    return blocks(data, torch.nn.functional.pad(scales, (0, -row_tiles % 4)).contiguous())
