"""The ops as a model's author would write them in PyTorch and hand to ``torch.compile``.

The default recipe, linear scales, N a multiple of 16. The bits are those of `jitquant.reference`;
what is left out are its other layouts, recipes and edges.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

FLT_MAX = torch.finfo(torch.float32).max
DIVISOR = 2688.0
Parts = tuple[Tensor, Tensor, Tensor]


def _over(numerator: float, x: Tensor) -> Tensor:
    # A Python scalar over a tensor would be computed as a reciprocal and a product.
    return x.new_full((), numerator) / x


def _codes(y: Tensor) -> Tensor:
    a = y.abs()
    code = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
    code = code + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    code = code | (torch.signbit(y).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _encode(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = v.shape
    blocks = v.view(rows, cols // 16, 16)
    b = blocks.abs().amax(dim=-1)
    stored = (b * (s * (1.0 / 6.0))).clamp(max=448.0).to(torch.float8_e4m3fn)
    enc = _over(1.0, stored.float() * _over(1.0, s)).clamp(max=FLT_MAX)
    return _codes((blocks * enc.unsqueeze(-1)).view(rows, cols)), stored


def _quantize(v: Tensor, granularity: str) -> Parts:
    a = v.abs().amax(dim=-1, keepdim=True) if granularity == "row" else v.abs().amax().view(1, 1)
    s = _over(DIVISOR, a).clamp(max=FLT_MAX)
    s = torch.where((a == 0) | (s == 0), 1.0, s)
    codes, scales = _encode(v, s)
    return codes, scales, (a / a.new_full((), DIVISOR)).view(-1)


def quantize(x: Tensor, granularity: str = "tensor") -> Parts:
    """Codes (rows, N / 2) as uint8, scales (rows, N / 16), gsa."""
    return _quantize(x.float(), granularity)


def quantize_given(x: Tensor, gsa: Tensor) -> Parts:
    """With the gsa given, (1,)."""
    s = torch.where(gsa == 0, 1.0, _over(1.0, gsa).clamp(max=FLT_MAX))
    codes, scales = _encode(x.float(), s.view(1, 1))
    return codes, scales, gsa


def _runs(fused: Tensor, run: int) -> tuple[Tensor, Tensor]:
    rows, width = fused.shape
    pairs = fused.view(rows, width // (2 * run), 2, run)
    return pairs[:, :, 0].reshape(rows, width // 2), pairs[:, :, 1].reshape(rows, width // 2)


def swiglu(fused: Tensor, run: int = 8) -> Parts:
    """silu(gate) * up of interleaved runs, granularity tensor."""
    gate, up = _runs(fused, run)
    return _quantize(silu(gate.float()) * up.float(), "tensor")


def swiglu_given(fused: Tensor, gsa: Tensor, run: int = 8) -> Parts:
    """silu(gate) * up of interleaved runs, with the gsa given, (1,)."""
    gate, up = _runs(fused, run)
    return quantize_given(silu(gate.float()) * up.float(), gsa)


def select(fused: Tensor, run: int = 8) -> Parts:
    """The gate runs alone, granularity tensor."""
    return _quantize(_runs(fused, run)[0].float(), "tensor")


def select_given(fused: Tensor, gsa: Tensor, run: int = 8) -> Parts:
    """The gate runs alone, with a given gsa (1,)."""
    return quantize_given(_runs(fused, run)[0], gsa)


def _norm(v: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    inv_rms = _over(1.0, (v.square().mean(dim=-1, keepdim=True) + eps).sqrt())
    return v * inv_rms * weight.float(), inv_rms.view(-1)


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, ...]:
    """RMSNorm, granularity row."""
    y, inv_rms = _norm(x.float(), weight, eps)
    return (*_quantize(y, "row"), inv_rms)


def rmsnorm_residual(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, ...]:
    """The residual is added in place first."""
    residual.copy_(x.float() + residual.float())
    return rmsnorm(residual, weight, eps)


def mhc(x: Tensor, a: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, ...]:
    """The sum over the hyper-connections, RMSNorm, granularity row."""
    y, inv_rms = _norm((a.float().unsqueeze(-1) * x.float()).sum(dim=-2), weight, eps)
    return (*_quantize(y, "row"), inv_rms)


def dequantize(codes: Tensor, scales: Tensor, gsa: Tensor) -> Tensor:
    """bf16 values of uint8 codes."""
    code = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    e, m = ((code >> 1) & 3).float(), (code & 1).float()
    value = torch.where(e == 0, 0.5 * m, (1.0 + 0.5 * m) * torch.exp2(e - 1.0))
    value = torch.where((code & 8) != 0, -value, value)
    rows, cols = value.shape
    v = value.view(rows, cols // 16, 16) * scales.float().unsqueeze(-1) * gsa.view(-1, 1, 1)
    return v.view(rows, cols).to(torch.bfloat16)
