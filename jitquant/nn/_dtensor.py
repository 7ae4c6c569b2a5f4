"""`Float8BlockwiseLinear` with a weight that is a DTensor, as tensor parallelism makes it.

Each rank multiplies the part that it has. What is quantized is what the whole layer would quantize:
1x128 groups and 128x128 blocks are the same on every rank as long as none is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from jitquant.nn._matmul import TILE, output_dtype


def check_division(size: int, ranks: int, block: int, name: str) -> None:
    """Raises where dividing ``size`` between ranks, as ``Shard`` does, divides a block.

    Args:
        size: of the dimension.
        ranks: that it is divided between.
        block: elements that share a scale.
        name: what an error calls the size.
    """
    each = -(-size // ranks)
    if ranks > 1 and each % block:
        raise ValueError(
            f"{name}: expected a multiple of {block} on each of {ranks} ranks, got {each} of "
            f"{size}. {block} neighbors share a scale"
        )
    if (ranks - 1) * each >= size:
        raise ValueError(
            f"{name}: expected a size with a part for each of {ranks} ranks, got {size}. Divide it "
            "by fewer"
        )


def forward(
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    multiply: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> Tensor:
    """``x @ weight.T + bias`` with a weight in parts, each rank with its own.

    Args:
        x: (..., in_features), a DTensor over the weight's mesh, of any placement.
        weight: (out_features, in_features), a DTensor over one dimension of a mesh: divided between
            rows (column-wise parallel), between columns (row-wise parallel), or whole on each rank.
        bias: (out_features,), or None.
        multiply: `Float8BlockwiseLinear.multiply`: the product of what this rank has.

    Returns:
        A DTensor (..., out_features): divided in the last dimension, a partial sum, or, where the
        weight is whole, divided as ``x`` is.

    Raises:
        TypeError: ``x`` is not a DTensor.
        ValueError: the mesh has more dimensions, or a block is divided.
    """
    out_features, in_features = weight.shape
    mesh = weight.device_mesh
    if not isinstance(x, DTensor):
        raise TypeError(
            "x and weight: expected two DTensors, got a Tensor for x. parallelize_module with "
            "ColwiseParallel or RowwiseParallel makes both"
        )
    if mesh.ndim != 1 or x.device_mesh != mesh:
        raise ValueError(
            f"weight and x: expected one mesh of one dimension, got {mesh} and {x.device_mesh}. "
            "Pass mesh['tp'] to parallelize_module"
        )
    placement, last = weight.placements[0], x.dim() - 1
    wanted: Any
    of_input: Any
    of_weight: Any
    made: Any
    if placement == Shard(0):
        check_division(out_features, mesh.size(), TILE, "out_features")
        wanted, of_input, of_weight, made = Replicate(), Partial(), Shard(0), Shard(last)
    elif placement == Shard(1):
        check_division(in_features, mesh.size(), TILE, "in_features")
        wanted, of_input, of_weight, made = Shard(last), Shard(last), Shard(1), Partial()
    elif placement == Replicate():
        wanted = x.placements[0]
        if not (isinstance(wanted, Shard) and wanted.dim < last):
            wanted = Replicate()
        whole = wanted == Replicate()
        of_input, of_weight, made = wanted, Replicate() if whole else Partial(), wanted
    else:
        raise ValueError(
            "placement of the weight: expected one of Shard(0), Shard(1), Replicate(), got "
            f"{placement}"
        )
    mine = x.redistribute(mesh, [wanted]).to_local(grad_placements=[of_input])
    # to_local() makes a new tensor each time; the cache looks at the one that all are made of,
    # whose version does not grow with that of the DTensor.
    kept, version = weight._local_tensor, weight._version
    part = weight.to_local(grad_placements=[of_weight])
    product = multiply(mine, part, kept, version)
    shape = torch.Size((*x.shape[:-1], out_features))
    stride = torch.empty(shape, device="meta").stride()
    y: Tensor = DTensor.from_local(
        product, mesh, [made], run_check=False, shape=shape, stride=stride
    )
    if bias is not None:
        y = y + bias.to(output_dtype(x))
    return y
