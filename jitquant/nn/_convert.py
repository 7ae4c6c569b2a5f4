"""`convert`: the linears of a model, replaced by quantized ones, with a report of what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from jitquant.formats import INPUT_DTYPES, one_of
from jitquant.nn.float8 import Float8BlockwiseLinear
from jitquant.nn.nvfp4 import NVFP4Linear

LinearRecipe = Literal["fp8_block", "nvfp4", "nvfp4_weight_only"]
_LAYERS: dict[str, tuple[type[Float8BlockwiseLinear] | type[NVFP4Linear], dict[str, Any]]] = {
    "fp8_block": (Float8BlockwiseLinear, {}),
    "nvfp4": (NVFP4Linear, {}),
    "nvfp4_weight_only": (NVFP4Linear, {"weight_only": True}),
}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
# They read the weights of their linears past forward, in eval mode at least.
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class Conversion:
    """What `convert` did.

    Attributes:
        recipe: that was asked for.
        replaced: names of the linears that were replaced, each at every place it has.
        skipped: names of those that were left as they are, and why.
        bytes_before, bytes_after: of the weights of what was replaced, biases aside.
    """

    recipe: str
    replaced: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        count = len(self.replaced) + len(self.skipped)
        lines = [
            f"{self.recipe}: {len(self.replaced)} of {count} linears replaced, weights "
            f"{self.bytes_before / 2**20:.1f} MiB -> {self.bytes_after / 2**20:.1f} MiB"
        ]
        lines += [f"  left as it is: {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    recipe: LinearRecipe,
    *,
    filter: Callable[[str, nn.Linear], bool] | None = None,
) -> Conversion:
    """Replaces the linears of a model, in place.

    Left as they are, with the reason: what ``filter`` refuses; subclasses of ``nn.Linear``, which
    may compute something else; linears with hooks; those of ``nn.MultiheadAttention`` and
    ``nn.TransformerEncoderLayer``, which read the weights themselves; weights that cannot be
    quantized; and for NVFP4 weights that another module has as well, such as tied embeddings.
    A linear that the model has at several places is one layer at all of them afterwards.

    Args:
        model: any module that has linears in it.
        recipe: "fp8_block": `Float8BlockwiseLinear`, with the same parameters; "nvfp4":
            `NVFP4Linear`; "nvfp4_weight_only": the same, with inputs left as they are.
        filter: called with the name and the module of each ``nn.Linear``; False leaves it alone,
            for instance ``lambda name, module: name != "lm_head"``.

    Returns:
        What was replaced and what was not; ``print`` it.

    Raises:
        ValueError: ``recipe`` is none of these, or ``model`` is a linear itself.
        TypeError: ``model`` is no module.
    """
    one_of("recipe", recipe, tuple(_LAYERS))
    kind, how = _LAYERS[recipe]
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; accepted is a torch.nn.Module")
    if isinstance(model, nn.Linear):
        raise ValueError(
            f"model is {type(model).__name__}; accepted is a module that has linears in it. For "
            f"one linear call {kind.__name__}.from_linear(model)"
        )
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)

    done = Conversion(recipe)
    chosen: list[tuple[str, nn.Linear]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, Float8BlockwiseLinear):
            continue
        mine = {f"{place}.weight" for place in places[id(module)]}
        others = [n for n in holders.get(id(module.weight), []) if n not in mine]
        why = _refusal(module, parents[id(module)])
        if why is None and kind is NVFP4Linear and others:
            why = f"its weight is also {others[0]}"
        if why is None and filter is not None and not filter(name, module):
            why = "refused by filter"
        if why is None:
            chosen.append((name, module))
        else:
            done.skipped[name] = why

    for name, module in chosen:
        done.bytes_before += module.weight.nbytes
        made = kind.from_linear(module, **how)
        _replace(model, places[id(module)], made)
        quantized = made.buffers() if isinstance(made, NVFP4Linear) else [made.weight]
        done.bytes_after += sum(t.nbytes for t in quantized)
        done.replaced.append(name)
    return done


def replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module at all places that another one has in a model."""
    named = model.named_modules(remove_duplicate=False)
    _replace(model, [name for name, module in named if module is old], new)


def _replace(model: nn.Module, places: list[str], new: nn.Module) -> None:
    for place in places:
        owner, _, attribute = place.rpartition(".")
        setattr(model.get_submodule(owner), attribute, new)


def _refusal(linear: nn.Linear, parent: nn.Module) -> str | None:
    """Why a linear cannot be replaced."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, which may compute something else"
    if isinstance(parent, _READERS):
        return f"{type(parent).__name__} reads its weight past its forward"
    if any(getattr(linear, hooks) for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    if linear.weight.dtype not in INPUT_DTYPES:
        return f"its weight is {linear.weight.dtype}"
    if 0 in linear.weight.shape:
        return f"its weight has the shape {tuple(linear.weight.shape)}"
    return None
