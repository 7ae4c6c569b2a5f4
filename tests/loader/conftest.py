"""Fixtures of the loader's tests: toys that are built once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from jitquant.loader import CudaModule, Loader

from .toolkits import write_toolkit
from .toys import copy_cache, forget_settings, new_loader, nvcc_or_reason, write_plain, write_toy


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the person who runs the tests reaches the loader."""
    forget_settings(monkeypatch)


@dataclass(frozen=True)
class Toy:
    """A source that was built once, and the cache that it was built into."""

    source: Path
    cache: Path
    module: CudaModule
    said: str

    def copy(self, directory: Path) -> tuple[Path, Path]:
        """(source, cache): copies that a test may change."""
        target = directory / "source"
        target.mkdir(parents=True)
        for path in self.source.parent.rglob("*"):
            if path.is_file():
                copied = target / path.relative_to(self.source.parent)
                copied.parent.mkdir(exist_ok=True)
                copied.write_bytes(path.read_bytes())
        return target / self.source.name, copy_cache(self.cache, directory / "cache")


def _build(tmp_path_factory: pytest.TempPathFactory, write: Callable[[Path], Path]) -> Toy:
    directory = tmp_path_factory.mktemp("toy")
    source = write(directory / "source")
    cache = directory / "cache"
    lines: list[str] = []
    loader = new_loader(cache)
    loader.reporter.say = lines.append  # type: ignore[method-assign]
    module = loader.get(source.stem, [source])
    return Toy(source, cache, module, "\n".join(lines))


@pytest.fixture(scope="session")
def nvcc() -> None:
    """Skips where there is no CUDA compiler."""
    reason = nvcc_or_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA toolkit whose nvcc hands everything to g++."""
    root = write_toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(root))
    return root


@pytest.fixture(scope="session")
def toy(nvcc: None, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A kernel with its binding, compiled by nvcc."""
    return _build(tmp_path_factory, write_toy)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A C++ source without CUDA."""
    return _build(tmp_path_factory, write_plain)


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    """A loader with an empty cache of its own."""
    return new_loader(tmp_path / "cache")
