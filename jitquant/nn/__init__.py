"""Layers with quantized products: to train in FP8, to serve in NVFP4.

They are imported by ``import jitquant.nn``, or at the first use of ``jitquant.nn``.
"""

from __future__ import annotations

from jitquant.nn._calibration import Calibration, InputStatistics, calibrate
from jitquant.nn._checkpoint import quantize_checkpoint
from jitquant.nn._checkpoint_work import Checkpoint
from jitquant.nn._compressed_tensors import save_compressed_tensors
from jitquant.nn._convert import Conversion, convert
from jitquant.nn._grouped import grouped_linear, stack_experts
from jitquant.nn._load import load_compressed_tensors
from jitquant.nn._report import LayerReport, ModelReport, report
from jitquant.nn.experts import Float8BlockwiseExperts, NVFP4Experts
from jitquant.nn.float8 import Float8BlockwiseLinear
from jitquant.nn.mxfp4 import MXFP4Linear
from jitquant.nn.nvfp4 import NVFP4Linear
from jitquant.nn.nvfp4_training import (
    NVFP4TrainingLinear,
    NVFP4TrainingRecipe,
    linears_in_last_blocks,
)

__all__ = [
    "Calibration",
    "Checkpoint",
    "Conversion",
    "Float8BlockwiseExperts",
    "Float8BlockwiseLinear",
    "InputStatistics",
    "LayerReport",
    "MXFP4Linear",
    "ModelReport",
    "NVFP4Experts",
    "NVFP4Linear",
    "NVFP4TrainingLinear",
    "NVFP4TrainingRecipe",
    "calibrate",
    "convert",
    "grouped_linear",
    "linears_in_last_blocks",
    "load_compressed_tensors",
    "quantize_checkpoint",
    "report",
    "save_compressed_tensors",
    "stack_experts",
]
