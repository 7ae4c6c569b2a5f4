"""Two ranks with a GPU each, over NCCL: the cases of tests/distributed."""

from __future__ import annotations

import pytest
import torch
from distributed.ranks import run

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
MODULES = ("amax_group", "layers")


@pytest.fixture(scope="module", params=MODULES)
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    return run(request.param, "cuda", tmp_path_factory.mktemp("ranks"))


def test_on_two_gpus(outcomes: dict[str, str]) -> None:
    assert {name: what for name, what in outcomes.items() if what} == {}
