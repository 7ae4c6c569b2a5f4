"""Inputs and comparisons of the GPU tests."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from jitquant.loader import CudaModule, get_cuda_module
from jitquant.testing import bytes_of

# rows, columns: one block, a tail, a padded tile, a decode step, more rows than a tile, long rows.
SHAPES = ((1, 16), (3, 1), (5, 17), (1, 7168), (7, 384), (130, 100), (129, 2048), (33, 7168))


def module(name: str) -> CudaModule:
    return get_cuda_module(name, [f"{name}.cu"])


def same(got: Sequence[Tensor], expected: Sequence[Tensor], *, what: str = "") -> None:
    """Every tensor has the bytes of its expectation, NaN in floats aside."""
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        b = b.to(a.device) if b.element_size() > 1 else b.view(torch.uint8).to(a.device)
        assert a.shape == b.shape, f"{what} output {i}: {tuple(a.shape)} != {tuple(b.shape)}"
        if a.element_size() > 1:
            nan = torch.isnan(a)
            assert torch.equal(nan, torch.isnan(b)), f"{what} output {i}: NaN elsewhere"
            a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
        wrong = (bytes_of(a) != bytes_of(b)).nonzero().flatten()
        assert wrong.numel() == 0, (
            f"{what} output {i}: {wrong.numel()} bytes differ, first {wrong[:4]}"
        )


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Calls ``work(i)`` in so many threads at once, each on a stream of its own."""
    failures: list[str] = []

    def on_a_stream(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                work(i)
        except BaseException as error:
            failures.append(f"thread {i}: {error!r}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=on_a_stream, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def room_for(gib: float) -> None:
    """Skips where less memory is free."""
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib:g} GiB of GPU memory")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def adversarial(rows: int, cols: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors that find what a plain one does not: magnitudes, zeros, specials, ties."""
    base = torch.randn(rows, cols, device="cuda")
    decades = base * torch.logspace(-6, 4, rows, device="cuda")[:, None]
    outlier = base.clone()
    outlier[:, 0] *= 1000
    zero_rows = base.clone()
    zero_rows[::2] = 0
    tiny = base * (1e-38 if dtype is not torch.float16 else 1e-7)
    huge = base * (1e37 if dtype is not torch.float16 else 1e4)
    special = base.clone()
    flat = special.reshape(-1)
    flat[0] = math.nan
    flat[-1] = -math.inf if flat.numel() > 40 else flat[-1]
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], device="cuda")
    ties = steps[torch.randint(0, 8, (rows, cols), device="cuda")] * base.sign()
    named = {
        "normal": base,
        "decades": decades,
        "outlier": outlier,
        "zero rows": zero_rows,
        "zero": torch.zeros_like(base),
        "negative zero": -torch.zeros_like(base),
        "tiny": tiny,
        "huge": huge,
        "special": special,
        "all nan": torch.full_like(base, math.nan),
        "ties": ties,
    }
    return {name: t.to(dtype) for name, t in named.items()}


def views() -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to hold a tensor (rows, cols) in memory; each gives an equal one."""

    def strided(t: Tensor) -> Tensor:
        buffer = torch.empty(t.shape[0], t.shape[1] + 24, dtype=t.dtype, device=t.device)
        return buffer[:, : t.shape[1]].copy_(t)

    def odd_stride(t: Tensor) -> Tensor:
        buffer = torch.empty(t.shape[0], t.shape[1] + 3, dtype=t.dtype, device=t.device)
        return buffer[:, 1 : 1 + t.shape[1]].copy_(t)

    def misaligned(t: Tensor) -> Tensor:
        buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        return buffer[1:].view(t.shape).copy_(t)

    return {"strided": strided, "odd stride": odd_stride, "misaligned": misaligned}
