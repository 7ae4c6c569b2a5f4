"""One function in a process that uses cuda:1 alone and never calls ``set_device``.

``python second_device.py NAME [DEVICE]`` calls it again and again, the first time by the
dispatcher, then past it, and prints "ok" if each result is the CPU's and nothing touched cuda:0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import jitquant
from jitquant import NVFP4Tensor

sys.path.append(str(Path(__file__).parents[1]))  # where this is a program
import one_tensor

J = jitquant
_generator = torch.Generator().manual_seed(0)
_X = torch.randn(300, 1024, generator=_generator).bfloat16()
_WEIGHT = torch.ones(1024)
_STREAMS, _MIX = _X.reshape(75, 4, 1024), torch.full((75, 4), 0.25)
_AT = torch.tensor([0, 100, 300])

To = Callable[[Tensor], Tensor]


def _codes(q: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(q) if isinstance(t, Tensor)]


def _experts(rows: int, device: torch.device) -> NVFP4Tensor:
    """Two experts with weights of ones, whose sums of integers are exact in every order."""
    one = J.quantize_weight_nvfp4(torch.ones(rows, 1024))
    return J.nn.stack_experts([one, one]).to(device)


def _mixture(to: To) -> Tensor:
    device = to(_X).device
    # Gates of 0: what is exact does not take the exponential function.
    x, ids = to(_X[:20] * 0), to(torch.zeros(20, 1, dtype=torch.int64))
    up, down = _experts(2048, device), _experts(1024, device)
    return J.nvfp4_experts(x, up, down, ids, to(torch.ones(20, 1)))


def _linear(to: To) -> Any:
    device = to(_X).device
    # Sums of integers, exact in every order.
    x, w = to(_X[:20].sign()), J.quantize_weight_nvfp4(torch.ones(48, 1024)).to(device)
    parts = [t.view(torch.uint8) for t in (w.x_fp4, w.x_sf)]
    refolded = torch.ops.jitquant.nvfp4_refold(*parts, w.gsa)
    fp8 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)
    return refolded, [J.nvfp4_linear(x, w, compute=c) for c in ("exact", "fp8")[: 1 + fp8]]


def _delayed(to: To) -> Any:
    scaling = J.DelayedScaling(window=4, device=to(_X).device)
    return [scaling.quantize(to(_X)) for _ in range(3)]


def _alone(function: Callable[[Tensor], Any]) -> Callable[[To], Any]:
    return lambda to: function(to(_X))


CASES: dict[str, Callable[[To], Any]] = {
    **{name: _alone(function) for name, function in one_tensor.functions().items()},
    # Of a process group, whose tensors are sharded, the first half is an op of its own.
    "amax_gsa": lambda to: (J.amax_gsa(to(_X)), torch.ops.jitquant.amax(to(_X))),
    "deinterleave_quantize_nvfp4": lambda to: J.deinterleave_quantize_nvfp4(to(_X), 512),
    "dequantize": lambda to: J.dequantize(J.quantize_per_token_group(_X).to(to(_X).device)),
    "dequantize_ragged": lambda to: [
        J.dequantize_ragged(J.quantize_ragged(_X, _AT, format=f).to(to(_X).device))
        for f in ("fp8_tensor", "nvfp4", "mxfp8")
    ],
    "dequantize_mxfp4": lambda to: J.dequantize_mxfp4(
        *(t.view(torch.uint8).to(to(_X).device) for t in J.quantize_mxfp4(_X))
    ),
    "dequantize_nvfp4": lambda to: J.dequantize_nvfp4(J.quantize_nvfp4(_X).to(to(_X).device)),
    "mhc_rmsnorm_quantize_nvfp4": lambda to: J.mhc_rmsnorm_quantize_nvfp4(
        to(_STREAMS), to(_MIX), to(_WEIGHT)
    ),
    "nvfp4_experts": _mixture,
    # Sums of integers, exact in every order.
    "nvfp4_grouped_linear": lambda to: J.nvfp4_grouped_linear(
        to(_X[:20].sign()), _experts(48, to(_X).device), to(torch.tensor([3, 20]))
    ),
    "nvfp4_linear": _linear,
    "quantize_fp8": lambda to: (
        J.quantize_fp8(to(_X)),
        J.quantize_fp8(to(_X), scale=2.0),
        J.quantize_fp8(to(_X), granularity="row", rotate="64"),
    ),
    "quantize_nvfp4_both": lambda to: J.quantize_nvfp4_both(to(_X[:288]), rotate="te"),
    "quantize_per_token_group": lambda to: (
        J.quantize_per_token_group(to(_X)),
        J.quantize_per_token_group(to(_X), rotate="128"),
    ),
    "quantize_ragged": lambda to: [
        J.quantize_ragged(to(_X), to(_AT), format=f) for f in ("fp8_tensor", "nvfp4", "mxfp8")
    ],
    "quantize_ragged_grad": lambda to: J.quantize_ragged_grad(to(_X), to(_AT)),
    "ragged_offsets": lambda to: J.ragged_offsets(to(torch.tensor([3, 0, 5])), 16),
    "quantize_mxfp4": lambda to: J.quantize_mxfp4(to(_X), rotate="128"),
    "quantize_nvfp4": lambda to: (
        J.quantize_nvfp4(to(_X)),
        J.quantize_nvfp4(to(_X), to(torch.tensor([0.002]))),
        J.quantize_nvfp4(
            to(_X), rotate="te", rounding="stochastic", rng_state=to(torch.tensor([1, 2]))
        ),
    ),
    "rmsnorm_quantize_fp8": lambda to: J.rmsnorm_quantize_fp8(to(_X), to(_WEIGHT), scale=2.0),
    "rmsnorm_quantize_per_token_group": lambda to: J.rmsnorm_quantize_per_token_group(
        to(_X), to(_WEIGHT)
    ),
    "rmsnorm_quantize_nvfp4": lambda to: J.rmsnorm_quantize_nvfp4(
        to(_X), to(_WEIGHT), residual=to(_X.flip(0))
    ),
    "DelayedScaling": _delayed,
}
"""Calls of each public function, with its tensors moved by ``to``, that take every module."""


def main(name: str, device: str = "cuda:1") -> None:
    expected = _codes(CASES[name](lambda t: t.clone()))
    for turn in range(4):
        got = _codes(CASES[name](lambda t: t.to(device)))
        if device != "cpu":
            torch.cuda.synchronize(device)
        for a, b in zip(got, expected, strict=True):
            assert str(a.device) == device, f"turn {turn}: a result is on {a.device}"
            if b.dtype == torch.float32:  # amaxes and scales: SwiGLU's exp differs in the last bits
                torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=0, equal_nan=True)
                continue
            a, b = (t.contiguous().view(torch.uint8) for t in (a.cpu(), b))
            differ = (a != b).float().mean().item()
            assert differ < 0.01, f"turn {turn}: {differ:.1%} of a result's bytes differ"
    if device != "cpu":
        assert not torch._C._cuda_hasPrimaryContext(0), "cuda:0 has a context"
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
