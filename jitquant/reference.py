"""The definition of every op in plain PyTorch: specification, CPU backend and oracle in one."""

from __future__ import annotations

from jitquant.numerics import *  # noqa: F403
from jitquant.numerics import __all__ as __all__
