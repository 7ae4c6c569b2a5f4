"""`NVFP4Linear`: a linear layer for inference whose weight is stored in four bits.

`Workspace` is the memory that its calls need, for those that are to allocate none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jitquant.formats import (
    CODES_PER_BYTE,
    FP4_DTYPE,
    GRANULARITIES,
    INPUT_DTYPES,
    NVFP4_BLOCK,
    RECIPES,
    SCALE_DTYPE,
    SCALE_LAYOUTS,
    Granularity,
    Recipe,
    ScaleLayout,
    ceil_to,
    one_of,
    swizzled_shape,
)
from jitquant.nn._matmul import has_nvfp4, output_dtype
from jitquant.nn._nvfp4_mm import Part, bytes_of_parts, carve, nvfp4_mm, scratch_parts
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4
from jitquant.ops.nvfp4 import quantize_nvfp4, quantize_weight_nvfp4
from jitquant.tensors.nvfp4 import QuantizedActivation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_QUANTIZED = ("weight_packed", "weight_scale", "weight_gsa")


class NVFP4Linear(nn.Module):
    """``x @ weight.T + bias`` with a weight in NVFP4, 0.5625 bytes an element, for inference.

    On sm_100 and newer the product is ``torch.nn.functional.scaled_mm`` with 1x16 scales in 128x4
    tiles, where in_features up to a multiple of 16 is one of 32 and out_features one of 16.
    Elsewhere codes and scales are put together without rounding (in bf16 on a GPU, fp32 on a CPU),
    multiplied with sums in fp32, and the gsas are applied to the sum: the accuracy is that of
    NVFP4. On a GPU up to 64 rows of linear scales go through `jitquant.nvfp4_linear`, which reads
    the weight as it is stored; for more rows a dequantized weight is there while the call lasts.

    Nothing is differentiable.

    Attributes:
        weight_packed: uint8 (out_features, ceil(in_features / 16) * 8), two E2M1 codes in a byte.
        weight_scale: ``float8_e4m3fn`` (out_features, ceil(in_features / 16)), or swizzled; in a
            state_dict always the former.
        weight_gsa: fp32 (1,), the factor that dequantizes the whole weight.
        bias: (out_features,) parameter without gradient, or None.
        amax_group: the ranks that have the other columns of the input, as
            `jitquant.nn.parallel.RowwiseParallel` divides them; None: there are none.

    ``to(dtype)``, ``half()`` and the like change the bias and the default dtype of
    `run_from_quantized`, and leave codes, scales and gsa as they are.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_gsa: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        granularity: Granularity = "tensor",
        recipe: Recipe = "te",
        scale_layout: ScaleLayout | None = None,
    ) -> None:
        """A layer whose weight is zero, for ``load_state_dict``; see `from_linear`.

        Args:
            in_features: K.
            out_features: N.
            bias: whether there is one.
            device: default is PyTorch's.
            dtype: of the bias, and of what `run_from_quantized` returns; default is PyTorch's.
            granularity: of the activations that `forward` quantizes: "tensor" or "row".
            recipe: "te" or "vllm", for weight and activations.
            scale_layout: of weight_scale: "linear", or "swizzled_128x4", which scaled_mm takes;
                None: the latter where ``device`` has it.

        Raises:
            TypeError, ValueError: an argument is none of these.
        """
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{name} is {size}; accepted is 1 or more")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"dtype is {dtype}; accepted are bfloat16, float16 and float32")
        one_of("granularity", granularity, GRANULARITIES)
        one_of("recipe", recipe, RECIPES)
        one_of("scale_layout", scale_layout, (*SCALE_LAYOUTS, None))
        self.in_features = in_features
        self.out_features = out_features
        self.granularity: Granularity = granularity
        self.recipe: Recipe = recipe
        groups = ceil_to(in_features, NVFP4_BLOCK) // NVFP4_BLOCK
        packed = torch.zeros(
            out_features, groups * NVFP4_BLOCK // CODES_PER_BYTE, dtype=torch.uint8, device=device
        )
        if scale_layout is None:
            scale_layout = "swizzled_128x4" if has_nvfp4(packed.device) else "linear"
        self.scale_layout: ScaleLayout = scale_layout
        swizzled = scale_layout == "swizzled_128x4"
        shape = swizzled_shape(out_features, groups) if swizzled else (out_features, groups)
        scales = torch.zeros(shape, dtype=torch.uint8, device=device).view(SCALE_DTYPE)
        self.register_buffer("weight_packed", packed)
        self.register_buffer("weight_scale", scales)
        self.register_buffer("weight_gsa", torch.zeros(1, dtype=torch.float32, device=device))
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.dtype = dtype
        self.amax_group: ProcessGroup | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        granularity: Granularity = "tensor",
        recipe: Recipe = "te",
        scale_layout: ScaleLayout | None = None,
    ) -> NVFP4Linear:
        """A layer with the weight of ``linear`` in NVFP4, and a copy of its bias.

        Args:
            linear: of the class ``nn.Linear`` itself.
            granularity, recipe, scale_layout: as for the class.

        Raises:
            TypeError: it is of another class, whose forward may be another, or of a dtype that
                cannot be quantized.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(
                f"linear is {type(linear).__name__}; accepted is torch.nn.Linear itself, as "
                "another class may compute something else"
            )
        weight = linear.weight.detach()
        made = cls(
            *(linear.in_features, linear.out_features, linear.bias is not None),
            *(weight.device, weight.dtype),
            granularity=granularity,
            recipe=recipe,
            scale_layout=scale_layout,
        )
        q = quantize_weight_nvfp4(
            weight if weight.stride(-1) == 1 else weight.contiguous(),
            recipe=recipe,
            scale_layout=made.scale_layout,
        )
        made.weight_packed, made.weight_scale, made.weight_gsa = q.x_fp4_bytes, q.x_sf, q.gsa
        if made.bias is not None:
            made.bias.copy_(linear.bias.detach())
        return made.train(linear.training)

    @property
    def weight(self) -> QuantizedActivation:
        """The weight (out_features, in_features) as views of the buffers."""
        return QuantizedActivation(
            self.weight_packed.view(FP4_DTYPE),
            self.weight_scale,
            self.weight_gsa,
            None,
            self.in_features,
            self.scale_layout,
            "tensor",
            self.recipe,
        )

    def forward(
        self, x: Tensor, *, out: Tensor | None = None, workspace: Workspace | None = None
    ) -> Tensor:
        """Quantizes ``x``, then `run_from_quantized`.

        Args:
            x: (..., in_features), bfloat16, float16 or float32.
            out: contiguous (..., out_features) of x's dtype to write to.
            workspace: what else the call writes to. With both nothing is allocated, where the last
                dimension of ``x`` is contiguous.

        Returns:
            (..., out_features) of x's dtype, or of autocast's where autocast is enabled; or
            ``out``.

        Raises:
            RuntimeError: the layer is in training mode and ``x`` wants a gradient.
            TypeError, ValueError: an argument is not accepted.
        """
        if self.training and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "x requires grad, and NVFP4Linear has no gradient. Call .eval() or use "
                "torch.no_grad() for inference; to train use Float8BlockwiseLinear"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; accepted is (..., {self.in_features}), as "
                f"in_features is {self.in_features}"
            )
        x = x.detach()
        parts = self._input_parts(x.shape[:-1])
        into = scratch = None
        if workspace is not None and not torch.compiler.is_compiling():
            buffer = workspace.buffer_for(self, math.prod(x.shape[:-1]), x.device)
            x_fp4, x_sf, gsa = carve(buffer, parts)
            how = (self.scale_layout, self.granularity, self.recipe)
            into = QuantizedActivation(x_fp4, x_sf, gsa, None, self.in_features, *how)
            scratch = buffer[bytes_of_parts(parts) :]
        q = quantize_nvfp4(
            x if x.stride(-1) == 1 else x.contiguous(),
            granularity=self.granularity,
            recipe=self.recipe,
            scale_layout=self.scale_layout,
            amax_group=self.amax_group,
            out=into,
        )
        return self._run(q, output_dtype(x), out, scratch)

    def run_from_quantized(
        self,
        q: QuantizedActivation,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        """The product with an activation that is quantized: one for the layers that share it.

        Args:
            q: (..., in_features), of any function that quantizes to NVFP4, of any scale layout,
                granularity and recipe, packed along its last dimension.
            dtype: bfloat16, float16 or float32; default that of ``out``, or of the layer.
            out: contiguous (..., out_features) of ``dtype`` to write to.
            workspace: what else the call writes to. With both nothing is allocated, except on
                sm_100 for scales of another layout than the layer's `scale_layout`.

        Returns:
            (..., out_features), or ``out``.

        Raises:
            TypeError, ValueError: an argument is not accepted.
        """
        if not isinstance(q, QuantizedActivation):
            raise TypeError(
                f"q is {type(q).__name__}; accepted is a QuantizedActivation. For a tensor call "
                "the layer itself"
            )
        if q.dim != -1:
            raise ValueError(
                f"q.dim is {q.dim}; accepted is -1, an activation packed along its last dimension"
            )
        if q.shape[-1] != self.in_features:
            raise ValueError(
                f"q has shape {q.shape}; accepted is (..., {self.in_features}), as in_features is "
                f"{self.in_features}"
            )
        if q.device != self.weight_packed.device:
            raise ValueError(
                f"q is on {q.device} and the layer on {self.weight_packed.device}; accepted are "
                "both on one device. Move one with .to(device)"
            )
        if dtype is None:
            dtype = self.dtype if out is None else out.dtype
        if dtype not in INPUT_DTYPES:
            raise TypeError(f"dtype is {dtype}; accepted are bfloat16, float16 and float32")
        scratch = None
        if workspace is not None and not torch.compiler.is_compiling():
            scratch = workspace.buffer_for(self, q.num_tokens, q.device)
        return self._run(q, dtype, out, scratch)

    def _run(
        self,
        q: QuantizedActivation,
        dtype: torch.dtype,
        out: Tensor | None,
        scratch: Tensor | None,
    ) -> Tensor:
        shape = (*q.shape[:-1], self.out_features)
        if out is not None:
            if out.dtype != dtype:
                raise TypeError(f"out is {out.dtype}; accepted is {dtype} for this call")
            if tuple(out.shape) != shape or not out.is_contiguous() or out.device != q.device:
                raise ValueError(
                    f"out has shape {tuple(out.shape)} and strides {out.stride()} on {out.device}; "
                    f"accepted is a contiguous tensor of shape {shape} on {q.device}"
                )
        bias = None if self.bias is None else self.bias.detach()
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, device=q.device) if out is None else out
        return nvfp4_mm(q, self.weight, bias, dtype, out=out, scratch=scratch)

    def extra_repr(self) -> str:
        """Sizes and formats, for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, granularity={self.granularity!r}, "
            f"recipe={self.recipe!r}, scale_layout={self.scale_layout!r}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> NVFP4Linear:
        # As bytes, which a change of dtype leaves alone: codes, scales and gsa are what they are.
        quantized = {id(self._buffers[name]) for name in _QUANTIZED}

        def of_bytes(t: Tensor) -> Any:
            if id(t) not in quantized:
                return fn(t)
            return fn(t.view(torch.uint8)).view(t.dtype)

        super()._apply(of_bytes, recurse)  # type: ignore[no-untyped-call]
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.weight_packed.device))
        self.dtype = probe.dtype
        return self

    def _input_parts(self, leading: tuple[int, ...]) -> tuple[Part, ...]:
        """Buffers for the quantized input."""
        rows, packed = math.prod(leading), self.weight_packed.shape[1]
        swizzled = self.scale_layout == "swizzled_128x4"
        groups = self._groups()
        return (
            ((*leading, packed), FP4_DTYPE),
            (swizzled_shape(rows, groups) if swizzled else (*leading, groups), SCALE_DTYPE),
            ((rows if self.granularity == "row" else 1,), torch.float32),
        )

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of a `Workspace` for calls with up to ``rows`` rows."""
        product = scratch_parts(rows, self.weight_packed)
        return bytes_of_parts((*self._input_parts((rows,)), *product))

    def _groups(self) -> int:
        return self.weight_packed.shape[1] * CODES_PER_BYTE // NVFP4_BLOCK

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale_layout != "linear":
            linear = unswizzle_128x4(self.weight_scale, self.out_features, self._groups())
            destination[f"{prefix}weight_scale"] = linear

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        name = f"{prefix}weight_scale"
        shape = (self.out_features, self._groups())
        given = state_dict.get(name)
        if self.scale_layout != "linear" and given is not None and given.shape == shape:
            state_dict = {**state_dict, name: swizzle_128x4(given)}
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Workspace:
    """What calls of `NVFP4Linear` write to besides their results, allocated once.

    One serves all layers of a model and all of their calls, as long as these come one after the
    other on one stream. A call with ``out=`` and ``workspace=`` allocates nothing, and may be
    captured in a CUDA graph whose replays need no memory of their own. Under ``torch.compile``,
    which plans its memory itself, it is left alone. One exception is left: granularity "tensor"
    with more than 65536 elements of input (on sm_90; fewer before) takes some kilobytes from
    PyTorch's allocator. Granularity "row" never does.

    Where there is no NVFP4 ``scaled_mm`` a dequantized weight lies in it during a call, so it is as
    large as the largest layer in bf16 (fp32 on a CPU).

    Attributes:
        rows: that it is for, at most.
        buffer: uint8.
    """

    def __init__(self, layers: nn.Module | Iterable[nn.Module], rows: int) -> None:
        """Allocates it where the layers are.

        Args:
            layers: a model, or modules; all that are `NVFP4Linear` or have some in them.
            rows: tokens of a call, at most.

        Raises:
            ValueError: ``rows`` is less than 1, there is no such layer, or they are on several
                devices.
        """
        if rows < 1:
            raise ValueError(f"rows is {rows}; accepted is 1 or more")
        modules = (layers,) if isinstance(layers, nn.Module) else tuple(layers)
        found = [m for module in modules for m in module.modules() if isinstance(m, NVFP4Linear)]
        devices = {layer.weight_packed.device for layer in found}
        if len(devices) != 1:
            has = f"are on {', '.join(sorted(map(str, devices)))}" if found else "are none"
            raise ValueError(
                f"the NVFP4Linear layers {has}; accepted are one or more on one device"
            )
        self.rows = rows
        size = max(layer.workspace_bytes(rows) for layer in found)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=devices.pop())

    def buffer_for(self, layer: NVFP4Linear, rows: int, device: torch.device) -> Tensor:
        """The buffer, for a call of ``layer`` with so many rows.

        Raises:
            ValueError: it is on another device, or too small.
        """
        needed = layer.workspace_bytes(rows)
        if self.buffer.device != device or self.buffer.numel() < needed:
            raise ValueError(
                f"workspace has {self.buffer.numel()} bytes on {self.buffer.device}; accepted are "
                f"at least {needed} on {device} for {rows} rows of this layer. Make it by "
                f"Workspace(model, rows={rows})"
            )
        return self.buffer
