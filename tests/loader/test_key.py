"""What a build depends on: the same contents are a hit, anything else is a miss."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jitquant.loader import Loader
from jitquant.loader.errors import LoaderError
from jitquant.loader.request.named import named_by

from .conftest import Toy
from .toys import entries, new_loader, write_factor, write_plain


def factor(loader: Loader, source: Path, **arguments: object) -> int:
    module = loader.get("plain", [source], **arguments)  # type: ignore[arg-type]
    return int(module.library.factor())


def test_first_build_says_so_and_is_found_by_another_loader(
    plain: Toy, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "building plain for host only: first build" in plain.said
    assert "built plain in" in plain.said
    loader = new_loader(plain.cache)
    assert factor(loader, plain.source) == 3
    assert capfd.readouterr().err == ""
    assert len(entries(plain.cache)) == 1


def test_same_contents_on_another_path_have_the_same_key(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    assert new_loader(cache).get("plain", [source]).key == plain.module.key
    assert len(entries(cache)) == 1


def test_header_edit_and_revert_in_one_process(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    old = loader.get("plain", [source])
    write_factor(source.with_suffix(".h"), 4)
    new = loader.get("plain", [source])
    assert (old.library.factor(), new.library.factor()) == (3, 4)
    write_factor(source.with_suffix(".h"), 3)
    assert loader.get("plain", [source]) is old
    assert len(entries(cache)) == 2


def test_edit_of_same_size_within_one_clock_tick_is_seen(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    header = source.with_suffix(".h")
    for value in (4, 3, 4, 3):
        write_factor(header, value)
        assert factor(loader, source) == value


def test_edit_that_keeps_the_modification_time_is_seen(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    header = source.with_suffix(".h")
    before = header.stat()
    assert factor(loader, source) == 3
    time.sleep(0.15)
    assert factor(loader, source) == 3
    write_factor(header, 5)
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert factor(loader, source) == 5


def test_edit_is_seen_after_many_calls(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    header = source.with_suffix(".h")
    time.sleep(0.15)
    for value in (4, 3):
        for _ in range(50):
            loader.get("plain", [source])
        replacement = header.with_suffix(".new")
        write_factor(replacement, value)
        replacement.rename(header)
        assert factor(loader, source) == value


def test_replaced_directory_is_seen_after_many_calls(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    time.sleep(0.15)
    for _ in range(50):
        loader.get("plain", [source])
    source.parent.rename(tmp_path / "old")
    write_plain(source.parent, 6)
    assert factor(loader, source) == 6


def test_header_that_newly_shadows_another_is_a_miss(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    source.with_suffix(".h").rename(second / "plain.h")
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source, include_dirs=[first, second]) == 3
    write_factor(first / "plain.h", 7)
    assert factor(loader, source, include_dirs=[first, second]) == 7
    (first / "plain.h").unlink()
    assert factor(loader, source, include_dirs=[first, second]) == 3
    assert len(entries(tmp_path / "cache")) == 2


def test_header_looked_for_and_absent_belongs_to_the_key(tmp_path: Path) -> None:
    source = tmp_path / "plain.cpp"
    source.write_text(
        '#if __has_include("extra.h")\n#include "extra.h"\n#else\n#define FACTOR 1\n#endif\n'
        'extern "C" int factor() { return FACTOR; }\n'
    )
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source) == 1
    write_factor(tmp_path / "extra.h", 8)
    assert factor(loader, source) == 8


def test_unrelated_file_beside_the_source_is_no_miss(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    (source.parent / "notes.txt").write_text("nothing")
    assert loader.get("plain", [source]) is module
    assert len(entries(cache)) == 1


def test_a_flag_is_a_miss_and_the_line_says_which(
    plain: Toy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    factor(loader, source, cxx_flags=["-DSEARCH_ARCH=1"])
    said = capfd.readouterr().err
    assert "cxx_flags: none -> -DSEARCH_ARCH=1" in said
    write_factor(source.with_suffix(".h"), 9)
    assert factor(loader, source, cxx_flags=["-DSEARCH_ARCH=1"]) == 9
    said = capfd.readouterr().err
    assert "building plain for host only: src0/plain.h changed" in said
    assert len(entries(cache)) == 3


def test_compiler_variables_belong_to_the_key(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert new_loader(cache).get("plain", [source]).key != plain.module.key


def test_relative_path_follows_the_working_directory(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    other = write_plain(tmp_path / "other", 5)
    loader = new_loader(cache)
    monkeypatch.chdir(source.parent)
    assert loader.get("plain", ["./plain.cpp"]).library.factor() == 3
    monkeypatch.chdir(other.parent)
    assert loader.get("plain", ["./plain.cpp"]).library.factor() == 5


def test_source_changed_while_it_is_compiled_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import jitquant.loader.compile.build as build_module

    source = write_plain(tmp_path / "source")
    header = source.with_suffix(".h")
    real = build_module.run_side_by_side
    edits = iter(
        [
            lambda: write_factor(header, 4),
            lambda: source.write_text(source.read_text().replace("FACTOR", "FACTOR + 10")),
        ]
    )

    def run_and_edit(*args: object, **options: object) -> object:
        done = real(*args, **options)  # type: ignore[arg-type]
        next(edits, lambda: None)()
        return done

    monkeypatch.setattr(build_module, "run_side_by_side", run_and_edit)
    loader = new_loader(tmp_path / "cache")
    assert factor(loader, source) == 14
    said = capfd.readouterr().err
    assert "plain.h changed while plain was compiled; compiling again" in said
    assert "plain.cpp changed while it was compiled" in said
    # A fresh loader, which knows the contents only from the disk, agrees.
    assert factor(new_loader(tmp_path / "cache"), source) == 14
    assert len(entries(tmp_path / "cache")) == 1


def test_every_file_that_a_compiler_read_is_represented_by_its_contents(
    plain: Toy, toy: Toy
) -> None:
    from jitquant.loader.request.sources import is_own
    from jitquant.loader.store.cache import Entry

    for built, own in ((plain, {"src0/plain.h"}), (toy, {"src0/toy.cuh"})):
        (directory,) = entries(built.cache)
        entry = Entry.from_json((directory / "entry.json").read_bytes())
        assert set(filter(is_own, entry.headers)) == own
        assert str(built.source.parent) not in str([entry.inputs, entry.headers, entry.searched])
    read = set(entry.headers)
    assert {"=torch/include/torch/csrc/stable/c/shim.h", "/usr/include/string.h"} <= read
    assert [name for name in read if name.startswith("=cuda/") and "cuda_runtime.h" in name]
    assert entry.inputs["nvcc"]
    assert entry.inputs["torch"]


@pytest.mark.parametrize("flag", ["-Wl,-Map=", "-Wl,-Map,"])
def test_a_file_that_a_flag_has_written_is_no_input(tmp_path: Path, flag: str) -> None:
    source = write_plain(tmp_path / "source")
    written = tmp_path / "written.map"
    written.write_text("before")
    loader = new_loader(tmp_path / "cache")
    flags = [f"{flag}{written}"]
    assert loader.get("plain", [source], cxx_flags=flags).library.factor() == 3
    assert written.read_text() != "before"
    assert new_loader(tmp_path / "cache").get("plain", [source], cxx_flags=flags)
    assert len(entries(tmp_path / "cache")) == 1


def test_flags_that_name_what_is_written() -> None:
    read, written = Path(__file__), Path(new_loader.__code__.co_filename)
    for flags in (
        ["--time", f"{written}"],
        [f"-time={written}"],
        [f"-fdevice-time-trace={written}"],
        [f"-ftime-trace={written}"],
        ["-Xlinker", "-Map", "-Xlinker", f"{written}"],
        ["-Xlinker", f"-Map={written}"],
        [f"-Xlinker=-Map,{written}"],
        ["-Xlinker=-Map", f"-Xlinker={written}"],
        ["-Wl,-Map", f"-Wl,{written}"],
        ["-ccbin", f"{written}"],
        [f"--compiler-bindir={written}"],
        ["--compiler-options", "-ftime-trace", "--compiler-options", f"{written}"],
    ):
        assert named_by([*flags, f"@{read}", f"{read}"]).files == (str(read),), flags
    for flags in (
        ["-Xlinker", f"{written}"],
        ["-Map", f"{read}", "-Xlinker", f"{written}"],
        [f"-Xlinker={written}"],
    ):
        assert named_by(flags).files == (str(written),), flags


def test_a_file_that_changes_in_each_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jitquant.loader.compile.build as build_module

    source = write_plain(tmp_path / "source")
    header = source.with_suffix(".h")
    real = build_module.run_side_by_side
    values = iter(range(100))

    def run_and_edit(*args: object, **options: object) -> object:
        done = real(*args, **options)  # type: ignore[arg-type]
        write_factor(header, next(values))
        return done

    monkeypatch.setattr(build_module, "run_side_by_side", run_and_edit)
    with pytest.raises(LoaderError, match=r"plain\.h changed during each of 5 builds"):
        new_loader(tmp_path / "cache").get("plain", [source])
    assert next(values) == 5
