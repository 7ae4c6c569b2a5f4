"""FP8 and INT8 with a scale for a group of neighbors or a block: the ops and public functions.

`jitquant.ops.fp8` documents what all functions share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jitquant.formats import (
    BLOCK_SCALE_LAYOUTS,
    E4M3,
    E5M2_MAX,
    GROUP_EPS_MIN,
    GROUP_RECIPES,
    GROUP_SCALE_LAYOUTS,
    SCALE_FORMATS,
    BlockScaleLayout,
    GroupRecipe,
    GroupScaleLayout,
    Rotation,
    ScaleFormat,
    as_bytes,
    ceil_div,
    scales_shape,
)
from jitquant.numerics import fp8 as numerics
from jitquant.ops import _checks, _checks_fp8, sources
from jitquant.ops._results import (
    BUFFERS,
    fitting,
    fitting_both,
    quantized,
    quantized_both,
)
from jitquant.ops.parts import (
    PARTS,
    Both,
    Part,
    held,
    part_for_both,
    part_for_residual,
    part_for_rope,
)
from jitquant.ops.schema import (
    EIGHT_BITS,
    INTEGERS,
    MATRIX,
    Arguments,
    Cast,
    Number,
    Op,
    Plan,
    Result,
    Rows,
    Rule,
    Values,
    product,
)
from jitquant.tensors import QuantizedTensor

__all__ = [
    "quantize_block",
    "quantize_block_both",
    "quantize_per_token_group",
    "quantize_per_token_group_both",
    "rmsnorm_quantize_per_token_group",
    "swiglu_quantize_per_token_group",
]


def _scales(leading: tuple[int, ...], groups: int, scale_format: str, scale_layout: str) -> Result:
    dtype = torch.int32 if scale_format == "ue8m0_packed" else torch.float32
    return Result(scales_shape(leading, groups, scale_format, scale_layout), dtype)


def _plan_group(
    rows: Rows,
    group_size: int,
    dtype: torch.dtype,
    scale_format: str,
    scale_layout: str,
    fp8_min: float | None,
    fp8_max: float | None,
    counts: Tensor | None = None,
) -> tuple[Result, ...]:
    _checks_fp8.group_size(group_size)
    _checks_fp8.bounds(dtype, fp8_min, fp8_max)
    if counts is not None:
        _checks_fp8.counts_tensor(counts, rows.like, rows.name)
    groups = ceil_div(rows.cols, group_size)
    scales = _scales(rows.leading, groups, scale_format, scale_layout)
    return Result((*rows.leading, rows.cols), dtype), scales


def _quantize_normed_group(
    v: Tensor,
    leading: tuple[int, ...],
    group_size: int,
    dtype: torch.dtype,
    scale_format: str,
    scale_layout: str,
    amax_eps: float | None,
    recipe: str,
    fp8_min: float | None,
    fp8_max: float | None,
    inverse: Tensor,
) -> tuple[Tensor, Tensor]:
    how = (group_size, dtype, scale_format, scale_layout, amax_eps, recipe, fp8_min, fp8_max)
    return numerics.quantize_group_rows(v, leading, *how, inverse=inverse)


GROUP_EPS = Number(
    GROUP_EPS_MIN,
    f"None for the recipe's, or a finite number of at least {GROUP_EPS_MIN}",
    ". Below it the scale of a group of zeros would overflow",
)
"""What amaxes of groups and blocks are raised to."""

_BOUNDS: dict[str, Rule] = {
    "dtype": EIGHT_BITS,
    "fp8_min": Number(-E5M2_MAX, "None or a number from the dtype's least to 0", most=0.0),
    "fp8_max": Number(16.0, "None or a value of the dtype of at least 16", most=E5M2_MAX),
}
"""Of elements."""

_OF_GROUPS = {
    "scale_format": SCALE_FORMATS,
    "scale_layout": GROUP_SCALE_LAYOUTS,
    "recipe": GROUP_RECIPES,
}
_OF_BLOCKS = {
    "scale_format": SCALE_FORMATS[:2],
    "scale_layout": BLOCK_SCALE_LAYOUTS,
    "recipe": GROUP_RECIPES,
}


GROUP = Cast(
    "{takes}, int group_size, Tensor? counts=None, *, ScalarType dtype, {options}"
    'str scale_format="float32", str scale_layout="row", float? eps=None, str recipe="te", '
    "bool zero_padding=True, float? fp8_min=None, float? fp8_max=None",
    ("data", "scale_inv"),
    _plan_group,
    numerics.quantize_group_rows,
    _OF_GROUPS,
    {"counts": INTEGERS, "eps": GROUP_EPS, **_BOUNDS},
)
"""FP8 or INT8 with a scale for neighbors of a row; rows past a count are left out."""

NORMED_GROUP = Cast(
    "{takes}, int group_size, {tail}*, {written}ScalarType dtype, "
    'str scale_format="float32", str scale_layout="row", float? amax_eps=None, str recipe="te", '
    "float? fp8_min=None, float? fp8_max=None",
    ("data", "scale_inv"),
    _plan_group,
    _quantize_normed_group,
    _OF_GROUPS,
    {"amax_eps": GROUP_EPS, **_BOUNDS},
)
"""As GROUP after a norm, whose eps has that name."""


class CountedOp(Op):
    """An op that does not change buffer rows past a count, with ``zero_padding=False``."""

    def _store(
        self, results: Sequence[Tensor], buffers: Sequence[Tensor], arguments: Arguments
    ) -> None:
        counts = arguments["counts"]
        if arguments["zero_padding"] or counts is None:
            super()._store(results, buffers, arguments)
            return
        before = [buffer.clone() for buffer in buffers]
        super()._store(results, buffers, arguments)
        rest = numerics.rows_past_counts(counts, arguments[self.names[0]].shape[:-1])
        for name, buffer, old in zip(self.results, buffers, before, strict=True):
            mask = rest[..., None]
            if name != "data" and arguments["scale_layout"] != "row":
                mask = mask.transpose(-1, -2)
                old, buffer = (t[..., : mask.shape[-1]] for t in (old, buffer))
            buffer.copy_(torch.where(mask, as_bytes(old), as_bytes(buffer)).view(buffer.dtype))


QUANTIZE_PER_TOKEN_GROUP = product(
    "quantize_per_token_group",
    sources.PLAIN,
    GROUP,
    kind=CountedOp,
    module="quantize_per_token_group",
    **BUFFERS,
)
SWIGLU_PER_TOKEN_GROUP = product(
    "swiglu_quantize_per_token_group",
    sources.SWIGLU,
    GROUP,
    kind=CountedOp,
    module="swiglu_quantize_per_token_group",
    **BUFFERS,
)
ROTATED_PER_TOKEN_GROUP = product(
    "rotate_quantize_per_token_group",
    sources.ROTATED,
    GROUP,
    kind=CountedOp,
    module="rotate_quantize_per_token_group",
    part=part_for_rope,
    **BUFFERS,
)


def _divides(scale_format: str, recipe: str) -> bool:
    """Whether elements are divided by their scales."""
    return scale_format == "float32" and recipe == "vllm"


def _part_of_scales(of: Part | None, scale_format: str, recipe: str) -> Part | None:
    if of is None:
        return None
    if _divides(scale_format, recipe):
        return of.narrowed("divided", "-DJITQUANT_GROUP_DIVIDED=1")
    return of.narrowed("multiplied", "-DJITQUANT_GROUP_DIVIDED=0")


def _normed_part(x: Tensor, residual: Tensor | None, scale_format: str, recipe: str) -> Part | None:
    of = _part_of_scales(part_for_residual(x.dtype, residual), scale_format, recipe)
    return of if of is None else held(of, x)


def _part_of_blocks(w: Tensor, scale_format: str, recipe: str) -> Part | None:
    return _part_of_scales(PARTS.get(w.dtype), scale_format, recipe)


RMSNORM_PER_TOKEN_GROUP = product(
    "rmsnorm_quantize_per_token_group",
    sources.NORM,
    NORMED_GROUP,
    part=_normed_part,
    module="rmsnorm_quantize_per_token_group",
    **BUFFERS,
)


def _plan_block(
    w: Tensor,
    block_rows: int,
    block_cols: int,
    dtype: torch.dtype,
    scale_format: str,
    scale_layout: str,
    fp8_min: float | None,
    fp8_max: float | None,
) -> Plan:
    _checks_fp8.block_shape(block_rows, block_cols)
    _checks_fp8.bounds(dtype, fp8_min, fp8_max)
    leading = (*w.shape[:-2], ceil_div(w.shape[-2], block_rows))
    scales = _scales(leading, ceil_div(w.shape[-1], block_cols), scale_format, scale_layout)
    return Plan(w.device, (Result(tuple(w.shape), dtype), scales))


def _plan_group_both(
    x: Tensor,
    group_size: int,
    dtype: torch.dtype,
    scale_format: str,
    scale_layout: str,
    fp8_min: float | None,
    fp8_max: float | None,
) -> Plan:
    _checks_fp8.matrix(x, "x")
    _checks_fp8.group_size(group_size)
    _checks_fp8.bounds(dtype, fp8_min, fp8_max)
    rows, cols = x.shape
    return Plan(
        x.device,
        (
            Result((rows, cols), dtype),
            _scales((rows,), ceil_div(cols, group_size), scale_format, scale_layout),
            Result((cols, rows), dtype),
            _scales((cols,), ceil_div(rows, group_size), scale_format, scale_layout),
        ),
    )


def _plan_block_both(
    w: Tensor,
    block_rows: int,
    block_cols: int,
    dtype: torch.dtype,
    scale_format: str,
    scale_layout: str,
    fp8_min: float | None,
    fp8_max: float | None,
) -> Plan:
    _checks_fp8.matrix(w, "w")
    _checks_fp8.block_shape(block_rows, block_cols)
    _checks_fp8.bounds(dtype, fp8_min, fp8_max)
    rows, cols = w.shape
    tall, wide = ceil_div(rows, block_rows), ceil_div(cols, block_cols)
    return Plan(
        w.device,
        (
            Result((rows, cols), dtype),
            _scales((tall,), wide, scale_format, scale_layout),
            Result((cols, rows), dtype),
            _scales((wide,), tall, scale_format, scale_layout),
        ),
    )


def _part_of_groups_both(
    x: Tensor,
    group_size: int,
    scale_format: str,
    recipe: str,
    fp8_min: float | None,
    fp8_max: float | None,
) -> Part | None:
    plain = (
        group_size == 128
        and scale_format in SCALE_FORMATS[:2]
        and not _divides(scale_format, recipe)
        and fp8_min is None
        and fp8_max is None
    )
    return part_for_both(x, Both.PLAIN if plain else Both.ANY)


def _part_of_blocks_both(
    w: Tensor,
    block_rows: int,
    scale_format: str,
    recipe: str,
    fp8_min: float | None,
    fp8_max: float | None,
) -> Part | None:
    return _part_of_groups_both(w, block_rows, scale_format, recipe, fp8_min, fp8_max)


QUANTIZE_BLOCK = Op(
    "quantize_block",
    ["data", "scale_inv"],
    module="quantize_block",
    plan=_plan_block,
    reference=numerics.quantize_block,
    part=_part_of_blocks,
    choices=_OF_BLOCKS,
    accepts={"w": Values(2, "(..., N, K)"), "eps": GROUP_EPS, **_BOUNDS},
    **BUFFERS,
)
QUANTIZE_PER_TOKEN_GROUP_BOTH = Op(
    "quantize_per_token_group_both",
    ["data", "scale_inv", "data_t", "scale_inv_t"],
    module="quantize_both",
    plan=_plan_group_both,
    reference=numerics.quantize_per_token_group_both,
    choices=_OF_GROUPS,
    accepts={"x": MATRIX, "eps": GROUP_EPS, **_BOUNDS},
    part=_part_of_groups_both,
    **BUFFERS,
)
QUANTIZE_BLOCK_BOTH = Op(
    "quantize_block_both",
    ["data", "scale_inv", "data_t", "scale_inv_t"],
    module="quantize_both",
    plan=_plan_block_both,
    reference=numerics.quantize_block_both,
    choices=_OF_BLOCKS,
    accepts={"w": MATRIX, "eps": GROUP_EPS, **_BOUNDS},
    part=_part_of_blocks_both,
    **BUFFERS,
)

OPS: tuple[Op, ...] = (
    QUANTIZE_PER_TOKEN_GROUP,
    SWIGLU_PER_TOKEN_GROUP,
    ROTATED_PER_TOKEN_GROUP,
    RMSNORM_PER_TOKEN_GROUP,
    QUANTIZE_BLOCK,
    QUANTIZE_PER_TOKEN_GROUP_BOTH,
    QUANTIZE_BLOCK_BOTH,
)
"""Every op of groups and blocks."""


def quantize_per_token_group(
    x: Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    counts: Tensor | None = None,
    zero_padding: bool = True,
    rotate: Rotation = "none",
    signs: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes to FP8 or INT8 with a scale for ``group_size`` neighbors of a row: one launch.

    ``rope`` and ``rotate`` transform each row first, in fp32 and in the same launch: rotary
    position embedding, then the Hadamard transform. DeepSeek's indexer does this to queries and
    keys, with 64 of 128 columns embedded and ``rotate="128"``.

    Args:
        x: (..., N); the last group of a row may be shorter.
        group_size: 16, 32, 64, 128 or 256.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8`` (to nearest, ties to even).
        scale_format: "float32"; "ue8m0": float32 that hold powers of two, rounded up;
            "ue8m0_packed": their exponents, four groups in an int32, the first in the lowest byte,
            zeros for missing groups.
        scale_layout: "row": (..., G); "column": (..., T, G) with strides (1, T), as scaled_mm
            takes them; "column_tma": with strides (1, T up to a multiple of 4), as DeepGEMM does,
            padding zero.
        eps: amaxes are raised to it; None: 1e-10, or 1e-4 with recipe "deepgemm".
        recipe: "te" (TransformerEngine, torchao), "deepgemm" or "vllm"; see ``docs/numerics.md``.
        fp8_min, fp8_max: bounds of the elements, of INT8 too. The amax becomes fp8_max, a value of
            the dtype of at least 16; elements below fp8_min, from the dtype's least to 0, become
            it. None: the dtype's.
        counts: int32 or int64, on x's device: how many rows of each batch are valid, (E,) for x
            (E, T, N), one for (T, N). Rows past the count are not read and influence no scale.
        zero_padding: whether elements and scales of rows past the count become zero. False: they
            are unchanged in ``out``, or uninitialized.
        rotate, signs: as in `jitquant.quantize_nvfp4`.
        rope: cos and sin for the first R columns, or None: both float32 (P, R / 2), contiguous, R a
            multiple of 32, P a divisor of the rows: each row of them serves rows / P rows of x.
        interleaved: whether the pairs of ``rope`` are neighbors instead of columns i and i + R / 2.
        out: buffers of ``QuantizedTensor.empty(x.shape, format="fp8_group", ...)``.

    Returns:
        data (..., N) and scale_inv (..., G).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if type(group_size) is not int:
        group_size = _checks.integer(group_size, "group_size")
    format = "int8_group" if dtype == torch.int8 else "fp8_group"
    form = (format, (1, group_size), scale_format, scale_layout, recipe)
    is_rotated = rotate != "none" or rope is not None or signs is not None or interleaved
    done = QUANTIZE_PER_TOKEN_GROUP.into(
        not is_rotated and (zero_padding or out is not None) and fitting(out, form, dtype),
        x=x,
        group_size=group_size,
        counts=counts,
        dtype=dtype,
        scale_format=scale_format,
        scale_layout=scale_layout,
        eps=eps,
        recipe=recipe,
        zero_padding=zero_padding,
        fp8_min=fp8_min,
        fp8_max=fp8_max,
    )
    if is_rotated:
        done |= sources.rotated_arguments(rotate, signs, rope, interleaved)
        op = ROTATED_PER_TOKEN_GROUP
        target = (zero_padding or out is not None) and fitting(out, form, dtype)
        return quantized(op, op.into(target, **done), form, out)
    return quantized(QUANTIZE_PER_TOKEN_GROUP, done, form, out)


def swiglu_quantize_per_token_group(
    fused: Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype = E4M3,
    interleave: int = 0,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    counts: Tensor | None = None,
    zero_padding: bool = True,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """``silu(gate) * up`` in fp32, then `quantize_per_token_group` of it, in one launch.

    Args:
        fused: (..., 2 * N): [gate | up].
        interleave: length of alternating runs of gate and up columns; 0: [gate | up].
        group_size, dtype, scale_format, scale_layout, eps, recipe, fp8_min, fp8_max, counts,
            zero_padding: as in `quantize_per_token_group`.
        out: buffers of ``QuantizedTensor.empty((*fused.shape[:-1], N), format="fp8_group", ...)``.

    Returns:
        A quantized tensor of the shape (..., N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if type(group_size) is not int:
        group_size = _checks.integer(group_size, "group_size")
    format = "int8_group" if dtype == torch.int8 else "fp8_group"
    form = (format, (1, group_size), scale_format, scale_layout, recipe)
    done = SWIGLU_PER_TOKEN_GROUP.into(
        (zero_padding or out is not None) and fitting(out, form, dtype),
        fused=fused,
        group_size=group_size,
        counts=counts,
        dtype=dtype,
        interleave=interleave,
        scale_format=scale_format,
        scale_layout=scale_layout,
        eps=eps,
        recipe=recipe,
        zero_padding=zero_padding,
        fp8_min=fp8_min,
        fp8_max=fp8_max,
    )
    return quantized(SWIGLU_PER_TOKEN_GROUP, done, form, out)


def rmsnorm_quantize_per_token_group(
    x: Tensor,
    weight: Tensor,
    group_size: int = 128,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "row",
    amax_eps: float | None = None,
    recipe: GroupRecipe = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """RMSNorm in fp32 as in `rmsnorm_quantize_fp8`, then `quantize_per_token_group`, in one launch.

    Args:
        x: (..., N).
        weight: (N,), contiguous, of x's dtype or float32.
        group_size: 16, 32, 64, 128 or 256.
        eps: added to the mean of the squares.
        residual: as in `rmsnorm_quantize_fp8`.
        dtype, scale_format, scale_layout, recipe, fp8_min, fp8_max: as in
            `quantize_per_token_group`.
        amax_eps: the eps of `quantize_per_token_group`.
        out: buffers of ``QuantizedTensor.empty(x.shape, format="fp8_group", inv_rms=True, ...)``.

    Returns:
        A quantized tensor of x's shape with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if type(group_size) is not int:
        group_size = _checks.integer(group_size, "group_size")
    format = "int8_group" if dtype == torch.int8 else "fp8_group"
    form = (format, (1, group_size), scale_format, scale_layout, recipe)
    done = RMSNORM_PER_TOKEN_GROUP.into(
        fitting(out, form, dtype, False, True),
        x=x,
        weight=weight,
        group_size=group_size,
        eps=eps,
        residual=residual,
        dtype=dtype,
        scale_format=scale_format,
        scale_layout=scale_layout,
        amax_eps=amax_eps,
        recipe=recipe,
        fp8_min=fp8_min,
        fp8_max=fp8_max,
    )
    return quantized(RMSNORM_PER_TOKEN_GROUP, done, form, out)


def quantize_block(
    w: Tensor,
    block: Sequence[int] = (128, 128),
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: BlockScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes a weight to FP8 or INT8 with a scale for each block, in one launch.

    Args:
        w: (..., N, K); blocks at the edges may be smaller.
        block: rows and columns: (128, 128), (64, 64), (32, 32) or (16, 16).
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        scale_format: "float32", or "ue8m0": float32 that hold powers of two, rounded up.
        scale_layout: "row": (..., ceil(N / rows), ceil(K / columns)); "row_padded": the last size
            is padded with zeros to a multiple of four; its transpose is what scaled_mm takes for a
            128x128 weight.
        eps, recipe, fp8_min, fp8_max: as in `quantize_per_token_group`.
        out: buffers of ``QuantizedTensor.empty(w.shape, format="fp8_block", ...)``.

    Returns:
        data (..., N, K) and scale_inv (..., ceil(N / rows), ceil(K / columns)), or padded.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    rows, cols = pair = _pair(block)
    format = "int8_block" if dtype == torch.int8 else "fp8_block"
    form = (format, pair, scale_format, scale_layout, recipe)
    done = QUANTIZE_BLOCK.into(
        fitting(out, form, dtype),
        w=w,
        block_rows=rows,
        block_cols=cols,
        dtype=dtype,
        scale_format=scale_format,
        scale_layout=scale_layout,
        eps=eps,
        recipe=recipe,
        fp8_min=fp8_min,
        fp8_max=fp8_max,
    )
    return quantized(QUANTIZE_BLOCK, done, form, out)


def quantize_per_token_group_both(
    x: Tensor,
    group_size: int = 128,
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: GroupScaleLayout = "column",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    out: tuple[QuantizedTensor, QuantizedTensor] | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantizes a matrix row-wise (1xG) and column-wise (Gx1), reading it once: for training.

    The first result is `quantize_per_token_group` of x, the second that of its transpose, which is
    stored transposed: the operands of both products of a backward pass, without a copy.

    Args:
        x: (M, K), M and K >= 1.
        group_size, dtype, scale_format, eps, recipe, fp8_min, fp8_max: as in
            `quantize_per_token_group`.
        scale_layout: as in `quantize_per_token_group`; "column" is what scaled_mm takes.
        out: buffers for the two results, which share no memory.

    Returns:
        Quantized tensors of the shapes (M, K), with groups along K, and (K, M), along M.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if type(group_size) is not int:
        group_size = _checks.integer(group_size, "group_size")
    format = "int8_group" if dtype == torch.int8 else "fp8_group"
    form = (format, (1, group_size), scale_format, scale_layout, recipe)
    done = QUANTIZE_PER_TOKEN_GROUP_BOTH.into(
        fitting_both(out, form, dtype),
        x=x,
        group_size=group_size,
        dtype=dtype,
        scale_format=scale_format,
        scale_layout=scale_layout,
        eps=eps,
        recipe=recipe,
        fp8_min=fp8_min,
        fp8_max=fp8_max,
    )
    return quantized_both(QUANTIZE_PER_TOKEN_GROUP_BOTH, done, form, out)


def quantize_block_both(
    w: Tensor,
    block: Sequence[int] = (128, 128),
    *,
    dtype: torch.dtype = E4M3,
    scale_format: ScaleFormat = "float32",
    scale_layout: BlockScaleLayout = "row",
    eps: float | None = None,
    recipe: GroupRecipe = "te",
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    out: tuple[QuantizedTensor, QuantizedTensor] | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantizes a weight and its transpose, reading it once, in one launch: for training.

    The first result is `quantize_block` of w, for the forward product. The second is that of its
    transpose, stored transposed, for the gradient of the input. Both have the same elements,
    because a block and its transpose share a scale.

    Args:
        w: (N, K), N and K >= 1.
        block, dtype, scale_format, scale_layout, eps, recipe, fp8_min, fp8_max: as in
            `quantize_block`.
        out: buffers for the two results, which share no memory.

    Returns:
        Quantized tensors of the shapes (N, K) and (K, N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    rows, cols = pair = _pair(block)
    format = "int8_block" if dtype == torch.int8 else "fp8_block"
    form = (format, pair, scale_format, scale_layout, recipe)
    done = QUANTIZE_BLOCK_BOTH.into(
        fitting_both(out, form, dtype),
        w=w,
        block_rows=rows,
        block_cols=cols,
        dtype=dtype,
        scale_format=scale_format,
        scale_layout=scale_layout,
        eps=eps,
        recipe=recipe,
        fp8_min=fp8_min,
        fp8_max=fp8_max,
    )
    return quantized_both(QUANTIZE_BLOCK_BOTH, done, form, out)


def _pair(block: Sequence[int]) -> tuple[int, int]:
    if type(block) is tuple and len(block) == 2:
        rows, cols = block
        if type(rows) is int and type(cols) is int:  # the checks below take long
            return block
    pair = tuple(block) if isinstance(block, Sequence) else ()
    if len(pair) != 2:
        raise ValueError(f"block: expected rows and columns, such as (128, 128), got {block!r}")
    try:
        return _checks.integer(pair[0], "block"), _checks.integer(pair[1], "block")
    except TypeError:
        text = f"block: expected two ints, such as (128, 128), got {block!r}"
        raise TypeError(text) from None
