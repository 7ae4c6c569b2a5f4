"""One linear layer in NVFP4: what is lost, what is saved, what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import jitquant
from harness import timing
from harness.demo.model import Packing, embed, hooked, linear_layers


@dataclass(frozen=True)
class Settings:
    """How the activations are quantized."""

    granularity: str = "tensor"
    recipe: str = "te"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    layer: str
    shape: tuple[int, int, int]
    """Tokens, in features, out features."""
    activation_db: float
    weight_db: float
    output_db: float
    bytes_before: int
    bytes_after: int
    microseconds: float
    """Of quantizing the activation."""
    launches: int | None
    """Of quantizing the activation; None on the CPU."""


def sqnr_db(exact: Tensor, approximate: Tensor) -> float:
    """Signal to quantization noise in dB, summed in fp64; infinite without noise."""
    signal = exact.double().square().sum().item()
    noise = (exact.double() - approximate.double()).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def quantize(x: Tensor, settings: Settings) -> Any:
    """An activation in NVFP4."""
    return jitquant.quantize_nvfp4(x, granularity=settings.granularity, recipe=settings.recipe)


def quantize_weight(weight: Tensor, settings: Settings) -> Any:
    """A weight (out, in) in NVFP4, in blocks of 16 along the features that are summed over."""
    return jitquant.quantize_weight_nvfp4(weight, recipe=settings.recipe)


def cost(fn: Callable[[Tensor], Any], x: Tensor) -> tuple[float, int | None]:
    """Microseconds and kernel launches of ``fn(x)``."""
    if not x.is_cuda:
        return timing.wall_us(lambda: fn(x), repeats=3), None
    from jitquant.testing import count_launches

    inputs = [(x.clone(),) for _ in range(timing.sets_needed(x.nbytes, 32 * 2**20))]
    return timing.graph_us(fn, inputs, seconds=0.01, repeats=3), int(count_launches(fn, x))


@torch.inference_mode()
def measure(name: str, layer: nn.Linear, x: Tensor, settings: Settings) -> Row:
    """Quantizes the rows ``x`` (tokens, in) and the layer's weight, and compares."""
    weight = layer.weight.detach()
    x_q, w_q = quantize(x, settings), quantize_weight(weight, settings)
    x_hat, w_hat = x_q.dequantize(torch.float32), w_q.dequantize(torch.float32)
    microseconds, launches = cost(lambda v: quantize(v, settings), x)
    return Row(
        layer=name,
        shape=(x.shape[0], layer.in_features, layer.out_features),
        activation_db=sqnr_db(x, x_hat),
        weight_db=sqnr_db(weight, w_hat),
        output_db=sqnr_db(x.float() @ weight.float().T, x_hat @ w_hat.T),
        bytes_before=x.nbytes + weight.nbytes,
        bytes_after=x_q.nbytes + w_q.nbytes,
        microseconds=microseconds,
        launches=launches,
    )


@torch.inference_mode()
def quantized_embeddings(
    model: nn.Module,
    batch: dict[str, Tensor],
    packing: Packing,
    settings: Settings,
    step: Callable[[], None] = lambda: None,
) -> Tensor:
    """Sentence embeddings with every linear layer replaced by its dequantized NVFP4 pair."""

    def hook(layer: nn.Linear) -> Any:
        w_hat = quantize_weight(layer.weight.detach(), settings).dequantize(torch.float32)

        def replace(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            rows = packing.rows(arguments[0]).contiguous()
            y = quantize(rows, settings).dequantize(torch.float32) @ w_hat.T
            if layer.bias is not None:
                y = y + layer.bias.float()
            step()
            return packing.unpack(y.to(output.dtype), like=output)

        return replace

    handles = [layer.register_forward_hook(hook(layer)) for layer in linear_layers(model).values()]
    with hooked(handles):
        return embed(model, batch)
