"""The ops as vLLM, FlashInfer, torchao and FBGEMM have them, where these are importable.

A peer takes the inputs of the op that it stands beside and makes the same kind of results by what
the library has for it: one call, or two where it has no single one. An amax that its caller has to
bring is none of its work, so an op that computes a scale for the tensor has no peer where the
library wants that given. Layouts of scales and the last bit differ, gate and up are halves where
they are runs here, and nothing is compared but the time.

A library is imported when `versions` or a peer is called. What raises is for the caller to record.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.bench.kernels import first_line

Peer = Callable[..., Any]

LIBRARIES = {
    "vllm": "vllm",
    "flashinfer": "flashinfer",
    "torchao": "torchao",
    "fbgemm": "fbgemm_gpu",
}
"""Names of the columns, and what is imported for them."""

ABSENT = "not importable"
EPS = 1e-6


def versions() -> dict[str, str]:
    """Each library's version; or `ABSENT`, with the reason where there is more to it."""
    found = {}
    for name, package in LIBRARIES.items():
        try:
            found[name] = str(getattr(module(package), "__version__", "unknown"))
        except Exception as error:  # a broken install raises whatever it likes
            missing = isinstance(error, ModuleNotFoundError) and error.name == package
            found[name] = ABSENT if missing else f"{ABSENT}: {first_line(error)}"
    return found


def absent(found: Mapping[str, str]) -> str:
    """A line that says which of `versions` there are not; "" if there are all."""
    names = [
        name + text.removeprefix(ABSENT).replace(": ", " (", 1) + (")" if text != ABSENT else "")
        for name, text in found.items()
        if text.startswith(ABSENT)
    ]
    return f"Columns are empty, as these are {ABSENT}: {', '.join(names)}." if names else ""


def peers_of(op: str, found: Mapping[str, str]) -> dict[str, Peer | None]:
    """For each library its peer of an op; None if it has none or is not importable.

    Args:
        op: name of the op.
        found: what `versions` gave.
    """
    from harness.bench.peers_fp8 import FP8_PEERS

    known = {**PEERS, **FP8_PEERS}.get(op, {})
    return {
        name: None if text.startswith(ABSENT) else known.get(name) for name, text in found.items()
    }


def module(name: str) -> ModuleType:
    """A module of a library, imported when it is first asked for."""
    return importlib.import_module(name)


@functools.lru_cache(maxsize=1)
def inverse(factor: Tensor) -> Tensor:
    """The factor that dequantizes of one that encodes, and back; made before the graph is."""
    return 1.0 / factor


def vllm_ops(name: str) -> Any:
    """A compiled op of vLLM, which writes to buffers."""
    module("vllm._custom_ops")
    return getattr(torch.ops._C, name)


def _vllm_silu(fused: Tensor, gsa: Tensor) -> Any:
    rows, cols = fused.shape[0], fused.shape[1] // 2
    codes = fused.new_empty(rows, cols // 2, dtype=torch.uint8)
    # Swizzled: 128 rows by 4 scales, which are an int32.
    scales = fused.new_empty(-(-rows // 128) * 128, -(-cols // 64), dtype=torch.int32)
    vllm_ops("silu_and_mul_nvfp4_quant")(codes, scales, fused, inverse(gsa))
    return codes, scales


PEERS: dict[str, dict[str, Peer]] = {
    "quantize-given": {
        "vllm": lambda x, gsa: module("vllm._custom_ops").scaled_fp4_quant(
            x, inverse(gsa), is_sf_swizzled_layout=False
        ),
        "flashinfer": lambda x, gsa: module("flashinfer").fp4_quantize(
            x, inverse(gsa), is_sf_swizzled_layout=False
        ),
        "torchao": lambda x, gsa: module(
            "torchao.prototype.mx_formats.kernels"
        ).triton_quantize_nvfp4(x, gsa),
        "fbgemm": lambda x, gsa: module(
            "fbgemm_gpu.experimental.gemm.triton_gemm.fp4_quantize"
        ).triton_scale_nvfp4_quant(x, inverse(gsa)),
    },
    "swiglu-given": {
        "vllm": _vllm_silu,
        "flashinfer": lambda fused, gsa: module(
            "flashinfer.quantization"
        ).silu_and_mul_nvfp4_quantize(fused, inverse(gsa)),
    },
    # Their global scale is 1, where here each row has a gsa of its own.
    "rmsnorm": {
        "flashinfer": lambda x, weight: module("flashinfer.norm").rmsnorm_fp4quant(
            x, weight, eps=EPS
        ),
    },
    "rmsnorm-residual": {
        "flashinfer": lambda x, residual, weight: module("flashinfer.norm").add_rmsnorm_fp4quant(
            x, residual, weight, eps=EPS
        ),
    },
}
