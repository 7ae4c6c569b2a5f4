"""`QuantizedTensor`: a tensor in FP8, INT8 or MXFP8.

The ops return it, consumers take it, and ``out=`` takes its buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from jitquant.formats import (
    BLOCK_SCALE_LAYOUTS,
    BLOCK_SHAPES,
    E8M0_DTYPE,
    FP8_DTYPES,
    GROUP_RECIPES,
    GROUP_SCALE_LAYOUTS,
    GROUP_SIZES,
    MXFP8_BLOCK,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
    ceil_to,
    one_of,
    scales_shape,
)
from jitquant.tensors._parts import Parts, register, slice_bounds

FORMATS: tuple[str, ...] = (
    "fp8_tensor",
    "int8_tensor",
    "fp8_row",
    "int8_row",
    "fp8_group",
    "int8_group",
    "fp8_block",
    "int8_block",
    "mxfp8",
)
"""What a `QuantizedTensor` can be: the elements and what shares a scale."""


@dataclass(eq=False, repr=False)
class QuantizedTensor(Parts):
    """A tensor in FP8, INT8 or MXFP8: elements, and the factors that dequantize them.

    The value of an element is ``data * scale_inv``, with the scale_inv that it shares with others.

    Attributes:
        data: (..., N) ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``; its shape is the logical one.
        stored_scales: the scales in memory order, contiguous, padding included; see
            `scale_inv`.
        amax: fp32, the largest magnitude of the tensor (1,) or of each row (..., 1), NaN if it
            contains one; None if it was not computed.
        inv_rms: fp32 (rows,), from functions with a norm.
        format: "fp8_tensor", "fp8_row", "fp8_group", "fp8_block", the same of "int8", or "mxfp8".
        block: rows and columns that share a scale; 0 is all of them.
        scale_format: "float32", "ue8m0", "ue8m0_packed", or "e8m0" for MXFP8.
        layout: of the scales: "row", "column", "column_tma", "row_padded", "linear" or
            "swizzled_128x4".
        recipe: "te", "deepgemm" or "vllm": the arithmetic it was quantized with.

    It is a registered pytree: ``torch.compile`` and ``torch.export`` take and return it.
    ``torch.load`` reads saved ones if jitquant is imported. Neither the constructor nor
    ``torch.load`` checks anything; `validate` does. Equality is identity; compare the parts.
    """

    data: Tensor
    stored_scales: Tensor
    amax: Tensor | None = None
    inv_rms: Tensor | None = None
    format: str = "fp8_tensor"
    block: tuple[int, int] = (0, 0)
    scale_format: str = "float32"
    layout: str = "row"
    recipe: str = "te"

    _TENSORS: ClassVar[tuple[str, ...]] = ("data", "stored_scales", "amax", "inv_rms")

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...] | list[int],
        *,
        format: str = "fp8_tensor",
        dtype: torch.dtype | None = None,
        group_size: int = 128,
        block: tuple[int, int] = (128, 128),
        scale_format: str = "float32",
        layout: str | None = None,
        recipe: str = "te",
        amax: bool | None = None,
        inv_rms: bool = False,
        device: torch.device | str | None = None,
    ) -> QuantizedTensor:
        """Uninitialized buffers for a tensor of a logical shape, for ``out=``.

        Args:
            shape: (..., N) of the tensor that is quantized: the input, or the result of a norm or
                activation.
            format: see the class.
            dtype: of the elements; default ``float8_e4m3fn``, or ``int8`` for the INT8 formats.
            group_size: of "fp8_group" and "int8_group".
            block: of "fp8_block" and "int8_block".
            scale_format: of groups and blocks; always "e8m0" for MXFP8.
            layout: of the scales; default "row", or "linear" for MXFP8.
            recipe: of groups and blocks; overwritten by the op that fills the buffers.
            amax: whether there is a buffer for it; default: with a scale for the tensor or a row.
            inv_rms: whether there is a buffer for it.
            device: default is PyTorch's.

        Raises:
            ValueError, TypeError: an argument is not one of these.
        """
        shape = tuple(shape)
        one_of("format", format, FORMATS)
        integer = format.startswith("int8")
        if dtype is None:
            dtype = torch.int8 if integer else torch.float8_e4m3fn
        if dtype not in ((torch.int8,) if integer else FP8_DTYPES):
            raise TypeError(
                "dtype: expected "
                f"{'torch.int8' if integer else 'torch.float8_e4m3fn or torch.float8_e5m2'} with "
                f"format {format!r}, got {dtype}"
            )
        if layout is None:
            layout = "linear" if format == "mxfp8" else "row"
        kind = format.partition("_")[2]
        tiles = {
            "tensor": (0, 0),
            "row": (1, 0),
            "group": (1, group_size),
            "block": tuple(block),
        }.get(kind, (1, MXFP8_BLOCK))
        q = cls(
            torch.empty(0, dtype=dtype, device="meta"),
            torch.empty(0, device="meta"),
            None,
            None,
            format,
            tiles,  # type: ignore[arg-type]
            "e8m0" if format == "mxfp8" else scale_format,
            layout,
            recipe,
        )
        q._check_description("")
        if len(shape) < (2 if kind == "block" else 1) or shape[-1] == 0:
            wanted = "(..., N, K) with K" if kind == "block" else "(..., N) with N"
            raise ValueError(f"shape: expected {wanted} >= 1, got {shape}")
        stored, scale_dtype = q._scales_of(shape)
        q.data = torch.empty(shape, dtype=dtype, device=device)
        q.stored_scales = torch.empty(stored, dtype=scale_dtype, device=device)
        if amax if amax is not None else kind in ("tensor", "row"):
            q.amax = torch.empty(q._amax_shape(shape), dtype=torch.float32, device=device)
        if inv_rms:
            rows = math.prod(shape[:-1])
            q.inv_rms = torch.empty(rows, dtype=torch.float32, device=device)
        return q

    def _scales_of(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape in memory and dtype of the scales of a tensor of this logical shape."""
        dtype = {"e8m0": E8M0_DTYPE, "ue8m0_packed": torch.int32}.get(
            self.scale_format, torch.float32
        )
        rows, cols = self.block
        if rows == 0:
            return (1,), dtype
        groups = 1 if cols == 0 else ceil_to(shape[-1], cols) // cols
        leading = shape[:-1]
        if rows > 1:
            leading = (*shape[:-2], ceil_to(shape[-2], rows) // rows)
        return scales_shape(leading, groups, self.scale_format, self.layout), dtype

    def _amax_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 1) if self.block == (1, 0) else (1,)

    @property
    def scale_inv(self) -> Tensor:
        """The factors that dequantize, as views of `stored_scales` for consumers.

        One scale (1,); one for each row (..., 1); groups (..., ceil(N / G)); blocks
        (..., ceil(N / rows), ceil(K / columns)); ``mxfp8`` (..., ceil(N / 32)) as
        ``float8_e8m0fnu``. Layout "column" has strides (1, rows), "column_tma"
        (1, rows up to 4); "row_padded" has its last size up to a multiple of 4, and
        "swizzled_128x4" is (rows up to 128, blocks up to 4), both with the padding.
        "ue8m0_packed" has four exponents in an int32, so a fourth of the groups, rounded up.
        """
        stored = self.stored_scales
        if self.layout in ("column", "column_tma"):
            shape = self.data.shape
            rows = shape[-2] if len(shape) > 1 else 1
            view = stored.transpose(-1, -2)[..., :rows, :]
            return view if len(shape) > 1 else view[0]
        return stored

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: that of the tensor that was quantized."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.data.dtype

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The values, ``data * scale_inv`` in fp32 and rounded once to ``dtype``.

        Args:
            dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
            out: contiguous tensor of the logical shape to write to.

        Raises:
            TypeError, ValueError: see `jitquant.dequantize`.
        """
        return self._dequantize(dtype=dtype, out=out)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> QuantizedTensor:
        """Rows ``i:j`` of the first dimension, as views of the same memory; amax is left out.

        Raises:
            TypeError: ``index`` is not a slice.
            IndexError: the tensor is 1-D: there is one row.
            ValueError: the step is not 1, or rows share scales in memory: blocks, and layouts other
                than "row" and "linear".
        """
        if not isinstance(index, slice):
            raise TypeError(
                f"index: expected a slice of the first dimension, such as q[2:10], got {index!r}. "
                "For one row use q[i:i + 1]"
            )
        if len(self.shape) == 1:
            raise IndexError(
                f"a quantized tensor of shape {self.shape} is one row, nothing to slice"
            )
        if index.step is not None and index.step != 1:
            raise ValueError(f"step of the slice: expected 1, got {index.step}")
        if self.layout not in ("row", "linear") or self.block[0] > 1:
            raise ValueError(
                "slice: expected blocks of one row in layout 'row' or 'linear', got layout "
                f"{self.layout!r} and block {self.block}. Slice before quantizing"
            )
        start, stop = slice_bounds(index, self.shape[0])
        inner = math.prod(self.shape[1:-1])
        rows = slice(start, stop)
        return QuantizedTensor(
            self.data[rows],
            self.stored_scales if self.block[0] == 0 else self.stored_scales[rows],
            None,
            None if self.inv_rms is None else self.inv_rms[start * inner : stop * inner],
            **self._described(),
        )

    def _check_description(self, prefix: str) -> None:
        """Raises if format, block, scale_format, layout and recipe are not compatible."""
        one_of(f"{prefix}format", self.format, FORMATS)
        one_of(f"{prefix}recipe", self.recipe, GROUP_RECIPES)
        kind = self.format.partition("_")[2]
        blocks: tuple[Any, ...] = {
            "tensor": ((0, 0),),
            "row": ((1, 0),),
            "group": tuple((1, size) for size in GROUP_SIZES),
            "block": BLOCK_SHAPES,
        }.get(kind, ((1, MXFP8_BLOCK),))
        one_of(f"{prefix}block", tuple(self.block), blocks)
        scale_formats: tuple[str, ...] = {
            "group": SCALE_FORMATS,
            "block": SCALE_FORMATS[:2],
            "": ("e8m0",),
        }.get(kind, ("float32",))
        one_of(f"{prefix}scale_format", self.scale_format, scale_formats)
        layouts: tuple[str, ...] = {
            "group": GROUP_SCALE_LAYOUTS,
            "block": BLOCK_SCALE_LAYOUTS,
            "": SCALE_LAYOUTS,
        }.get(kind, ("row",))
        one_of(f"{prefix}layout", self.layout, layouts)

    def validate(self, name: str = "q") -> None:
        """Checks that the parts fit together: dtypes, shapes, devices.

        Args:
            name: what an error calls this tensor.

        Raises:
            TypeError: a part is not a tensor or has another dtype.
            ValueError: a shape, device or part of the description is not what it must be.
        """
        self._check_description(f"{name}.")
        integer = self.format.startswith("int8")
        accepted = (torch.int8,) if integer else FP8_DTYPES
        if not isinstance(self.data, Tensor) or self.data.dtype not in accepted:
            given = getattr(self.data, "dtype", type(self.data).__name__)
            raise TypeError(
                f"{name}.data: expected a tensor of {', '.join(map(str, accepted))} with format "
                f"{self.format!r}, got {given}"
            )
        if self.data.dim() == 0 or self.data.shape[-1] == 0:
            raise ValueError(
                f"{name}.data: expected shape (..., N) with N >= 1, got shape {self.shape}"
            )
        stored, scale_dtype = self._scales_of(self.shape)
        for field, shape, dtype in (
            ("stored_scales", stored, scale_dtype),
            ("amax", self._amax_shape(self.shape), torch.float32),
            ("inv_rms", (math.prod(self.shape[:-1]),), torch.float32),
        ):
            part = getattr(self, field)
            if part is None and field != "stored_scales":
                continue
            if not isinstance(part, Tensor) or part.dtype != dtype:
                given = getattr(part, "dtype", type(part).__name__)
                raise TypeError(f"{name}.{field}: expected a tensor of {dtype}, got {given}")
            if part.device != self.data.device:
                raise ValueError(
                    f"{name}.{field}: expected a tensor on {self.data.device}, as {name}.data is, "
                    f"got one on {part.device}. Move all of them with .to(device)"
                )
            if tuple(part.shape) != tuple(shape):
                raise ValueError(
                    f"{name}.{field}: expected shape {tuple(shape)} for the logical shape "
                    f"{self.shape}, format {self.format!r} and layout {self.layout!r}, got shape "
                    f"{tuple(part.shape)}"
                )

    def __repr__(self) -> str:
        # Shapes and names only: values would need a copy from the device.
        return (
            f"QuantizedTensor(shape={self.shape}, {self.format}, {str(self.dtype)[6:]}, "
            f"block={self.block}, scale_format={self.scale_format!r}, layout={self.layout!r}, "
            f"recipe={self.recipe!r}, amax={'no' if self.amax is None else 'yes'}, "
            f"inv_rms={'no' if self.inv_rms is None else 'yes'}, {self.nbytes} bytes, "
            f"device={str(self.device)!r})"
        )


register(QuantizedTensor)
