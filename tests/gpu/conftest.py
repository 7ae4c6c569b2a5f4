"""Tests of the kernels. They need a CUDA device; what ran is written where JITQUANT_RESULTS says."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels_cu"
_outcomes: dict[str, str] = {}
_started = time.time()


def kernels_digest() -> str:
    """sha256 over the names and contents of kernels_cu."""
    digest = hashlib.sha256()
    for path in sorted(p for p in KERNELS.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(KERNELS).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; this machine has none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/gpu/" in report.nodeid and (report.when == "call" or report.outcome != "passed"):
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    directory = os.environ.get("JITQUANT_RESULTS")
    if not directory or not _outcomes or not torch.cuda.is_available():
        return
    counts = {kind: sum(o == kind for o in _outcomes.values()) for kind in set(_outcomes.values())}
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels_cu_sha256": kernels_digest(),
        "seconds": round(time.time() - _started, 1),
        "outcomes": counts,
        "not_passed": sorted(name for name, o in _outcomes.items() if o != "passed"),
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    (Path(directory) / "gpu_tests.json").write_text(json.dumps(result, indent=2) + "\n")


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    if torch.cuda.is_available():
        torch.manual_seed(0)
        yield
        torch.cuda.synchronize()  # an error belongs to the test that made it
    else:
        yield
