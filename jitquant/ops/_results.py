"""What the 8-bit functions do with the results of an op: new ones, or the buffers of ``out``.

`check_form` is for those of NVFP4 too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from jitquant.ops import _checks
from jitquant.ops.schema import Op
from jitquant.tensors import QuantizedTensor

MAKER = "QuantizedTensor.empty(shape, ...)"
"""The call that makes buffers for a quantized tensor, as an error says it."""

BUFFERS: dict[str, Any] = {
    "maker": MAKER,
    "rows_apart": True,
    "attributes": {"scale_inv": "stored_scales", "scale_inv_t": "stored_scales_t"},
}
"""What an op has whose results are such a tensor."""


class Form(TypedDict):
    """What a QuantizedTensor has beside its parts."""

    format: str
    block: tuple[int, int]
    scale_format: str
    layout: str
    recipe: str


def quantized(
    op: Op,
    arguments: Mapping[str, Any],
    form: Form,
    out: QuantizedTensor | None,
    amax: bool = False,
    *,
    halved: bool = False,
) -> QuantizedTensor:
    """A call of an op with one quantized result.

    Args:
        op: what quantizes.
        arguments: its arguments by name, and others.
        form: of the result.
        out: buffers for the result.
        amax: whether the result has an amax.
        halved: whether the result has half as many columns as the input.
    """
    if out is None:
        results = op.direct(arguments)
        if results is NotImplemented:
            results = op.dispatched(op.tensors(arguments))
        described: Any = form.values()  # in the order of the container
        return QuantizedTensor(
            results[0],
            results[1],
            results[2] if amax else None,
            results[-1] if op.inv_rms else None,
            *described,
        )
    dtype = arguments["dtype"]
    if not (
        _fits(out, form, dtype, amax, op.inv_rms)
        and op.direct(arguments, op.buffers_of(out)) is None
    ):
        tensors = op.tensors(arguments)
        shape = tuple(tensors[0].shape)
        if halved and shape:
            shape = (*shape[:-1], shape[-1] // 2)
        _check_buffers(op, out, "out", form, shape, dtype, amax)
        op.dispatched(tensors, _all_buffers(op, out))
    out.recipe = form["recipe"]
    return out


def left_alone(
    op: Op, arguments: Mapping[str, Any], form: Form, *, halved: bool = False
) -> QuantizedTensor:
    """A call that writes only the rows that are counted, into new buffers."""
    tensors = dict(zip(op.names, op.tensors(arguments), strict=True))
    plan = op.plan(**tensors)
    data, scales = (torch.empty(r.shape, dtype=r.dtype, device=plan.device) for r in plan.results)
    out = QuantizedTensor(data, scales, None, None, **form)
    return quantized(op, tensors, form, out, halved=halved)


def _all_buffers(op: Op, out: QuantizedTensor) -> tuple[Any, ...]:
    """The buffers of ``out``, with a tensor for each: the dispatcher takes no None."""
    return tuple(
        torch.empty(0, dtype=torch.float32, device=out.data.device) if buffer is None else buffer
        for buffer in op.buffers_of(out)
    )


def _fits(out: object, form: Form, dtype: torch.dtype, amax: bool, inv_rms: bool) -> bool:
    """Whether ``out`` has the form and the parts of a result; the op looks at the parts."""
    return (
        type(out) is QuantizedTensor
        and out.format == form["format"]
        and out.block == form["block"]
        and out.scale_format == form["scale_format"]
        and out.layout == form["layout"]
        and isinstance(out.data, Tensor)
        and out.data.dtype == dtype
        and (out.amax is not None) == amax
        and (out.inv_rms is not None) == inv_rms
    )


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
    fields: dict[str, Any] = {**form, "dtype": dtype, "shape": shape}
    del fields["recipe"]
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
    arguments: Mapping[str, Any],
    form: Form,
    out: tuple[QuantizedTensor, QuantizedTensor] | None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A call of an op that quantizes a matrix and its transpose."""
    if out is None:
        results = op.direct(arguments)
        if results is NotImplemented:
            results = op.dispatched(op.tensors(arguments))
        data, scales, data_t, scales_t = results
        described: Any = form.values()  # in the order of the container
        return (
            QuantizedTensor(data, scales, None, None, *described),
            QuantizedTensor(data_t, scales_t, None, None, *described),
        )
    dtype = arguments["dtype"]
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out: expected a tuple of two QuantizedTensors, got {type(out).__name__}")
    first, second = out
    if not (
        _fits(first, form, dtype, False, False)
        and _fits(second, form, dtype, False, False)
        and op.direct(arguments, op.buffers_of(out)) is None
    ):
        tensors = op.tensors(arguments)
        shape = tuple(tensors[0].shape)
        _check_buffers(op, first, "out[0]", form, shape, dtype, False)
        _check_buffers(op, second, "out[1]", form, shape[::-1], dtype, False)
        op.dispatched(tensors, op.buffers_of(out))
    for q in out:
        q.recipe = form["recipe"]
    return out
