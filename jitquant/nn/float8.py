"""`Float8BlockwiseLinear`: a linear layer with FP8 products, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from jitquant.formats import FP8_DTYPES, GROUP_EPS_MIN, one_of
from jitquant.nn._linear import check_input, check_linear
from jitquant.nn._matmul import (
    block_scale_format,
    blocks,
    cut,
    fp8_mm,
    groups,
    is_exporting,
    output_dtype,
    register,
)
from jitquant.nn._weights import KeepsQuantizedWeights, WeightCache, padded, quantize_weight
from jitquant.ops import quantize_per_token_group, quantize_per_token_group_both
from jitquant.tensors.fp8 import QuantizedTensor

E4M3 = FP8_DTYPES[0]
ScaleFormat = Literal["float32", "ue8m0"]


def _how(scale_format: str) -> dict[str, Any]:
    return {
        "dtype": E4M3,
        "scale_format": scale_format,
        "scale_layout": "column",
        "eps": GROUP_EPS_MIN,
    }


def _rowwise(x: Tensor, scale_format: str) -> QuantizedTensor:
    return quantize_per_token_group(x, **_how(scale_format))


def _both(x: Tensor, scale_format: str) -> tuple[QuantizedTensor, QuantizedTensor]:
    return quantize_per_token_group_both(x, **_how(scale_format))


class _Linear(torch.autograd.Function):
    """``x @ weight.T``: (rows, K) and (N, K) to (rows, N).

    The weight comes quantized; the weight itself is there for its gradient to have a place to go.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        w: Tensor,
        w_scales: Tensor,
        w_t: Tensor | None,
        w_t_scales: Tensor | None,
        weight_grad: bool,
        scale_format: str,
        dtype: torch.dtype,
    ) -> Tensor:
        if weight_grad:
            xq, xq_t = _both(padded(x), scale_format)
            saved: tuple[Tensor | None, ...] = (xq_t.data, xq_t.stored_scales)
        else:
            xq, saved = _rowwise(padded(x), scale_format), (None, None)
        ctx.save_for_backward(*saved, w_t, w_t_scales)
        ctx.scale_format = scale_format
        ctx.sizes = (*x.shape, weight.shape[0])
        ctx.dtypes = (x.dtype, weight.dtype)
        product = fp8_mm(xq, blocks(w, w_scales, scale_format), dtype)
        return cut(product, x.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_t, x_t_scales, w_t, w_t_scales = ctx.saved_tensors
        rows, cols, out = ctx.sizes
        x_dtype, weight_dtype = ctx.dtypes
        form = ctx.scale_format
        grad_x = grad_weight = None
        grad = padded(grad)
        if x_t is not None:
            gq, gq_t = _both(grad, form)
            product = fp8_mm(gq_t, groups(x_t, x_t_scales, form), weight_dtype)
            grad_weight = product[:out, :cols].contiguous()
        else:
            gq = _rowwise(grad, form)
        if w_t is not None:
            product = fp8_mm(gq, blocks(w_t, w_t_scales, form), x_dtype)
            grad_x = product[:rows, :cols].contiguous()
        return grad_x, grad_weight, *(None,) * 7


def _infer(x: Tensor, weight: Tensor, scale_format: str | None, dtype: torch.dtype) -> Tensor:
    form = scale_format or block_scale_format(x.device)
    q = quantize_weight(weight, False, form).data
    product = fp8_mm(_rowwise(padded(x), form), q, dtype)
    return product[: x.shape[0], : weight.shape[0]].contiguous()


_INFER = register(
    "fp8_linear(Tensor x, Tensor weight, str? scale_format, ScalarType dtype) -> Tensor",
    _infer,
    lambda x, weight, scale_format, dtype: x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype),
)


def multiply(
    x: Tensor,
    weight: Tensor,
    kept_weight: Tensor,
    version: int,
    cache: WeightCache,
    part: Callable[[Tensor], Tensor] | None = None,
    scale_format: str | None = None,
) -> Tensor:
    """``x @ weight.T`` of tensors that this process has.

    Args:
        x: (..., K).
        weight: (N, K), which gets the gradient.
        kept_weight: the same values in a tensor that is the same one at each call, as long as
            the weight is.
        version: changes when these values do and the tensor's own version may not.
        cache: of the weight in FP8.
        part: takes the weight out of ``kept_weight``, where that has more in it.
        scale_format: of all scales; None: see `block_scale_format`.

    Returns:
        (..., N), of x's dtype, or of autocast's.
    """
    dtype = output_dtype(x)
    if is_exporting():  # one op, whose rows may be of any number
        exported: Tensor = _INFER(x.reshape(-1, x.shape[-1]), weight, scale_format, dtype)
        return exported.reshape(*x.shape[:-1], weight.shape[0])
    if x.numel() == 0:
        return functional.linear(x.to(dtype), weight.to(dtype))
    input_grad = torch.is_grad_enabled() and x.requires_grad
    form = scale_format or block_scale_format(x.device)
    w, w_t = cache.get(kept_weight, input_grad, version, part, form)
    kept = w_t if input_grad else None
    y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x.reshape(-1, x.shape[-1]),
        weight,
        w.data,
        w.stored_scales,
        None if kept is None else kept.data,
        None if kept is None else kept.stored_scales,
        torch.is_grad_enabled() and weight.requires_grad,
        form,
        dtype,
    )
    return y.reshape(*x.shape[:-1], weight.shape[0])


class Float8BlockwiseLinear(KeepsQuantizedWeights, nn.Linear):
    """``nn.Linear`` with FP8 products, forward and backward, and the same state_dict.

    The recipe is DeepSeek-V3's (https://arxiv.org/abs/2412.19437, section 3.3): E4M3 everywhere,
    fp32 scales, activations and gradients in groups of 1x128, weights in blocks of 128x128, sums in
    fp32:

        y  = x (1x128 along K)      @ W (128x128).T
        dx = dy (1x128 along N)     @ W (128x128)
        dW = dy.T (1x128 along M)   @ x.T (1x128 along M).T

    One read each of x and of dy gives both orientations. Backward keeps the FP8 transpose of x,
    half the size of bf16. The weight is quantized once, and again after an optimizer step or when
    its version changes. Gradient accumulation, ``torch.no_grad`` and recomputation for activation
    checkpoints reuse it. It takes two bytes per element if gradients of inputs are needed,
    otherwise one. A write to ``weight.data`` outside of a ``torch.optim.Optimizer`` is detected at
    the next ``train()`` or ``eval()``; write under ``torch.no_grad`` instead, or call
    `weight_changed`. ``torch.compile`` and CUDA graphs record the quantization of the weight.

    On sm_90 with CUDA 12.9 or newer, the product is ``torch.nn.functional.scaled_mm``; sizes that
    are not multiples of 128 need a padded copy. So it is from sm_100 on, whose tensor cores take
    scales that are powers of two alone: there scales are rounded up to one, and groups of 128 are
    four of MXFP8 with one scale. Elsewhere, including the CPU, the same FP8 values are dequantized
    and multiplied in fp32: slow, but with the same numerics.

    A group or block of zeros has the scale 1e-32 / 448 and gives zeros. NaN and infinity in an
    input give NaN in all results that depend on them.

    Args:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``; dtype is bfloat16,
            float16 or float32.
        scale_format: "float32"; "ue8m0": powers of two, rounded up; None: "ue8m0" on GPUs from
            sm_100 on, "float32" elsewhere. Give one to train on several kinds of GPUs alike.

    Raises:
        ValueError: scale_format is none of these.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale_format: ScaleFormat | None = None,
    ) -> None:
        if scale_format is not None:
            one_of("scale_format", scale_format, ("float32", "ue8m0"))
        super().__init__(in_features, out_features, bias, device, dtype)
        self.scale_format = scale_format
        self._cache = WeightCache()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, scale_format: ScaleFormat | None = None
    ) -> Float8BlockwiseLinear:
        """A layer that shares the parameters of ``linear``, so optimizers stay valid.

        Args:
            linear: of the class ``nn.Linear`` itself.
            scale_format: see the class.

        Raises:
            ValueError: scale_format is none of the accepted.
            TypeError: it is of another class, whose forward may be another, or of a dtype that
                cannot be quantized.
        """
        check_linear(linear)
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        made = cls(*sizes, device="meta", dtype=linear.weight.dtype, scale_format=scale_format)
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def weight_changed(self) -> None:
        """Requantizes the weight in the next call, after a write that PyTorch cannot detect."""
        if "_cache" in self.__dict__:
            self._cache.clear()

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: (..., in_features) of the weight's dtype; under autocast bfloat16, float16 or
                float32.

        Returns:
            (..., out_features) of autocast's dtype if it is enabled, otherwise of x's.

        Raises:
            TypeError: x is of another dtype.
            ValueError: x has another last dimension.
        """
        check_input(x, self.in_features, self.weight.dtype)
        weight = self.weight
        if hasattr(weight, "device_mesh"):
            from jitquant.nn import _dtensor

            return _dtensor.forward(x, weight, self.bias, self.multiply)
        y = self.multiply(x, weight, weight, 0)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def multiply(self, x: Tensor, weight: Tensor, kept_weight: Tensor, version: int) -> Tensor:
        """`multiply` with this layer's cache."""
        return multiply(
            x, weight, kept_weight, version, self._cache, scale_format=self.scale_format
        )
