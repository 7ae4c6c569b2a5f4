"""What the FP8, INT8 and MXFP8 ops have beyond an `Op`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jitquant.formats import as_bytes
from jitquant.ops import _checks, _checks_memory
from jitquant.ops.schema import Op, Plan

MAKER = "QuantizedTensor.empty(shape, ...)"
"""The call that makes buffers for a quantized tensor, as an error says it."""

MAKER_OF_GROUPS = "QuantizedGroups.empty(shape, offsets, ...)"
"""The same for many tensors in one buffer."""


def _check_elements(t: Tensor, label: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A buffer for elements: its rows may lie apart."""
    if t.dtype != dtype and t.dtype != torch.uint8:
        raise TypeError(f"{label} is {t.dtype}; accepted is {dtype} for this call")
    if t.shape != shape:
        raise ValueError(
            f"{label} has shape {_checks.shape_text(t)}; accepted is {tuple(shape)} for this call. "
            f"{MAKER} makes buffers that fit"
        )
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        raise ValueError(
            f"{label} has strides {tuple(t.stride())}; accepted is a buffer whose last dimension "
            "is contiguous (stride 1)"
        )
    _checks_memory.own_elements(t, label)


class KernelOp(Op):
    """An op whose ``data`` buffer may have rows that lie apart, and which may leave rows alone.

    A call with ``zero_rest=False`` and buffers writes only the rows that ``counts`` counts.

    Attributes:
        flat: whether ``data`` is a flat buffer instead, without gaps.
        has_amax: whether one of the results is an amax.
        has_inv_rms: whether one of the results is inv_rms.
        keywords: names of the arguments that are given by name.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        results: Sequence[str],
        *,
        flat: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(name, arguments, results, **rest)
        self.flat = flat
        self._maker = MAKER_OF_GROUPS if flat else MAKER
        self.has_amax = "amax" in results
        self.has_inv_rms = "inv_rms" in results
        if "data_t" in results:  # a tuple of two
            parts = [(name.endswith("_t"), name.removesuffix("_t")) for name in results]
            self._labels = [f"out[{second:d}].{name}" for second, name in parts]
        self.keywords = [name for name, _ in self._defaults[self._positional :]]

    def _plan_out(self, buffers: list[Tensor], *args: Any, **kwargs: Any) -> Plan:
        plan = self.plan(*args, **kwargs)
        for name, label, buffer, result in zip(
            self.results, self._labels, buffers, plan.results, strict=True
        ):
            if name == "data" and not self.flat and buffer.device == plan.device:
                _check_elements(buffer, label, result.shape, result.dtype)
            else:
                _checks.out_tensor(
                    buffer, label, result.shape, result.dtype, plan.device, self._maker
                )
        return plan

    def _cpu_out(self, *args: Any, **kwargs: Any) -> None:
        # The dispatcher leaves out a last argument that equals its default.
        counts = args[2] if len(args) > 2 else None
        if kwargs.get("zero_rest", True) or counts is None:
            super()._cpu_out(*args, **kwargs)
            return
        from jitquant.numerics.fp8 import rows_past_counts

        before = {name: kwargs[name].clone() for name in self.results}
        super()._cpu_out(*args, **kwargs)
        rest = rows_past_counts(counts, args[0].shape[:-1])
        for name, old in before.items():
            buffer = kwargs[name]
            mask = rest[..., None]
            if name != "data" and kwargs.get("scale_layout", "row") != "row":
                mask = mask.transpose(-1, -2)
                old, buffer = (t[..., : mask.shape[-1]] for t in (old, buffer))
            buffer.copy_(torch.where(mask, as_bytes(old), as_bytes(buffer)).view(buffer.dtype))
