"""Argument checks, shared by the public functions and by every implementation of an op.

Plain Python on a tensor's attributes: no tensor op, no synchronization, and sizes may be symbolic.
Every message says "argument: expected this, got that" and the way out. A wrong type or dtype is a
TypeError, anything else a ValueError.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils.dlpack import from_dlpack

from jitquant.formats import (
    CODES_PER_BYTE,
    FP4_DTYPE,
    INPUT_DTYPES,
    MHC_MAX,
    NVFP4_BLOCK,
    SCALE_DTYPE,
    fp4_scales_shape,
)
from jitquant.ops import _checks_memory, _checks_values

DEVICES = ("cpu", "cuda", "meta")
_INPUT_DTYPES_TEXT = "bfloat16, float16 or float32"


def shape_text(t: Tensor) -> str:
    """A tensor's shape as an error shows it."""
    return str(tuple(t.shape))


def kind_of(value: object) -> str:
    """What an error says was given in place of a tuple, or of one of another length."""
    count = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{count}"


def shown(value: object) -> str:
    """What an error says was given: a number, or else its type."""
    return str(value) if isinstance(value, (int, float)) else type(value).__name__


SCALARS: dict[str, tuple[Any, str, str]] = {
    "int": ((int, SupportsIndex), "an int", ". Convert it with int({name})"),
    "float": ((int, float, SupportsFloat), "a number", ". Convert it with float({name})"),
    "bool": ((bool, SupportsFloat), "a bool", ". Convert it with bool({name})"),
    "str": (str, "a str", ". Leave it out for the default"),
    "ScalarType": (torch.dtype, "a torch.dtype, such as torch.float8_e4m3fn", ""),
}
"""By a schema's type, what can be converted to it, and what an error says of it."""


def is_number(t: Tensor) -> bool:
    """Whether a tensor can be converted to a number without waiting for a GPU."""
    return t.numel() == 1 and t.device.type == "cpu" and not is_compiling()


def wrong_scalar(value: object, name: str, kind: str, choices: tuple[str, ...] = ()) -> TypeError:
    """The error of an argument that cannot be converted to its type in the schema."""
    _, expected, way_out = SCALARS[kind]
    if choices:
        expected += f", one of {', '.join(map(repr, choices))}"
    return TypeError(
        f"{name}: expected {expected}, got {type(value).__name__}{way_out.format(name=name)}"
    )


def integer(value: Any, name: str) -> Any:
    """``value`` as Python's own int, which a result may keep; a symbolic one as it is."""
    if isinstance(value, torch.SymInt) or is_dynamo_compiling():  # which traces no index of NumPy's
        return value
    if isinstance(value, Tensor) and not is_number(value):
        raise wrong_scalar(value, name, "int")
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_scalar(value, name, "int") from None


def as_tensor(value: Any, name: str, *, is_written: bool = False) -> Tensor:
    """``value`` as a tensor on a device that there are kernels for.

    Anything that has ``__dlpack__`` (a CuPy or NumPy array) becomes a tensor of the same memory.
    """
    if isinstance(value, Tensor):
        tensor: Tensor = value
    else:
        if not hasattr(value, "__dlpack__"):
            raise TypeError(
                f"{name}: expected a torch.Tensor or anything with __dlpack__, such as a CuPy "
                f"array, got {type(value).__name__}. Convert it with torch.as_tensor({name})"
            )
        strides = getattr(value, "strides", None)
        if isinstance(strides, tuple) and any(s < 0 for s in strides):  # torch aborts on them
            raise ValueError(
                f"{name}: expected an array without negative strides, got {type(value).__name__} "
                f"with strides {strides}. Call {name}.copy()"
            )
        # Through DLPack, PyTorch takes a read-only array for one that it may write to.
        if is_written and not getattr(getattr(value, "flags", None), "writeable", True):
            raise ValueError(
                f"{name}: expected a writable array, as it is written in place, got a read-only "
                f"{type(value).__name__}. Pass a copy, such as {name}.copy()"
            )
        try:
            tensor = from_dlpack(value)
        except (BufferError, RuntimeError) as error:
            raise ValueError(
                f"{name}: expected a writable array of {_INPUT_DTYPES_TEXT}, got "
                f"{type(value).__name__} that cannot be read through DLPack ({error}). Convert or "
                "copy it first"
            ) from error
    if type(tensor) is not Tensor and hasattr(tensor, "device_mesh"):
        raise TypeError(
            f"{name}: expected this rank's tensor, got a DTensor. Pass {name}.to_local(), and "
            "process_group=mesh.get_group() if ranks share an amax"
        )
    dense(tensor, name)
    if tensor.device.type not in DEVICES:
        raise ValueError(
            f"{name}: expected a tensor on cpu or cuda, got one on {tensor.device}. Move it with "
            f"{name}.to('cuda')"
        )
    return tensor


def seen_as_tensor(value: Any, name: str) -> Any:
    """`as_tensor` of another library's array; anything else unchanged."""
    # Numbers first: Dynamo cannot ask a number that changes for an attribute.
    if isinstance(value, (Tensor, int, float)) or not hasattr(value, "__dlpack__"):
        return value
    return as_tensor(value, name)


def flat_gsa(gsa: Tensor) -> Tensor:
    """One element of any shape is one gsa, and (..., 1) has one for each row."""
    is_column = gsa.numel() == 1 or (gsa.dim() > 1 and gsa.shape[-1] == 1)
    return gsa.reshape(-1) if is_column else gsa


def as_gsa(gsa: object) -> float | Tensor | None:
    """``gsa`` as None, a float or a tensor of at least one dimension."""
    if gsa is None or (isinstance(gsa, Tensor) and gsa.dim() == 1) or isinstance(gsa, float):
        return gsa
    if isinstance(gsa, Tensor) or hasattr(gsa, "__dlpack__"):
        return flat_gsa(as_tensor(gsa, "gsa"))
    if not isinstance(gsa, bool) and isinstance(gsa, Real):
        return float(gsa)
    raise TypeError(
        "gsa: expected None (computed), a number, or a float32 tensor of one element or one for "
        f"each row, got {type(gsa).__name__}"
    )


def ends_of(offsets: Tensor, experts: int) -> Tensor:
    """Where the rows of each expert end, of offsets that may have a leading 0.

    The 0 is looked at on the CPU, and on a GPU in `jitquant.testing.checked`. What is not a tensor
    is left to later checks.
    """
    if not isinstance(offsets, Tensor) or offsets.shape == (experts,):
        return offsets
    if offsets.shape != (experts + 1,):
        raise ValueError(
            f"offsets: expected shape ({experts},), the end of each expert's rows, or "
            f"({experts + 1},) with a leading 0, got shape {shape_text(offsets)}"
        )
    if not is_compiling() and _checks_values.may_be_read(offsets) and offsets[0] != 0:
        raise ValueError(
            f"offsets: expected 0 as the first of {experts + 1} elements for {experts} experts, "
            f"got {offsets[0].item()}. Subtract it from all, and pass only their rows"
        )
    return offsets[1:]


def dimension(dim: int) -> None:
    """``dim`` is -1 or 0."""
    if dim != -1 and dim != 0:
        raise ValueError(f"dim: expected -1 (blocks along the last dimension) or 0, got {dim!r}")


def strided(t: Tensor, name: str) -> None:
    """A tensor is not sparse."""
    if t.layout != torch.strided:
        raise TypeError(
            f"{name}: expected layout torch.strided, got {t.layout}. Convert it with "
            f"{name}.to_dense()"
        )


def dense(t: Tensor, name: str) -> None:
    """A tensor is neither sparse nor nested, which the dispatcher has no op for."""
    if is_dynamo_compiling():  # Dynamo cannot trace .layout in a backward
        return
    if t.is_nested:
        raise TypeError(
            f"{name}: expected one tensor of layout torch.strided, got a nested tensor. Convert it "
            f"with {name}.to_padded_tensor(0.0)"
        )
    if t.layout != torch.strided:
        strided(t, name)  # whose words the bindings have too


def input_tensor(t: Tensor, name: str, min_dim: int = 1, shape: str = "(..., N)") -> None:
    """A tensor to be quantized: dtype, dimensions, last dimension contiguous."""
    if t.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"{name}: expected {_INPUT_DTYPES_TEXT}, got {t.dtype}. Convert it with "
            f"{name}.to(torch.bfloat16)"
        )
    strided(t, name)
    if t.dim() < min_dim:
        raise ValueError(
            f"{name}: expected shape {shape}, got shape {shape_text(t)}. Add dimensions with "
            f"{name}.reshape(...)"
        )
    if t.shape[-1] == 0:
        raise ValueError(
            f"{name}: expected shape {shape} with N >= 1, got shape {shape_text(t)}. An empty "
            "tensor may have no rows, but needs columns"
        )
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension (stride 1), got strides "
            f"{tuple(t.stride())}. Call {name}.contiguous() first"
        )


def is_strided(t: Tensor) -> bool:
    """Whether t has strides. Assumed while compiling: Dynamo cannot trace .layout in a backward."""
    return torch.compiler.is_compiling() or t.layout == torch.strided


def with_columns(t: Tensor) -> Tensor:
    """A tensor to be quantized whose last dimension is contiguous: itself, or a copy."""
    if not is_strided(t) or t.dim() == 0 or t.shape[-1] == 1 or t.stride(-1) == 1:
        return t
    return t.contiguous()


def contiguous(t: Tensor, name: str) -> None:
    """A tensor whose elements follow each other."""
    if not t.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {tuple(t.stride())}. Call "
            f"{name}.contiguous() first"
        )


def same_device(t: Tensor, name: str, like: Tensor, like_name: str) -> None:
    """Two tensors are on one device."""
    if t.device != like.device:
        raise ValueError(
            f"{name}: expected a tensor on {like.device}, as {like_name} is, got one on "
            f"{t.device}. Move it with {name}.to({str(like.device)!r})"
        )


def gsa_tensor(gsa: Tensor, rows: int, like: Tensor, like_name: str, name: str = "gsa") -> None:
    """A given gsa: of one element or of one for each row."""
    same_device(gsa, name, like, like_name)
    # The number of elements comes first: with one, any shape is valid.
    if gsa.numel() != 1 and (gsa.dim() != 1 or gsa.shape[0] != rows):
        raise ValueError(
            f"{name}: expected one element or shape ({rows},), one for each row of {like_name}, "
            f"got shape {shape_text(gsa)}. Flatten it with {name}.reshape(-1)"
        )


def gsa_of_tensor(gsa: Tensor, like: Tensor, like_name: str, name: str = "gsa") -> None:
    """A given gsa of a weight: of one element."""
    if gsa.numel() != 1:
        raise ValueError(f"{name}: expected one element for a weight, got shape {shape_text(gsa)}")
    same_device(gsa, name, like, like_name)


def column_weight(weight: Tensor, cols: int, like: Tensor, like_name: str) -> None:
    """The weight of a norm: (N,), contiguous, of the input's dtype or fp32."""
    same_device(weight, "weight", like, like_name)
    if weight.dtype != like.dtype and weight.dtype != torch.float32:
        raise TypeError(
            f"weight: expected {like_name}'s dtype {like.dtype} or float32, got {weight.dtype}. "
            f"Convert it with weight.to({like_name}.dtype)"
        )
    if weight.dim() != 1 or weight.shape[0] != cols:
        raise ValueError(
            f"weight: expected shape ({cols},), one element for each column of {like_name}, got "
            f"shape {shape_text(weight)}"
        )
    contiguous(weight, "weight")


def residual_tensor(residual: Tensor | None, x: Tensor) -> None:
    """The residual, which is written in place: like x, each element in its own memory."""
    if residual is None:
        return
    same_device(residual, "residual", x, "x")
    if residual.dtype != x.dtype:
        raise TypeError(
            f"residual: expected x's dtype {x.dtype}, got {residual.dtype}. Keep both in one dtype"
        )
    if residual.shape != x.shape:
        raise ValueError(
            f"residual: expected x's shape {shape_text(x)}, got shape {shape_text(residual)}"
        )
    if residual.stride(-1) != 1 and residual.shape[-1] != 1:
        raise ValueError(
            "residual: expected a contiguous last dimension (stride 1), got strides "
            f"{tuple(residual.stride())}. Make it contiguous when you create it: it is written in "
            "place"
        )
    _checks_memory.own_elements(residual, "residual")
    _without_grad(residual, "residual", "tensor")


def _without_grad(t: Tensor, name: str, kind: str) -> None:
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a {kind} that does not require grad, got one that does. It is "
            "written in place by an op without a derivative. Call under torch.no_grad(), or pass "
            f"{name}.detach()"
        )


def norm_arguments(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """What RMSNorm takes: x (..., N), weight (N,), and a residual like x."""
    column_weight(weight, x.shape[-1], x, "x")
    residual_tensor(residual, x)


def hyper_connection_weights(A: Tensor, X: Tensor) -> None:
    """A is (..., H) for X (..., H, N)."""
    same_device(A, "A", X, "X")
    if A.dtype != X.dtype and A.dtype != torch.float32:
        raise TypeError(
            f"A: expected X's dtype {X.dtype} or float32, got {A.dtype}. Convert it with "
            "A.to(X.dtype)"
        )
    if A.shape != X.shape[:-1]:
        raise ValueError(
            f"A: expected X's shape without its last dimension, {tuple(X.shape[:-1])}, got shape "
            f"{shape_text(A)}"
        )
    contiguous(A, "A")


def mhc_arguments(X: Tensor, A: Tensor, weight: Tensor) -> None:
    """What RMSNorm of combined hyper-connections takes: X (..., H, N), A (..., H), weight (N,)."""
    if not 1 <= X.shape[-2] <= MHC_MAX:
        raise ValueError(
            f"X: expected shape (..., n_hc, N) with n_hc from 1 to {MHC_MAX}, got shape "
            f"{shape_text(X)}"
        )
    hyper_connection_weights(A, X)
    column_weight(weight, X.shape[-1], X, "X")


def turns(interleave: int, cols: int) -> None:
    """Turns of ``interleave`` columns of gate and of up divide the columns of each."""
    if interleave < 0 or (interleave and cols % interleave):
        raise ValueError(
            f"interleave: expected 0 for [gate | up], or a divisor of {cols}, the columns of each, "
            f"got {interleave}"
        )


def deinterleave_arguments(fused: Tensor, intermediate: int, interleave: int) -> None:
    """A gate-and-up projection (..., 2 * intermediate) and how its columns are arranged."""
    if intermediate < 1 or fused.shape[-1] != 2 * intermediate:
        raise ValueError(
            f"intermediate: expected fused.shape[-1] / 2 for fused of shape {shape_text(fused)}, "
            f"got {intermediate}"
        )
    turns(interleave, intermediate)


def packed_tensor(t: Tensor, name: str, dtype: torch.dtype) -> None:
    """Codes or scales to be read: their dtype or uint8, contiguous."""
    if t.dtype != dtype and t.dtype != torch.uint8:
        raise TypeError(
            f"{name}: expected {dtype} or its bytes as torch.uint8, got {t.dtype}. View it with "
            f"{name}.view(torch.uint8)"
        )
    if not t.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {tuple(t.stride())}. Make a "
            f"contiguous copy with {name}.view(torch.uint8).contiguous()"
        )


def nvfp4_operand(
    codes: Tensor,
    scales: Tensor,
    name: str,
    scales_name: str,
    dim: int = -1,
    scale_layout: str = "linear",
) -> None:
    """Codes and scales to be read: whole blocks along ``dim``, and a scale for each of them."""
    packed_tensor(codes, name, FP4_DTYPE)
    packed_tensor(scales, scales_name, SCALE_DTYPE)
    same_device(scales, scales_name, codes, name)
    if codes.dim() == 0 or (dim == 0 and codes.dim() != 2):
        raise ValueError(
            f"{name}: expected shape (..., P), or (P, N) with dim=0, got shape {shape_text(codes)}"
        )
    if codes.shape[dim] == 0 or codes.shape[dim] % (NVFP4_BLOCK // CODES_PER_BYTE):
        raise ValueError(
            f"{name}: expected a multiple of {NVFP4_BLOCK // CODES_PER_BYTE} bytes ({NVFP4_BLOCK} "
            f"codes) along the packed dimension, got shape {shape_text(codes)}"
        )
    expected = fp4_scales_shape(codes.shape, scale_layout, dim)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"{scales_name}: expected shape {tuple(expected)} for {name} of shape "
            f"{shape_text(codes)} and scale_layout {scale_layout!r}, got shape {shape_text(scales)}"
        )


def tensor_out(out: object) -> None:
    """The buffer for a result that is one tensor is a tensor."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out: expected a torch.Tensor to write to, got {type(out).__name__}")
    dense(out, "out")


def out_parts(parts: dict[str, object], maker: str) -> None:
    """The buffers of a container are tensors.

    Args:
        parts: buffers by name.
        maker: the call that makes them.
    """
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            raise TypeError(
                f"{name}: expected a torch.Tensor to write to, got {type(part).__name__}. {maker} "
                "makes buffers that fit"
            )
        dense(part, name)


def out_tensor(
    t: Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    maker: str = "NVFP4Tensor.empty(shape, ...)",
) -> None:
    """A buffer for a result: shape, dtype (of one byte: or uint8), device, contiguous, no gradient.

    ``maker`` is the call that makes such buffers, where they are parts of a container.
    """
    if t.dtype != dtype and not (t.dtype == torch.uint8 and dtype.itemsize == 1):
        raise TypeError(f"{name}: expected {dtype} for this call, got {t.dtype}")
    if t.device != device:
        raise ValueError(
            f"{name}: expected a buffer on {device}, as the input is, got one on {t.device}"
        )
    if t.shape != shape:
        raise ValueError(
            f"{name}: expected shape {tuple(shape)} for this call, got shape {shape_text(t)}. "
            f"{'torch.empty(shape, ...)' if name == 'out' else maker} makes buffers that fit"
        )
    if not t.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous buffer, got strides {tuple(t.stride())}")
    _without_grad(t, name, "buffer")


def row_count(shape: tuple[int, ...] | torch.Size) -> int:
    """Rows of a tensor with these leading dimensions; one if there is none."""
    return math.prod(shape)


def weight_arguments(w: Tensor, dim: int, scale_layout: str) -> None:
    """A weight and how it is to be packed."""
    if w.dim() != 2:
        raise ValueError(
            f"w: expected shape (N, K), or (K, N) with dim=0, got shape {shape_text(w)}. Quantize "
            "the matrices of a stack one by one: each has its own gsa"
        )
    dimension(dim)
    if dim == -1:
        return
    if scale_layout != "linear":
        raise ValueError(
            f"scale_layout: expected 'linear' with dim=0, got {scale_layout!r}. For swizzled "
            "scales quantize the transposed weight with dim=-1"
        )
    if w.shape[0] == 0:
        raise ValueError(f"w: expected K >= 1 with dim=0, got shape {shape_text(w)}")


def _inv_rms_tensor(inv_rms: Tensor, rows: int, like: Tensor, like_name: str) -> None:
    same_device(inv_rms, "inv_rms", like, like_name)
    if inv_rms.dtype != torch.float32 or tuple(inv_rms.shape) != (rows,):
        raise ValueError(
            f"inv_rms: expected float32 of shape ({rows},), as the first half returns it, got "
            f"{inv_rms.dtype} of shape {shape_text(inv_rms)}"
        )
    contiguous(inv_rms, "inv_rms")


def normalized_arguments(x: Tensor, weight: Tensor, inv_rms: Tensor) -> None:
    """As `norm_arguments`, with what the first half of a norm gave."""
    norm_arguments(x, weight)
    _inv_rms_tensor(inv_rms, row_count(x.shape[:-1]), x, "x")


def mhc_normalized_arguments(X: Tensor, A: Tensor, weight: Tensor, inv_rms: Tensor) -> None:
    """As `mhc_arguments`, with what the first half of a norm gave."""
    mhc_arguments(X, A, weight)
    _inv_rms_tensor(inv_rms, row_count(X.shape[:-2]), X, "X")


def amax_tensor(amax: Tensor, count: int, other: int, like: Tensor, like_name: str) -> None:
    """A given amax: contiguous, of one of two numbers of elements."""
    same_device(amax, "amax", like, like_name)
    if amax.numel() not in (count, other) or not amax.is_contiguous():
        raise ValueError(
            f"amax: expected {count}{'' if count == other else f' or {other}'} contiguous "
            f"elements, got shape {shape_text(amax)} and strides {tuple(amax.stride())}"
        )


def out_elements(
    t: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, maker: str
) -> None:
    """A buffer for elements, whose rows may be strided."""
    if t.dtype != dtype and t.dtype != torch.uint8:
        raise TypeError(f"{name}: expected {dtype} for this call, got {t.dtype}")
    if t.shape != shape:
        raise ValueError(
            f"{name}: expected shape {tuple(shape)} for this call, got shape {shape_text(t)}. "
            f"{maker} makes buffers that fit"
        )
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension (stride 1), got strides "
            f"{tuple(t.stride())}"
        )
    _checks_memory.own_elements(t, name)
