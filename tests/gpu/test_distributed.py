"""Ranks on GPUs: the cases of tests/distributed over NCCL, and many that start together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed.ranks import names_of, run

from .helpers import room_for

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RANKS = 8

START = """
import sys, torch, jitquant
torch.cuda.set_device(int(sys.argv[1]) % torch.cuda.device_count())
jitquant.quantize_nvfp4(torch.randn(64, 4096, device="cuda").bfloat16())
torch.cuda.synchronize()
"""


@two_gpus
@pytest.mark.parametrize("module", ["process_group", "layers"])
def test_two_ranks_over_nccl(module: str, tmp_path: Path) -> None:
    outcomes = run(module, "cuda", tmp_path)
    assert list(outcomes) == names_of(module, "cuda")
    assert {name: what for name, what in outcomes.items() if what} == {}


def test_layers_on_one_rank(tmp_path: Path) -> None:
    """DTensors, FSDP and NCCL as with more ranks, where there is one GPU."""
    outcomes = run("layers", "cuda", tmp_path, world=1)
    assert {name: what for name, what in outcomes.items() if what} == {}


def _start(ranks: int, cache: Path) -> str:
    """What some processes that quantize together say."""
    environment = {**os.environ, "JITQUANT_CACHE_DIR": str(cache)}
    environment.pop("JITQUANT_QUIET", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = "".join(process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * ranks, said
    return said


def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    room_for(2.0 * RANKS)
    for built in (1, 0):
        said = _start(RANKS, tmp_path)
        assert said.count("building fused_amax_quantize_bf16_tensor for ") == built
