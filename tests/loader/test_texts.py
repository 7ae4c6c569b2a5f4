"""Sources given as text: built, reloaded, recorded and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jitquant.loader import CompileError, LoaderError, Source
from jitquant.loader.request.used import read_manifest, write_manifest
from jitquant.loader.store.cache import Cache
from jitquant.loader.store.prune import clear

from .toys import entries, new_loader


def text(factor: int) -> Source:
    return Source(f'extern "C" int factor() {{ return {factor}; }}\n', ".cpp")


def test_a_text_is_a_source(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    loader = new_loader(cache)
    module = loader.get("k", [text(3)])
    assert module.library.factor() == 3
    assert loader.get("k", [text(3)]) is module
    assert loader.get("k", [text(4)]).library.factor() == 4
    assert new_loader(cache).get("k", [text(3)]).library.factor() == 3
    assert len(entries(cache)) == 2


def test_it_is_written_again_if_it_is_gone_or_another(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    loader = new_loader(cache)
    module = loader.get("k", [text(3)])
    (path,) = cache.glob("v1/texts/*/k.cpp")
    path.write_text("int spoiled;\n")
    assert new_loader(cache).get("k", [text(3)]).library.factor() == 3
    clear(Cache(cache))
    assert not path.exists()
    assert loader.get("k", [text(3)]) is module
    assert path.read_text() == text(3).text


def test_several_and_their_messages(tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache")
    half = Source('int half();\nextern "C" int factor() { return half() + half(); }\n', ".cpp")
    other = Source("int half() { return 2; }\n", ".cpp")
    assert loader.get("k", [half, other]).library.factor() == 4
    with pytest.raises(CompileError) as caught:
        loader.get("k", [Source("int f( {\n", ".cpp")])
    (first, *_) = caught.value.diagnostics
    assert Path(first.file).name == "k.cpp"
    assert Path(first.file).read_text() == "int f( {\n"


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    prepare = Cache.prepare
    monkeypatch.setattr(Cache, "prepare", lambda self: self.root != cache and prepare(self))
    assert new_loader(cache).get("k", [text(5)]).library.factor() == 5
    assert not list(cache.glob("v1/texts/*"))


def test_a_record_has_the_text_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("JITQUANT_RECORD", str(notes))
    new_loader(tmp_path / "cache").get("k", [text(3)])
    write_manifest(notes, tmp_path / "used.json")
    (request,) = read_manifest(tmp_path / "used.json", as_built=True).values()
    assert request.sources == (text(3),)
    (module,) = json.loads((tmp_path / "used.json").read_text())["modules"]
    assert module["sources"] == [dataclasses.asdict(text(3))]


def test_a_record_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITQUANT_RECORD", str(tmp_path / "gone" / "notes"))
    loader = new_loader(tmp_path / "cache")
    with pytest.raises(LoaderError, match=r"^JITQUANT_RECORD=.*cannot be written to") as caught:
        loader.get("k", [text(3)])
    assert caught.value.last_good is None  # there was no edit


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Source: suffix='\.py' is not compiled; \.cu, \.cpp"):
        Source("", ".py")
    with pytest.raises(ValueError, match=r"Source: character 4 of the text, '\\ud800', cannot"):
        Source("int \ud800;")
    with pytest.raises(TypeError, match="Source: the text is PosixPath; give a string"):
        Source(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a list, got <Source of .*give \[Source"):
        new_loader(tmp_path / "cache").get("k", text(3))  # type: ignore[arg-type]
