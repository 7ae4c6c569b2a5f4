"""FP8 and MXFP8 against bits that other libraries' own code gave (tests/data/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jitquant import reference
from jitquant.reference.fp8 import scale_from_amax

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "peer_vectors.safetensors")
E4M3 = torch.float8_e4m3fn


def _deepgemm(scale_format: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda x: reference.quantize_group(
        x, 128, dtype=E4M3, scale_format=scale_format, recipe="deepgemm"
    )


QUANTIZERS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], tuple[str, ...]]] = {
    "fp8_1x128_deepgemm_f32": (_deepgemm("float32"), ("q", "scale_inv")),
    "fp8_1x128_deepgemm_ue8m0": (_deepgemm("ue8m0"), ("q", "scale_inv")),
    "fp8_1x128_deepgemm_packed": (_deepgemm("ue8m0_packed"), ("q", "scale_inv_packed")),
    "fp8_128x128_deepgemm": (
        lambda x: reference.quantize_block(x, 128, 128, dtype=E4M3, recipe="deepgemm"),
        ("q", "scale_inv"),
    ),
    "fp8_tensor_te": (lambda x: reference.quantize_fp8(x, dtype=E4M3)[:2], ("q", "scale_inv")),
    "mxfp8_torchao_rceil": (
        lambda x: reference.quantize_mxfp8(x, dtype=E4M3),
        ("q", "scale_e8m0"),
    ),
}
CASES = sorted({tuple(key.split("/")[:2]) for key in GOLDEN if key.count("/") == 2})
CASES = [case for case in CASES if case[1] in QUANTIZERS]


def test_every_8_bit_vector_is_a_case() -> None:
    recipes = {key.split("/")[1] for key in GOLDEN if key.count("/") == 2}
    assert {r for r in recipes if "fp8" in r} == {*QUANTIZERS, "fp8_tensor_torchao"}
    assert len(CASES) == 56


@pytest.mark.parametrize(("case", "recipe"), CASES)
def test_vector(case: str, recipe: str) -> None:
    quantize, fields = QUANTIZERS[recipe]
    for got, field in zip(quantize(GOLDEN[f"{case}/x"]), fields, strict=True):
        want = GOLDEN[f"{case}/{recipe}/{field}"]
        got = got.view(torch.uint8) if got.dtype.itemsize == 1 else got
        assert got.dtype == want.dtype
        assert torch.equal(got, want), field


@pytest.mark.parametrize("case", sorted({case for case, _ in CASES}))
def test_tensor_scale(case: str) -> None:
    amax = GOLDEN[f"{case}/x"].float().abs().amax().reshape(1)
    scale = scale_from_amax(amax, 448.0)
    assert torch.equal(scale, GOLDEN[f"{case}/fp8_tensor_te/scale"])
    # torchao raises the amax to 1e-12; for what is larger it has the same bits.
    if amax >= 1e-12:
        assert torch.equal(scale, GOLDEN[f"{case}/fp8_tensor_torchao/scale"])
