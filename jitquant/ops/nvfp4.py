"""NVFP4: the public functions that quantize. Each checks its arguments and calls one op.

What they share:

- Inputs are bfloat16, float16 or float32, on the CPU or a GPU, with any leading dimensions and
  strides. If the last dimension is not contiguous, the functions copy the input first, which takes
  a launch and memory; ops refuse it. Objects with ``__dlpack__`` are accepted too. On a GPU up
  to three non-contiguous leading dimensions are read in place. If N is not a multiple of 16, rows
  are padded with zeros; the logical shape is kept.
- ``gsa`` dequantizes: ``value = e2m1 * s * gsa``. None: it is computed as ``amax / divisor``, for
  the tensor or for each row (``granularity``). A number is the gsa of the tensor. A float32 tensor
  with one element, or one for each row, is used without a copy, becomes the result's ``gsa`` (with
  a recipe for training or a rotation a copy does), and is never read on the CPU. A given gsa
  decides the granularity; ``divisor`` is then ignored.
- ``process_group``: each rank passes its part of one tensor. One all_reduce between the two
  launches makes the amax that of all parts, and each rank gets, bit for bit, its part of the result
  for the whole tensor. Tensors may be split along rows, or along columns in multiples of 16;
  ``granularity="row"`` needs the latter, with the same rows on every rank. Not allowed together
  with a gsa. See ``docs/distributed.md``.
- ``out``: an `NVFP4Tensor` whose buffers are written and which is returned. Where the result's gsa
  would be the given tensor, ``out.gsa`` becomes that tensor. No call writes to it: one that would
  gives ``out`` a gsa of its own. Buffers are contiguous and do not overlap the inputs or each
  other; ``residual`` does not overlap ``x``. Inductor lacks float4_e2m1fn_x2 on the CPU: a graph
  compiled for the CPU cannot write twice to the same buffers and use both results. Return the
  results instead.
- Nothing is differentiable: no result requires grad.

Errors: TypeError for a wrong type or dtype; ValueError for a shape, stride, device, number or name
that is not accepted. The message lists what is expected. On a GPU also
`jitquant.loader.LoaderError` and its subclasses if a kernel cannot be compiled or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from jitquant.formats import (
    DEINTERLEAVE_OPS,
    FP32_TINIEST,
    GRANULARITIES,
    MAX_PARTIALS,
    NVFP4_DIVISOR,
    RECIPES,
    SCALE_LAYOUTS,
    WEIGHT_BLOCKS,
    Granularity,
    Recipe,
    Rotation,
    Rounding,
    ScaleLayout,
    Select,
    WeightBlock,
    one_of,
)
from jitquant.numerics import nvfp4 as numerics
from jitquant.numerics import sources as values
from jitquant.ops import _checks, _sharded, recipes, sources
from jitquant.ops._results import check_form
from jitquant.ops.parts import PARTS, Part
from jitquant.ops.recipes import GSA
from jitquant.ops.schema import (
    FP32,
    Cast,
    Number,
    Op,
    Plan,
    Result,
    Rows,
    Source,
    Values,
    fp4,
    fp32,
    product,
)
from jitquant.tensors import NVFP4Tensor, QuantizedActivation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "amax_gsa",
    "quantize_nvfp4",
    "quantize_weight_nvfp4",
]

_MAKER = "NVFP4Tensor.empty(shape, ...)"


def _plan_computed(
    rows: Rows,
    gsa_value: float | None,
    scale_layout: str,
    granularity: str = "tensor",
    dim: int = -1,
) -> tuple[Result, ...]:
    count = rows.count if granularity == "row" and gsa_value is None else 1
    return (*fp4((*rows.leading, rows.cols), scale_layout, dim), fp32(count))


def _plan_given(
    rows: Rows, source: Source, gsa: Tensor, scale_layout: str, dim: int = -1
) -> tuple[Result, ...]:
    if source.granularity is None:
        _checks.gsa_of_tensor(gsa, rows.like, rows.name)
    else:
        _checks.gsa_tensor(gsa, rows.count, rows.like, rows.name)
    return fp4((*rows.leading, rows.cols), scale_layout, dim)


def _plan_from_amax(
    rows: Rows, source: Source, amax: Tensor, scale_layout: str, dim: int = -1
) -> tuple[Result, ...]:
    count = 1 if source.granularity is None else rows.count
    _checks.amax_tensor(amax, 1, count, rows.like, rows.name)
    return (*fp4((*rows.leading, rows.cols), scale_layout, dim), fp32(amax.numel()))


def _plan_from_maxima(rows: Rows, amax: Tensor, scale_layout: str) -> tuple[Result, ...]:
    _checks.amax_tensor(amax, 1, MAX_PARTIALS, rows.like, rows.name)
    return (*fp4((*rows.leading, rows.cols), scale_layout), fp32(1))


def _plan_maxima() -> tuple[Result, ...]:
    return (fp32(MAX_PARTIALS),)


_KEYWORDS = '{options}str recipe="te", str scale_layout="linear"'
DIVISOR = Number(
    FP32_TINIEST, "a positive number that is finite in float32", ". NVFP4's is 2688 = 6 * 448"
)
_CHOICES = {
    "recipe": RECIPES,
    "scale_layout": SCALE_LAYOUTS,
    "granularity": GRANULARITIES,
    "op": DEINTERLEAVE_OPS,
    "block": WEIGHT_BLOCKS,
}

COMPUTED = Cast(
    "{takes}, {tail}float divisor=2688., *, {written}float? gsa_value=None, "
    '{options}{granularity}str recipe="te", str scale_layout="linear"',
    ("x_fp4", "x_sf", "gsa"),
    _plan_computed,
    numerics.quantize_computed,
    _CHOICES,
    {"divisor": DIVISOR, "gsa_value": GSA},
)
"""NVFP4 with a gsa that is computed, or given as a number: ``gsa_value``."""

GIVEN = Cast(
    "{takes}, Tensor gsa, {tail}*, {written}" + _KEYWORDS,
    ("x_fp4", "x_sf"),
    _plan_given,
    numerics.quantize_given,
    _CHOICES,
    {"gsa": FP32},
)
"""NVFP4 with a gsa that is given as a tensor."""

FROM_AMAX = Cast(
    "{takes}, Tensor amax, float divisor=2688., *, " + _KEYWORDS,
    ("x_fp4", "x_sf", "gsa"),
    _plan_from_amax,
    numerics.quantize_from_amax,
    _CHOICES,
    {"amax": FP32, "divisor": DIVISOR},
)
"""NVFP4 with the amax given: the second half of a quantization over a process group."""

FROM_MAXIMA = FROM_AMAX._replace(plan=_plan_from_maxima, quantize=numerics.quantize_from_maxima)
"""As FROM_AMAX, with the maxima that the first launch of a norm leaves."""

MAXIMA = Cast(
    "{takes}, {tail}*, {written}",
    ("amax",),
    _plan_maxima,
    values.maxima,
    {},
)
"""The amax of a norm: the first half of a quantization over a process group."""


class Family(NamedTuple):
    """The ops of a public function, of which the gsa that is given says which one is called."""

    source: Source
    computed: Op
    given: Op
    from_amax: Op
    amax: Op | None = None

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of them."""
        return tuple(op for op in self[1:] if op is not None)


def family_of(
    name: str,
    source: Source,
    *,
    computed: tuple[str, str],
    given: tuple[str, str],
    normalized: Source | None = None,
    part: Callable[..., Part | None] | None = None,
    also: Mapping[str, str] | None = None,
) -> Family:
    """The NVFP4 ops of a source.

    Args:
        part: as `Op` has it, of all of them that are in one module.
        name: of the op whose gsa is computed.
        source: where values come from.
        computed: module and function of that op; the one with the amax given is in its module.
        given: module and function of the op whose gsa is given.
        also: as `Op` has it, of the op whose gsa is given.
        normalized: of a norm, the source of the second half.
    """
    module = computed[0]
    common = {"maker": _MAKER, "others": ("gsa", "gsa_value", "divisor", "granularity")}
    rest: dict[str, Any] = {"module": module, "part": part, **common}
    return Family(
        source,
        product(name, source, COMPUTED, function=computed[1], **rest),
        product(
            f"{name}_from_gsa",
            source,
            GIVEN,
            function=given[1],
            also=also,
            **(rest if given[0] == module else {"module": given[0], **common}),
        ),
        product(
            f"{name}_from_amax",
            normalized or source,
            FROM_MAXIMA if normalized else FROM_AMAX,
            **rest,
        ),
        product(name.replace("_quantize_nvfp4", "_amax"), source, MAXIMA, **rest)
        if normalized
        else None,
    )


def _plain_part(
    x: Tensor, granularity: str = "tensor", gsa_value: float | None = None
) -> Part | None:
    of = PARTS.get(x.dtype)
    if of is None:
        return None
    if granularity == "row" and gsa_value is None:
        return of.narrowed("rows", "-DJITQUANT_ROW_SCALES=1")
    return of.narrowed("tensor", "-DJITQUANT_ROW_SCALES=0")


QUANTIZE = family_of(
    "quantize_nvfp4",
    sources.PLAIN,
    computed=("fused_amax_quantize", "amax_quantize_nvfp4"),
    given=("quantize_nvfp4", "quantize_nvfp4"),
    also={"fused_amax_quantize": "quantize_nvfp4_from_buffer"},
    part=_plain_part,
)
WEIGHT = family_of(
    "quantize_weight_nvfp4",
    sources.WEIGHT,
    computed=("quantize_weight_nvfp4", "quantize_weight_nvfp4"),
    given=("quantize_weight_nvfp4", "quantize_weight_nvfp4_from_gsa"),
)


def _plan_amax_gsa(x: Tensor) -> Plan:
    return Plan(x.device, (fp32(1),))


AMAX_GSA = Op(
    "amax_gsa",
    ["gsa"],
    module="amax_gsa",
    function="compute_amax_gsa",
    plan=_plan_amax_gsa,
    reference=numerics.amax_gsa,
    accepts={"x": Values(), "divisor": DIVISOR},
)


OPS: tuple[Op, ...] = (AMAX_GSA, *QUANTIZE.ops, *WEIGHT.ops)
"""Every op that quantizes to NVFP4, but those that compute what they quantize."""


def amax_gsa(x: Tensor, divisor: float = NVFP4_DIVISOR, *, out: Tensor | None = None) -> Tensor:
    """``max |x| / divisor``, the gsa of a tensor; NaNs are ignored.

    Args:
        x: (..., N).
        divisor: positive; 2688 = 6 * 448 is NVFP4's.
        out: float32 (1,) to write to.

    Returns:
        float32 (1,), or ``out``; 0 for an empty tensor.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    return AMAX_GSA.one_tensor(AMAX_GSA.into(out, x=x, divisor=divisor), out)


def quantize_nvfp4(
    x: Tensor,
    gsa: float | Tensor | None = None,
    *,
    granularity: Granularity = "tensor",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    block: WeightBlock = "1x16",
    rotate: Rotation = "none",
    signs: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    select: Select = "none",
    e4m3_max: int = 448,
    rounding: Rounding = "nearest",
    rng_state: Tensor | None = None,
    random_bytes: Tensor | None = None,
    scale_layout: ScaleLayout = "linear",
    process_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """Quantizes activations to NVFP4: at most two launches, one if gsa is given.

    ``block``, ``rotate``, ``rope``, ``select``, ``e4m3_max`` and ``rounding`` are for training
    recipes and rotation; ``docs/numerics.md`` has the formulas and their sources. A computed gsa is
    that of the values after the rotation.

    Args:
        x: (..., N); a 1-D tensor is one row.
        gsa: None to compute it, a positive number, or float32 of one element, (rows,) or (..., 1).
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is ``amax / divisor``.
        recipe: "te" (TransformerEngine), "vllm" or "te_flush"; see ``docs/numerics.md``.
        block: "1x16", or "16x16": 16 rows share scales as well, the leading dimensions as one.
        rotate: "none"; "te": TransformerEngine's random Hadamard transform of 16 neighbors;
            "16" to "256": Sylvester's of that many. N must be a multiple of the number.
        signs: int8 (n,) of +1 and -1 for the transform; None: TransformerEngine's, or none.
        rope, interleaved: rotary position embedding before the transform, in the same launches, as
            in `jitquant.quantize_per_token_group`.
        select: "none", or how a block's scale is selected: "4over6_mae", "4over6_mse", ...
        e4m3_max: the largest block scale, 448 or 256; ``divisor`` is 6 * e4m3_max then.
        rounding: "nearest", or "stochastic" with one of the next two.
        rng_state: int64 (2,), seed and offset, on the device of x; the same give the same codes.
            A draw depends on the place in x, so ranks of a process group should have seeds of
            their own.
        random_bytes: uint8 of the shape of x, contiguous.
        scale_layout: "linear", or "swizzled_128x4" for cuBLASLt.
        process_group: the ranks that hold the parts of x, which share one amax; or None.
        out: buffers of ``QuantizedActivation.empty(x.shape, ...)``.

    Returns:
        x_fp4 (..., ceil(N / 16) * 8), x_sf (..., ceil(N / 16)) or swizzled, gsa (1,) or (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    plain = (block, rotate, select, e4m3_max, rounding) == ("1x16", "none", "none", 448, "nearest")
    if not plain or rope is not None or interleaved:
        return _by_recipe(
            {
                "x": x,
                "granularity": granularity,
                "block": block,
                **sources.rotated_arguments(rotate, signs, rope, interleaved),
                "select": select,
                "e4m3_max": e4m3_max,
                "rounding": rounding,
                "rng_state": rng_state,
                "random_bytes": random_bytes,
                "scale_layout": scale_layout,
                "recipe": recipe,
            },
            divisor,
            gsa,
            process_group,
            out,
        )
    if signs is not None or rng_state is not None or random_bytes is not None:
        named = {"signs": signs, "rng_state": rng_state, "random_bytes": random_bytes}
        name = next(name for name, given in named.items() if given is not None)
        raise ValueError(
            f"{name}: expected None without a recipe that takes it, got a tensor. Pass rotate= "
            "with signs, and rounding='stochastic' with the others"
        )
    op, number, given, covers = chosen(QUANTIZE, gsa, granularity)
    form = (x, None, -1, scale_layout, covers, recipe)
    done = op.into(
        process_group is None and fitting(op, form, given, out),
        x=x,
        gsa=given,
        divisor=divisor,
        granularity=granularity,
        recipe=recipe,
        scale_layout=scale_layout,
        gsa_value=number,
    )
    if process_group is not None:
        return over(process_group, QUANTIZE, done, form, gsa, out)
    return quantized(op, done, form, given, out)


def quantize_weight_nvfp4(
    w: Tensor,
    *,
    block: WeightBlock = "1x16",
    dim: int = -1,
    gsa: float | Tensor | None = None,
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    process_group: ProcessGroup | None = None,
    out: NVFP4Tensor | None = None,
) -> NVFP4Tensor:
    """Quantizes a weight to NVFP4, with blocks along the dimension that a product sums over.

    Args:
        w: (N, K), or (K, N) with ``dim=0``.
        block: "1x16", or "16x16": 16 by 16 elements share a scale, which is stored for each of the
            16, so that x_sf has the same shape and a transposed weight the same values.
        dim: dimension of K: -1 or 0.
        gsa: None to compute it, a positive number, or float32 of one element.
        divisor: a computed gsa is ``amax / divisor``.
        recipe: "te", "vllm" or "te_flush".
        scale_layout: "linear", or, with ``dim=-1``, "swizzled_128x4".
        process_group: the ranks that hold the parts of w, which share one amax; or None.
        out: buffers of ``NVFP4Tensor.empty(w.shape, dim=dim, ...)``.

    Returns:
        ``dim=-1``: x_fp4 (N, ceil(K / 16) * 8), x_sf (N, ceil(K / 16)) or swizzled. ``dim=0``:
        x_fp4 (ceil(K / 16) * 8, N) with neighbors of K in a byte, x_sf (ceil(K / 16), N).
        gsa (1,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    op, number, given, covers = chosen(WEIGHT, gsa, "tensor")
    form = (w, None, dim, scale_layout, covers, recipe)
    done = op.into(
        process_group is None and fitting(op, form, given, out),
        w=w,
        gsa=given,
        divisor=divisor,
        granularity="tensor",
        block=block,
        dim=dim,
        recipe=recipe,
        scale_layout=scale_layout,
        gsa_value=number,
    )
    if process_group is not None:
        return over(process_group, WEIGHT, done, form, gsa, out)
    return quantized(op, done, form, given, out)


Form = tuple[Tensor, int | None, int, str, str, str]
"""What a result is made from beside its parts: the tensor that is quantized; the columns of the
result, if these are others; dim, scale_layout, granularity and recipe.
"""


def chosen(
    family: Family, gsa: float | Tensor | None, granularity: str
) -> tuple[Op, float | None, Tensor | None, str]:
    """The op that a gsa asks for, the gsa as a number or a tensor, and the result's granularity."""
    if gsa is None:
        return family.computed, None, None, granularity
    given = gsa if isinstance(gsa, Tensor) and gsa.dim() == 1 else _checks.as_gsa(gsa)
    if isinstance(given, Tensor):
        if granularity not in GRANULARITIES:
            one_of("granularity", granularity, GRANULARITIES)
        if given.requires_grad:  # it becomes the gsa of a result
            given = given.detach()
        return family.given, None, given, "tensor" if given.numel() == 1 else "row"
    return family.computed, given, None, "tensor"  # the op says whether granularity is a name


def fitting(op: Op, form: Form, gsa: Tensor | None, out: NVFP4Tensor | None) -> Any:
    """``out`` for `Op.into`: False if it has not the form of a result; the op looks at the parts.

    ``gsa`` is one that is given as a tensor.
    """
    if out is None:
        return None
    x, cols, dim, scale_layout, granularity, _ = form
    if cols is None and isinstance(x, Tensor) and x.dim():
        cols = x.shape[dim]
    fits = (
        type(out) is NVFP4Tensor
        and out.scale_layout == scale_layout
        and out.dim == dim
        and (gsa is not None or (out.granularity == granularity and out.gsa is not out._taken))
        and out.cols == cols
        and (out.inv_rms is None or op.inv_rms)
    )
    return fits and out


def quantized(
    op: Op, done: Any, form: Form, gsa: Tensor | None, out: NVFP4Tensor | None
) -> NVFP4Tensor:
    """The rest of a call of an op that quantizes, after `Op.into`.

    Args:
        op: what is called.
        done: what `Op.into` has returned.
        form: of the result.
        gsa: that is given as a tensor.
        out: buffers for the results, or None.
    """
    if isinstance(done, dict):
        tensors = op.tensors(done)
        form = (tensors[0], *form[1:])  # perhaps an array of another library before
        if out is None:
            done = op.dispatched(tensors)
        else:
            _check_buffers(op, form, gsa, out)
            own = out.gsa if gsa is not None else out._written_gsa()
            buffers = [own if part == "gsa" else getattr(out, part) for part in op.parts]
            done = op.dispatched(tensors, buffers)
            out.gsa = own
    x, cols, dim, scale_layout, granularity, recipe = form
    if done is None and out is not None:
        out.recipe = recipe
        if gsa is not None:
            out.gsa, out.granularity, out._taken = gsa, granularity, gsa
        return out
    q = NVFP4Tensor(
        done[0],
        done[1],
        done[2] if gsa is None else gsa,
        done[-1] if op.inv_rms else None,
        x.shape[dim] if cols is None else cols,
        scale_layout,
        granularity,
        recipe,
        dim,
    )
    if gsa is not None:
        q._taken = gsa
    return q


def _check_buffers(op: Op, form: Form, gsa: Tensor | None, out: NVFP4Tensor) -> None:
    """Raises where ``out`` has not the form of a result of this call."""
    x, cols, dim, scale_layout, granularity, _ = form
    shape: tuple[Any, ...] = tuple(x.shape)
    if dim == -1:
        size = shape[-1] if cols is None and shape else cols
        shape = (*shape[: len(shape) - (op.source.reduced if op.source else 1)], size)
    fields: dict[str, Any] = {"shape": shape, "dim": dim, "scale_layout": scale_layout}
    buffers: tuple[str, ...] = ("x_fp4", "x_sf")
    if gsa is None:
        fields["granularity"] = granularity
        buffers = (*buffers, "gsa")
    parts = {"inv_rms": op.inv_rms}
    check_form(op, out, "out", NVFP4Tensor, buffers, fields, parts)


def _call(op: Op, arguments: dict[str, Any], form: Form, out: NVFP4Tensor | None) -> NVFP4Tensor:
    """A call of an op that quantizes with these arguments, and others, by name."""
    done: Any = NotImplemented
    if fitting(op, form, None, out) is not False:
        done = op.direct(arguments, () if out is None else op.buffers_of(out))
    return quantized(op, arguments if done is NotImplemented else done, form, None, out)


def _by_recipe(
    arguments: dict[str, Any],
    divisor: float,
    gsa: float | Tensor | None,
    process_group: ProcessGroup | None,
    out: QuantizedActivation | None,
) -> QuantizedActivation:
    """A call with a recipe for training or rotation: its amax if no gsa is given, then the rest.

    Args:
        arguments: those of the op, by name.
        divisor: as it was given, which has to be the default.
        gsa: as it was given.
        process_group: as it was given.
        out: as it was given.
    """
    if divisor != NVFP4_DIVISOR:
        raise ValueError(
            f"divisor: expected {NVFP4_DIVISOR} with a recipe for training or rotation, got "
            f"{divisor!r}. e4m3_max sets their divisor"
        )
    x = arguments["x"] = _checks.with_columns(_checks.as_tensor(arguments["x"], "x"))
    if process_group is not None:
        _sharded.check_no_scale(process_group, gsa, "gsa")
    given = _checks.as_gsa(gsa)
    arguments["from_gsa"] = given is not None
    if given is None:
        amax = recipes.amax_for(recipes.ROTATED_AMAX, recipes.QUANTIZE, arguments)
        if process_group is not None:
            _sharded.max_over(amax, process_group)
    else:
        if isinstance(given, float):
            GSA.check("gsa", given)
            given = torch.full((1,), given, dtype=torch.float32, device=x.device)
        _checks.input_tensor(x, "x")
        FP32.check("gsa", given)
        _checks.gsa_tensor(given, _checks.row_count(x.shape[:-1]), x, "x")
        amax = given.contiguous()
        if isinstance(out, NVFP4Tensor) and amax is out.gsa:
            amax = amax.clone()  # it is read while out.gsa is written
        one_of("granularity", arguments["granularity"], GRANULARITIES)
        arguments["granularity"] = "tensor" if amax.numel() == 1 else "row"
    arguments["amax"] = amax
    granularity, recipe = arguments["granularity"], arguments["recipe"]
    form = (x, None, -1, arguments["scale_layout"], granularity, recipe)
    return _call(recipes.QUANTIZE, arguments, form, out)


def over(
    process_group: ProcessGroup,
    family: Family,
    arguments: dict[str, Any],
    form: Form,
    gsa: float | Tensor | None,
    out: NVFP4Tensor | None,
) -> NVFP4Tensor:
    """A call with the amax of a process group; the gsa, which cannot be given, as it was given."""
    _sharded.check_no_scale(process_group, gsa, "gsa")
    if family.amax is not None:
        return _norm_over(process_group, family, arguments, form, out)
    arguments["amax"] = _amax_over(process_group, family.source, arguments)
    form = (arguments[family.source.of], *form[1:])
    return _call(family.from_amax, arguments, form, out)


def _amax_over(process_group: ProcessGroup, source: Source, arguments: dict[str, Any]) -> Tensor:
    """The amax of what the ranks of a group have of these values."""
    x = _checks.with_columns(_checks.as_tensor(arguments[source.of], source.of))
    arguments[source.of] = x
    plain, cols = source.cols is None, x.shape[-1] if x.dim() else 0
    _sharded.check_blocks(cols if plain else cols // 2, arguments["granularity"], process_group)
    of = {**arguments, "keep_nan": False, **({"x": x} if plain else {})}
    op = _sharded.AMAX if plain else _sharded.DEINTERLEAVE_AMAX
    return _sharded.max_over(op.one_tensor(of, None), process_group)


def _norm_over(
    process_group: ProcessGroup,
    family: Family,
    arguments: dict[str, Any],
    form: Form,
    out: NVFP4Tensor | None,
) -> NVFP4Tensor:
    """A norm with the amax of a group: one op, an all_reduce, and another."""
    assert family.amax is not None
    _sharded.check_granularity_of_norm(arguments["granularity"])
    of, whole = family.source.of, family.computed
    arguments[of] = _checks.with_columns(_checks.as_tensor(arguments[of], of))
    form = (arguments[of], *form[1:])
    # The first half writes residual and inv_rms, so what the second refuses is refused here.
    if out is not None:
        _check_buffers(whole, form, None, out)
    whole.check_call(whole.tensors(arguments), () if out is None else whole.buffers_of(out))
    amax, inv_rms = _sharded.norm_amax_over(
        process_group,
        family.amax,
        arguments,
        None if out is None else out.inv_rms,
    )
    if arguments.get("residual") is not None:
        arguments["x"] = arguments["residual"]  # what was normalized
    arguments |= {"amax": amax, "inv_rms": inv_rms}
    buffers = None if out is None else replace(out, inv_rms=None, gsa=out._written_gsa())
    q = _call(family.from_amax, arguments, form, buffers)
    if out is None:
        return replace(q, inv_rms=inv_rms)
    out.recipe, out.gsa = arguments["recipe"], q.gsa
    return out
