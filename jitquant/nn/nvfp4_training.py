"""`NVFP4TrainingLinear`: a linear layer with NVFP4 products, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from jitquant.formats import (
    E4M3_MAXIMA,
    NVFP4_BLOCK,
    ROTATIONS,
    SELECTS,
    WEIGHT_BLOCKS,
    Select,
    WeightBlock,
    one_of,
)
from jitquant.nn._linear import check_input, check_linear
from jitquant.nn._matmul import cut, output_dtype, register
from jitquant.nn._nvfp4_mm import nvfp4_mm
from jitquant.ops import _checks, quantize_nvfp4, quantize_nvfp4_both
from jitquant.tensors import NVFP4Tensor


def linears_in_last_blocks(model: nn.Module, blocks: int) -> list[str]:
    """Names of the linears in the last blocks of a model, to keep in bf16 during training.

    NVIDIA's recipe keeps some linears in bf16, most of them in the last blocks
    (https://arxiv.org/abs/2509.25149)::

        kept = linears_in_last_blocks(model, 4)
        convert(model, NVFP4TrainingRecipe(), filter=lambda name, _: name not in kept)

    Args:
        model: with its blocks in a ``ModuleList`` or, without one, a ``Sequential``. If there are
            several, the one with the most linears is used.
        blocks: the number of last blocks with linears.

    Raises:
        TypeError: ``blocks`` is no int.
        ValueError: the model has no such list, or too few blocks.
    """
    if not isinstance(blocks, SupportsIndex):
        raise _checks.wrong_scalar(blocks, "blocks", "int")
    best: list[list[str]] = []
    for kind in (nn.ModuleList, nn.Sequential):
        for path, module in model.named_modules():
            if not isinstance(module, kind):
                continue
            dot = f"{path}." if path else ""
            each = [
                [
                    f"{dot}{i}.{name}" if name else f"{dot}{i}"
                    for name, part in block.named_modules()
                    if isinstance(part, nn.Linear)
                ]
                for i, block in module.named_children()
            ]
            each = [names for names in each if names]
            if sum(map(len, each)) > sum(map(len, best)):
                best = each
        if best:
            break
    if not best:
        raise ValueError(
            "model: expected a ModuleList or Sequential with linears in it, got "
            f"{type(model).__name__} without one. Name the linears to keep by filter="
        )
    if not 0 <= blocks <= len(best):
        raise ValueError(
            f"blocks: expected a number from 0 to {len(best)}, got {blocks}. That is how many "
            "blocks with linears the model has in a ModuleList or Sequential"
        )
    return [name for names in best[len(best) - blocks :] for name in names]


@dataclass(frozen=True)
class NVFP4TrainingRecipe:
    """How the operands of a training step are quantized; the defaults are TransformerEngine's.

    Attributes:
        rotate: "te" rotates input and gradient for the weight gradient; or "none".
        stochastic: whether gradients are rounded stochastically.
        weight_block: "16x16": the weight's transpose has the same values; or "1x16".
        select: how scales of inputs and weights are selected, such as "4over6_mae"; does not
            affect rotation or gradients.
        e4m3_max: the largest scale of inputs and weights, 448 or 256.
        select_for: "all", or "inputs" or "weights": the only ones for which the last two hold.
    """

    rotate: Literal["none", "te"] = "te"
    stochastic: bool = True
    weight_block: WeightBlock = "16x16"
    select: Select = "none"
    e4m3_max: int = 448
    select_for: Literal["all", "inputs", "weights"] = "all"

    def __post_init__(self) -> None:
        """Refuses what no forward pass could use.

        Raises:
            TypeError, ValueError: an attribute is not accepted.
        """
        one_of("rotate", self.rotate, ROTATIONS[:2])
        if not isinstance(self.stochastic, bool):
            raise TypeError(
                f"stochastic: expected True or False, got {type(self.stochastic).__name__}"
            )
        one_of("weight_block", self.weight_block, WEIGHT_BLOCKS)
        one_of("select", self.select, SELECTS)
        one_of("e4m3_max", self.e4m3_max, E4M3_MAXIMA)
        one_of("select_for", self.select_for, ("all", "inputs", "weights"))

    def _selection(self, operand: str) -> dict[str, Any]:
        """How the scales of "inputs" or "weights" are selected, for a call that quantizes them."""
        if self.select_for not in ("all", operand):
            return {}
        return {"select": self.select, "e4m3_max": self.e4m3_max}


def _padded(x: Tensor) -> Tensor:
    """Rows up to a multiple of 16."""
    more = -x.shape[0] % NVFP4_BLOCK
    return functional.pad(x, (0, 0, 0, more)) if more else x  # pad would copy


def _next_state(rng_state: Tensor) -> Tensor:
    state = rng_state.clone()
    rng_state[1].add_(1)
    return state


# One op, as torch.compile would copy the buffer again in backward, when it has moved on.
_NEXT_STATE = register(
    "next_rng_state(Tensor(a!) rng_state) -> Tensor", _next_state, torch.empty_like
)


class _Linear(torch.autograd.Function):
    """``x @ weight.T``: (rows, K) and (N, K) to (rows, N)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rng_state: Tensor,
        recipe: NVFP4TrainingRecipe,
        dtype: torch.dtype,
    ) -> Tensor:
        of_x, of_weight = recipe._selection("inputs"), recipe._selection("weights")
        ctx.recipe, ctx.dtypes, ctx.rows = recipe, (x.dtype, weight.dtype), x.shape[0]
        if ctx.needs_input_grad[1]:
            xq, xq_t = quantize_nvfp4_both(_padded(x), rotate=recipe.rotate, **of_x)
        else:
            xq, xq_t = quantize_nvfp4(_padded(x), **of_x), None
        wq, wq_t = quantize_nvfp4_both(weight, block=recipe.weight_block, **of_weight)
        kept = [None if q is None else (q.x_fp4, q.x_sf, q.gsa) for q in (xq_t, wq_t)]
        tensors = [t for parts in kept for t in parts or (None, None, None)]
        ctx.save_for_backward(rng_state, *tensors)
        ctx.cols = (None if xq_t is None else xq_t.cols, wq_t.cols)
        return cut(nvfp4_mm(xq, wq, None, dtype), x.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rng_state, x_codes, x_scales, x_gsa, w_codes, w_scales, w_gsa = ctx.saved_tensors
        rounding: Any = {}
        if ctx.recipe.stochastic:
            rounding = {"rounding": "stochastic", "rng_state": rng_state}
        x_dtype, weight_dtype = ctx.dtypes
        grad_x = grad_weight = None
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad = _padded(grad.contiguous())
        if needs_weight:
            xq_t = NVFP4Tensor(x_codes, x_scales, x_gsa, None, ctx.cols[0])
            gq, gq_t = quantize_nvfp4_both(grad, rotate=ctx.recipe.rotate, **rounding)
            grad_weight = nvfp4_mm(gq_t, xq_t, None, weight_dtype)
        else:
            gq = quantize_nvfp4(grad, **rounding)
        if needs_x:
            wq_t = NVFP4Tensor(w_codes, w_scales, w_gsa, None, ctx.cols[1])
            grad_x = nvfp4_mm(gq, wq_t, None, x_dtype)[: ctx.rows].contiguous()
        return grad_x, grad_weight, None, None, None


class NVFP4TrainingLinear(nn.Linear):
    """``nn.Linear`` with NVFP4 products, forward and backward, and the same state_dict.

    The recipe is TransformerEngine's (https://arxiv.org/abs/2509.25149). Each part can be turned
    off. RHT is its random Hadamard transform:

        y  = x (1x16 along K)                       @ W (16x16).T
        dx = dy (1x16 along N, stochastic)          @ W (16x16)
        dW = dy.T (RHT, 1x16 along M, stochastic)   @ x.T (RHT, 1x16 along M).T

    Products have the numerics of FP4 tensor cores on every device, so FP4 training can be studied
    without them: codes times scales are exact in bf16, and sums are fp32.

    - From compute capability 10.0 on, ``torch.nn.functional.scaled_mm`` multiplies on FP4 tensor
      cores, if rows, in_features and out_features are multiples of 32.
    - On 9.0, `jitquant.nvfp4_linear` multiplies at the speed of bf16, if they are multiples of 64.
    - On 8.x, and elsewhere for other sizes, operands are dequantized for a product in bf16 beyond
      64 rows, and `jitquant.nvfp4_linear` multiplies up to 64.

    Quantization takes time on top. Backward keeps the NVFP4 transposes of x and of the weight.
    Parameters may be fp32, with or without autocast; each forward quantizes them directly.

    Random bytes come from `rng_state`, int64 [seed, offset] on the device, a buffer that is not in
    the state_dict. Each forward adds 1 to the offset, so each replay of a captured graph uses new
    bytes, and forwards after `seed_rounding` are reproducible. ``torch.compile`` traces the layer
    to one graph that uses the same bytes. Ranks that train on different data should use different
    seeds. ``DistributedDataParallel`` copies the buffers of rank 0 to all ranks in each forward,
    this one too, so it needs ``broadcast_buffers=False``.

    Args:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``.
        recipe: the parts of the recipe; default: all of them.

    Raises:
        TypeError: ``recipe`` is of another type.
    """

    rng_state: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: NVFP4TrainingRecipe | None = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, NVFP4TrainingRecipe):
            raise TypeError(
                f"recipe: expected an NVFP4TrainingRecipe or None, got {type(recipe).__name__}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = NVFP4TrainingRecipe() if recipe is None else recipe
        state = torch.zeros(2, dtype=torch.int64, device=self.weight.device)
        self.register_buffer("rng_state", state, persistent=False)
        self._seed_anew()

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, recipe: NVFP4TrainingRecipe | None = None
    ) -> NVFP4TrainingLinear:
        """A layer that shares the parameters of ``linear``, so optimizers stay valid.

        Args:
            linear: of the class ``nn.Linear`` itself.
            recipe: as of the class.

        Raises:
            TypeError: it is of another class, whose forward may be another, or of a dtype that
                cannot be quantized.
        """
        check_linear(linear)
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        made = cls(*sizes, device="meta", dtype=linear.weight.dtype, recipe=recipe)
        made.weight, made.bias = linear.weight, linear.bias
        made._follow_weight()
        return made.train(linear.training)

    def reset_parameters(self) -> None:
        """As ``nn.Linear``, plus a new seed."""
        super().reset_parameters()
        if "rng_state" in self._buffers:
            self._seed_anew()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.rng_state.is_meta and not self.weight.is_meta:  # assigned to a model on "meta"
            self._follow_weight()

    def _apply(self, fn: Any, recurse: bool = True) -> NVFP4TrainingLinear:
        was_meta = self.rng_state.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta:  # to_empty() leaves what the memory held
            self._seed_anew()
        return self

    def _follow_weight(self) -> None:
        """A new state where the weight is."""
        self.rng_state = torch.zeros(2, dtype=torch.int64, device=self.weight.device)
        self._seed_anew()

    def _seed_anew(self) -> None:
        if not self.rng_state.is_meta:
            self._restart(torch.randint(1 << 62, (1,), device="cpu"))

    def _restart(self, seed: Tensor) -> None:
        with torch.no_grad():
            self.rng_state.copy_(torch.cat((seed, torch.zeros_like(seed))))

    def seed_rounding(self, seed: int) -> None:
        """Restarts the random bytes, with offset 0.

        Args:
            seed: any int64; layers of one model should have different ones.

        Raises:
            TypeError, ValueError: it is no int64.
            ValueError: the layer is on "meta", where it cannot keep a seed.
        """
        if not isinstance(seed, SupportsIndex):
            raise _checks.wrong_scalar(seed, "seed", "int")
        if not -(1 << 63) <= int(seed) < 1 << 63:
            raise ValueError(f"seed: expected a number from -2**63 to 2**63 - 1, got {seed}")
        if self.rng_state.is_meta:
            raise ValueError(
                'layer: expected one whose memory is there, got one on "meta". Seed it after '
                "to_empty() or load_state_dict(assign=True)"
            )
        self._restart(torch.tensor([seed], dtype=torch.int64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: (..., in_features) of the weight's dtype; under autocast bfloat16, float16 or
                float32.

        Returns:
            (..., out_features) of autocast's dtype if it is enabled, otherwise of x's.

        Raises:
            TypeError: x is of another dtype, or the weight is a DTensor.
            ValueError: x has another last dimension.
        """
        if hasattr(self.weight, "device_mesh"):
            raise TypeError(
                "weight: expected a tensor, got a DTensor. Call convert before fully_shard. For "
                "tensor parallelism, use Float8BlockwiseLinear"
            )
        check_input(x, self.in_features, self.weight.dtype)
        dtype = output_dtype(x)
        if x.numel() == 0:
            empty = functional.linear(x.to(dtype), self.weight.to(dtype))
            return empty if self.bias is None else empty + self.bias.to(dtype)
        state = _NEXT_STATE(self.rng_state)
        # TransformerEngine quantizes what the layer computes with.
        rows = x.reshape(-1, self.in_features).to(dtype)
        y: Tensor = _Linear.apply(rows, self.weight, state, self.recipe, dtype)  # type: ignore[no-untyped-call]
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """As of ``nn.Linear``, with the recipe."""
        return f"{super().extra_repr()}, {self.recipe}"
