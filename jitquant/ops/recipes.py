"""NVFP4 and MXFP4 by recipes for training and rotation: the ops, and MXFP4's public functions.

`jitquant.ops.nvfp4.quantize_nvfp4` comes here when it is given a recipe. A recipe takes the amax of
what is quantized in a separate launch, so that a process group can reduce it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from jitquant.formats import (
    BOTH_PARTIALS,
    E4M3_MAXIMA,
    E8M0_DTYPE,
    FP4_DTYPE,
    FP32_TINIEST,
    GRANULARITIES,
    MAX_PARTIALS,
    MXFP4_BLOCK,
    MXFP4_SCALINGS,
    NVFP4_BLOCK,
    RECIPES,
    ROTATIONS,
    ROUNDINGS,
    SCALE_LAYOUTS,
    SELECTS,
    STATIC_SELECTS,
    WEIGHT_BLOCKS,
    Mxfp4Scaling,
    Rotation,
    Rounding,
    ScaleLayout,
    Select,
    WeightBlock,
    fp4_scales_shape,
)
from jitquant.numerics import recipes as numerics
from jitquant.ops import _checks, _checks_fp8, _checks_rotation, _sharded, sources
from jitquant.ops._results import check_form
from jitquant.ops.parts import PARTS, Part
from jitquant.ops.schema import (
    FP32,
    MATRIX,
    OUTPUT,
    SIGNS,
    Arguments,
    Number,
    Op,
    Plan,
    Result,
    Values,
    fp4,
    fp32,
)
from jitquant.tensors import NVFP4Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "dequantize_mxfp4",
    "quantize_mxfp4",
    "quantize_nvfp4_both",
]


def _check_rounding(
    rounding: str, rng_state: Tensor | None, random_bytes: Tensor | None, like: Tensor
) -> None:
    given = int(rng_state is not None) + int(random_bytes is not None)
    if given != int(rounding == "stochastic"):
        raise ValueError(
            "rng_state and random_bytes: expected one of them with rounding 'stochastic', none "
            f"with 'nearest', got {given} with {rounding!r}"
        )
    if rng_state is not None:
        _checks.same_device(rng_state, "rng_state", like, "x")
        if rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,):
            raise ValueError(
                "rng_state: expected int64 of shape (2,) on the device of x: seed and offset, got "
                f"{rng_state.dtype} of shape {_checks.shape_text(rng_state)}"
            )
        _checks.contiguous(rng_state, "rng_state")
    if random_bytes is not None:
        _checks.same_device(random_bytes, "random_bytes", like, "x")
        _check_bytes(random_bytes, "random_bytes", like.shape, "x")


def _check_bytes(given: Tensor, name: str, shape: tuple[int, ...], like_name: str) -> None:
    if given.dtype != torch.uint8 or given.shape != shape:
        raise ValueError(
            f"{name}: expected uint8 of shape {tuple(shape)}, as {like_name}, got "
            f"{given.dtype} of shape {_checks.shape_text(given)}"
        )
    _checks.contiguous(given, name)


def _check_together(block: str, rotate: str, select: str, rounding: str, e4m3_max: int) -> None:
    if e4m3_max not in E4M3_MAXIMA:
        raise ValueError(
            f"e4m3_max: expected one of {', '.join(map(str, E4M3_MAXIMA))}, got {e4m3_max}"
        )
    if block == "16x16" and numerics.hadamard_size(rotate) > NVFP4_BLOCK:
        raise ValueError(
            f"rotate: expected 'none', 'te' or '16' with block='16x16', got {rotate!r}. A wider "
            "rotation would mix blocks that have their own scales"
        )
    if select not in ("none", *STATIC_SELECTS) and rounding != "nearest":
        raise ValueError(
            f"rounding: expected 'nearest' with select={select!r}, got {rounding!r}. The choice "
            "would depend on the random numbers"
        )


def _plan_rotated_amax(
    x: Tensor,
    rotate: str,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    granularity: str,
) -> Plan:
    _checks_rotation.rotated_arguments(x, rotate, signs, cos, sin)
    rows = _checks.row_count(x.shape[:-1])
    return Plan(x.device, (fp32(rows if granularity == "row" else MAX_PARTIALS),))


def _plan_recipe(
    x: Tensor,
    amax: Tensor,
    granularity: str,
    block: str,
    rotate: str,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    select: str,
    e4m3_max: int,
    rounding: str,
    rng_state: Tensor | None,
    random_bytes: Tensor | None,
    scale_layout: str,
    from_gsa: bool,
    recipe: str,
) -> Plan:
    _checks_rotation.rotated_arguments(x, rotate, signs, cos, sin)
    _check_rounding(rounding, rng_state, random_bytes, x)
    _check_together(block, rotate, select, rounding, e4m3_max)
    if select != "none" and recipe == "vllm":
        raise ValueError(
            f"recipe: expected 'te' or 'te_flush' with select={select!r}, got 'vllm'. The "
            "selection has a rule of its own for a block's scale"
        )
    rows = _checks.row_count(x.shape[:-1])
    if granularity == "row" and block != "1x16":
        raise ValueError("block: expected '1x16' with granularity='row', got '16x16'")
    count = rows if granularity == "row" else 1
    other = count if granularity == "row" or from_gsa else MAX_PARTIALS
    _checks.amax_tensor(amax, count, other, x, "x")
    return Plan(
        x.device,
        (
            *fp4(tuple(x.shape), scale_layout),
            fp32(rows if granularity == "row" else 1),
        ),
    )


def _plan_mxfp4(
    x: Tensor,
    rotate: str,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rounding: str,
    rng_state: Tensor | None,
    random_bytes: Tensor | None,
    scale_layout: str,
) -> Plan:
    _checks_rotation.rotated_arguments(x, rotate, signs, cos, sin)
    _check_rounding(rounding, rng_state, random_bytes, x)
    results = fp4(tuple(x.shape), scale_layout, block=MXFP4_BLOCK, scales=E8M0_DTYPE)
    return Plan(x.device, results)


def _plan_dequantize_mxfp4(
    x_fp4: Tensor, x_sf: Tensor, cols: int | None, scale_layout: str, dtype: torch.dtype | None
) -> Plan:
    _checks.packed_tensor(x_fp4, "x_fp4", FP4_DTYPE)
    _checks.packed_tensor(x_sf, "x_sf", E8M0_DTYPE)
    _checks.same_device(x_sf, "x_sf", x_fp4, "x_fp4")
    size = x_fp4.shape[-1] if x_fp4.dim() else 0
    if size == 0 or size % 16:
        raise ValueError(
            "x_fp4: expected shape (..., P) with P a multiple of 16 bytes (32 codes), got shape "
            f"{_checks.shape_text(x_fp4)}"
        )
    wanted = fp4_scales_shape(x_fp4.shape, scale_layout, block=MXFP4_BLOCK)
    if tuple(x_sf.shape) != wanted:
        raise ValueError(
            f"x_sf: expected shape {tuple(wanted)} for x_fp4 of shape "
            f"{_checks.shape_text(x_fp4)} and scale_layout {scale_layout!r}, got shape "
            f"{_checks.shape_text(x_sf)}"
        )
    width = 2 * size if cols is None else cols
    if not 2 * size - MXFP4_BLOCK < width <= 2 * size:
        raise ValueError(
            f"cols: expected {2 * size - MXFP4_BLOCK + 1} to {2 * size} for x_fp4 of shape "
            f"{_checks.shape_text(x_fp4)}, got {width}"
        )
    out = Result((*x_fp4.shape[:-1], width), torch.bfloat16 if dtype is None else dtype)
    return Plan(x_fp4.device, (out,))


def _rotated_matrix(x: Tensor, rotate: str, signs: Tensor | None) -> None:
    _checks_fp8.matrix(x, "x")
    _checks_rotation.rotation(rotate, signs, x.shape[0], x)


def _plan_both_amax(x: Tensor, rotate: str, signs: Tensor | None) -> Plan:
    _rotated_matrix(x, rotate, signs)
    return Plan(x.device, (fp32(2, BOTH_PARTIALS),))


def _plan_both(
    x: Tensor,
    amax: Tensor,
    block: str,
    rotate: str,
    signs: Tensor | None,
    select: str,
    e4m3_max: int,
    rounding: str,
    rng_state: Tensor | None,
    scale_layout: str,
    random_bytes: Tensor | None,
    random_bytes_t: Tensor | None,
    from_gsa_t: Tensor | None,
) -> Plan:
    _rotated_matrix(x, rotate, signs)
    rows, cols = x.shape
    _check_rounding(rounding, rng_state, random_bytes, x)
    if (random_bytes is None) != (random_bytes_t is None):
        raise ValueError(
            "random_bytes: expected bytes for x and for its transpose, or neither, got one of them"
        )
    if random_bytes_t is not None:
        _checks.same_device(random_bytes_t, "random_bytes_t", x, "x")
        shape_t = (x.shape[1], x.shape[0])
        _check_bytes(random_bytes_t, "random_bytes_t", shape_t, "the transpose of x")
    _check_together(block, rotate, select, rounding, e4m3_max)
    if block == "16x16" and (rotate != "none" or rounding != "nearest"):
        raise ValueError(
            "rotate and rounding: expected 'none' and 'nearest' with block='16x16', got "
            f"{rotate!r} and {rounding!r}. The transpose has the same codes"
        )
    if from_gsa_t is not None:
        _checks.same_device(from_gsa_t, "from_gsa_t", x, "x")
        if from_gsa_t.numel() != 1:
            raise ValueError(
                f"from_gsa_t: expected one element, got shape {_checks.shape_text(from_gsa_t)}"
            )
    count = 2 * BOTH_PARTIALS if from_gsa_t is None else 1
    _checks.amax_tensor(amax, count, count, x, "x")
    return Plan(
        x.device,
        (
            *fp4((rows, cols), scale_layout),
            fp32(1),
            *fp4((cols, rows), scale_layout),
            fp32(1),
        ),
    )


GSA = Number(
    FP32_TINIEST,
    "a positive number that is finite in float32, such as amax / 2688",
    ". Leave it out to compute it",
    "gsa",
)
_MAKER = "NVFP4Tensor.empty(shape, ...)"
_ROTATION = {"signs": SIGNS, "cos": FP32, "sin": FP32}
_CHOICES = {"rotate": ROTATIONS, "rounding": ROUNDINGS, "scale_layout": SCALE_LAYOUTS}


def _part(x: Tensor, rotate: str, cos: Tensor | None = None) -> Part | None:
    return _part_of(x.dtype, "rope" if cos is not None else rotate)


def _part_of(dtype: torch.dtype, rotate: str) -> Part | None:
    of = PARTS.get(dtype)
    if of is None:
        return None
    kind = {"none": 0, "te": 1, "rope": 3}.get(rotate, 2)
    return of.narrowed(("plain", "te", "wide", "rope")[kind], f"-DJITQUANT_ROTATE={kind}")


def _kinds(of: Part) -> list[Part]:
    """The parts of a rotation: scales not selected, selected, and these with random rounding."""
    names = ("unselected", "selected", "selected_stochastic")
    return [of.narrowed(name, f"-DJITQUANT_SELECT={kind}") for kind, name in enumerate(names)]


def _part_by_rule(
    x: Tensor, rotate: str, select: str, rounding: str, cos: Tensor | None = None
) -> Part | None:
    of = _part(x, rotate, cos)
    if of is None:
        return None
    return _kinds(of)[0 if select == "none" else 1 if rounding == "nearest" else 2]


def _part_for_amax(x: Tensor, rotate: str, cos: Tensor | None = None) -> Part | None:
    of = _part(x, rotate, cos)
    return of if of is None else _any_kind(of)


@functools.cache
def _any_kind(of: Part) -> Part:
    """The first kind, or another one that is there: all have the kernels for an amax."""
    for kind in reversed(_kinds(of)):
        of = kind._replace(of=of)
    return of


ROTATED_AMAX = Op(
    "rotated_amax",
    ["maxima"],
    module="quantize_nvfp4_recipe",
    plan=_plan_rotated_amax,
    reference=numerics.rotated_amax,
    accepts={"x": Values(), **_ROTATION},
    part=_part_for_amax,
    choices={"rotate": ROTATIONS, "granularity": GRANULARITIES},
)
QUANTIZE = Op(
    "quantize_nvfp4_recipe",
    ["x_fp4", "x_sf", "gsa"],
    module="quantize_nvfp4_recipe",
    plan=_plan_recipe,
    reference=numerics.quantize_nvfp4_recipe,
    accepts={"x": Values(), "amax": FP32, **_ROTATION},
    part=_part_by_rule,
    choices={
        "granularity": GRANULARITIES,
        "block": WEIGHT_BLOCKS,
        "select": SELECTS,
        "recipe": RECIPES,
        **_CHOICES,
    },
    maker=_MAKER,
)
BOTH_AMAX = Op(
    "nvfp4_both_amax",
    ["maxima"],
    module="quantize_nvfp4_both",
    plan=_plan_both_amax,
    reference=numerics.nvfp4_both_amax,
    accepts={"x": MATRIX, "signs": SIGNS},
    part=_part_for_amax,
    choices={"rotate": ROTATIONS[:2]},
)
QUANTIZE_BOTH = Op(
    "quantize_nvfp4_both",
    ["x_fp4", "x_sf", "gsa", "x_fp4_t", "x_sf_t", "gsa_t"],
    module="quantize_nvfp4_both",
    plan=_plan_both,
    reference=numerics.quantize_nvfp4_both,
    accepts={"x": MATRIX, "amax": FP32, "signs": SIGNS, "from_gsa_t": FP32},
    part=_part_by_rule,
    choices={**_CHOICES, "block": WEIGHT_BLOCKS, "select": SELECTS, "rotate": ROTATIONS[:2]},
    maker=_MAKER,
)
QUANTIZE_MXFP4 = Op(
    "quantize_mxfp4",
    ["x_fp4", "x_sf"],
    module="quantize_mxfp4",
    plan=_plan_mxfp4,
    reference=numerics.quantize_mxfp4,
    accepts={"x": Values(), **_ROTATION},
    part=_part,
    choices={"scaling": MXFP4_SCALINGS, **_CHOICES},
)
DEQUANTIZE_MXFP4 = Op(
    "dequantize_mxfp4",
    ["out"],
    module="quantize_mxfp4",
    plan=_plan_dequantize_mxfp4,
    reference=numerics.dequantize_mxfp4,
    accepts={"dtype": OUTPUT},
    part=lambda dtype: _part_of(dtype or torch.bfloat16, "none"),
    choices={"scale_layout": SCALE_LAYOUTS},
)


def amax_for(op: Op, quantize: Op, arguments: Arguments) -> Tensor:
    """The amax for a call of ``quantize``, by the part that this needs, which is built first."""
    if arguments["select"] in SELECTS[1:]:
        quantize.load(arguments)
    amax: Tensor = op.made(arguments)[0]
    return amax


OPS: tuple[Op, ...] = (
    ROTATED_AMAX,
    QUANTIZE,
    BOTH_AMAX,
    QUANTIZE_BOTH,
    QUANTIZE_MXFP4,
    DEQUANTIZE_MXFP4,
)
"""Every op of these recipes."""


def quantize_nvfp4_both(
    x: Tensor,
    *,
    block: WeightBlock = "1x16",
    rotate: Literal["none", "te"] = "none",
    signs: Tensor | None = None,
    select: Select = "none",
    e4m3_max: int = 448,
    rounding: Rounding = "nearest",
    rng_state: Tensor | None = None,
    random_bytes: tuple[Tensor, Tensor] | None = None,
    gsa: float | Tensor | tuple[float | Tensor, float | Tensor] | None = None,
    granularity: Literal["tensor"] = "tensor",
    scale_layout: ScaleLayout = "linear",
    process_group: ProcessGroup | None = None,
    out: tuple[NVFP4Tensor, NVFP4Tensor] | None = None,
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """Quantizes a matrix to NVFP4 row-wise and column-wise, in two launches: amaxes, then the rest.

    The first result is that of x, with blocks along K. The second is that of its transpose, stored
    transposed, with blocks along M: it alone is rotated, has its own amax and gsa, and is
    rounded with its own random bytes. Products that sum over M need it, such as a weight gradient.
    If gsa is given, there is one launch.

    Args:
        x: (M, K), M and K >= 1; with a rotation M is a multiple of 16.
        block: "1x16", or "16x16", where the second has the first's codes and scales, transposed.
        rotate: of the transpose: "none", or "te".
        signs, select, e4m3_max, rounding, rng_state: as in `quantize_nvfp4`.
        random_bytes: uint8 (M, K), and uint8 (K, M) for the transpose; instead of ``rng_state``.
        gsa: None to compute them; one for both, or a pair: that of x, and that of the transpose
            after the rotation. Each is a positive number or float32 of one element.
        granularity: "tensor"; a gsa for each row and column is not supported.
        scale_layout: "linear", or "swizzled_128x4" for cuBLASLt.
        process_group: the ranks whose parts have one pair of amaxes, or None. Parts of M and of K
            are multiples of 16, the blocks of the transpose and of x.
        out: buffers of ``NVFP4Tensor.empty((M, K), ...)`` and ``NVFP4Tensor.empty((K, M), ...)``.

    Returns:
        Quantized tensors of the shapes (M, K) and (K, M), or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    x = _checks.with_columns(_checks.as_tensor(x, "x"))
    if granularity != "tensor":
        raise ValueError(
            f"granularity: expected 'tensor', got {granularity!r}. For a gsa of each row, call "
            "quantize_nvfp4(..., granularity='row') with x and with x.T.contiguous()"
        )
    if random_bytes is not None and (not isinstance(random_bytes, tuple) or len(random_bytes) != 2):
        raise TypeError(
            "random_bytes: expected a tuple of two tensors, for x and for its transpose, got "
            f"{_checks.kind_of(random_bytes)}"
        )
    if process_group is not None:
        _sharded.check_no_scale(process_group, gsa, "gsa")
    of_x, of_transpose = random_bytes or (None, None)
    arguments: dict[str, Any] = {
        "x": x,
        "block": block,
        "rotate": rotate,
        "signs": signs,
        "select": select,
        "e4m3_max": e4m3_max,
        "rounding": rounding,
        "rng_state": rng_state,
        "scale_layout": scale_layout,
        "random_bytes": of_x,
        "random_bytes_t": of_transpose,
        "from_gsa_t": None,
    }
    if gsa is None:
        amax = amax_for(BOTH_AMAX, QUANTIZE_BOTH, arguments)
        if process_group is not None:
            _sharded.max_over(amax, process_group)
        arguments["amax"] = amax
    else:
        arguments["amax"], arguments["from_gsa_t"] = _given_pair(gsa, x, block)
    if out is not None:
        buffers = _both_buffers(out, x, scale_layout)
        for name in () if gsa is None else ("amax", "from_gsa_t"):
            if any(arguments[name] is part.gsa for part in out):
                arguments[name] = arguments[name].clone()  # it is read while theirs is written
        if QUANTIZE_BOTH.direct(arguments, buffers) is NotImplemented:
            QUANTIZE_BOTH.dispatched(QUANTIZE_BOTH.tensors(arguments), buffers)
        for part, own in zip(out, buffers[2::3], strict=True):
            part.recipe, part.gsa = "te", own
        return out
    first, scales, gsa_out, second, scales_t, gsa_t = QUANTIZE_BOTH.made(arguments)
    rows, cols = x.shape
    return (
        NVFP4Tensor(first, scales, gsa_out, cols=cols, scale_layout=scale_layout),
        NVFP4Tensor(second, scales_t, gsa_t, cols=rows, scale_layout=scale_layout),
    )


def _given_pair(gsa: object, x: Tensor, block: str) -> tuple[Tensor, Tensor]:
    """A given gsa of x, and one of its transpose, as tensors."""
    if isinstance(gsa, tuple):
        if len(gsa) != 2:
            raise TypeError(
                f"gsa: expected one, or a tuple of two, for x and for its transpose, got {len(gsa)}"
            )
        if block == "16x16":
            raise ValueError(
                "gsa: expected one with block='16x16', got two. The transpose has the same codes"
            )
        first, second = (_given(one, x) for one in gsa)
        return first, second
    one = _given(gsa, x)
    return one, one


def _given(gsa: object, x: Tensor) -> Tensor:
    given = _checks.as_gsa(gsa)
    if given is None:
        raise TypeError("gsa: expected a number or a float32 tensor for both, got None for one")
    if isinstance(given, float):
        GSA.check("gsa", given)
        return torch.full((1,), given, dtype=torch.float32, device=x.device)
    FP32.check("gsa", given)
    _checks.same_device(given, "gsa", x, "x")
    if given.numel() != 1:
        raise ValueError(f"gsa: expected one element each, got shape {_checks.shape_text(given)}")
    return given


def _both_buffers(out: object, x: Tensor, scale_layout: str) -> tuple[Tensor, ...]:
    """The buffers of two results, if these have their form; the op looks at the tensors."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out: expected a tuple of two NVFP4Tensors, got {_checks.kind_of(out)}")
    buffers: tuple[Tensor, ...] = ()
    shapes = (tuple(x.shape), tuple(x.shape)[::-1])
    for i, (part, shape) in enumerate(zip(out, shapes, strict=True)):
        check_form(
            QUANTIZE_BOTH,
            part,
            f"out[{i}]",
            NVFP4Tensor,
            ("x_fp4", "x_sf", "gsa"),
            {"shape": shape, "dim": -1, "scale_layout": scale_layout, "granularity": "tensor"},
            {"inv_rms": False},
        )
        buffers = (*buffers, part.x_fp4, part.x_sf, part._written_gsa())
    return buffers


def quantize_mxfp4(
    x: Tensor,
    *,
    scaling: Mxfp4Scaling = "rceil",
    rotate: Rotation = "none",
    signs: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    rounding: Rounding = "nearest",
    rng_state: Tensor | None = None,
    random_bytes: Tensor | None = None,
    scale_layout: ScaleLayout = "linear",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes to MXFP4: E2M1 in blocks of 32 neighbors of a row with E8M0 scales, in one launch.

    The bytes are those of gpt-oss's checkpoints: see ``x_fp4`` as (..., ceil(N / 32), 16).

    Args:
        x: (..., N); the last block of a row may be shorter.
        scaling: how a block's amax becomes a power of two: "floor" (OCP MX 1.0), "ceil", "even"
            (torchao; the least error), "rceil" (torchao, cuBLAS: nothing saturates),
            "gptoss_up", "gptoss_down" (gpt-oss), "static_6" or "static_4" (fouroversix).
        rotate: "none", or a Hadamard transform before: see ``docs/numerics.md``.
        signs: int8 (n,) of +1 and -1 for the transform, or None.
        rope, interleaved: rotary position embedding before it, in the same launch, as in
            `jitquant.quantize_per_token_group`.
        rounding: "nearest", or "stochastic" with one of the next two.
        rng_state: int64 (2,), seed and offset, on the device of x.
        random_bytes: uint8 of the shape of x, contiguous.
        scale_layout: "linear", or "swizzled_128x4" for cuBLASLt.
        out: contiguous buffers for the two results, which share no memory; uint8 is accepted.

    Returns:
        x_fp4 ``float4_e2m1fn_x2`` (..., ceil(N / 32) * 16), x_sf ``float8_e8m0fnu``
        (..., ceil(N / 32)), or swizzled (rows up to 128, blocks up to 4) with zero padding.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    arguments = {
        "x": x,
        "scaling": scaling,
        **sources.rotated_arguments(rotate, signs, rope, interleaved),
        "rounding": rounding,
        "rng_state": rng_state,
        "random_bytes": random_bytes,
        "scale_layout": scale_layout,
    }
    if out is None:
        x_fp4, x_sf = QUANTIZE_MXFP4.made(arguments)
        return x_fp4, x_sf
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out: expected a tuple of x_fp4 and x_sf, got {_checks.kind_of(out)}")
    if QUANTIZE_MXFP4.direct(arguments, out) is NotImplemented:
        tensors = QUANTIZE_MXFP4.tensors(arguments)
        for buffer in out:
            _checks.tensor_out(buffer)
        QUANTIZE_MXFP4.dispatched(tensors, out)
    return out


def dequantize_mxfp4(
    x_fp4: Tensor,
    x_sf: Tensor,
    dtype: torch.dtype | None = None,
    *,
    cols: int | None = None,
    scale_layout: ScaleLayout = "linear",
    out: Tensor | None = None,
) -> Tensor:
    """The values of MXFP4: ``e2m1 * 2^(e - 127)``, rounded once to ``dtype``.

    Args:
        x_fp4: packed codes, or their bytes as uint8: (..., P).
        x_sf: E8M0 scales, or their bytes: (..., P / 16), or swizzled.
        dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
        cols: logical size of the last dimension; default 2 * P.
        scale_layout: of x_sf.
        out: contiguous tensor of the logical shape to write to.

    Returns:
        (..., cols), or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    arguments = {
        "x_fp4": x_fp4,
        "x_sf": x_sf,
        "cols": cols,
        "scale_layout": scale_layout,
        "dtype": dtype,
    }
    return DEQUANTIZE_MXFP4.one_tensor(arguments, out)
