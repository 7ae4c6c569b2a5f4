"""``jitquant compile-commands``: every source with a command that a language server understands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from loader.toys import entries, nvcc_or_reason, write_plain, write_toy

from jitquant.loader.tools.compile_commands import merge

from .conftest import Run, at_most_bytes


@pytest.mark.parametrize("launcher", [None, "env"])
def test_the_command_of_a_cxx_source_compiles_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str | None
) -> None:
    if launcher is not None:
        monkeypatch.setenv("JITQUANT_NVCC_LAUNCHER", launcher)
    source = write_plain(tmp_path / "source")
    output = tmp_path / "compile_commands.json"
    done = run("compile-commands", source, "-o", output)
    assert done.code == 0, done.err
    (item,) = json.loads(output.read_text())
    assert item["file"] == str(source)
    assert "-fno-gnu-unique" not in item["arguments"]
    assert Path(item["arguments"][0]).name != launcher
    command = [*item["arguments"], "-fsyntax-only"]
    subprocess.run(command, cwd=item["directory"], check=True)
    assert not entries(tmp_path / "cache")


def test_the_command_of_a_kernel_is_one_of_clang(run: Run, tmp_path: Path) -> None:
    if (reason := nvcc_or_reason()) is not None:
        pytest.skip(reason)
    source = write_toy(tmp_path / "source")
    output = tmp_path / "compile_commands.json"
    assert run("compile-commands", source, "--arch", "90a,100a", "-o", output).code == 0
    kernel, binding = json.loads(output.read_text())
    assert binding["file"] == str(source.parent / "bindings" / "toy.cpp")
    words = kernel["arguments"]
    assert words[:4] == ["clang++", "-x", "cuda", "--cuda-gpu-arch=sm_90a"]
    assert words[-2:] == ["-c", str(source)]
    assert {"-std=c++17", "-DTORCH_EXTENSION_NAME=toy"} <= set(words)
    places = [Path(words[i + 1]) for i, word in enumerate(words) if word in ("-I", "-isystem")]
    assert any((place / "cuda_runtime.h").is_file() for place in places)
    assert any((place / "jitquant" / "device.cuh").is_file() for place in places)
    nvcc_alone = ("-gencode", "-Xcompiler", "--threads", "-lineinfo", "--resource-usage", "-ccbin")
    assert not [word for word in words if word.startswith(nvcc_alone)]


def test_a_database_that_cannot_be_written_is_as_before(tmp_path: Path) -> None:
    target, link = tmp_path / "build.json", tmp_path / "compile_commands.json"
    target.write_text("[]")
    link.symlink_to(target)
    commands = [{"file": f"/{number}.cpp"} for number in range(100)]
    with at_most_bytes(1000), pytest.raises(OSError, match=r"File too large: '.*/build\.json'"):
        merge(link, commands)
    assert target.read_text() == "[]"
    assert merge(link, commands) == 100
    assert link.is_symlink()


def test_commands_of_other_files_stay(run: Run, tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    output = tmp_path / "compile_commands.json"
    other = {"file": "/elsewhere/a.cpp", "directory": "/elsewhere", "command": "c++ a.cpp"}
    old = {"file": str(source), "directory": "/", "command": "false"}
    output.write_text(json.dumps([other, old]))
    done = run("compile-commands", source, "-o", output)
    assert done.out == f"1 commands written, 2 in {output}\n"
    assert json.loads(output.read_text())[0] == other
    assert "arguments" in json.loads(output.read_text())[1]
    output.write_text("{")
    done = run("compile-commands", source, "-o", output)
    assert done.code == 1
    assert f"{output} is not a compilation database" in done.err
    assert output.read_text() == "{"
