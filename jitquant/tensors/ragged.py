"""`QuantizedRaggedTensor`: many tensors in one buffer, in FP8 or NVFP4.

The ops return it, consumers take it, and ``out=`` takes its buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jitquant.formats import (
    CODES_PER_BYTE,
    E8M0_DTYPE,
    FP4_DTYPE,
    FP8_DTYPES,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    RAGGED_FORMATS,
    RECIPES,
    SCALE_DTYPE,
    ceil_div,
    empty,
    one_of,
)
from jitquant.tensors._parts import Parts, register


@dataclass(eq=False, repr=False)
class QuantizedRaggedTensor(Parts):
    """Many tensors in one buffer, each with its own scale, or in MXFP8.

    Attributes:
        data: elements, of the buffer's shape; "nvfp4": ``float4_e2m1fn_x2``
            (ceil(numel / 16) * 8,), blocks of 16 neighbors of the flattened buffer.
        offsets: int64 (G + 1,), where segments begin, in rows of the buffer, and where the last one
            ends; in elements of a buffer of one dimension.
        scale_inv: fp32 (G,), the factor that dequantizes each segment; "nvfp4": its gsa; "mxfp8":
            None.
        amax: fp32 (G,), the largest magnitude of each segment; "mxfp8": None.
        sizes: int64 (G,), their rows; None: each ends where the next begins.
        block_scales: "nvfp4": ``float8_e4m3fn`` (ceil(numel / 16),); "mxfp8": ``float8_e8m0fnu``
            (ceil(numel / 32),); None: "fp8_tensor".
        dbias: fp32 (G, N), the sum over the rows of each segment, from `quantize_ragged_grad`.
        format: "fp8_tensor", "nvfp4" or "mxfp8".
        shape: of the buffer that was quantized.
        recipe: "te", "vllm" or "te_flush".

    It is a registered pytree, and ``torch.load`` reads saved ones if jitquant is imported. The
    constructor checks nothing; `validate` does. Equality is identity; compare the parts.
    """

    data: Tensor
    offsets: Tensor
    scale_inv: Tensor | None = None
    amax: Tensor | None = None
    sizes: Tensor | None = None
    block_scales: Tensor | None = None
    dbias: Tensor | None = None
    format: str = "fp8_tensor"
    shape: tuple[int, ...] = ()
    recipe: str = "te"

    _TENSORS: ClassVar[tuple[str, ...]] = (
        "data",
        "scale_inv",
        "amax",
        "offsets",
        "sizes",
        "block_scales",
        "dbias",
    )

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...] | list[int],
        offsets: Tensor,
        *,
        sizes: Tensor | None = None,
        format: str = "fp8_tensor",
        dtype: torch.dtype = torch.float8_e4m3fn,
        dbias: bool = False,
        recipe: str = "te",
    ) -> QuantizedRaggedTensor:
        """Uninitialized buffers on the device of ``offsets``, for ``out=``.

        Args:
            shape: of the buffer that will be quantized.
            offsets: int64 (G + 1,); not copied.
            sizes: int64 (G,) or None; not copied.
            format: "fp8_tensor", "nvfp4" or "mxfp8".
            dtype: of FP8 elements: ``float8_e4m3fn`` or ``float8_e5m2``.
            dbias: whether there is a buffer for it; not with one dimension.
            recipe: "te", "vllm" or "te_flush"; overwritten by the op that fills the buffers.

        Raises:
            ValueError, TypeError: an argument is not one of these.
        """
        shape = tuple(shape)
        one_of("format", format, RAGGED_FORMATS)
        one_of("recipe", recipe, RECIPES)
        if not shape:
            raise ValueError("shape: expected a shape of one dimension or more, got ()")
        if dbias and len(shape) == 1:
            raise ValueError(
                f"shape: expected (rows, N) with dbias, got {shape}. Bias gradients are of rows"
            )
        if dtype not in FP8_DTYPES:
            raise TypeError(
                f"dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}"
            )
        _check_bounds("", offsets, sizes)
        device, count = offsets.device, offsets.shape[0] - 1
        packed, elements, scales = _parts_of(format, shape)
        floats = None if format == "mxfp8" else (count,)
        return cls(
            empty(elements, FP4_DTYPE if packed else dtype, device),
            offsets,
            None if floats is None else torch.empty(floats, dtype=torch.float32, device=device),
            None if floats is None else torch.empty(floats, dtype=torch.float32, device=device),
            sizes,
            None if scales is None else torch.empty(scales[0], dtype=scales[1], device=device),
            torch.empty((count, shape[-1]), dtype=torch.float32, device=device) if dbias else None,
            format,
            shape,
            recipe,
        )

    @property
    def num_segments(self) -> int:
        """G."""
        return self.offsets.shape[0] - 1

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The buffer's values, rounded once to ``dtype``, zero outside of the segments.

        Args:
            dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
            out: contiguous tensor of the buffer's shape to write to.

        Raises:
            TypeError, ValueError: see `jitquant.dequantize_ragged`.
        """
        return self._dequantize(dtype=dtype, out=out)

    def validate(self, name: str = "q") -> None:
        """Checks that the parts fit together: dtypes, shapes, devices; not what offsets hold.

        Args:
            name: what an error calls these tensors.

        Raises:
            TypeError: a part is not a tensor or has another dtype.
            ValueError: a shape, device, format or recipe is invalid, or block_scales are missing
                or given with a format that has none.
        """
        one_of(f"{name}.format", self.format, RAGGED_FORMATS)
        one_of(f"{name}.recipe", self.recipe, RECIPES)
        if len(self.shape) == 0:
            raise ValueError(f"{name}.shape: expected a shape of one dimension or more, got ()")
        _check_bounds(f"{name}.", self.offsets, self.sizes)
        packed, elements, scales = _parts_of(self.format, self.shape)
        absent = {"scale_inv", "amax"} if self.format == "mxfp8" else set()
        if (self.block_scales is not None) != (scales is not None):
            raise ValueError(
                f"{name}.block_scales: expected {'None' if scales is None else 'a tensor'} with "
                f"format {self.format!r}, got {'a tensor' if scales is None else 'None'}"
            )
        count = self.num_segments
        floats = (torch.float32,)
        blocks, scale_dtype = scales or ((0,), SCALE_DTYPE)
        for field, shape, dtypes in (
            ("data", elements, (FP4_DTYPE,) if packed else FP8_DTYPES),
            ("scale_inv", (count,), floats),
            ("amax", (count,), floats),
            ("block_scales", blocks, (scale_dtype,)),
            ("dbias", (count, self.shape[-1]), floats),
        ):
            part = getattr(self, field)
            if part is None and field in ("block_scales", "dbias", *absent):
                continue
            if field in absent:
                raise ValueError(
                    f"{name}.{field}: expected None with format {self.format!r}, got a tensor"
                )
            if not isinstance(part, Tensor) or part.dtype not in dtypes:
                given = getattr(part, "dtype", type(part).__name__)
                raise TypeError(
                    f"{name}.{field}: expected a tensor of {', '.join(map(str, dtypes))} with "
                    f"format {self.format!r}, got {given}"
                )
            if part.device != self.offsets.device:
                raise ValueError(
                    f"{name}.{field}: expected a tensor on {self.offsets.device}, as "
                    f"{name}.offsets is, got one on {part.device}. Move all of them with "
                    ".to(device)"
                )
            if tuple(part.shape) != shape:
                raise ValueError(
                    f"{name}.{field}: expected shape {shape} for {count} segments in a buffer of "
                    f"shape {tuple(self.shape)} and format {self.format!r}, got shape "
                    f"{tuple(part.shape)}"
                )

    def __len__(self) -> int:
        return self.num_segments

    def __repr__(self) -> str:
        return (
            f"QuantizedRaggedTensor({self.num_segments} segments, shape={self.shape}, "
            f"{self.format}, recipe={self.recipe!r}, "
            f"dbias={'no' if self.dbias is None else 'yes'}, {self.nbytes} bytes, "
            f"device={str(self.device)!r})"
        )


def _parts_of(
    format: str, shape: tuple[int, ...]
) -> tuple[bool, tuple[int, ...], tuple[tuple[int, ...], torch.dtype] | None]:
    """Whether elements are packed, their shape, and shape and dtype of the scales of blocks."""
    numel = math.prod(shape)
    if format == "nvfp4":
        blocks = ceil_div(numel, NVFP4_BLOCK)
        return True, (blocks * (NVFP4_BLOCK // CODES_PER_BYTE),), ((blocks,), SCALE_DTYPE)
    if format == "mxfp8":
        return False, tuple(shape), ((ceil_div(numel, MXFP8_BLOCK),), E8M0_DTYPE)
    return False, tuple(shape), None


def _check_bounds(prefix: str, offsets: Tensor, sizes: Tensor | None) -> None:
    """Raises where these are not the offsets and sizes of segments."""
    for name, t, least in (("offsets", offsets, 1), ("sizes", sizes, 0)):
        if t is None and name == "sizes":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{prefix}{name}: expected a tensor of int64, got {type(t).__name__}. Make it with "
                f"torch.tensor({name})"
            )
        if t.dtype != torch.int64:
            raise TypeError(
                f"{prefix}{name}: expected int64, got {t.dtype}. Convert it with {name}.long()"
            )
        if t.dim() != 1 or t.shape[0] < least:
            raise ValueError(
                f"{prefix}{name}: expected shape {'(G + 1,)' if least else '(G,)'}, got shape "
                f"{tuple(t.shape)}"
            )
    if sizes is None:
        return
    if sizes.device != offsets.device:
        raise ValueError(
            f"{prefix}sizes: expected a tensor on {offsets.device}, as {prefix}offsets is, got one "
            f"on {sizes.device}. Move one of them with .to(device)"
        )
    if sizes.shape[0] != offsets.shape[0] - 1:
        raise ValueError(
            f"{prefix}sizes: expected shape ({offsets.shape[0] - 1},), one element for each "
            f"segment of offsets, got shape {tuple(sizes.shape)}"
        )


register(QuantizedRaggedTensor)
