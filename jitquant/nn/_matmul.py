"""The product of FP8 matrices as an op: on the tensor cores where PyTorch has it, or exact.

The ops of these modules are opaque to ``torch.compile``: Inductor's lowering of ``scaled_mm`` does
not know every scale layout, and which path is taken is decided where the op runs. They are in
``torch.ops.jitquant`` and check nothing; who calls them does.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from jitquant.formats import E8M0_DTYPE
from jitquant.ops.library import define
from jitquant.tensors.fp8 import QuantizedTensor

TILE = 128
"""Elements that share a scale; all sizes of an `fp8_mm` are multiples of it.

Each size is what one of the three products of a layer sums over, and scaled_mm was run on an H200
with multiples of 128 alone.
"""

HOPPER = (9, 0)
"""The compute capability with warpgroup products."""


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) for all else."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


# Dynamo warns of functions with a cache, and would trace the query. This is what
# torch.compiler.assume_constant_result does, but that imports Dynamo: 2 s and 800 modules.
vars(capability)["_dynamo_marked_constant"] = True


def major(device: torch.device) -> int:
    """The first number of `capability`."""
    return capability(device)[0]


def is_hopper(device: torch.device) -> bool:
    """Whether a device has compute capability 9.0."""
    return capability(device) == HOPPER


def has_fp8_blockwise(device: torch.device) -> bool:
    """Whether scaled_mm takes 1x128 and 128x128 scales there: sm_90 and CUDA 12.9 or newer."""
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return major(device) == 9 and cuda >= (12, 9)


def has_microscaling(device: torch.device) -> bool:
    """Whether scaled_mm takes NVFP4 and MXFP8 there: sm_100 or newer."""
    return major(device) >= 10


def block_scale_format(device: torch.device) -> Literal["float32", "ue8m0"]:
    """Of FP8 groups and blocks, as the tensor cores of a device want it.

    "ue8m0", powers of two, where scaled_mm takes MXFP8 and no scales in fp32: as TransformerEngine
    and DeepGEMM do there. "float32" elsewhere.
    """
    return "ue8m0" if has_microscaling(device) else "float32"


def output_dtype(x: Tensor) -> torch.dtype:
    """Of the product of ``x``: autocast's where autocast is enabled on its device, else its own."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def is_exporting() -> bool:
    """Whether ``torch.export`` traces the call.

    PyTorch 2.11 compiles ``torch.compiler.is_exporting()`` to True whoever asks.
    """
    flag: bool = getattr(torch.compiler, "_is_exporting_flag", True)
    return flag and torch.compiler.is_exporting()


def cut(product: Tensor, rows: int, cols: int) -> Tensor:
    """The first rows and columns, contiguous, as a tensor that the last op made.

    Compiled by PyTorch 2.11, an autograd.Function has no gradients if its last op returns its own
    argument: ``.contiguous()`` and ``.to()`` of a tensor that is so already.
    """
    if product.shape == (rows, cols):
        return product
    return product[:rows, :cols].clone(memory_format=torch.contiguous_format)


def groups(data: Tensor, scales: Tensor, scale_format: str = "float32") -> QuantizedTensor:
    """A matrix with 1x128 scales in layout "column", from its parts."""
    return QuantizedTensor(data, scales, None, None, "fp8_group", (1, TILE), scale_format, "column")


def blocks(data: Tensor, scales: Tensor, scale_format: str = "float32") -> QuantizedTensor:
    """A matrix with 128x128 scales in layout "row_padded", from its parts."""
    tile = (TILE, TILE)
    return QuantizedTensor(data, scales, None, None, "fp8_block", tile, scale_format, "row_padded")


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


def _mxfp8_scales(q: QuantizedTensor) -> Tensor:
    """Powers of two of groups or blocks as scaled_mm reads those of MXFP8, swizzled.

    The four groups of 32 in one of 128 share its scale, and are neighbors in the swizzled layout.
    """
    # A power of two in fp32 has E8M0's exponent, NaN's too.
    exponents = q.scale_inv.view(torch.int32) >> 23
    rows, tiles = q.data.shape[0] // TILE, q.data.shape[1] // TILE
    if q.block[0] == TILE:
        lines = exponents[:, :tiles].reshape(rows, tiles, 1, 1).expand(-1, -1, 32, 4)
    else:
        lines = exponents.reshape(rows, 4, 32, tiles).permute(0, 3, 2, 1)
    return (lines * 0x01010101).contiguous().flatten().view(E8M0_DTYPE)


def mxfp8_arguments(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of scaled_mm for ``a @ b.T`` as MXFP8, which is exact.

    Args:
        a, b: as in `fp8_arguments`, with scales that are powers of two ("ue8m0").
        dtype: of the product.
    """
    return {
        "mat_a": a.data,
        "mat_b": b.data.t(),
        "scale_a": _mxfp8_scales(a),
        "scale_recipe_a": ScalingType.BlockWise1x32,
        "swizzle_a": SwizzleType.SWIZZLE_32_4_4,
        "scale_b": _mxfp8_scales(b),
        "scale_recipe_b": ScalingType.BlockWise1x32,
        "swizzle_b": SwizzleType.SWIZZLE_32_4_4,
        "output_dtype": dtype,
    }


def fp8_product(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` of the dequantized operands, in fp32, rounded once."""
    with torch.autocast(a.device.type, enabled=False):
        product = a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()
    return product.to(dtype)


def _fp8_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_rows: int,
    scale_format: str,
    dtype: torch.dtype,
) -> Tensor:
    left = groups(a, a_scales, scale_format)
    right = (groups if b_rows == 1 else blocks)(b, b_scales, scale_format)
    # float16 is rounded from the sum in fp32.
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    if has_fp8_blockwise(a.device):
        arguments = fp8_arguments(left, right, wide)
    elif has_microscaling(a.device) and scale_format == "ue8m0":
        arguments = mxfp8_arguments(left, right, wide)
    else:
        return fp8_product(left, right, dtype)
    return scaled_mm(**arguments).to(dtype)


def register(schema: str, implementation: Any, meta: Any) -> Any:
    """Defines an op in ``torch.ops.jitquant``, without a derivative, and returns it."""
    tags = [torch.Tag.needs_exact_strides]
    define(schema, cpu=implementation, cuda=implementation, meta=meta, tags=tags)
    return getattr(torch.ops.jitquant, schema.partition("(")[0]).default


_FP8_MM = register(
    "fp8_mm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, int b_rows, str scale_format,"
    " ScalarType dtype) -> Tensor",
    _fp8_mm,
    lambda a, a_scales, b, *rest: a.new_empty((a.shape[0], b.shape[0]), dtype=rest[-1]),
)


def fp8_mm(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` with fp32 accumulation.

    Args:
        a: (M, K) in groups of 128, layout "column"; see `groups`.
        b: (N, K) in groups, or in blocks of 128x128, layout "row_padded"; see `blocks`. Its scales
            have the format of a's.
        dtype: of the result.

    Returns:
        (M, N).
    """
    operands = (a.data, a.stored_scales, b.data, b.stored_scales)
    result: Tensor = _FP8_MM(*operands, b.block[0], a.scale_format, dtype)
    return result
