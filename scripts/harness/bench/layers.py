"""Layers in FP8 beside the same in bf16: one linear, and Llama-shaped blocks, also in NVFP4."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import jitquant
from harness import timing
from jitquant.nn import Float8BlockwiseLinear, NVFP4TrainingRecipe, convert
from jitquant.nn._matmul import fp8_mm

BF16 = torch.bfloat16
DEVICE = "cuda"
MODULES = (
    "quantize_both",
    "quantize_block",
    "quantize_per_token_group",
    "quantize_nvfp4_both",
    "nvfp4_linear",
)
HEAD = 128  # elements of an attention head


@dataclass(frozen=True)
class Pair:
    """A piece of work in bf16 and in FP8, in microseconds.

    Attributes:
        name: of the work.
        bf16: None if bf16 has no such step.
        fp8: of the same.
        gigabytes: bytes that a quantizer moves, in 1e9; 0 of anything else.
        nvfp4: of a step with `NVFP4TrainingLinear`, the whole recipe; None of anything else.
    """

    name: str
    bf16: float | None
    fp8: float
    gigabytes: float = 0.0
    nvfp4: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast FP8 is."""
        return None if self.bf16 is None else self.bf16 / self.fp8


def _made(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


def _graphed(fn: Callable[..., Any], *inputs: tuple[Any, ...]) -> float:
    return timing.graph_us(fn, inputs, timing.Stage(0.2, 3))


def _passes(layer: nn.Linear) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """Forward and backward: the output, and the gradients of the input and the weight."""

    def run(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        y = layer(x)
        return (y, *torch.autograd.grad(y, (x, layer.weight), grad))

    return run


def linear(tokens: int, cols: int, out: int) -> Iterator[Pair]:
    """A linear without bias, forward and backward, and what it is made of.

    Each time is of CUDA graph replays over two sets of inputs. In a graph the weight is quantized
    at every replay: once for a forward and a backward, as in training without accumulation.
    """
    plain = nn.Linear(cols, out, bias=False, device=DEVICE, dtype=BF16)
    fp8 = Float8BlockwiseLinear.from_linear(plain)
    inputs = [(_made(tokens, cols).requires_grad_(), _made(tokens, out)) for _ in range(2)]
    name = f"{tokens} x {cols} to {out}"
    yield Pair(
        f"{name}: forward and backward",
        _graphed(_passes(plain), *inputs),
        _graphed(_passes(fp8), *inputs),
    )
    alone = [(x.detach(),) for x, _ in inputs]
    with torch.no_grad():
        times = [_graphed(layer, *alone) for layer in (plain, fp8)]
    yield Pair(f"{name}: forward alone", *times)

    x, grad = inputs[0][0].detach(), inputs[0][1]
    xq, xq_t = jitquant.quantize_per_token_group_both(x)
    gq, gq_t = jitquant.quantize_per_token_group_both(grad)
    w = plain.weight.detach()
    wq, wq_t = jitquant.quantize_block_both(w, scale_layout="row_padded")

    def products(g: Tensor) -> tuple[Tensor, ...]:
        return x @ w.T, g @ w, g.T @ x

    def fp8_products(_: Tensor) -> tuple[Tensor, ...]:
        return fp8_mm(xq, wq, BF16), fp8_mm(gq, wq_t, BF16), fp8_mm(gq_t, xq_t, BF16)

    yield Pair(
        f"{name}: the three products alone",
        *(_graphed(f, (grad,), (grad,)) for f in (products, fp8_products)),
    )
    yield Pair(
        f"quantize_per_token_group_both, {tokens} x {cols}",
        None,
        _graphed(jitquant.quantize_per_token_group_both, *alone),
        4e-9 * tokens * cols,
    )

    def blocks(w: Tensor) -> object:
        return jitquant.quantize_block_both(w, scale_layout="row_padded")

    yield Pair(
        f"quantize_block_both, {out} x {cols}",
        None,
        _graphed(blocks, (w,), (w.clone(),)),
        4e-9 * out * cols,
    )


class LlamaBlock(nn.Module):
    """Attention with grouped queries and rotary positions, then a gated MLP; norms before both."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int) -> None:
        super().__init__()
        made = {"bias": False, "device": DEVICE, "dtype": BF16}
        size = hidden // heads
        self.heads, self.groups, self.size = heads, groups, size
        self.attention_norm = nn.RMSNorm(hidden, device=DEVICE, dtype=BF16)
        self.q = nn.Linear(hidden, heads * size, **made)
        self.k = nn.Linear(hidden, groups * size, **made)
        self.v = nn.Linear(hidden, groups * size, **made)
        self.o = nn.Linear(heads * size, hidden, **made)
        self.mlp_norm = nn.RMSNorm(hidden, device=DEVICE, dtype=BF16)
        self.gate = nn.Linear(hidden, ffn, **made)
        self.up = nn.Linear(hidden, ffn, **made)
        self.down = nn.Linear(ffn, hidden, **made)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        batch, length, _ = x.shape
        h = self.attention_norm(x)
        q, k, v = (
            linear(h).view(batch, length, heads, self.size).transpose(1, 2)
            for linear, heads in (
                (self.q, self.heads),
                (self.k, self.groups),
                (self.v, self.groups),
            )
        )
        q, k = (_rotated(t, rotation) for t in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _rotation(length: int, size: int) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, size, 2, device=DEVICE).float() / size
    angles = torch.arange(length, device=DEVICE).float()[:, None] * 500_000.0**-steps
    return angles.cos().to(BF16), angles.sin().to(BF16)


def _step_us(blocks: nn.ModuleList, batch: int, length: int, hidden: int, steps: int) -> float:
    """Median of a training step: forward, backward and AdamW, in microseconds by CUDA events."""
    rotation = _rotation(length, HEAD)
    for block in blocks:
        block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-5, fused=True)
    x, target = _made(batch, length, hidden), _made(batch, length, hidden)

    def step() -> None:
        h = x.detach().requires_grad_()
        for block in blocks:
            h = block(h, rotation)
        (h * target).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return timing.event_us(step, repeats=steps)


def stack(
    layers: int, batch: int, length: int, hidden: int, ffn: int, steps: int = 15
) -> tuple[Pair, dict[str, float]]:
    """A training step of a stack of blocks, each compiled, and the seconds that compiling took."""
    took, seconds = {}, {}
    for name, recipe in (("bf16", None), ("fp8", "fp8_block"), ("nvfp4", NVFP4TrainingRecipe())):
        torch.manual_seed(0)
        torch.compiler.reset()
        heads = hidden // HEAD
        blocks = nn.ModuleList(
            LlamaBlock(hidden, ffn, heads, max(1, heads // 4)) for _ in range(layers)
        )
        if recipe is not None:
            convert(blocks, recipe)
        begin = time.perf_counter()
        took[name] = _step_us(blocks, batch, length, hidden, steps)
        seconds[name] = time.perf_counter() - begin - steps * took[name] * 1e-6
        del blocks
        torch.cuda.empty_cache()
    said = (
        f"{layers} blocks, hidden {hidden}, ffn {ffn}, {batch} x {length} tokens: "
        "forward, backward, AdamW"
    )
    return Pair(said, **took), seconds
