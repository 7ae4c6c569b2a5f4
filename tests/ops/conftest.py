"""A stand-in for compiled kernels, which needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jitquant.formats import as_bytes
from jitquant.ops import ALL_OPS
from jitquant.ops.schema import Compiled


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Direct functions that compute what the op does; the names of those that were called."""
    called: list[str] = []

    def function_of(op: Any) -> Callable[..., Any]:
        def function(alone: bool, *args: Any) -> Any:
            assert alone
            count = len(op.default._schema.arguments)
            results = op.dispatched(args[:count])
            called.append(op.name)
            if len(args) == count:
                return results
            for buffer, result in zip(args[count:], results, strict=True):
                if buffer is None:
                    assert result.numel() == 0
                    continue
                as_bytes(buffer).copy_(as_bytes(result))
            return None

        return function

    for op in ALL_OPS:
        monkeypatch.setattr(op, "_kept", Compiled(None, function_of(op), lambda: True))
    return called
