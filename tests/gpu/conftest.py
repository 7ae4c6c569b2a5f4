"""Tests of the kernels. They need a CUDA device; JITQUANT_RESULTS says where the outcome goes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.provenance import provenance

HERE = Path(__file__).parent
_outcomes: dict[str, str] = {}
_started = time.time()


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    directory = os.environ.get("JITQUANT_RESULTS")
    if hasattr(session.config, "workerinput"):
        return  # of several processes the one that started them has all outcomes
    if not directory or not _outcomes or not torch.cuda.is_available():
        return
    counts = {kind: sum(o == kind for o in _outcomes.values()) for kind in set(_outcomes.values())}
    result = {
        **provenance(),
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
