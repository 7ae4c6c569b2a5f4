"""Checks of the values of tensors, which wait for the device: what `jitquant.testing.checked` adds.

A rule looks at one argument of an op, by its name in the schema, and says what is wrong with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jitquant.formats import FP8_SCALE_MIN, FP32_MAX, FP32_TINIEST, NVFP4_BLOCK
from jitquant.numerics.ragged import row_of

_SHOWN = 8


class _Thread(threading.local):
    """How many contexts of `jitquant.testing.checked` a thread is in."""

    depth = 0


THREAD = _Thread()


def may_be_read(t: Tensor) -> bool:
    """Whether a call reads values of a tensor: where that does not wait for a GPU, or should."""
    if type(t) not in (Tensor, torch.nn.Parameter) or t.is_meta:  # fake ones have no values
        return False
    if not t.is_cuda:
        return True
    return THREAD.depth > 0 and not torch.cuda.is_current_stream_capturing()


def _wrong(t: Tensor, wrong: Tensor, expected: str) -> str | None:
    """What is expected of an argument, and its values where ``wrong`` is true."""
    places = wrong.reshape(-1).nonzero().reshape(-1)[:_SHOWN].tolist()
    if not places:
        return None
    values = ", ".join(f"[{i}] = {t.reshape(-1)[i].item()}" for i in places)
    return f"expected {expected}, got {values}"


def _not_negative(t: Tensor, _: Mapping[str, Any]) -> str | None:
    return _wrong(t, t < 0, "numbers that are not negative")


def _gsa(t: Tensor, _: Mapping[str, Any]) -> str | None:
    wrong = ~((t >= FP32_TINIEST) & (t <= FP32_MAX))
    return _wrong(t, wrong, "positive finite numbers, such as amax / 2688")


def _gsa_of_codes(t: Tensor, _: Mapping[str, Any]) -> str | None:
    return _wrong(t, ~(t >= 0), "numbers that are not negative")


def _scale(t: Tensor, _: Mapping[str, Any]) -> str | None:
    wrong = ~((t >= FP8_SCALE_MIN) & (t <= FP32_MAX))
    return _wrong(t, wrong, "positive finite numbers whose reciprocals are finite")


def _scale_bytes(t: Tensor, _: Mapping[str, Any]) -> str | None:
    sign = t.view(torch.uint8)
    return _wrong(sign, sign >= 0x80, "bytes of E4M3 scales, which have no sign: 0 to 127")


def _scale_inv(t: Tensor, arguments: Mapping[str, Any]) -> str | None:
    return _not_negative(t, arguments) if t.dtype == torch.float32 else None


def _counts(t: Tensor, arguments: Mapping[str, Any]) -> str | None:
    batches = _elements(arguments)
    if batches.dim() < 2:
        return None  # the op refuses it
    rows = batches.shape[-2]
    return _wrong(t, (t < 0) | (t > rows), f"0 to {rows}, the rows of a batch")


def _elements(arguments: Mapping[str, Any]) -> Tensor:
    """The first argument: what is quantized, or the codes."""
    first: Tensor = next(iter(arguments.values()))
    return first


def _offsets(t: Tensor, arguments: Mapping[str, Any]) -> str | None:
    buffer = _elements(arguments)
    if buffer.dim() == 0 or t.dim() != 1 or t.numel() == 0:
        return None  # the op refuses it
    rows, row = buffer.numel(), row_of(buffer.shape)
    if "numel" in arguments:
        rows, row = arguments["numel"], arguments["row_size"]
    rows //= max(row, 1)
    step = arguments.get("_step", 1)
    sizes = arguments.get("sizes")
    shown = f"{t[:_SHOWN].tolist()}{'...' if t.numel() > _SHOWN else ''}"
    if bool((t[1:] < t[:-1]).any()):
        return f"expected ascending numbers, got {shown}"
    first, last = int(t[0]), int(t[-1])
    if first < 0 or last > rows:
        return f"expected 0 to {rows}, the rows of the buffer, got {shown}"
    if sizes is None and (first != 0 or last != rows):
        return (
            f"expected offsets from 0 to {rows}, the rows of the buffer, got {shown}. "
            "Rows outside of segments come out as zeros. For padding pass sizes"
        )
    if bool((t[:-1] * row % step != 0).any()):
        return f"expected segments that begin at multiples of {step} elements, got {shown}"
    return None


def _sizes(t: Tensor, arguments: Mapping[str, Any]) -> str | None:
    offsets = arguments["offsets"]
    if t.shape != offsets[1:].shape:
        return None  # the op refuses it
    wrong = (t < 0) | (t > offsets[1:] - offsets[:-1])
    return _wrong(t, wrong, "sizes from 0 to the distance between two offsets")


def _ends(t: Tensor, arguments: Mapping[str, Any]) -> str | None:
    rows = _elements(arguments).shape[0]
    if bool((t[1:] < t[:-1]).any()):
        shown = f"{t[:_SHOWN].tolist()}{'...' if t.numel() > _SHOWN else ''}"
        return f"expected ascending numbers, got {shown}"
    return _wrong(t, (t < 0) | (t > rows), f"0 to {rows}, the rows of x")


def _ids(t: Tensor, arguments: Mapping[str, Any]) -> str | None:
    experts = arguments["gate_up_fp4"].shape[0]
    wrong = (t < -1) | (t > experts)
    return _wrong(t, wrong, f"0 to {experts - 1}, and -1 or {experts} for no expert")


def _signs(t: Tensor, _: Mapping[str, Any]) -> str | None:
    return _wrong(t, t.abs() != 1, "+1 and -1")


def _rng_state(t: Tensor, _: Mapping[str, Any]) -> str | None:
    return _wrong(t[1:], t[1:] < 0, "a seed, and an offset that is not negative")


Rule = Callable[[Tensor, Mapping[str, Any]], "str | None"]

RULES: dict[str, Rule] = {
    "offsets": _offsets,
    "sizes": _sizes,
    "counts": _counts,
    "gsa": _gsa,
    "from_gsa_t": _gsa,
    "scale": _scale,
    "scale_inv": _scale_inv,
    "w_gsa": _gsa_of_codes,
    "x_gsa": _gsa_of_codes,
    "x_scale_inv": _scale_inv,
    "w_sf": _scale_bytes,
    "x_sf": _scale_bytes,
    "gate_up_gsa": _gsa_of_codes,
    "down_gsa": _gsa_of_codes,
    "gate_up_sf": _scale_bytes,
    "down_sf": _scale_bytes,
    "topk_ids": _ids,
    "amax": _not_negative,
    "inv_rms": _not_negative,
    "signs": _signs,
    "rng_state": _rng_state,
}
"""By an argument's name in the schemas."""


def values(op: str, arguments: Mapping[str, Any]) -> None:
    """Looks at all arguments of a call of the op, which are in the schema's order.

    Raises:
        ValueError: one has values that the op is not made for.
    """
    known = dict(arguments)
    if op == "quantize_ragged_nvfp4":
        known["_step"] = NVFP4_BLOCK
    for name, value in arguments.items():
        rule = RULES.get(name)
        if name == "gsa" and op.startswith("dequantize"):
            rule = _gsa_of_codes
        if name == "offsets" and "_grouped_" in op:
            rule = _ends
        if name == "x_sf" and op == "dequantize_mxfp4":
            rule = None  # every byte is an E8M0 scale
        if name == "amax" and "nvfp4" in op:
            rule = _gsa_of_codes  # NaNs are ignored there
            if arguments.get("from_gsa") or arguments.get("from_gsa_t") is not None:
                name, rule = "gsa", _gsa
        said = rule(value, known) if rule is not None and isinstance(value, Tensor) else None
        if said is not None:
            raise ValueError(f"{op}: {name}: {said}")
