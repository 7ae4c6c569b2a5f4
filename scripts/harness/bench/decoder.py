"""A decoder with the weights of a model of transformers, few launches a block, in a chosen format.

The products of a block are four: q, k and v are one, as they share an input, and so are gate and
up. Norms and SwiGLU make what the next product takes, products add to the residual stream before
they round, and `decode_kernels.cu` and `decode_attention.cu` in `examples` have the rest. The
embedding and the head stay in bf16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import (
    ScalingType,
    grouped_mm,
    scaled_dot_product_attention,
    scaled_mm,
)

import jitquant
from jitquant.formats import Compute
from jitquant.nn import NVFP4Linear
from jitquant.nn._nvfp4_mm import FP8_ROWS
from jitquant.tensors import NVFP4Tensor, QuantizedActivation, QuantizedTensor

BF16 = torch.bfloat16
EXAMPLES = Path(__file__).parents[3] / "examples"
DEVIATION = 0.02
"""Standard deviation of random weights."""


@functools.cache
def kernels(name: str = "decode_kernels") -> Any:
    """The module of one of the examples' sources."""
    return jitquant.get_cuda_module(name, [EXAMPLES / f"{name}.cu"])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(rows, cols) to the same."""
    if not x.is_cuda:
        return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    kernels().rms_norm(x, weight, eps, out=(out := torch.empty_like(x)))
    return out


def swiglu(both: Tensor) -> Tensor:
    """(rows, [gate | up]) to (rows, cols)."""
    gate, up = both.chunk(2, dim=-1)
    if not both.is_cuda:
        return (functional.silu(gate.float()) * up.float()).to(both.dtype)
    kernels().swiglu(
        both, out=(out := torch.empty_like(gate, memory_format=torch.contiguous_format))
    )
    return out


@dataclass(frozen=True)
class Heads:
    """Numbers of heads of q, of k and v, and elements of each; weights of their norms, or None."""

    heads: int
    groups: int
    size: int
    norms: tuple[Tensor | None, Tensor | None]
    eps: float


@dataclass(frozen=True)
class Step:
    """What all blocks share in a step of ``length`` tokens for each sequence.

    Attributes:
        length: 1, or a prompt's from position 0 on.
        position: int64 (1,), of the first token.
        angles: fp32 (positions, size): cosines, then sines.
    """

    length: int
    position: Tensor
    angles: Tensor


def rope_cache(qkv: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> Tensor:
    """Queries (tokens, heads, size), normed and rotated; keys and values go to the cache."""
    tokens = qkv.shape[0]
    q = qkv.new_empty(tokens, heads.heads, heads.size)
    if qkv.is_cuda:
        kernels().rope_cache(
            *(qkv, step.angles, step.position, *heads.norms, heads.eps),
            q=q,
            keys=keys,
            values=values,
        )
        return q
    parts = qkv.view(tokens, -1, heads.size).split([heads.heads, heads.groups, heads.groups], dim=1)
    at = step.position + torch.arange(step.length)
    cos, sin = (
        t.repeat(tokens // step.length, 1)[:, None] for t in step.angles[at].chunk(2, dim=-1)
    )

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.float()
        if weight is not None:
            x = functional.rms_norm(x, weight.shape, weight.float(), heads.eps)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(BF16)

    shape = (-1, step.length, heads.groups, heads.size)
    keys[:, at] = turned(parts[1], heads.norms[1]).view(shape)
    values[:, at] = parts[2].reshape(shape)
    return q.copy_(turned(parts[0], heads.norms[0]))


def attention(q: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> Tensor:
    """(tokens, heads, size) over what is in the cache, to (tokens, heads * size).

    The position is on the device, so that a captured step serves every one.
    """
    sequences, positions = keys.shape[:2]
    if (
        step.length == 1
        and q.is_cuda
        and heads.size in (64, 128)
        and heads.heads <= 8 * heads.groups
    ):
        out = torch.empty_like(q)
        kernels("decode_attention").attend(q, keys, values, step.position, out=out)
        return out.flatten(1)
    grouped = (t.view(sequences, -1, *t.shape[-2:]).transpose(1, 2) for t in (q, keys, values))
    queries, k, v = grouped
    if step.length == 1:
        seen = torch.arange(positions, device=q.device) <= step.position
        y = scaled_dot_product_attention(queries, k, v, attn_mask=seen[None], enable_gqa=True)
    else:
        k, v = k[:, :, : step.length], v[:, :, : step.length]
        y = scaled_dot_product_attention(queries, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(q.shape[0], -1)


def routed(x: Tensor, router: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights: two of (rows, k)."""
    chances, ids = (x @ router.t()).float().softmax(dim=-1).topk(k, dim=-1)
    if normalized:
        chances = chances / chances.sum(dim=-1, keepdim=True)
    return ids, chances


class Bf16:
    """Products in bf16, and what they take."""

    name = "bf16, few launches"
    bits = 16.0

    def weight(self, w: Tensor, device: torch.device) -> Any:
        """A weight (N, K) as products take it; random if ``w`` is on "meta"."""
        if not w.is_meta:
            return w.to(device)
        return torch.empty(w.shape, dtype=BF16, device=device).normal_(0, DEVIATION)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        """What a product takes of rows, normalized."""
        return rms_norm(x, weight, eps)

    def swiglu(self, both: Tensor) -> Any:
        """What a product takes of gate and up."""
        return swiglu(both)

    def rows(self, x: Tensor) -> Any:
        """What a product takes of rows as they are."""
        return x

    def product(self, weight: Any, x: Any, residual: Tensor | None = None) -> Tensor:
        """(rows, N)."""
        return x @ weight.t() if residual is None else torch.addmm(residual, x, weight.t())

    def expert_weights(self, w: Tensor, device: torch.device) -> Any:
        """Weights (E, N, K) of experts, as `experts` takes them."""
        return Bf16.weight(self, w, device)

    def experts(self, x: Tensor, weights: tuple[Any, Any], ids: Tensor, chances: Tensor) -> Tensor:
        """Each row through its experts, and their weighted sum."""
        gate_up, down = weights
        rows, k = ids.shape
        expert, order = ids.flatten().sort(stable=True)
        each = torch.arange(gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(expert, each, right=True).int()
        both = grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=ends)
        y = grouped_mm(swiglu(both), down.transpose(1, 2), offs=ends)
        y = torch.empty_like(y).index_copy_(0, order, y).view(rows, k, -1)
        return torch.einsum("rkn,rk->rn", y, chances.to(y.dtype))


class Fp8Row(Bf16):
    """E4M3 with a scale for each row of both operands."""

    name = "FP8 rows"
    bits = 8.0

    def weight(self, w: Tensor, device: torch.device) -> Any:
        return jitquant.quantize_fp8(super().weight(w, device), granularity="row")

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        return jitquant.rmsnorm_quantize_fp8(x, weight, eps)

    def swiglu(self, both: Tensor) -> Any:
        return jitquant.swiglu_quantize_fp8(both)

    def rows(self, x: Tensor) -> Any:
        return jitquant.quantize_fp8(x, granularity="row")

    def product(self, weight: Any, x: Any, residual: Tensor | None = None) -> Tensor:
        a: QuantizedTensor = x
        b: QuantizedTensor = weight
        if a.data.is_cuda:
            scales = a.scale_inv.reshape(-1, 1), b.scale_inv.reshape(1, -1)
            y = scaled_mm(
                *(a.data, b.data.t(), scales[0], ScalingType.RowWise),
                *(scales[1], ScalingType.RowWise),
                output_dtype=BF16,
            )
        else:
            y = (a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()).to(BF16)
        return y if residual is None else y.add_(residual)

    def expert_weights(self, w: Tensor, device: torch.device) -> Any:
        raise ValueError("no FP8 format for experts; choose another format for this shape")


class WeightOnly(Bf16):
    """Weights in NVFP4, activations in bf16."""

    name = "NVFP4 W4A16"
    bits = 4.5
    weight_only = True
    compute: Compute = "exact"

    def weight(self, w: Tensor, device: torch.device) -> Any:
        n, k = w.shape
        how: dict[str, Any] = {"weight_only": self.weight_only, "granularity": "row"}
        how["compute"] = self.compute
        if not w.is_meta:
            linear = nn.Linear(k, n, bias=False, device="meta", dtype=w.dtype)
            linear.weight = nn.Parameter(w.to(device), requires_grad=False)
            return NVFP4Linear.from_linear(linear.eval(), **how)
        layer = NVFP4Linear(k, n, False, device, BF16, **how).eval()
        layer.weight_packed.random_()
        layer.weight_scale.view(torch.uint8).random_(0x30, 0x40)  # scales of 0.5 to 1.9
        layer.weight_gsa.fill_(DEVIATION / 3.2)
        return layer

    def product(self, weight: Any, x: Any, residual: Tensor | None = None) -> Tensor:
        y: Tensor = weight(x, residual=residual)
        return y

    def expert_weights(self, w: Tensor, device: torch.device) -> Any:
        if not w.is_meta:
            return jitquant.quantize_nvfp4(w.to(device))
        q = NVFP4Tensor.empty(tuple(w.shape), device=device)
        q.x_fp4_bytes.random_()
        q.x_sf.view(torch.uint8).random_(0x30, 0x40)
        q.gsa.fill_(DEVIATION / 3.2)
        return q

    def experts(self, x: Tensor, weights: tuple[Any, Any], ids: Tensor, chances: Tensor) -> Tensor:
        return jitquant.nvfp4_experts(x, *weights, ids, chances)


class Fp8Prefill(WeightOnly):
    """As that; 256 rows and more, a prompt's, are multiplied in FP8, but for those of experts."""

    name = "NVFP4 W4A16, prefill in FP8"
    compute: Compute = "fp8"

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        return Fp8Row().norm(x, weight, eps) if len(x) >= FP8_ROWS else super().norm(x, weight, eps)

    def swiglu(self, both: Tensor) -> Any:
        return Fp8Row().swiglu(both) if len(both) >= FP8_ROWS else super().swiglu(both)

    def product(self, weight: Any, x: Any, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, QuantizedTensor):  # else the layer quantizes many rows itself
            return jitquant.nvfp4_linear(x, weight.weight, residual=residual, compute="fp8")
        return super().product(weight, x, residual)


class Nvfp4(WeightOnly):
    """Weights and activations in NVFP4; the activations of experts in bf16."""

    name = "NVFP4 W4A4"
    weight_only = False

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        return jitquant.rmsnorm_quantize_nvfp4(x, weight, eps)

    def swiglu(self, both: Tensor) -> Any:
        cols = both.shape[-1] // 2
        how: dict[str, Any] = {"op": "swiglu", "interleave": 0, "granularity": "row"}
        return jitquant.deinterleave_quantize_nvfp4(both, cols, **how)

    def rows(self, x: Tensor) -> Any:
        return jitquant.quantize_nvfp4(x, granularity="row")

    def product(self, weight: Any, x: Any, residual: Tensor | None = None) -> Tensor:
        q: QuantizedActivation = x
        y: Tensor = weight.run_from_quantized(q, residual=residual)
        return y


FORMATS: dict[str, type[Bf16]] = {
    "bf16-few": Bf16,
    "fp8": Fp8Row,
    "w4a16": WeightOnly,
    "w4a16-fp8-prefill": Fp8Prefill,
    "w4a4": Nvfp4,
}


class Block:
    """A block of a decoder, with the weights of transformers' layer."""

    def __init__(self, layer: Any, kind: Bf16, device: torch.device) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        size = attention.head_dim

        def joined(*linears: nn.Linear) -> Any:
            return kind.weight(torch.cat([linear.weight.detach() for linear in linears]), device)

        def norm(module: Any) -> Tensor:
            weight = module.weight.detach()
            if weight.is_meta:
                return torch.ones(weight.shape, dtype=BF16, device=device)
            return weight.to(device)

        self.kind = kind
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = joined(attention.o_proj)
        self.experts: tuple[Any, ...] = ()
        if hasattr(mlp, "experts"):
            self.router = Bf16().weight(mlp.gate.weight.detach(), device)
            self.routing = mlp.gate.top_k, mlp.gate.norm_topk_prob
            both = mlp.experts.gate_up_proj.detach(), mlp.experts.down_proj.detach()
            self.experts = (
                kind.expert_weights(both[0], device),
                kind.expert_weights(both[1], device),
            )
        else:
            self.gate_up = joined(mlp.gate_proj, mlp.up_proj)
            self.down = joined(mlp.down_proj)
        self.norms = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        self.eps = float(layer.input_layernorm.variance_epsilon)
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.heads = Heads(
            attention.q_proj.out_features // size,
            attention.k_proj.out_features // size,
            size,
            (None if q_norm is None else norm(q_norm), None if k_norm is None else norm(k_norm)),
            self.eps,
        )

    def __call__(self, stream: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        """The next stream (tokens, hidden)."""
        kind = self.kind
        qkv = kind.product(self.qkv, kind.norm(stream, self.norms[0], self.eps))
        q = rope_cache(qkv, self.heads, step, keys, values)
        y = attention(q, self.heads, step, keys, values)
        stream = kind.product(self.o, kind.rows(y), stream)
        if self.experts:
            x = rms_norm(stream, self.norms[1], self.eps)
            return kind.experts(x, self.experts, *routed(x, self.router, *self.routing)).add_(
                stream
            )
        both = kind.product(self.gate_up, kind.norm(stream, self.norms[1], self.eps))
        return kind.product(self.down, kind.swiglu(both), stream)


class Decoder:
    """A causal language model, with a static cache for some sequences."""

    def __init__(self, model: Any, kind: Bf16, device: torch.device) -> None:
        """Makes one layer after another, each on the device.

        Args:
            model: of transformers, a Llama or the like. Weights on "meta" become random ones.
            kind: of the products.
            device: where it is to be.
        """
        inner = model.model
        plain = Bf16()
        self.device = device
        self.kind = kind
        self.blocks = [Block(layer, kind, device) for layer in inner.layers]
        self.embedding = plain.weight(inner.embed_tokens.weight.detach(), device)
        self.head = plain.weight(model.lm_head.weight.detach(), device)
        last = inner.norm.weight.detach()
        self.norm = torch.ones(last.shape, dtype=BF16, device=device) if last.is_meta else last
        with device:
            self.rotary = type(inner.rotary_emb)(model.config)
        self.cache: list[tuple[Tensor, Tensor]] = []

    def set_cache(self, sequences: int, positions: int) -> None:
        """An empty cache."""
        heads = self.blocks[0].heads
        shape = (sequences, positions, heads.groups, heads.size)
        self.cache = [
            (
                torch.zeros(shape, dtype=BF16, device=self.device),
                torch.zeros(shape, dtype=BF16, device=self.device),
            )
            for _ in self.blocks
        ]
        order = torch.arange(positions, device=self.device)[None]
        cos, sin = self.rotary(torch.zeros(1, device=self.device), order)
        half = heads.size // 2
        self.angles = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).float().contiguous()

    @torch.no_grad()
    def __call__(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits (sequences, vocabulary) of the last of some tokens (sequences, length).

        Args:
            tokens: one for each sequence, or prompts from position 0 on.
            position: int64 (1,): of the first of them.
        """
        sequences, length = tokens.shape
        step = Step(length, position, self.angles)
        stream = functional.embedding(tokens.reshape(-1), self.embedding)
        for block, (keys, values) in zip(self.blocks, self.cache, strict=True):
            stream = block(stream, step, keys, values)
        stream = stream.view(sequences, length, -1)[:, -1].contiguous()
        return rms_norm(stream, self.norm, self.blocks[0].eps) @ self.head.t()
