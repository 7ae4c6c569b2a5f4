"""Sources that many modules are linked with: compiled once, and never used from old files."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from quick import in_quick

import jitquant.loader.compile.build as build_module
from jitquant.loader import CompileError, Loader

from .toys import new_loader, wait_for, write_factor

BASE = '#include "base.h"\n#include <factor.h>\nint shared_factor() { return FACTOR; }\n'
MODULE = '#include "bindings/base.h"\nextern "C" int factor() { return shared_factor() + %d; }\n'


class Shared:
    """Modules ``one`` and ``two`` with ``bindings/base.cpp``, and what was compiled for them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.kernels = folder / "kernels"
        (self.kernels / "bindings").mkdir(parents=True)
        (self.kernels / "include").mkdir()
        (self.kernels / "bindings" / "base.h").write_text("int shared_factor();\n")
        (self.kernels / "bindings" / "base.cpp").write_text(BASE)
        for index, name in enumerate(("one", "two")):
            (self.kernels / f"{name}.cpp").write_text(MODULE % (10 * index))
        for name in "ab":
            (folder / name).mkdir()
        write_factor(folder / "b" / "factor.h", 3)
        self.loader = self.new_loader()
        self.compiled: list[str] = []
        self.after: Callable[[], object] = lambda: None
        real = build_module.run_side_by_side

        def run(commands: Any, **options: Any) -> Any:
            self.compiled += [command.label.split()[1] for command in commands]
            done = real(commands, **options)
            self.after()
            return done

        patch.setattr(build_module, "run_side_by_side", run)

    def new_loader(self) -> Loader:
        return new_loader(self.folder / "cache", kernels_dir=self.kernels)

    def factor(self, name: str, loader: Loader | None = None) -> int:
        flags = [f"-I{self.folder / 'a'}", f"-I{self.folder / 'b'}"]
        module = (loader or self.loader).get(name, [f"{name}.cpp"], cxx_flags=flags)
        return int(module.library.factor())

    def factors(self) -> list[int]:
        return [self.factor("one"), self.factor("two")]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    return Shared(tmp_path, monkeypatch)


def test_it_is_compiled_once(shared: Shared) -> None:
    before = os.umask(0o002)
    try:
        assert shared.factor("one") == 3
    finally:
        os.umask(before)
    assert shared.factor("two", shared.new_loader()) == 13  # as in another process
    assert sorted(shared.compiled) == ["base.cpp", "one.cpp", "two.cpp"]


@pytest.mark.parametrize("harm", ["damage", "mode", "nonsense"])
def test_a_kept_object_that_is_damaged_or_not_ours_is_not_used(shared: Shared, harm: str) -> None:
    assert shared.factor("one") == 3
    (kept,) = (shared.folder / "cache" / "v1" / "toolchain").glob("*.o")
    content = kept.read_bytes()
    if harm == "damage":
        kept.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "mode":
        kept.chmod(0o666)
    else:
        kept.write_bytes(b"[]\n" + content)
    assert shared.factor("two", shared.new_loader()) == 13
    assert shared.compiled.count("base.cpp") == 2
    assert oct(kept.stat().st_mode & 0o022) == "0o0"


def test_it_is_compiled_once_by_modules_that_are_built_at_the_same_time(shared: Shared) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(shared.factor, ("one", "two"))) == [3, 13]
    assert shared.compiled.count("base.cpp") == 1


@pytest.mark.parametrize("edited", in_quick(2, ["header", "shadow", "source", "link"]))
def test_an_edit_of_what_it_read_reaches_every_module(shared: Shared, edited: str) -> None:
    place = shared.folder / "b" / "factor.h"
    if edited == "link":
        place.rename(shared.folder / "target.h")
        place.symlink_to(shared.folder / "target.h")
    assert shared.factors() == [3, 13]
    if edited == "header":
        write_factor(place, 4)
    elif edited == "source":
        base = shared.kernels / "bindings" / "base.cpp"
        base.write_text(base.read_text().replace("FACTOR;", "4;"))
    elif edited == "shadow":
        write_factor(shared.folder / "a" / "factor.h", 4)
    else:
        write_factor(shared.folder / "other.h", 4)
        place.unlink()
        place.symlink_to(shared.folder / "other.h")
    assert shared.factors() == [4, 14]
    assert shared.compiled.count("base.cpp") == 2


@pytest.mark.parametrize("way", ["response file", "launcher"])
def test_an_edit_of_what_its_command_runs_or_reads_reaches_every_module(
    way: str, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of the words in a command that is the same as before."""
    base = shared.kernels / "bindings" / "base.cpp"
    base.write_text("int shared_factor() { return FACTOR; }\n")
    file, flags = shared.folder / "file", []
    if way == "launcher":
        monkeypatch.setenv("JITQUANT_NVCC_LAUNCHER", str(file))
    else:
        flags = [f"@{file}"]
    for value in (3, 4):
        file.write_text(f"-DFACTOR={value}" if flags else f'#!/bin/sh\n"$@" -DFACTOR={value}\n')
        file.chmod(0o755)
        module = shared.new_loader().get("one", ["one.cpp"], cxx_flags=flags)
        assert module.library.factor() == value


@pytest.mark.parametrize("place", ["a", "b"])
def test_an_edit_between_two_builds_reaches_the_second(shared: Shared, place: str) -> None:
    assert shared.factor("one") == 3
    write_factor(shared.folder / place / "factor.h", 4)
    assert shared.factor("two", shared.new_loader()) == 14


def test_what_was_compiled_during_an_edit_is_not_kept(shared: Shared) -> None:
    def edit() -> None:
        if shared.compiled[-1] == "base.cpp" and shared.compiled.count("base.cpp") == 1:
            write_factor(shared.folder / "b" / "factor.h", 4)

    shared.after = edit
    assert shared.factors() == [4, 14]


def test_an_error_in_it_is_reported_by_every_module(shared: Shared) -> None:
    base = shared.kernels / "bindings" / "base.cpp"
    base.write_text(BASE.replace("FACTOR", "FACTORY"))
    for name in ("one", "two"):
        with pytest.raises(CompileError, match="FACTORY"):
            shared.factor(name)
    base.write_text(BASE)
    assert shared.factors() == [3, 13]


def test_its_compiler_ends_with_a_build_that_fails(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on beside those of the module, in a thread of its own."""
    cxx, started = shared.folder / "c++", shared.folder / "started"
    cxx.write_text(
        "#!/bin/sh\n"
        f'case " $*" in *" -c "*base.cpp*) echo $$ > {started}.new; mv {started}.new {started}; '
        "exec sleep 1000;; esac\n"
        f'case " $*" in *" -c "*) until [ -e {started} ]; do sleep 0.01; done;; esac\n'
        'exec g++ "$@"\n'
    )
    cxx.chmod(0o755)
    monkeypatch.setenv("CXX", str(cxx))
    source = shared.kernels / "one.cpp"
    source.write_text(source.read_text() + "int x = ;\n")
    with pytest.raises(CompileError, match=r"one\.cpp"):
        shared.factor("one")
    pid = int(started.read_text())
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
