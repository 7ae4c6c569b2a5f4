"""Runs cases on two ranks: one process each, started once for all cases of a module.

``python -m distributed.ranks MODULE DEVICE RANK WORLD FOLDER`` is one rank: it runs every function
of ``distributed.MODULE`` whose name begins with ``case_``, and on GPUs ``cuda_case_`` as well, in
the order of the file, and writes what came of them to ``FOLDER/RANK.json``. A case is given a
`Here`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SECONDS = 300
# Gloo looks for the address of the machine's name otherwise, which it may not have.
ON_THIS_MACHINE = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


@dataclass
class Here:
    """Where a case runs.

    Attributes:
        rank, world: of this process.
        device: its own.
        group: of all ranks.
        mesh: of all ranks, with the name "tp".
    """

    rank: int
    world: int
    device: Any
    group: Any
    mesh: Any


def names_of(module: str, device: str) -> list[str]:
    """Names of the cases of a module for "cpu" or "cuda", without importing it."""
    begins = ("def case_",) if device == "cpu" else ("def case_", "def cuda_case_")
    lines = (Path(__file__).parent / f"{module}.py").read_text().splitlines()
    return [line.split("(")[0][4:] for line in lines if line.startswith(begins)]


def run(module: str, device: str, folder: Path, world: int = 2) -> dict[str, str]:
    """What came of the cases of a module: "" or what is wrong.

    Args:
        module: in ``tests/distributed``.
        device: "cpu" (gloo) or "cuda" (NCCL, a GPU for each rank).
        folder: an empty one.
        world: ranks.
    """
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ON_THIS_MACHINE, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        arguments = [module, device, str(rank), str(world), str(folder)]
        with log.open("w") as output:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "distributed.ranks", *arguments],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    last = time.monotonic() + SECONDS
    try:
        for process in ranks:
            process.wait(max(0.1, last - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    results: dict[str, str] = {}
    for rank, log in enumerate(logs):
        written = folder / f"{rank}.json"
        outcomes = json.loads(written.read_text()) if written.is_file() else {}
        for name in names_of(module, device):
            if name not in outcomes:
                outcomes[name] = f"it did not come to an end:\n{log.read_text()[-3000:]}"
            results[name] = results.get(name, "")
            if outcomes[name]:
                results[name] += f"rank {rank}: {outcomes[name]}\n"
    return results


def _outcome(case: Callable[[Here], None], here: Here) -> str:
    try:
        case(here)
    except BaseException:
        return traceback.format_exc()
    return ""


def main(module: str, device: str, rank: int, world: int, folder: Path) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=200),
        device_id=here if device == "cuda" else None,
    )
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    place = Here(rank, world, here, dist.group.WORLD, mesh)
    cases = import_module(f"distributed.{module}")
    outcomes: dict[str, str] = {}
    for name in names_of(module, device):
        torch.manual_seed(0)  # on every rank
        outcomes[name] = _outcome(getattr(cases, name), place)
        if outcomes[name]:  # the ranks may not be at the same place any more
            rest = dict.fromkeys(names_of(module, device), f"not run: {name} failed before it")
            outcomes = {**rest, **outcomes}
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        if outcomes[name]:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    _, which, kind, mine, count, where = sys.argv
    main(which, kind, int(mine), int(count), Path(where))
