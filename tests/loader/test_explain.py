"""What explain says, and what names stand for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from jitquant.loader import Loader
from jitquant.loader.request.plan import Request
from jitquant.loader.request.sources import kernel_names
from jitquant.loader.store.bundles import write_bundle
from jitquant.loader.store.cache import Entry
from jitquant.loader.store.changes import Change
from jitquant.loader.tools.explain import explain
from jitquant.loader.tools.names import request_of

from .conftest import Toy
from .toys import entries, new_loader, write_plain


@pytest.fixture
def copied(plain: Toy, tmp_path: Path) -> tuple[Loader, Path]:
    source, cache = plain.copy(tmp_path)
    return new_loader(cache), source


def test_a_hit_tells_of_its_build(copied: tuple[Loader, Path], plain: Toy) -> None:
    loader, source = copied
    found = explain(loader, Request("plain", (source,)))
    assert (found.state, found.reason, found.changes) == ("hit", "", [])
    assert found.directory in entries(loader.cache().root)
    assert found.last is not None
    assert found.last.seconds >= max(seconds for _, seconds in found.last.steps)
    assert [label for label, _ in found.last.steps] == ["g++ plain.cpp", "linking and first load"]
    assert 0 < time.time() - found.last.built < 3600


def test_a_first_build(copied: tuple[Loader, Path], tmp_path: Path) -> None:
    loader, _ = copied
    other = write_plain(tmp_path / "other", stem="other")
    found = explain(loader, Request("other", (other,)))
    assert (found.state, found.reason, found.last) == ("miss", "first build", None)
    assert not (loader.cache().root / "v1" / "last" / "other.json").exists()


def test_a_header_and_a_source_that_changed(copied: tuple[Loader, Path]) -> None:
    loader, source = copied
    header = source.with_suffix(".h")
    header.write_text("#define FACTOR 9\n")
    source.write_text(source.read_text() + "// edited\n")
    found = explain(loader, Request("plain", (source,)))
    assert found.state == "miss"
    assert found.reason == "plain.cpp, src0/plain.h changed"
    assert [(c.kind, c.name) for c in found.changes] == [
        ("source", "plain.cpp"),
        ("header", "src0/plain.h"),
    ]
    assert all(c.before != c.now and len(c.now or "") == 64 for c in found.changes)
    assert found.last is not None
    header.unlink()
    gone = explain(loader, Request("plain", (source,))).changes[1]
    assert (gone.name, gone.now) == ("src0/plain.h", None)


def test_one_of_two_sources_with_the_same_name_changed(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "k.cpp", tmp_path / "b" / "k.cpp"
    for source in (first, second):
        source.parent.mkdir()
        source.write_text(f"int {source.parent.name}() {{ return 1; }}\n")
    loader = new_loader(tmp_path / "cache")
    loader.get("k", [first, second])
    first.write_text(first.read_text().replace("1", "2"))
    assert explain(loader, Request("k", (first, second))).reason == "k.cpp changed"


def test_flags_and_compilers_that_changed(
    copied: tuple[Loader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, source = copied
    found = explain(loader, Request("plain", (source,), cxx_flags=("-O0", "-g")))
    assert found.changes == [Change("cxx_flags", "", "none", "-O0 -g")]
    found = explain(loader, Request("plain", (source,), cxx_flags=("-D" + "X" * 9000,)))
    assert found.reason == f"cxx_flags: none -> -D{'X' * 198}... (9002 characters)"
    monkeypatch.setenv("CPATH", "/nowhere")
    found = explain(loader, Request("plain", (source,)))
    assert found.changes == [Change("compiler variables", "", "none", "CPATH=/nowhere")]
    monkeypatch.delenv("CPATH")
    monkeypatch.setenv("CXX", "g++ -DX")
    found = explain(loader, Request("plain", (source,)))
    assert [c.kind for c in found.changes] == ["host compiler"]
    assert found.reason.endswith("-DX")


def test_architectures_that_changed(toy: Toy) -> None:
    loader = new_loader(toy.cache)
    found = explain(loader, Request("toy", (toy.source,), archs=("100a", "90a")))
    assert found.changes == [Change("architectures", "", "90a", "90a 100a")]
    assert found.reason == "architectures: 90a -> 90a 100a"
    assert explain(loader, Request("toy", (toy.source,))).archs == ["90a"]


def test_a_header_that_shadows_another(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    header = source.with_suffix(".h").rename(second / "plain.h")
    request = Request("plain", (source,), include_dirs=(str(first), str(second)))
    new_loader(tmp_path / "cache").ensure(request)
    (first / "plain.h").write_bytes(header.read_bytes())
    found = explain(new_loader(tmp_path / "cache"), request)
    assert found.state == "miss"
    assert found.reason == "an included name is now found in another directory first"
    assert not found.changes


def test_an_entry_that_is_gone(copied: tuple[Loader, Path]) -> None:
    loader, source = copied
    (directory,) = entries(loader.cache().root)
    (directory / "entry.json").unlink()
    next(directory.glob("*.so")).unlink()
    directory.rmdir()
    found = explain(loader, Request("plain", (source,)))
    assert (found.state, found.reason, found.changes) == ("miss", "not in the cache any more", [])


def test_a_bundle_is_said_and_why_another_is_not_taken(
    copied: tuple[Loader, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, source = copied
    (directory,) = entries(loader.cache().root)
    entry = Entry.from_json((directory / "entry.json").read_bytes())
    path = write_bundle([(directory, entry)], tmp_path / "bundle").path
    monkeypatch.setenv("JITQUANT_BUNDLES", f"/nowhere:{path}")
    found = explain(loader, Request("plain", (source,)))
    assert found.state == "bundle"
    assert found.directory is not None
    assert found.directory.is_relative_to(path)
    assert len(found.refused) == 1
    assert "/nowhere is not a bundle" in found.refused[0]


def test_names(copied: tuple[Loader, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loader, source = copied
    assert "amax_gsa" in kernel_names(loader.kernels_dir())
    assert request_of(loader, "amax_gsa", "90a") == Request(
        "amax_gsa", ("amax_gsa.cu",), archs="90a"
    )
    monkeypatch.chdir(source.parent)
    assert request_of(loader, "./plain.cpp") == Request("plain", (source,))
    with pytest.raises(ValueError, match=r"'amax_gs' is not a kernel.*Near names: amax_gsa"):
        request_of(loader, "amax_gs")
    with pytest.raises(ValueError, match="name: expected a C identifier"):
        request_of(loader, "../../x")


def test_an_earlier_build_is_known_by_its_name_with_all_its_arguments(tmp_path: Path) -> None:
    loader = new_loader(tmp_path / "cache")
    source = write_plain(tmp_path / "source", stem="mine")
    include = tmp_path / "include"
    source.with_suffix(".h").rename(include.with_suffix(".tmp"))
    include.mkdir()
    include.with_suffix(".tmp").rename(include / "mine.h")
    asked = Request("mine", (source,), include_dirs=(str(include),), cxx_flags=("-O1",))
    loader.ensure(asked).hold.release()
    for name in ("mine", str(source)):
        assert request_of(loader, name) == asked
        assert explain(loader, request_of(loader, name)).state == "hit"
    source.unlink()
    with pytest.raises(FileNotFoundError, match=r"mine\.cpp"):
        explain(loader, request_of(loader, "mine"))


def test_architectures_of_an_earlier_build_are_kept_if_they_were_asked_for(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = toy.copy(tmp_path)
    loader = new_loader(cache)
    assert request_of(loader, "toy").archs is None
    path = cache / "v1" / "last" / "toy.json"
    last = json.loads(path.read_text())
    last["info"]["archs_from"] = "archs="
    path.write_text(json.dumps(last))
    assert request_of(loader, "toy").archs == ("90a",)
    assert request_of(loader, "toy", "100a").archs == "100a"
    (source,) = (path for path in last["info"]["sources"] if path.endswith(".cu"))
    assert request_of(loader, source) == request_of(loader, "toy")._replace(archs=None)
    for variable in ("JITQUANT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        with monkeypatch.context() as context:
            context.setenv(variable, "80")
            assert request_of(loader, "toy").archs is None
