"""The rooms of jitquant.loader: no lower room needs an upper one."""

from __future__ import annotations

from pathlib import Path

from imports import arrows

import jitquant.loader

PACKAGE = Path(jitquant.loader.__file__).parent
#: From the bottom up; rooms of one rank know nothing of each other.
RANKS = (
    {"errors", "diagnostics", "settings", "report", "module", "units"},
    {"machine"},
    {"request"},
    {"store"},
    {"compile", "watch", "nvrtc"},
    {"warm"},
    {"core"},
    {"tools", "__init__"},
)


def graph() -> dict[str, set[str]]:
    """The modules of the loader that each of them imports, by their names within it."""

    def within(name: str) -> str:
        return name.removeprefix("jitquant.loader").lstrip(".") or "__init__"

    return {
        within(name): {within(other) for other in imported if other.startswith("jitquant.loader")}
        for name, imported in arrows(PACKAGE).items()
    }


def test_every_module_has_a_room_and_imports_only_from_below() -> None:
    rank = {room: index for index, rooms in enumerate(RANKS) for room in rooms}
    edges = graph()
    assert len(edges) > 40
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
