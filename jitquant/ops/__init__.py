"""The ops: ``torch.ops.jitquant`` and the public functions over them.

Importing this registers the ops; it compiles nothing and touches no GPU. A module's ``__all__`` has
its public functions, which are those of the package too.
"""

from __future__ import annotations

from jitquant.ops import (
    _sharded,
    blockwise,
    experts,
    fp8,
    linear,
    mxfp8,
    nvfp4,
    nvfp4_dequantize,
    nvfp4_fused,
    ragged,
    recipes,
)
from jitquant.ops.blockwise import *
from jitquant.ops.experts import *
from jitquant.ops.fp8 import *
from jitquant.ops.linear import *
from jitquant.ops.linear import Composite
from jitquant.ops.mxfp8 import *
from jitquant.ops.nvfp4 import *
from jitquant.ops.nvfp4_dequantize import *
from jitquant.ops.nvfp4_fused import *
from jitquant.ops.ragged import *
from jitquant.ops.recipes import *
from jitquant.ops.schema import Op as Op

_MODULES = (
    _sharded,
    nvfp4,
    nvfp4_dequantize,
    nvfp4_fused,
    fp8,
    blockwise,
    mxfp8,
    ragged,
    linear,
    recipes,
    experts,
)

__all__: list[str] = []
__all__ += blockwise.__all__
__all__ += experts.__all__
__all__ += fp8.__all__
__all__ += linear.__all__
__all__ += mxfp8.__all__
__all__ += nvfp4.__all__
__all__ += nvfp4_dequantize.__all__
__all__ += nvfp4_fused.__all__
__all__ += ragged.__all__
__all__ += recipes.__all__

ALL_OPS: tuple[Op, ...] = tuple(op for module in _MODULES for op in module.OPS)
"""Every declared op."""

KERNEL_OPS: tuple[Op, ...] = tuple(op for op in ALL_OPS if not isinstance(op, Composite))
"""Those with a function of their own in a compiled module."""
