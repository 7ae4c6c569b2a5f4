"""A part of a module stands in until the whole is built."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jitquant.loader import (
    CaptureError,
    CudaModule,
    FrozenError,
    HostCompilerNotFoundError,
    Loader,
    NoBuildError,
)
from jitquant.loader.store.bundles import write_bundle
from jitquant.loader.store.cache import Entry

from .toolkits import write_toolkit
from .toys import entries, new_loader, write_factor, write_plain

FLAGS = ("-DPART",)


def settled(source: Path) -> Path:
    """``source`` once its stat is old enough to be relied on."""
    time.sleep(0.15)
    return source


def part_of(loader: Loader, source: Path) -> tuple[CudaModule, bool, bool]:
    module, fresh, is_part = loader.get_part("plain", [source], "small", FLAGS)
    return module, fresh(), is_part


def test_the_part_is_kept_until_the_whole_is_loaded(tmp_path: Path) -> None:
    source, cache = settled(write_plain(tmp_path / "source")), tmp_path / "cache"
    loader = new_loader(cache)
    part, fresh, is_part = loader.get_part("plain", [source], "small", FLAGS)
    assert is_part
    assert fresh()
    assert part.__name__ == "plain_small"
    assert part_of(loader, source) == (part, True, True)
    whole = loader.get("plain", [source])
    assert not fresh()
    assert part_of(loader, source) == (whole, True, False)
    # What is built is taken whole, by another process too.
    again, _, is_part = new_loader(cache).get_part("plain", [source], "small", FLAGS)
    assert not is_part
    assert again.key == whole.key


def test_a_wider_part_that_is_built_is_taken(tmp_path: Path) -> None:
    source, cache = settled(write_plain(tmp_path / "source")), tmp_path / "cache"
    wider = [("wide", ("-DWIDE",)), ("widest", ("-DWIDEST",))]
    new_loader(cache).get("plain_widest", [source], cuda_flags=("-DWIDEST",))
    loader = new_loader(cache)
    part, fresh, is_part = loader.get_part("plain", [source], "small", FLAGS, wider)
    assert (part.__name__, is_part, fresh()) == ("plain_widest", True, True)
    write_factor(source.with_suffix(".h"), 5)
    settled(source)
    assert not fresh()
    part, _, is_part = loader.get_part("plain", [source], "small", FLAGS, wider)
    assert (part.__name__, is_part) == ("plain_small", True)
    assert part.library.factor() == 5
    loader.freeze()
    assert loader.get_part("plain", [source], "small", FLAGS, wider)[0] is part
    with pytest.raises(FrozenError, match="plain"):
        loader.get_part("plain", [source], "other", ("-DOTHER",))


def test_after_an_edit_the_part_is_what_is_built(tmp_path: Path) -> None:
    source = settled(write_plain(tmp_path / "source"))
    loader = new_loader(tmp_path / "cache")
    loader.get("plain", [source])
    _, fresh, is_part = loader.get_part("plain", [source], "small", FLAGS)
    assert not is_part
    for factor in (5, 7):
        write_factor(source.with_suffix(".h"), factor)
        settled(source)
        assert not fresh()
        module, fresh, is_part = loader.get_part("plain", [source], "small", FLAGS)
        assert is_part
        assert module.library.factor() == factor
        assert fresh()
    whole = loader.get("plain", [source])
    assert whole.library.factor() == 7
    assert not fresh()


def test_what_may_not_be_built_is_asked_for_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_plain(tmp_path / "source"), tmp_path / "cache"
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    with pytest.raises(NoBuildError, match="module 'plain' would have to be built"):
        part_of(new_loader(cache), source)
    monkeypatch.delenv("JITQUANT_NO_BUILD")
    frozen = new_loader(cache)
    frozen.freeze()
    with pytest.raises(FrozenError, match="module 'plain' would"):
        part_of(frozen, source)
    with pytest.raises(CaptureError, match=r"warmup\('plain'\)"):
        part_of(new_loader(cache, capturing=lambda: True), source)
    part_of(new_loader(cache), source)
    monkeypatch.setenv("JITQUANT_NO_BUILD", "1")
    module, _, is_part = part_of(new_loader(cache), source)
    assert is_part
    assert module.__name__ == "plain_small"
    capturing = False
    loader = new_loader(cache, capturing=lambda: capturing)
    part_of(loader, source)
    capturing = True
    assert part_of(loader, source)[2]
    loader.freeze()
    assert part_of(loader, source)[2]


@pytest.mark.parametrize("bundled", ["plain", "plain_small"])
def test_without_a_compiler_a_bundle_may_have_either(
    bundled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_plain(tmp_path / "source"), tmp_path / "cache"
    new_loader(cache).get(bundled, [source], cuda_flags=FLAGS if "_" in bundled else ())
    built = [(e, Entry.from_json((e / "entry.json").read_bytes())) for e in entries(cache)]
    monkeypatch.setenv("JITQUANT_BUNDLES", str(write_bundle(built, tmp_path / "bundle").path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    module, _, is_part = part_of(new_loader(tmp_path / "other"), source)
    assert (module.__name__, is_part) == (bundled, bundled == "plain_small")
    source.with_suffix(".h").write_text("#define FACTOR 9\n")
    with pytest.raises(HostCompilerNotFoundError, match="No bundle has it ready"):
        part_of(new_loader(tmp_path / "other"), source)


def test_warmup_builds_the_parts_that_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "toolkit")))
    kernels, cache = tmp_path / "kernels", tmp_path / "cache"
    kernels.mkdir()
    for name in ("split", "built", "small"):
        (kernels / f"{name}.cu").write_text(
            "#ifndef FACTOR\n#define FACTOR 3\n#endif\n"
            'extern "C" int cudart(); extern "C" int factor() { return FACTOR * cudart(); }\n'
        )
    parts = {
        name: [(part, (f"-DFACTOR={factor}",)) for factor, part in enumerate(("none", "one"))]
        for name in ("split", "built")
    }
    loader = new_loader(cache, kernels_dir=kernels)
    whole = loader.get("built", ["built.cu"])
    modules = loader.warmup(parts=parts)
    factors = {name: module.library.factor() for name, module in modules.items()}
    assert factors == {"split_none": 0, "split_one": 1, "built_none": 3, "built_one": 3, "small": 3}
    assert modules["built_one"] is whole
    assert len(entries(cache)) == 4
    assert loader.get_part("split", ["split.cu"], *parts["split"][1])[0] is modules["split_one"]
    assert [*loader.warmup("small", parts=parts)] == ["small"]
