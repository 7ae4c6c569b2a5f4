"""Processes that use cuda:1 alone, without ``set_device``.

PyTorch does not switch back to a device without a context, it only remembers it: CUDA's current
device is cuda:1 there, and PyTorch's cuda:0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from .second_device import CASES

PROGRAM = Path(__file__).with_name("second_device.py")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _run(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), name]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def runs() -> dict[str, Future[subprocess.CompletedProcess[str]]]:
    """All of them, some at a time: most of a process's time is its start."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return {name: pool.submit(_run, name) for name in CASES}


@two_gpus
@pytest.mark.parametrize("name", CASES)
def test_cuda_1_alone(runs: dict[str, Future[subprocess.CompletedProcess[str]]], name: str) -> None:
    done = runs[name].result()
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr
