"""Many tensors in one buffer: the public functions. `jitquant.ops.fp8` describes what they share.

A buffer holds G tensors, its segments: segment i is the rows ``offsets[i]`` to ``offsets[i + 1]``
of a buffer (..., N), as in grouped products. A buffer of one dimension holds tensors of any shapes:
its rows have one element (`ragged_offsets`). With ``sizes`` a segment is the ``sizes[i]`` rows from
``offsets[i]`` on, and those up to the next segment are padding, for alignment. Padding is ignored,
and its results are zero. Offsets ascend. They are on the buffer's device, and the CPU does not read
or check them; even if they are wrong, kernels end, and access no memory outside of the buffer.
`jitquant.testing.checked` reads and checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from jitquant.formats import (
    ACTIVATIONS,
    CODES_PER_BYTE,
    E4M3,
    E8M0_DTYPE,
    FP4_DTYPE,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    NVFP4_DIVISOR,
    QUANTIZED_MAX,
    RAGGED_FORMATS,
    RECIPES,
    SCALE_DTYPE,
    Activation,
    Recipe,
    ceil_div,
    one_of,
)
from jitquant.numerics import ragged as numerics
from jitquant.numerics.fp8 import scale_from_amax
from jitquant.numerics.nvfp4 import scales_from_amax
from jitquant.ops import _checks, _checks_fp8, _sharded
from jitquant.ops.parts import PARTS, Part
from jitquant.ops.schema import FP8, FP32, INPUT, INT64, OUTPUT, Op, Plan, Result, fp32
from jitquant.tensors import QuantizedRaggedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "dequantize_ragged",
    "quantize_ragged",
    "quantize_ragged_grad",
    "ragged_offsets",
]


_BLOCK_BYTES = NVFP4_BLOCK // CODES_PER_BYTE
_MAKER = "QuantizedRaggedTensor.empty(shape, offsets, ...)"


def _segments(
    x: Tensor, name: str, offsets: Tensor, scale: Tensor | None, sizes: Tensor | None
) -> None:
    _checks_fp8.buffer_of_segments(x, name)
    _checks_fp8.offsets_tensor(offsets, sizes, x, name)
    _checks_fp8.floats_of_segments(scale, "scale", offsets, x, name)


def _floats(offsets: Tensor) -> Result:
    """A float for each segment."""
    return fp32(offsets.shape[0] - 1)


def _plan_fp8(
    x: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    sizes: Tensor | None,
    dtype: torch.dtype,
) -> Plan:
    _segments(x, "x", offsets, scale, sizes)
    floats = _floats(offsets)
    return Plan(x.device, (Result(tuple(x.shape), dtype), floats, floats))


def _plan_grad_fp8(
    grad: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    sizes: Tensor | None,
    act_input: Tensor | None,
    activation: str,
    with_dbias: bool,
    dtype: torch.dtype,
) -> Plan:
    _segments(grad, "grad", offsets, scale, sizes)
    _checks_fp8.activation(activation, act_input, grad)
    if grad.shape[-1] == 0:
        raise ValueError(
            f"grad: expected shape (..., N) with N >= 1, got shape {_checks.shape_text(grad)}"
        )
    if with_dbias and grad.dim() == 1:
        raise ValueError(
            f"grad: expected shape (rows, N) with dbias, got shape {_checks.shape_text(grad)}. "
            "Offsets of one dimension count elements, which have no bias gradients. Reshape it and "
            "count rows, or pass dbias=False"
        )
    floats = _floats(offsets)
    dbias = fp32(floats.shape[0] if with_dbias else 0, grad.shape[-1])
    return Plan(grad.device, (Result(tuple(grad.shape), dtype), floats, floats, dbias))


def _plan_nvfp4(x: Tensor, offsets: Tensor, scale: Tensor | None, sizes: Tensor | None) -> Plan:
    _segments(x, "x", offsets, scale, sizes)
    floats = _floats(offsets)
    blocks = ceil_div(_checks.row_count(x.shape), NVFP4_BLOCK)
    return Plan(
        x.device,
        (
            Result((blocks * _BLOCK_BYTES,), FP4_DTYPE),
            Result((blocks,), SCALE_DTYPE),
            floats,
            floats,
        ),
    )


def _plan_mxfp8(x: Tensor, offsets: Tensor, sizes: Tensor | None, dtype: torch.dtype) -> Plan:
    _segments(x, "x", offsets, None, sizes)
    blocks = ceil_div(_checks.row_count(x.shape), MXFP8_BLOCK)
    return Plan(x.device, (Result(tuple(x.shape), dtype), Result((blocks,), E8M0_DTYPE)))


def _plan_dequantize_mxfp8(
    data: Tensor,
    block_scales: Tensor,
    offsets: Tensor,
    sizes: Tensor | None,
    dtype: torch.dtype | None,
) -> Plan:
    _checks_fp8.buffer_of_segments(data, "data")
    _checks.packed_tensor(block_scales, "block_scales", E8M0_DTYPE)
    _checks.same_device(block_scales, "block_scales", data, "data")
    _checks_fp8.offsets_tensor(offsets, sizes, data, "data")
    blocks = ceil_div(_checks.row_count(data.shape), MXFP8_BLOCK)
    if tuple(block_scales.shape) != (blocks,):
        raise ValueError(
            f"block_scales: expected shape ({blocks},), one for 32 elements of data, got shape "
            f"{_checks.shape_text(block_scales)}"
        )
    out = Result(tuple(data.shape), torch.bfloat16 if dtype is None else dtype)
    return Plan(data.device, (out,))


def _plan_dequantize_fp8(
    data: Tensor,
    scale_inv: Tensor,
    offsets: Tensor,
    sizes: Tensor | None,
    dtype: torch.dtype | None,
) -> Plan:
    _checks_fp8.buffer_of_segments(data, "data")
    _checks_fp8.offsets_tensor(offsets, sizes, data, "data")
    _checks_fp8.floats_of_segments(scale_inv, "scale_inv", offsets, data, "data")
    out = Result(tuple(data.shape), torch.bfloat16 if dtype is None else dtype)
    return Plan(data.device, (out,))


def _plan_dequantize_nvfp4(
    x_fp4: Tensor,
    x_sf: Tensor,
    gsa: Tensor,
    offsets: Tensor,
    numel: int,
    row_size: int,
    sizes: Tensor | None,
    dtype: torch.dtype | None,
) -> Plan:
    if row_size < 0:
        raise ValueError(f"row_size: expected 0 or more, got {row_size}")
    _checks.packed_tensor(x_fp4, "x_fp4", FP4_DTYPE)
    _checks.packed_tensor(x_sf, "x_sf", SCALE_DTYPE)
    _checks.same_device(x_sf, "x_sf", x_fp4, "x_fp4")
    _checks_fp8.offsets_tensor(offsets, sizes, x_fp4, "x_fp4")
    _checks_fp8.floats_of_segments(gsa, "gsa", offsets, x_fp4, "x_fp4")
    blocks = ceil_div(numel, NVFP4_BLOCK)
    if numel < 0 or tuple(x_fp4.shape) != (blocks * _BLOCK_BYTES,):
        raise ValueError(
            f"x_fp4: expected shape ({blocks * _BLOCK_BYTES},) for {numel} elements, got shape "
            f"{_checks.shape_text(x_fp4)}"
        )
    if tuple(x_sf.shape) != (blocks,):
        raise ValueError(
            f"x_sf: expected shape ({blocks},) for {numel} elements, got shape "
            f"{_checks.shape_text(x_sf)}"
        )
    return Plan(x_fp4.device, (Result((numel,), torch.bfloat16 if dtype is None else dtype),))


def _part(x: Tensor, activation: str) -> Part | None:
    of = PARTS.get(x.dtype)
    if of is None:
        return None
    if activation == "none":
        return of.narrowed("plain", "-DJITQUANT_ACTIVATION=0")
    return of.narrowed("activated", "-DJITQUANT_ACTIVATION=1")


_SEGMENTS = {"offsets": INT64, "sizes": INT64}
_OTHERS = ("scale", "recipe", "dtype", "activation")
"""Arguments of some formats, which `quantize_ragged` passes to all."""
QUANTIZE_FP8 = Op(
    "quantize_ragged_fp8",
    ["data", "scale_inv", "amax"],
    module="quantize_ragged",
    others=_OTHERS,
    plan=_plan_fp8,
    reference=numerics.quantize_ragged_fp8,
    accepts={"x": INPUT, **_SEGMENTS, "scale": FP32, "dtype": FP8},
    choices={"activation": ACTIVATIONS},
    part=_part,
    maker=_MAKER,
)
QUANTIZE_GRAD_FP8 = Op(
    "quantize_ragged_grad_fp8",
    ["data", "scale_inv", "amax", "dbias"],
    module="quantize_ragged_grad",
    plan=_plan_grad_fp8,
    reference=numerics.quantize_ragged_grad_fp8,
    accepts={"grad": INPUT, **_SEGMENTS, "scale": FP32, "dtype": FP8},
    choices={"activation": ACTIVATIONS},
    maker=_MAKER,
)
QUANTIZE_NVFP4 = Op(
    "quantize_ragged_nvfp4",
    ["x_fp4", "x_sf", "gsa", "amax"],
    module="quantize_ragged_nvfp4",
    others=_OTHERS,
    plan=_plan_nvfp4,
    reference=numerics.quantize_ragged_nvfp4,
    accepts={"x": INPUT, **_SEGMENTS, "scale": FP32},
    choices={"recipe": RECIPES},
    maker=_MAKER,
    attributes={"x_fp4": "data", "x_sf": "block_scales", "gsa": "scale_inv"},
)
QUANTIZE_MXFP8 = Op(
    "quantize_ragged_mxfp8",
    ["data", "block_scales"],
    module="quantize_ragged_mxfp8",
    others=_OTHERS,
    plan=_plan_mxfp8,
    reference=numerics.quantize_ragged_mxfp8,
    accepts={"x": INPUT, **_SEGMENTS, "dtype": FP8},
    maker=_MAKER,
)
DEQUANTIZE_MXFP8 = Op(
    "dequantize_ragged_mxfp8",
    ["out"],
    module="dequantize_ragged",
    plan=_plan_dequantize_mxfp8,
    reference=numerics.dequantize_ragged_mxfp8,
    accepts={"data": FP8, **_SEGMENTS, "dtype": OUTPUT},
    maker=_MAKER,
)
DEQUANTIZE_FP8 = Op(
    "dequantize_ragged_fp8",
    ["out"],
    module="dequantize_ragged",
    plan=_plan_dequantize_fp8,
    reference=numerics.dequantize_ragged_fp8,
    accepts={"data": FP8, **_SEGMENTS, "scale_inv": FP32, "dtype": OUTPUT},
    maker=_MAKER,
)
DEQUANTIZE_NVFP4 = Op(
    "dequantize_ragged_nvfp4",
    ["out"],
    module="dequantize_ragged",
    plan=_plan_dequantize_nvfp4,
    reference=numerics.dequantize_ragged_nvfp4,
    accepts={**_SEGMENTS, "gsa": FP32, "dtype": OUTPUT},
    maker=_MAKER,
)

_OF_FORMATS = {"fp8_tensor": QUANTIZE_FP8, "nvfp4": QUANTIZE_NVFP4, "mxfp8": QUANTIZE_MXFP8}

OPS: tuple[Op, ...] = (
    QUANTIZE_FP8,
    QUANTIZE_GRAD_FP8,
    QUANTIZE_NVFP4,
    QUANTIZE_MXFP8,
    DEQUANTIZE_FP8,
    DEQUANTIZE_NVFP4,
    DEQUANTIZE_MXFP8,
)
"""Every op on many tensors in one buffer."""


def ragged_offsets(first_dims: Tensor, last_dims: Tensor | int) -> Tensor:
    """Offsets of matrices that follow each other in one buffer, from their shapes on the device.

    The CPU reads no shape: the call can be captured in a CUDA graph.

    Args:
        first_dims: int32 or int64 (G,), the rows of each matrix, which may be 0.
        last_dims: their columns: int32 or int64 (G,) on the same device, or a number for all.

    Returns:
        int64 (G + 1,), in elements, as `quantize_ragged` takes them for a buffer of one dimension:
        0, then the cumulative sum of ``first_dims * last_dims``. For matrices of one width N, which
        are a buffer (rows, N), ``ragged_offsets(first_dims, 1)`` counts its rows.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    first_dims = _checks.seen_as_tensor(first_dims, "first_dims")
    cols: Any = _checks.seen_as_tensor(last_dims, "last_dims")
    if not isinstance(cols, (int, Tensor)) and hasattr(cols, "__index__"):
        cols = _checks.integer(cols, "last_dims")
    for name, t in (("first_dims", first_dims), ("last_dims", cols)):
        if name == "last_dims" and isinstance(t, (int, torch.SymInt)):
            if t < 1:
                raise ValueError(f"last_dims: expected a number of 1 or more, got {t}")
            continue
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            raise _no_dims(name, t)
        if t.dim() != 1 or t.shape != first_dims.shape:
            wanted = "(G,)" if t is first_dims else f"{tuple(first_dims.shape)}, as of first_dims"
            raise ValueError(f"{name}: expected shape {wanted}, got shape {tuple(t.shape)}")
        _checks.same_device(t, name, first_dims, "first_dims")
    offsets = first_dims.new_zeros(first_dims.shape[0] + 1, dtype=torch.int64)
    offsets[1:] = (first_dims.long() * cols).cumsum(0)
    return offsets


def _no_dims(name: str, given: object) -> TypeError:
    """The error of what is not the rows, or the columns, of matrices."""
    expected = f"{name}: expected a tensor of int32 or int64"
    if isinstance(given, Tensor):
        return TypeError(f"{expected}, got {given.dtype}. Convert it with {name}.long()")
    also, way_out = (", or a number", "int(last_dims) or ") if name == "last_dims" else ("", "")
    return TypeError(
        f"{expected}{also}, got {type(given).__name__}. Convert it with {way_out}"
        f"torch.as_tensor({name})"
    )


def quantize_ragged(
    x: Tensor,
    offsets: Tensor,
    *,
    format: Literal["fp8_tensor", "nvfp4", "mxfp8"] = "fp8_tensor",
    scale: Tensor | None = None,
    sizes: Tensor | None = None,
    dtype: torch.dtype = E4M3,
    recipe: Recipe = "te",
    activation: Activation = "none",
    process_group: ProcessGroup | None = None,
    out: QuantizedRaggedTensor | None = None,
) -> QuantizedRaggedTensor:
    """Quantizes each tensor of a buffer with its own scale, or in MXFP8.

    Two launches, for any number of segments; one in MXFP8, if scales are given, and for small
    buffers: up to 8192 elements in 512 segments.

    Args:
        x: contiguous, (..., N), or of one dimension.
        offsets: int64 (G + 1,), ascending, in rows of N, or of one element of one dimension.
        format: "fp8_tensor": each segment as `jitquant.quantize_fp8` of a tensor. "nvfp4": each as
            `jitquant.quantize_nvfp4`, in blocks of 16 neighbors of the buffer; segments begin at
            multiples of 16 elements, and a block belongs to the segment of its first element.
            "mxfp8": blocks of 32 neighbors of the buffer as `jitquant.quantize_mxfp8` has them;
            if N is a multiple of 32, no block spans two tensors.
        scale: float32 (G,), the factors that encode (NVFP4: S, 2688 / amax); None: from the amaxes.
        sizes: int64 (G,), rows of each segment; None: segments follow each other.
        dtype: of "fp8_tensor" and "mxfp8": ``float8_e4m3fn`` or ``float8_e5m2``.
        recipe: of "nvfp4": "te", "vllm" or "te_flush".
        activation: of "fp8_tensor": what is done to x in fp32 before: "none", "relu", "silu",
            "gelu" (its tanh form), "qgelu" (``x * sigmoid(1.702 * x)``) or "srelu"
            (``relu(x)^2``). Its backward is `quantize_ragged_grad`.
        process_group: the ranks that have the other parts of the same G tensors, or None. One
            all_reduce makes each amax that of all parts. Then the buffer is quantized twice, with
            the amaxes of this rank and with those of all. MXFP8 needs none.
        out: buffers of ``QuantizedRaggedTensor.empty(x.shape, offsets, ...)``.

    Returns:
        data, scale_inv (G,), amax (G,), and for NVFP4 block_scales; for MXFP8 data and
        block_scales. The amax of an empty segment is 0.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if format == "mxfp8":
        for name, value in (("scale", scale), ("process_group", process_group)):
            if value is not None:
                raise ValueError(
                    f"{name}: expected None with format 'mxfp8', got {type(value).__name__}. Each "
                    "block has a scale of its own"
                )
    if process_group is not None:
        _sharded.check_no_scale(process_group, scale, "scale")

        def again(scale: Tensor | None) -> QuantizedRaggedTensor:
            keywords: dict[str, Any] = {"format": format, "dtype": dtype, "recipe": recipe}
            keywords["activation"] = activation
            return quantize_ragged(x, offsets, scale=scale, sizes=sizes, out=out, **keywords)

        return _over(process_group, again, dtype, out)
    # An op takes only the arguments that its format uses.
    if format not in RAGGED_FORMATS:
        one_of("format", format, RAGGED_FORMATS)
    if format == "nvfp4":
        if dtype not in FP8.accepted:
            FP8.check("dtype", dtype)
    elif recipe not in RECIPES:
        one_of("recipe", recipe, RECIPES)
    if format != "fp8_tensor" and activation != "none":
        raise ValueError(
            f"activation: expected 'none' with format {format!r}, got {activation!r}. "
            "Only format 'fp8_tensor' applies one"
        )
    op = _OF_FORMATS[format]
    done = op.into(
        _fitting(out, x, format, False),
        x=x,
        offsets=offsets,
        scale=scale,
        sizes=sizes,
        recipe=recipe,
        dtype=dtype,
        activation=activation,
    )
    return _quantized(op, done, x, offsets, sizes, out, format, recipe)


def quantize_ragged_grad(
    grad: Tensor,
    offsets: Tensor,
    *,
    scale: Tensor | None = None,
    sizes: Tensor | None = None,
    act_input: Tensor | None = None,
    activation: Activation = "none",
    dbias: bool = True,
    dtype: torch.dtype = torch.float8_e5m2,
    process_group: ProcessGroup | None = None,
    out: QuantizedRaggedTensor | None = None,
) -> QuantizedRaggedTensor:
    """Quantizes the gradients of a buffer of tensors, with the bias gradients of each.

    ``grad * activation'(act_input)`` is computed in fp32 and quantized without being rounded
    before; its sums over the rows of a segment are the segment's bias gradients. As many launches
    as `quantize_ragged`; with dbias, a small buffer has up to 128 rows, and G * N is at most
    65536.

    Args:
        grad: contiguous, (..., N), or of one dimension without dbias.
        offsets: int64 (G + 1,), ascending, in rows of N, or of one element of one dimension.
        scale: float32 (G,); None: computed from the amaxes.
        sizes: int64 (G,), rows of each segment; None: segments follow each other.
        act_input: the activation's input, of grad's shape and dtype.
        activation: "none", "relu", "silu", "gelu" (its tanh form), "qgelu"
            (``x * sigmoid(1.702 * x)``) or "srelu" (``relu(x)^2``).
        dbias: whether to compute bias gradients, of rows.
        dtype: ``float8_e4m3fn`` or ``float8_e5m2``.
        process_group: as in `quantize_ragged`; dbias stays that of this rank's rows.
        out: buffers of ``QuantizedRaggedTensor.empty(grad.shape, offsets, dbias=..., ...)``.

    Returns:
        data, scale_inv (G,), amax (G,) of the product, and dbias float32 (G, N).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if process_group is not None:
        _sharded.check_no_scale(process_group, scale, "scale")

        def again(scale: Tensor | None) -> QuantizedRaggedTensor:
            keywords: dict[str, Any] = {"act_input": act_input, "activation": activation}
            keywords |= {"sizes": sizes, "dbias": dbias, "dtype": dtype, "out": out}
            return quantize_ragged_grad(grad, offsets, scale=scale, **keywords)

        return _over(process_group, again, dtype, out)
    done = QUANTIZE_GRAD_FP8.into(
        _fitting(out, grad, "fp8_tensor", dbias),
        grad=grad,
        offsets=offsets,
        scale=scale,
        sizes=sizes,
        act_input=act_input,
        activation=activation,
        with_dbias=dbias,
        dtype=dtype,
    )
    return _quantized(QUANTIZE_GRAD_FP8, done, grad, offsets, sizes, out, dbias=dbias)


def dequantize_ragged(
    q: QuantizedRaggedTensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The values of a buffer of quantized tensors, in fp32 and rounded once to ``dtype``.

    Args:
        q: what `quantize_ragged` or `quantize_ragged_grad` gave.
        dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
        out: contiguous tensor of the buffer's shape to write to.

    Returns:
        A tensor of the buffer's shape, zero outside of the segments, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if not isinstance(q, QuantizedRaggedTensor):
        raise TypeError(
            f"q: expected a QuantizedRaggedTensor, got {type(q).__name__}. quantize_ragged returns "
            "one"
        )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    common: Any = {"offsets": q.offsets, "sizes": q.sizes, "dtype": dtype}
    if q.format == "mxfp8":
        arguments = {"data": q.data, "block_scales": q.block_scales, **common}
        return DEQUANTIZE_MXFP8.one_tensor(arguments, out)
    if q.format != "nvfp4":
        arguments = {"data": q.data, "scale_inv": q.scale_inv, **common}
        return DEQUANTIZE_FP8.one_tensor(arguments, out)
    arguments = {
        "x_fp4": q.data,
        "x_sf": q.block_scales,
        "gsa": q.scale_inv,
        "numel": _checks.row_count(q.shape),
        "row_size": numerics.row_of(q.shape),
        **common,
    }
    if out is None:
        return DEQUANTIZE_NVFP4.one_tensor(arguments, None).reshape(q.shape)
    _checks.tensor_out(out)
    wanted = torch.bfloat16 if dtype is None else dtype
    _checks.out_tensor(out, "out", tuple(q.shape), wanted, q.data.device)
    DEQUANTIZE_NVFP4.one_tensor(arguments, out.view(-1))
    return out


def _over(
    process_group: ProcessGroup,
    quantize: Callable[[Tensor | None], QuantizedRaggedTensor],
    dtype: torch.dtype,
    out: QuantizedRaggedTensor | None,
) -> QuantizedRaggedTensor:
    """Many tensors with the amaxes of a process group.

    Args:
        process_group: the ranks.
        quantize: with scales that are given, or its own.
        dtype: of FP8 elements.
        out: buffers that ``quantize`` writes, or None.
    """
    first = quantize(None)
    assert first.amax is not None
    amax = _sharded.max_over(first.amax.clone(), process_group)
    if first.format == "nvfp4":
        scale, scale_inv = scales_from_amax(amax, NVFP4_DIVISOR)
    else:
        scale = scale_from_amax(amax, QUANTIZED_MAX[dtype])
        scale_inv = None
    q = quantize(scale)
    if out is None:
        return replace(q, amax=amax, scale_inv=q.scale_inv if scale_inv is None else scale_inv)
    assert out.amax is not None
    out.amax.copy_(amax)
    if scale_inv is not None and out.scale_inv is not None:
        out.scale_inv.copy_(scale_inv)
    return out


def _fitting(out: QuantizedRaggedTensor | None, x: object, format: str, dbias: bool) -> Any:
    """``out`` for `Op.into`: False if it has not the form and the parts of a result."""
    if out is None:
        return None
    fits = (
        type(out) is QuantizedRaggedTensor
        and out.format == format
        and isinstance(x, Tensor)
        and out.shape == x.shape
        and (out.block_scales is not None) == (format != "fp8_tensor")
        and (out.dbias is not None) == dbias
    )
    return fits and out


def _quantized(
    op: Op,
    done: Any,
    x: Tensor,
    offsets: Tensor,
    sizes: Tensor | None,
    out: QuantizedRaggedTensor | None,
    format: str = "fp8_tensor",
    recipe: str = "te",
    dbias: bool = False,
) -> QuantizedRaggedTensor:
    """The rest of a call of an op that quantizes a buffer, after `Op.into`.

    Args:
        op: what quantizes.
        done: what `Op.into` has returned.
        x, offsets, sizes: as they were given.
        out: buffers for the result.
        format: of the result.
        recipe: of "nvfp4".
        dbias: whether the result has bias gradients.
    """
    recipe = recipe if format == "nvfp4" else "te"
    if isinstance(done, dict):
        tensors = op.tensors(done)
        buffers: Any = ()
        if out is not None:
            has_block_scales = format != "fp8_tensor"
            _check_buffers(out, op.parts, format, tuple(tensors[0].shape), has_block_scales, dbias)
            buffers = _buffers(op, out, tensors[0])
        done, x = op.dispatched(tensors, buffers), tensors[0]
        seen = dict(zip(op.names, tensors, strict=True))
        offsets, sizes = seen["offsets"], seen["sizes"]
    if out is None:
        parts = dict(zip(op.parts, done, strict=True))
        if not dbias:
            parts.pop("dbias", None)
        return QuantizedRaggedTensor(
            **parts,
            offsets=offsets,
            sizes=sizes,
            format=format,
            shape=tuple(x.shape),
            recipe=recipe,
        )
    out.offsets, out.sizes, out.recipe = offsets, sizes, recipe
    return out


def _buffers(op: Op, out: QuantizedRaggedTensor, x: Tensor) -> list[Any]:
    """The buffers of ``out``, with a tensor for each: the dispatcher takes no None."""
    buffers = list(op.buffers_of(out))
    if "dbias" in op.parts and out.dbias is None:
        buffers[-1] = torch.empty((0, *x.shape[-1:]), dtype=torch.float32, device=x.device)
    return buffers


def _check_buffers(
    out: object,
    names: tuple[str, ...],
    format: str,
    shape: tuple[int, ...],
    has_block_scales: bool,
    dbias: bool,
) -> None:
    """Raises where ``out`` has not the form, or not just the parts, of a result of this call."""
    if not isinstance(out, QuantizedRaggedTensor):
        raise TypeError(
            f"out: expected a QuantizedRaggedTensor, got {type(out).__name__}. {_MAKER} makes one"
        )
    for field, wanted in (("format", format), ("shape", shape)):
        if getattr(out, field) != wanted:
            raise ValueError(
                f"out.{field}: expected {wanted!r} for this call, got {getattr(out, field)!r}. "
                f"{_MAKER} makes buffers that fit"
            )
    if (out.block_scales is not None) != has_block_scales:
        raise ValueError(
            f"out.block_scales: expected {'a buffer' if has_block_scales else 'None'} with format "
            f"{format!r}, got {'None' if has_block_scales else 'a buffer'}. {_MAKER} makes buffers "
            "that fit"
        )
    if (out.dbias is not None) != dbias:
        raise ValueError(
            f"out.dbias: expected {'a tensor' if dbias else 'None'} for this call, got "
            f"{'None' if dbias else 'a tensor'}. Make the buffers with dbias={dbias}"
        )
    parts = {f"out.{name}": getattr(out, name) for name in names if name != "dbias" or dbias}
    _checks.out_parts(parts, _MAKER)


QuantizedRaggedTensor._dequantize = dequantize_ragged
