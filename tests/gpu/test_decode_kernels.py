"""examples/decode_kernels.cu and the benchmark's decoder, which is made of it, beside the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness.bench import decoder
from harness.bench import model as bench
from samples import randn
from torch import Tensor

from jitquant.testing import assert_capturable, count_launches

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


def near(got: Tensor, want: Tensor) -> bool:
    """Within two roundings to bf16 of the largest value near it."""
    return torch.allclose(got.cpu().float(), want.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("cols", [8, 264, 4096, 8192, 16384])
def test_rms_norm(rows: int, cols: int) -> None:
    x, weight = randn(rows, cols), randn(cols, seed=1)
    got = decoder.rms_norm(x.cuda(), weight.cuda(), 1e-6)
    assert near(got, decoder.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (3, 264), (64, 14336)])
def test_swiglu(rows: int, cols: int) -> None:
    both = randn(rows, 2 * cols)
    assert near(decoder.swiglu(both.cuda()), decoder.swiglu(both))


def steps(heads: int, groups: int, size: int, normed: bool) -> Iterator[list[Any]]:
    """Arguments of a prompt of five tokens for three sequences, then of two tokens after it."""
    norms = (randn(size, seed=7), randn(size, seed=8)) if normed else (None, None)
    turns = torch.arange(40).float()[:, None] * 100.0 ** -(torch.arange(size // 2) / (size // 2))
    angles = torch.cat((turns.cos(), turns.sin()), dim=-1)
    for first, length in ((0, 5), (5, 1), (6, 1)):
        position = torch.tensor([first])
        step = decoder.Step(length, position, angles)
        qkv = randn(3 * length, (heads + 2 * groups) * size, seed=first)
        yield [qkv, decoder.Heads(heads, groups, size, norms, 1e-6), step]


def on_gpu(thing: Any) -> Any:
    """The same with its tensors on the GPU."""
    if isinstance(thing, Tensor):
        return thing.cuda()
    if isinstance(thing, tuple):
        return tuple(map(on_gpu, thing))
    if isinstance(thing, decoder.Heads | decoder.Step):
        return type(thing)(**{name: on_gpu(value) for name, value in vars(thing).items()})
    return thing


@pytest.mark.parametrize(("heads", "groups", "size"), [(32, 8, 128), (6, 2, 64), (4, 1, 96)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_cache_and_attention(heads: int, groups: int, size: int, normed: bool) -> None:
    """After each step queries, the whole cache and what the attention makes of it are the CPU's."""
    shape = (3, 40, groups, size)
    mine, its = ([torch.zeros(shape, dtype=BF16, device=d) for _ in range(2)] for d in (GPU, CPU))
    for arguments in steps(heads, groups, size, normed):
        there = [on_gpu(a) for a in arguments]
        q = decoder.rope_cache(*there, *mine)
        want = decoder.rope_cache(*arguments, *its)
        assert near(q, want)
        assert all(map(near, mine, its))
        y = decoder.attention(q, *there[1:], *mine)
        assert near(y, decoder.attention(want, *arguments[1:], *its))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("heads", "groups"), [(8, 8), (12, 4), (8, 1)])
@pytest.mark.parametrize("sequences", [1, 5, 90])
def test_attention_of_long_caches(sequences: int, heads: int, groups: int, size: int) -> None:
    """Every division between thread blocks and warps, some without a position; fp32 is the oracle.

    What is past the position is not read: it is NaN.
    """
    for positions in (17, 260, 3001):
        shape = (sequences, positions, groups, size)
        keys, values = (randn(*shape, seed=seed).cuda() for seed in (1, 2))
        q = randn(sequences, heads, size, seed=3).cuda() * 4
        for last in sorted({0, 14, 15, 16, positions // 2, positions - 1} & set(range(positions))):
            k, v = keys.clone(), values.clone()
            k[:, last + 1 :] = v[:, last + 1 :] = torch.nan
            step = decoder.Step(1, torch.tensor([last]).cuda(), torch.empty(0))
            y = decoder.attention(
                q, decoder.Heads(heads, groups, size, (None, None), 0.0), step, k, v
            )
            k, v = (t[:, : last + 1].repeat_interleave(heads // groups, 2).float() for t in (k, v))
            chances = torch.einsum("shd,sphd->shp", q.float(), k).mul(size**-0.5).softmax(-1)
            assert near(y, torch.einsum("shp,sphd->shd", chances, v).flatten(1).cpu())


def test_attention_replays_at_any_position() -> None:
    """A captured launch follows the position, also past the end of the cache, where it stays."""
    keys, values = (randn(2, 300, 2, 128, seed=seed).cuda() for seed in (1, 2))
    q, position = randn(2, 8, 128, seed=3).cuda(), torch.zeros(1, dtype=torch.long, device=GPU)
    heads = decoder.Heads(8, 2, 128, (None, None), 0.0)
    step = decoder.Step(1, position, torch.empty(0))
    decoder.attention(q, heads, step, keys, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decoder.attention(q, heads, step, keys, values)
    for last in (299, 5, 1000):
        position.fill_(last)
        graph.replay()
        alone = decoder.Step(1, torch.tensor([min(last, 299)]).cuda(), torch.empty(0))
        assert torch.equal(got, decoder.attention(q, heads, alone, keys, values))


@pytest.mark.parametrize("format", decoder.FORMATS)
def test_a_block_takes_nine_launches(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of the attention, and a step of the model is captured."""
    pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 256,
    }
    monkeypatch.setattr(bench, "SHAPES", {"tiny": ("LlamaConfig", sizes)})
    model = bench.made("tiny", format, GPU)
    model.set_cache(3, 40)
    tokens = torch.zeros(3, 1, dtype=torch.long, device=GPU)
    position = torch.full((1,), 7, device=GPU)
    model(tokens, position)
    assert_capturable(model, tokens, position)
    counts = []
    for blocks in (model.blocks, model.blocks[:1]):
        model.blocks = blocks
        model.cache = model.cache[: len(blocks)]
        counts.append(count_launches(model, tokens, position))
    q = randn(3, 4, 128).cuda()
    step = decoder.Step(1, position, model.angles)
    attention = count_launches(decoder.attention, q, model.blocks[0].heads, step, *model.cache[0])
    most = {"w4a16": 8, "w4a4": 9}.get(format)  # cuBLAS may take two for a product
    if most is not None and torch.cuda.get_device_capability()[0] < 10:
        assert counts[0] - counts[1] - attention == most
