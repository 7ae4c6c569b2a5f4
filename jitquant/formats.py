"""The number formats: maxima, block sizes, dtypes, names, and the shapes that they are stored in.

E2M1 (FP4): 1 sign bit, 2 exponent bits (bias 1), 1 mantissa bit; no infinity and no NaN.
E4M3 (FP8, ``float8_e4m3fn``): 1 sign bit, 4 exponent bits (bias 7), 3 mantissa bits; no infinity,
NaN is ``S.1111.111``.

NVFP4 is E2M1 in blocks of 16 along one dimension, with one E4M3 scale for each block and one fp32
scale for each tensor (or for each row).
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

E2M1_MAX: Final = 6.0
"""Largest E2M1 value."""

E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each of the three-bit codes 0..7; bit 3 of a code is the sign."""

E2M1_SIGN_BIT: Final = 8
"""Mask of the sign in a four-bit code."""

E4M3_MAX: Final = 448.0
"""Largest finite E4M3 value."""

E4M3_NAN: Final = 0x7F
"""The byte that every NaN is stored as."""

NVFP4_BLOCK: Final = 16
"""Elements that share one E4M3 scale."""

NVFP4_DIVISOR: Final = E2M1_MAX * E4M3_MAX
"""2688: ``gsa = amax / 2688``, so that the block with the largest element gets the scale 448."""

FP32_MAX: Final = 3.4028234663852886e38
"""Largest finite fp32 value; encoding factors are clamped to it."""

FP32_TINIEST: Final = 2.0**-149
"""Least positive fp32 value; what is below it may become 0."""

FP8_SCALE_MIN: Final = 2.0**-128 + 2.0**-149
"""Least fp32 value whose reciprocal is finite: the least number that FP8 takes as a scale."""

FP4_DTYPE: Final = torch.float4_e2m1fn_x2
"""Two E2M1 codes in a byte; the element with the even index is in the low nibble."""

SCALE_DTYPE: Final = torch.float8_e4m3fn
"""Dtype of NVFP4 block scales."""

INPUT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that can be quantized, and that can be dequantized to."""

CODES_PER_BYTE: Final = 2

SWIZZLE_ROWS: Final = 128
"""Rows of one tile of the swizzled scale layout."""

SWIZZLE_COLS: Final = 4
"""Scales in one row of a tile of the swizzled scale layout."""

MHC_MAX: Final = 8
"""Largest number of hyper-connections that the fused mHC op takes."""

MAX_PARTIALS: Final = 2048
"""Maxima that the first launch of a norm leaves to the second at most; launch.h's kMaxPartials."""

BOTH_PARTIALS: Final = 512
"""The same of a matrix, and of its transpose; recipes/launch.h's kBothPartials."""

Granularity = Literal["tensor", "row"]
FP8Granularity = Literal["tensor", "row", "1x128", "128x128"]
ScaleLayout = Literal["linear", "swizzled_128x4"]
Recipe = Literal["te", "vllm", "te_flush"]
WeightBlock = Literal["1x16", "16x16"]
DeinterleaveOp = Literal["select", "swiglu"]

GRANULARITIES: Final[tuple[str, ...]] = get_args(Granularity)
"""What one gsa covers: the whole tensor, or one row (one index of the leading dimensions)."""

FP8_GRANULARITIES: Final[tuple[str, ...]] = (*GRANULARITIES, "1x128", "128x128")
"""What one scale of `jitquant.quantize_fp8` covers: these, or 128 neighbors of a row, or a tile."""

SCALE_LAYOUTS: Final[tuple[str, ...]] = get_args(ScaleLayout)
"""Row major, or the 128x4 tiles that cuBLASLt's block-scaled matrix multiplication reads."""

RECIPES: Final[tuple[str, ...]] = get_args(Recipe)
"""Arithmetic of NVFP4:

- "te": TransformerEngine's (the default).
- "vllm": that of vLLM, SGLang and FlashInfer.
- "te_flush": TransformerEngine's, but blocks whose scale underflows have code 0, as with "vllm".
"""

WEIGHT_BLOCKS: Final[tuple[str, ...]] = get_args(WeightBlock)
"""Elements of a weight that share one scale."""

DEINTERLEAVE_OPS: Final[tuple[str, ...]] = get_args(DeinterleaveOp)
"""What is done with a gate and an up value: keep the gate, or ``silu(gate) * up``."""

E5M2_MAX: Final = 57344.0
"""Largest finite E5M2 value (``float8_e5m2``: bias 15, infinity 0x7C; results saturate instead)."""

E5M2_NAN: Final = 0x7F
"""The byte that every NaN is stored as in E5M2."""

INT8_MAX: Final = 127.0
"""What the largest element of a group becomes in INT8; -128 comes of negative infinity alone."""

MXFP8_BLOCK: Final = 32
"""Elements that share one E8M0 scale in the OCP MX formats."""

E8M0_DTYPE: Final = torch.float8_e8m0fnu
"""Powers of two: byte e is ``2^(e - 127)``, 255 is NaN."""

E4M3: Final = torch.float8_e4m3fn
"""The usual FP8 dtype of values; e5m2 is for gradients."""

FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
"""FP8 formats that can be quantized to; e5m2 is for gradients."""

GROUP_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Dtypes that groups and blocks can be quantized to."""

QUANTIZED_MAX: Final = {
    torch.float8_e4m3fn: E4M3_MAX,
    torch.float8_e5m2: E5M2_MAX,
    torch.int8: INT8_MAX,
}
"""Largest magnitude of each dtype that is quantized to."""

GROUP_SIZES: Final = (16, 32, 64, 128, 256)
"""Neighbors in a row that can share a scale."""

BLOCK_SIDES: Final = (16, 32, 64, 128)
BLOCK_SHAPES: Final = tuple((side, side) for side in BLOCK_SIDES)
"""Rows and columns of the tiles that can share a scale."""

GROUP_EPS: Final = {"te": 1e-10, "deepgemm": 1e-4, "vllm": 1e-10}
"""What each recipe raises the amax of a group or block to."""

GROUP_EPS_MIN: Final = 1e-32
"""Least eps: no scale and no reciprocal of one leaves the normal range."""

GroupRecipe = Literal["te", "deepgemm", "vllm"]
ScaleFormat = Literal["float32", "ue8m0", "ue8m0_packed"]
GroupScaleLayout = Literal["row", "column", "column_tma"]
BlockScaleLayout = Literal["row", "row_padded"]
Activation = Literal["none", "relu", "silu", "gelu", "qgelu", "srelu"]

GROUP_RECIPES: Final[tuple[str, ...]] = get_args(GroupRecipe)
"""Arithmetic of groups and blocks: TransformerEngine's and torchao's, DeepGEMM's, vLLM's."""

SCALE_FORMATS: Final[tuple[str, ...]] = get_args(ScaleFormat)
"""Scales as fp32; as fp32 that hold powers of two; as their exponents, four to an int32."""

GROUP_SCALE_LAYOUTS: Final[tuple[str, ...]] = get_args(GroupScaleLayout)
"""Row major; column major; column major with columns padded to 16 bytes."""

BLOCK_SCALE_LAYOUTS: Final[tuple[str, ...]] = get_args(BlockScaleLayout)
"""Row major; row major with rows padded to four scales."""

RAGGED_FORMATS: Final[tuple[str, ...]] = ("fp8_tensor", "nvfp4", "mxfp8")
"""What the tensors of one buffer can be quantized to."""

ACTIVATIONS: Final[tuple[str, ...]] = get_args(Activation)
"""Functions whose derivative can be fused into the cast of a gradient. gelu is the tanh form, qgelu
``x * sigmoid(1.702 * x)``, srelu ``relu(x)^2``."""

MXFP4_BLOCK: Final = 32
"""Elements of MXFP4 that share one E8M0 scale."""

HADAMARD_SIZES: Final = (16, 32, 64, 128, 256)
"""Neighbors that a Hadamard transform mixes."""

TE_SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""What TransformerEngine's random Hadamard transform multiplies 16 neighbors with before H."""

Rotation = Literal["none", "te", "16", "32", "64", "128", "256"]
Rounding = Literal["nearest", "stochastic"]
Select = Literal[
    "none",
    "4over6_mae",
    "4over6_mse",
    "4over6_mae_fast",
    "4over6_mse_fast",
    "4over6_abs_max",
    "static_6",
    "static_4",
]
Mxfp4Scaling = Literal[
    "floor", "ceil", "even", "rceil", "gptoss_up", "gptoss_down", "static_6", "static_4"
]

ROTATIONS: Final[tuple[str, ...]] = ("none", "te", *map(str, HADAMARD_SIZES))
"""None, TransformerEngine's random Hadamard transform, Sylvester's of as many neighbors."""

ROUNDINGS: Final[tuple[str, ...]] = get_args(Rounding)
"""How a value becomes an E2M1 code."""

SELECTS: Final[tuple[str, ...]] = get_args(Select)
"""How an NVFP4 block's scale is selected: recipe "te", of two the better one, fouroversix's."""

STATIC_SELECTS: Final = ("static_6", "static_4")
"""Those of them that choose nothing, so that any rounding may follow."""

E4M3_MAXIMA: Final = (448, 256)
"""Largest NVFP4 block scale, which the block with the tensor's amax gets."""

MXFP4_SCALINGS: Final[tuple[str, ...]] = get_args(Mxfp4Scaling)
"""How the amax of an MXFP4 block is rounded to a power of two."""

Compute = Literal["exact", "fp8"]

COMPUTES: Final[tuple[str, ...]] = ("exact", "fp8")
"""How a product with a weight in NVFP4 is computed."""

AMAX_ALGORITHMS: Final[tuple[str, ...]] = ("max", "most_recent")
"""What delayed scaling takes from the history of amaxes."""


def one_of(name: str, value: object, accepted: tuple[Any, ...]) -> None:
    """Raises ValueError if ``value`` is not one of those that are accepted."""
    if value not in accepted:
        names = ", ".join(map(repr, accepted))
        one_of = "one of " if len(accepted) > 1 else ""
        raise ValueError(f"{name}: expected {one_of}{names}, got {value!r}")


def as_bytes(t: Tensor) -> Tensor:
    """A tensor of elements of one byte as uint8, which PyTorch can do more with; others as is."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """An uninitialized tensor. PyTorch's deterministic mode fills it, but not as FP4 codes."""
    if dtype == FP4_DTYPE:
        return torch.empty(shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return (a + b - 1) // b


def ceil_to(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return (size + multiple - 1) // multiple * multiple


def swizzled_shape(rows: int, groups: int) -> tuple[int, int]:
    """Shape of swizzled scales: ``rows`` up to a multiple of 128, ``groups`` to one of 4."""
    return ceil_to(rows, SWIZZLE_ROWS), ceil_to(groups, SWIZZLE_COLS)


def fp4_shapes(
    shape: tuple[int, ...], scale_layout: str = "linear", dim: int = -1, block: int = NVFP4_BLOCK
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes in memory of the packed codes and of the scales of a tensor of a logical shape.

    Args:
        shape: (..., N); with ``dim=0`` (K, N).
        scale_layout: "linear" or "swizzled_128x4"; with ``dim=0`` "linear" only.
        dim: the packed dimension, -1 or 0.
        block: elements that share a scale; the last block of a row is padded.
    """
    blocks = (shape[dim] + block - 1) // block
    packed = blocks * (block // CODES_PER_BYTE)
    if dim == 0:
        return (packed, *shape[1:]), (blocks, *shape[1:])
    codes = (*shape[:-1], packed)
    if scale_layout == "swizzled_128x4":
        return codes, swizzled_shape(math.prod(shape[:-1]), blocks)
    return codes, (*shape[:-1], blocks)


def fp4_scales_shape(
    codes: tuple[int, ...], scale_layout: str, dim: int = -1, block: int = NVFP4_BLOCK
) -> tuple[int, ...]:
    """Shape in memory of the scales of packed codes with this shape; arguments: `fp4_shapes`."""
    size = CODES_PER_BYTE * codes[dim]
    shape = (size, *codes[1:]) if dim == 0 else (*codes[:-1], size)
    return fp4_shapes(shape, scale_layout, dim, block)[1]


def scales_shape(
    leading: tuple[int, ...], groups: int, scale_format: str, scale_layout: str
) -> tuple[int, ...]:
    """Shape in memory of ``groups`` scales for each row of a tensor with these leading dimensions.

    Args:
        leading: (*batch, T); () is one row.
        groups: scales of a row.
        scale_format: "ue8m0_packed" has four in an element.
        scale_layout: "row", "linear": (*leading, P); "row_padded": (*leading, P up to 4);
            "column": (*batch, P, T); "column_tma": (*batch, P, T up to 4); "swizzled_128x4":
            (rows up to 128, P up to 4).
    """
    if scale_format == "ue8m0_packed":
        groups = ceil_to(groups, 4) // 4
    if scale_layout in ("row", "linear"):
        return (*leading, groups)
    if scale_layout == "row_padded":
        return (*leading, ceil_to(groups, 4))
    if scale_layout == "swizzled_128x4":
        return swizzled_shape(math.prod(leading), groups)
    batch, rows = (leading[:-1], leading[-1]) if leading else ((), 1)
    return (*batch, groups, rows if scale_layout == "column" else ceil_to(rows, 4))
