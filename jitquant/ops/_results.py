"""What the 8-bit functions do with the results of an op: new ones, or the buffers of ``out``.

`check_form` is for those of NVFP4 too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jitquant.ops import _checks
from jitquant.ops.schema import Arguments, Op
from jitquant.tensors import QuantizedTensor

MAKER = "QuantizedTensor.empty(shape, ...)"
"""The call that makes buffers for a quantized tensor, as an error says it."""

BUFFERS: dict[str, Any] = {
    "maker": MAKER,
    "rows_apart": True,
    "attributes": {"scale_inv": "stored_scales", "scale_inv_t": "stored_scales_t"},
}
"""What an op has whose results are such a tensor."""


Form = tuple[str, tuple[int, int], str, str, str]
"""What a QuantizedTensor has beside its parts: format, block, scale_format, layout and recipe."""


def quantized(
    op: Op, done: Any, form: Form, out: QuantizedTensor | None, amax: bool = False
) -> QuantizedTensor:
    """The rest of a call of an op with one quantized result, after `Op.into`.

    Args:
        op: what quantizes.
        done: what `Op.into` has returned.
        form: of the result.
        out: buffers for the result.
        amax: whether the result has an amax.
    """
    if isinstance(done, dict):
        done = _dispatched(op, done, form, out, amax)
    if done is None and out is not None:
        out.recipe = form[-1]
        return out
    inv_rms = done[-1] if op.inv_rms else None
    return QuantizedTensor(done[0], done[1], done[2] if amax else None, inv_rms, *form)


def _dispatched(
    op: Op, arguments: Arguments, form: Form, out: QuantizedTensor | None, amax: bool
) -> Any:
    """New results, or None, where `Op.into` has done nothing."""
    tensors = op.tensors(arguments)
    if out is not None:
        return op.dispatched(tensors, _all_buffers(op, tensors, arguments, form, out, amax))
    if arguments.get("zero_padding", True):
        return op.dispatched(tensors)
    # Of new results too, only the rows that are counted are written.
    seen = dict(zip(op.names, tensors, strict=True))
    made = op.plan(**seen).empty()
    if op.direct(seen, made) is NotImplemented:
        op.dispatched(tensors, made)
    return made


def check_call(op: Op, arguments: Arguments, form: Form, out: QuantizedTensor) -> None:
    """Raises what a call of the op would raise that writes to ``out``, and writes nothing."""
    tensors = op.tensors(arguments)
    op.check_call(tensors, _all_buffers(op, tensors, arguments, form, out, False))


def _all_buffers(
    op: Op,
    tensors: Sequence[Any],
    arguments: Arguments,
    form: Form,
    out: QuantizedTensor,
    amax: bool,
) -> tuple[Any, ...]:
    """The buffers of ``out``, with a tensor for each: the dispatcher takes no None."""
    shape = tuple(tensors[0].shape)
    if op.source is not None and op.source.cols is not None and shape:
        shape = (*shape[:-1], shape[-1] // 2)
    _check_buffers(op, out, "out", form, shape, arguments["dtype"], amax)
    return tuple(
        torch.empty(0, dtype=torch.float32, device=out.data.device) if buffer is None else buffer
        for buffer in op.buffers_of(out)
    )


def fitting(
    out: QuantizedTensor | None,
    form: Form,
    dtype: torch.dtype,
    amax: bool = False,
    inv_rms: bool = False,
) -> Any:
    """``out`` for `Op.into`: False if it has not the form of a result. The op looks at parts."""
    if out is None:
        return None
    format, block, scale_format, layout, _ = form
    fits = (
        type(out) is QuantizedTensor
        and out.format == format
        and out.block == block
        and out.scale_format == scale_format
        and out.layout == layout
        and isinstance(data := out.data, Tensor)
        and data.dtype == dtype
        and (out.amax is not None) == amax
        and (out.inv_rms is not None) == inv_rms
    )
    return fits and out


def fitting_both(out: Any, form: Form, dtype: torch.dtype) -> Any:
    """As `fitting`, of a tuple of two."""
    if out is None:
        return None
    if type(out) is not tuple or len(out) != 2:
        return False
    first, second = out
    fits = (
        fitting(first, form, dtype) is first is not None
        and fitting(second, form, dtype) is second is not None
    )
    return fits and out


def _check_buffers(
    op: Op,
    out: object,
    name: str,
    form: Form,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    amax: bool,
) -> None:
    """Raises where ``out`` has not the form, or not just the parts, of a result of this call."""
    names = ("format", "block", "scale_format", "layout")
    fields = {**dict(zip(names, form, strict=False)), "dtype": dtype, "shape": shape}
    parts = {"amax": amax, "inv_rms": op.inv_rms}
    check_form(op, out, name, QuantizedTensor, ("data", "stored_scales"), fields, parts)


def check_form(
    op: Op,
    out: object,
    name: str,
    kind: type,
    buffers: Sequence[str],
    fields: Mapping[str, Any],
    parts: Mapping[str, bool],
) -> None:
    """Raises where ``out`` is not for a result of a call; the op looks at the buffers themselves.

    Args:
        op: what is called.
        out, name: what was given, and what an error calls it.
        kind: the container that it is.
        buffers: attributes that are tensors.
        fields: what other attributes are.
        parts: of buffers that only some results have, whether this one does.
    """
    maker = f"{kind.__name__}.empty(shape, ...)"
    if not isinstance(out, kind):
        article = "an" if kind.__name__.startswith("NV") else "a"
        raise TypeError(
            f"{name}: expected {article} {kind.__name__}, got {type(out).__name__}. {maker} makes "
            "one"
        )
    _checks.out_parts({f"{name}.{part}": getattr(out, part) for part in buffers}, maker)
    for field, wanted in fields.items():
        has = getattr(out, field)
        if has != wanted:
            raise ValueError(
                f"{name}.{field}: expected {wanted!r} for this call, got {has!r}. {maker} makes "
                "buffers that fit"
            )
    for part, wanted in parts.items():
        buffer = getattr(out, part)
        if (buffer is not None) != wanted:
            raise ValueError(
                f"{name}.{part}: expected {'a buffer' if wanted else 'None'} for this call of "
                f"{op.name}, got {'None' if wanted else 'a buffer'}. Make the buffers with "
                f"{part}={wanted}"
            )
        if wanted:
            _checks.out_parts({f"{name}.{part}": buffer}, maker)


def quantized_both(
    op: Op,
    done: Any,
    form: Form,
    out: tuple[QuantizedTensor, QuantizedTensor] | None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """As `quantized`, of an op that quantizes a matrix and its transpose."""
    if isinstance(done, dict):
        tensors, buffers = op.tensors(done), ()
        if out is not None:
            if not isinstance(out, tuple) or len(out) != 2:
                raise TypeError(
                    f"out: expected a tuple of two QuantizedTensors, got {_checks.kind_of(out)}"
                )
            shape, dtype = tuple(tensors[0].shape), done["dtype"]
            _check_buffers(op, out[0], "out[0]", form, shape, dtype, False)
            _check_buffers(op, out[1], "out[1]", form, shape[::-1], dtype, False)
            buffers = op.buffers_of(out)
        done = op.dispatched(tensors, buffers)
    if done is None and out is not None:
        out[0].recipe = out[1].recipe = form[-1]
        return out
    data, scales, data_t, scales_t = done
    return (
        QuantizedTensor(data, scales, None, None, *form),
        QuantizedTensor(data_t, scales_t, None, None, *form),
    )
