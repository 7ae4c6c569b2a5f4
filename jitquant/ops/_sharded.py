"""Quantization with the amax of a process group: amax, one all_reduce, quantize.

Each rank has a part of a tensor, and gets that part of what the whole tensor would be quantized to,
bit for bit. The all_reduce is of the amax itself, of which the scales are made on every rank alike,
and of its bits as int32: magnitudes are ordered as their bits are, NaN above all, while what a
floating-point maximum makes of a NaN is up to the backend. It is on the current stream, nothing is
read back, and it can be captured where the backend can be (NCCL).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from jitquant.formats import DEINTERLEAVE_OPS, GRANULARITIES, MAX_PARTIALS, NVFP4_BLOCK
from jitquant.numerics import amax as numerics
from jitquant.ops import sources
from jitquant.ops.schema import Cast, Op, Result, Rows, fp32, product
from jitquant.tensors import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _plan_amax(rows: Rows, granularity: str) -> tuple[Result, ...]:
    return (fp32(rows.count if granularity == "row" else 1),)


_AMAX_OF = Cast(
    "{takes}, *, {options}{granularity}bool keep_nan=False",
    ("amax",),
    _plan_amax,
    numerics.amax,
    {"granularity": GRANULARITIES, "op": DEINTERLEAVE_OPS},
)
AMAX = product("amax", sources.PLAIN, _AMAX_OF, module="amax")
DEINTERLEAVE_AMAX = product("deinterleave_amax", sources.DEINTERLEAVED, _AMAX_OF, module="amax")

OPS: tuple[Op, ...] = (AMAX, DEINTERLEAVE_AMAX)
"""The ops that are half of a quantization, but for norms."""


def _check_group(process_group: object) -> None:
    if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            "process_group: expected a torch.distributed.ProcessGroup of this rank, got "
            f"{type(process_group).__name__}. Pass mesh.get_group('tp') or "
            "torch.distributed.group.WORLD"
        )


def check_no_scale(process_group: object, given: object, name: str) -> None:
    """Raises if there is nothing to reduce, or no group to reduce over."""
    _check_group(process_group)
    if given is not None:
        raise ValueError(
            f"process_group: expected None beside {name}, got a group. With a given {name} no amax "
            "is computed"
        )


def check_granularity_of_norm(granularity: str) -> None:
    """Raises where a norm has its amaxes by row."""
    if granularity == "row":
        raise ValueError(
            "granularity: expected 'tensor' with process_group and a norm, got 'row'. A norm "
            "needs whole rows, so the rank knows the amax of each row"
        )


def check_blocks(cols: int, granularity: str, process_group: ProcessGroup) -> None:
    """Raises where columns are divided, which amaxes by row mean, in the middle of a block."""
    rank, ranks = process_group.rank(), process_group.size()
    if granularity == "row" and cols % NVFP4_BLOCK and rank + 1 < ranks:
        raise ValueError(
            f"columns of rank {rank} of {ranks}: expected a multiple of "
            f"{NVFP4_BLOCK} on all ranks but the last, got {cols}. Otherwise a block of "
            f"{NVFP4_BLOCK} would be divided"
        )


def max_over(amax: Tensor, process_group: ProcessGroup) -> Tensor:
    """The largest of each element over a group's ranks, in place; NaN where any is NaN."""
    dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=process_group)
    return amax


def norm_amax_over(
    process_group: ProcessGroup, op: Op, arguments: Mapping[str, Any], inv_rms: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The maxima of a norm over a group, and inv_rms, in the buffer that there may be for it.

    Args:
        process_group: the ranks.
        op: the first half.
        arguments: its arguments by name, and others.
        inv_rms: a buffer, or None.
    """
    if inv_rms is None:
        amax, inv_rms = op.made(arguments)
    else:
        tensors = op.tensors(arguments)
        amax = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=tensors[0].device)
        seen = dict(zip(op.names, tensors, strict=True))
        if op.direct(seen, (amax, inv_rms)) is NotImplemented:
            op.dispatched(tensors, (amax, inv_rms))
    assert inv_rms is not None
    return max_over(amax, process_group), inv_rms


def amax_buffer(out: object) -> Tensor | None:
    """The amax of buffers for FP8 as (n,), which the first half writes."""
    if out is None:
        return None
    if not isinstance(out, QuantizedTensor):
        raise TypeError(
            f"out: expected a QuantizedTensor, got {type(out).__name__}. "
            "QuantizedTensor.empty(shape, ...) makes one"
        )
    if out.amax is None:
        raise ValueError(
            "out.amax: expected a buffer, as a call with process_group has this result, got None. "
            "Make the buffers with amax=True"
        )
    return out.amax.view(-1)
