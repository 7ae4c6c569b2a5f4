"""The FP8 ops as a model's author would write them in PyTorch and hand to ``torch.compile``.

E4M3, recipe "te". The bits are those of `jitquant.reference`; what is left out are its other
formats, layouts and edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.bench.plain import FLT_MAX, _norm, _over
from harness.bench.plain import quantize as quantize_nvfp4

TOP = 448.0
Results = tuple[Tensor, ...]


def _cast(v: Tensor, scale: Tensor) -> Tensor:
    return (v * scale).clamp(-TOP, TOP).to(torch.float8_e4m3fn)


def _quantize(v: Tensor, granularity: str) -> Results:
    a = v.abs().amax(dim=-1, keepdim=True) if granularity == "row" else v.abs().amax().view(1)
    usable = (a > 0) & (a < float("inf"))
    scale = torch.where(usable, _over(TOP, a).clamp(max=FLT_MAX), 1.0)
    return _cast(v, scale), _over(1.0, scale), a


def _quantize_group(v: Tensor, group_size: int = 128) -> Results:
    rows, cols = v.shape
    groups = v.view(rows, cols // group_size, group_size)
    factor = _over(TOP, groups.abs().amax(dim=-1).clamp(min=1e-10))
    return _cast(groups, factor.unsqueeze(-1)).view(rows, cols), _over(1.0, factor)


def cast(x: Tensor, scale: Tensor) -> Results:
    """With the scale given, (1,), and no amax."""
    return _cast(x.float(), scale), _over(1.0, scale)


def quantize(x: Tensor, granularity: str = "tensor") -> Results:
    """data, scale_inv, amax."""
    return _quantize(x.float(), granularity)


def grouped(x: Tensor, groups: int) -> Results:
    """As many tensors of the same size, one after the other."""
    v = x.float().view(groups, -1)
    a = v.abs().amax(dim=-1)
    usable = (a > 0) & (a < float("inf"))
    scale = torch.where(usable, _over(TOP, a).clamp(max=FLT_MAX), 1.0)
    return _cast(v, scale[:, None]).view(x.shape), _over(1.0, scale), a


def grouped_given(x: Tensor, scale: Tensor, groups: int) -> Results:
    """The same with the scales given."""
    v = x.float().view(groups, -1)
    return _cast(v, scale[:, None]).view(x.shape), _over(1.0, scale), v.abs().amax(dim=-1)


def grouped_gradient(grad: Tensor, x: Tensor, groups: int) -> Results:
    """Times the derivative of SiLU at x, of groups of as many rows; and the sums of the columns."""
    v = x.float()
    s = _over(1.0, 1.0 + torch.exp(-v))
    v = grad.float() * (s * (1.0 + v * (1.0 - s)))
    sums = v.double().view(groups, -1, x.shape[-1]).sum(dim=1).float()
    return *grouped(v, groups), sums


def grouped_nvfp4(x: Tensor, groups: int) -> Results:
    """The same in NVFP4, of whole blocks: codes, gsa and amax of each, scales of the blocks."""
    rows = x.view(groups, -1)
    codes, scales, gsa = quantize_nvfp4(rows, "row")
    return codes.view(-1), gsa, rows.float().abs().amax(dim=-1), scales.view(-1)


def group(x: Tensor) -> Results:
    """A scale for 128 neighbours of a row."""
    return _quantize_group(x.float())


def group_int8(x: Tensor) -> Results:
    """The same in INT8, rounded to the nearest."""
    rows, cols = x.shape
    groups = x.float().view(rows, cols // 128, 128)
    factor = _over(127.0, groups.abs().amax(dim=-1).clamp(min=1e-10))
    codes = (groups * factor.unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
    return codes.view(rows, cols), _over(1.0, factor)


def mxfp8(x: Tensor) -> Results:
    """An E8M0 scale, rounded up, for 32 neighbours of a row."""
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // 32, 32)
    bits = (blocks.abs().amax(dim=-1) / TOP).view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
    factor = ((254 - exponent) << 23).view(torch.float32)
    return _cast(blocks, factor.unsqueeze(-1)).view(rows, cols), exponent.to(torch.uint8)


def dequantize_group(data: Tensor, scale_inv: Tensor) -> Tensor:
    """Back to bf16."""
    rows, cols = data.shape
    groups = data.float().view(rows, scale_inv.shape[1], -1)
    return (groups * scale_inv.unsqueeze(-1)).view(rows, cols).bfloat16()


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Results:
    """RMSNorm, a scale for each row."""
    y, inv_rms = _norm(x.float(), weight, eps)
    return (*_quantize(y, "row"), inv_rms)


def rmsnorm_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Results:
    """The residual is added in place first."""
    residual.copy_(x.float() + residual.float())
    return rmsnorm(residual, weight, eps)


def rmsnorm_given(x: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6) -> Results:
    """RMSNorm, the scale given."""
    y, inv_rms = _norm(x.float(), weight, eps)
    return _cast(y, scale), _over(1.0, scale), inv_rms


def rmsnorm_group(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Results:
    """RMSNorm, a scale for 128 neighbours of a row."""
    y, inv_rms = _norm(x.float(), weight, eps)
    return (*_quantize_group(y), inv_rms)


def _silu_mul(fused: Tensor) -> Tensor:
    gate, up = fused.float().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


def silu_mul(fused: Tensor) -> Results:
    """silu(gate) * up, a scale for each row."""
    return _quantize(_silu_mul(fused), "row")


def silu_mul_given(fused: Tensor, scale: Tensor) -> Results:
    """silu(gate) * up, the scale given."""
    return _cast(_silu_mul(fused), scale), _over(1.0, scale)


def silu_mul_group(fused: Tensor) -> Results:
    """silu(gate) * up, a scale for 128 neighbours of a row."""
    return _quantize_group(_silu_mul(fused))
