"""`nvfp4_linear`: what it takes in each way to compute, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from samples import randn

import jitquant
from jitquant import reference, testing
from jitquant.ops.linear import LINEAR, LINEAR_FP8

WEIGHT = jitquant.quantize_weight_nvfp4(randn(24, 96, seed=1))
PARTS = (WEIGHT.x_fp4, WEIGHT.x_sf, WEIGHT.gsa)
X = randn(2, 3, 96)
RESIDUAL = torch.zeros(2, 3, 24)


def test_x_in_fp8_or_quantized_on_the_way() -> None:
    by_row = jitquant.quantize_fp8(X, granularity="row")
    bias, residual = randn(24, seed=2), randn(2, 3, 24, seed=3)
    want = jitquant.nvfp4_linear(X, WEIGHT, bias, residual=residual, compute="fp8")
    assert want.dtype == torch.bfloat16
    assert torch.equal(
        jitquant.nvfp4_linear(by_row, WEIGHT, bias, residual=residual, compute="fp8"), want
    )
    given = (by_row.data, by_row.scale_inv, *PARTS)
    assert torch.equal(reference.nvfp4_linear_fp8(*given, bias=bias, residual=residual)[0], want)
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


COMPUTES = pytest.mark.parametrize("compute", ["exact", "fp8"])


@COMPUTES
@pytest.mark.parametrize(
    ("out", "said"),
    [
        (torch.empty(2, 3, 24).half(), "out: expected torch.float32 for this call, got torch.f"),
        (torch.empty(6, 24), "out: expected shape (2, 3, 24) for this call, got shape (6, 24)"),
        (torch.empty(2, 3, 24, device="meta"), "out: expected a buffer on cpu, as the input is"),
        (torch.empty(2, 3, 48)[..., ::2], "out: expected a contiguous buffer, got strides"),
        (RESIDUAL, "out: expected memory of its own, as it is written, got memory that it shares"),
    ],
)
def test_out_is_of_the_result(out: torch.Tensor, said: str, compute: Any) -> None:
    more: Any = {"residual": RESIDUAL, "dtype": torch.float32, "compute": compute, "out": out}
    with pytest.raises((TypeError, ValueError)) as raised:
        jitquant.nvfp4_linear(X, WEIGHT, **more)
    assert said in str(raised.value)


@COMPUTES
def test_no_result_requires_grad(compute: Any) -> None:
    bias = torch.nn.Parameter(torch.ones(24))
    residual = torch.zeros(2, 3, 24, requires_grad=True).bfloat16()
    y = jitquant.nvfp4_linear(X, WEIGHT, bias, residual=residual, compute=compute)
    assert not y.requires_grad


@COMPUTES
def test_what_is_added_may_be_of_another_library(compute: Any) -> None:
    bias = np.ones(24, dtype=np.float32)
    given: Any = bias
    got = jitquant.nvfp4_linear(X, WEIGHT, given, compute=compute)
    assert torch.equal(
        got, jitquant.nvfp4_linear(X, WEIGHT, torch.from_numpy(bias), compute=compute)
    )


@COMPUTES
@pytest.mark.parametrize(
    ("x", "said"),
    [
        (randn(2, 3, 192)[..., ::2], "x: expected a contiguous last dimension (stride 1)"),
        (randn(3, 2, 96).transpose(0, 1), "x: expected rows at one stride"),
        (X.float(), "x: expected bfloat16 or float16, got torch.float32"),
        (X.double(), "x: expected bfloat16 or float16, got torch.float64"),
    ],
)
def test_what_x_is_in_each_way_to_compute(x: torch.Tensor, said: str, compute: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        jitquant.nvfp4_linear(x, WEIGHT, compute=compute)
    assert said in str(raised.value)


@COMPUTES
def test_the_gsa_is_looked_at(compute: Any) -> None:
    weight = jitquant.NVFP4Tensor(WEIGHT.x_fp4, WEIGHT.x_sf, WEIGHT.gsa.double())
    with pytest.raises(TypeError, match=r"w_gsa: expected float32, got torch\.float64"):
        jitquant.nvfp4_linear(X, weight, compute=compute)
    weight = jitquant.NVFP4Tensor(WEIGHT.x_fp4, WEIGHT.x_sf, torch.tensor([torch.nan]))
    with testing.checked(), pytest.raises(ValueError, match="w_gsa: expected numbers that are not"):
        jitquant.nvfp4_linear(X, weight, compute=compute)


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("added", [False, True])
def test_what_cuda_calls(added: bool, dtype: torch.dtype | None) -> None:
    """What CUDA calls, here on the CPU, where sums may be in another order."""
    weight = jitquant.quantize_weight_nvfp4(randn(32, 96, seed=1))
    parts = (weight.x_fp4, weight.x_sf, weight.gsa)
    of_result = torch.bfloat16 if dtype is None else dtype
    more: dict[str, Any] = {"dtype": dtype}
    if added:
        more |= {"bias": randn(32, seed=2), "residual": randn(2, 3, 32, seed=3, dtype=of_result)}
    for granularity in ("row", "tensor"):
        q = jitquant.quantize_fp8(X, granularity=granularity)
        args = (q.data, q.scale_inv, *parts)
        want = LINEAR_FP8.default(*args, **more)
        y, before = torch.empty_like(want), torch.empty_like(want)._version
        LINEAR_FP8._cuda_out(*args, **more, y=y)
        assert y._version > before
        for got in (LINEAR_FP8._cuda(*args, **more), y):
            assert got.dtype == of_result
            torch.testing.assert_close(got, want, rtol=0.01, atol=0.01 * float(want.abs().amax()))
    with pytest.raises(ValueError, match="out: expected a buffer on cpu"):
        LINEAR_FP8._cuda_out(*args, **more, y=torch.empty_like(want, device="meta"))


@pytest.mark.parametrize("shape", [(2,), (2, 3), (7,)], ids=str)
def test_scale_inv_is_one_or_one_a_row(shape: tuple[int, ...]) -> None:
    x = X.to(torch.float8_e4m3fn)

    def call(scale_inv: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = LINEAR_FP8.default(x, scale_inv, *PARTS)
        return y

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
        (randn(2, 96), ("bf16_2_rows", "bf16_2_rows")),
        (X, ("bf16_16_rows", "bf16_16_rows")),
        (randn(17, 96), ("bf16_32_rows_to_bf16", "bf16_32_rows_to_fp32")),
        (randn(33, 96), ("bf16_64_rows_to_bf16", "bf16_64_rows_to_fp32")),
        (randn(65, 96), ("bf16_96_rows_to_bf16", "bf16_96_rows_to_fp32")),
        (randn(97, 96), ("bf16_128_rows_to_bf16", "bf16_128_rows_to_fp32")),
        (randn(129, 96), ("bf16_many_rows_to_bf16", "bf16_many_rows_to_fp32")),
    ],
)
def test_a_first_call_waits_for_the_dtype_of_its_result(
    x: torch.Tensor, least: tuple[str, str]
) -> None:
    w_fp4 = torch.empty(16, 48, dtype=torch.uint8)
    for dtype, name in zip((None, torch.float32), least, strict=True):
        part = LINEAR.part({"x": x, "w_fp4": w_fp4, "x_sf": None, "dtype": dtype})
        assert part is not None
        assert part.name == name
        for packed, tiles in ((128, "in_tiles"), (32, "in_tiles"), (40, "")):
            narrow = LINEAR.part(
                {"x": x, "w_fp4": w_fp4[:, :1].expand(16, packed), "x_sf": None, "dtype": dtype}
            )
            assert narrow is not None
            ending = tiles if x.shape[0] > 16 else "aligned" if packed == 128 else ""
            if ending:
                assert (narrow.name, narrow.of) == (f"{name}_{ending}", part)
            else:
                assert narrow == part
    codes = {"x": jitquant.quantize_nvfp4(randn(17, 96)).x_fp4, "w_fp4": w_fp4, "x_sf": X}
    for few, name in ((16, "codes_16_rows"), (17, "codes_32_rows_to_bf16")):
        part = LINEAR.part({**codes, "x": codes["x"][:few], "dtype": None})
        assert part is not None
        assert part.name == name
    # Nothing is checked yet: an invalid dtype is refused later.
    invalid = {"x": randn(17, 96), "w_fp4": w_fp4, "x_sf": None, "dtype": [1]}
    assert LINEAR.part(invalid) is None


@pytest.mark.parametrize("ends", [[2, 5], [0, 0]])
def test_rows_without_an_expert_have_no_gsa(ends: list[int]) -> None:
    """What is left of a buffer may have any."""
    weight = jitquant.nn.stack_experts([jitquant.quantize_weight_nvfp4(randn(32, 48))] * 2)
    x = jitquant.quantize_nvfp4(randn(8, 48), granularity="row")
    x.gsa[ends[-1] :] = torch.inf
    y = jitquant.nvfp4_grouped_linear(x, weight, torch.tensor(ends))
    assert y[ends[-1] :].eq(0).all()
    assert y[: ends[-1]].isfinite().all()
