"""What calls of other libraries have in common; see `peers`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

Peer = Callable[..., Any]

EPS = 1e-6


def module(name: str) -> ModuleType:
    """A module of a library, imported when it is first asked for."""
    return importlib.import_module(name)


@functools.lru_cache(maxsize=1)
def inverse(factor: Tensor) -> Tensor:
    """The factor that dequantizes of one that encodes, and back; made before the graph is."""
    return 1.0 / factor
