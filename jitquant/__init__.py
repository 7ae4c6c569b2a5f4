"""NVFP4 quantization by CUDA kernels compiled on first use, with the reference recipes' bits."""

from __future__ import annotations
