"""`nvfp4_linear`: what it takes in each way to compute, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn

import jitquant
from jitquant.numerics.linear import nvfp4_linear_fp8
from jitquant.ops.linear import LINEAR, linear_fp8

WEIGHT = jitquant.quantize_weight_nvfp4(randn(24, 96, seed=1))
X = randn(2, 3, 96)


def test_x_in_fp8_or_quantized_on_the_way() -> None:
    by_row = jitquant.quantize_fp8(X, granularity="row")
    bias, residual = randn(24, seed=2), randn(2, 3, 24, seed=3)
    want = jitquant.nvfp4_linear(X, WEIGHT, bias, residual=residual, compute="fp8")
    assert want.dtype == torch.bfloat16
    assert torch.equal(
        jitquant.nvfp4_linear(by_row, WEIGHT, bias, residual=residual, compute="fp8"), want
    )
    parts = (WEIGHT.x_fp4, WEIGHT.x_sf, WEIGHT.gsa)
    given = (by_row.data, by_row.scale_inv, *parts)
    assert torch.equal(nvfp4_linear_fp8(*given, bias=bias, residual=residual)[0], want)
    out = torch.empty(2, 3, 24)
    whole = jitquant.quantize_fp8(X)
    assert jitquant.nvfp4_linear(whole, WEIGHT, compute="fp8", out=out) is out
    want = jitquant.nvfp4_linear(whole.dequantize(), WEIGHT, dtype=torch.float32)
    assert float((out - want).norm() / want.norm()) < 0.05


@pytest.mark.parametrize(
    ("x", "more", "error", "said"),
    [
        (X, {"compute": "int8"}, ValueError, "compute: expected one of 'exact', 'fp8', got 'int8'"),
        (
            jitquant.quantize_nvfp4(X),
            {"compute": "fp8"},
            TypeError,
            "with compute 'fp8', got an NVFP4Tensor",
        ),
        (
            jitquant.quantize_fp8(X),
            {},
            TypeError,
            "x: expected compute='fp8' with a QuantizedTensor",
        ),
        (
            jitquant.quantize_per_token_group(X, group_size=32),
            {"compute": "fp8"},
            ValueError,
            "x: expected format 'fp8_row' or 'fp8_tensor' with compute 'fp8', got 'fp8_group'",
        ),
        (
            jitquant.quantize_fp8(X, dtype=torch.float8_e5m2),
            {"compute": "fp8"},
            TypeError,
            "x: expected float8_e4m3fn, got torch.float8_e5m2",
        ),
        (X[..., :90], {"compute": "fp8"}, ValueError, "got shape (2, 3, 90)"),
        (
            X,
            {"compute": "fp8", "residual": torch.zeros(2, 3, 24)},
            ValueError,
            "residual: expected torch.bfloat16 of shape (2, 3, 24)",
        ),
    ],
)
def test_what_is_refused(x: Any, more: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        jitquant.nvfp4_linear(x, WEIGHT, **more)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 24), torch.float16), ((6, 24), torch.float32)], ids=str
)
def test_out_is_of_the_result_in_fp8(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    out = torch.empty(shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"out: expected torch.* of shape \(2, 3, 24\)"):
        jitquant.nvfp4_linear(X, WEIGHT, dtype=torch.float32, compute="fp8", out=out)


@pytest.mark.parametrize("shape", [(2,), (2, 3), (7,)], ids=str)
def test_scale_inv_is_one_or_one_a_row(shape: tuple[int, ...]) -> None:
    x = X.to(torch.float8_e4m3fn)

    def call(scale_inv: torch.Tensor) -> torch.Tensor:
        return linear_fp8(x, scale_inv, WEIGHT, None, None, None)

    if shape == (2, 3):
        assert call(torch.ones(shape)).shape == (2, 3, 24)
        return
    with pytest.raises(
        ValueError, match="x_scale_inv: expected 1 or 6 contiguous elements in float32, got"
    ):
        call(torch.ones(shape))
    with pytest.raises(
        ValueError, match="x_scale_inv: expected 1 or 6 contiguous elements in float32, got"
    ):
        call(torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("x", "least"),
    [
        (X, ("bf16_few_rows", "bf16_few_rows")),
        (randn(17, 96), ("bf16_some_rows_to_bf16", "bf16_some_rows_to_fp32")),
        (randn(65, 96), ("bf16_many_rows_to_bf16", "bf16_many_rows_to_fp32")),
    ],
)
def test_a_first_call_waits_for_the_dtype_of_its_result(
    x: torch.Tensor, least: tuple[str, str]
) -> None:
    for dtype, name in zip((None, torch.float32), least, strict=True):
        part = LINEAR.part({"x": x, "x_sf": None, "dtype": dtype})
        assert part is not None
        assert part.name == name
    codes = {"x": jitquant.quantize_nvfp4(randn(17, 96)).x_fp4, "x_sf": X}
    for few, name in ((16, "codes_few_rows"), (64, "codes_some_rows_to_bf16")):
        part = LINEAR.part({**codes, "x": codes["x"][:few], "dtype": None})
        assert part is not None
        assert part.name == name
    # Nothing is checked yet: an invalid dtype is refused later.
    assert LINEAR.part({"x": randn(17, 96), "x_sf": None, "dtype": [1]}) is None
