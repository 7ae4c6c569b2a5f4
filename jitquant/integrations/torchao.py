"""torchao: ``quantize_(model, JitquantNVFP4Config())`` puts `jitquant.nn.NVFP4Linear` in.

``quantize_`` looks at one linear after another, so that those which engines fuse have a gsa each;
`jitquant.nn.convert` lets them share one. Importing this module registers the two configs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from jitquant.formats import Granularity, Recipe
from jitquant.nn import Float8BlockwiseLinear, NVFP4Linear

__all__ = ["JitquantFP8BlockConfig", "JitquantNVFP4Config"]


@dataclass
class JitquantNVFP4Config(AOBaseConfig):  # type: ignore[misc]
    """`NVFP4Linear.from_linear` for each linear.

    Attributes:
        granularity, recipe, weight_only: as there.
    """

    granularity: Granularity = "tensor"
    recipe: Recipe = "te"
    weight_only: bool = False


@dataclass
class JitquantFP8BlockConfig(AOBaseConfig):  # type: ignore[misc]
    """`Float8BlockwiseLinear.from_linear` for each linear."""


@register_quantize_module_handler(JitquantNVFP4Config)  # type: ignore[untyped-decorator]
def _nvfp4(module: nn.Linear, config: JitquantNVFP4Config, **_: Any) -> nn.Module:
    return NVFP4Linear.from_linear(
        module,
        granularity=config.granularity,
        recipe=config.recipe,
        weight_only=config.weight_only,
    )


@register_quantize_module_handler(JitquantFP8BlockConfig)  # type: ignore[untyped-decorator]
def _fp8(module: nn.Linear, config: JitquantFP8BlockConfig, **_: Any) -> nn.Module:
    return Float8BlockwiseLinear.from_linear(module)
