"""The definition of every op as a function: specification, CPU backend and oracle in one.

Each has the arguments of its op in ``torch.ops.jitquant`` and returns a tuple. What they are made
of, in plain PyTorch, is in ``jitquant.numerics``.
"""

from __future__ import annotations

from typing import Any

from jitquant.formats import swizzled_shape
from jitquant.numerics.fp8 import decode_e8m0, encode_e5m2, encode_int8
from jitquant.numerics.layout import swizzle_128x4, unswizzle_128x4
from jitquant.numerics.nvfp4 import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from jitquant.numerics.sources import deinterleave, hyper_connection_sum, rmsnorm, swiglu
from jitquant.ops import ALL_OPS

_PARTS = (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    deinterleave,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    encode_int8,
    hyper_connection_sum,
    pack_e2m1,
    rmsnorm,
    swiglu,
    swizzle_128x4,
    swizzled_shape,
    unpack_e2m1,
    unswizzle_128x4,
)
_OPS = {op.name: op.reference for op in ALL_OPS}

__all__ = sorted([part.__name__ for part in _PARTS] + list(_OPS))


def __getattr__(name: str) -> Any:
    if name in _OPS:
        return _OPS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
