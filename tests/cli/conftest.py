"""Running commands in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jitquant.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its stdout, which has to be JSON and nothing else."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the person who runs the tests reaches a command, and no command their cache."""
    for variable in (
        "JITQUANT_BUNDLES",
        "JITQUANT_CUDA_ARCHS",
        "JITQUANT_JOBS",
        "JITQUANT_LOCK_TIMEOUT",
        "JITQUANT_QUIET",
        "TORCH_CUDA_ARCH_LIST",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command: ``run("cache", "path").out``."""

    def command(*words: object) -> Ran:
        capfd.readouterr()
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return command
