"""A quantizer of transformers that saves; imported where a model of transformers is converted."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.base import HfQuantizer

from jitquant.nn._compressed_tensors import compressed_tensors


class SavingQuantizer(HfQuantizer):  # type: ignore[misc]
    """Has ``save_pretrained`` write compressed-tensors, with the configuration that says so.

    Attributes:
        conversions: those of transformers from the names of the files to the model's.
        is_attached: whether the model's are here.
    """

    conversions: Any = None
    is_attached = False

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``save_pretrained`` writes; sets ``quantization_config`` on the model's config."""
        tensors, config = compressed_tensors(model)
        model.config.quantization_config = config
        return tensors, {}

    def is_serializable(self) -> bool:
        """It is."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train; the quantized weights do not."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        pass


def attach_quantizer(model: Any, quantizer: SavingQuantizer | None = None) -> None:
    """Makes a quantizer that of a model whose layers are converted.

    Args:
        model: of transformers.
        quantizer: None: a new `SavingQuantizer`.
    """
    kept = getattr(model, "hf_quantizer", None)
    if isinstance(kept, SavingQuantizer) and (quantizer is None or kept.is_attached):
        return
    made = SavingQuantizer(None) if quantizer is None else quantizer
    made.conversions = model.__dict__.get("_weight_conversions")
    made.is_attached = True
    model.hf_quantizer = made
    model._weight_conversions = []  # what is saved has the names of the files already
