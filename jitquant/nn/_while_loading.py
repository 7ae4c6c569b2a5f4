"""Quantizes the weights of a model one by one, as a library reads them from files."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from jitquant.nn._convert import Conversion, Plan, Quantized, check_finite
from jitquant.nn.experts import projections_of


class WhileLoading:
    """Takes the weights that a `Plan` quantizes, and replaces their layers at the end.

    A weight is quantized when it is taken; those that share a gsa when the last one of them is.
    Until the end, a weight that was taken has one element of memory in the model: NaN, so that
    whatever reads it by mistake does not go unnoticed.

    Nothing is taken if layers need their weights later: those in FP8 have them as parameters.
    """

    def __init__(self, plan: Plan, model: nn.Module, kept: Collection[str] = ()) -> None:
        """Chooses the weights to take.

        Args:
            plan: what to do.
            model: its weights may be on meta.
            kept: names of parameters that are not taken, such as tied ones.

        Raises:
            TypeError, ValueError: as `jitquant.nn.convert`.
        """
        self._plan = plan
        self._linears: dict[str, list[str]] = {}
        self._experts: dict[str, tuple[str, str]] = {}
        self._held: dict[str, Tensor] = {}
        self._quantized: dict[str, Quantized] = {}
        self._error: ValueError | None = None
        chosen = plan.choose(model)
        if plan.keeps_weights:
            return
        relatives = {name: family for family in chosen.families for name in family}
        for name, module in chosen.modules.items():
            if isinstance(module, nn.Linear):
                family = relatives.get(name, [name])
                if not any(f"{member}.weight" in kept for member in family):
                    self._linears[f"{name}.weight"] = family
                continue
            for projection in projections_of(module):
                if f"{name}.{projection.name}" not in kept:
                    self._experts[f"{name}.{projection.name}"] = (name, projection.name)

    def wants(self, model: nn.Module, name: str) -> bool:
        """Whether a parameter is to be taken: it is chosen, and whole in this process."""
        if name not in self._linears and name not in self._experts:
            return False
        return type(model.get_parameter(name)) is nn.Parameter  # of no DTensor

    def take(self, model: nn.Module, name: str, weight: Tensor) -> bool:
        """Takes a weight that was read, if `wants` is true and its shape is the model's.

        Returns:
            Whether it was taken. If not, the caller has to put it into the model.
        """
        if not self.wants(model, name):
            return False
        if model.get_parameter(name).shape != weight.shape:  # the library says what it thinks
            for member in self._linears.pop(name, ()):
                self._release(model, f"{member}.weight")
            self._experts.pop(name, None)
            return False
        owner, _, last = name.rpartition(".")
        empty = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device)
        placeholder = nn.Parameter(empty.expand(weight.shape), requires_grad=False)
        placeholder._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(model.get_submodule(owner), last, placeholder)
        if self._error is not None:
            return True
        try:
            check_finite(owner, weight)
        except ValueError as error:  # raised at the end, past what turns it into another one
            self._error = error
            self._held.clear()
            return True
        if name in self._experts:
            self._take_experts(model, name, weight)
            return True
        self._held[name] = weight
        family = self._linears[name]
        if all(f"{member}.weight" in self._held for member in family):
            weights = {member: self._held.pop(f"{member}.weight") for member in family}
            self._quantized |= self._plan.quantize(weights)
        return True

    def _take_experts(self, model: nn.Module, name: str, weight: Tensor) -> None:
        owner, projection = self._experts[name]
        transposed = bool(model.get_submodule(owner).is_transposed)
        matrices = weight.transpose(-2, -1) if transposed else weight
        parts = self._quantized.setdefault(owner, {})
        assert isinstance(parts, dict)
        parts[projection] = self._plan.quantize_experts(owner, projection, matrices)

    def finish(self, model: nn.Module) -> Conversion:
        """Replaces the layers of the model, and quantizes what was not taken.

        Raises:
            ValueError: as `jitquant.nn.convert`.
        """
        self._linears.clear()
        self._experts.clear()
        if self._error is not None:
            raise self._error
        for name in [*self._held]:  # the files lack their siblings
            self._release(model, name)
        done = self._plan.convert(model, self._quantized)
        lost = self._quantized.keys() - set(done.replaced)
        if lost:
            raise RuntimeError(
                f"{', '.join(sorted(lost))}: expected layers that are the same after the weights "
                "were read, got others. Read the model without quantization_config and call "
                "jitquant.nn.convert"
            )
        return done

    def _release(self, model: nn.Module, name: str) -> None:
        """Puts a weight that is held into the model, and takes it no more."""
        self._linears.pop(name, None)
        weight = self._held.pop(name, None)
        if weight is None:
            return
        owner, _, last = name.rpartition(".")
        parameter = nn.Parameter(weight)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(model.get_submodule(owner), last, parameter)
