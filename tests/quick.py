"""Parameters of which the quick tests take some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_quick(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters: as many for the quick tests, the others for ``./scripts/test --all``."""
    return [
        pytest.param(value, marks=() if i < count else pytest.mark.slow)
        for i, value in enumerate(values)
    ]
