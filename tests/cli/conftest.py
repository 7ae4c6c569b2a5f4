"""Running commands in this process."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loader.toys import copy_cache, forget_settings, new_loader, nvcc_or_reason, write_toy

from jitquant.cli import main
from jitquant.loader.request.plan import Request


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
def default_of_hanging_up() -> Iterator[None]:
    """Commands end at SIGHUP, also if whoever runs the tests ignores it, as nohup does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the person who runs the tests reaches a command, and no command their cache."""
    forget_settings(monkeypatch)
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


@contextlib.contextmanager
def at_most_bytes(size: int) -> Iterator[None]:
    """No file can become larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass(frozen=True)
class Built:
    """A kernel of the test's own, and the cache that holds a build of it."""

    source: Path
    cache: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built once for two architectures; skips where there is no nvcc."""
    reason = nvcc_or_reason()
    if reason is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("built")
    source = write_toy(directory / "source")
    loader = new_loader(directory / "cache")
    loader.ensure(Request("toy", (source,), archs=("90a", "100a"))).hold.release()
    return Built(source, directory / "cache")


@pytest.fixture
def cached(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """That build in a cache of the test's own, which commands use; and its source."""
    cache = copy_cache(built.cache, tmp_path / "cached")
    source = write_toy(tmp_path / "source")
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(cache))
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "90a,100a")
    return Built(source, cache)
