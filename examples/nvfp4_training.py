"""Trains a small transformer in bf16, FP8 and NVFP4, and NVFP4 with parts of its recipe off.

    python examples/nvfp4_training.py
    python examples/nvfp4_training.py --steps 100 --hidden 128 --seeds 1 --runs bf16 nvfp4

The model is that of fp8_training.py, a byte-wise transformer; the text is language_model.py's,
the 8 MB of Python's standard library, so nothing is downloaded and no run reads all of it more than
twice or so. Of one seed all runs have the same initial weights and see the same batches; only the
linears of the blocks differ. Parameters are fp32, and autocast computes in bf16. On a GPU the
blocks are compiled and a training step is captured as a CUDA graph, in which stochastic rounding
draws again at each replay.

Writes nvfp4_training.json after each run (losses, means of 50 or more steps; seconds; how far each
run ends from bf16) and, if matplotlib is installed, nvfp4_training.png. Fails if the whole recipe
ends further from bf16 than --tolerance.

The defaults train 25 million parameters in the linears of the blocks on 8192 tokens a step. On an
H200, 2000 steps of half as many take 6.3 s in bf16. Runs that would end after --minutes are left
out, which the file says; --resume continues with them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fp8_training import HEAD, Transformer, batch_of
from language_model import texts
from torch import Tensor, nn

from jitquant.nn import NVFP4TrainingRecipe, convert, linears_in_last_blocks

RUNS: dict[str, NVFP4TrainingRecipe | str | None] = {
    "bf16": None,
    "fp8": "fp8_block",
    "nvfp4": NVFP4TrainingRecipe(),
    "nearest": NVFP4TrainingRecipe(stochastic=False),
    "no_rotation": NVFP4TrainingRecipe(rotate="none"),
    "1x16": NVFP4TrainingRecipe(weight_block="1x16"),
    "4over6": NVFP4TrainingRecipe(select="4over6_mae", e4m3_max=256),
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
    torch.compiler.reset()  # each run compiles anew, and only so many are kept
    torch.manual_seed(seed)
    model = Transformer(given.hidden, given.layers, given.length).to(device)
    recipe = RUNS[name]
    if recipe is not None:
        kept = ["head", *linears_in_last_blocks(model, given.last)]
        convert(model, recipe, filter=lambda path, _: path not in kept)
    if given.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)
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
        optimizer.zero_grad()
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
        model.parameters(),
        lr=rate if cuda else given.lr,
        betas=(0.9, 0.95),
        capturable=cuda,
        fused=cuda,
    )
    generator = torch.Generator().manual_seed(0)
    firsts = torch.randint(
        len(text) - given.length - 1, (given.steps, given.batch, 1), generator=generator
    ).to(device)
    places = torch.arange(given.length + 1, device=device)
    batch = text[firsts[0] + places].long()
    step = step_of(model, optimizer, batch)
    warmup = max(1, given.steps // 20)
    losses = []
    begin = time.perf_counter()
    for i in range(given.steps):
        now = min((i + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * i / given.steps)))
        if cuda:
            rate.fill_(given.lr * now)
        else:
            optimizer.param_groups[0]["lr"] = given.lr * now
        batch.copy_(text[firsts[i] + places])
        losses.append(step())
    curve = torch.stack(losses).tolist()
    seconds = time.perf_counter() - begin
    ends = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for seed in range(16):
            ends.append(model(batch_of(held_out, given.batch, given.length, seed).long()))
    return curve, torch.stack(ends).mean().item(), seconds


def means(curve: list[float]) -> list[float]:
    """At most 40 means of as many steps each, of 50 if there are 2000."""
    width = max(1, len(curve) // 40)
    return [round(m, 4) for m in torch.tensor(curve).unfold(0, width, width).mean(1).tolist()]


def mean(values: list[float]) -> float:
    """The mean of some numbers."""
    return sum(values) / len(values)


def apart(record: dict, name: str) -> list[float]:
    """How far a run ends from bf16 on held-out text, for each seed."""
    pairs = zip(record["held_out"][name], record["held_out"].get("bf16", []), strict=False)
    return [end / plain - 1 for end, plain in pairs]


def picture(record: dict, path: Path) -> None:
    """All curves, means over the seeds, and how far each is from bf16."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    plain = torch.tensor(record["loss"]["bf16"])
    width = record["arguments"]["steps"] // plain.shape[1]
    steps = torch.arange(1, plain.shape[1] + 1) * width
    for name, curves in record["loss"].items():
        if not curves:
            continue
        curve, end = torch.tensor(curves), mean(record["held_out"][name])
        label = f"{LABELS[name]}, {end:.4f} on held-out text"
        (line,) = above.plot(steps, curve.mean(0), label=label)
        if name != "bf16":
            ratio = curve.mean(0) / plain[: len(curve)].mean(0)
            below.plot(steps, 100 * (ratio - 1), color=line.get_color())
    above.set_ylabel(f"loss, mean of {width} steps (nats a byte)")
    above.legend()
    below.axhspan(-1.5, 1.5, alpha=0.1)
    below.set_ylabel("over bf16, %")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{record['parameters'] / 1e6:.1f} M parameters on {record['device']}, {len(plain)} seed(s)"
    )
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains all of them, and says how far from bf16 they end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--last", type=int, default=2, help="last blocks that stay in bf16")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="the blocks; default: on a GPU",
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="no run ends after so many")
    parser.add_argument("--tolerance", type=float, default=0.015)
    parser.add_argument("--out", type=Path, default=Path("out/nvfp4_training"))
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out has")
    given = parser.parse_args()
    if given.hidden % HEAD:
        parser.error(f"--hidden: expected a multiple of {HEAD}, got {given.hidden}")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, held_out = (part.to(device) for part in texts())
    record: dict = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "the CPU",
        "torch": torch.__version__,
        "arguments": {
            k: v for k, v in vars(given).items() if k not in ("out", "minutes", "resume")
        },
        "text_bytes": len(text),
        "apart": {},
        "left_out": [],
        "held_out": {name: [] for name in given.runs},
        "seconds": {name: [] for name in given.runs},
        "loss": {name: [] for name in given.runs},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "nvfp4_training.json"
    if given.resume and path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["arguments"] | {"seeds": given.seeds} != record["arguments"]:
            parser.error(f"--resume: {path} has runs with other arguments: {kept['arguments']}")
        record |= kept | {"arguments": record["arguments"], "left_out": []}
    begin, longest = time.perf_counter(), 0.0
    for seed in range(given.seeds):
        for name in given.runs:
            if len(record["held_out"][name]) > seed:
                continue
            here = time.perf_counter()
            if here + longest > begin + 60 * given.minutes:
                record["left_out"].append(f"{name}, seed {seed}")
                continue
            model = made(name, given, seed, device)
            record["parameters"] = sum(p.numel() for p in model.parameters())
            curve, end, seconds = train(model, text, held_out, given)
            if seed:  # the first compiles kernels
                longest = max(longest, time.perf_counter() - here)
            for key, value in (("loss", means(curve)), ("held_out", end), ("seconds", seconds)):
                record[key][name].append(value)
            record["apart"] = {
                n: {"mean": mean(each), "seeds": each}
                for n in given.runs
                if (each := apart(record, n))
            }
            far = [f", {one:+.2%} from bf16" for one in apart(record, name)[seed:]]
            print(
                f"seed {seed}, {name}: loss {curve[0]:.4f} at the first step, {end:.4f} on "
                f"held-out text{''.join(far)}; {seconds:.1f} s",
                flush=True,
            )
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")  # with what was left out
    try:
        if record["loss"].get("bf16"):
            picture(record, given.out / "nvfp4_training.png")
    except ImportError as error:
        print(f"no picture: {error}")
    for name, found in record["apart"].items():
        print(f"{LABELS[name]}: {found['mean']:+.2%} from bf16")
    print(f"{time.perf_counter() - begin:.0f} s; written to {given.out}")
    if record["left_out"]:
        print(f"left out for lack of time: {'; '.join(record['left_out'])}")
    if "nvfp4" in record["apart"] and abs(record["apart"]["nvfp4"]["mean"]) > given.tolerance:
        raise SystemExit(f"further from bf16 than {given.tolerance:.2%}")


if __name__ == "__main__":
    main()
