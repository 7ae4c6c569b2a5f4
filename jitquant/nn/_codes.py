"""`QuantizedModule`: what modules share whose buffers are codes and scales."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class QuantizedModule(nn.Module):
    """A module with buffers that a change of dtype leaves alone.

    Attributes:
        quantized: names of these buffers: codes, block scales, and fp32 scales; the first is there
            always, others may be None.
        dtype: that of the module otherwise, which ``to(dtype)`` and the like change.
    """

    quantized: ClassVar[tuple[str, ...]] = ()
    dtype: torch.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # As bytes, which a change of dtype leaves alone: codes, scales and gsa are what they are.
        quantized = {id(self._buffers[name]) for name in self.quantized}

        def of_bytes(t: Tensor) -> Any:
            if id(t) not in quantized:
                return fn(t)
            made = fn(t.view(torch.uint8))
            # ``type(dtype)`` casts bytes too: then only the device is taken.
            return made.view(t.dtype) if made.dtype == torch.uint8 else t.to(made.device)

        super()._apply(of_bytes, recurse)  # type: ignore[no-untyped-call]
        first = self._buffers[self.quantized[0]]
        assert first is not None
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=first.device)).dtype
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        first, errors = self.get_buffer(self.quantized[0]), rest[-1]
        refused, as_stored = [], {}
        for name in (f"{prefix}{n}" for n in self.quantized):
            given, own = state_dict.get(name), self._buffers[name.removeprefix(prefix)]
            if given is None or own is None or given.dtype == own.dtype:
                continue
            # copy_() would convert the numbers that the bytes of codes and scales are.
            if given.dtype.itemsize == own.dtype.itemsize == 1:
                as_stored[name] = given.view(own.dtype)
            else:
                refused.append(f"{name}: expected {own.dtype}, got {given.dtype}.")
        if refused:
            errors += refused
            return
        state_dict = {**state_dict, **as_stored} if as_stored else state_dict
        absent = [n for n in self.quantized if n.endswith("input_gsa") and self._buffers[n] is None]
        new = [n for n in absent if state_dict.get(f"{prefix}{n}") is not None]
        for name in new:
            self._buffers[name] = torch.empty(1, dtype=torch.float32, device=first.device)
        count = len(errors)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if len(errors) > count:  # perhaps of these, which have no values then
            self._buffers.update(dict.fromkeys(new))

    def __getstate__(self) -> dict[str, Any]:
        # As bytes, too: PyTorch does not unpickle tensors of float8.
        buffers = {name: self._buffers[name] for name in self.quantized}
        kept = {name: t for name, t in buffers.items() if t is not None}
        as_bytes = {name: t.view(torch.uint8) for name, t in kept.items()}
        dtypes = {name: t.dtype for name, t in kept.items()}
        return {**self.__dict__, "_buffers": {**self._buffers, **as_bytes}, "_dtypes": dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes = state.pop("_dtypes")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            self._buffers[name] = self.get_buffer(name).view(dtype)
