"""Products with the NVFP4 weights of many experts: the ops and the public functions."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from jitquant.formats import CODES_PER_BYTE, NVFP4_BLOCK
from jitquant.numerics import experts as numerics
from jitquant.ops import _checks
from jitquant.ops.parts import PARTS, SEGMENT, Part, in_tiles
from jitquant.ops.schema import FP32, INPUT, INTEGERS, OUTPUT, Op, Plan, Result
from jitquant.tensors import NVFP4Tensor

__all__ = [
    "nvfp4_experts",
    "nvfp4_grouped_linear",
]

MOST_EXPERTS = 1024
MOST_TOP_K = 64


def _weights(
    codes: Tensor, scales: Tensor, gsa: Tensor, name: str, scales_name: str, gsa_name: str
) -> None:
    """The weights of experts, (experts, rows, packed columns)."""
    _checks.nvfp4_operand(codes, scales, name, scales_name)
    if codes.dim() != 3 or not 1 <= codes.shape[0] <= MOST_EXPERTS:
        raise ValueError(
            f"{name}: expected shape (E, N, P), the weights of 1 to {MOST_EXPERTS} experts, "
            f"got shape {_checks.shape_text(codes)}"
        )
    count, rows, packed = codes.shape
    _checks.same_device(gsa, gsa_name, codes, name)
    if gsa.numel() not in (1, count, count * rows) or not gsa.is_contiguous():
        raise ValueError(
            f"{gsa_name}: expected one contiguous element, {count} (one for each expert) or "
            f"{count * rows} (one for each row), got shape {_checks.shape_text(gsa)} and strides "
            f"{tuple(gsa.stride())}"
        )
    if rows >= 2**20 or CODES_PER_BYTE * packed > 2**30:
        raise ValueError(
            f"{name}: expected less than 2^20 rows in an expert and 2^30 columns, got shape "
            f"{_checks.shape_text(codes)}"
        )


def _rows(x: Tensor, like: Tensor, like_name: str, fewer: int = 0) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"x: expected bfloat16 or float16, got {x.dtype}. Convert it with .to()")
    _checks.input_tensor(x, "x")
    _checks.same_device(x, "x", like, like_name)
    cols = CODES_PER_BYTE * like.shape[2]
    if x.dim() != 2 or not cols - fewer <= x.shape[1] <= cols:
        raise ValueError(
            f"x: expected shape (T, {cols}) for {like_name} of shape {_checks.shape_text(like)}, "
            f"got shape {_checks.shape_text(x)}"
        )


def _integers(t: Tensor, name: str, x: Tensor) -> None:
    _checks.same_device(t, name, x, "x")
    _checks.contiguous(t, name)


def _plan_grouped(
    x: Tensor,
    w_fp4: Tensor,
    w_sf: Tensor,
    w_gsa: Tensor,
    offsets: Tensor,
    x_sf: Tensor | None,
    x_gsa: Tensor | None,
    dtype: torch.dtype | None,
) -> Plan:
    _weights(w_fp4, w_sf, w_gsa, "w_fp4", "w_sf", "w_gsa")
    count, rows, packed = w_fp4.shape
    if x_sf is None:
        _rows(x, w_fp4, "w_fp4", NVFP4_BLOCK - 1)
    else:
        _checks.nvfp4_operand(x, x_sf, "x", "x_sf")
        _checks.same_device(x, "x", w_fp4, "w_fp4")
        if x.dim() != 2 or x.shape[1] != packed:
            raise ValueError(
                f"x: expected shape (T, {packed}) for w_fp4 of shape "
                f"{_checks.shape_text(w_fp4)}, got shape {_checks.shape_text(x)}"
            )
        if x_gsa is None:
            raise ValueError("x_gsa: expected the gsa of x beside x_sf, got None")
    if x_gsa is not None:
        _checks.gsa_tensor(x_gsa, x.shape[0], x, "x", "x_gsa")
    _integers(offsets, "offsets", x)
    if offsets.shape != (count,):
        raise ValueError(
            f"offsets: expected shape ({count},), the end of each expert's rows, got shape "
            f"{_checks.shape_text(offsets)}"
        )
    own = x.dtype if x_sf is None else torch.bfloat16
    return Plan(x.device, (Result((x.shape[0], rows), own if dtype is None else dtype),))


def _plan_experts(
    x: Tensor,
    gate_up_fp4: Tensor,
    gate_up_sf: Tensor,
    gate_up_gsa: Tensor,
    down_fp4: Tensor,
    down_sf: Tensor,
    down_gsa: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    dtype: torch.dtype | None,
) -> Plan:
    _weights(gate_up_fp4, gate_up_sf, gate_up_gsa, "gate_up_fp4", "gate_up_sf", "gate_up_gsa")
    _checks.same_device(down_fp4, "down_fp4", gate_up_fp4, "gate_up_fp4")
    _weights(down_fp4, down_sf, down_gsa, "down_fp4", "down_sf", "down_gsa")
    count, rows, packed = gate_up_fp4.shape
    cols = CODES_PER_BYTE * packed
    if rows % 4 or down_fp4.shape != (count, cols, rows // 4):
        raise ValueError(
            f"down_fp4: expected shape ({count}, {cols}, {rows // 4}) for gate_up_fp4 of shape "
            f"{_checks.shape_text(gate_up_fp4)}, got shape {_checks.shape_text(down_fp4)}"
        )
    _rows(x, gate_up_fp4, "gate_up_fp4")
    _integers(topk_ids, "topk_ids", x)
    if (
        topk_ids.dim() != 2
        or topk_ids.shape[0] != x.shape[0]
        or not 1 <= topk_ids.shape[1] <= MOST_TOP_K
    ):
        raise ValueError(
            f"topk_ids: expected shape ({x.shape[0]}, k) with k from 1 to {MOST_TOP_K}, got shape "
            f"{_checks.shape_text(topk_ids)}"
        )
    _checks.same_device(topk_weights, "topk_weights", x, "x")
    if topk_weights.shape != topk_ids.shape or not topk_weights.is_contiguous():
        raise ValueError(
            f"topk_weights: expected shape {tuple(topk_ids.shape)}, contiguous, as topk_ids has, "
            f"got shape {_checks.shape_text(topk_weights)} and strides "
            f"{tuple(topk_weights.stride())}"
        )
    return Plan(x.device, (Result((x.shape[0], cols), x.dtype if dtype is None else dtype),))


#: Up to so many rows no launch is by tiles, and from so many rows per expert on some are by tall
#: ones; so many pairs are multiplied at once on every device, and by tiles so many results in all
#: (nvfp4_experts.cu).
_FEW_ROWS, _ROWS_OF_TALL, _PAIRS_AT_ONCE, _MOST_TILED = 32, 64, 1024, 1 << 28
#: From so many rows per expert on tiles multiply all of them.
_ROWS_OF_TILES = 9
#: Rows of a layer that are not sorted, if those behind the first have at most so many weights in
#: their experts.
_MOST_UNSORTED, _MOST_READ_AGAIN = 8, 5 << 26
#: What kernels are for, and the number that asks for them (expert_tiles.cuh).
_UNSORTED, _BUNDLED, _TILED, _TALL, _LAYER, _TO_OWN, _TO_FLOAT = 1, 2, 4, 8, 16, 32, 64
_FEW = _BUNDLED | _LAYER | _TO_OWN | _TO_FLOAT


def _cols_of(weight: Tensor) -> int:
    return CODES_PER_BYTE * weight.shape[-1:].numel()


def _part(x: Tensor, w_fp4: Tensor, dtype: torch.dtype | None = None) -> Part | None:
    # A part is asked for before anything is checked.
    of, rows = PARTS.get(x.dtype), x.shape[:-1].numel()  # codes need the whole module
    if of is None:
        return of
    count, cols = w_fp4.shape[:1].numel(), _cols_of(w_fp4)
    if rows <= _FEW_ROWS:
        return _with(of, "few_rows", _FEW, cols % SEGMENT == 0)
    is_tall = rows > _ROWS_OF_TALL * count
    name, tiles = f"grouped_{'many' if is_tall else 'some'}_rows", _TILED | _TALL * is_tall
    every = _BUNDLED | tiles | _TO_OWN | _TO_FLOAT
    to = {None: _TO_OWN, x.dtype: _TO_OWN, torch.float32: _TO_FLOAT}.get(dtype)
    if to and rows >= _ROWS_OF_TILES * count and in_tiles(x, cols):
        own = f"{name}_in_tiles{'_to_fp32' * (to == _TO_FLOAT)}"
        return _with(of, own, tiles | to, wider=(name, every))
    return _with(of, name, every, cols % SEGMENT == 0)


def _part_of_layer(
    x: Tensor, gate_up_fp4: Tensor, down_fp4: Tensor, topk_ids: Tensor
) -> Part | None:
    of, rows = PARTS.get(x.dtype), x.shape[:-1].numel()
    if of is None:
        return of
    cols = math.gcd(_cols_of(gate_up_fp4), _cols_of(down_fp4))
    weights = CODES_PER_BYTE * (gate_up_fp4.shape[1:].numel() + down_fp4.shape[1:].numel())
    again = (rows - 1) * topk_ids.shape[-1:].numel() * weights
    if 1 <= rows <= _MOST_UNSORTED and again <= _MOST_READ_AGAIN:
        return _with(of, "unsorted_rows", _UNSORTED | _LAYER, cols % SEGMENT == 0)
    if rows <= _FEW_ROWS:
        return _with(of, "few_rows", _FEW, cols % SEGMENT == 0)
    pairs, count = rows * topk_ids.shape[-1:].numel(), gate_up_fp4.shape[:1].numel()
    is_tall = pairs > _ROWS_OF_TALL * count
    # Of more, so few rows may be left that they are not sorted.
    at_once = pairs * down_fp4.shape[1:2].numel() <= _MOST_TILED
    more = ("more_rows", _UNSORTED | _BUNDLED | _TILED | _LAYER)
    if at_once and pairs >= _ROWS_OF_TILES * count and in_tiles(x, cols):
        if is_tall:
            return _with(of, "many_rows_in_tiles", _TILED | _TALL | _LAYER)
        return _with(of, "rows_in_tiles", _TILED | _LAYER, wider=more)
    if is_tall:
        return of
    if at_once and pairs <= _PAIRS_AT_ONCE:
        more = ("some_rows", _BUNDLED | _TILED | _LAYER)
    return _with(of, *more, cols % SEGMENT == 0)


@functools.cache  # each call asks
def _with(
    of: Part, name: str, kernels: int, aligned: bool = False, wider: tuple[str, int] | None = None
) -> Part:
    """The part with some kernels, and the next one if these do not do for a call."""
    part = of.narrowed(name, f"-DJITQUANT_EXPERTS={kernels}")
    if wider is not None:
        part = part._replace(of=_with(of, *wider))
    return part.aligned if aligned else part


GROUPED_LINEAR = Op(
    "nvfp4_grouped_linear",
    ["y"],
    module="nvfp4_experts",
    plan=_plan_grouped,
    reference=numerics.nvfp4_grouped_linear,
    accepts={"w_gsa": FP32, "offsets": INTEGERS, "x_gsa": FP32, "dtype": OUTPUT},
    part=_part,
)
EXPERTS = Op(
    "nvfp4_experts",
    ["mixture"],
    module="nvfp4_experts",
    plan=_plan_experts,
    reference=numerics.nvfp4_experts,
    accepts={
        "gate_up_gsa": FP32,
        "down_gsa": FP32,
        "topk_ids": INTEGERS,
        "topk_weights": INPUT,
        "dtype": OUTPUT,
    },
    part=_part_of_layer,
)

OPS: tuple[Op, ...] = (GROUPED_LINEAR, EXPERTS)
"""Every product with the weights of experts."""


def _check_weight(weight: object, name: str) -> None:
    if not isinstance(weight, NVFP4Tensor):
        raise TypeError(
            f"{name}: expected an NVFP4Tensor, got {type(weight).__name__}. "
            "jitquant.nn.stack_experts makes one of the weights of all experts"
        )
    if len(weight.shape) != 3 or weight.dim != -1 or weight.scale_layout != "linear":
        raise ValueError(
            f"{name}: expected shape (E, N, K), dim -1 and scale_layout 'linear', got shape "
            f"{tuple(weight.shape)}, dim {weight.dim} and scale_layout {weight.scale_layout!r}. "
            "jitquant.nn.stack_experts makes one"
        )


def nvfp4_grouped_linear(
    x: Tensor | NVFP4Tensor,
    weight: NVFP4Tensor,
    offsets: Tensor,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies the rows of each expert by its NVFP4 weight, which is read as it is stored.

    Rows are sorted by expert: those of expert e are ``offsets[e - 1]`` to ``offsets[e]`` (from 0
    for the first one), and ``y[rows of e] = x[rows of e] @ weight[e].T``. Weights of experts
    without rows are not read. Rows past the last offset are zero.

    Every product is exact. Sums are in fp32, in an order that depends only on K and on whether an
    expert has more than two rows and more than 16, so a call gives the same bits every time. The
    gsas are applied to the sums, followed by one rounding.

    On a GPU (compute capability 8.0 or newer) up to 2048 rows take one launch (1024 rows if thread
    blocks have less than 160 KiB of shared memory), which decodes an expert's weight again for
    every 8 rows. On Hopper, if there are more than 32 rows, experts with more than 16 of them take
    another launch, which decodes a weight for every 64 to 256 rows; with 9 rows per expert or more
    than 2048, it takes all experts. It needs x in bfloat16 or float16 with rows a multiple of 16
    bytes apart, K a multiple of 64, and a result in x's dtype or in float32. Only the result is
    allocated. The call does not synchronize and can be captured.

    Args:
        x: (T, K), bfloat16 or float16, the last dimension contiguous; or a `NVFP4Tensor`
            (T, K) with linear scales.
        weight: (E, N, K), up to 1024 experts, packed along K with linear scales, and with one gsa
            or one for each row: `jitquant.nn.stack_experts` of quantized weights.
        offsets: int32 or int64 (E,): where the rows of each expert end; or (E + 1,) with a leading
            0, as `jitquant.quantize_ragged` takes them. They are not checked, but made
            non-decreasing and clamped to T. Only the leading 0 is, on the CPU and in
            `jitquant.testing.checked`.
        dtype: bfloat16, float16 or float32; default that of ``out``, of ``x``, or bfloat16.
        out: contiguous (T, N) to write to.

    Returns:
        (T, N) of ``dtype``, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    _check_weight(weight, "weight")
    given: Any = x
    if not isinstance(given, (Tensor, NVFP4Tensor)):
        x = _checks.as_tensor(given, "x")
    if isinstance(x, NVFP4Tensor) and (x.dim != -1 or x.scale_layout != "linear"):
        raise ValueError(
            f"x: expected dim -1 and scale_layout 'linear', got dim {x.dim} and scale_layout "
            f"{x.scale_layout!r}"
        )
    if len(x.shape) != 2 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x: expected shape (T, {weight.shape[2]}) for a weight of shape "
            f"{tuple(weight.shape)}, got shape {tuple(x.shape)}"
        )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    values, x_sf, x_gsa = (
        (x.x_fp4, x.x_sf, x.gsa) if isinstance(x, NVFP4Tensor) else (x, None, None)
    )
    arguments = {
        "x": values,
        "w_fp4": weight.x_fp4,
        "w_sf": weight.x_sf,
        "w_gsa": weight.gsa,
        "offsets": _checks.ends_of(_checks.seen_as_tensor(offsets, "offsets"), weight.shape[0]),
        "x_sf": x_sf,
        "x_gsa": x_gsa,
        "dtype": dtype,
    }
    return GROUPED_LINEAR.one_tensor(arguments, out)


def nvfp4_experts(
    x: Tensor,
    gate_up: NVFP4Tensor,
    down: NVFP4Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The experts of a mixture with NVFP4 weights, from routed rows to their weighted sums.

    ``y[t] = sum over j of topk_weights[t, j] * down[e](silu(gate[e](x[t])) * up[e](x[t]))`` with
    ``e = topk_ids[t, j]``. Products are exact and summed in fp32; ``silu(gate) * up`` is computed
    in fp32 and rounded to x's dtype; the weighted sum is in fp32, and rounded once. A call gives
    the same bits every time. The order of sums depends on the sizes, on whether T is at most 8 (see
    below), and on whether an expert has more than two rows and more than 16.

    On a GPU (compute capability 8.0 or newer) one row takes two launches. So do up to 8 rows if the
    experts of all but one have at most 5 * 2^26 weights; each row then reads its experts itself. Up
    to 2048 pairs of a row and an expert take three launches (1024 pairs if thread blocks have less
    than 160 KiB of shared memory), which decode an expert's weights again for every 8 rows. Only
    weights of experts that have rows are read, as they are stored. On Hopper with H and I multiples
    of 64, if there are more than 32 rows, three more launches sort the pairs and multiply those of
    experts with more than 16, decoding a weight for every 64 to 256 rows. With 9 pairs per expert
    or more than 2048, they take all experts. The GPU sorts the rows, so the call does not
    synchronize and can be captured. Besides the result, a call allocates scratch: the activations
    and, if rows are sorted, these rows and the products of each pair in float32, for at most 2^27
    elements of these at a time.

    Args:
        x: (T, H), bfloat16 or float16, the last dimension contiguous.
        gate_up: (E, 2 I, H), up to 1024 experts, the I rows of gates before those of ups, packed
            along H with linear scales, and with one gsa or one for each row:
            `jitquant.nn.stack_experts` of quantized weights. H and I are multiples of 16: pad
            weights with zeros if they are not.
        down: (E, H, I), the same.
        topk_ids: int32 or int64 (T, k), contiguous, k up to 64: the experts of each row. Values
            outside of 0 to E - 1 are ignored, such as -1 for experts of other processes.
        topk_weights: bfloat16, float16 or float32 (T, k), contiguous.
        dtype: bfloat16, float16 or float32; default that of ``out`` or ``x``.
        out: contiguous (T, H) to write to.

    Returns:
        (T, H) of ``dtype``, or ``out``.

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    for name, weight, size in (("gate_up", gate_up, "H"), ("down", down, "I")):
        _check_weight(weight, name)
        if weight.cols is not None and weight.cols % NVFP4_BLOCK:
            raise ValueError(
                f"{name}: expected H and I that are multiples of {NVFP4_BLOCK}, got "
                f"{size}={weight.cols}. Pad the weights with zeros"
            )
    if dtype is None and isinstance(out, Tensor):
        dtype = out.dtype
    arguments = {
        "x": x,
        "gate_up_fp4": gate_up.x_fp4,
        "gate_up_sf": gate_up.x_sf,
        "gate_up_gsa": gate_up.gsa,
        "down_fp4": down.x_fp4,
        "down_sf": down.x_sf,
        "down_gsa": down.gsa,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "dtype": dtype,
    }
    return EXPERTS.one_tensor(arguments, out)
