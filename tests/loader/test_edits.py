"""Random edits of all that a build depends on: never old code, never a build for nothing."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jitquant.loader import Loader

from .toolkits import write_toolkit
from .toys import entries, new_loader

#: What is included, each by a name of its own; a header that is nowhere counts as 0.
NAMES = ("a.h", "b.h", "deep/c.h", "optional.h", "toolkit.h")
_ASKED = ('"a.h"', "<b.h>", "<deep/c.h>", '"optional.h"', "<toolkit.h>")
_PART = """
#if __has_include({name})
#include {name}
#else
#define VALUE 0
#endif
static int value_of_{index}() {{ return VALUE; }}
#undef VALUE
"""
_FACTOR = """
#ifndef EXTRA
#define EXTRA 0
#endif
extern "C" int cudart();
extern "C" int factor() {
  return cudart() * 7 + EXTRA * 3 + value_of_0() + 10 * value_of_1() + 100 * value_of_2() +
         1000 * value_of_3() + 10000 * value_of_4();
}
"""
SOURCE = "".join(_PART.format(name=n, index=i) for i, n in enumerate(_ASKED)) + _FACTOR


class World:
    """Files, links, flags and variables, and the edits that are made to them."""

    def __init__(self, directory: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.monkeypatch = monkeypatch
        self.toolkit = write_toolkit(directory / "toolkit")
        self.cudart = 1
        self.source = directory / "source" / "k.cu"
        self.places = [directory / name for name in ("source", "one", "two", "three")]
        for place in self.places:
            (place / "deep").mkdir(parents=True)
        self.links = [directory / "link0", directory / "link1"]
        for link, place in zip(self.links, self.places[1:], strict=False):
            link.symlink_to(place)
        self.places += [self.toolkit / "include", self.toolkit / "include" / "cccl"]
        (self.toolkit / "include" / "deep").mkdir()
        (self.toolkit / "include" / "cccl" / "deep").mkdir()
        self.source.write_text(SOURCE)
        self.cuda_flags: list[str] = []
        self.include_dirs = [self.links[0]]
        self.variables: dict[str, str] = {}
        monkeypatch.setenv("CUDA_HOME", str(self.toolkit))

    def edit(self) -> str:
        """One edit; what it was, for whoever has to find out why the test fails."""
        name: str = self.random.choice(
            ["write", "write", "write", "remove", "link", "flags", "variable", "order", "cudart"]
        )
        edit: Callable[[], object] = getattr(self, f"edit_{name}")
        return f"{name}: {edit()}"

    def header(self) -> Path:
        return Path(self.random.choice(self.places) / self.random.choice(NAMES))

    def edit_write(self) -> Path:
        header = self.header()
        value = self.random.randrange(1, 5)
        text, how = f"#define VALUE {value}\n", self.random.choice(["write", "replace", "link"])
        new = header.with_suffix(".new")
        if how == "write" and not header.is_symlink():
            header.write_text(text)
        elif how == "link":
            target = self.directory / "values" / f"{value}.h"
            target.parent.mkdir(exist_ok=True)
            if not target.exists():
                target.write_text(text)
            new.symlink_to(target)
            new.rename(header)
        else:
            new.write_text(text)
            new.rename(header)
        return header

    def edit_remove(self) -> Path:
        header = self.header()
        header.unlink(missing_ok=True)
        return header

    def edit_link(self) -> tuple[Path, Path]:
        link, target = self.random.choice(self.links), self.random.choice(self.places[1:4])
        new = link.with_suffix(".new")
        new.symlink_to(target)
        new.rename(link)
        return link, target

    def directories(self) -> list[Path]:
        return self.random.sample([*self.links, *self.places[1:4]], self.random.randrange(3))

    def edit_flags(self) -> list[str]:
        form = self.random.choice(["-I", "-isystem"])
        self.cuda_flags = [word for place in self.directories() for word in (form, str(place))]
        if self.random.random() < 0.3:
            self.cuda_flags.append(f"-DEXTRA={self.random.randrange(3)}")
        return self.cuda_flags

    def edit_variable(self) -> tuple[str, str]:
        name = self.random.choice(["CPATH", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"])
        places = self.directories()
        value = (
            ":".join(map(str, places))
            if name == "CPATH"
            else " ".join(f"-I{place}" for place in places)
        )
        self.variables[name] = value
        self.monkeypatch.setenv(name, value)
        return name, value

    def edit_order(self) -> list[Path]:
        self.include_dirs = self.directories()
        return self.include_dirs

    def edit_cudart(self) -> int:
        self.cudart = self.random.randrange(1, 4)
        write_toolkit(self.toolkit, self.cudart)
        return self.cudart

    def built(self, loader: Loader) -> int:
        """What the loader's module answers."""
        module = loader.get(
            "k", [self.source], include_dirs=self.include_dirs, cuda_flags=self.cuda_flags
        )
        return int(module.library.factor())

    def expected(self) -> tuple[int, object]:
        """What a module must answer, and all that it may depend on, by a compiler alone."""
        words = [
            *shlex.split(self.variables.get("NVCC_PREPEND_FLAGS", "")),
            *(f"-I{place}" for place in self.include_dirs),
            *self.cuda_flags,
            *shlex.split(self.variables.get("NVCC_APPEND_FLAGS", "")),
            f"-I{self.toolkit}/include",
            *("-isystem", f"{self.toolkit}/include/cccl"),
        ]
        done = subprocess.run(
            [
                *("g++", "-x", "c++", "-E", "-dD", "-fno-canonical-system-headers"),
                *(*words, str(self.source)),
            ],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "CPATH": self.variables.get("CPATH", "")},
        )
        values: list[int] = []
        now = extra = 0
        read: list[tuple[str, bytes]] = []
        for line in done.stdout.splitlines():
            word = line.split()
            if word[:2] == ["#define", "VALUE"]:
                now = int(word[2])
            elif word[:2] == ["#define", "EXTRA"]:
                extra = int(word[2])
            elif line.startswith("static int value_of_"):
                values.append(now)
            elif line.startswith("# 1 ") and str(self.directory) in line and "k.cu" not in line:
                path = Path(line.split('"')[1])
                read.append((self.named(path), path.read_bytes()))
        value = self.cudart * 7 + extra * 3 + sum(v * 10**i for i, v in enumerate(values))
        where = (self.include_dirs, self.cuda_flags, sorted(self.variables.items()))
        named = [word.removeprefix("-I") for word in words if "/" in word]
        named += self.variables.get("CPATH", "").split(":")
        same = [(a, b) for a in named for b in named if os.path.realpath(a) == os.path.realpath(b)]
        return value, repr((read, where, same, self.cudart))

    def named(self, path: Path) -> str:
        return str(path.relative_to(self.directory))


def run(directory: Path, seed: int, edits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(directory, seed, monkeypatch)
    cache = directory / "cache"
    loader = new_loader(cache)
    seen: set[object] = set()
    history: list[str] = []
    for number in range(edits):
        history.append(world.edit())
        value, state = world.expected()
        before = len(entries(cache))
        if number % 5 == 4:
            loader = new_loader(cache)  # as a new process
        assert world.built(loader) == value, "\n".join(history)
        for _ in range(6):
            assert world.built(loader) == value, "\n".join(history)
        if state in seen:
            assert len(entries(cache)) == before, "built for nothing:\n" + "\n".join(history)
        seen.add(state)
    assert len(entries(cache)) <= len(seen)


def test_random_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, 20, 12, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("RANDOM_EDITS", "50")) // 50))
def test_many_random_edits(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, seed, 50, monkeypatch)
