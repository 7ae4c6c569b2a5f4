"""Who imports whom: read from the source, so that lazy imports and TYPE_CHECKING count as well."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1] / "jitquant"
HARNESS = Path(__file__).parents[1] / "scripts" / "harness"


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache  # nothing changes the graph, and the source takes a second to parse
def arrows(root: Path = ROOT, package: Path = ROOT) -> dict[str, set[str]]:
    """The modules of ``package`` that each module under ``root`` imports, anywhere in it."""
    paths = {_name(path, package): path for path in package.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        if not path.is_relative_to(root):
            continue
        folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
        seen: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                seen.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = folder.split(".")[: len(folder.split(".")) - node.level + 1]
                base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
                names = (f"{base}.{alias.name}" for alias in node.names)
                seen.update(name if name in paths else base for name in names)
        found[name] = {module for module in seen if module in paths and module != name}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or by way of others; a list for each circle."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        reached, waiting = set(), list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                waiting.extend(graph.get(module, ()))
        reach[start] = reached
    together = {
        tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in graph if a in reach[a]
    }
    return [list(circle) for circle in sorted(together)]
