"""Layers that quantize what they multiply: to train in FP8, to serve in NVFP4.

They are imported by ``import jitquant.nn``, or when ``jitquant.nn`` is first asked for.
"""

from __future__ import annotations

from jitquant.nn._convert import Conversion, convert
from jitquant.nn._grouped import grouped_linear, stack_experts
from jitquant.nn._report import LayerReport, ModelReport, report
from jitquant.nn.float8 import Float8BlockwiseLinear
from jitquant.nn.nvfp4 import NVFP4Linear, Workspace

__all__ = [
    "Conversion",
    "Float8BlockwiseLinear",
    "LayerReport",
    "ModelReport",
    "NVFP4Linear",
    "Workspace",
    "convert",
    "grouped_linear",
    "report",
    "stack_experts",
]
