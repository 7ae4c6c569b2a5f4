"""Trains a small transformer on real text in bf16 and in FP8, from the same seed, and compares.

    python examples/fp8_training.py
    python examples/fp8_training.py --steps 100 --hidden 256 --out out/fp8_training

The text is Python's own documentation as its standard library carries it, byte by byte, so nothing
is downloaded. Both models have the same initial weights and see the same batches; the linears of
the blocks of the second are `Float8BlockwiseLinear`, and all else is the same. Writes both curves
as fp8_training.json and, where matplotlib is there, fp8_training.png, and fails where the losses on
text that was held out end further apart than --tolerance.

On sm_90 the products are of FP8 tensor cores; elsewhere, the CPU included, they have the same
numerics, slowly.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pydoc_data.topics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from jitquant.nn import convert

HEAD = 64  # elements of an attention head


def documentation() -> Tensor:
    """The bytes of the language reference that `help` shows, in a fixed order."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class Block(nn.Module):
    """Causal attention, then an MLP; norms before both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) to the same."""
        q, k, v = (
            t.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for t in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, hidden: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Losses of (batch, length + 1) bytes: one number."""
        x = self.bytes(text[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def batch_of(text: Tensor, rows: int, length: int, seed: int) -> Tensor:
    """(rows, length + 1) bytes from places that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(text) - length - 1, (rows, 1), generator=generator)
    return text[first + torch.arange(length + 1)]


def train(
    model: nn.Module, text: Tensor, held_out: Tensor, given: argparse.Namespace
) -> tuple[list[float], float, float]:
    """The loss of every step, that on held-out text at the end, and the seconds it took."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95))
    warmup = max(1, given.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * step / given.steps))
        ),
    )
    losses = []
    begin = time.perf_counter()
    for step in range(given.steps):
        loss = model(batch_of(text, given.batch, given.length, step).to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    curve = torch.stack(losses).tolist()
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        batches = (batch_of(held_out, given.batch, given.length, seed) for seed in range(16))
        end = torch.stack([model(batch.to(device)) for batch in batches]).mean().item()
    return curve, end, seconds


def picture(record: dict, path: Path) -> None:
    """Both curves, smoothed, and how far they are apart."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    width = max(1, len(record["loss"]["bf16"]) // 50)
    smooth = {
        name: torch.tensor(curve).unfold(0, width, 1).mean(1)
        for name, curve in record["loss"].items()
    }
    steps = torch.arange(width, width + len(smooth["bf16"]))
    for name, label, style in (("bf16", "bf16", "-"), ("fp8", "FP8 blockwise", "--")):
        end = record["held_out"][name]
        above.plot(steps, smooth[name], style, label=f"{label}, {end:.4f} on held-out text")
    above.set_ylabel(f"loss, mean of {width} steps (nats a byte)")
    above.legend()
    above.grid(alpha=0.3)
    below.plot(steps, 100 * (smooth["fp8"] / smooth["bf16"] - 1), color="tab:gray")
    below.axhspan(-1, 1, alpha=0.15)
    below.set_ylabel("FP8 over bf16, %")
    below.set_xlabel("step")
    below.grid(alpha=0.3)
    figure.suptitle(f"{record['parameters'] / 1e6:.1f} M parameters on {record['device']}")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains both, and says how far apart they end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=Path("out/fp8_training"))
    given = parser.parse_args()
    if given.hidden % HEAD:
        parser.error(f"--hidden: expected a multiple of {HEAD}, got {given.hidden}")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = documentation()
    cut = len(text) * 9 // 10
    torch.manual_seed(given.seed)
    plain = Transformer(given.hidden, given.layers, given.length).to(device, torch.bfloat16)
    fp8 = copy.deepcopy(plain)
    print(convert(fp8, "fp8_block", filter=lambda name, _: name != "head"))

    losses, held_out, seconds = {}, {}, {}
    for name, model in (("bf16", plain), ("fp8", fp8)):
        found = train(model, text[:cut], text[cut:], given)
        losses[name], held_out[name], seconds[name] = found
        print(
            f"{name}: loss {losses[name][0]:.4f} at the first step, {losses[name][-1]:.4f} at the "
            f"last, {held_out[name]:.4f} on held-out text; {seconds[name]:.1f} s"
        )
    apart = held_out["fp8"] / held_out["bf16"] - 1
    record = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "the CPU",
        "torch": torch.__version__,
        "arguments": {k: v for k, v in vars(given).items() if k != "out"},
        "parameters": sum(p.numel() for p in plain.parameters()),
        "text_bytes": len(text),
        "held_out": held_out,
        "apart": apart,
        "seconds": seconds,
        "loss": losses,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "fp8_training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    try:
        picture(record, given.out / "fp8_training.png")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"FP8 ends {apart:+.2%} from bf16; written to {given.out}")
    if abs(apart) > given.tolerance:
        raise SystemExit(f"further apart than {given.tolerance:.2%}")


if __name__ == "__main__":
    main()
