"""Tensor parallelism: styles for ``parallelize_module`` that know the layers of `jitquant.nn`.

PyTorch's own ``ColwiseParallel`` and ``RowwiseParallel`` do for `Float8BlockwiseLinear`, whose
parameters are those of ``nn.Linear``, and ``SequenceParallel`` and ``PrepareModuleInput`` for what
is around it. `NVFP4Linear` has packed buffers, which these styles divide; for every other module
they do what PyTorch's do, so that one plan may name both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel

from jitquant.formats import NVFP4_BLOCK, SCALE_DTYPE
from jitquant.nn._dtensor import check_division
from jitquant.nn.nvfp4 import NVFP4Linear
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel``, which also takes an `NVFP4Linear`.

    Each rank keeps the rows of the weight that make its columns of the result. The input is whole
    on every rank, so its amax is as well; it is gathered first where ``input_layouts`` says that it
    is divided, as after a sequence-parallel norm.

    The layer's buffers and ``out_features`` become those of the part: save a state_dict before. A
    quantized input of `NVFP4Linear.run_from_quantized` must be whole; the result is the part.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, NVFP4Linear):
            return super()._apply(module, device_mesh)
        size = module.out_features
        check_division(size, device_mesh.size(), 1, "out_features")
        packed, scales = _divided(module, device_mesh, 0, self.src_data_rank)
        module.out_features = packed.shape[0]
        if module.bias is not None:
            module.bias = _part_of_bias(module.bias, device_mesh, self.src_data_rank)
        _keep(module, packed, scales)
        _move(module, device_mesh, self, Replicate(), Shard(-1), size)
        return module


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel``, which also takes an `NVFP4Linear`.

    Each rank keeps the columns of the weight that its columns of the input are multiplied with, a
    multiple of 16, and the products are added up: by an all_reduce, or, with
    ``output_layouts=Shard(1)``, by a reduce_scatter to sequence-parallel parts. The input's amaxes
    are those of the whole (``process_group`` of `jitquant.quantize_nvfp4`), so what is quantized
    is, to the bit, what the whole layer would quantize.

    The layer's buffers and ``in_features`` become those of the part, and the bias zero on all ranks
    but the first: save a state_dict before. ``residual`` and ``out`` are refused with a ValueError,
    because a rank's own result is a part of a sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, NVFP4Linear):
            return super()._apply(module, device_mesh)
        size = module.in_features
        check_division(size, device_mesh.size(), NVFP4_BLOCK, "in_features")
        packed, scales = _divided(module, device_mesh, 1, self.src_data_rank)
        rank, each = device_mesh.get_local_rank(), -(-size // device_mesh.size())
        module.in_features = min(each, size - rank * each)
        _keep(module, packed, scales)
        module.process_group = device_mesh.get_group()
        if module.bias is not None and rank > 0:
            module.bias = nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
        _move(module, device_mesh, self, Shard(-1), Partial(), module.out_features)
        return module


def _divided(
    module: NVFP4Linear, mesh: DeviceMesh, dim: int, source: int | None
) -> tuple[Tensor, Tensor]:
    """This rank's part of the packed weight and of its scales, linear, as bytes."""
    scales = module.weight_scale
    if module.scale_layout != "linear":
        groups = module.weight_packed.shape[1] // (NVFP4_BLOCK // 2)
        scales = unswizzle_128x4(scales, module.out_features, groups)
    parts = []
    for whole in (module.weight_packed, scales.view(torch.uint8)):
        divided = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=source)
        parts.append(divided.to_local().contiguous())
    return parts[0], parts[1]


def _part_of_bias(bias: nn.Parameter, mesh: DeviceMesh, source: int | None) -> nn.Parameter:
    divided = distribute_tensor(bias.detach(), mesh, [Shard(0)], src_data_rank=source)
    return nn.Parameter(divided.to_local().clone(), requires_grad=False)


def _keep(module: NVFP4Linear, packed: Tensor, scales: Tensor) -> None:
    scales = scales.view(SCALE_DTYPE)
    swizzled = module.scale_layout != "linear"
    module.weight_packed = packed
    module.weight_scale = swizzle_128x4(scales) if swizzled else scales


def _move(
    module: NVFP4Linear, mesh: DeviceMesh, style: Any, wanted: Any, made: Any, size: int
) -> None:
    """Has the layer's input and result moved to where they are wanted.

    Args:
        module: the layer, which takes and gives tensors of its rank.
        mesh: of the ranks.
        style: with input_layouts, output_layouts and use_local_output.
        wanted: the placement of the input that the layer takes.
        made: that of what it gives.
        size: last dimension of the result, of which ``made`` may be a part.
    """
    (given,), (asked,) = style.input_layouts, style.output_layouts
    refused = [] if asked == made else ["out"]
    if made == Partial():
        refused = ["residual", "out"]
    # Each rank has a part of the gradient of an input that is whole on all of them.
    grads = [Partial()] if wanted == Replicate() else None

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for name in refused:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}: expected None, got a tensor. The result of this rank is a part that "
                    f"{type(style).__name__} adds up or moves. Use what the layer returns"
                )
        x, *rest = args or (kwargs["x"],)
        kwargs = {name: value for name, value in kwargs.items() if name != "x"}
        if not isinstance(x, DTensor):
            if given == wanted and (grads is None or not x.requires_grad):
                return (x, *rest), kwargs
            x = DTensor.from_local(x, mesh, [given], run_check=False)
        local = x.redistribute(mesh, [wanted]).to_local(grad_placements=grads)
        return (local, *rest), kwargs

    def after(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        if asked == made and style.use_local_output:
            return y
        shape = torch.Size((*y.shape[:-1], size))
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(y, mesh, [made], run_check=False, shape=shape, stride=stride)
        moved: DTensor = whole.redistribute(mesh, [asked])
        return moved.to_local() if style.use_local_output else moved

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
