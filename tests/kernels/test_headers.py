"""The headers of ``kernels_cu/bindings/declared`` are those that the declarations give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.checks import Translated, Value
from harness.headers import BINDINGS, headers

from jitquant.ops import _checks


def test_headers_are_what_the_declarations_give() -> None:
    folder = BINDINGS / "declared"
    stored = {path: path.read_text() for path in folder.iterdir()}
    given = headers()
    wrong = sorted(p.name for p in given.keys() | stored.keys() if given.get(p) != stored.get(p))
    assert not wrong, f"{', '.join(wrong)}: run ./scripts/headers"


def _check_returned(dim: int) -> Any:
    return _checks.dimension(dim)  # type: ignore[func-returns-value]


def _value_of_a_branch(dim: int, cols: int | None) -> None:
    if cols is None:
        cols = 2 * dim
    if cols < dim:
        raise ValueError(f"cols: expected {dim} or more, got {cols}")


@pytest.mark.parametrize("check", [_check_returned, _value_of_a_branch])
def test_checks_that_cannot_be_translated_are_errors(check: Callable[..., Any]) -> None:
    known = {"dim": Value("dim", "int"), "cols": Value("cols", "int | None")}
    with pytest.raises(TypeError, match="expected what can be translated, got "):
        Translated().checks(check, known)
