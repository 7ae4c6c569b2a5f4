"""What models of transformers want besides: the names that their files have, and to be saved.

transformers is imported where a model of it is given, and never otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    return any(c.__module__ == "transformers.modeling_utils" for c in type(model).__mro__)


class Place(NamedTuple):
    """Where a matrix of a file is in a model.

    Attributes:
        name: of the parameter.
        expert, piece: of which expert, and which of the matrices that follow each other; None for
            a matrix that is the whole parameter.
    """

    name: str
    expert: int | None = None
    piece: int | None = None


def in_file(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names, and in the shapes, that the files of a model have them.

    Args:
        model: of transformers, or any other, whose names are returned unchanged.
        tensors: by their names in the model.
    """
    if not is_pretrained(model) or not tensors:
        return dict(tensors)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 a model has the names of its files
        return dict(tensors)
    attached = getattr(model, "hf_quantizer", None)
    # A conversion may compare a tensor's shape with that of the parameter, which is these.
    swapped: dict[str, Any] = {"get_parameter": tensors.__getitem__}
    if getattr(attached, "is_attached", False):
        swapped["_weight_conversions"] = getattr(attached, "conversions", None)
    kept = {name: model.__dict__[name] for name in swapped if name in model.__dict__}
    try:
        model.__dict__.update(swapped)
        reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    finally:
        for name in swapped:
            model.__dict__.pop(name, None)
        model.__dict__.update(kept)
    return reverted


def places_in_file(model: nn.Module, weights: Mapping[str, tuple[int, int]]) -> dict[str, Place]:
    """Where the matrices of a model's files are in the model, by their names in the files.

    Weights that the files do not store with one name for each matrix are left out.

    Args:
        model: any.
        weights: by name in the model: the number of experts and of matrices in each, which follow
            each other; (0, 0) for what is one matrix.
    """
    numbers: dict[str, Tensor] = {}
    known: list[Place] = []
    for name, (experts, pieces) in weights.items():
        first = len(known)
        if experts == 0:
            known.append(Place(name))
            numbers[name] = torch.tensor([[first]], device="cpu")
        else:
            known += [Place(name, e, p) for e in range(experts) for p in range(pieces)]
            numbers[name] = torch.arange(first, len(known), device="cpu").view(experts, pieces, 1)
    places: dict[str, Place] = {}
    for name, number in in_file(model, numbers).items():
        if number.numel() == 1:
            places[name] = known[int(number)]
            continue
        owner, _, last = name.rpartition(".")
        its = [known[i] for i in number.flatten().tolist()]
        if its[0].expert is None or its[0].name.rpartition(".")[2] != last:
            continue
        # No conversion knows these experts: the names that llm-compressor gives them.
        for place in its:
            part = ("gate_proj", "up_proj")[place.piece or 0] if number.shape[1] == 2 else last
            places[f"{owner}.{place.expert}.{part}.weight"] = place
    return places


def own_config(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of a model of transformers, as its config.json has it."""
    import json

    own = getattr(model, "config", None)
    if own is None or not hasattr(own, "to_json_string"):
        return None
    described: dict[str, Any] = json.loads(own.to_json_string())
    described["architectures"] = described.get("architectures") or [type(model).__name__]
    if isinstance(getattr(model, "dtype", None), torch.dtype):
        described["dtype"] = str(model.dtype).removeprefix("torch.")
    return described


def fill_buffers(model: nn.Module) -> None:
    """Computes the buffers on meta that no file has, as a model of transformers does for itself.

    Before weights are loaded: this initializes those that are not on meta.
    """
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
                module._is_hf_initialized = False  # type: ignore[assignment]
    model.initialize_weights()  # type: ignore[operator]
