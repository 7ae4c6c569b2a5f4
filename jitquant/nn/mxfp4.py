"""`MXFP4Linear`: a linear layer for inference whose weight is stored in MXFP4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from jitquant.formats import MXFP4_BLOCK, MXFP4_SCALINGS, Mxfp4Scaling, one_of
from jitquant.nn._codes import QuantizedModule
from jitquant.nn._linear import (
    check_columns,
    check_dtype,
    check_linear,
    check_same_dtype,
    check_tensor,
)
from jitquant.nn._matmul import output_dtype
from jitquant.nn._nvfp4_mm import evenly_spaced, nvfp4_mm_bytes
from jitquant.ops.recipes import dequantize_mxfp4, quantize_mxfp4
from jitquant.tensors.nvfp4 import NVFP4Tensor

_BLOCK_BYTES = MXFP4_BLOCK // 2


class MXFP4Linear(QuantizedModule):
    """``x @ weight.T + bias`` with a weight in MXFP4, for inference.

    The input is not quantized ("W4A16"). `jitquant.nvfp4_linear` multiplies the codes as they are
    stored, by the scales that `jitquant.NVFP4Tensor.from_mxfp4` gives them: the same values, to the
    bits of `NVFP4Linear.from_mxfp4`. The layer keeps these scales beside its own, 0.59375 bytes an
    element in all; files and ``state_dict`` do not have them (0.53125).

    If the exponents of the weight span more than 17, which E4M3 has no scales for, or if the input
    is float32, each call dequantizes the weight. This saves memory, but no time.

    The weight has no gradient. The input has the gradient through the dequantized weight.

    Attributes:
        weight_packed: uint8 (out_features, in_features / 2), two E2M1 codes in a byte.
        weight_scale: uint8 (out_features, in_features / 32), E8M0 exponents.
        product_scale: ``float8_e4m3fn`` (out_features, in_features / 16), the scales of the
            product; None if the weight is dequantized. Not in a state_dict.
        product_gsa: fp32 (1,), their factor, or None.
        bias: (out_features,) parameter without gradient, or None.
    """

    quantized = ("weight_packed", "weight_scale", "product_scale", "product_gsa")
    weight_packed: Tensor
    weight_scale: Tensor
    product_scale: Tensor | None
    product_gsa: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A layer whose weight is zero, for ``load_state_dict``; see `from_linear`.

        Args:
            in_features: K, a multiple of 32.
            out_features: N.
            bias: whether there is one.
            device: default is PyTorch's.
            dtype: of the bias and of the result; default is PyTorch's.

        Raises:
            TypeError, ValueError: an argument is not one of these.
        """
        super().__init__()
        if in_features < 1 or in_features % MXFP4_BLOCK:
            raise ValueError(
                f"in_features: expected a multiple of {MXFP4_BLOCK}, got {in_features}. "
                f"{MXFP4_BLOCK} neighbors share a scale"
            )
        if out_features < 1:
            raise ValueError(f"out_features: expected 1 or more, got {out_features}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_dtype(dtype)
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        for name, size in (("weight_packed", 2), ("weight_scale", MXFP4_BLOCK)):
            shape = (out_features, in_features // size)
            self.register_buffer(name, torch.zeros(shape, dtype=torch.uint8, device=device))
        for name in ("product_scale", "product_gsa"):
            self.register_buffer(name, None, persistent=False)
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros, requires_grad=False)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        scaling: Mxfp4Scaling = "even",
        weight: tuple[Tensor, Tensor] | None = None,
    ) -> MXFP4Linear:
        """A layer with the weight of ``linear`` in MXFP4, and a copy of its bias.

        Args:
            linear: of the class ``nn.Linear`` itself; its in_features is a multiple of 32.
            scaling: as for `jitquant.quantize_mxfp4`; "even" has the smallest error.
            weight: the weight of ``linear``, already quantized by `jitquant.quantize_mxfp4` with
                linear scales; None: quantizes it.

        Raises:
            TypeError: it is of another class, whose forward may be another, or of a dtype that
                cannot be quantized.
            ValueError: its in_features is not such a multiple, or ``weight`` has another shape.
        """
        check_linear(linear)
        one_of("scaling", scaling, MXFP4_SCALINGS)
        plain = linear.weight.detach()
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        made = cls(*sizes, plain.device, plain.dtype)
        if weight is None:
            weight = quantize_mxfp4(plain.contiguous(), scaling=scaling)
        codes, scales = (part.view(torch.uint8) for part in weight)
        shapes = tuple(made.weight_packed.shape), tuple(made.weight_scale.shape)
        if (tuple(codes.shape), tuple(scales.shape)) != shapes:
            raise ValueError(
                f"weight: expected codes and scales of shapes {shapes[0]} and {shapes[1]}, got "
                f"{tuple(codes.shape)} and {tuple(scales.shape)}. quantize_mxfp4(linear.weight) "
                "makes them"
            )
        made.weight_packed, made.weight_scale = codes, scales
        if made.bias is not None:
            made.bias.copy_(linear.bias.detach())
        made.weight_changed()
        return made.train(linear.training)

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> MXFP4Linear:
        """A layer with a matrix from gpt-oss files, without copying it; see `blocks`.

        Args:
            blocks: uint8 (N, K / 32, 16), the even element in the low nibble.
            scales: uint8 (N, K / 32), exponents biased by 127.
            bias: (N,), copied, or None.
            dtype: of the bias and of the result.

        Raises:
            TypeError, ValueError: an argument is not one of these.
        """
        for name, t in (("blocks", blocks), ("scales", scales)):
            if t.dtype != torch.uint8:
                raise TypeError(f"{name}: expected uint8, got {t.dtype}")
        if blocks.dim() != 3 or blocks.shape[2] != _BLOCK_BYTES or scales.shape != blocks.shape[:2]:
            raise ValueError(
                "blocks and scales: expected shapes (N, K / 32, 16) and (N, K / 32), got "
                f"{tuple(blocks.shape)} and {tuple(scales.shape)}. From a tensor of many experts "
                "take one"
            )
        rows, groups, _ = blocks.shape
        if bias is not None and tuple(bias.shape) != (rows,):
            raise ValueError(
                f"bias: expected shape ({rows},), one element for each row of blocks, got shape "
                f"{tuple(bias.shape)}"
            )
        made = cls(groups * MXFP4_BLOCK, rows, bias is not None, blocks.device, dtype)
        made.weight_packed = blocks.reshape(rows, groups * _BLOCK_BYTES)
        made.weight_scale = scales.contiguous()
        if made.bias is not None and bias is not None:
            made.bias.copy_(bias.detach())
        made.weight_changed()
        return made

    def weight_changed(self) -> None:
        """Makes the scales of the product anew: needed after a write to codes or scales.

        Loading a state_dict calls it. The CPU reads the scales.
        """
        self.product_scale = self.product_gsa = None
        if self.weight_packed.is_meta:
            return
        try:
            q = NVFP4Tensor.from_mxfp4(self.weight_packed, self.weight_scale)
        except ValueError:  # of exponents that span too much
            return
        self.product_scale, self.product_gsa = q.x_sf, q.gsa

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.weight_changed()

    @property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """The weight as gpt-oss stores it: uint8 (N, K / 32, 16) and (N, K / 32), no copies."""
        groups = self.in_features // MXFP4_BLOCK
        packed = self.weight_packed.view(self.out_features, groups, _BLOCK_BYTES)
        return packed, self.weight_scale

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (out_features, in_features).

        Args:
            dtype: bfloat16, float16 or float32; None: the layer's.
        """
        dtype = self.dtype if dtype is None else dtype
        return dequantize_mxfp4(self.weight_packed, self.weight_scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The product with ``x``.

        Args:
            x: (..., in_features) of the layer's dtype, or of any dtype under autocast.

        Returns:
            (..., out_features) of x's dtype, or of autocast's if it is enabled; rounded once
            unless the weight is dequantized.

        Raises:
            TypeError, ValueError: an argument is invalid.
        """
        check_tensor(x)
        check_columns(x.shape, self.in_features)
        check_same_dtype(x, self.dtype)
        y: Tensor = _Product.apply(x.to(output_dtype(x)), self)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        """As of ``nn.Linear``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dequantizes={self.product_scale is None}"
        )

    def _multiply(self, x: Tensor) -> Tensor:
        """The product with an input of any of the three dtypes."""
        bias = None if self.bias is None else self.bias.detach()
        scale, gsa = self.product_scale, self.product_gsa
        if scale is None or gsa is None or x.dtype == torch.float32 or x.numel() == 0:
            bias = None if bias is None else bias.to(x.dtype)
            return functional.linear(x, self.dequantize(x.dtype), bias)
        weight = (self.weight_packed, scale, gsa, "linear")
        values = (evenly_spaced(x), None, None, "linear")
        return nvfp4_mm_bytes(values, weight, bias, None, x.dtype)


class _Product(torch.autograd.Function):
    """Keeps the layer for backward, which dequantizes the weight, and no dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: MXFP4Linear) -> Tensor:
        ctx.layer = layer
        with torch.autocast(x.device.type, enabled=False):
            return layer._multiply(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(grad.device.type, enabled=False):
            return grad @ ctx.layer.dequantize(grad.dtype), None
