"""The rooms of jitquant.loader: no circle of imports, and no lower room that needs an upper one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import jitquant.loader

PACKAGE = Path(jitquant.loader.__file__).parent
#: From the bottom up; rooms of one rank know nothing of each other.
RANKS = (
    {"errors", "diagnostics", "settings", "report", "module"},
    {"machine"},
    {"request"},
    {"store"},
    {"compile", "watch", "nvrtc"},
    {"warm"},
    {"core"},
    {"tools", "__init__"},
)


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }


def imported_by(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a module imports anywhere, for types alone too."""
    package = ["jitquant", "loader", *name.split(".")[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*full, alias.name] for alias in node.names] + [full]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        for parts in names:
            if parts[:2] == ["jitquant", "loader"]:
                found = ".".join(parts[2:])
                if found in known or not found:
                    yield found or "__init__"


def graph() -> dict[str, set[str]]:
    known = modules()
    # The package of a module runs before it, whoever imports it: that is not its doing.
    return {name: set(imported_by(name, path, known)) - {name} for name, path in known.items()}


def test_every_module_has_a_room_and_imports_only_from_below() -> None:
    rank = {room: index for index, rooms in enumerate(RANKS) for room in rooms}
    edges = graph()
    assert {name.split(".")[0] for name in edges} == set(rank)
    upward = [
        f"{name} -> {other}"
        for name, others in edges.items()
        for other in others
        if (room := name.split(".")[0]) != (its := other.split(".")[0])
        and rank[room] <= rank[its]
        and rank[its] > 0  # at the bottom the circles alone count
    ]
    assert not upward


def test_no_circle_of_imports() -> None:
    edges = graph()
    assert len(edges) > 40
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())
