"""The FP8 ops as a model's author would write them in PyTorch and hand to ``torch.compile``.

E4M3, recipe "te" where nothing else is said. The bits are those of `jitquant.reference`; what is
left out are its other formats and layouts, and rows that end within a group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def _quantize_per_token_group(v: Tensor, group_size: int = 128) -> Results:
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


def ragged(x: Tensor, segments: int) -> Results:
    """As many tensors of the same size, one after the other."""
    v = x.float().view(segments, -1)
    a = v.abs().amax(dim=-1)
    usable = (a > 0) & (a < float("inf"))
    scale = torch.where(usable, _over(TOP, a).clamp(max=FLT_MAX), 1.0)
    return _cast(v, scale[:, None]).view(x.shape), _over(1.0, scale), a


def ragged_given(x: Tensor, scale: Tensor, segments: int) -> Results:
    """The same with the scales given."""
    v = x.float().view(segments, -1)
    return _cast(v, scale[:, None]).view(x.shape), _over(1.0, scale), v.abs().amax(dim=-1)


def ragged_gradient(grad: Tensor, x: Tensor, segments: int) -> Results:
    """Times the derivative of SiLU at x, of segments of as many rows; and sums of columns."""
    v = x.float()
    s = _over(1.0, 1.0 + torch.exp(-v))
    v = grad.float() * (s * (1.0 + v * (1.0 - s)))
    sums = v.double().view(segments, -1, x.shape[-1]).sum(dim=1).float()
    return *ragged(v, segments), sums


def ragged_nvfp4(x: Tensor, segments: int) -> Results:
    """The same in NVFP4, of whole blocks: codes, gsa and amax of each, scales of the blocks."""
    rows = x.view(segments, -1)
    codes, scales, gsa = quantize_nvfp4(rows, "row")
    return codes.view(-1), gsa, rows.float().abs().amax(dim=-1), scales.view(-1)


def group(x: Tensor) -> Results:
    """A scale for 128 neighbors of a row."""
    return _quantize_per_token_group(x.float())


def group_16(x: Tensor) -> Results:
    """A scale for 16 neighbors of a row."""
    return _quantize_per_token_group(x.float(), 16)


def group_vllm(x: Tensor) -> Results:
    """A scale for 128 neighbors of a row, which they are divided by: recipe "vllm"."""
    rows, cols = x.shape
    groups = x.float().view(rows, cols // 128, 128)
    scale_inv = groups.abs().amax(dim=-1).clamp(min=1e-10) / x.new_full((), TOP).float()
    data = (groups / scale_inv.unsqueeze(-1)).clamp(-TOP, TOP).to(torch.float8_e4m3fn)
    return data.view(rows, cols), scale_inv


def _columns(scales: Tensor, align: int = 1) -> Tensor:
    """The scales of a group of all rows beside each other, these filled up to a multiple."""
    rows = scales.shape[0]
    return pad(scales.T, (0, -rows % align)).contiguous().T[:rows]


def group_tma(x: Tensor) -> Results:
    """A scale for 128 neighbors of a row, stored as DeepGEMM takes it."""
    data, scale_inv = _quantize_per_token_group(x.float())
    return data, _columns(scale_inv, 4)


def _exponent(scale_inv: Tensor) -> Tensor:
    """E8M0 of a scale, rounded up, as int32."""
    return ((scale_inv.view(torch.int32) + 0x7FFFFF) >> 23).clamp(0, 254)


def _decoder(exponent: Tensor) -> Tensor:
    """The reciprocal of a power of two."""
    return ((254 - exponent) << 23).view(torch.float32)


def group_packed(x: Tensor) -> Results:
    """A power of two for 128 neighbors of a row, four in an int32, as DeepGEMM takes it."""
    rows, cols = x.shape
    groups = x.float().view(rows, cols // 128, 128)
    factor = _over(TOP, groups.abs().amax(dim=-1).clamp(min=1e-10))
    exponent = _exponent(_over(1.0, factor))
    data = _cast(groups, _decoder(exponent).unsqueeze(-1)).view(rows, cols)
    e = pad(exponent, (0, -exponent.shape[1] % 4)).view(rows, -1, 4)
    packed = e[..., 0] | (e[..., 1] << 8) | (e[..., 2] << 16) | (e[..., 3] << 24)
    return data, _columns(packed, 4)


def group_both(x: Tensor) -> Results:
    """A scale for 128 neighbors of a row, and the same of the transpose; scales in columns."""
    rows = x.shape[0]
    data, scales = _quantize_per_token_group(x.float())
    # Zeros change no amax.
    data_t, scales_t = _quantize_per_token_group(pad(x.float().T, (0, -rows % 128)).contiguous())
    return data, _columns(scales), data_t[:, :rows].contiguous(), _columns(scales_t)


def block(w: Tensor) -> Results:
    """A scale for a block of 128 by 128."""
    rows, cols = w.shape
    v = pad(w.float(), (0, 0, 0, -rows % 128))
    tiles = v.view(v.shape[0] // 128, 128, cols // 128, 128)
    factor = _over(TOP, tiles.abs().amax(dim=(1, 3)).clamp(min=1e-10))
    data = _cast(tiles, factor[:, None, :, None]).view(v.shape)
    return data[:rows], _over(1.0, factor)


def block_both(w: Tensor) -> Results:
    """The same, and its transpose."""
    data, scales = block(w)
    return data, scales, data.T.contiguous(), scales.T.contiguous()


def row_int8(x: Tensor) -> Results:
    """INT8 by row, as vLLM has it."""
    v = x.float()
    a = v.abs().amax(dim=-1, keepdim=True)
    factor = torch.where(a > 0, _over(127.0, a), 1.0)
    codes = (v * factor).round().clamp(-128, 127).to(torch.int8)
    return codes, a / torch.full_like(a, 127.0), a


def group_int8(x: Tensor) -> Results:
    """The same in INT8, rounded to the nearest."""
    rows, cols = x.shape
    groups = x.float().view(rows, cols // 128, 128)
    factor = _over(127.0, groups.abs().amax(dim=-1).clamp(min=1e-10))
    codes = (groups * factor.unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8)
    return codes.view(rows, cols), _over(1.0, factor)


def mxfp8(x: Tensor) -> Results:
    """An E8M0 scale, rounded up, for 32 neighbors of a row."""
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // 32, 32)
    exponent = _exponent(blocks.abs().amax(dim=-1) / TOP)
    data = _cast(blocks, _decoder(exponent).unsqueeze(-1)).view(rows, cols)
    return data, exponent.to(torch.uint8)


def mxfp8_swizzled(x: Tensor) -> Results:
    """The same, the scales in tiles of 128 by 4 for cuBLASLt."""
    data, scales = mxfp8(x)
    rows, cols = scales.shape
    scales = pad(scales, (0, -cols % 4, 0, -rows % 128))
    tiles = scales.view(scales.shape[0] // 128, 4, 32, scales.shape[1] // 4, 4)
    return data, tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape)


def mxfp8_both(x: Tensor) -> Results:
    """The same in rows, and of the transpose."""
    rows = x.shape[0]
    data_t, scales_t = mxfp8(pad(x.T, (0, -rows % 32)).contiguous())
    return *mxfp8(x), data_t[:, :rows].contiguous(), scales_t


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


def rmsnorm_residual_given(
    x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float = 1e-6
) -> Results:
    """The residual is added in place first."""
    residual.copy_(x.float() + residual.float())
    return rmsnorm_given(residual, weight, scale, eps)


def rmsnorm_group(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Results:
    """RMSNorm, a scale for 128 neighbors of a row."""
    y, inv_rms = _norm(x.float(), weight, eps)
    return (*_quantize_per_token_group(y), inv_rms)


def rmsnorm_residual_group(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> Results:
    """The residual is added in place first."""
    residual.copy_(x.float() + residual.float())
    return rmsnorm_group(residual, weight, eps)


def _swiglu(fused: Tensor) -> Tensor:
    gate, up = fused.float().chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


def swiglu(fused: Tensor) -> Results:
    """silu(gate) * up, a scale for each row."""
    return _quantize(_swiglu(fused), "row")


def swiglu_given(fused: Tensor, scale: Tensor) -> Results:
    """silu(gate) * up, the scale given."""
    return _cast(_swiglu(fused), scale), _over(1.0, scale)


def swiglu_group(fused: Tensor) -> Results:
    """silu(gate) * up, a scale for 128 neighbors of a row."""
    return _quantize_per_token_group(_swiglu(fused))
