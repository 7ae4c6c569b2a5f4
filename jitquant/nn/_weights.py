"""A weight in FP8, kept until the weight changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from jitquant.formats import GROUP_EPS_MIN
from jitquant.nn._matmul import TILE
from jitquant.ops import quantize_block, quantize_block_both
from jitquant.tensors.fp8 import QuantizedTensor


class _OptimizerSteps:
    """How often any optimizer of this process has stepped.

    A weight's version counter does not tell everything: fused optimizers, optimizers that write to
    ``weight.data``, and FSDP, which gathers into the same memory, do not change it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._watched = False

    def watch(self) -> None:
        """Begins to count."""
        if not self._watched:
            self._watched = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        # A compiled step would be compiled again for each count; its writes are versioned.
        if not torch.compiler.is_compiling():
            self.count += 1


STEPS = _OptimizerSteps()


class QuantizedWeight(NamedTuple):
    """A weight (N, K) in FP8, sizes padded with zeros to multiples of 128.

    Attributes:
        data: (N, K) in blocks: of the forward product.
        data_t: (K, N), its transpose: of the gradient of the input; None where it was not asked.
    """

    data: QuantizedTensor
    data_t: QuantizedTensor | None


def padded(x: Tensor) -> Tensor:
    """A matrix with zeros up to multiples of 128, last dimension contiguous."""
    rows, cols = x.shape
    if rows % TILE or cols % TILE:
        return functional.pad(x, (0, -cols % TILE, 0, -rows % TILE))
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.no_grad()
def quantize_weight(
    weight: Tensor, transpose: bool, scale_format: str = "float32"
) -> QuantizedWeight:
    """Quantizes a weight in 128x128 blocks, reading it once.

    Args:
        weight: (N, K).
        transpose: whether the transpose is wanted as well.
        scale_format: "float32" or "ue8m0".
    """
    w = padded(weight.detach())
    how: dict[str, Any] = {"scale_layout": "row_padded", "scale_format": scale_format}
    if transpose:
        return QuantizedWeight(*quantize_block_both(w, eps=GROUP_EPS_MIN, **how))
    return QuantizedWeight(quantize_block(w, eps=GROUP_EPS_MIN, **how), None)


class WeightCache:
    """The last quantized weight, and what it was made of.

    Copies and pickles of it are empty.
    """

    def __init__(self) -> None:
        STEPS.watch()
        self._kept: tuple[Any, weakref.ref[Tensor], QuantizedWeight] | None = None

    def clear(self) -> None:
        """Forgets the weight."""
        self._kept = None

    def get(
        self,
        weight: Tensor,
        transpose: bool,
        version: int = 0,
        part: Callable[[Tensor], Tensor] | None = None,
        scale_format: str = "float32",
    ) -> QuantizedWeight:
        """The weight in FP8; quantized now where it is not known to be what it was.

        Args:
            weight: (N, K).
            transpose: whether the transpose is wanted as well.
            version: what else changes with the weight: of the DTensor that it is the part of.
            part: takes the matrix to be quantized out of ``weight``; always the same one.
            scale_format: as in `quantize_weight`.

        Nothing is kept, and nothing that was kept is used, while a compiler or a CUDA graph records
        the call: a replay has to see the current weight. The same goes for tensors without a
        version (``torch.inference_mode``), without memory (meta), and of other classes.
        """
        if (
            torch.compiler.is_compiling()
            or type(weight) not in (Tensor, nn.Parameter)
            or weight.is_meta
            or weight.is_inference()
            or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return quantize_weight(
                weight if part is None else part(weight), transpose, scale_format
            )
        key = (
            scale_format,
            STEPS.count,
            weight._version,
            version,
            weight.data_ptr(),
            weight.shape,
            weight.stride(),
            weight.dtype,
            torch.cuda.current_stream(weight.device) if weight.is_cuda else None,
        )
        kept = self._kept
        if (
            kept is not None
            and kept[0] == key
            and kept[1]() is weight
            and not (transpose and kept[2].data_t is None)
        ):
            return kept[2]
        quantized = quantize_weight(
            weight if part is None else part(weight), transpose, scale_format
        )
        self._kept = (key, weakref.ref(weight), quantized)
        return quantized

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()


_Self = TypeVar("_Self", bound="KeepsQuantizedWeights")


class KeepsQuantizedWeights(nn.Module):
    """A module whose weights in FP8 are made anew when PyTorch may have written to them."""

    def weight_changed(self) -> None:
        """Requantizes weights in the next call: needed after a write that PyTorch cannot detect."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP puts the gathered weight in and takes it out again, the same object with the same
        # version and often in the same place: what it holds may be new each time.
        if name in self.__dict__.get("_parameters", ()):
            self.weight_changed()
        super().__setattr__(name, value)

    def train(self: _Self, mode: bool = True) -> _Self:
        """As ``nn.Module.train``. Requantizes weights, which weight averaging may swap."""
        self.weight_changed()
        return super().train(mode)

    def _apply(self: _Self, fn: Any, recurse: bool = True) -> _Self:
        self.weight_changed()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.weight_changed()
        super()._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # torch.distributed.checkpoint loads into what state_dict() returns. If that is a DTensor,
        # no version tells.
        self.weight_changed()
        super()._save_to_state_dict(*args, **kwargs)
