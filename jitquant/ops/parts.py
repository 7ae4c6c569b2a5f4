"""Parts of a compiled module, which a first call waits for instead of the whole."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """Some of a module's kernels, which a first call waits for: less work for the compilers.

    Attributes:
        name: what comes after the module's name.
        flags: nvcc's, which leave out the other kernels.
        of: the part whose kernels these are some of. It is used if it is built, and building it
            takes less time than building all of its parts.
    """

    name: str
    flags: tuple[str, ...]
    of: Part | None = None

    @functools.cache  # noqa: B019  # each call asks, and there are few
    def narrowed(self, name: str, *flags: str) -> Part:
        """Some of this part's kernels."""
        return Part(f"{self.name}_{name}", (*self.flags, *flags), self)

    @property
    def aligned(self) -> Part:
        """This part without the kernels for operands that are not aligned."""
        return self.narrowed("aligned", "-DJITQUANT_ALIGNED")

    def apart(self) -> Part:
        """The same, where wider ones are not to be built."""
        return self._replace(of=None)

    @property
    def wider(self) -> list[Part]:
        """The parts that have these kernels too, the widest last."""
        return [] if self.of is None else [self.of, *self.of.wider]


class Both(enum.IntEnum):
    """Scales of a matrix and of its transpose that have kernels of their own (quantize_both.cu)."""

    PLAIN = 0
    MXFP8 = 1
    ANY = 2


#: For `narrowed`: making this text takes longer than the rest of a call.
_OF_BOTH = tuple((scales.name.lower(), f"-DJITQUANT_BOTH={scales:d}") for scales in Both)


def part_for_both(x: Tensor, scales: Both) -> Part | None:
    """What a matrix and its transpose need of their module, if all blocks of 16 are whole."""
    of = PARTS.get(x.dtype)
    if of is None or x.shape[-1:].numel() % 16 != 0:
        return of
    return of.narrowed(*_OF_BOTH[scales])


#: Operands of products are aligned if their columns are a multiple of this and their memory is
#: aligned to 16 bytes, which is seen in the call (kernels_cu/gemm/product.cuh).
SEGMENT = 256
#: By the dtype that kernels are for; the flag is for `dispatch` of dispatch.cuh.
PARTS = {
    dtype: Part(name, (f"-DJITQUANT_DTYPE={number}",))
    for number, (dtype, name) in enumerate(
        {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.items()
    )
}


#: Tiles multiply columns that are such a multiple.
_OF_TILES = 64


def in_tiles(x: Tensor, cols: int) -> bool:
    """Whether products of many rows are by tiles there; on a device without kernels, may be."""
    return not cols % _OF_TILES and _has_tiles(x.device)


@functools.cache
def _has_tiles(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def part_for_residual(dtype: torch.dtype, residual: Tensor | None) -> Part | None:
    """What a norm needs of its module: the sources differ with and without a residual."""
    of = PARTS.get(dtype)
    if of is None:
        return None
    if residual is None:
        return of.narrowed("plain", "-DJITQUANT_RESIDUAL=0")
    return of.narrowed("residual", "-DJITQUANT_RESIDUAL=1")


#: Rows of at most this many columns are held by a thread block on every GPU, if they are aligned.
_HELD_COLS = 8192


def held(of: Part, x: Tensor) -> Part:
    """What a norm of ``x`` needs of a part: without kernels for long rows or unaligned ones."""
    cols = x.shape[-1:].numel()
    if not 0 < cols <= _HELD_COLS or cols % 16 or not x.shape[:-1].numel():
        return of
    return of.narrowed("held", "-DJITQUANT_HELD")


def part_for_rope(x: Tensor, cos: Tensor | None) -> Part | None:
    """What rows that are rotated need of their module: the sources differ with and without RoPE."""
    of = PARTS.get(x.dtype)
    if of is None:
        return None
    return of.narrowed("plain" if cos is None else "rope", f"-DJITQUANT_ROPE={cos is not None:d}")
