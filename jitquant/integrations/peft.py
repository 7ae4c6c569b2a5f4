"""peft: LoRA on top of quantized layers, whose inputs have gradients and whose weights have none.

config = with_jitquant(LoraConfig(target_modules=["q_proj", "v_proj"]))
model = get_peft_model(model, config)
"""

from __future__ import annotations

from typing import Any, TypeVar

from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from jitquant.nn import Float8BlockwiseLinear, NVFP4Linear

__all__ = ["with_jitquant"]

Config = TypeVar("Config", bound=LoraConfig)


class NVFP4LoraLinear(LoraLinear):  # type: ignore[misc]
    """LoRA beside an `NVFP4Linear`; its adapters have the dtype and the device of that layer."""

    def _get_base_layer_device_and_dtype(self, base_layer: NVFP4Linear) -> tuple[Any, Any]:
        return base_layer.weight_packed.device, base_layer.dtype

    def merge(self, *_: Any, **__: Any) -> None:
        """Refused: a weight of four bits has no place for what the adapter adds.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "an adapter is not merged into a weight in NVFP4, which would be rounded again. Merge "
            "it into the bf16 model (get_peft_model, merge_and_unload()), then convert that"
        )


class Float8LoraLinear(LoraLinear):  # type: ignore[misc]
    """LoRA beside a `Float8BlockwiseLinear`, which cannot see that peft writes to its weight."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """As in peft; the weight is quantized again."""
        super().merge(*args, **kwargs)
        self.get_base_layer().weight_changed()

    def unmerge(self) -> None:
        """As in peft; the weight is quantized again."""
        super().unmerge()
        self.get_base_layer().weight_changed()


def with_jitquant(config: Config) -> Config:
    """Has a config of LoRA take `NVFP4Linear` and `Float8BlockwiseLinear`; returns it.

    peft takes the latter for an ``nn.Linear`` without this; then adapters that are merged are not
    seen before the next ``train()`` or ``eval()``.

    Args:
        config: of peft. It is changed, and the change is not saved with it: call this again when
            adapters are loaded.

    Raises:
        ValueError: ``target_modules`` is "all-linear", which peft takes for ``nn.Linear`` alone.
    """
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        raise ValueError(
            'target_modules: expected names such as ["q_proj", "v_proj"], got "all-linear", which '
            "peft takes for the layers that are not quantized. Name the layers, as convert(...)"
            ".replaced has them"
        )
    mapping: dict[type[nn.Module], type[nn.Module]] = {
        NVFP4Linear: NVFP4LoraLinear,
        Float8BlockwiseLinear: Float8LoraLinear,
    }
    config._register_custom_module(mapping)
    return config
