"""``jitquant stats``, ``sass`` and ``ptx``."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitquant.loader import ToolNotFoundError
from jitquant.loader.tools.inspect import find_tool

from .conftest import Built, Run


def test_stats(run: Run, cached: Built) -> None:
    found = run("stats", cached.source, "--json").json
    assert [(k["module"], k["name"], k["arch"]) for k in found] == [
        ("toy", "multiply(float*, int)", "100a"),
        ("toy", "multiply(float*, int)", "90a"),
    ]
    for kernel in found:
        assert kernel["registers"] > 0
        assert kernel["spill_stores"] == kernel["stack"] == 0
        assert kernel["occupancy"]["256"] == {"blocks": 8, "occupancy": 1.0, "limit": "warps"}
    shown = run("stats", "toy", "--threads", "1024", "--shared", "150000")
    assert "occupancy at 1024" in shown.out
    assert "50%" in shown.out
    assert "shared memory" in shown.out
    assert run("stats", "toy", "--threads", "0").code == 2


def test_stats_without_names_builds_nothing(run: Run, cached: Built) -> None:
    shown = run("stats")
    assert shown.code == 0
    assert "not built: amax, amax_gsa" in shown.out


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sass", "ptx"])
def test_code(run: Run, cached: Built, command: str) -> None:
    if command == "sass":
        try:
            find_tool("cuobjdump")
            find_tool("nvdisasm")
        except ToolNotFoundError as error:
            pytest.skip(str(error))
    shown = run(command, cached.source, "--kernel", "multiply")
    assert shown.out.count("== multiply(float*, int)") == 2
    assert "x[i] *= FACTOR;" in shown.out
    both = run(command, "toy", "--json").json
    assert sorted(code["arch"] for code in both) == ["100a", "90a"]
    assert {Path(line["file"]).name for line in both[0]["lines"]} >= {"toy.cu"}
    missing = run(command, "toy", "--kernel", "divide")
    assert missing.code == 1
    assert "no kernel with 'divide' in its name" in missing.err
    assert "multiply(float*, int)" in missing.err
