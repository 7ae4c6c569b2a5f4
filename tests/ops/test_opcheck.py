"""torch.library.opcheck of every op and overload."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from quick import in_quick
from samples import OPS, SAMPLES, Sample, poisoned_buffers

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@functools.cache
def chosen(name: str) -> tuple[Sample, Sample]:
    """Two unlike samples with rows; with a residual if an op takes one."""
    group = []
    for sample in SAMPLES[name]:
        args, kwargs = sample.make("cpu")
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        special = any(t.is_floating_point() and not t.float().isfinite().all() for t in tensors)
        nan_results = "all_bytes" in sample.label  # opcheck takes NaN for a difference
        if all(t.numel() for t in tensors) and not special and not nan_results:
            group.append((kwargs.get("residual") is None, sample))
    group.sort(key=lambda pair: pair[0])
    return group[0][1], group[-1][1]


CHECKS = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")


def check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # What it does to its arguments cannot be compared by PyTorch where they are of one byte.
    small = any(isinstance(a, torch.Tensor) and a.dtype in FP8 for a in args)
    checks = CHECKS if small else ("test_schema", *CHECKS)
    results = torch.library.opcheck(op, args, kwargs, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("which", in_quick(1, [0, 1]))
@pytest.mark.parametrize("name", in_quick(12, SAMPLES))
def test_functional(name: str, which: int) -> None:
    args, kwargs = chosen(name)[which].make("cpu")
    check(OPS[name].default, args, kwargs)


@pytest.mark.parametrize("name", in_quick(12, SAMPLES))
def test_out(name: str) -> None:
    op = OPS[name]
    args, kwargs = chosen(name)[0].make("cpu")
    # As bytes: opcheck compares mutated arguments, and PyTorch cannot compare these dtypes.
    buffers = {
        name: t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        for name, t in poisoned_buffers(op, args, kwargs).items()
    }
    check(op.out, args, {**kwargs, **buffers})


@pytest.mark.parametrize("name", ["quantize_nvfp4", "rmsnorm_quantize_nvfp4"])
def test_inputs_that_require_grad(name: str) -> None:
    args, kwargs = SAMPLES[name][0].make("cpu")
    args = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    check(OPS[name].default, args, kwargs)
