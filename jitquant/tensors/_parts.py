"""Shared by the containers: their parts, and how PyTorch handles them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from jitquant.formats import FP4_DTYPE, as_bytes

_Self = TypeVar("_Self", bound="Parts")


def slice_bounds(index: slice, size: int) -> tuple[int, int]:
    """First and last + 1 of a slice; ``slice.indices`` is not traced by every PyTorch."""
    start = 0 if index.start is None else index.start
    stop = size if index.stop is None else index.stop
    start = min(max(start + size if start < 0 else start, 0), size)
    stop = min(max(stop + size if stop < 0 else stop, 0), size)
    return start, max(start, stop)


def _read(name: str, text: str) -> Any:
    """What `Parts.metadata` has written."""
    from ast import literal_eval

    try:
        return literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{name}: expected what metadata() writes, got {text!r}") from error


def _plain(value: Any) -> Any:
    """Python's own of a number of NumPy, which neither a literal nor ``torch.load`` could be of."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


class Parts:
    """Tensors with a description."""

    _TENSORS: ClassVar[tuple[str, ...]]
    _CODES: ClassVar[str] = "data"
    _dequantize: ClassVar[Callable[..., Tensor]]
    """`dequantize`; set by `jitquant.ops`, which imports this package."""

    def _present(self) -> dict[str, Tensor]:
        parts = ((name, getattr(self, name)) for name in self._TENSORS)
        return {name: part for name, part in parts if part is not None}

    def _described(self) -> dict[str, Any]:
        names = (field.name for field in fields(self) if field.name not in self._TENSORS)  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    def _saved(self) -> dict[str, Any]:
        return {name: _plain(value) for name, value in self._described().items()}

    def _with(self: _Self, parts: dict[str, Tensor]) -> _Self:
        return type(self)(**parts, **self._described())

    @property
    def device(self) -> torch.device:
        """The device of its parts."""
        part: Tensor = getattr(self, self._TENSORS[0])
        return part.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, padding included."""
        return sum(t.nbytes for t in self._present().values())

    def to(self: _Self, device: torch.device | str | int, *, non_blocking: bool = False) -> _Self:
        """On another device; itself if it is there.

        Args:
            device: where to.
            non_blocking: as in ``Tensor.to``.

        Raises:
            TypeError: ``device`` is a dtype; use ``dequantize`` for other dtypes.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(
                f"device is the dtype {device}; a quantized tensor has no other dtype to go to. "
                f"For values call .dequantize({device})"
            )
        target = torch.empty(0, device=device).device
        parts = self._present()
        if all(t.device == target for t in parts.values()):
            return self
        # As bytes: PyTorch lacks copy kernels for some of the dtypes.
        moved = {
            name: as_bytes(t).to(target, non_blocking=non_blocking).view(t.dtype)
            for name, t in parts.items()
        }
        return self._with(moved)

    def clone(self: _Self) -> _Self:
        """A copy with its own memory."""
        return self._with(
            {n: as_bytes(t).clone().view(t.dtype) for n, t in self._present().items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        """The parts by name, contiguous: what ``safetensors.torch.save_file`` writes.

        FP4 codes are given as uint8. `metadata` has the rest.
        """
        return {
            name: (t.view(torch.uint8) if t.dtype == FP4_DTYPE else t).contiguous()
            for name, t in self._present().items()
        }

    def metadata(self) -> dict[str, str]:
        """The description as text, for the metadata of a safetensors file."""
        return {name: repr(value) for name, value in self._saved().items()}

    @classmethod
    def from_tensors(
        cls: type[_Self], tensors: dict[str, Tensor], metadata: dict[str, str]
    ) -> _Self:
        """Undoes `tensors` and `metadata`; other keys of ``metadata`` are left alone.

        Raises:
            KeyError: a part or a description is missing.
            ValueError: a description cannot be read.
        """
        described, parts = {}, {}
        for field in fields(cls):  # type: ignore[arg-type]
            name = field.name
            if name not in cls._TENSORS:
                described[name] = _read(name, metadata[name])
            elif name in tensors or field.default is MISSING:
                parts[name] = tensors[name]
        if described.get("format", "nvfp4") == "nvfp4":
            parts[cls._CODES] = parts[cls._CODES].view(FP4_DTYPE)
        return cls(**parts, **described)

    def __getstate__(self) -> dict[str, Any]:
        parts = {n: (as_bytes(t), t.dtype) for n, t in self._present().items()}
        return {**self._saved(), **parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in self._TENSORS:
            part = state.pop(name, None)
            setattr(self, name, None if part is None else part[0].view(part[1]))
        vars(self).update(state)


def register(cls: type[Parts]) -> None:
    """Makes a container a pytree, and one that ``torch.load`` reads with its defaults.

    The parts that are there are leaves, the rest is context.
    """

    def context(q: Any) -> tuple[Any, ...]:
        described = q._described()
        return (tuple(q._present()), tuple(described), tuple(described.values()))

    def flatten(q: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return list(q._present().values()), context(q)

    def flatten_with_keys(q: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[Any, ...]]:
        keyed: list[tuple[pytree.KeyEntry, Any]] = [
            (pytree.GetAttrKey(name), part) for name, part in q._present().items()
        ]
        return keyed, context(q)

    def unflatten(parts: Any, context: tuple[Any, ...]) -> Any:
        names, described, values = context
        return cls(**dict(zip(names, parts)), **dict(zip(described, values)))  # noqa: B905

    def as_tuples(value: Any) -> Any:
        return tuple(map(as_tuples, value)) if isinstance(value, list) else value

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"jitquant.{cls.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=as_tuples,
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([cls])
