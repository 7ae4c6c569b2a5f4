"""Trains a small language model on Python's own source, or writes text with one that is trained.

    python examples/language_model.py                                     # writes some Python
    python examples/language_model.py train --parameters 20e6 --steps 4000 --out model.safetensors

The text is what ships with Python: the standard library's sources without its tests, the reference
that ``help`` shows, and the license. Every 16th file is held out, by a hash of its name. Tokens are
bytes, so that nothing is downloaded. The model has the layers and the names of Llama (RMSNorm,
RoPE, SwiGLU); the file holds them in bf16.

``language_model.safetensors``, beside this file, was trained on two CPU cores; the 20 million
parameters of the command above want a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS = Path(__file__).resolve().with_name("language_model.safetensors")
HEAD = 64  # elements of an attention head
HELD_OUT = 16  # one file of so many
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib2to3"}


def texts() -> tuple[Tensor, Tensor]:
    """The bytes to train on and those held out, uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = {f"topics/{name}": text for name, text in pydoc_data.topics.topics.items()}
    for path in sorted((*root.rglob("*.py"), *root.glob("LICENSE*"))):
        name = path.relative_to(root)
        if not SKIPPED.intersection(name.parts) and name.parts[0] != "pydoc_data":
            parts[name.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    sides: tuple[list[str], list[str]] = ([], [])
    for name in sorted(parts):
        sides[zlib.crc32(name.encode()) % HELD_OUT == 0].append(parts[name])
    train, held_out = ("\n".join(side).encode() for side in sides)
    return (
        torch.frombuffer(bytearray(train), dtype=torch.uint8),
        torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
    )


class Cache:
    """Keys and values of the bytes that were read: (batch, heads, length, HEAD) for each layer."""

    def __init__(self, layers: int) -> None:
        self.kept: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones at the end."""
        old = self.kept[layer]
        new = (k, v) if old is None else (torch.cat((old[0], k), 2), torch.cat((old[1], v), 2))
        self.kept[layer] = new
        return new

    @property
    def length(self) -> int:
        """Bytes that were read."""
        return 0 if self.kept[0] is None else self.kept[0][0].shape[2]


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: pairs of an element and that half a head away, turned by (length, HEAD / 2) angles."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None, layer: int) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        if cache is not None:
            k, v = cache.extended(layer, k, v)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, with norms before them."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.self_attn = Attention(hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.mlp = MLP(hidden, intermediate)

    def forward(self, x: Tensor, angles: Tensor, cache: Cache | None, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    """Predicts the next byte: (batch, length) bytes to (batch, length, 256) logits in fp32."""

    def __init__(self, hidden: int, layers: int, intermediate: int) -> None:
        super().__init__()
        self.sizes = {"hidden": hidden, "layers": layers, "intermediate": intermediate}
        self.embed_tokens = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList(Layer(hidden, intermediate) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, text: Tensor, cache: Cache | None = None) -> Tensor:
        first = 0 if cache is None else cache.length
        places = torch.arange(first, first + text.shape[1], device=text.device)
        steps = torch.arange(0, HEAD, 2, device=text.device)
        angles = places[:, None] * 10000.0 ** (-steps / HEAD)
        x = self.embed_tokens(text.long())
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, cache, i)
        logits: Tensor = self.lm_head(self.norm(x)).float()
        return logits


def sizes_for(parameters: float) -> dict[str, int]:
    """Sizes of a model that has about so many parameters; all are multiples of 64."""
    candidates = [
        {"hidden": hidden, "layers": layers, "intermediate": 2 * hidden}
        for hidden in range(128, 2049, 64)
        for layers in range(3, 25)
        if 48 <= hidden / layers <= 72
    ]
    return min(candidates, key=lambda s: abs(10 * s["layers"] * s["hidden"] ** 2 / parameters - 1))


def load(path: Path = WEIGHTS, device: str | torch.device = "cpu") -> LanguageModel:
    """A trained model in bf16, ready to be asked."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        model = LanguageModel(**json.loads(file.metadata()["sizes"]))
        model.to(torch.bfloat16).load_state_dict(
            {n: file.get_tensor(n) for n in model.state_dict()}
        )
    return model.to(device).eval()


def windows(text: Tensor, rows: int, length: int) -> Tensor:
    """(rows, length + 1) bytes from places at equal distances, the same ones each time."""
    first = torch.linspace(0, len(text) - length - 1, rows).long()
    return text[first[:, None] + torch.arange(length + 1)]


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, batch: int = 32) -> float:
    """What the model needs to encode windows (rows, length + 1): lower is better."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device, dtype=torch.float64)
    for part in text.split(batch):
        part = part.long().to(device)
        logits = model(part[:, :-1])
        total += functional.cross_entropy(
            logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )
    return total.item() / math.log(2) / (text.shape[0] * (text.shape[1] - 1))


@torch.no_grad()
def written(model: LanguageModel, prompt: str, count: int) -> str:
    """The likeliest continuation of a prompt: ``count`` bytes, read greedily."""
    device = next(model.parameters()).device
    text = torch.frombuffer(bytearray(prompt.encode()), dtype=torch.uint8)[None].to(device)
    cache, made = Cache(len(model.layers)), []
    for _ in range(count):
        text = model(text, cache)[:, -1:].argmax(-1)
        made.append(text)
    return bytes(torch.cat(made, 1)[0].tolist()).decode(errors="replace")


def train(given: argparse.Namespace) -> None:
    """Trains until ``steps`` or ``minutes`` are over; the rate falls with what is left of them."""
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, held_out = texts()
    check = windows(held_out, 64, given.length)
    torch.manual_seed(0)
    sizes = sizes_for(given.parameters)
    model = LanguageModel(**sizes).to(device)
    count = sum(p.numel() for p in model.parameters())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    print(f"{count / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text", flush=True)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(given.length + 1)
    begin, step = time.monotonic(), 0
    compiled = torch.compile(model) if given.compile else model
    while True:
        minutes = (time.monotonic() - begin) / 60
        past = max(step / given.steps, minutes / given.minutes)
        if past >= 1:
            break
        rate = given.lr * min((step + 1) / 50, (1 - past) * 0.98 + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = torch.randint(len(text) - given.length, (given.batch, 1), generator=generator)
        batch = text[first + offsets].long().to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = compiled(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            bits = loss.item() / math.log(2)
            print(f"step {step}, {minutes:.1f} min, {bits:.3f} bits per byte", flush=True)
    model.to(torch.bfloat16)
    bits = bits_per_byte(model, check)
    facts = {"sizes": json.dumps(sizes), "steps": str(step), "parameters": str(count)}
    save_file({n: p.detach().cpu() for n, p in model.named_parameters()}, given.out, facts)
    print(f"{bits:.4f} bits per byte on held-out text, {step} steps; wrote {given.out}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command")
    writing = commands.add_parser("write", help="continue a prompt")
    writing.add_argument("--weights", type=Path, default=WEIGHTS)
    writing.add_argument("--prompt", default='def read(path):\n    """')
    writing.add_argument("--count", type=int, default=200, help="bytes to write")
    training = commands.add_parser("train", help="train a new model")
    training.add_argument("--parameters", type=float, default=2.6e6)
    training.add_argument("--steps", type=int, default=4000)
    training.add_argument("--minutes", type=float, default=60.0, help="stop after so many")
    training.add_argument("--batch", type=int, default=16)
    training.add_argument("--length", type=int, default=256)
    training.add_argument("--lr", type=float, default=3e-3)
    training.add_argument("--compile", action="store_true", help="with torch.compile")
    training.add_argument("--out", type=Path, default=Path("language_model.safetensors"))
    given = parser.parse_args()
    if given.command == "train":
        train(given)
    else:
        given = given if given.command else parser.parse_args(["write"])
        print(given.prompt + written(load(given.weights), given.prompt, given.count))


if __name__ == "__main__":
    main()
