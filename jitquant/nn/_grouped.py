"""`grouped_linear`: the linear layers of experts with quantized operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, grouped_mm

from jitquant.formats import CODES_PER_BYTE, FP4_DTYPE, NVFP4_BLOCK, ceil_div
from jitquant.nn._linear import check_dtype
from jitquant.nn._matmul import major, register
from jitquant.numerics.layout import unswizzle_128x4
from jitquant.ops import _checks, _checks_memory
from jitquant.ops.experts import GROUPED_LINEAR, MOST_EXPERTS
from jitquant.ops.nvfp4_dequantize import dequantize_nvfp4
from jitquant.tensors.fp8 import QuantizedTensor
from jitquant.tensors.nvfp4 import NVFP4Tensor

Quantized = TypeVar("Quantized", NVFP4Tensor, QuantizedTensor)

_E4M3 = torch.float8_e4m3fn
_ALIGNED = 16  # bytes: of the rows that a grouped GEMM reads


def has_grouped_mm(device: torch.device) -> bool:
    """Whether the grouped GEMM of bf16 there is one kernel: sm_90 and sm_100.

    Elsewhere PyTorch loops over the experts, and has the CPU wait for their sizes.
    """
    return major(device) in (9, 10)


def has_scaled_grouped_mm(device: torch.device) -> bool:
    """Whether the grouped GEMM of E4M3 with a scale for each row is there: sm_90."""
    return major(device) == 9


def _ends(offsets: Tensor, rows: int) -> Tensor:
    """Offsets that no kernel can go wrong with: what is on a GPU is not read to be checked."""
    return offsets.clamp(0, rows).cummax(0).values.to(torch.int32)


def _expert_of_each(ends: Tensor, rows: int) -> Tensor:
    """The expert of each row; the number of experts for rows past the last one's."""
    order = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return torch.bucketize(order, ends, right=True)


def _looped(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """(rows, K) by (experts, N, K), each expert's rows with its matrix, in fp32 (rows, N)."""
    begin, rows = 0, a.shape[0]
    product = torch.zeros(rows, b.shape[1], dtype=torch.float32, device=a.device)
    for expert, end in enumerate(offsets.tolist()):
        if not begin <= end <= rows:
            raise ValueError(
                f"offsets[{expert}]: expected ascending ends of the experts' rows, up to the "
                f"{rows} rows of q, got {end} after {begin}"
            )
        product[begin:end] = a[begin:end].float() @ b[expert].float().t()
        begin = end
    return product


def _grouped_bf16(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """As `_looped`, in one kernel, rounded to bf16; rows past the last expert's are undefined."""
    return grouped_mm(a, b.transpose(-2, -1), offs=ends)


def _scaled(product: Tensor, of_rows: Tensor, of_weights: Tensor, expert: Tensor) -> Tensor:
    """A product times the scales of its rows (rows, 1) and of its experts (experts, N), in fp32; in
    place if the product is fp32."""
    if of_weights.numel() > 1:
        of_weights = of_weights[expert.clamp(max=of_weights.shape[0] - 1)]
    return product.float().mul_(of_rows).mul_(of_weights)


def _reads_as_stored(device: torch.device, rows: int, experts: int) -> bool:
    """Whether the packed weights are multiplied directly: each 8 rows of an expert read them.

    With more rows than 8 for each expert, or more than one launch takes anywhere, they are
    dequantized.
    """
    return rows <= min(8 * experts, 1024) and experts <= MOST_EXPERTS and major(device) >= 8


def _has_tiles(device: torch.device, k: int, experts: int) -> bool:
    """Whether the kernel decodes a packed weight once for many rows: on compute capability 9.0."""
    return major(device) == 9 and k % 64 == 0 and experts <= MOST_EXPERTS


def _tiled_product(
    x: NVFP4Tensor,
    x_gsa: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    *,
    offsets: Tensor,
    dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """The product with packed weights of many rows, which the kernel takes decoded.

    Args:
        x: with a gsa of one, so that its values are exact in bf16 and fp16.
        x_gsa: (1,) or one for each row.
        weights: codes, scales and gsa.
        offsets, dtype, out: as for `grouped_linear`.
    """
    codes, scales, gsa = weights
    values = dequantize_nvfp4(x, torch.float16 if dtype == torch.float16 else torch.bfloat16)
    has_one = x_gsa.numel() == 1
    arguments = {
        "x": values,
        "w_fp4": codes,
        "w_sf": scales,
        "w_gsa": gsa * x_gsa if has_one else gsa,
        "offsets": offsets,
        "x_sf": None,
        "x_gsa": None,
        "dtype": dtype if has_one else torch.float32,
    }
    product = GROUPED_LINEAR.one_tensor(
        arguments, out if has_one or dtype == torch.float32 else None
    )
    if has_one:
        return product
    of_rows = x_gsa.view(-1, 1)
    if dtype == torch.float32:
        return product.mul_(of_rows)
    y = torch.empty_like(product, dtype=dtype) if out is None else out
    return torch.mul(product, of_rows, out=y)


def _nvfp4_grouped_mm(
    x_fp4: Tensor,
    x_sf: Tensor,
    x_gsa: Tensor,
    x_layout: str,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    w_layout: str,
    offsets: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    rows, (experts, n, packed) = x_fp4.shape[0], w_fp4.shape
    if x_layout == w_layout == "linear" and _reads_as_stored(x_fp4.device, rows, experts):
        arguments = {
            "x": x_fp4,
            "w_fp4": w_fp4,
            "w_sf": w_sf,
            "w_gsa": w_gsa,
            "offsets": offsets,
            "x_sf": x_sf,
            "x_gsa": x_gsa,
            "dtype": dtype,
        }
        return GROUPED_LINEAR.one_tensor(arguments, out)
    _check_memory(out, (x_fp4, x_sf, x_gsa), (w_fp4, w_sf, w_gsa), offsets)
    # Codes times block scales are exact in bf16; the gsas follow after the sum.
    one = torch.ones(1, dtype=torch.float32, device=x_fp4.device)
    x = NVFP4Tensor(x_fp4.view(FP4_DTYPE), x_sf, one, scale_layout=x_layout)
    if w_layout == "linear" and _has_tiles(x_fp4.device, packed * CODES_PER_BYTE, experts):
        weights = w_fp4, w_sf, w_gsa
        return _tiled_product(x, x_gsa, weights, offsets=offsets, dtype=dtype, out=out)
    w = NVFP4Tensor(w_fp4.view(FP4_DTYPE), w_sf, one, scale_layout=w_layout)
    a, b = (dequantize_nvfp4(q, torch.bfloat16) for q in (x, w))
    assert b.shape == (experts, n, packed * CODES_PER_BYTE)
    if has_grouped_mm(a.device):
        ends = _ends(offsets, rows)
        product = _grouped_bf16(a, b, ends)
    else:
        ends = offsets
        product = _looped(a, b, offsets).to(torch.bfloat16)
    expert = _expert_of_each(ends, rows)
    w_scales = w_gsa.view(experts, n) if w_gsa.numel() > 1 else w_gsa.view(1, 1)
    y = _scaled(product, x_gsa.view(-1, 1), w_scales, expert)
    return _given(y.masked_fill_((expert == experts)[:, None], 0), dtype, out)


def _fp8_grouped_mm(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    _check_memory(out, (x, x_scales), (w, w_scales), offsets)
    rows, (experts, n, k) = x.shape[0], w.shape
    x, w = x.contiguous(), w.contiguous()  # rows may be strided
    if not has_grouped_mm(x.device):
        expert = _expert_of_each(offsets, rows)
        product = _looped(x, w, offsets)
        y = _scaled(product, x_scales, w_scales, expert)
    else:
        ends = _ends(offsets, rows)
        expert = _expert_of_each(ends, rows)
        if k % _ALIGNED or n % _ALIGNED:
            x, w = _padded(x, 0, k), _padded(w, n, k)
            w_scales = functional.pad(w_scales, (0, -n % _ALIGNED))
        if has_scaled_grouped_mm(x.device) and x.dtype == w.dtype == _E4M3:
            y = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
                *(x, w.transpose(-2, -1)),
                scale_a=x_scales.view(-1),
                scale_recipe_a=ScalingType.RowWise,
                scale_b=w_scales,
                scale_recipe_b=ScalingType.RowWise,
                offs=ends,
                output_dtype=torch.bfloat16,
            )
        else:
            product = _grouped_bf16(x.to(torch.bfloat16), w.to(torch.bfloat16), ends)
            y = _scaled(product, x_scales, w_scales, expert)
        y = y[:, :n]
    y.masked_fill_((expert == experts)[:, None], 0)
    if dtype != torch.bfloat16:
        y = y.to(torch.bfloat16)  # as the kernels round it
    return _given(y, dtype, out)


def _check_memory(
    out: Tensor | None, q: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor
) -> None:
    """A buffer shares no memory with the parts of the operands; the stored product checks it."""
    if out is not None:
        read = [*(("q", t) for t in q), *(("weights", t) for t in weights), ("offsets", offsets)]
        _checks_memory.own_memory([("out", out)], read)


def _given(y: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A product in ``dtype``, or in the buffer for it."""
    return y.to(dtype).contiguous() if out is None else out.copy_(y)


def _padded(t: Tensor, n: int, k: int) -> Tensor:
    """With zeros up to a multiple of 16 in K, and in N where it is given."""
    more = (0, -k % _ALIGNED, 0, -n % _ALIGNED)
    return functional.pad(t.view(torch.uint8), more).view(t.dtype)


def _meta(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=dtype)


def _without_autocast(implementation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Autocast stays on within an op, and would round what is in fp32."""

    @functools.wraps(implementation)
    def op(x: Tensor, *rest: Any) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return implementation(x, *rest)

    return op


def _registered(
    name: str, operands: str, implementation: Callable[..., Tensor], meta: Callable[..., Tensor]
) -> tuple[Any, Any, Any]:
    """Operands in order, from keywords; the op of a product; and the one that writes to a buffer.

    The dispatcher takes longer for keywords.
    """
    op = _without_autocast(implementation)

    def into(*arguments: Any) -> None:
        *given, out = arguments
        op(*given, out.dtype, out)

    names = [a.name for a in torch._C.parse_schema(f"{name}({operands}) -> ()").arguments]

    def in_order(**operands: Any) -> tuple[Any, ...]:
        return tuple(operands[name] for name in names)

    return (
        in_order,
        register(f"{name}({operands}, ScalarType dtype) -> Tensor", op, meta),
        register(f"{name}_out({operands}, Tensor(a!) out) -> ()", into, lambda *_: None),
    )


_NVFP4 = _registered(
    "nvfp4_grouped_mm",
    "Tensor x_fp4, Tensor x_sf, Tensor x_gsa, str x_layout, Tensor w_fp4, Tensor w_sf,"
    " Tensor w_gsa, str w_layout, Tensor offsets",
    _nvfp4_grouped_mm,
    lambda x_fp4, x_sf, x_gsa, x_layout, w_fp4, *rest: _meta(x_fp4, w_fp4, rest[-1]),
)
_FP8 = _registered(
    "fp8_grouped_mm",
    "Tensor x, Tensor x_scales, Tensor w, Tensor w_scales, Tensor offsets",
    _fp8_grouped_mm,
    lambda x, x_scales, w, *rest: _meta(x, w, rest[-1]),
)


def grouped_linear(
    q: Quantized,
    weights: Quantized,
    offsets: Tensor,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies the rows of each expert by that expert's weight; inference only.

    Rows of ``q`` are sorted by expert: those of expert e are ``offsets[e - 1]`` to ``offsets[e]``
    (from 0 for the first one), and ``y[rows of e] = q[rows of e] @ weights[e].T``. An expert may
    have no rows. Results for rows past the last offset are zero.

    - NVFP4 with linear scales and up to 8 rows per expert on average (1024 in total), on a GPU with
      compute capability 8.0 or newer: `jitquant.nvfp4_grouped_linear`, which reads only the weights
      of experts that have rows, as they are stored, and rounds once. Nothing but the result is
      allocated, and with ``out`` nothing.
    - More rows, on compute capability 9.0 with K a multiple of 64 and linear scales of the weights:
      the same function, which decodes a weight for every 64 to 256 rows. One more launch decodes
      ``q``, exactly, to 2 bytes an element. If ``q`` has a gsa for each row, the product is in
      fp32 before it is multiplied by them; with one gsa, ``out`` is written directly.
    - Other NVFP4: ``torch.nn.functional.grouped_mm`` of codes times block scales, which are exact
      in bf16. The product, rounded to bf16, is multiplied by the gsas in fp32. The dequantized
      weights of all experts take memory during the call.
    - FP8 with a scale for each row of both: ``torch.nn.functional.scaled_grouped_mm`` on sm_90, and
      ``grouped_mm`` of the codes on sm_100; in bf16. PyTorch's product has no ``out=``: it is
      copied to ``out``.

    These do not synchronize, and can be captured. Elsewhere, including the CPU, the same operands
    are multiplied expert by expert with fp32 sums and the same rounding, and the CPU reads how
    many rows each has.

    Args:
        q: (T, K), rows sorted by expert: NVFP4 of any layout and granularity, or
            ``quantize_fp8(x, granularity="row")``.
        weights: (E, N, K) of the same format: ``quantize_nvfp4`` or ``quantize_fp8(...,
            granularity="row")`` of a stack, or `stack_experts` of quantized weights.
        offsets: int32 or int64 (E,) on q's device: where the rows of each expert end; or (E + 1,)
            with a leading 0, as `jitquant.quantize_ragged` takes them. On a GPU with a grouped GEMM
            they are not checked, but made non-decreasing and clamped to T. The leading 0 is
            checked on the CPU, and on a GPU in `jitquant.testing.checked`.
        dtype: of the result: bfloat16, float16 or float32; default that of ``out``, or bfloat16.
        out: contiguous (T, N) to write to, in memory that no other argument has.

    Returns:
        (T, N), without gradient, or ``out``.

    Raises:
        TypeError, ValueError: an argument is invalid.
        RuntimeError: a part of ``q`` or ``weights`` requires grad.
    """
    for name, operand in (("q", q), ("weights", weights)):
        _check_operand(name, operand)
    if type(q) is not type(weights):
        raise TypeError(
            f"q and weights: expected both in NVFP4 or both in FP8, got {type(q).__name__} and "
            f"{type(weights).__name__}"
        )
    if len(q.shape) != 2 or len(weights.shape) != 3 or q.shape[1] != weights.shape[2]:
        raise ValueError(
            f"q and weights: expected shapes (T, K) and (E, N, K), got {tuple(q.shape)} and "
            f"{tuple(weights.shape)}. For a list of weights call stack_experts"
        )
    offsets = _checks.seen_as_tensor(offsets, "offsets")
    offsets = _checks.ends_of(offsets, weights.shape[0])
    _check_offsets(offsets, q.device)
    if weights.device != q.device:
        raise ValueError(
            f"q and weights: expected tensors on one device, got {q.device} and {weights.device}. "
            "Move one with .to(device)"
        )
    if out is not None:
        _checks.tensor_out(out)
    if dtype is None:
        dtype = torch.bfloat16 if out is None else out.dtype
    check_dtype(dtype)
    shape = (q.shape[0], weights.shape[1])
    if out is not None:
        _checks.out_tensor(out, "out", shape, dtype, q.device)
    if q.shape[0] == 0:
        return torch.empty(shape, dtype=dtype, device=q.device) if out is None else out
    if isinstance(q, NVFP4Tensor):
        args, new, into = _NVFP4
        operands = args(
            x_fp4=q.x_fp4_bytes,
            x_sf=q.x_sf,
            x_gsa=q.gsa,
            x_layout=q.scale_layout,
            w_fp4=weights.x_fp4_bytes,
            w_sf=weights.x_sf,
            w_gsa=weights.gsa,
            w_layout=weights.scale_layout,
            offsets=offsets,
        )
    else:
        args, new, into = _FP8
        operands = args(
            x=q.data,
            x_scales=q.scale_inv,
            w=weights.data,
            w_scales=weights.scale_inv.squeeze(-1),
            offsets=offsets,
        )
    if out is None:
        result: Tensor = new(*operands, dtype)
        return result
    into(*operands, out)
    return out


def _check_operand(name: str, operand: object) -> None:
    if isinstance(operand, NVFP4Tensor):
        if operand.dim != -1:
            raise ValueError(f"{name}.dim: expected -1 (packed along K), got {operand.dim}")
        floats: tuple[Tensor | None, ...] = (operand.gsa,)
    elif isinstance(operand, QuantizedTensor):
        if operand.format != "fp8_row":
            raise ValueError(
                f"{name}.format: expected 'fp8_row', got {operand.format!r}. quantize_fp8(..., "
                "granularity='row') returns it"
            )
        floats = (operand.stored_scales,)
    else:
        raise TypeError(
            f"{name}: expected an NVFP4Tensor or a QuantizedTensor, got {type(operand).__name__}. "
            "quantize_nvfp4 and quantize_fp8 make one of a tensor, stack_experts one of a list of "
            "them"
        )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats):
        raise RuntimeError(
            f"the scales of {name} require grad, and grouped_linear has no gradient. Use "
            "torch.no_grad() for inference"
        )


def _check_offsets(offsets: object, device: torch.device) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64):
        given = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"offsets: expected a tensor of int32 or int64, got {given}")
    if offsets.device != device:
        raise ValueError(
            f"offsets: expected a tensor on {device}, as q is, got one on {offsets.device}"
        )


def stack_experts(weights: Sequence[Quantized]) -> Quantized:
    """Stacks E quantized weights (N, K) to one (E, N, K) for `grouped_linear`. Call it once.

    Args:
        weights: with the same shape and format: NVFP4 packed along K, or FP8 with a scale for each
            row.

    Returns:
        A copy. In NVFP4 its scales are linear, and each row has the gsa of its weight, so the
        values do not change.

    Raises:
        TypeError, ValueError: ``weights`` is empty, has different formats or shapes, or is invalid.
    """
    if len(weights) == 0:
        raise ValueError("weights: expected one or more quantized weights, got none")
    for i, weight in enumerate(weights):
        name = f"weights[{i}]"
        _check_operand(name, weight)
        if type(weight) is not type(weights[0]):
            raise TypeError(
                f"{name}: expected {type(weights[0]).__name__}, as weights[0] is, got "
                f"{type(weight).__name__}"
            )
        if len(weight.shape) != 2 or weight.shape != weights[0].shape:
            raise ValueError(
                f"{name}: expected shape (N, K), the same as weights[0] "
                f"({tuple(weights[0].shape)}), got shape {tuple(weight.shape)}"
            )
    parts: Any = weights
    stacked: Quantized = (
        _stacked_fp8(parts) if isinstance(parts[0], QuantizedTensor) else _stacked_nvfp4(parts)
    )
    return stacked


def _stacked_fp8(weights: Sequence[QuantizedTensor]) -> Any:
    if any(w.dtype != weights[0].dtype for w in weights):
        raise TypeError("weights: expected one dtype, got several")
    return replace(
        weights[0],
        data=_stacked([w.data for w in weights]),
        stored_scales=torch.stack([w.scale_inv for w in weights]),
        amax=None,
        inv_rms=None,
    )


def _stacked_nvfp4(weights: Sequence[NVFP4Tensor]) -> Any:
    rows, cols = weights[0].shape
    blocks = ceil_div(cols, NVFP4_BLOCK)
    linear = [
        w.x_sf if w.scale_layout == "linear" else unswizzle_128x4(w.x_sf, rows, blocks)
        for w in weights
    ]
    return replace(
        weights[0],
        x_fp4=_stacked([w.x_fp4 for w in weights]),
        x_sf=_stacked(linear),
        gsa=torch.cat([w.gsa.expand(rows) for w in weights]),
        inv_rms=None,
        scale_layout="linear",
        granularity="row",
    )


def _stacked(tensors: list[Tensor]) -> Tensor:
    # As bytes: PyTorch lacks copy kernels for float4_e2m1fn_x2.
    return torch.stack([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)
