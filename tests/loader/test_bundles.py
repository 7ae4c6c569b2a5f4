"""Bundles: made here, used where there is no compiler, refused with the reason."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jitquant.loader import BundleError, HostCompilerNotFoundError, Loader
from jitquant.loader.machine.archs import runs_on
from jitquant.loader.request.key import digest_of
from jitquant.loader.request.plan import Request
from jitquant.loader.request.plan import python_abi as abi_here
from jitquant.loader.store.bundles import Bundle, open_bundle, write_bundle
from jitquant.loader.store.cache import Entry, bundle_paths

from .conftest import Toy
from .toys import (
    PATIENCE_SECONDS,
    entries,
    finish,
    new_loader,
    python,
    write_factor,
    write_plain,
)

USE = """
    from pathlib import Path
    import torch
    from jitquant.loader import Loader
    loader = Loader(native=lambda: ())
    module = loader.get("toy", [Path({source!r})])
    print(module.path)
    print(module.scale(torch.ones(2), 2.0).tolist())
"""


def bundle_of(toy: Toy, directory: Path) -> Bundle:
    found = [(e, Entry.from_json((e / "entry.json").read_bytes())) for e in entries(toy.cache)]
    return write_bundle(found, directory)


@pytest.fixture
def bundle(plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of the plain toy, in use."""
    path = bundle_of(plain, tmp_path / "bundle").path
    monkeypatch.setenv("JITQUANT_BUNDLES", str(path))
    return path


def said_by(loader: Loader) -> list[str]:
    lines: list[str] = []
    loader.reporter.say = lines.append  # type: ignore[method-assign]
    return lines


def edit_manifest(bundle: Path, **changes: Any) -> None:
    path = bundle / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))


def edit_entry(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the one entry of ``bundle`` as if it had been built otherwise."""
    (path,) = bundle.glob("entries/*/*/entry.json")
    described = json.loads(path.read_text())
    change(described)
    described["level1"] = digest_of(described["inputs"])
    path.chmod(0o644)
    path.write_text(json.dumps(described))
    place = path.parent.with_name(Entry.from_json(path.read_bytes()).level2[:32])
    path.parent.rename(place)
    manifest = json.loads((bundle / "manifest.json").read_text())
    (build,) = manifest["builds"]
    edit_manifest(bundle, builds=[{**build, "directory": str(place.relative_to(bundle))}])


@pytest.mark.slow
def test_it_is_used_far_from_where_it_was_made_and_without_any_compiler(
    toy: Toy, tmp_path: Path
) -> None:
    bundle_of(toy, tmp_path / "made" / "bundle")
    (tmp_path / "made" / "bundle").rename(tmp_path / "moved ünd")
    source, _ = toy.copy(tmp_path / "elsewhere")
    code = USE.format(source=str(source))
    nothing = {"PATH": str(tmp_path), "CUDA_HOME": "", "CXX": ""}
    cache = tmp_path / "cache"
    _, said = python(code, cache, **nothing).communicate(timeout=PATIENCE_SECONDS)
    assert "HostCompilerNotFoundError: no C++ compiler" in said
    out, said = finish(python(code, cache, **nothing, JITQUANT_BUNDLES=str(tmp_path / "moved ünd")))
    path, values = out.splitlines()
    assert path.startswith(str(tmp_path / "moved ünd"))
    assert values == "[6.0, 6.0]"
    assert said == ""
    assert not cache.exists()


def test_it_comes_before_the_cache_and_edits_leave_it(
    plain: Toy, bundle: Path, tmp_path: Path
) -> None:
    source, _ = plain.copy(tmp_path)
    cache = tmp_path / "empty"
    loader = new_loader(cache)
    said = said_by(loader)
    module = loader.get("plain", [source])
    assert not cache.exists()
    assert loader.get("plain", [source]) is module
    assert said == []
    source.with_suffix(".h").write_text("#define FACTOR 4\n")
    assert loader.get("plain", [source]).library.factor() == 4
    assert said[0] == (
        f"not taken from a bundle: {bundle}: plain: src0/plain.h is not what it was built with"
    )
    source.with_suffix(".h").write_text("#define FACTOR 3\n")
    assert loader.get("plain", [source]) is module


@pytest.mark.parametrize("header", ["../common/plain.h", "{}/common/plain.h"])
def test_a_header_outside_of_all_directories_counts(
    header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_plain(tmp_path / "source")
    (tmp_path / "common").mkdir()
    source.with_suffix(".h").rename(tmp_path / "common" / "plain.h")
    source.write_text(source.read_text().replace("plain.h", header.format(tmp_path)))
    build = new_loader(tmp_path / "cache").ensure(Request("plain", (source,)))
    build.hold.release()
    write_bundle([(build.library.parent, build.entry)], tmp_path / "bundle")
    monkeypatch.setenv("JITQUANT_BUNDLES", str(tmp_path / "bundle"))
    loader = new_loader(tmp_path / "empty")
    assert loader.get("plain", [source]).library.factor() == 3
    assert not (tmp_path / "empty").exists()
    write_factor(tmp_path / "common" / "plain.h", 4)
    assert loader.get("plain", [source]).library.factor() == 4
    assert new_loader(tmp_path / "other").get("plain", [source]).library.factor() == 4


def built_for(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described["inputs"].update({key: value})


def python_abi(described: dict[str, Any]) -> None:
    described["python_abi"] = "cpython-27"


def bound_to_torch(described: dict[str, Any]) -> None:
    described["stable_abi"] = False
    described["inputs"]["torch"] = "2.5.0 abc"


def other_source(described: dict[str, Any]) -> None:
    described["inputs"]["sources"][0][1] = "0" * 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (bound_to_torch, r"torch: built for 2\.5\.0 abc, here 2\."),
        (built_for("machine", "riscv64"), "the machine: built for riscv64, here "),
        (built_for("libc", "glibc-9.99"), r"the C library: built with glibc-9\.99, here glibc-2"),
        (built_for("cxx_flags", ["-O1"]), "cxx_flags: built for -O1, here none"),
        (built_for("sources", [["other.cpp", "0"]]), "it was built from other sources"),
        (other_source, r"plain\.cpp is not what it was built from"),
        (python_abi, "Python ABI is not what it was built with"),
    ],
)
def test_another_one_is_refused_with_the_reason_and_it_is_built(
    plain: Toy, bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    edit_entry(bundle, change)
    source, _ = plain.copy(tmp_path)
    cache = tmp_path / "empty"
    loader = new_loader(cache)
    said = said_by(loader)
    assert loader.get("plain", [source]).library.factor() == 3
    assert len(entries(cache)) == 1
    line = said[0]
    assert line.startswith(f"not taken from a bundle: {bundle}: plain: ")
    assert re.search(reason, line), line


def test_an_architecture_that_it_has_no_code_for_is_refused(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle_of(toy, tmp_path / "bundle").path
    monkeypatch.setenv("JITQUANT_BUNDLES", str(path))
    source, cache = toy.copy(tmp_path)
    loader = new_loader(cache)
    wanted = loader.look_up(Request("toy", (source,), archs="100a"))
    build, refused = loader.search_bundles(wanted)
    assert build is None
    assert refused == [f"{path}: toy: it holds sm_90a, and sm_100a is asked for"]
    build, refused = loader.search_bundles(loader.look_up(Request("toy", (source,), archs="90a")))
    assert build is not None
    assert refused == []


def test_without_a_compiler_the_error_says_why_no_bundle_would_do(
    plain: Toy, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    other = write_plain(tmp_path / "other", stem="other")
    with pytest.raises(HostCompilerNotFoundError, match=r"(?s)has it ready:\n.*no such module"):
        new_loader(cache).get("other", [other])
    source.write_text(source.read_text() + "// edited\n")
    with pytest.raises(HostCompilerNotFoundError, match=r"plain\.cpp is not what it was built"):
        new_loader(cache).get("plain", [source])


def test_a_damaged_library_is_refused_and_left_as_it_is(
    plain: Toy, bundle: Path, tmp_path: Path
) -> None:
    (library,) = bundle.glob("entries/*/*/*.so")
    library.chmod(0o644)
    library.write_bytes(library.read_bytes()[:1000])
    source, _ = plain.copy(tmp_path)
    cache = tmp_path / "empty"
    loader = new_loader(cache)
    said = said_by(loader)
    assert loader.get("plain", [source]).library.factor() == 3
    assert len(entries(cache)) == 1
    assert "does not have the digest" in said[0]
    assert library.stat().st_size == 1000


def test_a_library_that_the_manifest_does_not_speak_of_is_refused(
    plain: Toy, bundle: Path, tmp_path: Path
) -> None:
    (library,) = bundle.glob("entries/*/*/*.so")
    other = library.read_bytes() + b"something else"
    library.chmod(0o644)
    library.write_bytes(other)
    digest = hashlib.sha256(other).hexdigest()
    edit_entry(bundle, lambda described: described.update(library_sha256=digest))
    loader = new_loader(tmp_path / "cache")
    build, refused = loader.search_bundles(loader.look_up(Request("plain", (plain.source,))))
    assert build is None
    assert "is not what the manifest speaks of" in refused[0]


def no_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()


def newer_format(bundle: Path) -> None:
    edit_manifest(bundle, format=2)


def no_builds(bundle: Path) -> None:
    edit_manifest(bundle, builds=[{"name": "x"}])


def nested(bundle: Path) -> None:
    manifest = bundle / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text("[" * 200_000)


def others_write(bundle: Path) -> None:
    bundle.chmod(0o777)


def others_write_the_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").chmod(0o664)


def place_outside(bundle: Path) -> None:
    (build,) = json.loads((bundle / "manifest.json").read_text())["builds"]
    edit_manifest(bundle, builds=[{**build, "directory": f"../{bundle.name}/{build['directory']}"}])


def library_outside(bundle: Path) -> None:
    (build,) = json.loads((bundle / "manifest.json").read_text())["builds"]
    edit_manifest(bundle, builds=[{**build, "library": f"../{build['library']}"}])


def gone(bundle: Path) -> None:
    shutil.rmtree(bundle)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_manifest, "is not a bundle: No such file"),
        (gone, "is not a bundle: No such file"),
        (newer_format, "has format 2, and this jitquant reads format 1"),
        (no_builds, r"manifest\.json cannot be read"),
        (nested, r"manifest\.json cannot be read"),
        (place_outside, r"manifest\.json cannot be read .* is outside the bundle"),
        (library_outside, r"manifest\.json cannot be read .* is outside the bundle"),
        (others_write, "has mode 0777: others can write to it"),
        (others_write_the_manifest, r"manifest\.json has mode 0664: others can write to it"),
    ],
)
def test_what_is_no_bundle_is_said_and_passed_over(
    plain: Toy, bundle: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(bundle)
    with pytest.raises(BundleError, match=said):
        open_bundle(bundle)
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    lines = said_by(loader)
    assert loader.get("plain", [source]).library.factor() == 3
    assert lines[0].startswith(f"not taken from a bundle: {bundle}")


@pytest.mark.parametrize(
    "part", ["entries", "entries/*", "entries/*/*", "*/*/*/entry.json", "*/*/*/*.so"]
)
def test_a_build_that_others_could_have_written_is_said_and_passed_over(
    plain: Toy, bundle: Path, tmp_path: Path, part: str
) -> None:
    (place,) = bundle.glob(part)
    place.chmod(0o777)
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    lines = said_by(loader)
    assert loader.get("plain", [source]).library.factor() == 3
    assert lines[0].startswith(f"not taken from a bundle: {place} has mode 0777: others can write")


def test_a_description_that_was_edited_is_said_and_passed_over(
    plain: Toy, bundle: Path, tmp_path: Path
) -> None:
    (path,) = bundle.glob("entries/*/*/entry.json")
    path.chmod(0o644)
    path.write_text(path.read_text().replace('"libc": "', '"libc": "other'))
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    lines = said_by(loader)
    assert loader.get("plain", [source]).library.factor() == 3
    assert "entry.json cannot be read (its inputs do not hash to its key)" in lines[0]


def test_several_are_looked_at_in_order(
    plain: Toy, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "second"
    shutil.copytree(bundle, second)
    edit_entry(bundle, built_for("machine", "riscv64"))
    monkeypatch.setenv("JITQUANT_BUNDLES", f"{bundle}::{second}")
    assert bundle_paths() == [bundle, second]
    loader = new_loader(tmp_path / "cache")
    build, refused = loader.search_bundles(loader.look_up(Request("plain", (plain.source,))))
    assert build is not None
    assert build.library.is_relative_to(second)
    assert len(refused) == 1


def test_writing_makes_it_read_only_and_overwrites_nothing(bundle: Path, plain: Toy) -> None:
    modes = {path.stat().st_mode & 0o777 for path in bundle.rglob("*") if path.is_file()}
    assert modes == {0o444}
    with pytest.raises(ValueError, match="already exists"):
        bundle_of(plain, bundle)
    with pytest.raises(ValueError, match="no builds"):
        write_bundle([], bundle.with_name("new"))
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_copy_that_fails_leaves_nothing(plain: Toy, tmp_path: Path) -> None:
    _, cache = plain.copy(tmp_path)
    (directory,) = entries(cache)
    entry = Entry.from_json((directory / "entry.json").read_bytes())
    (directory / entry.library).write_bytes(b"")
    with pytest.raises(OSError, match="changed while it was copied"):
        write_bundle([(directory, entry)], tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("built", "runs", "does_not"),
    [
        ("90a", ["90a"], ["100a", "103a", "89"]),
        ("100a", ["100a"], ["103a", "100f", "110a"]),
        ("100f", ["100a", "100f", "103a"], ["90a", "110a", "120a"]),
        ("120f", ["120a", "121a"], ["103a"]),
        ("80", ["80", "86", "89"], ["90a"]),
        ("86", ["86", "89"], ["80", "90a"]),
        ("80+ptx", ["80", "90a", "121a"], []),
        ("90a+ptx", ["90a", "100a"], ["89"]),
    ],
)
def test_which_code_runs_where(built: str, runs: list[str], does_not: list[str]) -> None:
    assert [arch for arch in runs if not runs_on(built, arch)] == []
    assert [arch for arch in does_not if runs_on(built, arch)] == []


def test_the_stable_abi_alone_is_kept_for_every_newer_torch(
    plain: Toy, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads((bundle / "manifest.json").read_text())["torch"] == ">= 2.11"
    edit_entry(bundle, built_for("torch", "2.99.0+cu132 abc"))
    wanted = new_loader(tmp_path / "cache").look_up(Request("plain", (plain.source,)))
    assert wanted.inputs["torch"] != "2.99.0+cu132 abc"
    loader = new_loader(tmp_path / "cache")
    build, refused = loader.search_bundles(wanted)
    assert build is not None, refused
    wanted.inputs["torch"] = "2.10.1 abc"
    build, refused = loader.search_bundles(wanted)
    assert build is None
    assert refused == [f"{bundle}: plain: torch: built for >= 2.11, here 2.10.1 abc"]


STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
torch::stable::Tensor same(torch::stable::Tensor x) { return torch::stable::clone(x); }
STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("same(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) { m.impl("same", TORCH_BOX(&same)); }
"""
#: Declared here, so that no header tells it apart.
UNSTABLE = """
namespace at { int get_num_threads(); }
extern "C" int threads() { return at::get_num_threads(); }
"""


@pytest.mark.parametrize(
    ("text", "flags", "stable"),
    [
        (STABLE, (), True),
        (STABLE, ("-UTORCH_TARGET_VERSION", "-DTORCH_TARGET_VERSION=0x020d000000000000"), False),
        (UNSTABLE, (), False),
        ('#include <string>\nextern "C" char c(std::string& s) { return s.at(1); }', (), True),
    ],
    ids=["stable", "newer target", "c++ symbols", "std::string::at"],
)
def test_which_builds_use_the_stable_abi_alone(
    tmp_path: Path, text: str, flags: tuple[str, ...], stable: bool
) -> None:
    source = tmp_path / "k.cpp"
    source.write_text(text)
    build = new_loader(tmp_path / "cache").ensure(Request("k", (source,), cxx_flags=flags))
    assert build.entry.stable_abi is stable


def test_the_python_abi_is_known_while_another_thread_reads_sysconfig(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = sysconfig.get_config_var("SOABI")
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: None)
    assert abi_here() == known
