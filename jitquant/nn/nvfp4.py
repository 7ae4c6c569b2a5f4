"""`NVFP4Linear`: a linear layer for inference whose weight is stored in four bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jitquant.formats import (
    CODES_PER_BYTE,
    COMPUTES,
    FP4_DTYPE,
    GRANULARITIES,
    NVFP4_BLOCK,
    RECIPES,
    SCALE_DTYPE,
    SCALE_LAYOUTS,
    SELECTS,
    Compute,
    Granularity,
    Recipe,
    ScaleLayout,
    Select,
    fp4_shapes,
    one_of,
)
from jitquant.nn._codes import QuantizedModule
from jitquant.nn._linear import (
    check_columns,
    check_dtype,
    check_input_gsa,
    check_linear,
    check_same_dtype,
    check_tensor,
)
from jitquant.nn._matmul import has_microscaling, is_exporting, output_dtype
from jitquant.nn._nvfp4_mm import (
    Operand,
    evenly_spaced,
    nvfp4_mm,
    nvfp4_mm_bytes,
    quantized_bytes,
)
from jitquant.nn.mxfp4 import MXFP4Linear
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4
from jitquant.ops.nvfp4 import quantize_nvfp4, quantize_weight_nvfp4
from jitquant.tensors.nvfp4 import NVFP4Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NVFP4Linear(QuantizedModule):
    """``x @ weight.T + bias`` with a weight in NVFP4, 0.5625 bytes an element, for inference.

    The input is quantized to NVFP4 too ("W4A4"), or not with ``weight_only`` ("W4A16").
    On sm_100 and newer, two quantized operands are multiplied by
    ``torch.nn.functional.scaled_mm`` with 1x16 scales in 128x4 tiles, if in_features rounded up to
    a multiple of 16 is a multiple of 32 and out_features is a multiple of 16. Otherwise
    `jitquant.nvfp4_linear` reads the weight as it is stored: codes times scales are exact, sums are
    in fp32, and gsas, bias and residual are applied to the sum. If the GPU does not have compute
    capability 9.0, or in_features is not a multiple of 64, more than 64 rows are multiplied by a
    temporary dequantized weight.

    With ``weight_only`` and ``compute="fp8"``, 256 rows or more (prefill) are multiplied in FP8:
    the input is quantized to E4M3 with a scale for each row, and the weight is rounded from NVFP4
    to E4M3 on the fly, for up to twice the rate of the tensor cores. Fewer rows (decode) are not
    affected. See `jitquant.nvfp4_linear`, and format "nvfp4_fp8" of `jitquant.nn.report` for the
    loss of accuracy. The result is rounded to bf16, and once more with ``residual`` or for another
    dtype. Without kernels for it, PyTorch multiplies the same numbers in bf16 and rounds alike,
    which saves neither memory nor time.

    The weight has no gradient. The input has the gradient of a product with the dequantized weight
    (``dx = dy @ W``), so layers before this one and adapters can be trained.

    Attributes:
        weight_packed: uint8 (out_features, ceil(in_features / 16) * 8), two E2M1 codes in a byte.
        weight_scale: ``float8_e4m3fn`` (out_features, ceil(in_features / 16)), or swizzled; never
            swizzled in a state_dict.
        weight_gsa: fp32 (1,), the factor that dequantizes the whole weight.
        input_gsa: fp32 (1,), a calibrated gsa for inputs, which saturate beyond 2688 times it;
            None: computed in each call, which takes one more launch.
        bias: (out_features,) parameter without gradient, or None.
        weight_only: whether `forward` does not quantize its input.
        compute: "exact" or "fp8".
        input_select: how `forward` selects the block scales of its input; see `__init__`.
        process_group: the ranks that have the other columns of the input, as
            `jitquant.nn.parallel.RowwiseParallel` splits them; None: not split.

    ``to(dtype)``, ``half()`` and the like change only the bias and the default dtype of
    `run_from_quantized`.
    """

    quantized = ("weight_packed", "weight_scale", "weight_gsa", "input_gsa")
    weight_packed: Tensor
    weight_scale: Tensor
    weight_gsa: Tensor
    input_gsa: Tensor | None
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
        weight_only: bool = False,
        compute: Compute = "exact",
        input_select: Select = "none",
    ) -> None:
        """A layer whose weight is zero, for ``load_state_dict``; see `from_linear`.

        Args:
            in_features: K.
            out_features: N.
            bias: whether there is one.
            device: default is PyTorch's.
            dtype: of the bias, and of what `run_from_quantized` returns; default is PyTorch's.
            granularity: of the activations that `forward` quantizes: "tensor" or "row".
            recipe: "te", "vllm" or "te_flush", for weight and activations.
            scale_layout: of weight_scale: "linear", or "swizzled_128x4" for scaled_mm; None: the
                latter if ``device`` supports scaled_mm and ``weight_only`` is False.
            weight_only: whether `forward` does not quantize its input, bfloat16 or float16.
            compute: "exact"; "fp8": with ``weight_only``, multiplies 256 rows or more in FP8.
            input_select: of the input's block scales, as ``select`` of `jitquant.quantize_nvfp4`:
                "4over6_mse" and the like are more accurate than "none". Files do not have it.

        Raises:
            TypeError, ValueError: an argument is not one of these.
        """
        super().__init__()
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{name}: expected 1 or more, got {size}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_dtype(dtype)
        one_of("granularity", granularity, GRANULARITIES)
        one_of("recipe", recipe, RECIPES)
        one_of("scale_layout", scale_layout, (*SCALE_LAYOUTS, None))
        one_of("compute", compute, COMPUTES)
        if compute == "fp8" and not weight_only:
            raise ValueError(
                "compute: expected 'exact' without weight_only, got 'fp8'. An input in NVFP4 is "
                "multiplied as it is"
            )
        one_of("input_select", input_select, SELECTS)
        if input_select != "none" and (weight_only or recipe != "te"):
            raise ValueError(
                f"input_select: expected 'none' with weight_only={weight_only} and "
                f"recipe={recipe!r}, got {input_select!r}. Other values need weight_only=False and "
                "recipe='te'"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.granularity: Granularity = granularity
        self.recipe: Recipe = recipe
        self.weight_only = weight_only
        self.compute: Compute = compute
        self.input_select: Select = input_select
        sizes = (out_features, in_features)
        packed = torch.zeros(fp4_shapes(sizes)[0], dtype=torch.uint8, device=device)
        if scale_layout is None:
            tiles = has_microscaling(packed.device) and not weight_only
            scale_layout = "swizzled_128x4" if tiles else "linear"
        self.scale_layout: ScaleLayout = scale_layout
        shape = fp4_shapes(sizes, scale_layout)[1]
        scales = torch.zeros(shape, dtype=torch.uint8, device=device).view(SCALE_DTYPE)
        self.register_buffer("weight_packed", packed)
        self.register_buffer("weight_scale", scales)
        self.register_buffer("weight_gsa", torch.zeros(1, dtype=torch.float32, device=device))
        self.register_buffer("input_gsa", None)
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros, requires_grad=False)
        self.dtype = dtype
        self.process_group: ProcessGroup | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        granularity: Granularity = "tensor",
        recipe: Recipe = "te",
        scale_layout: ScaleLayout | None = None,
        weight_only: bool = False,
        compute: Compute = "exact",
        input_select: Select = "none",
        gsa: float | Tensor | None = None,
        weight: NVFP4Tensor | None = None,
        input_gsa: Tensor | None = None,
    ) -> NVFP4Linear:
        """A layer with the weight of ``linear`` in NVFP4, and a copy of its bias.

        Args:
            linear: of the class ``nn.Linear`` itself.
            granularity, recipe, scale_layout, weight_only, compute, input_select: as for the class.
            gsa: of the weight, as `jitquant.quantize_weight_nvfp4` takes it; None to compute it.
                `convert` gives layers that an engine fuses the largest of theirs.
            weight: the weight of ``linear``, already quantized, with one gsa and linear scales;
                None: rounds to nearest.
            input_gsa: fp32 (1,), a static gsa of the inputs, or None.

        Raises:
            TypeError: ``linear`` is of another class, whose forward may be another, or of a dtype
                that cannot be quantized; or another argument is not accepted.
            ValueError: an argument is not accepted.
        """
        check_linear(linear)
        plain = linear.weight.detach()
        if weight is not None:
            _check_weight(weight, plain)
        if input_gsa is not None:
            check_input_gsa(input_gsa, "input_gsa")
        made = cls(
            *(linear.in_features, linear.out_features, linear.bias is not None),
            *(plain.device, plain.dtype),
            granularity=granularity,
            recipe=recipe,
            scale_layout=scale_layout,
            weight_only=weight_only,
            compute=compute,
            input_select=input_select,
        )
        if weight is None:
            weight = quantize_weight_nvfp4(
                plain if plain.stride(-1) == 1 else plain.contiguous(), gsa=gsa, recipe=recipe
            )
        scales = weight.x_sf
        made.weight_scale = scales if made.scale_layout == "linear" else swizzle_128x4(scales)
        made.weight_packed, made.weight_gsa = weight.x_fp4_bytes, weight.gsa
        made.input_gsa = input_gsa
        if made.bias is not None:
            made.bias.copy_(linear.bias.detach())
        return made.train(linear.training)

    @classmethod
    def from_mxfp4(cls, layer: MXFP4Linear, *, compute: Compute = "exact") -> NVFP4Linear:
        """A ``weight_only`` layer with the values of an MXFP4 weight: the same numbers, faster.

        Shares the memory of the codes; see `jitquant.NVFP4Tensor.from_mxfp4`.

        Args:
            layer: the source of weight and bias.
            compute: as for the class.

        Raises:
            ValueError: the scales of the weight exceed the range of NVFP4.
        """
        q = NVFP4Tensor.from_mxfp4(layer.weight_packed, layer.weight_scale)
        made = cls(
            *(layer.in_features, layer.out_features, layer.bias is not None),
            *(layer.weight_packed.device, layer.dtype),
            scale_layout="linear",
            weight_only=True,
            compute=compute,
        )
        made.weight_packed, made.weight_scale, made.weight_gsa = q.x_fp4_bytes, q.x_sf, q.gsa
        if made.bias is not None and layer.bias is not None:
            made.bias.copy_(layer.bias.detach())
        return made.train(layer.training)

    @classmethod
    def joined(cls, layers: Sequence[NVFP4Linear]) -> NVFP4Linear:
        """Merges layers that share an input (q, k and v, or gate and up) into one.

        Its output is the concatenation of theirs, by one product. Codes and scales are copied, so
        no value changes.

        Args:
            layers: with the same gsa, as from `convert` for layers that engines fuse, and the same
                properties except out_features.

        Raises:
            ValueError: ``layers`` is empty, or they differ in something else.
        """
        if not layers:
            raise ValueError("layers: expected one or more layers, got none")
        first = layers[0]
        alike = "in_features granularity recipe scale_layout weight_only compute input_select dtype"
        for i, layer in enumerate(layers):
            for name in alike.split():
                if getattr(layer, name) != getattr(first, name):
                    raise ValueError(
                        f"layers[{i}].{name}: expected {getattr(first, name)!r}, as layers[0] has, "
                        f"got {getattr(layer, name)!r}"
                    )
            if (layer.bias is None) != (first.bias is None):
                raise ValueError(
                    "layers: expected a bias in all layers or in none, got layers[0] and "
                    f"layers[{i}], one of them without"
                )
            if not torch.equal(layer.weight_gsa, first.weight_gsa):
                raise ValueError(
                    f"layers[{i}].weight_gsa: expected {first.weight_gsa.item()}, as layers[0] "
                    f"has, got {layer.weight_gsa.item()}. Convert them in one call of convert"
                )
        if any(not _same(layer.input_gsa, first.input_gsa) for layer in layers):
            raise ValueError(
                "layers: expected one input_gsa, as they share an input, got several. Convert "
                "them in one call of convert"
            )
        made = cls(
            *(first.in_features, sum(layer.out_features for layer in layers)),
            bias=first.bias is not None,
            device=first.weight_packed.device,
            dtype=first.dtype,
            granularity=first.granularity,
            recipe=first.recipe,
            scale_layout=first.scale_layout,
            weight_only=first.weight_only,
            compute=first.compute,
            input_select=first.input_select,
        )
        scales = torch.cat([layer._linear_scales().view(torch.uint8) for layer in layers])
        scales = scales.view(SCALE_DTYPE)
        made.weight_packed = torch.cat([layer.weight_packed for layer in layers])
        made.weight_scale = scales if made.scale_layout == "linear" else swizzle_128x4(scales)
        made.weight_gsa = first.weight_gsa.clone()
        made.input_gsa = None if first.input_gsa is None else first.input_gsa.clone()
        if made.bias is not None:
            made.bias.copy_(torch.cat([layer.bias for layer in layers if layer.bias is not None]))
        return made.train(first.training)

    @property
    def weight(self) -> NVFP4Tensor:
        """The weight (out_features, in_features) as views of the buffers."""
        return NVFP4Tensor(
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
        self, x: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The product with ``x``, quantized first unless the layer is ``weight_only``.

        Args:
            x: (..., in_features) of the layer's dtype, or of any dtype under autocast; with
                ``weight_only`` bfloat16 or float16.
            residual: contiguous (..., out_features) of the result's dtype, added before the result
                is rounded.
            out: contiguous (..., out_features) of x's dtype to write to.

        Returns:
            (..., out_features) of x's dtype, or of autocast's if it is enabled; or ``out``.

        Raises:
            RuntimeError: ``out`` is given and ``x`` or ``residual`` requires grad.
            TypeError, ValueError: an argument is invalid.
        """
        check_tensor(x)
        check_columns(x.shape, self.in_features)
        check_same_dtype(x, self.dtype)
        _check_tensors(residual, out)
        wanted = x.requires_grad or (residual is not None and residual.requires_grad)
        if not (wanted and torch.is_grad_enabled()):
            return self._forward(x, residual, out)
        _check_no_out(out)
        y: Tensor = _Straight.apply(x, residual, self)  # type: ignore[no-untyped-call]
        return y

    def _forward(self, x: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
        """`forward` with checked arguments, without a gradient."""
        x, dtype = x.detach(), output_dtype(x)
        residual = None if residual is None else residual.detach()
        if self.weight_only:
            x = x.to(dtype)
            if dtype not in (torch.bfloat16, torch.float16):
                raise TypeError(
                    f"x: expected bfloat16 or float16 with weight_only, got {x.dtype}. Convert "
                    "model and inputs with .to(torch.bfloat16), or use autocast"
                )
            return self._run(evenly_spaced(x), dtype, residual, out)
        x = x if x.stride(-1) == 1 else x.contiguous()
        if is_exporting() and self.process_group is None:
            how = (self.granularity, self.recipe, self.input_select, self.scale_layout)
            values = (*quantized_bytes(x, self.input_gsa, *how), self.scale_layout)
            return nvfp4_mm_bytes(values, self._operand(), self._bias(), residual, dtype)
        q = quantize_nvfp4(
            x,
            self.input_gsa,
            granularity=self.granularity,
            recipe=self.recipe,
            select=self.input_select,
            scale_layout=self.scale_layout,
            process_group=None if self.input_gsa is not None else self.process_group,
        )
        return self._run(q, dtype, residual, out)

    def _operand(self) -> Operand:
        return self.weight_packed, self.weight_scale, self.weight_gsa, self.scale_layout

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.detach()

    def run_from_quantized(
        self,
        q: NVFP4Tensor,
        *,
        dtype: torch.dtype | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The product with a quantized activation, which several layers can share.

        Args:
            q: (..., in_features) in NVFP4 from any function, with any scale layout, granularity and
                recipe, packed along its last dimension.
            dtype: bfloat16, float16 or float32; default: that of ``out``, or of the layer.
            residual: contiguous (..., out_features) of ``dtype``, added before the result is
                rounded.
            out: contiguous (..., out_features) of ``dtype`` to write to. Then up to 16 rows with
                linear scales allocate nothing; see `jitquant.nvfp4_linear` for more rows.

        Returns:
            (..., out_features), or ``out``.

        Raises:
            RuntimeError: ``out`` is given and ``residual`` requires grad.
            TypeError, ValueError: an argument is not accepted.
        """
        if not isinstance(q, NVFP4Tensor):
            raise TypeError(
                f"q: expected an NVFP4Tensor, got {type(q).__name__}. For a tensor call the layer "
                "itself"
            )
        if q.dim != -1:
            raise ValueError(f"q.dim: expected -1 (packed along the last dimension), got {q.dim}")
        check_columns(q.shape, self.in_features, "q")
        if q.device != self.weight_packed.device:
            raise ValueError(
                f"q: expected a tensor on {self.weight_packed.device}, as the layer is, got one on "
                f"{q.device}. Move one with .to(device)"
            )
        _check_tensors(residual, out)
        if dtype is None:
            dtype = self.dtype if out is None else out.dtype
        check_dtype(dtype)
        if residual is None or not (residual.requires_grad and torch.is_grad_enabled()):
            return self._run(q, dtype, residual, out)
        _check_no_out(out)
        y: Tensor = _Added.apply(residual, self._run(q, dtype, residual.detach(), None))  # type: ignore[no-untyped-call]
        return y

    def _run(
        self,
        x: Tensor | NVFP4Tensor,
        dtype: torch.dtype,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        shape = (*x.shape[:-1], self.out_features)
        for name, given in (("out", out), ("residual", residual)):
            if given is None:
                continue
            if given.dtype != dtype:
                raise TypeError(f"{name}: expected {dtype} for this call, got {given.dtype}")
            if tuple(given.shape) != shape or not given.is_contiguous() or given.device != x.device:
                raise ValueError(
                    f"{name}: expected a contiguous tensor of shape {shape} on {x.device}, got "
                    f"shape {tuple(given.shape)} and strides {given.stride()} on {given.device}"
                )
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=dtype, device=x.device) if out is None else out
        if out is None and isinstance(x, Tensor):
            values = (x, None, None, "linear")
            return nvfp4_mm_bytes(
                values, self._operand(), self._bias(), residual, dtype, self.compute
            )
        return nvfp4_mm(
            x, self.weight, self._bias(), dtype, residual=residual, compute=self.compute, out=out
        )

    def extra_repr(self) -> str:
        """Sizes and formats, for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, granularity={self.granularity!r}, "
            f"recipe={self.recipe!r}, scale_layout={self.scale_layout!r}, "
            f"weight_only={self.weight_only}, compute={self.compute!r}, "
            f"input_select={self.input_select!r}, "
            f"static_input={self.input_gsa is not None}"
        )

    def _groups(self) -> int:
        return self.weight_packed.shape[1] * CODES_PER_BYTE // NVFP4_BLOCK

    def _linear_scales(self) -> Tensor:
        if self.scale_layout == "linear":
            return self.weight_scale
        return unswizzle_128x4(self.weight_scale, self.out_features, self._groups())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scale_layout != "linear":
            destination[f"{prefix}weight_scale"] = self._linear_scales()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        name = f"{prefix}weight_scale"
        shape = (self.out_features, self._groups())
        given = state_dict.get(name)
        if self.scale_layout != "linear" and given is not None and given.shape == shape:
            state_dict = {**state_dict, name: swizzle_128x4(given)}
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _check_tensors(residual: Tensor | None, out: Tensor | None) -> None:
    """What is given of these is a tensor."""
    for name, given in (("residual", residual), ("out", out)):
        if given is not None:
            check_tensor(given, name)


def _check_no_out(out: Tensor | None) -> None:
    if out is not None:
        raise RuntimeError(
            "x or residual requires grad, and a call with out= has no gradient. Leave it out, or "
            "use torch.no_grad() for inference"
        )


def _check_weight(weight: NVFP4Tensor, plain: Tensor) -> None:
    """A weight is quantized as a layer stores it."""
    if not isinstance(weight, NVFP4Tensor):
        raise TypeError(
            f"weight: expected an NVFP4Tensor, got {type(weight).__name__}. "
            "quantize_weight_nvfp4(linear.weight) makes one"
        )
    weight.validate("weight")
    has = {
        "dim": -1,
        "shape": tuple(plain.shape),
        "scale_layout": "linear",
        "granularity": "tensor",
    }
    for name, wanted in has.items():
        given = getattr(weight, name)
        if given != wanted:
            raise ValueError(
                f"weight.{name}: expected {wanted!r}, got {given!r}. "
                "quantize_weight_nvfp4(linear.weight) makes a weight that fits"
            )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


class _Straight(torch.autograd.Function):
    """The product of a layer, and the gradient of its input through the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, layer: NVFP4Linear) -> Tensor:
        ctx.layer, ctx.dtype, ctx.has_residual = layer, x.dtype, residual is not None
        return layer._forward(x, residual, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = ctx.layer.weight.dequantize(grad.dtype)
            with torch.autocast(grad.device.type, enabled=False):
                grad_x = (grad @ weight).to(ctx.dtype)
        return grad_x, grad if ctx.has_residual else None, None


class _Added(torch.autograd.Function):
    """A result with the gradient of the residual that was added to it."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
