"""Every bad argument of the 8-bit functions: the error names it and the way out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from error_cases import Case, check_case, read_cases

import jitquant
from jitquant import QuantizedRaggedTensor, QuantizedTensor

J = jitquant
TABLE = Path(__file__).with_name("errors_fp8.txt")
FILLED = ("zeros", "ones", "tensor")


def cases(device: str) -> dict[str, Case]:
    """The cases of ``errors_fp8.txt`` on a device, with the names that they use."""
    empty = partial(QuantizedTensor.empty, device=device)

    def randn(*shape: int) -> torch.Tensor:
        return samples.randn(*shape).to(device)

    x, offsets = randn(4, 32), torch.tensor([0, 2, 4], device=device)

    def changed(**parts: Any) -> QuantizedTensor:
        """Fitting buffers for X with some parts changed."""
        out = empty((4, 32))
        for name, value in parts.items():
            setattr(out, name, value)
        return out

    def changed_ragged(format: str = "fp8_tensor", **parts: Any) -> QuantizedRaggedTensor:
        """Fitting buffers for the ragged X with some parts changed."""
        out = QuantizedRaggedTensor.empty((4, 32), offsets, format=format)
        for name, value in parts.items():
            setattr(out, name, value)
        return out

    def by_group(shape: tuple[int, int], **extras: bool) -> QuantizedTensor:
        return empty(shape, format="fp8_group", group_size=16, layout="column", **extras)

    names = {
        **{name: getattr(jitquant, name) for name in jitquant.__all__},
        **{name: partial(getattr(torch, name), device=device) for name in FILLED},
        "math": math,
        "replace": replace,
        "torch": torch,
        "randn": randn,
        "empty": empty,
        "by_group": by_group,
        "changed": changed,
        "changed_ragged": changed_ragged,
        "codes": partial(torch.empty, device=device, dtype=torch.float8_e4m3fn),
        "X": x,
        "W": torch.ones(32, device=device),
        "FUSED": randn(4, 64),
        "META": torch.zeros(4, 32, device="meta"),
        "AT": offsets,
        "ONE": torch.ones(1, device=device),
        "Q": jitquant.quantize_fp8(x),
        "RAGGED": jitquant.quantize_ragged(x, offsets),
        "SQUARE": randn(32, 32),
        "BUFFERS": empty((32, 32), format="mxfp8"),
    }
    return read_cases(TABLE, names, str(x.device))


RAW: dict[str, Case] = {
    **{
        f"{dtype} for a tensor": (
            lambda dtype=dtype: torch.ops.jitquant.dequantize(
                torch.zeros(4, 16, dtype=torch.int8), torch.zeros(1, dtype=dtype), 0, 0
            ),
            TypeError,
            ["scale_inv: expected float32 with block_rows 0", f"got {dtype}"],
        )
        for dtype in (torch.uint8, torch.int32, torch.float8_e8m0fnu)
    },
    **{
        f"swizzled scales of {dtype}": (
            lambda dtype=dtype: torch.ops.jitquant.dequantize(
                *(torch.zeros(4, 32, dtype=torch.int8), torch.ones(128, 4, dtype=dtype), 1, 32),
                scale_layout="swizzled_128x4",
            ),
            TypeError,
            [
                "scale_inv: expected float8_e8m0fnu",
                "with scale_layout 'swizzled_128x4'",
                f"got {dtype}",
            ],
        )
        for dtype in (torch.float32, torch.int32)
    },
}
"""Of an op that is called by itself."""

CASES = cases("cpu") | RAW


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    check_case(name, CASES[name])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([samples.randn(4, 32)] * 2, layout=layout)
    calls: dict[str, Any] = {
        "x": lambda: J.quantize_fp8(nested),
        "out": lambda: J.quantize_fp8(samples.randn(4, 32)).dequantize(out=nested),
    }
    for name, call in calls.items():
        with pytest.raises(
            TypeError,
            match=rf"{name}: expected one tensor .* got a nested tensor.*{name}\.to_padded_tensor",
        ):
            call()


def test_a_refused_call_writes_nothing() -> None:
    x, out = samples.randn(4, 32), QuantizedTensor.empty((4, 32))
    for part in (out.data, out.stored_scales, out.amax):
        part.view(torch.uint8).fill_(0xA5)
    with pytest.raises(ValueError, match="scale_ub"):
        J.quantize_fp8(x, scale_ub=-1.0, out=out)
    out.amax = torch.empty(2)
    with pytest.raises(
        ValueError, match=r"out\.amax: expected shape \(1,\) for this call, got shape \(2,\)"
    ):
        J.quantize_fp8(x, out=out)
    assert (out.data.view(torch.uint8) == 0xA5).all()
    assert (out.stored_scales.view(torch.uint8) == 0xA5).all()
