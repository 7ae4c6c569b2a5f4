"""The floors of the package: each imports only what stands below it, and none in a circle."""

from __future__ import annotations

from pathlib import Path

import pytest
from imports import HARNESS, ROOT, arrows, circles

FLOORS = {
    "formats": (),
    "numerics": ("formats",),
    "tensors": ("formats",),
    "loader": ("_command",),
    "ops": ("formats", "numerics", "tensors", "loader"),
    "nn": ("formats", "numerics", "tensors", "loader", "ops"),
    "integrations": ("formats", "loader", "ops", "nn"),
}
"""What each package or module may import of the others."""


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_lazy_and_type_checking_imports_are_arrows() -> None:
    graph = arrows()
    assert "jitquant.loader" in graph["jitquant.ops.schema"]  # in a method
    assert "jitquant.loader" in graph["jitquant"]  # under TYPE_CHECKING


@pytest.mark.parametrize("package", [ROOT, HARNESS], ids=lambda path: path.name)
def test_nothing_imports_in_a_circle(package: Path) -> None:
    graph = arrows(package, package)
    assert len(graph) > 20
    assert any(graph.values())
    assert circles(graph) == []


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_what_stands_below(floor: str) -> None:
    allowed = {floor, *FLOORS[floor]}
    for module, imported in arrows().items():
        if module.split(".")[1:2] == [floor]:
            assert {name.split(".")[1] for name in imported if "." in name} <= allowed, module
            assert "jitquant" not in imported, module
