"""Quantized tensors, as the ops return and take them."""

from __future__ import annotations

from jitquant.tensors.fp8 import QuantizedTensor
from jitquant.tensors.nvfp4 import NVFP4Tensor, QuantizedActivation
from jitquant.tensors.ragged import QuantizedRaggedTensor

__all__ = ["NVFP4Tensor", "QuantizedActivation", "QuantizedRaggedTensor", "QuantizedTensor"]
