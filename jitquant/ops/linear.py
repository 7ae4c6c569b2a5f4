"""Products with a weight in NVFP4: the op and the public function."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jitquant.formats import CODES_PER_BYTE, COMPUTES, NVFP4_BLOCK, Compute, one_of
from jitquant.numerics import linear as numerics
from jitquant.ops import _checks
from jitquant.ops.fp8 import quantize_fp8
from jitquant.ops.parts import PARTS, SEGMENT, Part, in_tiles
from jitquant.ops.schema import FP32, INPUT, OUTPUT, Arguments, Op, Plan, Result, by_name, fp32
from jitquant.tensors import NVFP4Tensor, QuantizedTensor

__all__ = ["nvfp4_linear"]


def _evenly_strided(x: Tensor) -> bool:
    """Whether the rows are at one distance from each other."""
    pairs = [(n, s) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(pairs))


def _bias(bias: Tensor, n: int, x: Tensor) -> None:
    _checks.same_device(bias, "bias", x, "x")
    if bias.shape != (n,) or not bias.is_contiguous():
        raise ValueError(
            f"bias: expected shape ({n},), contiguous, one element for each row of the weight, got "
            f"shape {_checks.shape_text(bias)} and strides {tuple(bias.stride())}"
        )


def _weight(w_fp4: Tensor, w_sf: Tensor, w_gsa: Tensor) -> None:
    """Checks a weight."""
    _checks.nvfp4_operand(w_fp4, w_sf, "w_fp4", "w_sf")
    if w_fp4.dim() != 2:
        raise ValueError(f"w_fp4: expected shape (N, P), got shape {_checks.shape_text(w_fp4)}")
    _checks.gsa_of_tensor(w_gsa, w_fp4, "w_fp4", "w_gsa")


def _epilogue(
    x: Tensor, n: int, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype
) -> None:
    """Checks what is added to y (..., N) of ``dtype``."""
    if bias is not None:
        _bias(bias, n, x)
    if residual is None:
        return
    _checks.same_device(residual, "residual", x, "x")
    shape = (*x.shape[:-1], n)
    if residual.dtype != dtype or residual.shape != shape or not residual.is_contiguous():
        raise ValueError(
            f"residual: expected {dtype} of shape {shape}, contiguous, got {residual.dtype} of "
            f"shape {_checks.shape_text(residual)} and strides {tuple(residual.stride())}"
        )


def _one_stride(x: Tensor) -> None:
    """Checks that the rows of x are at one distance from each other."""
    if x.numel() > 0 and not _evenly_strided(x):
        raise ValueError(
            f"x: expected rows at one stride, got shape {_checks.shape_text(x)} and strides "
            f"{tuple(x.stride())}. Call x.contiguous() first"
        )


def _values(x: Tensor) -> None:
    """Checks an x that is not quantized."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"x: expected bfloat16 or float16, got {x.dtype}. Convert it with .to(), or quantize it"
        )
    _checks.input_tensor(x, "x")
    _one_stride(x)


def _columns(own: int, w_fp4: Tensor, *, whole: bool = False) -> None:
    """Checks the columns of x."""
    cols = CODES_PER_BYTE * w_fp4.shape[1]
    if not cols - NVFP4_BLOCK < own <= cols or (whole and own != cols):
        raise ValueError(
            f"x: expected {cols - NVFP4_BLOCK + 1} to {cols} columns for w_fp4 of shape "
            f"{_checks.shape_text(w_fp4)}, got {own}"
        )


def _plan(
    x: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    x_sf: Tensor | None,
    x_gsa: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype | None,
) -> Plan:
    _weight(w_fp4, w_sf, w_gsa)
    _checks.same_device(x, "x", w_fp4, "w_fp4")
    if x_sf is None:
        _values(x)
        _columns(x.shape[-1], w_fp4)
    else:
        _checks.nvfp4_operand(x, x_sf, "x", "x_sf")
        if x_gsa is None:
            raise ValueError("x_gsa: expected the gsa of x beside x_sf, got None")
        _columns(CODES_PER_BYTE * x.shape[-1], w_fp4, whole=True)
    if x_gsa is not None:
        _checks.gsa_tensor(x_gsa, _checks.row_count(x.shape[:-1]), x, "x", "x_gsa")
    own = x.dtype if x_sf is None else torch.bfloat16
    n, to = w_fp4.shape[0], own if dtype is None else dtype
    _epilogue(x, n, bias, residual, to)
    return Plan(x.device, (Result((*x.shape[:-1], n), to),))


def _plan_refold(w_fp4: Tensor, w_sf: Tensor, w_gsa: Tensor) -> Plan:
    _weight(w_fp4, w_sf, w_gsa)
    n, cols = w_fp4.shape[0], CODES_PER_BYTE * w_fp4.shape[1]
    return Plan(w_fp4.device, (Result((n, cols), torch.float8_e4m3fn), fp32(n)))


def _plan_fp8(
    x: Tensor,
    x_scale_inv: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype | None,
) -> Plan:
    _weight(w_fp4, w_sf, w_gsa)
    _checks.same_device(x, "x", w_fp4, "w_fp4")
    if x.dtype != torch.float8_e4m3fn:
        raise TypeError(f"x: expected float8_e4m3fn, got {x.dtype}. quantize_fp8 returns it")
    _checks.strided(x, "x")
    if x.dim() == 0 or (x.stride(-1) != 1 and x.shape[-1] != 1):
        raise ValueError(
            "x: expected shape (..., K) with a contiguous last dimension, got shape "
            f"{_checks.shape_text(x)} and strides {tuple(x.stride())}. Call x.contiguous() first"
        )
    _one_stride(x)
    _columns(x.shape[-1], w_fp4)
    rows = _checks.row_count(x.shape[:-1])
    _checks.same_device(x_scale_inv, "x_scale_inv", x, "x")
    fits = x_scale_inv.numel() in (1, rows) and x_scale_inv.is_contiguous()
    if x_scale_inv.dtype != torch.float32 or not fits:
        raise ValueError(
            f"x_scale_inv: expected 1 or {rows} contiguous elements in float32, got "
            f"{x_scale_inv.dtype} of shape {_checks.shape_text(x_scale_inv)}. quantize_fp8 returns "
            "them with granularity 'tensor' or 'row'"
        )
    n, to = w_fp4.shape[0], torch.bfloat16 if dtype is None else dtype
    _epilogue(x, n, bias, residual, to)
    return Plan(x.device, (Result((*x.shape[:-1], n), to),))


#: Bounds of the rows of x that have kernels of their own (linear_tiles.cuh). Up to 16, the kernels
#: are those for results in any dtype, and none are tiles.
_ROWS, _FEW_ROWS = (2, 16, 32, 64, 96, 128), 16


_CODES = Part("codes", ("-DJITQUANT_LINEAR_CODES",))
#: By the result's dtype, as the kernels of more than few rows are.
_RESULTS = {
    dtype: Part(f"to_{of.name}", (of.flags[0].replace("_DTYPE", "_LINEAR_OUT"),))
    for dtype, of in PARTS.items()
}


def _part(
    x: Tensor, w_fp4: Tensor, x_sf: Tensor | None = None, dtype: torch.dtype | None = None
) -> Part | None:
    of = PARTS.get(x.dtype) if x_sf is None else _CODES
    if dtype is None:
        dtype = x.dtype if x_sf is None else torch.bfloat16
    # A part is asked for before anything is checked.
    to = _RESULTS.get(dtype) if isinstance(dtype, torch.dtype) else None
    if of is None or to is None:
        return None
    rows, cols = x.shape[:-1].numel(), CODES_PER_BYTE * w_fp4.shape[-1:].numel()
    most = next((n for n in _ROWS if rows <= n), 0)
    tiled = rows > _FEW_ROWS and in_tiles(x, cols)
    return _of_rows(of, to, most, tiled, not tiled and cols % SEGMENT == 0)


@functools.cache  # each call asks
def _of_rows(of: Part, to: Part, most: int, tiled: bool = False, aligned: bool = False) -> Part:
    """What products of up to ``most`` rows need; 0: of more than 128."""
    if tiled:
        return _of_rows(of, to, most).narrowed("in_tiles", "-DJITQUANT_LINEAR_TILES")
    if aligned:
        return _of_rows(of, to, most).aligned
    name, flag = f"{most or 'many'}_rows", f"-DJITQUANT_LINEAR_ROWS={most}"
    if 0 < most < _FEW_ROWS:
        return of.narrowed(name, flag)._replace(of=_of_rows(of, to, _FEW_ROWS))
    if most == _FEW_ROWS:
        return of.narrowed(name, flag).apart()
    # All of a dtype of x would be for results in other dtypes too, which cost the most.
    return of.narrowed(f"{name}_{to.name}", flag, *to.flags).apart()


def takes_fp8(device: torch.device, n: int, cols: int) -> bool:
    """Whether PyTorch multiplies FP8 matrices of that shape with a scale for each row."""
    if device.type != "cuda":
        return True
    return n % 16 == 0 and cols % 16 == 0 and torch.cuda.get_device_capability(device) >= (8, 9)


def _compose_fp8(
    x: Tensor,
    x_scale_inv: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype | None,
    buffers: Sequence[Tensor] | None,
) -> tuple[Tensor]:
    """A launch refolds the weight to E4M3, then ``_scaled_mm``; for a residual or a result in
    another dtype than bfloat16 there is one more launch.
    """
    n, k = w_fp4.shape[0], x.shape[-1]
    if not takes_fp8(x.device, n, k):
        raise RuntimeError(
            "compute: expected 'exact' for this device and shape, got 'fp8'. FP8 products need "
            "compute capability 8.9 or newer, and N and K that are multiples of 16"
        )
    dtype = torch.bfloat16 if dtype is None else dtype
    shape = (*x.shape[:-1], n)
    out = None if buffers is None else buffers[0]
    rows = x.reshape(-1, k).contiguous()
    if rows.shape[0] == 0:
        return (torch.empty(shape, dtype=dtype, device=x.device) if out is None else out,)
    data, scale_inv = REFOLD.made({"w_fp4": w_fp4, "w_sf": w_sf, "w_gsa": w_gsa})
    scales = x_scale_inv.reshape(-1, 1).expand(rows.shape[0], 1).contiguous()
    operands = rows, data.t(), scales, scale_inv.view(1, n)
    more: dict[str, Any] = {
        "bias": None if bias is None else bias.bfloat16(),
        "out_dtype": torch.bfloat16,
    }
    if out is not None and residual is None and dtype == torch.bfloat16:
        torch.ops.aten._scaled_mm.out(*operands, **more, out=out.view(-1, n))
        return (out,)
    product = torch.ops.aten._scaled_mm(*operands, **more).view(shape).to(dtype)
    if residual is not None:
        return (torch.add(residual, product, out=out),)
    return (product if out is None else out.copy_(product),)


LINEAR = Op(
    "nvfp4_linear",
    ["y"],
    module="nvfp4_linear",
    plan=_plan,
    reference=numerics.nvfp4_linear,
    accepts={"w_gsa": FP32, "x_gsa": FP32, "bias": INPUT, "dtype": OUTPUT},
    part=_part,
)
REFOLD = Op(
    "nvfp4_refold",
    ["data", "scale_inv"],
    module="nvfp4_refold",
    plan=_plan_refold,
    reference=numerics.nvfp4_refold,
    accepts={"w_gsa": FP32},
)


class Composite(Op):
    """An op without a kernel of its own: on CUDA it calls other ops, all with plain tensors.

    Its module is the one with the kernels of these ops. Everything else is as of any op.
    """

    def __init__(
        self,
        name: str,
        results: Sequence[str],
        *,
        composition: Callable[..., tuple[Tensor, ...]],
        **rest: Any,
    ) -> None:
        """Registers it.

        Args:
            name, results: see `Op`.
            composition: the results on CUDA, of those arguments that it takes by name, and in
                ``buffers`` if that is not None.
            rest: what an `Op` takes beside.
        """
        super().__init__(name, results, **rest)
        self._compose = by_name(composition, [*self.names, "buffers"])

    def part(self, arguments: Arguments) -> Part | None:
        """None: the whole module."""
        return None

    def _cuda(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._named(args, kwargs)
        self._checked(arguments)
        with torch.no_grad():
            return self._returned(self._compose({**arguments, "buffers": None}))

    def _cuda_out(self, *args: Any, **kwargs: Any) -> None:
        buffers, arguments = self._buffers(kwargs), self._named(args, kwargs)
        self._plan_out(buffers, arguments)
        self._check_memory(arguments, buffers)
        with torch.no_grad():
            self._compose({**arguments, "buffers": buffers})


LINEAR_FP8 = Composite(
    "nvfp4_linear_fp8",
    ["y"],
    module="nvfp4_refold",
    plan=_plan_fp8,
    reference=numerics.nvfp4_linear_fp8,
    composition=_compose_fp8,
    accepts={"w_gsa": FP32, "bias": INPUT, "dtype": OUTPUT},
)

OPS: tuple[Op, ...] = (LINEAR, REFOLD, LINEAR_FP8)
"""Every product."""


def nvfp4_linear(
    x: Tensor | NVFP4Tensor | QuantizedTensor,
    weight: NVFP4Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    compute: Compute = "exact",
    out: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias + residual`` with an NVFP4 weight, which is read as it is stored.

    With ``compute="exact"`` every product is exact: a code times its block scale is a bf16 number.
    Sums are in fp32, in an order that depends on K, on the device and on how many rows there are
    (1 to 2, 3 to 8, 9 to 16; above, on the shape of the tiles), so that a call gives the same bits
    every time. Then come the gsas, the bias and the residual, each rounded once to fp32, and one
    rounding to the result's dtype.

    A GPU (compute capability 8.0 and newer) reads the weight as it is stored, in one launch for up
    to 16 rows. More rows are multiplied on the tensor cores on compute capability 9.0, where K is a
    multiple of 64 and rows of x start on multiples of 16 bytes: in one launch, or two if tiles of
    one shape would keep only some multiprocessors busy at the end. One more decodes an x in NVFP4
    to bf16 first, and for large weights it puts up to some hundred rows of any x in the order in
    which the weight is decoded. Otherwise there is a launch for each 16 rows: from about 64 rows
    on, dequantizing the weight once is faster, and `jitquant.nn.NVFP4Linear` does that.

    Nothing is allocated beside the result, except ``2 * rows * K`` bytes if x is decoded or put in
    order, and the weight in FP8 with ``compute="fp8"``, ``N * (K + 4)`` bytes. They come from
    torch's allocator and are free again, for work on this stream, when the call returns.

    With ``compute="fp8"`` both operands are FP8, at up to twice the tensor cores' rate, which is
    for some hundred rows and more. Codes times block scales are rounded to E4M3 with a power of two
    for each row of the weight, by a launch before the product: between calls, nothing but the NVFP4
    weight is in memory. This loses 0.2 dB of the weight's SQNR (`jitquant.nn.report` says how much
    for a layer: format "nvfp4_fp8"). An x that is not quantized is, to E4M3 with a scale for each
    row, by one more launch. ``torch._scaled_mm`` multiplies: sums are in fp32, the bias is rounded
    to bf16, the product with it too, and a residual or another dtype comes after that, by one more
    launch. On CUDA this needs compute capability 8.9 and N and K that are multiples of 16.

    Args:
        x: (..., K), bfloat16 or float16, the last dimension contiguous and the rows at one distance
            from each other; or an `NVFP4Tensor` (..., K) with linear scales; with compute "fp8"
            such a tensor, or a `QuantizedTensor` in E4M3 of format "fp8_row" or "fp8_tensor".
        weight: (N, K), packed along K with linear scales and one gsa, as `quantize_weight_nvfp4`
            gives it.
        bias: (N,), bfloat16, float16 or float32.
        residual: contiguous (..., N) of the result's dtype, added last.
        dtype: bfloat16, float16 or float32; default that of ``out``, of ``x``, or bfloat16.
        compute: "exact" or "fp8".
        out: contiguous (..., N) to write to.

    Returns:
        (..., N) of ``dtype``, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
        RuntimeError: ``compute="fp8"`` on a GPU, or for a shape, that has no kernel for it.
    """
    one_of("compute", compute, COMPUTES)
    if not isinstance(weight, NVFP4Tensor):
        raise TypeError(
            f"weight: expected an NVFP4Tensor, got {type(weight).__name__}. quantize_weight_nvfp4 "
            "makes one"
        )
    for name, q in (("weight", weight), ("x", x)):
        if isinstance(q, NVFP4Tensor) and (q.dim != -1 or q.scale_layout != "linear"):
            raise ValueError(
                f"{name}: expected dim -1 and scale_layout 'linear', got dim {q.dim} and "
                f"scale_layout {q.scale_layout!r}"
            )
    given: Any = x
    if not isinstance(given, (Tensor, NVFP4Tensor, QuantizedTensor)):
        x = _checks.as_tensor(given, "x")
    cols = x.shape[-1] if len(x.shape) else 0
    if cols != weight.shape[-1]:
        raise ValueError(
            f"x: expected shape (..., {weight.shape[-1]}) for a weight of shape "
            f"{tuple(weight.shape)}, got shape {tuple(x.shape)}"
        )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    if compute == "fp8":
        data, scale_inv = _fp8_operand(x)
        if dtype is None and isinstance(x, Tensor):
            dtype = x.dtype
        arguments = {
            "x": data,
            "x_scale_inv": scale_inv,
            "w_fp4": weight.x_fp4,
            "w_sf": weight.x_sf,
            "w_gsa": weight.gsa,
            "bias": bias,
            "residual": residual,
            "dtype": dtype,
        }
        return LINEAR_FP8.one_tensor(arguments, out)
    if isinstance(x, QuantizedTensor):
        raise TypeError(
            f"x: expected compute='fp8' with a QuantizedTensor of format {x.format!r}, got "
            "compute='exact'"
        )
    values, x_sf, x_gsa = (
        (x.x_fp4, x.x_sf, x.gsa) if isinstance(x, NVFP4Tensor) else (x, None, None)
    )
    arguments = {
        "x": values,
        "w_fp4": weight.x_fp4,
        "w_sf": weight.x_sf,
        "w_gsa": weight.gsa,
        "x_sf": x_sf,
        "x_gsa": x_gsa,
        "bias": bias,
        "residual": residual,
        "dtype": dtype,
    }
    return LINEAR.one_tensor(arguments, out)


def _fp8_operand(x: Tensor | NVFP4Tensor | QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Elements and scale_inv of x in E4M3, with a scale for each row where it is quantized here."""
    if isinstance(x, NVFP4Tensor):
        raise TypeError(
            "x: expected a bfloat16 or float16 tensor, or a QuantizedTensor in E4M3, with compute "
            "'fp8', got an NVFP4Tensor"
        )
    if isinstance(x, QuantizedTensor) and x.format not in ("fp8_row", "fp8_tensor"):
        raise ValueError(
            f"x: expected format 'fp8_row' or 'fp8_tensor' with compute 'fp8', got {x.format!r}"
        )
    if isinstance(x, QuantizedTensor):
        return x.data, x.scale_inv
    _values(x)
    q = quantize_fp8(x, granularity="row")
    return q.data, q.scale_inv
