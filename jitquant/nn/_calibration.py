"""`calibrate`: collects statistics of the inputs of a model's linears."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jitquant.formats import INPUT_DTYPES
from jitquant.nn._hugging_face import places_in_file
from jitquant.nn._rounding import output_noise
from jitquant.nn._safetensors import read_metadata, safetensors_functions
from jitquant.nn._targets import as_patterns, ignoring, refusal
from jitquant.nn.experts import ObservedExperts
from jitquant.nn.experts import refusal as experts_refusal
from jitquant.numerics.nvfp4 import gsa_from_amax
from jitquant.ops.nvfp4 import quantize_nvfp4
from jitquant.tensors.nvfp4 import NVFP4Tensor

_SAMPLE = 256  # rows of a call whose errors are measured

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""What a model is called with: a tensor, positional arguments, or keyword arguments."""


@dataclass
class InputStatistics:
    """Statistics of all inputs of one linear, on its device.

    Attributes:
        rows: the number of rows, including padding.
        amax: the largest magnitude, fp32 (1,).
        moment: fp32 (K, K), the sum of ``x.T @ x``.
        noise: fp32 (K,), the sum of the squared errors of the inputs in NVFP4. For calls with more
            than 256 rows it is estimated from evenly spaced rows.
    """

    rows: int
    amax: Tensor
    moment: Tensor
    noise: Tensor

    @property
    def gsa(self) -> Tensor:
        """As `static_gsa`, of these inputs alone."""
        return static_gsa([self.amax])

    def to(self, device: torch.device) -> InputStatistics:
        """A copy on a device."""
        parts = (self.amax, self.moment, self.noise)
        return InputStatistics(self.rows, *(t.to(device) for t in parts))

    def sqnr(self, weight: Tensor, quantized: NVFP4Tensor, weight_only: bool = False) -> float:
        """SQNR of the outputs in dB, assuming independent errors of weight and inputs.

        Args:
            weight: (N, K).
            quantized: the same in NVFP4.
            weight_only: whether the inputs are not quantized.
        """
        w = weight.detach().float()
        noise = output_noise(quantized.dequantize(torch.float32) - w, self.moment).sum()
        if not weight_only:
            noise = noise + output_noise(w, self.noise).sum()
        return decibels(output_noise(w, self.moment).sum().item(), noise.item())


def check_statistics(name: str, found: InputStatistics, columns: int, moment: bool) -> None:
    """Checks the shapes of statistics, and that values are finite.

    Args:
        name: of the linear, or of one expert's projection.
        found: of its inputs.
        columns: K.
        moment: whether the values of the moment are needed.

    Raises:
        ValueError: something is wrong.
    """
    shapes = {"amax": (1,), "moment": (columns, columns), "noise": (columns,)}
    for part, shape in shapes.items():
        values: Tensor = getattr(found, part)
        if tuple(values.shape) != shape:
            raise ValueError(
                f"calibration: expected {columns} elements in each input of {name}, got {part} of "
                f"shape {tuple(values.shape)}, not {shape}. Calibrate this model"
            )
        if (moment or part != "moment") and not bool(values.isfinite().all()):
            raise ValueError(
                f"calibration: expected finite values in {part} of {name}, got NaN or infinity. "
                "Calibrate again"
            )


def static_gsa(amaxes: Sequence[Tensor]) -> Tensor:
    """The gsa of a static scale for all of some inputs: amax / 2688; 1 if all of them are zero.

    Rounded so that saving 1 / gsa and loading it gives the same bits; not below the normal numbers.

    Args:
        amaxes: one or more, fp32 (1,).

    Returns:
        fp32 (1,) on the device of the first one.
    """
    amax = torch.stack([a.to(amaxes[0].device) for a in amaxes]).amax(0)
    gsa = gsa_from_amax(amax).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax > 0, 1 / (1 / gsa), 1.0)


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:.1f} MiB"


def decibels(signal: float, noise: float) -> float:
    """A ratio of energies in dB; infinite without noise."""
    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass
class Calibration:
    """The result of `calibrate`.

    Attributes:
        layers: statistics by the name of the linear. Those of experts are named by module,
            projection and expert: "model.layers.0.mlp.experts.down_proj.7".
        skipped: names of linears and experts without statistics, and why.
        in_files: names of linears in files of the model, where they differ, as those of Llava do.
    """

    layers: dict[str, InputStatistics] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    in_files: dict[str, str] = field(default_factory=dict)

    def input_amax(self) -> dict[str, float]:
        """The amaxes of the inputs by name, as `save_compressed_tensors` takes them."""
        return {name: found.amax.item() for name, found in self.layers.items()}

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a safetensors file for `load`, `quantize_checkpoint` and ``JitquantConfig``.

        Raises:
            ImportError: safetensors is not installed.
        """
        _, save_file = safetensors_functions()
        tensors = {
            f"{name}.{part}": getattr(found, part).cpu()
            for name, found in self.layers.items()
            for part in _PARTS
        }
        rows = {name: found.rows for name, found in self.layers.items()}
        about = json.dumps({"rows": rows, "skipped": self.skipped, "in_files": self.in_files})
        save_file(tensors, Path(path), metadata={"format": "pt", _METADATA: about})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """Reads a file from `save`. Tensors are read when they are used.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not a calibration.
            ImportError: safetensors is not installed.
        """
        load_file, _ = safetensors_functions()
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"calibration: expected a file from Calibration.save, got {path}, not a file"
            )
        about = read_metadata(Path(path)).get(_METADATA)
        if about is None:
            raise ValueError(
                f"calibration: expected a file that Calibration.save wrote, got {path}"
            )
        try:
            kept = json.loads(about)
            rows, skipped = dict(kept["rows"]), dict(kept["skipped"])
            in_files = dict(kept.get("in_files", {}))  # older files have none
            tensors = load_file(Path(path))
            layers = {
                name: InputStatistics(int(count), *(tensors[f"{name}.{part}"] for part in _PARTS))
                for name, count in rows.items()
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"calibration: expected what Calibration.save wrote, got {path}, in which rows, "
                f"skipped or a tensor is missing or broken ({error}). Save it again"
            ) from error
        return cls(layers, skipped, in_files)


_PARTS = ("amax", "moment", "noise")
_METADATA = "jitquant_calibration"


def output_sqnr(
    weight: Tensor, quantized: NVFP4Tensor, found: InputStatistics | None, weight_only: bool
) -> float:
    """SQNR of the outputs in dB, or of the weight without statistics of the inputs.

    Args:
        weight: (N, K).
        quantized: the same in NVFP4.
        found: statistics of its inputs, or None.
        weight_only: whether the inputs are not quantized.
    """
    if found is not None:
        return found.sqnr(weight, quantized, weight_only)
    exact = weight.detach().float()
    error = quantized.dequantize(torch.float32) - exact
    signal, noise = (torch.linalg.vector_norm(t, dtype=torch.float64) for t in (exact, error))
    return decibels(signal.item() ** 2, noise.item() ** 2)


def lowest(sqnr: Mapping[str, float], groups: Sequence[Sequence[str]], count: int) -> list[str]:
    """Up to ``count`` names with the lowest values; groups are included whole or not at all."""
    chosen: list[str] = []
    for group in sorted(groups, key=lambda names: min(sqnr[name] for name in names)):
        if group[0] not in chosen and len(chosen) + len(group) <= count:
            chosen += group
    return chosen


class _Observer:
    """Accumulates statistics of the inputs of one linear, without synchronization."""

    def __init__(self, calls: _Calls) -> None:
        self.calls = calls
        self.found: InputStatistics | None = None
        self.why = "its forward was not called"

    @torch.no_grad()
    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or x.dtype not in INPUT_DTYPES:
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            self.why = f"its input is {given}"
            return
        if x.numel() == 0:
            self.why = "its input had no rows"
            return
        with torch.autocast(x.device.type, enabled=False):
            self._add(x.detach())

    def _add(self, x: Tensor) -> None:
        mask = self.calls.mask
        if mask is not None and x.dim() == 2:  # as shared experts get the tokens of all sequences
            mask = mask.flatten()
        if mask is not None and mask.shape == x.shape[:-1]:
            padding = (mask == 0).to(x.device)[..., None]
            x = x.masked_fill(padding, 0)  # rows of zeros change no sum
        self.add(x.reshape(-1, x.shape[-1]))

    def add(self, x: Tensor) -> None:
        """Rows (M, K)."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        values = x.float()
        amax = values.abs().amax().reshape(1)
        step = -(-x.shape[0] // _SAMPLE)
        some = values[::step]
        q = quantize_nvfp4(some, torch.where(amax > 0, gsa_from_amax(amax), 1.0))
        noise = (q.dequantize(torch.float32) - some).square().mean(0).mul_(x.shape[0])
        if self.found is None:
            self.found = InputStatistics(x.shape[0], amax, values.T @ values, noise)
            return
        self.found.rows += x.shape[0]
        torch.maximum(self.found.amax, amax, out=self.found.amax)
        self.found.moment.addmm_(values.T, values)
        self.found.noise.add_(noise)


class _ExpertsObserver:
    """Sends the inputs of experts through them, and adds up what each gets."""

    def __init__(self, experts: nn.Module, calls: _Calls) -> None:
        self.calls = calls
        self.of: dict[str, _Observer] = {}
        self._run = ObservedExperts(experts, self._add)

    @torch.no_grad()
    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        given = dict(zip(names, args, strict=False)) | kwargs
        x, index, weights = (given[name].detach() for name in names)
        mask = self.calls.mask
        if mask is not None and mask.numel() == x.shape[0]:
            padding = (mask.reshape(-1, 1) == 0).to(index.device)
            index = index.masked_fill(padding, self._run.num_experts)  # none of these
        with torch.autocast(x.device.type, enabled=False):
            self._run(x, index, weights.to(x.dtype))

    def _add(self, projection: str, expert: int, rows: Tensor) -> None:
        self.of.setdefault(f"{projection}.{expert}", _Observer(self.calls)).add(rows)


class _Calls:
    """State of the current call of the model.

    Attributes:
        mask: which tokens are not padding, or None.
    """

    mask: Tensor | None = None


def calibrate(
    model: nn.Module,
    batches: Iterable[Inputs],
    *,
    targets: str | Sequence[str] = "all",
    ignore: str | Sequence[str] | None = None,
) -> Calibration:
    """Runs batches through a model and collects statistics of the inputs of its linears and
    experts.

    `convert` uses them to round weights ("gptq"), to give layers static input scales, and to choose
    layers that stay in FP8. A few hundred sequences like those in production are enough; experts
    need more, because each gets a part of the tokens. The model runs in its current mode, without
    gradients, and is not changed. The CPU reads no results before the last batch is done, except
    for experts, which run twice.

    Each linear or expert with K inputs takes 4 * K * K bytes on its device. Use ``targets`` to
    calibrate a model in parts.

    Args:
        model: with linears and experts that are not quantized.
        batches: the arguments of each call of the model: a tensor, a list or tuple of positional
            arguments, or a mapping of keyword arguments. Tokens whose ``attention_mask`` in a
            mapping is 0 are ignored.
        targets, ignore: as for `convert`.

    Raises:
        TypeError: ``model`` is not a module, or ``batches`` is one batch.
        ValueError: there are no batches, or an input contains NaN or infinity.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(batches, (Tensor, Mapping)):
        raise TypeError(
            f"batches: expected an iterable of batches, got {type(batches).__name__}. For a single "
            "batch pass [batch]"
        )
    ignored = None if ignore is None else as_patterns("ignore", ignore)
    found, calls = Calibration(), _Calls()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    shapes = {n: m.weight.shape for n, m in linears.items()}
    experts = {n: m for n, m in model.named_modules() if experts_refusal(m) is None}
    observers: dict[str, _Observer] = {}
    of_experts: dict[str, _ExpertsObserver] = {}
    for name in (*linears, *experts):
        why = refusal(name, shapes, targets, ignored)
        if why is not None:
            found.skipped[name] = why
        elif name in linears:
            observers[name] = _Observer(calls)
        else:
            of_experts[name] = _ExpertsObserver(experts[name], calls)
    count = 0
    hooked: dict[str, Any] = {**observers, **of_experts}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(observer, with_kwargs=True)
        for name, observer in hooked.items()
    ]
    try:
        for batch in batches:
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            calls.mask = mask if isinstance(mask, Tensor) else None
            with torch.no_grad():
                call_model(model, batch)
            count += 1
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise ValueError("batches: expected one or more batches, got none")
    for name, one in of_experts.items():
        observers |= {f"{name}.{part}": observer for part, observer in one.of.items()}
        if not one.of:
            found.skipped[name] = "its forward was not called"
    for name, observer in observers.items():
        if observer.found is None:
            found.skipped[name] = observer.why
        elif not bool(observer.found.moment.isfinite().all()):
            raise ValueError(
                f"input of {name}: expected finite values whose squares do not overflow, got NaN, "
                f"infinity or larger values. Check the inputs, or {ignoring(name)}"
            )
        else:
            found.layers[name] = observer.found
    found.in_files = _names_in_files(model, [name for name in linears if name in found.layers])
    return found


def _names_in_files(model: nn.Module, linears: Sequence[str]) -> dict[str, str]:
    places = places_in_file(model, {f"{name}.weight": (0, 0) for name in linears})
    names = {p.name.removesuffix(".weight"): n.removesuffix(".weight") for n, p in places.items()}
    return {name: in_file for name, in_file in names.items() if name != in_file}


def call_model(model: nn.Module, inputs: Inputs) -> None:
    """Calls a model with a tensor, with positional or with keyword arguments."""
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, (tuple, list)):
        model(*inputs)
    else:
        model(inputs)
