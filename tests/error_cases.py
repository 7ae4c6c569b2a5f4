"""Tables of calls with a bad argument, and of what their errors say.

A case is a call as a user writes it, and below it, indented, the error and the parts of its message
in their order, with `` ... `` between them. An indented line that names no error goes on with the
line above it. ``{on}`` stands for the device; ``#`` begins a comment.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Case = tuple[Callable[[], Any], type[Exception], list[str]]


def read_cases(path: Path, names: Mapping[str, Any], on: str) -> dict[str, Case]:
    """The cases of a table by their calls.

    Args:
        path: of the table.
        names: what the calls may use.
        on: the device, as messages have it.
    """
    pairs: list[list[str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            pairs.append([line])
        elif re.match(r" +\w+Error: ", line):
            pairs[-1].append(line.strip())
        else:
            pairs[-1][-1] += " " + line.strip()
    cases: dict[str, Case] = {}
    for call, said in pairs:
        assert call not in cases, f"{path.name} has {call} twice"
        error, _, parts = said.replace("{on}", on).partition(": ")
        code = compile(call, path.name, "eval")
        made = functools.partial(eval, code, dict(names))
        cases[call] = (made, getattr(builtins, error), parts.split(" ... "))
    return cases


def check_case(name: str, case: Case) -> None:
    """The call raises that error, and its one line has the parts in their order."""
    call, error, parts = case
    try:
        result = call()
    except Exception as raised:
        caught = raised
    else:
        pytest.fail(f"{name} is not refused; it gives {result!r}")
    message, got = str(caught), type(caught).__name__
    assert isinstance(caught, error), f"{name}: not {error.__name__} but {got}: {message}"
    at = 0
    for part in parts:
        found = message.find(part, at)
        assert found >= 0, f"{name}: the message lacks {part!r}; it is: {message}"
        at = found + len(part)
    assert "\n" not in message, f"{name}: the message has several lines: {message}"
