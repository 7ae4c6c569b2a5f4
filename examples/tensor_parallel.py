"""Trains in FP8 and serves in NVFP4 with every layer divided between ranks.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --hidden 4096 --tokens 2048

Each rank takes a GPU, and NCCL; without enough GPUs the ranks are processes on the CPU, over gloo.
A Llama-shaped stack of blocks is divided as usual: q, k, v, gate and up column-wise, o and down
row-wise, and what is between them, norms and the residual stream, by tokens (sequence parallel).
Each rank runs the whole stack as well, and what the divided one gives must be the same: losses of
training, outputs in NVFP4, and to the bit the quantized activation.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu

import jitquant
from jitquant.nn import convert
from jitquant.nn.parallel import ColwiseParallel, RowwiseParallel

HEAD = 64  # elements of an attention head


class Attention(nn.Module):
    """Of the heads that q, k and v have here."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        ffn = 3 * hidden
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.mlp = Attention(hidden), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def divide(stack: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Divides the blocks between ranks, in place; tokens go in and come out divided."""
    gathered = PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
    )
    for block in stack:
        plan = {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": gathered,
            "mlp": gathered,
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        plan |= {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, plan)
    return stack


def mine(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's tokens."""
    return t.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


def train(
    stack: nn.Sequential, x: Tensor, target: Tensor, steps: int, mesh: DeviceMesh | None
) -> list[float]:
    """The losses of some steps.

    Args:
        stack: the model, whole or divided.
        x, target: whole.
        steps: how many.
        mesh: of the ranks that the model is divided between.
    """
    parts = 1
    if mesh is not None:
        parts, x, target = mesh.size(), mine(x, mesh), mine(target, mesh)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = (stack(x) - target).float().square().mean() / parts
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if mesh is not None:
            dist.all_reduce(loss)
        losses.append(loss)
    return [loss.item() for loss in losses]


def passes(stack: nn.Sequential, x: Tensor, backward: bool = True) -> Callable[[], None]:
    """Forward, and backward if it is wanted."""

    def call() -> None:
        with torch.set_grad_enabled(backward):
            y = stack(x)
        if backward:
            y.sum().backward()
            stack.zero_grad()

    return call


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Of a call on the GPU, on the average."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def noise(a: Tensor, b: Tensor) -> float:
    """Of ``a`` against ``b``: the ratio of their norms."""
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def run(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
    """The three comparisons, printed by rank 0."""
    first = dist.get_rank() == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    torch.manual_seed(0)  # the same on every rank
    with device:
        stack = nn.Sequential(*(Block(options.hidden) for _ in range(options.layers)))
        stack = stack.to(torch.bfloat16)
        shape = (options.batch, options.tokens, options.hidden)
        x = torch.randn(shape).bfloat16()
    world = mesh.size()
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    say(f"{world} ranks, each on {where}; {options.layers} blocks, activations {shape}")

    whole = copy.deepcopy(stack)
    say(str(convert(whole, "fp8_block")))
    parts = divide(copy.deepcopy(whole), mesh)
    target = x.roll(1, -1)
    losses = (
        train(whole, x, target, options.steps, None),
        train(parts, x, target, options.steps, mesh),
    )
    for step, (a, b) in enumerate(zip(*losses, strict=True)):
        say(f"FP8 step {step}: loss {a:.5f} whole, {b:.5f} in parts")
        assert abs(a - b) < 0.01 * a, "the losses are not within 1%"

    served = copy.deepcopy(stack).eval()
    say(str(convert(served, "nvfp4")))
    served_parts = divide(copy.deepcopy(served), mesh)
    with torch.no_grad():
        y, y_parts = served(x), served_parts(mine(x, mesh))
    size = sum(b.nbytes for b in served_parts.buffers()) / sum(b.nbytes for b in served.buffers())
    say(
        f"NVFP4: output in parts differs by {noise(y_parts, mine(y, mesh)):.1e} of its norm; "
        f"a rank has {size:.3f} of the weights"
    )
    assert noise(y_parts, mine(y, mesh)) < 0.05

    q = jitquant.quantize_nvfp4(mine(x, mesh), process_group=mesh.get_group())
    same = torch.equal(q.x_fp4_bytes, mine(jitquant.quantize_nvfp4(x).x_fp4_bytes, mesh))
    say(f"the codes of a part, with the amax of all: {'the same' if same else 'OTHERS'}")
    assert same

    if device.type == "cuda":
        part, group = mine(x, mesh), mesh.get_group()
        for name, calls in (
            ("FP8 forward and backward", (passes(whole, x), passes(parts, part))),
            ("NVFP4 forward", (passes(served, x, False), passes(served_parts, part, False))),
        ):
            times = [1e3 * seconds(call) for call in calls]
            say(f"{name}: {times[0]:.2f} ms whole, {times[1]:.2f} ms in parts")
        alone = 1e6 * seconds(lambda: jitquant.quantize_nvfp4(part), 100)
        together = 1e6 * seconds(lambda: jitquant.quantize_nvfp4(part, process_group=group), 100)
        say(f"quantize_nvfp4 of a part: {alone:.1f} us, with the amax of all {together:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128 for each rank")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="divided between the ranks")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it with: torchrun --nproc-per-node 2 examples/tensor_parallel.py")
    local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    for name, unit in (("hidden", 128 * world), ("tokens", world)):
        if getattr(options, name) % unit:
            given = getattr(options, name)
            raise SystemExit(f"--{name}: expected a multiple of {unit}, got {given}")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    try:
        run(options, mesh, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
