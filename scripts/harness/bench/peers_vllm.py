"""vLLM's compiled ops, from the library in its wheel; vLLM's Python code is not needed.

Each function makes the buffers that vLLM's own code makes and calls one op.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = "_C_stable_libtorch.abi3.so"
E4M3 = torch.float8_e4m3fn
TOP = 448.0
AMAX_EPS = 1e-10


def load(library: Path | None = None) -> str:
    """Loads vLLM's ops into ``torch.ops._C`` and returns vLLM's version.

    The version is in the name of the wheel's ``vllm-*.dist-info`` beside the directory of the
    library; without it the library's name is returned.

    Args:
        library: the path of `LIBRARY`; None: that of the vLLM that is installed.

    Raises:
        ModuleNotFoundError: no path was given and vLLM is not installed.
        OSError: the library cannot be loaded.
    """
    if library is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("vllm is not installed", name="vllm")
        library = Path(spec.origin).parent / LIBRARY
    torch.ops.load_library(str(library))
    found = next(library.resolve().parents[1].glob("vllm-*.dist-info"), None)
    return library.name if found is None else found.stem.removeprefix("vllm-")


def _op(name: str) -> Any:
    return getattr(torch.ops._C, name)


def _row_scales(x: Tensor, columns: int = 1) -> Tensor:
    return x.new_empty(x.shape[0], columns, dtype=torch.float32)


def fp8_given(x: Tensor, scale_inv: Tensor) -> Any:
    data = torch.empty_like(x, dtype=E4M3)
    _op("static_scaled_fp8_quant")(data, x, scale_inv, None)
    return data


def fp8_tensor(x: Tensor) -> Any:
    data, scale = torch.empty_like(x, dtype=E4M3), x.new_empty(1, dtype=torch.float32)
    _op("dynamic_scaled_fp8_quant")(data, x, scale)
    return data, scale


def fp8_row(x: Tensor) -> Any:
    data, scale = torch.empty_like(x, dtype=E4M3), _row_scales(x)
    _op("dynamic_per_token_scaled_fp8_quant")(data, x, scale, None)
    return data, scale


def fp8_group(x: Tensor, size: int = 128, *, tma: bool = False) -> Any:
    data, scale = torch.empty_like(x, dtype=E4M3), _row_scales(x, x.shape[1] // size)
    if tma:  # by column, each as long as a multiple of four
        scale = torch.empty_strided(
            scale.shape, (1, -(-x.shape[0] // 4) * 4), dtype=torch.float32, device=x.device
        )
    _op("per_token_group_fp8_quant")(x, data, scale, size, AMAX_EPS, -TOP, TOP, False, tma, tma)
    return data, scale


def fp8_group_packed(x: Tensor, size: int = 128) -> Any:
    data = torch.empty_like(x, dtype=E4M3)
    scale = torch.empty_strided(
        (x.shape[0], -(-x.shape[1] // (4 * size))),
        (1, -(-x.shape[0] // 4) * 4),
        dtype=torch.int32,
        device=x.device,
    )
    _op("per_token_group_fp8_quant_packed")(x, data, scale, size, AMAX_EPS, -TOP, TOP)
    return data, scale


def int8_row(x: Tensor) -> Any:
    data, scale = torch.empty_like(x, dtype=torch.int8), _row_scales(x)
    _op("dynamic_scaled_int8_quant")(data, x, scale, None)
    return data, scale


def int8_group(x: Tensor, size: int = 128) -> Any:
    data, scale = torch.empty_like(x, dtype=torch.int8), _row_scales(x, x.shape[1] // size)
    _op("per_token_group_quant_int8")(x, data, scale, size, AMAX_EPS, -128.0, 127.0)
    return data, scale


def rmsnorm_given(x: Tensor, weight: Tensor, scale_inv: Tensor, eps: float) -> Any:
    data = torch.empty_like(x, dtype=E4M3)
    _op("rms_norm_static_fp8_quant")(data, x, weight, scale_inv, eps)
    return data


def rmsnorm_residual_given(
    x: Tensor, residual: Tensor, weight: Tensor, scale_inv: Tensor, eps: float
) -> Any:
    data = torch.empty_like(x, dtype=E4M3)
    _op("fused_add_rms_norm_static_fp8_quant")(data, x, residual, weight, scale_inv, eps)
    return data


def rmsnorm_row(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    data, scale = torch.empty_like(x, dtype=E4M3), _row_scales(x)
    _op("rms_norm_dynamic_per_token_quant")(data, x, weight, scale, eps, None, residual)
    return data, scale


def rmsnorm_group(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    data, scale = torch.empty_like(x, dtype=E4M3), _row_scales(x, x.shape[1] // 128)
    _op("rms_norm_per_block_quant")(data, x, weight, scale, eps, None, residual, 128, False)
    return data, scale


def silu_given(fused: Tensor, scale_inv: Tensor) -> Any:
    data = fused.new_empty(fused.shape[0], fused.shape[1] // 2, dtype=E4M3)
    _op("silu_and_mul_quant")(data, fused, scale_inv)
    return data


def silu_group(fused: Tensor) -> Any:
    rows, cols = fused.shape[0], fused.shape[1] // 2
    data, scale = fused.new_empty(rows, cols, dtype=E4M3), _row_scales(fused, cols // 128)
    _op("silu_and_mul_per_block_quant")(data, fused, scale, 128, None, False)
    return data, scale


def nvfp4_given(x: Tensor, inverse_gsa: Tensor) -> Any:
    return _op("scaled_fp4_quant")(x, inverse_gsa, False)


def silu_nvfp4(fused: Tensor, inverse_gsa: Tensor) -> Any:
    rows, cols = fused.shape[0], fused.shape[1] // 2
    codes = fused.new_empty(rows, cols // 2, dtype=torch.uint8)
    # Swizzled: 128 rows by 4 scales, which are an int32.
    scales = fused.new_empty(-(-rows // 128) * 128, -(-cols // 64), dtype=torch.int32)
    _op("silu_and_mul_nvfp4_quant")(codes, scales, fused, inverse_gsa)
    return codes, scales
