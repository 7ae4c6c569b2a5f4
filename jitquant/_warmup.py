"""``jitquant.warmup``: the loader's, also for the kernels of some dtypes alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import torch

from jitquant import loader
from jitquant.formats import CODES_PER_BYTE
from jitquant.loader import CudaModule
from jitquant.ops import ALL_OPS
from jitquant.ops.parts import PARTS, SEGMENT, Part

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
        names: modules of the project (``"amax_gsa"``), or modules requested earlier. These are
            not the names of functions, of which some use several modules.
        dtypes: those of the tensors that are quantized or multiplied, of bfloat16, float16 and
            float32. Kernels for others are not built, until an op is called with their dtype.
            ``None`` means all.
        devices: indices of the GPUs to load the kernels on; ``None`` means the current one.
        manifest: a file from ``jitquant record``, whose modules are added to ``names``.

    Returns:
        The modules by name, such as ``"amax_gsa"``, or with ``dtypes`` ``"amax_gsa_bf16"``; the
        second variant of a name in a manifest is ``"name (2)"``.

    Raises:
        TypeError: ``dtypes`` is one dtype.
        ValueError: a name or dtype is unknown, or the file is not a manifest.
        FileNotFoundError: the manifest, or a source in it, does not exist.
        CaptureError: a CUDA graph is being captured.
        LoaderError: as `jitquant.get_cuda_module`, for the first module that failed.
    """
    parts: dict[str, list[Part | None]] = {}
    if isinstance(dtypes, torch.dtype):
        raise TypeError(f"dtypes: expected a list, got {dtypes}. Pass dtypes=[{dtypes}]")
    for dtype in () if dtypes is None else dtypes:
        if dtype not in PARTS:
            accepted = ", ".join(map(str, PARTS))
            raise ValueError(
                f"dtypes: expected one of {accepted}, got {dtype!r}. No other dtype has kernels"
            )
        for name, part in first_calls(dtype):
            # One part that has several takes less time than they do.
            parts.setdefault(name, []).append(part.wider[-1] if part and part.wider else part)
    # A module is built as a whole if an op needs all of it.
    enough = {
        name: [(part.name, part.flags) for part in dict.fromkeys(some) if part is not None]
        for name, some in parts.items()
        if None not in some
    }
    return loader.warmup(*names, devices=devices, manifest=manifest, parts=enough)


#: Arguments whose names tell which part of a module a call needs.
_TELLING = ("rotate", "granularity", "scale_format", "recipe", "activation", "select", "rounding")


def first_calls(dtype: torch.dtype) -> list[tuple[str, Part | None]]:
    """Module and part that first calls of ops with ``dtype`` wait for, each once; None: all."""
    # Rows of each kind that products have kernels for.
    counts = (1, 16, 32, 64, 96, 128, 1024)
    inputs = [torch.empty(rows, SEGMENT, dtype=dtype, device="meta") for rows in counts]
    few, many = (
        torch.empty(experts, 16, SEGMENT // CODES_PER_BYTE, dtype=torch.uint8, device="meta")
        for experts in (8, 256)
    )
    codes = torch.empty(1, SEGMENT, dtype=torch.uint8, device="meta")
    found: dict[tuple[str, str], tuple[str, Part | None]] = {}
    for op in ALL_OPS:
        varied: dict[str, tuple[Any, ...]] = {n: op.choices.get(n, ("",)) for n in _TELLING}
        varied |= {name: (None, codes) for name in ("x_sf", "cos", "residual") if name in op.names}
        varied |= {name: (few, many) for name in ("w_fp4", "gate_up_fp4") if name in op.names}
        for x, values in itertools.product(inputs, itertools.product(*varied.values())):
            first = codes.expand(x.shape) if op.names[0] in ("x_fp4", "data") else x
            arguments: dict[str, Any] = {
                "x": first,
                op.names[0]: first,
                "dtype": dtype,
                "gsa_value": None,
                "down_fp4": few,
                "topk_ids": codes[:, :8],
                **dict.fromkeys(("group_size", "block_rows"), 128),
                **dict.fromkeys(("fp8_min", "fp8_max")),
            }
            arguments |= {"inv_rms": codes, **dict(zip(varied, values, strict=True))}
            part = op.part(arguments)
            found.setdefault((op.module, part.name if part else ""), (op.module, part))
    return [found[label] for label in sorted(found)]
