"""NVFP4, FP8, INT8 and MXFP8 quantization by CUDA kernels that are compiled on first use.

Importing it registers ``torch.ops.jitquant`` and nothing else: it compiles nothing, touches no GPU
and creates no directory. The command line, which must respond before torch could be imported,
registers the operators when one is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitquant._command import started_as_command

if TYPE_CHECKING or not started_as_command():
    from jitquant.delayed_scaling import DelayedScaling
    from jitquant.ops import (
        amax_gsa,
        deinterleave_quantize_nvfp4,
        dequantize,
        dequantize_mxfp4,
        dequantize_nvfp4,
        dequantize_ragged,
        mhc_rmsnorm_quantize_nvfp4,
        nvfp4_experts,
        nvfp4_grouped_linear,
        nvfp4_linear,
        quantize_block,
        quantize_block_both,
        quantize_fp8,
        quantize_mxfp4,
        quantize_mxfp8,
        quantize_mxfp8_both,
        quantize_nvfp4,
        quantize_nvfp4_both,
        quantize_per_token_group,
        quantize_per_token_group_both,
        quantize_ragged,
        quantize_ragged_grad,
        quantize_weight_nvfp4,
        rmsnorm_quantize_fp8,
        rmsnorm_quantize_nvfp4,
        rmsnorm_quantize_per_token_group,
        swiglu_quantize_fp8,
        swiglu_quantize_per_token_group,
    )
    from jitquant.tensors import (
        NVFP4Tensor,
        QuantizedActivation,
        QuantizedRaggedTensor,
        QuantizedTensor,
    )

if TYPE_CHECKING:
    from jitquant.loader import Source, freeze, get_cuda_module, unfreeze, warmup

    __version__: str

__all__ = [
    "DelayedScaling",
    "NVFP4Tensor",
    "QuantizedActivation",
    "QuantizedRaggedTensor",
    "QuantizedTensor",
    "Source",
    "__version__",
    "amax_gsa",
    "deinterleave_quantize_nvfp4",
    "dequantize",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "dequantize_ragged",
    "freeze",
    "get_cuda_module",
    "mhc_rmsnorm_quantize_nvfp4",
    "nvfp4_experts",
    "nvfp4_grouped_linear",
    "nvfp4_linear",
    "quantize_block",
    "quantize_block_both",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_mxfp8_both",
    "quantize_nvfp4",
    "quantize_nvfp4_both",
    "quantize_per_token_group",
    "quantize_per_token_group_both",
    "quantize_ragged",
    "quantize_ragged_grad",
    "quantize_weight_nvfp4",
    "rmsnorm_quantize_fp8",
    "rmsnorm_quantize_nvfp4",
    "rmsnorm_quantize_per_token_group",
    "swiglu_quantize_fp8",
    "swiglu_quantize_per_token_group",
    "unfreeze",
    "warmup",
]

_OF_THE_LOADER = ("Source", "freeze", "get_cuda_module", "unfreeze", "warmup")
_MODULES = ("loader", "nn", "reference", "testing")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jitquant")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    # The loader and the package's metadata are read when they are asked for.
    value: Any
    if name in _OF_THE_LOADER:
        from jitquant import loader

        value = getattr(loader, name)
    elif name in _MODULES:
        from importlib import import_module

        value = import_module(f"{__name__}.{name}")
    elif name == "__version__":
        value = _version()
    elif name in __all__:
        from jitquant import delayed_scaling, ops, tensors

        places = (ops, tensors, delayed_scaling)
        value = next(getattr(place, name) for place in places if hasattr(place, name))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
