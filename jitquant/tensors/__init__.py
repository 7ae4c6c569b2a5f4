"""Quantized tensors, as the ops return and take them: they know their layout alone."""

from __future__ import annotations

from jitquant.tensors.fp8 import QuantizedTensor
from jitquant.tensors.grouped import QuantizedGroups
from jitquant.tensors.nvfp4 import QuantizedActivation

__all__ = ["QuantizedActivation", "QuantizedGroups", "QuantizedTensor"]
