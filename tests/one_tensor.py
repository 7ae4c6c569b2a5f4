"""Public functions that need a tensor and nothing else.

Tables that have a call of each public function take these from here, so that a new function is in
all of them. A table's own entry, with more arguments, goes before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jitquant


def functions(returned: str | None = None) -> dict[str, Callable[..., Any]]:
    """By name those whose first argument is a tensor, and whose others have defaults.

    Args:
        returned: if given, the annotation of what they return.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in jitquant.ops.__all__:
        function = getattr(jitquant.ops, name)
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            first, *others = signature.parameters.values()
            alone = first.annotation == "Tensor" and all(p.default is not p.empty for p in others)
            if alone and returned in (None, signature.return_annotation):
                found[name] = function
    return found
