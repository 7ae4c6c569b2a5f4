"""Decodes with NVFP4 weights, the whole step of a token in one CUDA graph.

    python examples/decode_cuda_graph.py
    python examples/decode_cuda_graph.py --layers 16 --hidden 4096 --batch 8 --tokens 64

A Llama-shaped decoder with random weights: what is shown is how a step is put together, not what it
says. Norms and SwiGLU quantize as they go, so one quantized activation feeds q, k and v, another
gate and up, and no linear quantizes its input again. All linears share one workspace.

On a GPU the step is captured once and replayed for each token, and must give the tokens that the
eager loop gives. Without a GPU there is no graph: the loop runs eagerly, by the CPU reference.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import jitquant
from jitquant.nn import NVFP4Linear, Workspace, convert

HEAD = 64  # elements of an attention head


class Block(nn.Module):
    """Attention with a static cache, then a gated MLP; both add to a residual stream in place."""

    def __init__(self, hidden: int, batch: int, length: int) -> None:
        super().__init__()
        ffn = hidden * 11 // 4 // 128 * 128
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        shape = (batch, hidden // HEAD, length, HEAD)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(
        self, delta: Tensor, stream: Tensor, position: Tensor, seen: Tensor, workspace: Workspace
    ) -> Tensor:
        """What is to be added to ``stream`` next; ``delta`` is what is to be added to it first."""
        how = {"granularity": "row"}
        q = jitquant.rmsnorm_quantize_nvfp4(delta, self.attention_norm, residual=stream, **how)
        heads = [
            linear.run_from_quantized(q, workspace=workspace).view(len(delta), -1, 1, HEAD)
            for linear in (self.q, self.k, self.v)
        ]
        self.keys.index_copy_(2, position, heads[1])
        self.values.index_copy_(2, position, heads[2])
        y = scaled_dot_product_attention(heads[0], self.keys, self.values, attn_mask=seen)
        delta = self.o(y.reshape(delta.shape), workspace=workspace)

        q = jitquant.rmsnorm_quantize_nvfp4(delta, self.mlp_norm, residual=stream, **how)
        both = self.gate_up.run_from_quantized(q, workspace=workspace)
        q = jitquant.deinterleave_quantize_nvfp4(
            both, self.down.in_features, op="swiglu", halves=True, **how
        )
        return self.down.run_from_quantized(q, workspace=workspace)


class Decoder(nn.Module):
    """Tokens (batch,) and their position (1,) to the next tokens (batch,)."""

    def __init__(self, layers: int, hidden: int, vocabulary: int, batch: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, batch, length) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.register_buffer("order", torch.arange(length))

    @torch.no_grad()
    def forward(self, tokens: Tensor, position: Tensor, workspace: Workspace) -> Tensor:
        stream = self.embed(tokens)
        delta = torch.zeros_like(stream)
        seen = (self.order <= position)[None, None, None, :]
        for block in self.blocks:
            delta = block(delta, stream, position, seen, workspace)
        return self.head(self.norm(stream + delta)).argmax(-1)


class Loop:
    """Decoding, eagerly or by replaying one graph."""

    def __init__(self, model: Decoder, batch: int, device: torch.device) -> None:
        self.model = model
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.workspace = Workspace(model, rows=batch)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """One token more, from and to the same memory: nothing of it is the CPU's."""
        self.tokens.copy_(self.model(self.tokens, self.position, self.workspace))
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
        parser.error(f"--hidden {given.hidden}: accepted are multiples of {HEAD}")

    torch.manual_seed(0)
    device = torch.device("cuda" if on_gpu else "cpu")
    with device:
        model = Decoder(given.layers, given.hidden, given.vocabulary, given.batch, given.tokens)
    model = model.to(torch.bfloat16).eval()
    print(convert(model, "nvfp4", filter=lambda name, _: name != "head"))
    loop = Loop(model, given.batch, device)
    print(f"one workspace for all layers: {loop.workspace.buffer.numel() / 2**20:.1f} MiB")

    if not on_gpu:
        tokens, seconds = loop.run(given.tokens)
        print("no GPU here: decoded eagerly on the CPU, by the reference; there is no graph")
        print(f"{given.tokens} tokens, {seconds * 1e3:.1f} ms each")
        print("first sequence:", *tokens[:, 0].tolist())
        return
    if not any(isinstance(m, NVFP4Linear) and m.scale_layout != "linear" for m in model.modules()):
        print("this GPU has no NVFP4 tensor cores: weights are dequantized at each step")
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


if __name__ == "__main__":
    main()
