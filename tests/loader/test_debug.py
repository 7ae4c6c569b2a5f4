"""JITQUANT_DEBUG: another build, with what nvcc made in between."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jitquant.loader.request.plan import Request
from jitquant.loader.store.cache import Cache
from jitquant.loader.store.prune import prune

from .conftest import Toy
from .toys import entries, new_loader


def test_a_build_for_a_debugger(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = toy.copy(tmp_path)
    monkeypatch.setenv("JITQUANT_DEBUG", "1")
    loader = new_loader(cache)
    lines: list[str] = []
    loader.reporter.say = lines.append  # type: ignore[method-assign]
    build = loader.ensure(Request("toy", (source,)))
    assert build.is_new
    assert any("JITQUANT_DEBUG: none -> True" in line for line in lines)
    directory = build.library.parent
    assert f"toy: intermediate files are in {directory}" in lines
    assert not [line for line in lines if "warning" in line]
    assert {"toy.ptx", "toy.cubin", "toy.cudafe1.cpp"} <= {p.name for p in directory.iterdir()}
    assert ", debug" in (directory / "toy.ptx").read_text().split(".version")[1][:300]
    sections = subprocess.run(
        ["readelf", "-S", "-W", build.library], capture_output=True, text=True, check=True
    ).stdout
    assert ".debug_info" in sections  # of the host
    build.hold.release()
    assert loader.ensure(Request("toy", (source,))).is_new is False
    monkeypatch.delenv("JITQUANT_DEBUG")
    assert loader.ensure(Request("toy", (source,))).library.parent == toy_entry(toy, cache)
    prune(Cache(cache), max_size=0)
    assert directory not in entries(cache)


def toy_entry(toy: Toy, cache: Path) -> Path:
    """Where the build without the variable is in ``cache``, a copy of the toy's."""
    (original,) = entries(toy.cache)
    return cache / original.relative_to(toy.cache)
