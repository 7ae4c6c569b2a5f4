"""SASS and PTX with source lines, and where the tools for it are looked for."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from jitquant.loader import CompileError, ToolNotFoundError
from jitquant.loader.request.plan import Request
from jitquant.loader.tools.inspect import (
    Code,
    CodeLine,
    find_tool,
    ptx,
    sass,
    with_sources,
)

from .conftest import Toy
from .toys import entries, new_loader

LINE = "if (i < n) x[i] *= FACTOR;"


@pytest.fixture(scope="session")
def tools() -> None:
    try:
        find_tool("cuobjdump")
        find_tool("nvdisasm")
    except ToolNotFoundError as error:
        pytest.skip(str(error))


def shown(code: Code) -> str:
    return "\n".join(text for text, _ in with_sources(code, lambda path: Path(path).name))


def number_of(toy: Toy) -> int:
    return toy.source.read_text().splitlines().index(f"  {LINE}") + 1


def test_sass_has_the_instructions_and_the_lines_they_come_from(toy: Toy, tools: None) -> None:
    (code,) = sass(new_loader(toy.cache), Request("toy", (toy.source,)))
    assert (code.name, code.arch) == ("multiply(float*, int)", "90a")
    text = shown(code)
    assert f"// toy.cu:{number_of(toy)}  {LINE}" in text
    after = text[text.index(LINE) :]
    assert "FMUL" in after
    assert "EXIT" in text
    assert ".section" not in text
    assert {line.file for line in code.lines} == {str(toy.source)}


def test_sass_of_a_build_from_elsewhere_has_the_lines_of_the_files_here(
    toy: Toy, tools: None, tmp_path: Path
) -> None:
    source, cache = toy.copy(tmp_path / "copy")
    away = toy.source.with_suffix(".away")
    toy.source.rename(away)
    try:
        (code,) = sass(new_loader(cache), Request("toy", (source,)))
    finally:
        away.rename(toy.source)
    assert f"// toy.cu:{number_of(toy)}  {LINE}" in shown(code)
    assert {line.file for line in code.lines} == {str(source)}


def test_ptx_has_the_instructions_and_the_lines_they_come_from(toy: Toy) -> None:
    loader = new_loader(toy.cache)
    both = ptx(loader.plan_of(Request("toy", (toy.source,), archs=("80+ptx", "90a"))))
    assert [(code.name, code.arch) for code in both] == [
        ("multiply(float*, int)", "80"),
        ("multiply(float*, int)", "90a"),
    ]
    text = shown(both[1])
    assert f"// toy.cu:{number_of(toy)}  {LINE}" in text
    assert "mul.f32" in text[text.index(LINE) :]
    assert text.rstrip().endswith("}")
    assert len(entries(toy.cache)) == 1  # nothing is built for it


def test_ptx_of_what_does_not_compile_is_a_compile_error(nvcc: None, tmp_path: Path) -> None:
    source = tmp_path / "bad.cu"
    source.write_text("__global__ void k() { nonsense }\n")
    with pytest.raises(CompileError, match=r"(?s)building 'bad' failed: nvcc bad.cu.*nonsense"):
        ptx(new_loader(tmp_path / "cache").plan_of(Request("bad", (source,))))


def test_source_lines_stand_before_the_code_of_each_and_once(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text("one\n  two\n")
    lines = [
        CodeLine("a", "", 0),
        CodeLine("b", str(source), 2),
        CodeLine("c", str(source), 2),
        CodeLine("d", str(source), 9),
        CodeLine("e", "/nowhere.cuh", 1),
    ]
    assert list(with_sources(Code("k", "k", "90a", lines), os.path.basename)) == [
        ("a", False),
        ("// k.cu:2  two", True),
        ("b", False),
        ("c", False),
        ("// k.cu:9", True),
        ("d", False),
        ("// nowhere.cuh:1", True),
        ("e", False),
    ]


def test_tools_are_looked_for_in_order(tmp_path: Path) -> None:
    def place(name: str) -> str:
        path = tmp_path / name / "bin" / "cuobjdump"
        path.parent.mkdir(parents=True)
        path.write_text("")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    home, other = place("home"), place("path")
    assert find_tool("cuobjdump", {"CUDA_HOME": str(tmp_path / "home")}) == home
    assert find_tool(
        "cuobjdump", {"CUDA_HOME": "/nowhere", "CUDA_PATH": str(tmp_path / "path")}
    ) == (other)
    with pytest.raises(ToolNotFoundError, match="extra 'inspect'"):
        find_tool("no-such-tool", {"PATH": str(tmp_path)})
