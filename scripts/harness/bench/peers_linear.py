"""Products with NVFP4 weights as vLLM's Marlin and humming have them, where these are importable.

Both bring the codes and scales of our weight into an order of their own, once, and multiply x in
bf16 by them. A peer whose product is not ours is not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from harness.bench import peers_vllm
from harness.bench.kernels import first_line
from harness.bench.peers import ABSENT
from jitquant.tensors import NVFP4Tensor

Product = Callable[[Tensor], Tensor]
Prepare = Callable[[NVFP4Tensor], Product]

_E2M1 = 0x2000000010102
"""vLLM's number of E2M1: ``scalar_types.float4_e2m1f.id``."""


def marlin_scales(scales: Tensor) -> tuple[Tensor, float]:
    """Scales as Marlin reads them, and the power of two that they were multiplied by.

    As vLLM's marlin_utils_fp4: each group of 64 columns permuted, then, without a sign bit, five
    bits of exponent and three of mantissa, in units of 2^-7.

    Args:
        scales: E4M3 (N, K / 16), N a multiple of 64; not negative.

    Returns:
        (K / 16, N), bytes seen as E4M3.
    """
    n = scales.shape[0]
    order = torch.arange(64, device=scales.device).view(8, 8).t().reshape(-1)
    s = scales.t().float().reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, n)
    raised = (448 / s.max()).log2().floor().exp2().item() if s.max() > 0 else 1.0
    s = (s * max(1.0, raised) * 2**7).half()
    s[s < 2] = 0
    bits = (s.view(torch.int16) << 1).view(torch.uint8)
    return bits.view(-1, n, 2)[..., 1].contiguous().view(torch.float8_e4m3fn), max(1.0, raised)


def _marlin(w: NVFP4Tensor) -> Product:
    ops = torch.ops._C
    n, k = w.shape
    device = w.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    codes = w.x_fp4_bytes.view(torch.int32).t().contiguous()
    codes = ops.gptq_marlin_repack(codes, none, k, n, 4, False)
    scales, raised = marlin_scales(w.x_sf)
    factor = w.gsa * 2.0 ** (126 - 7) / raised  # E2M1's exponents, moved to those of bf16
    locks = torch.zeros(
        torch.cuda.get_device_properties(device).multi_processor_count,
        dtype=torch.int32,
        device=device,
    )

    def product(x: Tensor) -> Tensor:
        result: Tensor = ops.marlin_gemm(
            *(x, None, codes, None, scales, None, factor, None, None, None, locks, _E2M1),
            *(x.shape[0], n, k, True, False, True, False),
        )
        return result

    return product


def _humming(w: NVFP4Tensor) -> Product:
    layer = (
        importlib.import_module("humming.layer")
        .HummingLayer(
            shape_n=w.shape[0],
            shape_k=w.shape[1],
            weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
            torch_dtype=torch.bfloat16,
        )
        .to(w.device)
    )
    layer.load_from_tensors(
        {"weight": w.x_fp4_bytes, "weight_scale": w.x_sf, "weight_scale_2": w.gsa}
    )
    layer.transform()
    product: Product = layer
    return product


def found(library: Path | None = None) -> dict[str, tuple[str, Prepare | None]]:
    """For each peer what it is, or why it is not importable, and what prepares a weight for it.

    Args:
        library: the path of vLLM's `peers_vllm.LIBRARY`; None: that of the vLLM that is installed.
    """
    peers: dict[str, tuple[str, Prepare | None]] = {}
    for name, load, prepare in (
        ("marlin", lambda: peers_vllm.load(library), _marlin),
        ("humming", lambda: str(importlib.import_module("humming").__version__), _humming),
    ):
        try:
            peers[name] = load(), prepare
        except Exception as error:  # a broken install can raise anything
            peers[name] = f"{ABSENT}: {first_line(error)}", None
    return peers


def is_the_product(y: Tensor, x: Tensor, w: NVFP4Tensor) -> bool:
    """Whether ``y`` is ``x @ w.T``, but for bf16's rounding."""
    want = x.float() @ w.dequantize(torch.float32).t()
    return bool((y.float() - want).norm() <= 1e-2 * want.norm())
