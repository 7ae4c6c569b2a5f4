"""`DelayedScaling`: scales from the amaxes of earlier steps, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from jitquant.formats import AMAX_ALGORITHMS, FP8_DTYPES, FP32_MAX, QUANTIZED_MAX, one_of
from jitquant.ops import _checks
from jitquant.ops.fp8 import quantize_fp8
from jitquant.tensors.fp8 import QuantizedTensor

__all__ = ["DelayedScaling"]


class DelayedScaling:
    """The scale of a tensor (or of each of many) from a history of its amaxes.

    TransformerEngine's delayed scaling recipe. A step quantizes with the scale from earlier steps,
    reading x once, and its amax is added to the history:

        scale <- top / (2^margin * amax),  at most FLT_MAX;  unchanged if amax is 0 or not finite

    where amax is the maximum of the history, ignoring NaNs, or its most recent entry. Everything
    runs on the device without synchronization. A step can be captured in a CUDA graph and traced by
    ``torch.compile``.

    Attributes:
        scale: fp32 (num_tensors,), the factor that encodes; 1 at first.
        amax_history: fp32 (window, num_tensors), the newest first; 0 at first.
    """

    def __init__(
        self,
        num_tensors: int = 1,
        *,
        window: int = 1024,
        algorithm: str = "max",
        margin: int = 0,
        dtype: torch.dtype = torch.float8_e4m3fn,
        device: torch.device | str | None = None,
    ) -> None:
        """Makes a history of zeros.

        Args:
            num_tensors: how many tensors; the segments of a buffer, for `quantize_ragged`.
            window: steps that the history holds.
            algorithm: "max" or "most_recent".
            margin: the scale is divided by ``2^margin``.
            dtype: what is quantized to: ``float8_e4m3fn`` or ``float8_e5m2``.
            device: default is PyTorch's.

        Raises:
            TypeError, ValueError: an argument is not accepted.
        """
        one_of("algorithm", algorithm, AMAX_ALGORITHMS)
        if dtype not in FP8_DTYPES:
            raise TypeError(
                f"dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}"
            )
        num_tensors = _checks.integer(num_tensors, "num_tensors")
        window, margin = _checks.integer(window, "window"), _checks.integer(margin, "margin")
        for name, value in (("num_tensors", num_tensors), ("window", window)):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if not -64 <= margin <= 64:
            raise ValueError(f"margin: expected an integer from -64 to 64, got {margin}")
        self.algorithm = algorithm
        self.margin = margin
        self.dtype = dtype
        self.scale = torch.ones(num_tensors, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros((window, num_tensors), dtype=torch.float32, device=device)
        # On the device: a number divided by a tensor would be rounded twice.
        top = QUANTIZED_MAX[dtype] * 2.0**-margin
        self._top = torch.full((), top, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, amax: Tensor) -> None:
        """Adds a step's amaxes to the history and computes the next step's scales, in place.

        Args:
            amax: float32, one for each tensor, on the history's device.

        Raises:
            TypeError: ``amax`` is not a tensor of float32.
            ValueError: there are not as many as tensors, or they are on another device.
        """
        amax = _checks.as_tensor(amax, "amax")
        if amax.dtype != torch.float32:
            raise TypeError(
                f"amax: expected float32, got {amax.dtype}. Convert it with amax.float()"
            )
        _checks.same_device(amax, "amax", self.scale, "scale")
        if amax.numel() != self.scale.numel():
            raise ValueError(
                f"amax: expected {self.scale.numel()} elements, one for each tensor, got shape "
                f"{tuple(amax.shape)}"
            )
        history = self.amax_history
        newest = amax.detach().reshape(1, -1)
        history.copy_(torch.cat((newest, history[:-1])))
        if self.algorithm == "max":
            amax = torch.where(history.isnan(), 0.0, history).amax(dim=0)
        else:
            amax = newest[0]
        scale = torch.div(self._top, amax).clamp(max=FP32_MAX)
        self.scale.copy_(torch.where((amax > 0) & (amax < float("inf")), scale, self.scale))

    def quantize(self, x: Tensor, *, out: QuantizedTensor | None = None) -> QuantizedTensor:
        """`jitquant.quantize_fp8` with the current scale, then `update` with the amax of ``x``.

        Args:
            x: (..., N); the history is that of one tensor.
            out: as in `quantize_fp8`.

        Raises:
            TypeError, ValueError: see `quantize_fp8`.
        """
        if self.scale.numel() != 1:
            raise ValueError(
                f"num_tensors: expected 1, got {self.scale.numel()}. For a ragged tensor call "
                "quantize_ragged(x, offsets, scale=d.scale), then d.update(q.amax)"
            )
        q = quantize_fp8(x, dtype=self.dtype, scale=self.scale, out=out)
        assert q.amax is not None
        self.update(q.amax)
        return q

    def state_dict(self) -> dict[str, Tensor]:
        """scale and amax_history, not copied."""
        return {"scale": self.scale, "amax_history": self.amax_history}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copies a `state_dict` of an object with the same arguments into this one, in place.

        The state does not say which dtype, margin and algorithm it is of: the first step takes its
        scale as it is.

        Raises:
            ValueError: a part is missing, or its shape is another.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(
                f"state: expected scale and amax_history, got no {min(missing)}. Pass what "
                "state_dict() returned"
            )
        for name, mine in self.state_dict().items():
            if state[name].shape != mine.shape:
                raise ValueError(
                    f"{name}: expected shape {tuple(mine.shape)}, got shape "
                    f"{tuple(state[name].shape)}"
                )
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])

    def __repr__(self) -> str:
        window, count = self.amax_history.shape
        return (
            f"DelayedScaling({count}, window={window}, algorithm={self.algorithm!r}, "
            f"margin={self.margin}, dtype={self.dtype}, device={str(self.scale.device)!r})"
        )
