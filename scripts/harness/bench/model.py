"""Whole models with random weights: decoding a token in one CUDA graph, and reading a prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import timing
from harness.bench.decoder import BF16, DEVIATION, FORMATS, Decoder

STEPS = 16
"""Tokens in a measurement of decoding."""
REPEATS = 3
"""Measurements of decoding and of a prompt; the median is taken."""

_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
_QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
_QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("LlamaConfig", _LLAMA_8B),
    "qwen3-32b": ("Qwen3Config", _QWEN3_32B),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", _QWEN3_30B_A3B),
}
"""Shapes by name: the class of transformers' config, and what it is given."""

PLAIN = "bf16"
"""transformers' own model, with scaled_dot_product_attention."""

COMPILED = "bf16-compiled"
"""The same under torch.compile."""


@dataclass(frozen=True)
class Times:
    """A step of a model.

    Attributes:
        shape: name of the model's.
        format: a name in `FORMATS`, `PLAIN` or `COMPILED`.
        sequences: that are decoded together; 0: one prompt is read.
        tokens: of a step, of all sequences.
        us: microseconds of a step.
        floor_us: of the bytes of weights and cache that it has to read.
        launches: kernels, copies and memsets of a step; None of a prompt.
    """

    shape: str
    format: str
    sequences: int
    tokens: int
    us: float
    floor_us: float
    launches: int | None = None

    @property
    def per_second(self) -> float:
        """Tokens a second."""
        return self.tokens / self.us * 1e6

    def text(self) -> str:
        """A line."""
        what = f"{self.sequences:>3} sequences" if self.sequences else "prompt       "
        line = (
            f"{self.shape} {self.format:>17} {what} {self.us / 1e3:9.3f} ms  "
            f"{self.per_second:9.0f} tokens/s  bytes {self.floor_us / 1e3:7.3f} ms "
            f"({self.floor_us / self.us:4.0%})"
        )
        return line if self.launches is None else f"{line}  {self.launches} launches"


def empty_model(shape: str, layers: int | None = None) -> Any:
    """transformers' model, on "meta": no weight is there."""
    import transformers

    kind, sizes = SHAPES[shape]
    config = getattr(transformers, kind)(**sizes, max_position_embeddings=131072)
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=BF16, attn_implementation="sdpa"
        )
    return model.eval()


def weight_bytes(model: Any, bits: float, rows: int) -> float:
    """Of the weights that a step of so many rows reads, if experts are chosen at random.

    Args:
        model: of transformers.
        bits: of an element of the blocks' projections; the rest is in bf16.
        rows: of the step.
    """
    total = 0.0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * (bits if "_proj" in name else 16) / 8
        if parameter.dim() == 3:
            part = model.config.num_experts_per_tok / parameter.shape[0]
            size *= 1 - (1 - part) ** rows
        if "embed_tokens" not in name:
            total += size
    return total


def filled(model: Any, device: torch.device) -> Any:
    """The same with random weights on a device, none of them made elsewhere."""
    model.to_empty(device=device)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # of norms
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(0, DEVIATION)
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


class OfTransformers:
    """transformers' model with its static cache, called as a `Decoder` is."""

    def __init__(self, model: Any, device: torch.device, *, compiled: bool = False) -> None:
        self.model = filled(model, device)
        self.device = device
        self.forward = torch.compile(model, dynamic=False) if compiled else model
        self.cache: Any = None

    def set_cache(self, sequences: int, positions: int) -> None:
        from transformers import StaticCache

        config = self.model.config
        self.cache = StaticCache(config=config, max_cache_len=positions)
        heads = config.num_key_value_heads, config.head_dim
        self.cache.early_initialization(sequences, *heads, BF16, self.device)

    def set_position(self, position: int) -> None:
        """Says what is in the cache."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(position)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, _: Tensor) -> Tensor:
        made = self.forward(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = made.logits[:, -1]
        return logits


def _captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def decode_us(model: Any, sequences: int, context: int) -> tuple[float, int]:
    """Microseconds of a step that makes a token for each sequence, in one graph; its launches.

    Args:
        model: a `Decoder` or `OfTransformers`.
        sequences: that are decoded together.
        context: tokens that are in the cache at first.
    """
    from jitquant.testing import count_launches

    model.set_cache(sequences, context + 2 * STEPS)
    # Different ones, so that sequences choose different experts. With random weights, those that
    # a step makes could become alike.
    tokens = torch.arange(sequences, device=model.device).view(-1, 1)
    made = torch.empty_like(tokens)
    position = torch.zeros(1, dtype=torch.long, device=model.device)

    def step() -> None:
        made.copy_(model(tokens, position).argmax(-1, keepdim=True))
        position.add_(1)

    def restart() -> None:
        position.fill_(context)
        if isinstance(model, OfTransformers):
            model.set_position(context)

    restart()
    graph = _captured(step)
    times = []
    for _ in range(REPEATS):
        restart()
        graph.replay()
        us = timing.event_us(lambda: [graph.replay() for _ in range(STEPS)], repeats=1)
        times.append(us / STEPS)
    graph.reset()
    restart()
    launches = count_launches(step)
    return statistics.median(times), launches


def prefill_us(model: Any, prompt: int) -> float:
    """Microseconds in which one prompt is read, the median of some times."""
    model.set_cache(1, prompt)
    tokens = torch.randint(0, 1000, (1, prompt), device=model.device)
    position = torch.zeros(1, dtype=torch.long, device=model.device)

    def step() -> None:
        if isinstance(model, OfTransformers):
            model.set_position(0)
        model(tokens, position)

    step()
    return timing.event_us(step, repeats=REPEATS)


def made(shape: str, format: str, device: torch.device, layers: int | None = None) -> Any:
    """A model of a shape in a format, with random weights."""
    model = empty_model(shape, layers)
    if format in (PLAIN, COMPILED):
        return OfTransformers(model, device, compiled=format == COMPILED)
    return Decoder(model, FORMATS[format](), device)


def cache_bytes(shape: str, tokens: int, layers: int | None) -> int:
    """Of the keys and values of so many tokens."""
    sizes = SHAPES[shape][1]
    count = sizes["num_hidden_layers"] if layers is None else layers
    return int(4 * tokens * count * sizes["num_key_value_heads"] * sizes["head_dim"])


def run(
    shape: str,
    formats: Sequence[str],
    *,
    bandwidth: float,
    sequences: Sequence[int] = (1, 8, 64),
    context: int = 1024,
    prompt: int = 4096,
    layers: int | None = None,
) -> Iterator[Times]:
    """Every format, one model after the other.

    Args:
        shape: a name in `SHAPES`.
        formats: names in `FORMATS`, `PLAIN` or `COMPILED`.
        bandwidth: in GB/s, of which the floors are made.
        sequences: numbers of sequences that are decoded together.
        context: tokens of each that are in the cache.
        prompt: tokens of a prompt that is read; 0: none is.
        layers: of the model; None: the shape's.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    empty = empty_model(shape, layers)
    for format in formats:
        model = made(shape, format, device, layers)
        bits = FORMATS[format].bits if format in FORMATS else 16.0

        def floor(rows: int, cached: int, bits: float = bits) -> float:
            size = weight_bytes(empty, bits, rows) + cache_bytes(shape, cached, layers)
            return size / bandwidth * 1e-3

        for count in sequences:
            us, launches = decode_us(model, count, context)
            yield Times(shape, format, count, count, us, floor(count, count * context), launches)
        if prompt:
            yield Times(shape, format, 0, prompt, prefill_us(model, prompt), floor(prompt, prompt))
        del model
        torch.cuda.empty_cache()


def picture(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Tokens a second beside those of transformers in bf16: a panel a shape, a group a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(6.4 * len(shapes), 3.6), squeeze=False, layout="constrained"
    )
    for axes, shape in zip(panels.flat, shapes, strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        formats = list(dict.fromkeys(row["format"] for row in mine))
        steps = list(dict.fromkeys(row["sequences"] for row in mine))
        width = 0.8 / len(formats)
        base = {row["sequences"]: row["us"] for row in mine if row["format"] == formats[0]}
        for i, format in enumerate(formats):
            chosen = [row for row in mine if row["format"] == format]
            at = [
                steps.index(row["sequences"]) + (i - (len(formats) - 1) / 2) * width
                for row in chosen
            ]
            heights = [base[row["sequences"]] / row["us"] for row in chosen]
            bars = axes.bar(at, heights, width * 0.92, label=format)
            axes.bar_label(
                bars,
                [f"{row['per_second']:.0f}" for row in chosen],
                fontsize=6,
                rotation=90,
                padding=2,
            )
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set_xticks(range(len(steps)), [f"decode {n}" if n else "prefill" for n in steps])
        axes.set_ylabel(f"times as fast as {formats[0]}")
        axes.set_title(shape)
        axes.margins(y=0.2)
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}; bars say tokens/s", fontsize=9)
    figure.savefig(path, dpi=160)
    plt.close(figure)
