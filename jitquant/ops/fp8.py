"""FP8 and INT8: the public functions. Each checks its arguments and calls one op.

What they share with those of `jitquant.ops.mxfp8` and `jitquant.ops.ragged`:

- Inputs are bfloat16, float16 or float32, on the CPU or a GPU, with any leading dimensions and
  strides. If the last dimension is not contiguous, the functions copy the input first, which takes
  a launch and memory; ops refuse it. Ragged functions take contiguous buffers only. Objects with
  ``__dlpack__`` are accepted too.
- ``scale`` encodes, ``q = x * scale``, as in TransformerEngine. ``scale_inv`` of a result
  dequantizes and is ``1 / scale`` to the bit. If a checkpoint stores a scale that dequantizes, pass
  its reciprocal.
- ``process_group``: each rank passes its part of one tensor. One all_reduce between the two
  launches makes the amaxes those of all parts, and each rank gets, bit for bit, its part of the
  result for the whole tensor. With one scale for the tensor, rows or columns may be split; with a
  scale for each row only columns, on ranks with the same rows. Not allowed together with a scale.
  Functions with scales for groups and blocks do not have it: unless a group or block is split,
  nothing has to be reduced. Nor does `rmsnorm_quantize_fp8`, which needs whole rows. See
  ``docs/distributed.md``.
- ``out``: a `QuantizedTensor` whose buffers are written and which is returned. Buffers are
  contiguous, except that those of the elements may be row-strided. They do not overlap the inputs
  or each other; ``residual`` does not overlap ``x``.
- Nothing is differentiable: no result requires grad.
- Nothing is read back to the CPU, and every call can be captured in a CUDA graph.

Errors: TypeError for a wrong type or dtype; ValueError for a shape, stride, device, number or name
that is not accepted. The message lists what is expected. On a GPU also
`jitquant.loader.LoaderError` and its subclasses if a kernel cannot be compiled or loaded.
"""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from jitquant.formats import (
    BLOCK_SCALE_LAYOUTS,
    E4M3,
    E8M0_DTYPE,
    FP8_GRANULARITIES,
    FP8_SCALE_MIN,
    FP32_TINIEST,
    GRANULARITIES,
    GROUP_SCALE_LAYOUTS,
    SCALE_LAYOUTS,
    FP8Granularity,
    Granularity,
    Rotation,
    ceil_div,
    one_of,
    scales_shape,
)
from jitquant.numerics import fp8 as numerics
from jitquant.ops import _checks, _checks_fp8, _sharded, sources
from jitquant.ops._results import BUFFERS, MAKER, Form, check_call, fitting, quantized
from jitquant.ops.blockwise import GROUP_EPS, quantize_block, quantize_per_token_group
from jitquant.ops.parts import part_for_residual, part_for_rope
from jitquant.ops.schema import (
    EIGHT_BITS,
    FP32,
    OUTPUT,
    Cast,
    Number,
    Op,
    Plan,
    Result,
    Rows,
    Rule,
    Source,
    fp32,
    product,
)
from jitquant.tensors import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "dequantize",
    "quantize_fp8",
    "rmsnorm_quantize_fp8",
    "swiglu_quantize_fp8",
]


def _plan_scaled(
    rows: Rows,
    source: Source,
    scale: Tensor | None,
    dtype: torch.dtype,
    scale_value: float | None,
    scale_ub: float | None,
    amax_eps: float | None,
    granularity: str,
    with_amax: bool,
) -> tuple[Result, ...]:
    given = scale is not None or scale_value is not None
    if given:
        _checks_fp8.no_bound("scale_ub", scale_ub)
        _checks_fp8.no_bound("amax_eps", amax_eps)
    if scale is not None:
        if scale_value is not None:
            raise ValueError("scale: expected a tensor or a number, got both")
        _checks_fp8.scale_tensor(scale, rows.count, granularity, rows.like, rows.name)
    elif scale_value is not None and granularity == "row":
        raise ValueError("scale: expected a tensor with granularity 'row', got a number")
    elif not given and granularity == "tensor" and source.granularity == "row":
        raise ValueError(
            "granularity: expected 'row' or a given scale, got 'tensor' without a scale. To "
            "compute one scale for the whole tensor quantize the result with quantize_fp8"
        )
    floats = fp32(*rows.leading, 1) if granularity == "row" else fp32(1)
    return Result((*rows.leading, rows.cols), dtype), floats, floats if with_amax else fp32(0)


def _plan_from_amax(
    rows: Rows, amax: Tensor, dtype: torch.dtype, granularity: str
) -> tuple[Result, ...]:
    by_row = granularity == "row"
    count = rows.count if by_row else 1
    _checks.amax_tensor(amax, count, count, rows.like, rows.name)
    floats = fp32(*rows.leading, 1) if by_row else fp32(1)
    return Result((*rows.leading, rows.cols), dtype), floats


_GRANULARITY = {"granularity": GRANULARITIES}
SCALE = Number(
    FP8_SCALE_MIN,
    "a finite number of at least 2.94e-39, whose reciprocal is finite in float32",
    ". Elements are multiplied by it: 448 / amax, for instance",
    "scale",
)
SCALE_UB = Number(
    FP32_TINIEST,
    "a positive number that is finite in float32, at least 2**-149",
    ". Leave it out for no bound",
)
_BOUNDS: dict[str, Rule] = {"dtype": EIGHT_BITS, "scale_ub": SCALE_UB, "amax_eps": SCALE_UB}

SCALED = Cast(
    "{takes}, Tensor? scale=None, {tail}*, {written}ScalarType dtype, float? scale_value=None, "
    "float? scale_ub=None, float? amax_eps=None, {granularity}{options}bool with_amax=True",
    ("data", "scale_inv", "amax"),
    _plan_scaled,
    numerics.quantize_scaled,
    _GRANULARITY,
    {"scale": FP32, "scale_value": SCALE, **_BOUNDS},
)
"""FP8 or INT8 with a scale for the tensor or for each row, computed or given."""

FROM_AMAX = Cast(
    "{takes}, Tensor amax, *, ScalarType dtype, float? scale_ub=None, float? amax_eps=None, "
    "{granularity}{options}",
    ("data", "scale_inv"),
    _plan_from_amax,
    numerics.quantize_scaled_from_amax,
    _GRANULARITY,
    {"amax": FP32, **_BOUNDS},
)
"""FP8 or INT8 with the amax given: the second half of a quantization over a process group."""


class Scaled(NamedTuple):
    """The ops of a public function: a scale that is computed or given, and the amax given."""

    source: Source
    scaled: Op
    from_amax: Op | None


QUANTIZE = Scaled(
    sources.PLAIN,
    product("quantize_fp8", sources.PLAIN, SCALED, module="quantize_fp8", **BUFFERS),
    product("quantize_fp8_from_amax", sources.PLAIN, FROM_AMAX, module="quantize_fp8", **BUFFERS),
)
_SILU = "swiglu_quantize"
SWIGLU = Scaled(
    sources.SWIGLU,
    product(f"{_SILU}_fp8", sources.SWIGLU, SCALED, module=_SILU, **BUFFERS),
    product(f"{_SILU}_fp8_from_amax", sources.SWIGLU, FROM_AMAX, module=_SILU, **BUFFERS),
)
ROTATED = Scaled(
    sources.ROTATED,
    product(
        "rotate_quantize_fp8",
        sources.ROTATED,
        SCALED,
        module="rotate_quantize",
        part=part_for_rope,
        **BUFFERS,
    ),
    None,
)
RMSNORM = Scaled(
    sources.NORM,
    product(
        "rmsnorm_quantize_fp8",
        sources.NORM,
        SCALED,
        module="rmsnorm_quantize",
        part=lambda x, residual: part_for_residual(x.dtype, residual),
        **BUFFERS,
    ),
    None,
)


def _plan_dequantize(
    data: Tensor,
    scale_inv: Tensor,
    block_rows: int,
    block_cols: int,
    scale_layout: str,
    dtype: torch.dtype | None,
) -> Plan:
    if data.dim() == 0 or data.shape[-1] == 0 or (block_rows > 1 and data.dim() < 2):
        raise ValueError(
            "data: expected shape (..., N) with N >= 1, or (..., N, K) for blocks, got shape "
            f"{_checks.shape_text(data)}"
        )
    if data.stride(-1) != 1 and data.shape[-1] != 1:
        raise ValueError(
            "data: expected a contiguous last dimension (stride 1), got strides "
            f"{tuple(data.stride())}"
        )
    if block_rows < 0 or block_cols < 0 or block_cols % 16:
        raise ValueError(
            "block_rows and block_cols: expected 0 or more, with block_cols a multiple of 16, got "
            f"{block_rows} and {block_cols}"
        )
    _checks.same_device(scale_inv, "scale_inv", data, "data")
    if scale_inv.dtype not in (torch.float32, torch.int32, E8M0_DTYPE, torch.uint8):
        raise TypeError(
            "scale_inv: expected float32, int32 of packed exponents, float8_e8m0fnu or its bytes "
            f"as uint8, got {scale_inv.dtype}"
        )
    if block_rows == 0 and scale_inv.dtype != torch.float32:
        raise TypeError(
            "scale_inv: expected float32 with block_rows 0 (one scale for the tensor), got "
            f"{scale_inv.dtype}. Pass its value as torch.float32"
        )
    if (
        block_rows
        and scale_layout == "swizzled_128x4"
        and scale_inv.dtype not in (E8M0_DTYPE, torch.uint8)
    ):
        raise TypeError(
            "scale_inv: expected float8_e8m0fnu or its bytes as uint8 with scale_layout "
            f"'swizzled_128x4', got {scale_inv.dtype}. Scales of other dtypes have another layout"
        )
    packed = "ue8m0_packed" if scale_inv.dtype == torch.int32 else "float32"
    lines = (
        (*data.shape[:-2], ceil_div(data.shape[-2], block_rows))
        if block_rows > 1
        else data.shape[:-1]
    )
    groups = ceil_div(data.shape[-1], block_cols) if block_cols else 1
    wanted = scales_shape(lines, groups, packed, scale_layout) if block_rows else (1,)
    if tuple(scale_inv.shape) != tuple(wanted) or not scale_inv.is_contiguous():
        raise ValueError(
            f"scale_inv: expected shape {tuple(wanted)}, contiguous, for data of shape "
            f"{_checks.shape_text(data)} and scale_layout {scale_layout!r}, got shape "
            f"{_checks.shape_text(scale_inv)} and strides {tuple(scale_inv.stride())}"
        )
    out = Result(tuple(data.shape), torch.bfloat16 if dtype is None else dtype)
    return Plan(data.device, (out,))


DEQUANTIZE = Op(
    "dequantize",
    ["out"],
    module="dequantize",
    plan=_plan_dequantize,
    reference=numerics.dequantize,
    accepts={"data": EIGHT_BITS, "dtype": OUTPUT},
    choices={"scale_layout": (*GROUP_SCALE_LAYOUTS, BLOCK_SCALE_LAYOUTS[1], *SCALE_LAYOUTS)},
    maker=MAKER,
)

OPS: tuple[Op, ...] = (
    *(op for ops in (QUANTIZE, SWIGLU, ROTATED, RMSNORM) for op in ops[1:] if op is not None),
    DEQUANTIZE,
)
"""Every op of 8 bits with a scale for a tensor or a row, and what dequantizes all such formats."""


def quantize_fp8(
    x: Tensor,
    *,
    granularity: FP8Granularity = "tensor",
    dtype: torch.dtype = E4M3,
    scale: float | Tensor | None = None,
    scale_ub: float | None = None,
    amax_eps: float | None = None,
    amax: bool = True,
    rotate: Rotation = "none",
    signs: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    process_group: ProcessGroup | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantizes to FP8 or INT8 with a scale for the tensor, a row (token), 1x128 or 128x128.

    ``scale = top / amax``, 1 where the amax is 0, infinite or NaN, at most FLT_MAX; top is 448,
    57344 for e5m2 or 127 for int8. This is TransformerEngine's current scaling; with a scale given,
    the cast of its delayed scaling. INT8 is that of vLLM, whose computed scale_inv is
    ``amax / 127``. Two launches for a computed scale or the amax of a whole tensor, one for all
    else. With ``rope`` or ``rotate``, granularity is "row" or "1x128", or a scale is given.

    Args:
        x: (..., N); a 1-D tensor is one row.
        granularity: what a computed scale covers: "tensor", "row", "1x128" or "128x128". The last
            two are `quantize_per_token_group` and `quantize_block` with their defaults, which have
            more options; they take no scale, scale_ub or process_group, and give no amax.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        scale: None to compute it; a number, finite and with a finite reciprocal in float32;
            float32 of one element or of one for each row, which decides the granularity.
        scale_ub: a computed scale is made from ``min(amax, scale_ub)``, as vLLM and FBGEMM have it.
        amax_eps: a computed scale is made from ``max(amax, amax_eps)``, after scale_ub: 1e-12 for
            torchao's scales, 1 / 512 for vLLM's of rows. None: no bound; with 1x128 and 128x128
            1e-10.
        amax: whether a given scale comes with the amax of ``x``, for a history; a computed scale
            always does.
        rotate, signs, rope, interleaved: what is quantized, as in `quantize_per_token_group`.
        process_group: the ranks that hold the parts of x, which share one amax; or None.
        out: buffers of ``QuantizedTensor.empty(x.shape, format=..., ...)``, where the format is
            "fp8_tensor", "fp8_row", "fp8_group" or "fp8_block", or the same of "int8".

    Returns:
        data (..., N), scale_inv and amax: (1,) for the tensor, (..., 1) for rows. amax is that of
        ``x``, before scale_ub, and NaN if ``x`` has one. For 1x128 and 128x128 scale_inv is
        (..., ceil(N / 128)) and (..., ceil(M / 128), ceil(N / 128)).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    is_rotated = rotate != "none" or rope is not None or signs is not None or interleaved
    if granularity not in GRANULARITIES:
        one_of("granularity", granularity, FP8_GRANULARITIES)
        lacks = {"scale": scale, "scale_ub": scale_ub, "process_group": process_group}
        for name, value in lacks.items():
            if value is not None:
                raise ValueError(
                    f"{name}: expected None with granularity {granularity!r}, got "
                    f"{_checks.shown(value)}. Each group has a scale and an amax of its own. With "
                    f"{name} use granularity 'tensor' or 'row'"
                )
        if amax_eps is not None:  # their functions call it eps
            if not isinstance(amax_eps, _checks.SCALARS["float"][0]):
                raise _checks.wrong_scalar(amax_eps, "amax_eps", "float")
            GROUP_EPS.check("amax_eps", amax_eps)
        if granularity == "1x128":
            how: Any = {"rotate": rotate, "signs": signs, "rope": rope, "interleaved": interleaved}
            return quantize_per_token_group(x, dtype=dtype, eps=amax_eps, out=out, **how)
        if is_rotated:
            raise ValueError(
                "granularity: expected '1x128', 'row' or a given scale with rotate or rope, got "
                f"{granularity!r}"
            )
        return quantize_block(x, dtype=dtype, eps=amax_eps, out=out)
    given, number = None, None
    if scale is not None and process_group is None:
        given, number, granularity = _scale(scale, x, "x", granularity)
    form = (_INT8_FORMS if dtype == torch.int8 else _FORMS)[granularity]
    with_amax = _with_amax(scale, amax)
    is_plain = not is_rotated and process_group is None
    done = QUANTIZE.scaled.into(
        is_plain and fitting(out, form, dtype, with_amax),
        x=x,
        scale=given,
        dtype=dtype,
        scale_value=number,
        scale_ub=scale_ub,
        amax_eps=amax_eps,
        granularity=granularity,
        with_amax=with_amax,
    )
    if is_rotated:
        if granularity == "tensor" and scale is None:
            raise ValueError(
                "granularity: expected '1x128', 'row' or a given scale with rotate or rope, got "
                "'tensor' without a scale"
            )
        if process_group is not None:
            raise ValueError(
                "process_group: expected None with rotate or rope, got a group. Use "
                "quantize_per_token_group, whose scales need no process group"
            )
        done |= sources.rotated_arguments(rotate, signs, rope, interleaved)
        done = ROTATED.scaled.into(fitting(out, form, dtype, with_amax), **done)
        return quantized(ROTATED.scaled, done, form, out, with_amax)
    if process_group is not None:
        return _over(process_group, QUANTIZE, done, form, scale, out)
    return quantized(QUANTIZE.scaled, done, form, out, with_amax)


def swiglu_quantize_fp8(
    fused: Tensor,
    *,
    granularity: Granularity = "row",
    dtype: torch.dtype = E4M3,
    scale: float | Tensor | None = None,
    scale_ub: float | None = None,
    amax_eps: float | None = None,
    interleave: int = 0,
    amax: bool = True,
    process_group: ProcessGroup | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """``silu(gate) * up`` in fp32, then `quantize_fp8` of it, in as many launches.

    The product is not rounded to the input's dtype in between; amax and scale are the product's.

    Args:
        fused: (..., 2 * N): [gate | up].
        granularity: "row"; "tensor" if a scale or a ``process_group`` is given.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        scale: None to compute one for each row; else as in `quantize_fp8`.
        scale_ub, amax_eps: as in `quantize_fp8`.
        interleave: length of alternating runs of gate and up columns; 0: [gate | up].
        amax: whether a given scale comes with the amax.
        process_group: the ranks that hold the parts of fused, which share one amax; or None.
        out: buffers of ``QuantizedTensor.empty((*fused.shape[:-1], N), ...)``.

    Returns:
        A quantized tensor of the shape (..., N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if granularity not in GRANULARITIES:
        one_of("granularity", granularity, GRANULARITIES)
    given, number = None, None
    if scale is not None and process_group is None:
        given, number, granularity = _scale(scale, fused, "fused", granularity)
    form = (_INT8_FORMS if dtype == torch.int8 else _FORMS)[granularity]
    with_amax = _with_amax(scale, amax)
    done = SWIGLU.scaled.into(
        process_group is None and fitting(out, form, dtype, with_amax),
        fused=fused,
        scale=given,
        dtype=dtype,
        scale_value=number,
        scale_ub=scale_ub,
        amax_eps=amax_eps,
        granularity=granularity,
        interleave=interleave,
        with_amax=with_amax,
    )
    if process_group is not None:
        return _over(process_group, SWIGLU, done, form, scale, out)
    return quantized(SWIGLU.scaled, done, form, out, with_amax)


def rmsnorm_quantize_fp8(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    granularity: Granularity = "row",
    dtype: torch.dtype = E4M3,
    scale: float | Tensor | None = None,
    scale_ub: float | None = None,
    amax_eps: float | None = None,
    amax: bool = True,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """RMSNorm in fp32, then `quantize_fp8` of it, in as many launches.

    ``y = v * inv_rms * weight``, ``inv_rms = 1 / sqrt(mean(v^2) + eps)``; y is not rounded to the
    input's dtype in between.

    Args:
        x: (..., N).
        weight: (N,), contiguous, of x's dtype or float32.
        eps: added to the mean of the squares.
        residual: of x's shape and dtype; becomes ``x + residual``, added in fp32 and rounded once,
            and that is the v which is normalized. Without it v is x.
        granularity: "row"; "tensor" if a scale is given.
        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``.
        scale: None to compute one for each row; else as in `quantize_fp8`.
        scale_ub, amax_eps: as in `quantize_fp8`.
        amax: whether a given scale comes with the amax of y.
        out: buffers of ``QuantizedTensor.empty(x.shape, inv_rms=True, ...)``.

    Returns:
        A quantized tensor of x's shape with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if granularity not in GRANULARITIES:
        one_of("granularity", granularity, GRANULARITIES)
    given, number = None, None
    if scale is not None:
        given, number, granularity = _scale(scale, x, "x", granularity)
    form = (_INT8_FORMS if dtype == torch.int8 else _FORMS)[granularity]
    with_amax = _with_amax(scale, amax)
    done = RMSNORM.scaled.into(
        fitting(out, form, dtype, with_amax, True),
        x=x,
        weight=weight,
        scale=given,
        eps=eps,
        residual=residual,
        dtype=dtype,
        scale_value=number,
        scale_ub=scale_ub,
        amax_eps=amax_eps,
        granularity=granularity,
        with_amax=with_amax,
    )
    return quantized(RMSNORM.scaled, done, form, out, with_amax)


def dequantize(
    q: QuantizedTensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The values of a quantized tensor: ``data * scale_inv`` in fp32, rounded once to ``dtype``.

    Args:
        q: of any format and layout.
        dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
        out: contiguous tensor of the logical shape to write to.

    Returns:
        A tensor of the logical shape, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if not isinstance(q, QuantizedTensor):
        raise TypeError(
            f"q: expected a QuantizedTensor, got {type(q).__name__}. For NVFP4 call "
            "dequantize_nvfp4, for a ragged tensor dequantize_ragged"
        )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    block_rows, block_cols = q.block
    done = DEQUANTIZE.into(
        out,
        data=q.data,
        scale_inv=q.stored_scales,
        block_rows=block_rows,
        block_cols=block_cols,
        scale_layout=q.layout,
        dtype=dtype,
    )
    return DEQUANTIZE.one_tensor(done, out)


_FORMS, _INT8_FORMS = (
    {
        granularity: (f"{kind}_{granularity}", block, "float32", "row", "te")
        for granularity, block in (("tensor", (0, 0)), ("row", (1, 0)))
    }
    for kind in ("fp8", "int8")
)


def _with_amax(scale: object, amax: bool) -> bool:
    """Whether the amax is a result."""
    if hasattr(amax, "stride"):  # a tensor, taken for the amax itself
        raise _checks.wrong_scalar(amax, "amax", "bool")
    return scale is None or amax


def _scale(
    scale: float | Tensor, x: Tensor, name: str, granularity: FP8Granularity
) -> tuple[Tensor | None, float | None, Granularity]:
    """A given scale as a tensor or a number, and the granularity that it decides."""
    given = scale if isinstance(scale, Tensor) else _checks.seen_as_tensor(scale, "scale")
    if isinstance(given, Tensor):
        # The op looks at it.
        if given.numel() != 1:
            return given, None, "row"
        if granularity == "row" and _checks.row_count(_checks.as_tensor(x, name).shape[:-1]) == 1:
            return given, None, "row"
        return given, None, "tensor"
    if not isinstance(given, bool) and isinstance(given, Real):
        return None, float(given), "tensor"
    raise TypeError(
        "scale: expected None (computed), a number, or a float32 tensor of one element or one for "
        f"each row, got {type(scale).__name__}"
    )


def _over(
    process_group: ProcessGroup,
    ops: Scaled,
    arguments: dict[str, Any],
    form: Form,
    scale: float | Tensor | None,
    out: QuantizedTensor | None,
) -> QuantizedTensor:
    """FP8 or INT8 with the amax of a process group."""
    _sharded.check_no_scale(process_group, scale, "scale")
    assert ops.from_amax is not None
    of, halved = ops.source.of, ops.source.cols is not None
    x = arguments[of] = _checks.with_columns(_checks.as_tensor(arguments[of], of))
    values: dict[str, Any] = {"x": x}
    if halved:
        ops.source.accepts[of].check(of, x)
        _checks_fp8.gate_and_up(x, arguments["interleave"])
        values = {"intermediate": x.shape[-1] // 2, "op": "swiglu"}
    op, dtype = ops.from_amax, arguments["dtype"]
    of_amax, buffers = _sharded.amax_buffer(out), None
    if out is not None:
        buffers = replace(out, amax=None)
        check_call(op, {**arguments, "amax": of_amax}, form, buffers)  # of_amax is written first
    first = _sharded.DEINTERLEAVE_AMAX if halved else _sharded.AMAX
    own_amax = first.one_tensor({**arguments, **values, "keep_nan": True}, of_amax)
    amax = arguments["amax"] = _sharded.max_over(own_amax, process_group)
    own = {name: arguments[name] for name in op.names}
    q = quantized(op, op.into(fitting(buffers, form, dtype), **own), form, buffers)
    if out is not None:
        return out
    return replace(q, amax=amax.reshape(q.scale_inv.shape))


QuantizedTensor._dequantize = dequantize
