"""Expert layers with NVFP4 weights, beside bf16 and the time of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import jitquant
from harness import timing
from jitquant import NVFP4Tensor
from jitquant.formats import FP4_DTYPE, SCALE_DTYPE

DEVICE = "cuda"
BF16 = torch.bfloat16
TOP_K = 8
# Experts, hidden size, intermediate size: those of DeepSeek-V3 and of Qwen3-30B-A3B.
SHAPES = ((256, 7168, 2048), (128, 2048, 768))
TOKENS = (1, 2, 8, 64, 512, 4096)
CALLS = 24
MANY_CALLS = 4  # for more than 64 tokens


@dataclass(frozen=True)
class Layer:
    """Microseconds of an expert layer, by graph replay with other experts in each call.

    Attributes:
        routing: "any": 8 experts of each token at random; "one": the same 8 for all.
        read: megabytes of the weights of experts that have rows, 0.5625 bytes an element.
        floor: of these bytes, at the bandwidth that `report` is given.
        layer: `jitquant.nvfp4_experts`, one call after the other.
        behind: the same where each call comes behind a plain kernel, less its time.
        bf16: both products by ``grouped_mm`` with weights in bf16, rows sorted beforehand.
    """

    experts: int
    hidden: int
    intermediate: int
    tokens: int
    routing: str
    read: float
    floor: float
    layer: float
    behind: float
    bf16: float

    def text(self) -> str:
        """A line of the table."""
        return (
            f"{self.experts} x {self.hidden} x {self.intermediate} {self.tokens:>4} tokens "
            f"({self.routing:>3})  {self.read:7.1f} MB  bytes {self.floor:7.1f}  NVFP4 "
            f"{self.layer:7.1f} ({self.floor / self.layer:4.0%})  behind {self.behind:7.1f}  bf16 "
            f"{self.bf16:7.1f}"
        )


def random_experts(experts: int, n: int, k: int) -> NVFP4Tensor:
    """Random codes with scales of 2^-7 to 2^0.9, about normal values of 0.02 by the gsa."""
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(0, 64, (experts, n, k // 16), dtype=torch.uint8, device=DEVICE)
    gsa = torch.full((1,), 0.01, device=DEVICE)
    return NVFP4Tensor(codes.view(FP4_DTYPE), scales.view(SCALE_DTYPE), gsa)


def _routings(tokens: int, experts: int, kind: str) -> list[Tensor]:
    """Ids of each call; with one token no expert comes again before all have come."""
    if tokens == 1:
        order = torch.cat([torch.randperm(experts, device=DEVICE) for _ in range(4)])
        return list(order.view(-1, 1, TOP_K)[:CALLS])
    made = []
    for _ in range(CALLS if tokens <= 64 else MANY_CALLS):
        ids = torch.rand(tokens, experts, device=DEVICE).argsort(-1)[:, :TOP_K].contiguous()
        made.append(ids[:1].expand(tokens, -1).contiguous() if kind == "one" else ids)
    return made


def _bf16(x: Tensor, up: Tensor, down: Tensor, offsets: Tensor) -> Tensor:
    gate, both = functional.grouped_mm(x, up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    h = functional.silu(gate) * both
    return functional.grouped_mm(h, down.transpose(1, 2), offs=offsets)


def _layers_of(experts: int, hidden: int, inter: int, bandwidth: float) -> Iterator[Layer]:
    up = random_experts(experts, 2 * inter, hidden)
    down = random_experts(experts, hidden, inter)
    wide_up = torch.randn(experts, 2 * inter, hidden, device=DEVICE, dtype=BF16)
    wide_down = torch.randn(experts, hidden, inter, device=DEVICE, dtype=BF16)
    for tokens, kind in (*((t, "any") for t in TOKENS), (64, "one"), (4096, "one")):
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=BF16)
        weights = torch.rand(tokens, TOP_K, device=DEVICE)
        rows = x.repeat_interleave(TOP_K, 0)
        routings = _routings(tokens, experts, kind)
        ends = [torch.bincount(i.view(-1), minlength=experts).cumsum(0) for i in routings]

        def call(ids: Tensor, x: Tensor = x, weights: Tensor = weights) -> Tensor:
            return jitquant.nvfp4_experts(x, up, down, ids, weights)

        def bf16(offsets: Tensor, rows: Tensor = rows) -> Tensor:
            return _bf16(rows, wide_up, wide_down, offsets)

        inputs = [(ids,) for ids in routings]
        used = sum(int(ids.unique().numel()) for ids in routings) / len(routings)
        read = used * 3 * hidden * inter * 9 / 16
        yield Layer(
            *(experts, hidden, inter, tokens, kind, read * 1e-6, read / bandwidth * 1e-3),
            timing.graph_us(call, inputs),
            timing.behind_us(call, inputs, timing.SUSTAINED),
            timing.graph_us(bf16, [(end.to(torch.int32),) for end in ends]),
        )


def layers(bandwidth: float) -> Iterator[Layer]:
    """Every shape with every number of tokens.

    Args:
        bandwidth: in GB/s, of which the floor is made.
    """
    for shape in SHAPES:
        yield from _layers_of(*shape, bandwidth)
        torch.cuda.empty_cache()


def report(bandwidth: float, show: Callable[[str], Any]) -> list[dict[str, Any]]:
    """All layers as plain data; each is shown as it is measured."""
    rows = []
    for layer in layers(bandwidth):
        show(layer.text())
        rows.append(
            {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(layer).items()}
        )
    return rows
