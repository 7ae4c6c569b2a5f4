"""``jitquant.warmup``: the loader's, also for the kernels of some dtypes alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

import torch

from jitquant import loader
from jitquant.loader import CudaModule
from jitquant.ops import ALL_OPS
from jitquant.ops.schema import PARTS, Part

__all__ = ["warmup"]


def warmup(
    *names: str,
    dtypes: Iterable[torch.dtype] | None = None,
    devices: Iterable[int] | None = None,
    manifest: str | os.PathLike[str] | None = None,
) -> dict[str, CudaModule]:
    """Build in parallel, load and make resident the named modules, or all if no names are given.

    Afterwards the first launch of a kernel can be captured in a CUDA graph.

    Args:
        names: kernels of the project (``"amax_gsa"``), or modules requested earlier.
        dtypes: those of the tensors that are quantized or multiplied, of bfloat16, float16 and
            float32. Kernels for others are not built, until an op is called with their dtype.
            ``None`` means all.
        devices: indices of the GPUs to load the kernels on; ``None`` means the current one.
        manifest: a file from ``jitquant record``, whose modules are added to ``names``.

    Returns:
        The modules by name, such as ``"amax_gsa"``, or with ``dtypes`` ``"amax_gsa_bf16"``; the
        second variant of a name in a manifest is ``"name (2)"``.

    Raises:
        ValueError: a name or dtype is unknown, or the file is not a manifest.
        FileNotFoundError: the manifest, or a source in it, does not exist.
        CaptureError: a CUDA graph is being captured.
        LoaderError: as `jitquant.get_cuda_module`, for the first module that failed.
    """
    parts: dict[str, list[Part | None]] = {}
    for dtype in () if dtypes is None else dtypes:
        if dtype not in PARTS:
            accepted = ", ".join(map(str, PARTS))
            raise ValueError(
                f"dtypes: expected one of {accepted}, got {dtype!r}. No other dtype has kernels"
            )
        for name, part in first_calls(dtype):
            parts.setdefault(name, []).append(part)
    enough = {name: [p for p in some if p is not None] for name, some in parts.items()}
    # A module is built as a whole if an op needs all of it.
    enough = {name: some for name, some in enough.items() if len(some) == len(parts[name])}
    return loader.warmup(*names, devices=devices, manifest=manifest, parts=enough)


def first_calls(dtype: torch.dtype) -> list[tuple[str, Part | None]]:
    """Module and part that first calls of ops with ``dtype`` wait for, each once; None: all."""
    # Rows of each kind that products have kernels for.
    inputs = [torch.empty(rows, 16, dtype=dtype, device="meta") for rows in (1, 64, 1024)]
    codes = torch.empty(1, 16, dtype=torch.uint8, device="meta")
    found: dict[tuple[str, Part | None], None] = {}
    for op in ALL_OPS:
        rotations = op.choices.get("rotate", ("none",))
        tables = (None, codes) if "cos" in op.names else (None,)
        for x, x_sf, rotate, cos in itertools.product(inputs, (None, codes), rotations, tables):
            first = codes.expand(x.shape) if op.names[0] in ("x_fp4", "data") else x
            arguments = {"x": first, op.names[0]: first, "x_sf": x_sf, "rotate": rotate}
            found.setdefault((op.module, op.part({**arguments, "cos": cos, "dtype": dtype})))
    return sorted(found, key=str)
