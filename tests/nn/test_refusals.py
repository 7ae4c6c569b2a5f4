"""How refusals of `jitquant.nn` and `jitquant.integrations` are worded, read from their source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jitquant

ROOT = Path(jitquant.__file__).parent
FILES = sorted((*(ROOT / "nn").glob("*.py"), *(ROOT / "integrations").glob("*.py")))
# Of what a caller gives; other classes are for what the system, a library or a gradient refuses.
KINDS = ("TypeError", "ValueError", "FileNotFoundError", "FileExistsError")
RULE = re.compile(r"[^:]+: expected .+[ ,(]got ", re.DOTALL)


def message_of(call: ast.Call) -> str:
    """With ``{}`` in place of what is computed."""
    made = ""
    for node in ast.walk(call.args[0]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            made += node.value
        elif isinstance(node, ast.FormattedValue):
            made += "{}"
    return made


def refusals(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in KINDS and node.args:
            yield node.lineno, message_of(node)


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_they_say_what_was_expected_and_what_came(file: Path) -> None:
    odd = [f"{line}: {words}" for line, words in refusals(file) if not RULE.match(words)]
    assert not odd, f"expected 'argument: expected this, got that', got {odd}"


def test_there_are_some() -> None:
    assert sum(1 for file in FILES for _ in refusals(file)) > 80
