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
    FP4_DTYPE,
    FP8_DTYPES,
    NVFP4_BLOCK,
    RAGGED_FORMATS,
    RECIPES,
    SCALE_DTYPE,
    ceil_to,
    one_of,
)
from jitquant.tensors._parts import Parts, register


@dataclass(eq=False, repr=False)
class QuantizedRaggedTensor(Parts):
    """Many tensors in one buffer, each with its own scale.

    Attributes:
        data: "fp8_tensor": elements, of the buffer's shape; "nvfp4": ``float4_e2m1fn_x2``
            (ceil(numel / 16) * 8,), blocks of 16 neighbors of the flattened buffer.
        scale_inv: fp32 (G,), the factor that dequantizes each segment; "nvfp4": its gsa.
        amax: fp32 (G,), the largest magnitude of each segment.
        offsets: int64 (G + 1,), where segments begin, in elements, and where the last one ends.
        sizes: int64 (G,), their elements; None: each ends where the next begins.
        block_scales: "nvfp4": ``float8_e4m3fn`` (ceil(numel / 16),).
        dbias: fp32 (G, N), the sum over the rows of each segment, from `quantize_ragged_grad`.
        format: "fp8_tensor" or "nvfp4".
        shape: of the buffer that was quantized.
        recipe: "te" or "vllm".

    It is a registered pytree, and ``torch.load`` reads saved ones if jitquant is imported. The
    constructor checks nothing; `validate` does. Equality is identity; compare the parts.
    """

    data: Tensor
    scale_inv: Tensor
    amax: Tensor
    offsets: Tensor
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
            format: "fp8_tensor" or "nvfp4".
            dtype: of FP8 elements: ``float8_e4m3fn`` or ``float8_e5m2``.
            dbias: whether there is a buffer for it.
            recipe: "te" or "vllm"; overwritten by the op that fills the buffers.

        Raises:
            ValueError, TypeError: an argument is not one of these.
        """
        shape = tuple(shape)
        one_of("format", format, RAGGED_FORMATS)
        one_of("recipe", recipe, RECIPES)
        if not shape:
            raise ValueError("shape: expected a shape of one dimension or more, got ()")
        if dtype not in FP8_DTYPES:
            raise TypeError(
                f"dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}"
            )
        _check_bounds("", offsets, sizes)
        device, count = offsets.device, offsets.shape[0] - 1
        blocks = ceil_to(math.prod(shape), NVFP4_BLOCK) // NVFP4_BLOCK
        packed = format == "nvfp4"
        data: tuple[int, ...] = (blocks * (NVFP4_BLOCK // CODES_PER_BYTE),) if packed else shape
        return cls(
            torch.empty(data, dtype=FP4_DTYPE if packed else dtype, device=device),
            torch.empty(count, dtype=torch.float32, device=device),
            torch.empty(count, dtype=torch.float32, device=device),
            offsets,
            sizes,
            torch.empty(blocks, dtype=SCALE_DTYPE, device=device) if packed else None,
            torch.empty((count, shape[-1]), dtype=torch.float32, device=device) if dbias else None,
            format,
            shape,
            recipe,
        )

    @property
    def num_segments(self) -> int:
        """G."""
        return self.offsets.shape[0] - 1

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        """The buffer's values, rounded once to ``dtype``, zero outside of the segments.

        Args:
            dtype: bfloat16, float16 or float32.
            out: contiguous tensor of the buffer's shape and of ``dtype`` to write to.

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
        packed = self.format == "nvfp4"
        if (self.block_scales is not None) != packed:
            raise ValueError(
                f"{name}.block_scales: expected {'a tensor' if packed else 'None'} with format "
                f"{self.format!r}, got {'None' if packed else 'a tensor'}"
            )
        blocks = ceil_to(math.prod(self.shape), NVFP4_BLOCK) // NVFP4_BLOCK
        count = self.num_segments
        elements = (blocks * (NVFP4_BLOCK // CODES_PER_BYTE),) if packed else tuple(self.shape)
        floats = (torch.float32,)
        for field, shape, dtypes in (
            ("data", elements, (FP4_DTYPE,) if packed else FP8_DTYPES),
            ("scale_inv", (count,), floats),
            ("amax", (count,), floats),
            ("block_scales", (blocks,), (SCALE_DTYPE,)),
            ("dbias", (count, self.shape[-1]), floats),
        ):
            part = getattr(self, field)
            if part is None and field in ("block_scales", "dbias"):
                continue
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
