"""DelayedScaling on a GPU: the CPU's numbers, in a graph, without a wait."""

from __future__ import annotations

import math

import pytest
import torch

from jitquant import DelayedScaling
from jitquant.testing import assert_no_sync, bytes_of, count_launches

from .helpers import randn

AMAXES = [3.0, 0.1, 0.0, math.inf, 2.0, math.nan, 0.7, 1e-40, 5.0, 0.3]


def same(a: DelayedScaling, b: DelayedScaling) -> None:
    for name, value in a.state_dict().items():
        other = b.state_dict()[name].cpu()
        torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("count", [1, 5])
def test_a_captured_update_follows_the_cpus(algorithm: str, count: int) -> None:
    cpu = DelayedScaling(count, window=4, algorithm=algorithm)
    gpu = DelayedScaling(count, window=4, algorithm=algorithm, device="cuda")
    amax = torch.zeros(count, device="cuda")
    assert_no_sync(gpu.update, amax)
    cpu.update(torch.zeros(count))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.update(amax)
    for value in AMAXES:
        step = value * torch.arange(1.0, count + 1)
        amax.copy_(step)
        graph.replay()
        cpu.update(step)
        same(cpu, gpu)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_captured_step_follows_the_cpus(algorithm: str) -> None:
    cpu = DelayedScaling(window=4, algorithm=algorithm)
    gpu = DelayedScaling(window=4, algorithm=algorithm, device="cuda")
    x = randn(300, 1024)
    assert_no_sync(gpu.quantize, x)
    gpu.load_state_dict(cpu.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gpu.quantize(x)
    for factor in (1.0, 30.0, 0.01, math.inf, 0.2, math.nan, 7.0):
        x.copy_(randn(300, 1024, scale=factor))
        graph.replay()
        want = cpu.quantize(x.cpu())
        for mine, theirs in ((got.data, want.data), (got.scale_inv, want.scale_inv)):
            assert torch.equal(bytes_of(mine).cpu(), bytes_of(theirs))
        torch.testing.assert_close(got.amax.cpu(), want.amax, rtol=0, atol=0, equal_nan=True)
        same(cpu, gpu)


def test_a_step_casts_in_two_launches() -> None:
    scaling = DelayedScaling(window=4, device="cuda")
    x = randn(300, 1024)
    update = count_launches(scaling.update, torch.ones(1, device="cuda"))
    assert count_launches(scaling.quantize, x) == 2 + update
