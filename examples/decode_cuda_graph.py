"""Decodes with NVFP4 weights, the whole step of a token in one CUDA graph.

    python examples/decode_cuda_graph.py
    python examples/decode_cuda_graph.py --layers 16 --hidden 4096 --batch 8 --tokens 64

A Llama-shaped decoder with random weights: what is shown is how a step is put together, not what it
says. On a GPU a block takes ten launches, and says so:

    rmsnorm_quantize     the stream, normalized and in NVFP4, in one pass
    nvfp4_linear         q, k and v in one product, as they share an input
    rope_cache           positions for q and k, and the store of k and v (decode_kernels.cu)
    attend               attention to what is in the cache (decode_attention.cu)
    quantize             what the attention made
    nvfp4_linear         the output projection, added to the stream before it is rounded
    rmsnorm_quantize
    nvfp4_linear         gate and up in one product
    swiglu + quantize
    nvfp4_linear         down, added to the stream

No fewer: each product needs all of its input, which a launch before it has to finish, and a scale
for a row of NVFP4 needs all of that row. Each of these kernels is launched while the one before it
ends, and a product has asked for its weights by then.

On a GPU the step is captured once and replayed for each token, and must give the tokens that the
eager loop gives. Without a GPU there is no graph: the loop runs eagerly, by the CPU reference.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import jitquant
from jitquant.nn import convert

HEAD = 64  # elements of an attention head
HERE = Path(__file__).parent


def rope_cache(
    qkv: Tensor, angles: Tensor, position: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """The queries (batch, heads, HEAD) of one token, rotated; its key and value go to the cache.

    Args:
        qkv: (batch, 3 * heads * HEAD).
        angles: fp32 (length, HEAD): cosines, then sines.
        position: int64 (1,).
        keys: (batch, length, heads, HEAD), written at ``position``.
        values: likewise.
    """
    q, k, v = qkv.view(len(qkv), 3, -1, HEAD).unbind(1)
    if qkv.is_cuda:
        module = jitquant.get_cuda_module("decode_kernels", [HERE / "decode_kernels.cu"])
        q = torch.empty_like(q, memory_format=torch.contiguous_format)
        module.rope_cache(qkv, angles, position, None, None, 0.0, q=q, keys=keys, values=values)
        return q
    cos, sin = angles[position].chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    keys[:, position] = rotated(k)[:, None]
    values[:, position] = v[:, None]
    return rotated(q)


def attention(queries: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """(batch, heads, HEAD) over the cache up to ``position``, to (batch, heads * HEAD)."""
    if queries.is_cuda:
        module = jitquant.get_cuda_module("decode_attention", [HERE / "decode_attention.cu"])
        module.attend(queries, keys, values, position, out=(out := torch.empty_like(queries)))
        return out.flatten(1)
    seen = torch.arange(keys.shape[1])[None] <= position
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    y = scaled_dot_product_attention(queries[:, :, None], keys, values, attn_mask=seen)
    return y.flatten(1)


class Block(nn.Module):
    """Attention with a static cache, then a gated MLP; both add to the residual stream."""

    def __init__(self, hidden: int, batch: int, length: int) -> None:
        super().__init__()
        ffn = hidden * 11 // 4 // 128 * 128
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        shape = (batch, length, hidden // HEAD, HEAD)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, stream: Tensor, angles: Tensor, position: Tensor) -> Tensor:
        """The next stream (batch, hidden)."""
        q = jitquant.rmsnorm_quantize_nvfp4(stream, self.attention_norm, granularity="row")
        qkv = self.qkv.run_from_quantized(q)
        queries = rope_cache(qkv, angles, position, self.keys, self.values)
        y = attention(queries, self.keys, self.values, position)
        q = jitquant.quantize_nvfp4(y, granularity="row")
        stream = self.o.run_from_quantized(q, residual=stream)

        q = jitquant.rmsnorm_quantize_nvfp4(stream, self.mlp_norm, granularity="row")
        both = self.gate_up.run_from_quantized(q)
        q = jitquant.deinterleave_quantize_nvfp4(
            both, self.down.in_features, op="swiglu", interleave=0, granularity="row"
        )
        return self.down.run_from_quantized(q, residual=stream)


class Decoder(nn.Module):
    """Tokens (batch,) and their position (1,) to the next tokens (batch,)."""

    def __init__(self, layers: int, hidden: int, vocabulary: int, batch: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, batch, length) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.register_buffer("order", torch.arange(length))

    def angles(self) -> Tensor:
        """Cosines and sines of all positions (length, HEAD)."""
        steps = torch.arange(0, HEAD, 2, device=self.order.device).float() / HEAD
        turns = self.order.float()[:, None] * 10_000.0**-steps
        return torch.cat((turns.cos(), turns.sin()), dim=-1)

    @torch.no_grad()
    def forward(self, tokens: Tensor, position: Tensor, angles: Tensor) -> Tensor:
        stream = self.embed(tokens)
        for block in self.blocks:
            stream = block(stream, angles, position)
        return self.head(self.norm(stream)).argmax(-1)


class Loop:
    """Decoding, eagerly or by replaying one graph."""

    def __init__(self, model: Decoder, batch: int, device: torch.device) -> None:
        self.model = model
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.angles = model.angles()
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """One token more, from and to the same memory: nothing of it is the CPU's."""
        self.tokens.copy_(self.model(self.tokens, self.position, self.angles))
        self.position.add_(1)

    def capture(self) -> None:
        """Records a step. It is run before, for the kernels to be built and cuBLAS set up."""
        self.restart()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def restart(self) -> None:
        """The first token at the first position."""
        self.tokens.copy_(torch.arange(len(self.tokens)))
        self.position.zero_()

    def run(self, count: int) -> tuple[Tensor, float]:
        """Tokens (count, batch), and seconds a token."""
        self.restart()
        found = []
        wait = torch.cuda.synchronize if self.tokens.is_cuda else lambda: None
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
            found.append(self.tokens.clone())
        wait()
        return torch.stack(found), (time.perf_counter() - begin) / count


def show_launches(model: Decoder, batch: int) -> None:
    """Prints the kernels that a block of the model launches, as the profiler saw them."""
    stream = torch.randn(batch, model.norm.weight.numel(), device="cuda", dtype=torch.bfloat16)
    position = torch.zeros(1, dtype=torch.long, device="cuda")
    arguments = stream, model.angles(), position
    with torch.no_grad():
        model.blocks[0](*arguments)
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            model.blocks[0](*arguments)
            torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    print(f"a block took {len(found)} launches:")
    for event in sorted(found, key=lambda e: e.time_range.start):
        print(f"  {event.time_range.elapsed_us():6.1f} us  {event.name[:70]}")


def main() -> None:
    """Command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--hidden", type=int, default=2048 if on_gpu else 256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32 if on_gpu else 8)
    parser.add_argument("--vocabulary", type=int, default=8192 if on_gpu else 512)
    given = parser.parse_args()
    if given.hidden % HEAD:
        parser.error(f"--hidden: expected a multiple of {HEAD}, got {given.hidden}")

    torch.manual_seed(0)
    device = torch.device("cuda" if on_gpu else "cpu")
    with device:
        model = Decoder(given.layers, given.hidden, given.vocabulary, given.batch, given.tokens)
    model = model.to(torch.bfloat16).eval()
    print(convert(model, "nvfp4", filter=lambda name, _: name != "head"))
    loop = Loop(model, given.batch, device)

    if not on_gpu:
        tokens, seconds = loop.run(given.tokens)
        print("no GPU: decoded eagerly on the CPU by the reference, without a graph")
        print(f"{given.tokens} tokens, {seconds * 1e3:.1f} ms each")
        print("first sequence:", *tokens[:, 0].tolist())
        return
    loop.run(2)
    eager, seconds = loop.run(given.tokens)
    print(f"eager: {seconds * 1e6:.0f} us a token")
    loop.capture()
    loop.run(2)
    replayed, seconds = loop.run(given.tokens)
    print(f"graph: {seconds * 1e6:.0f} us a token")
    print("first sequence:", *replayed[:, 0].tolist())
    if not torch.equal(eager, replayed):
        raise SystemExit("the graph gave other tokens than the eager loop")
    print("the same tokens as eagerly")
    show_launches(model, given.batch)


if __name__ == "__main__":
    main()
