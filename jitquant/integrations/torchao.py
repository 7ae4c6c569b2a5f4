"""torchao: ``quantize_(model, JitquantNVFP4Config())`` puts in `jitquant.nn.NVFP4Linear`.

``quantize_`` handles one linear at a time, so layers that engines fuse have a gsa each; with
`jitquant.nn.convert` they share one. Importing this module registers the two configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from jitquant.formats import Compute, Granularity, Recipe, one_of
from jitquant.nn import Float8BlockwiseLinear, NVFP4Linear
from jitquant.nn._rounding import WeightRounding, quantized_weights

__all__ = ["JitquantFP8BlockConfig", "JitquantNVFP4Config"]


@dataclass
class JitquantNVFP4Config(AOBaseConfig):  # type: ignore[misc]
    """`NVFP4Linear.from_linear` for each linear.

    Attributes:
        granularity, recipe, weight_only, compute: as there.
        rounding: of weights, as for `jitquant.nn.convert`: "nearest", "4over6" or "mse". "gptq"
            needs inputs, which ``quantize_`` does not have; use `convert`.
    """

    granularity: Granularity = "tensor"
    recipe: Recipe = "te"
    weight_only: bool = False
    compute: Compute = "exact"
    rounding: WeightRounding = "nearest"

    def __post_init__(self) -> None:
        one_of("rounding", self.rounding, ("nearest", "4over6", "mse"))


@dataclass
class JitquantFP8BlockConfig(AOBaseConfig):  # type: ignore[misc]
    """`Float8BlockwiseLinear.from_linear` for each linear."""


@register_quantize_module_handler(JitquantNVFP4Config)  # type: ignore[untyped-decorator]
def _nvfp4(module: nn.Linear, config: JitquantNVFP4Config, **_: Any) -> nn.Module:
    weight = None  # as the layer rounds it, by its recipe
    if config.rounding != "nearest":
        (weight,) = quantized_weights([module.weight], config.rounding)
    layer = NVFP4Linear.from_linear(
        module,
        granularity=config.granularity,
        recipe=config.recipe,
        weight_only=config.weight_only,
        compute=config.compute,
        weight=weight,
    )
    return _become(module, layer)


@register_quantize_module_handler(JitquantFP8BlockConfig)  # type: ignore[untyped-decorator]
def _fp8(module: nn.Linear, config: JitquantFP8BlockConfig, **_: Any) -> nn.Module:
    return _become(module, Float8BlockwiseLinear.from_linear(module))


def _become(module: nn.Module, layer: nn.Module) -> nn.Module:
    """Makes the module itself that layer: ``quantize_`` has no place for another one if it is given
    a linear alone, as transformers' ``TorchAoConfig`` does."""
    module.__class__ = type(layer)
    module.__dict__ = layer.__dict__
    return module
