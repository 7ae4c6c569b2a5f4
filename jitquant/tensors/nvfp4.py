"""`NVFP4Tensor`: an activation or weight in NVFP4, as ops return it and consumers take it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from jitquant.formats import (
    CODES_PER_BYTE,
    E8M0_DTYPE,
    FP4_DTYPE,
    GRANULARITIES,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    RECIPES,
    SCALE_DTYPE,
    SCALE_LAYOUTS,
    SWIZZLE_ROWS,
    ceil_to,
    empty,
    fp4_shapes,
    one_of,
)
from jitquant.tensors._parts import Parts, register, slice_bounds

_BIAS, _E8M0_NAN = 127, 255
_TOP_POWER = 8
"""Of E4M3's powers of two the largest is 2^8, and"""
_POWERS_OF_E4M3 = 17
"""the smallest so much further down."""


@dataclass(eq=False, repr=False)
class NVFP4Tensor(Parts):
    """A tensor in NVFP4: packed codes, block scales, and the global factor that dequantizes.

    The value of an element is ``e2m1 * s * gsa``. For a logical shape (..., N) quantized along its
    last dimension, with ``rows`` the product of the leading ones:

    Attributes:
        x_fp4: ``float4_e2m1fn_x2`` (..., ceil(N / 16) * 8); the even element in the low nibble.
        x_sf: ``float8_e4m3fn`` scales: (..., ceil(N / 16)), or, swizzled,
            (ceil(rows / 128) * 128, ceil(ceil(N / 16) / 4) * 4), the bytes of a 128x4 tile together
            and zero for padding.
        gsa: fp32, (1,) with granularity "tensor", (rows,) with "row".
        inv_rms: fp32 (rows,), ``1 / sqrt(mean(v^2) + eps)``, from ops with a norm.
        cols: logical size of the packed dimension: N. Default: the packed size.
        scale_layout: "linear" or "swizzled_128x4".
        granularity: "tensor" or "row": what one gsa covers.
        recipe: "te", "vllm" or "te_flush": the arithmetic it was quantized with.
        dim: the packed dimension: -1, or 0 for a (K, N) weight, where x_fp4 is
            (ceil(K / 16) * 8, N), x_sf (ceil(K / 16), N), and ``cols`` is K.

    It is a registered pytree: ``torch.compile`` and ``torch.export`` take and return it.
    ``torch.load`` reads saved ones if jitquant is imported. Neither the constructor nor
    ``torch.load`` checks anything; `validate` does. Equality is identity; compare the parts.
    """

    x_fp4: Tensor
    x_sf: Tensor
    gsa: Tensor
    inv_rms: Tensor | None = None
    cols: int | None = None
    scale_layout: str = "linear"
    granularity: str = "tensor"
    recipe: str = "te"
    dim: int = -1

    _TENSORS: ClassVar[tuple[str, ...]] = ("x_fp4", "x_sf", "gsa", "inv_rms")
    _CODES: ClassVar[str] = "x_fp4"
    _taken = cast("Tensor | None", None)
    """A caller's tensor that became gsa as it was, so no call writes to it; not a field."""

    def _written_gsa(self) -> Tensor:
        """gsa as a call may write it: a new buffer where it is a caller's tensor."""
        return torch.empty_like(self.gsa) if self.gsa is self._taken else self.gsa

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...] | list[int],
        *,
        granularity: str = "tensor",
        scale_layout: str = "linear",
        recipe: str = "te",
        device: torch.device | str | None = None,
        inv_rms: bool = False,
        dim: int = -1,
    ) -> NVFP4Tensor:
        """Uninitialized buffers for a tensor of a logical shape, for ``out=``.

        Args:
            shape: (..., N) of the tensor that will be quantized; (K, N) with ``dim=0``. For
                `deinterleave_quantize_nvfp4` N is ``intermediate``; for
                `mhc_rmsnorm_quantize_nvfp4` the dimension of the hyper-connections is left out.
            granularity: "tensor": gsa is (1,); "row": (rows,).
            scale_layout: "linear" or "swizzled_128x4"; ``dim=0`` has "linear" only.
            recipe: "te", "vllm" or "te_flush"; overwritten by the op that fills the buffers.
            device: default is PyTorch's.
            inv_rms: whether there is a buffer for inv_rms.
            dim: -1 or 0.

        Raises:
            ValueError: an argument is not one of these.
        """
        shape = tuple(shape)
        one_of("granularity", granularity, GRANULARITIES)
        one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
        one_of("recipe", recipe, RECIPES)
        if dim not in (-1, 0):
            raise ValueError(f"dim: expected -1 (the last dimension) or 0, got {dim!r}")
        if len(shape) == 0 or (dim == 0 and len(shape) != 2) or shape[dim] == 0:
            raise ValueError(
                "shape: expected (..., N) with N >= 1, or (K, N) with K >= 1 and dim=0, got "
                f"{shape}"
            )
        if dim == 0 and scale_layout != "linear":
            raise ValueError(f"scale_layout: expected 'linear' with dim=0, got {scale_layout!r}")
        if dim == 0 and granularity != "tensor":
            raise ValueError(f"granularity: expected 'tensor' with dim=0, got {granularity!r}")
        cols = shape[dim]
        rows = math.prod(shape[:-1])
        fp4_shape, sf_shape = fp4_shapes(shape, scale_layout, dim)
        count = rows if granularity == "row" else 1
        return cls(
            empty(fp4_shape, FP4_DTYPE, device),
            torch.empty(sf_shape, dtype=SCALE_DTYPE, device=device),
            torch.empty(count, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device) if inv_rms else None,
            cols,
            scale_layout,
            granularity,
            recipe,
            dim,
        )

    @classmethod
    def from_mxfp4(cls, x_fp4: Tensor, x_sf: Tensor, cols: int | None = None) -> NVFP4Tensor:
        """Converts MXFP4 to NVFP4 with the same values, for products that take NVFP4.

        Shares the memory of the codes. A block of 32 with scale 2^e becomes two blocks of 16 with
        scale 2^e / gsa, where gsa is the power of two that maps the largest scale to 256. E4M3 has
        all powers of two from there down to 2^-9, so the exponents may span 17. Blocks of zeros do
        not count and get scale 0. The result takes 0.5625 bytes per element instead of 0.53125.

        The CPU reads the scales once, so use this while loading weights.

        Args:
            x_fp4: ``float4_e2m1fn_x2`` or uint8 (..., P), P a multiple of 16, contiguous; the even
                element in the low nibble.
            x_sf: ``float8_e8m0fnu`` or uint8 (..., P / 16), linear, as `jitquant.quantize_mxfp4`
                gives it. 255 is NaN and stays NaN.
            cols: logical size of the last dimension; default 2 * P.

        Raises:
            TypeError: another dtype.
            ValueError: a shape is not as above, or the exponents span more than 17.
        """
        for name, t, dtype in (("x_fp4", x_fp4, FP4_DTYPE), ("x_sf", x_sf, E8M0_DTYPE)):
            if not isinstance(t, Tensor) or t.dtype not in (dtype, torch.uint8):
                given = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"{name}: expected {dtype} or torch.uint8, got {given}")
        codes, exponents = x_fp4.view(torch.uint8), x_sf.view(torch.uint8).int()
        block_bytes = MXFP4_BLOCK // CODES_PER_BYTE
        size = codes.shape[-1] if codes.dim() else 0
        if size == 0 or size % block_bytes or not codes.is_contiguous():
            raise ValueError(
                f"x_fp4: expected shape (..., P), contiguous, with P a multiple of {block_bytes} "
                f"bytes, got shape {tuple(codes.shape)} and strides {tuple(codes.stride())}"
            )
        groups = size // block_bytes
        if exponents.shape != (*codes.shape[:-1], groups):
            raise ValueError(
                f"x_sf: expected shape {(*codes.shape[:-1], groups)} for x_fp4 of shape "
                f"{tuple(codes.shape)}, got shape {tuple(x_sf.shape)}"
            )
        cols = CODES_PER_BYTE * size if cols is None else cols
        if not CODES_PER_BYTE * size - MXFP4_BLOCK < cols <= CODES_PER_BYTE * size:
            raise ValueError(
                f"cols: expected {CODES_PER_BYTE * size - MXFP4_BLOCK + 1} to "
                f"{CODES_PER_BYTE * size} for x_fp4 of shape {tuple(codes.shape)}, got {cols}"
            )
        nan = exponents == _E8M0_NAN
        counts = (codes.view(*codes.shape[:-1], groups, block_bytes) & 0x77).ne(0).any(-1) & ~nan
        used = exponents[counts]
        top, least = (int(used.max()), int(used.min())) if used.numel() else (_BIAS, _BIAS)
        if top - least > _POWERS_OF_E4M3:
            raise ValueError(
                f"x_sf: expected exponents within {_POWERS_OF_E4M3} of each other (NVFP4 has "
                f"powers of two from 2^-9 to 2^8), got {least} to {top}. Quantize the values: "
                "quantize_weight_nvfp4(dequantize_mxfp4(x_fp4, x_sf))"
            )
        scales = torch.exp2((exponents - top + _TOP_POWER).float()).masked_fill(~counts, 0.0)
        scales = scales.masked_fill(nan, math.nan).to(SCALE_DTYPE)
        doubled = scales.view(torch.uint8).repeat_interleave(MXFP4_BLOCK // NVFP4_BLOCK, dim=-1)
        # Blocks of 16 end nearer to the last column than those of 32.
        packed = ceil_to(cols, NVFP4_BLOCK) // NVFP4_BLOCK
        kept = codes[..., : packed * (NVFP4_BLOCK // CODES_PER_BYTE)].contiguous()
        power = 2.0 ** (top - _BIAS - _TOP_POWER)
        gsa = torch.full((1,), power, dtype=torch.float32, device=codes.device)
        return cls(
            kept.view(FP4_DTYPE),
            doubled[..., :packed].contiguous().view(SCALE_DTYPE),
            gsa,
            None,
            cols,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: that of the tensor that was quantized."""
        packed = tuple(self.x_fp4.shape)
        if self.dim == 0:
            cols = CODES_PER_BYTE * packed[0] if self.cols is None else self.cols
            return (cols, *packed[1:])
        cols = CODES_PER_BYTE * packed[-1] if self.cols is None else self.cols
        return (*packed[:-1], cols)

    @property
    def num_tokens(self) -> int:
        """Rows: the product of all dimensions but the last; 1 for a 1-D tensor."""
        return math.prod(self.shape[:-1])

    @property
    def x_fp4_bytes(self) -> Tensor:
        """x_fp4 as uint8, the same memory; DLPack has no type for two codes in a byte."""
        return self.x_fp4.view(torch.uint8)

    @property
    def x_sf_bytes(self) -> Tensor:
        """x_sf as uint8, the same memory."""
        return self.x_sf.view(torch.uint8)

    def dequantize(self, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """The values, ``e2m1 * s * gsa`` in fp32 and rounded once to ``dtype``.

        Args:
            dtype: bfloat16, float16 or float32; default bfloat16, or that of ``out``.
            out: contiguous tensor of the logical shape to write to.

        Returns:
            A tensor of the logical shape, or ``out``.

        Raises:
            TypeError, ValueError: see `jitquant.dequantize_nvfp4`.
        """
        return self._dequantize(dtype=dtype, out=out)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> NVFP4Tensor:
        """Rows ``i:j`` of the first dimension, as views of the same memory.

        Linear scales allow any ``i:j``. With swizzled scales, i and j must be multiples of 128 (or
        the end), because 128 rows share a tile. With ``dim=0`` they must be multiples of 16 (or the
        end), because 16 rows share a scale.

        Raises:
            TypeError: ``index`` is not a slice.
            IndexError: the tensor is 1-D: there is one row.
            ValueError: the step is not 1, or the layout does not allow this slice.
        """
        if not isinstance(index, slice):
            raise TypeError(
                f"index: expected a slice of the first dimension, such as q[2:10], got {index!r}. "
                "For one row use q[i:i + 1]"
            )
        shape = self.shape
        if len(shape) == 1:
            raise IndexError(f"a quantized tensor of shape {shape} is one row, nothing to slice")
        if index.step is not None and index.step != 1:
            raise ValueError(f"step of the slice: expected 1, got {index.step}")
        start, stop = slice_bounds(index, shape[0])
        if self.dim == 0:
            return self._slice_packed(start, stop, shape[0])
        inner = math.prod(shape[1:-1])
        first, last = start * inner, stop * inner
        rows = self.num_tokens
        if self.scale_layout == "linear":
            x_sf = self.x_sf[start:stop]
        else:
            if first % SWIZZLE_ROWS or (last % SWIZZLE_ROWS and last != rows):
                raise ValueError(
                    "rows of a slice with scale_layout 'swizzled_128x4': expected multiples of "
                    f"128, which share a tile, or the end at {rows}, got {first}:{last}. For other "
                    "rows quantize with scale_layout='linear', or slice before quantizing"
                )
            x_sf = self.x_sf[first : first + ceil_to(last - first, SWIZZLE_ROWS)]
        q = replace(
            self,
            x_fp4=self.x_fp4[start:stop],
            x_sf=x_sf,
            gsa=self.gsa[first:last] if self.granularity == "row" else self.gsa,
            inv_rms=None if self.inv_rms is None else self.inv_rms[first:last],
        )
        q._taken = q.gsa if self.gsa is self._taken else None
        return q

    def _slice_packed(self, start: int, stop: int, size: int) -> NVFP4Tensor:
        if start % NVFP4_BLOCK or (stop % NVFP4_BLOCK and stop != size):
            raise ValueError(
                "rows of a slice along dim 0: expected multiples of 16, which share a scale, or "
                f"the end at {size}, got {start}:{stop}"
            )
        if start == stop:
            raise ValueError(
                f"rows of a slice along dim 0: expected a stop after the start, got {start}:{stop}"
            )
        first, last = start // NVFP4_BLOCK, ceil_to(stop, NVFP4_BLOCK) // NVFP4_BLOCK
        width = NVFP4_BLOCK // CODES_PER_BYTE
        q = replace(
            self,
            x_fp4=self.x_fp4[first * width : last * width],
            x_sf=self.x_sf[first:last],
            cols=stop - start,
        )
        q._taken = self._taken
        return q

    def validate(self, name: str = "q") -> None:
        """Checks that the parts fit together: dtypes, shapes, devices.

        Args:
            name: what an error calls this tensor.

        Raises:
            TypeError: a part is not a tensor or has another dtype.
            ValueError: a shape, device, layout, granularity, recipe or dim is not what it must be.
        """
        one_of(f"{name}.scale_layout", self.scale_layout, SCALE_LAYOUTS)
        one_of(f"{name}.granularity", self.granularity, GRANULARITIES)
        one_of(f"{name}.recipe", self.recipe, RECIPES)
        if self.dim not in (-1, 0):
            raise ValueError(f"{name}.dim: expected -1 or 0, got {self.dim!r}")
        for field, dtype in (
            ("x_fp4", FP4_DTYPE),
            ("x_sf", SCALE_DTYPE),
            ("gsa", torch.float32),
            ("inv_rms", torch.float32),
        ):
            part = getattr(self, field)
            if part is None and field == "inv_rms":
                continue
            if not isinstance(part, Tensor) or part.dtype != dtype:
                given = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise TypeError(f"{name}.{field}: expected a tensor of {dtype}, got {given}")
            if part.device != self.x_fp4.device:
                raise ValueError(
                    f"{name}.{field}: expected a tensor on {self.x_fp4.device}, as {name}.x_fp4 "
                    f"is, got one on {part.device}. Move all of them with .to(device)"
                )
        packed = self.x_fp4.shape[self.dim] if self.x_fp4.dim() else 0
        width = NVFP4_BLOCK // CODES_PER_BYTE
        low, high = CODES_PER_BYTE * packed - NVFP4_BLOCK, CODES_PER_BYTE * packed
        cols = high if self.cols is None else self.cols
        if packed == 0 or packed % width or not low < cols <= high:
            raise ValueError(
                f"{name}.x_fp4: expected ceil(cols / 16) * 8 bytes along the packed dimension for "
                f"cols {self.cols}, got shape {tuple(self.x_fp4.shape)}"
            )
        want = NVFP4Tensor.empty(
            self.shape,
            granularity=self.granularity,
            scale_layout=self.scale_layout,
            device="meta",
            inv_rms=self.inv_rms is not None,
            dim=self.dim,
        )
        for field in ("x_sf", "gsa", "inv_rms"):
            part, wanted = getattr(self, field), getattr(want, field)
            if part is not None and part.shape != wanted.shape:
                raise ValueError(
                    f"{name}.{field}: expected shape {tuple(wanted.shape)} for the logical shape "
                    f"{self.shape}, scale_layout {self.scale_layout!r} and granularity "
                    f"{self.granularity!r}, got shape {tuple(part.shape)}"
                )

    def __repr__(self) -> str:
        # Shapes and names only: values would need a copy from the device.
        return (
            f"NVFP4Tensor(shape={tuple(self.shape)}, nvfp4, recipe={self.recipe!r}, "
            f"granularity={self.granularity!r}, scale_layout={self.scale_layout!r}, "
            f"dim={self.dim}, inv_rms={'no' if self.inv_rms is None else 'yes'}, "
            f"{self.nbytes} bytes, device={str(self.device)!r})"
        )


register(NVFP4Tensor)

QuantizedActivation = NVFP4Tensor
"""The same type, by the name under which pipelines of activations return it."""
