"""Launchers that keep objects, such as ccache and sccache: what they restore is not old code."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

import pytest
from quick import in_quick

from jitquant.loader import CompileError
from jitquant.loader.compile import build as build_module
from jitquant.loader.compile.commands import Unit, make_units
from jitquant.loader.request.plan import Request
from jitquant.loader.request.sources import Roots, parse_depfile
from jitquant.loader.store.match import Build

from .test_old_code import factor, incbin, write
from .test_searches import SWITCHED, script
from .toys import entries, new_loader, write_factor

#: Restores what ``KEPT`` lists for the same command and source, whatever else has changed.
LAUNCHER = """
#!{python}
import hashlib, os, shutil, subprocess, sys
from pathlib import Path
argv = sys.argv[1:]
if "-c" not in argv or "--dryrun" in argv:
    os.execvp(argv[0], argv)
source = Path(argv[argv.index("-c") + 1])
object = Path(argv[argv.index("-o") + 1])
key = hashlib.sha256("\\0".join(argv).encode() + source.read_bytes()).hexdigest()
files = [object.with_suffix(suffix) for suffix in {kept!r}]
kept = [Path({store!r}, key + file.suffix) for file in files]
hit = kept[0].exists()
with open({log!r}, "a") as log:
    print("hit" if hit else "miss", source.name, file=log)
if not hit:
    status = subprocess.call(argv)
    if status:
        sys.exit(status)
for file, there in zip(files, kept):
    shutil.copy(*((there, file) if hit else (file, there)))
"""


class Launcher:
    """A launcher, and what it did."""

    def __init__(self, directory: Path, kept: tuple[str, ...]) -> None:
        self.program = directory / "launch"
        self._log = directory / "log"
        store = directory / "store"
        store.mkdir(parents=True)
        text = LAUNCHER.format(
            python=sys.executable, kept=kept, store=str(store), log=str(self._log)
        )
        self.program.write_text(text.lstrip())
        self.program.chmod(0o755)

    def did(self) -> list[str]:
        """The lines since the last call."""
        lines = self._log.read_text().splitlines()
        self._log.write_text("")
        return lines


NVCC = [pytest.param("toolkit", id="stand-in"), pytest.param("nvcc", marks=pytest.mark.slow)]


@pytest.fixture(
    params=in_quick(1, [(".o",), (".o", ".d")]), ids=["object alone", "object and depfile"]
)
def launcher(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Launcher:
    made = Launcher(tmp_path / "launcher", request.param)
    monkeypatch.setenv("JITQUANT_NVCC_LAUNCHER", str(made.program))
    return made


def write_halves(directory: Path) -> Path:
    """A ``.cu`` with a header for each half; factor() shows that of the host.

    Its name is not in plain text, which the name of the extension would depend on.
    """
    directory.mkdir()
    source = directory / "k.cu"
    source.write_text(
        '#ifdef __CUDA_ARCH__\n#include "device.h"\n#else\n#define HOST "host.h"\n#include HOST\n'
        'extern "C" int factor() { return FACTOR; }\n#endif\n'
        "#ifdef __CUDACC__\n__global__ void kernel() {}\n#endif\n"
    )
    write_factor(directory / "host.h", 3)
    # Not as long, or GCC might take it for a copy.
    (directory / "device.h").write_text("#pragma once\n")
    return source


def build(cache: Path, source: Path) -> Build:
    """Built and not loaded: a name that is in use would not be given again."""
    made = new_loader(cache).ensure(Request(source.stem, (source,)))
    made.hold.release()
    return made


def value_of(made: Build) -> int:
    """What factor() of a build returns."""
    copied = made.library.with_name(f"{os.urandom(6).hex()}.so")
    shutil.copy(made.library, copied)
    return int(ctypes.CDLL(str(copied)).factor())


@pytest.mark.slow
@pytest.mark.parametrize("compiler", NVCC)
def test_a_restored_object_is_of_the_same_headers(
    compiler: str, tmp_path: Path, launcher: Launcher, request: pytest.FixtureRequest
) -> None:
    """ccache restores an object though a header has changed that only the host half includes."""
    request.getfixturevalue(compiler)
    source = write_halves(tmp_path / "source")
    first, second = build(tmp_path / "one", source), build(tmp_path / "two", source)
    assert launcher.did() == ["miss k.cu", "hit k.cu"]
    assert value_of(second) == 3
    names = {Path(name).name for name in second.entry.headers}
    assert names >= {"host.h", "host_runtime.h", "fatbinary_section.h"}
    assert ("device.h" in names) == (compiler == "nvcc")
    assert second.entry.headers == first.entry.headers
    write_factor(source.with_name("host.h"), 4)
    for cache in ("three", "four"):
        assert value_of(build(tmp_path / cache, source)) == 4
    assert launcher.did() == ["miss k.cu", "hit k.cu"]


def test_the_toolkits_headers_count_for_a_launcher(
    tmp_path: Path, launcher: Launcher, toolkit: Path
) -> None:
    source = write(tmp_path / "source" / "k.cu", '"k.h"')
    write_factor(source.with_name("k.h"), 3)
    build(tmp_path / "one", source)
    with (toolkit / "include" / "crt" / "host_runtime.h").open("a") as header:
        header.write("// edited\n")
    build(tmp_path / "two", source)
    build(tmp_path / "three", source)
    assert launcher.did() == ["miss k.cu", "miss k.cu", "hit k.cu"]


@pytest.mark.slow
def test_what_compilers_run_counts_for_a_launcher(
    tmp_path: Path, launcher: Launcher, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    monkeypatch.setenv("COMPILER_PATH", str(tools))
    assembler, profile = tools / "as", toolkit / "bin" / "nvcc.profile"
    script(assembler, 'as "$@"')
    profile.write_text("")
    source = tmp_path / "k.cpp"
    source.write_text(SWITCHED)
    kernel = tmp_path / "toy.cu"
    kernel.write_text('extern "C" int toy() { return 3; }\n')
    assert value_of(build(tmp_path / "one", source)) == 3
    build(tmp_path / "one", kernel)
    script(assembler, 'as --defsym FOUR=1 "$@"')
    assert value_of(build(tmp_path / "two", source)) == 4
    profile.write_text("edited")
    build(tmp_path / "two", kernel)
    assert launcher.did() == ["miss k.cpp", "miss toy.cu", "miss k.cpp", "miss toy.cu"]


@pytest.mark.parametrize("file", ["k.cpp", pytest.param("k.cu", marks=pytest.mark.slow)])
def test_what_the_assembler_reads_counts_for_a_launcher(
    file: str, tmp_path: Path, launcher: Launcher, request: pytest.FixtureRequest
) -> None:
    """sccache restores an object though a file that .incbin reads has changed."""
    data = tmp_path / "data.bin"
    data.write_bytes(b"\x03")
    source = incbin(tmp_path / file, data)
    if file == "k.cu":
        request.getfixturevalue("nvcc")
        source.write_text(f"#ifndef __CUDA_ARCH__\n{source.read_text()}#endif\n")
    for value in (3, 4):
        data.write_bytes(bytes([value]))
        assert value_of(build(tmp_path / "one", source)) == value
        assert value_of(build(tmp_path / f"fresh{value}", source)) == value, launcher.did()
    assert "hit" in " ".join(launcher.did())


def test_a_compiler_that_does_not_list_what_it_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source" / "k.cpp", '"k.h"')
    write_factor(source.with_name("k.h"), 3)
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\n"$0.real" "$@" && rm -f o0.d\n')
    compiler.chmod(0o755)
    compiler.with_name("g++.real").symlink_to(shutil.which("g++") or "")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(CompileError, match=r"g\+\+ k\.cpp did not list the headers that it read"):
        factor(new_loader(tmp_path / "cache"), source)
    assert not entries(tmp_path / "cache")


@pytest.mark.slow
def test_what_is_listed_ahead_is_all_that_nvcc_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: None
) -> None:
    """A newer nvcc may generate code that includes more."""
    through = tmp_path / "through"
    through.write_text('#!/bin/sh\nexec "$@"\n')
    through.chmod(0o755)
    monkeypatch.setenv("JITQUANT_NVCC_LAUNCHER", str(through))
    found: dict[str, set[str]] = {}
    real = build_module.read_by

    def reading(unit: Unit, staging: Path, roots: Roots) -> tuple[str, ...]:
        for kind in ("all.d", "host.d"):
            listed = parse_depfile((staging / f"{unit.stem}.{kind}").read_text())
            found[kind] = {os.path.realpath(path) for path in listed if Path(path).exists()}
        return real(unit, staging, roots)

    monkeypatch.setattr(build_module, "read_by", reading)
    factor(new_loader(tmp_path / "cache"), write_halves(tmp_path / "source"))
    assert len(found["host.d"]) > 10
    assert found["host.d"] - found["all.d"] == set()


def test_a_cache_that_is_named_nvcc_is_a_launcher_too(
    tmp_path: Path, launcher: Launcher, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JITQUANT_NVCC_LAUNCHER")
    home = tmp_path / "ccache"
    (home / "bin").mkdir(parents=True)
    wrapper = home / "bin" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec "{launcher.program}" "{toolkit}/bin/nvcc" "$@"\n# ccache')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    source = write(tmp_path / "source" / "k.cu", '"k.h"')
    write_factor(source.with_name("k.h"), 3)
    loader = new_loader(tmp_path / "cache")
    (unit,) = make_units(loader.plan(loader.look_up(Request("k", (source,)))), "k", tmp_path)
    assert unit.is_listed
    assert value_of(build(tmp_path / "cache", source)) == 3
