"""Trains a small transformer in bf16, FP8 and NVFP4, and NVFP4 with parts of its recipe off.

    python examples/nvfp4_training.py
    python examples/nvfp4_training.py --steps 100 --hidden 128 --seeds 1 --runs bf16 nvfp4

The model and the text are those of fp8_training.py: a byte-wise transformer on Python's own
documentation, so nothing is downloaded. Of one seed all runs have the same initial weights and see
the same batches; only the linears of the blocks differ. Parameters are fp32, and autocast computes
in bf16. On a GPU a training step is captured as a CUDA graph, in which stochastic rounding draws
anew at each replay. Writes every curve to nvfp4_training.json after each run and, where matplotlib
is there, nvfp4_training.png, and fails where the whole recipe ends further from bf16 than
--tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fp8_training import HEAD, Transformer, batch_of, documentation
from torch import Tensor, nn

from jitquant.nn import NVFP4TrainingLinear, NVFP4TrainingRecipe, convert

RUNS: dict[str, NVFP4TrainingRecipe | None] = {
    "bf16": None,
    "fp8": None,
    "nvfp4": NVFP4TrainingRecipe(),
    "nearest": NVFP4TrainingRecipe(stochastic=False),
    "no_rotation": NVFP4TrainingRecipe(rotate="none"),
    "1x16": NVFP4TrainingRecipe(weight_block="1x16"),
    "4over6": NVFP4TrainingRecipe(select="4over6_mae", top=256),
}
"""By name, what the linears of the blocks are."""

LABELS = {
    "bf16": "bf16",
    "fp8": "FP8, 128 x 128 blocks",
    "nvfp4": "NVFP4, the whole recipe",
    "nearest": "without stochastic rounding",
    "no_rotation": "without rotation",
    "1x16": "with 1x16 weights",
    "4over6": "with 4over6",
}


def made(name: str, given: argparse.Namespace, seed: int, device: str) -> Transformer:
    """A model for a run; the same weights for each run of a seed."""
    torch.manual_seed(seed)
    model = Transformer(given.hidden, given.layers, given.length).to(device)
    recipe = RUNS[name]
    if name == "fp8":
        convert(model, "fp8_block", filter=lambda path, _: path != "head")
    if recipe is not None:
        for block in model.blocks:
            for path, linear in list(block.named_children()):
                if type(linear) is nn.Linear:
                    setattr(block, path, NVFP4TrainingLinear.from_linear(linear, recipe=recipe))
    return model


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> Callable[[], Tensor]:
    """A training step on what is in ``batch``, as a captured graph on a GPU."""
    kind = batch.device.type

    def step() -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            loss: Tensor = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=kind != "cuda")
        return loss.detach()

    if kind != "cuda":
        return step
    # What the steps before the capture change is put back.
    parameters = [p.detach().clone() for p in model.parameters()]
    states = [b.detach().clone() for b in model.buffers()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        for parameter, kept in zip(model.parameters(), parameters, strict=True):
            parameter.copy_(kept)
        for buffer, kept in zip(model.buffers(), states, strict=True):
            buffer.copy_(kept)
        for state in optimizer.state.values():
            for part in state.values():
                part.zero_()

    def replay() -> Tensor:
        graph.replay()
        return loss.clone()

    return replay


def train(
    model: nn.Module, text: Tensor, held_out: Tensor, given: argparse.Namespace
) -> tuple[list[float], float, float]:
    """The loss of every step, that on held-out text at the end, and seconds for all steps."""
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    rate = torch.tensor(given.lr, device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate if cuda else given.lr, betas=(0.9, 0.95), capturable=cuda
    )
    batch = torch.empty(given.batch, given.length + 1, dtype=torch.int64, device=device)
    batch.copy_(batch_of(text, given.batch, given.length, 0))
    step = step_of(model, optimizer, batch)
    warmup = max(1, given.steps // 20)
    losses = []
    batches = torch.stack(
        [batch_of(text, given.batch, given.length, i) for i in range(given.steps)]
    )
    batches = batches.to(device)
    begin = time.perf_counter()
    for i in range(given.steps):
        now = min((i + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * i / given.steps)))
        if cuda:
            rate.fill_(given.lr * now)
        else:
            optimizer.param_groups[0]["lr"] = given.lr * now
        batch.copy_(batches[i])
        losses.append(step())
    curve = torch.stack(losses).tolist()
    seconds = time.perf_counter() - begin
    ends = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for seed in range(16):
            ends.append(model(batch_of(held_out, given.batch, given.length, seed).to(device)))
    return curve, torch.stack(ends).mean().item(), seconds


def picture(record: dict, path: Path) -> None:
    """All curves, smoothed, means over the seeds, and how far each is from bf16."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    smooth = {}
    for name, curves in record["loss"].items():
        mean = torch.tensor(curves).mean(0)
        width = max(1, len(mean) // 50)
        smooth[name] = mean.unfold(0, width, 1).mean(1)
        end = sum(record["held_out"][name]) / len(record["held_out"][name])
        steps = torch.arange(width, width + len(smooth[name]))
        above.plot(steps, smooth[name], label=f"{LABELS[name]}, {end:.4f} on held-out text")
        if name != "bf16" and len(record["loss"]["bf16"]) == len(curves):
            below.plot(steps, 100 * (smooth[name] / smooth["bf16"] - 1), label=LABELS[name])
    above.set_ylabel("loss (nats a byte)")
    above.legend()
    below.axhspan(-1.5, 1.5, alpha=0.1)
    below.set_ylabel("over bf16, %")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    seeds = len(record["loss"]["bf16"])
    figure.suptitle(
        f"{record['parameters'] / 1e6:.1f} M parameters on {record['device']}, {seeds} seed(s)"
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains all of them, and says how far from bf16 they end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tolerance", type=float, default=0.015)
    parser.add_argument("--out", type=Path, default=Path("out/nvfp4_training"))
    given = parser.parse_args()
    if given.hidden % HEAD:
        parser.error(f"--hidden {given.hidden}: accepted are multiples of {HEAD}")
    if "bf16" not in given.runs:
        given.runs.insert(0, "bf16")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = documentation()
    cut = len(text) * 9 // 10
    record: dict = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "the CPU",
        "torch": torch.__version__,
        "arguments": {k: v for k, v in vars(given).items() if k != "out"},
        "text_bytes": len(text),
        "held_out": {name: [] for name in given.runs},
        "seconds": {name: [] for name in given.runs},
        "loss": {name: [] for name in given.runs},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in range(given.seeds):
        for name in given.runs:
            model = made(name, given, seed, device)
            record["parameters"] = sum(p.numel() for p in model.parameters())
            curve, end, seconds = train(model, text[:cut], text[cut:], given)
            for key, value in (("loss", curve), ("held_out", end), ("seconds", seconds)):
                record[key][name].append(value)
            apart = end / record["held_out"]["bf16"][seed] - 1
            print(
                f"seed {seed}, {name}: loss {curve[0]:.4f} at the first step, {end:.4f} on "
                f"held-out text, {apart:+.2%} from bf16; {seconds:.1f} s",
                flush=True,
            )
            path = given.out / "nvfp4_training.json"
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    try:
        picture(record, given.out / "nvfp4_training.png")
    except ImportError as error:
        print(f"no picture: {error}")
    if "nvfp4" in given.runs:
        ends = {name: sum(record["held_out"][name]) / given.seeds for name in ("bf16", "nvfp4")}
        apart = ends["nvfp4"] / ends["bf16"] - 1
        print(f"NVFP4 ends {apart:+.2%} from bf16; written to {given.out}")
        if abs(apart) > given.tolerance:
            raise SystemExit(f"further apart than {given.tolerance:.2%}")


if __name__ == "__main__":
    main()
