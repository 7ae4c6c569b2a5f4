"""Every bad argument: the error names it, what was given, what is accepted, and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import samples
import torch

import jitquant
from jitquant import QuantizedActivation

_EMPTY = QuantizedActivation.empty
J = jitquant
Case = tuple[Callable[[], Any], type[Exception], list[str]]


def cases(device: str) -> dict[str, Case]:
    """Calls with a bad argument on a device, the error, and what it says."""
    zeros, ones = partial(torch.zeros, device=device), partial(torch.ones, device=device)
    tensor, empty = partial(torch.tensor, device=device), partial(_EMPTY, device=device)
    on = str(zeros(1).device)

    def randn(*shape: int) -> torch.Tensor:
        return samples.randn(*shape).to(device)

    X, FUSED, WEIGHT = randn(4, 32), randn(4, 64), ones(32)
    MIX, MIX_WEIGHTS = randn(4, 3, 32), ones(4, 3)
    Q = J.quantize_nvfp4(X)
    META = zeros(4, 32, device="meta")

    def buffers(**changed: Any) -> QuantizedActivation:
        """Fitting buffers for X with some parts changed."""
        out = empty((4, 32))
        for name, value in changed.items():
            setattr(out, name, value)
        return out

    return {
        # What every input tensor is asked for.
        "x list": (
            lambda: J.quantize_nvfp4([1.0]),
            TypeError,
            ["x is list", "torch.Tensor", "__dlpack__", "torch.as_tensor(x)"],
        ),
        "x None": (lambda: J.amax_gsa(None), TypeError, ["x is NoneType", "torch.Tensor"]),
        "x int": (
            lambda: J.quantize_nvfp4(ones(2, 16, dtype=torch.int32)),
            TypeError,
            ["x is torch.int32", "bfloat16, float16 and float32", "x.to(torch.bfloat16)"],
        ),
        "x double": (lambda: J.amax_gsa(X.double()), TypeError, ["x is torch.float64", "float32"]),
        "x fp8": (
            lambda: J.quantize_nvfp4(X.to(torch.float8_e4m3fn)),
            TypeError,
            ["x is torch.float8_e4m3fn"],
        ),
        "x 0-dim": (
            lambda: J.quantize_nvfp4(tensor(1.0)),
            ValueError,
            ["x has shape ()", "(..., N)", "reshape"],
        ),
        "x no columns": (
            lambda: J.quantize_nvfp4(zeros(3, 0)),
            ValueError,
            ["x has shape (3, 0)", "N of 1 or more"],
        ),
        "x transposed": (
            lambda: J.quantize_nvfp4(X.T),
            ValueError,
            ["x has strides (1, 32)", "last dimension is contiguous", "x.contiguous()"],
        ),
        "x array of strings": (
            lambda: J.quantize_nvfp4(np.array(["a"])),
            ValueError,
            ["x is ndarray", "DLPack", "arrays of bfloat16", "Convert or copy it"],
        ),
        # Names and numbers.
        "recipe": (
            lambda: J.quantize_nvfp4(X, recipe="trt"),
            ValueError,
            ["recipe is 'trt'", "'te', 'vllm'"],
        ),
        "scale_layout": (
            lambda: J.quantize_nvfp4(X, scale_layout="swizzled"),
            ValueError,
            ["scale_layout is 'swizzled'", "'linear', 'swizzled_128x4'"],
        ),
        "granularity": (
            lambda: J.quantize_nvfp4(X, granularity="token"),
            ValueError,
            ["granularity is 'token'", "'tensor', 'row'"],
        ),
        "granularity beside a gsa": (
            lambda: J.quantize_nvfp4(X, ones(1), granularity="token"),
            ValueError,
            ["granularity is 'token'"],
        ),
        "recipe None": (
            lambda: J.quantize_nvfp4(X, recipe=None),
            TypeError,
            ["recipe is NoneType", "a str"],
        ),
        "eps str": (
            lambda: J.rmsnorm_quantize_nvfp4(X, ones(32), "1"),
            TypeError,
            ["eps is str", "a number", "float(eps)"],
        ),
        "intermediate float": (
            lambda: J.deinterleave_quantize_nvfp4(X, 16.0),
            TypeError,
            ["intermediate is float", "an int"],
        ),
        "divisor str": (
            lambda: J.quantize_nvfp4(X, divisor="2"),
            TypeError,
            ["divisor is str", "a number"],
        ),
        "divisor 0": (
            lambda: J.quantize_nvfp4(X, divisor=0.0),
            ValueError,
            ["divisor is 0.0", "positive number", "2688"],
        ),
        "divisor negative": (lambda: J.amax_gsa(X, -1.0), ValueError, ["divisor is -1.0"]),
        "divisor infinite": (lambda: J.amax_gsa(X, math.inf), ValueError, ["divisor is inf"]),
        "divisor nan": (lambda: J.amax_gsa(X, math.nan), ValueError, ["divisor is nan"]),
        "divisor no float32": (lambda: J.amax_gsa(X, 1e-60), ValueError, ["divisor is 1e-60"]),
        "eps negative": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, -1e-6),
            ValueError,
            ["eps is -1e-06", "not negative"],
        ),
        "eps nan": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, math.nan),
            ValueError,
            ["eps is nan"],
        ),
        # gsa.
        "gsa str": (
            lambda: J.quantize_nvfp4(X, "0.1"),
            TypeError,
            ["gsa is str", "None", "a number", "float32 tensor"],
        ),
        "gsa bool": (lambda: J.quantize_nvfp4(X, True), TypeError, ["gsa is bool"]),
        "gsa negative": (
            lambda: J.quantize_nvfp4(X, -0.1),
            ValueError,
            ["gsa is -0.1", "not negative", "amax / 2688"],
        ),
        "gsa nan": (lambda: J.quantize_nvfp4(X, math.nan), ValueError, ["gsa is nan"]),
        "gsa infinite": (
            lambda: J.quantize_weight_nvfp4(X, gsa=math.inf),
            ValueError,
            ["gsa is inf"],
        ),
        "gsa dtype": (
            lambda: J.quantize_nvfp4(X, ones(1, dtype=torch.bfloat16)),
            TypeError,
            ["gsa is torch.bfloat16", "float32", "gsa.float()"],
        ),
        "gsa count": (
            lambda: J.quantize_nvfp4(X, ones(3)),
            ValueError,
            ["gsa has shape (3,)", "one element", "(4,)"],
        ),
        "gsa column": (
            lambda: J.quantize_nvfp4(X, ones(4, 1)),
            ValueError,
            ["gsa has shape (4, 1)", "gsa.reshape(-1)"],
        ),
        "gsa device": (
            lambda: J.quantize_nvfp4(META, ones(1)),
            ValueError,
            [f"gsa is on {on}", "x on meta", "gsa.to('meta')"],
        ),
        "gsa of a weight": (
            lambda: J.quantize_weight_nvfp4(X, gsa=ones(4)),
            ValueError,
            ["gsa has shape (4,)", "one element for a weight"],
        ),
        "gsa of fused": (
            lambda: J.deinterleave_quantize_nvfp4(FUSED, 32, ones(5)),
            ValueError,
            ["gsa has shape (5,)", "for this fused"],
        ),
        # Weights.
        "w dims": (
            lambda: J.quantize_weight_nvfp4(randn(2, 16, 16)),
            ValueError,
            ["w has shape (2, 16, 16)", "(N, K)", "one by one"],
        ),
        "w 1-D": (lambda: J.quantize_weight_nvfp4(randn(16)), ValueError, ["w has shape (16,)"]),
        "block": (
            lambda: J.quantize_weight_nvfp4(X, block="32x32"),
            ValueError,
            ["block is '32x32'", "'1x16', '16x16'"],
        ),
        "dim": (lambda: J.quantize_weight_nvfp4(X, dim=1), ValueError, ["dim is 1", "-1", "0"]),
        "dim 0 swizzled": (
            lambda: J.quantize_weight_nvfp4(X, dim=0, scale_layout="swizzled_128x4"),
            ValueError,
            ["scale_layout is 'swizzled_128x4' with dim=0", "'linear'", "transposed weight"],
        ),
        "dim 0 empty": (
            lambda: J.quantize_weight_nvfp4(zeros(0, 16), dim=0),
            ValueError,
            ["w has shape (0, 16)", "K >= 1"],
        ),
        # Deinterleave.
        "intermediate": (
            lambda: J.deinterleave_quantize_nvfp4(FUSED, 64),
            ValueError,
            ["intermediate is 64", "fused has shape (4, 64)", "fused.shape[-1] / 2"],
        ),
        "intermediate 0": (
            lambda: J.deinterleave_quantize_nvfp4(FUSED, 0),
            ValueError,
            ["intermediate is 0"],
        ),
        "granularity_cols": (
            lambda: J.deinterleave_quantize_nvfp4(FUSED, 32, granularity_cols=5),
            ValueError,
            ["granularity_cols is 5 with intermediate 32", "divisors", "halves=True"],
        ),
        "granularity_cols 0": (
            lambda: J.deinterleave_quantize_nvfp4(FUSED, 32, granularity_cols=0),
            ValueError,
            ["granularity_cols is 0"],
        ),
        "op": (
            lambda: J.deinterleave_quantize_nvfp4(FUSED, 32, op="gelu"),
            ValueError,
            ["op is 'gelu'", "'select', 'swiglu'"],
        ),
        # Norms.
        "weight shape": (
            lambda: J.rmsnorm_quantize_nvfp4(X, ones(31)),
            ValueError,
            ["weight has shape (31,)", "(32,)", "one for each column of x"],
        ),
        "weight dtype": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT.half()),
            TypeError,
            ["weight is torch.float16", "torch.bfloat16 and float32", "weight.to(x.dtype)"],
        ),
        "weight stride": (
            lambda: J.rmsnorm_quantize_nvfp4(X, ones(64)[::2]),
            ValueError,
            ["weight has strides (2,)", "weight.contiguous()"],
        ),
        "weight device": (
            lambda: J.rmsnorm_quantize_nvfp4(META, WEIGHT),
            ValueError,
            [f"weight is on {on} and x on meta"],
        ),
        "weight None": (
            lambda: J.rmsnorm_quantize_nvfp4(X, None),
            TypeError,
            ["weight is NoneType"],
        ),
        "residual shape": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, residual=X[:2]),
            ValueError,
            ["residual has shape (2, 32)", "x's shape (4, 32)"],
        ),
        "residual dtype": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, residual=X.float()),
            TypeError,
            ["residual is torch.float32", "x's dtype torch.bfloat16"],
        ),
        "residual device": (
            lambda: J.rmsnorm_quantize_nvfp4(META, META[0], residual=zeros(4, 32)),
            ValueError,
            [f"residual is on {on} and x on meta"],
        ),
        "residual stride": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, residual=randn(32, 4).T),
            ValueError,
            ["residual has strides (1, 4)", "last dimension is contiguous"],
        ),
        "residual expanded": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, residual=randn(1, 32).expand(4, 32)),
            ValueError,
            ["residual has strides (0, 1)", "written in place", "residual.contiguous()"],
        ),
        "residual requires grad": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, residual=X.clone().requires_grad_()),
            ValueError,
            ["residual requires grad", "torch.no_grad()", "residual.detach()"],
        ),
        # mHC.
        "X dims": (
            lambda: J.mhc_rmsnorm_quantize_nvfp4(randn(32), ones(1), WEIGHT),
            ValueError,
            ["X has shape (32,)", "(..., n_hc, N)"],
        ),
        "X streams": (
            lambda: J.mhc_rmsnorm_quantize_nvfp4(randn(2, 9, 32), ones(2, 9), WEIGHT),
            ValueError,
            ["X has shape (2, 9, 32)", "n_hc from 1 to 8"],
        ),
        "A shape": (
            lambda: J.mhc_rmsnorm_quantize_nvfp4(MIX, ones(4, 2), WEIGHT),
            ValueError,
            ["A has shape (4, 2)", "(4, 3)"],
        ),
        "A dtype": (
            lambda: J.mhc_rmsnorm_quantize_nvfp4(MIX, MIX_WEIGHTS.half(), WEIGHT),
            TypeError,
            ["A is torch.float16", "A.to(X.dtype)"],
        ),
        "A stride": (
            lambda: J.mhc_rmsnorm_quantize_nvfp4(MIX, ones(3, 4).T, WEIGHT),
            ValueError,
            ["A has strides (1, 4)", "A.contiguous()"],
        ),
        "A device": (
            lambda: J.mhc_rmsnorm_quantize_nvfp4(MIX.to("meta"), MIX_WEIGHTS, WEIGHT),
            ValueError,
            [f"A is on {on} and X on meta"],
        ),
        # Dequantization.
        "q": (
            lambda: J.dequantize_nvfp4(X),
            TypeError,
            ["q is Tensor", "QuantizedActivation", "x_fp4, x_sf, gsa"],
        ),
        "q keyword": (lambda: J.dequantize_nvfp4(q=X), TypeError, ["q is Tensor"]),
        "dtype": (
            lambda: J.dequantize_nvfp4(Q, torch.float64),
            TypeError,
            ["dtype is torch.float64", "bfloat16, float16 and float32"],
        ),
        "x_fp4 dtype": (
            lambda: J.dequantize_nvfp4(X, Q.x_sf, Q.gsa),
            TypeError,
            ["x_fp4 is torch.bfloat16", "float4_e2m1fn_x2", "x_fp4.view(torch.uint8)"],
        ),
        "x_fp4 shape": (
            lambda: J.dequantize_nvfp4(
                Q.x_fp4[:, :12].view(torch.uint8).contiguous(), Q.x_sf, Q.gsa
            ),
            ValueError,
            ["x_fp4 has shape (4, 12)", "multiple of 8 bytes"],
        ),
        "x_fp4 0-dim": (
            lambda: J.dequantize_nvfp4(zeros((), dtype=torch.uint8), Q.x_sf, Q.gsa),
            ValueError,
            ["x_fp4 has shape ()", "(..., P)"],
        ),
        "x_fp4 stride": (
            lambda: J.dequantize_nvfp4(Q.x_fp4_bytes[:, :8], Q.x_sf, Q.gsa),
            ValueError,
            ["x_fp4 has strides (16, 1)", "x_fp4.view(torch.uint8).contiguous()"],
        ),
        "x_sf dtype": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf.float(), Q.gsa),
            TypeError,
            ["x_sf is torch.float32", "float8_e4m3fn"],
        ),
        "x_sf shape": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf[:2], Q.gsa),
            ValueError,
            ["x_sf has shape (2, 2)", "(4, 2)"],
        ),
        "x_sf not swizzled": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf, Q.gsa, scale_layout="swizzled_128x4"),
            ValueError,
            ["x_sf has shape (4, 2)", "(128, 4)", "'swizzled_128x4'"],
        ),
        "x_sf device": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf.to("meta"), Q.gsa),
            ValueError,
            [f"x_sf is on meta and x_fp4 on {on}"],
        ),
        "gsa to dequantize": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf, ones(3)),
            ValueError,
            ["gsa has shape (3,)", "(4,)"],
        ),
        "gsa number to dequantize": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf, 0.1),
            TypeError,
            ["gsa is float", "torch.Tensor"],
        ),
        "cols": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf, Q.gsa, cols=16),
            ValueError,
            ["cols is 16", "17 to 32"],
        ),
        "dim to dequantize": (
            lambda: J.dequantize_nvfp4(Q.x_fp4, Q.x_sf, Q.gsa, dim=1),
            ValueError,
            ["dim is 1"],
        ),
        "dim 0 of three": (
            lambda: J.dequantize_nvfp4(
                zeros(8, 2, 2, dtype=torch.uint8), zeros(1, dtype=torch.uint8), Q.gsa, dim=0
            ),
            ValueError,
            ["x_fp4 has shape (8, 2, 2)", "(P, N) with dim=0"],
        ),
        "dim 0 swizzled to dequantize": (
            lambda: J.dequantize_nvfp4(
                zeros(8, 2, dtype=torch.uint8),
                zeros(1, 2, dtype=torch.uint8),
                Q.gsa,
                dim=0,
                scale_layout="swizzled_128x4",
            ),
            ValueError,
            ["scale_layout is 'swizzled_128x4' with dim=0"],
        ),
        # out.
        "out type": (
            lambda: J.quantize_nvfp4(X, out=X),
            TypeError,
            ["out is Tensor", "QuantizedActivation.empty"],
        ),
        "out shape": (
            lambda: J.quantize_nvfp4(X, out=empty((4, 48))),
            ValueError,
            ["out.shape is (4, 48)", "(4, 32)"],
        ),
        "out columns": (
            lambda: J.quantize_nvfp4(X, out=empty((4, 31))),
            ValueError,
            ["out.shape is (4, 31)"],
        ),
        "out scale_layout": (
            lambda: J.quantize_nvfp4(X, out=empty((4, 32), scale_layout="swizzled_128x4")),
            ValueError,
            ["out.scale_layout is 'swizzled_128x4'", "'linear'"],
        ),
        "out granularity": (
            lambda: J.quantize_nvfp4(X, out=empty((4, 32), granularity="row")),
            ValueError,
            ["out.granularity is 'row'", "'tensor'"],
        ),
        "out granularity with a number": (
            lambda: J.quantize_nvfp4(
                X, 0.1, granularity="row", out=empty((4, 32), granularity="row")
            ),
            ValueError,
            ["out.granularity is 'row'"],
        ),
        "out dim": (
            lambda: J.quantize_weight_nvfp4(randn(32, 32), out=empty((32, 32), dim=0)),
            ValueError,
            ["out.dim is 0"],
        ),
        "out inv_rms missing": (
            lambda: J.rmsnorm_quantize_nvfp4(X, WEIGHT, out=empty((4, 32), granularity="row")),
            ValueError,
            ["out.inv_rms is None", "inv_rms=True"],
        ),
        "out inv_rms given": (
            lambda: J.quantize_nvfp4(X, out=empty((4, 32), inv_rms=True)),
            ValueError,
            ["out.inv_rms is given", "without it"],
        ),
        "out.x_fp4 dtype": (
            lambda: J.quantize_nvfp4(X, out=buffers(x_fp4=zeros(4, 16))),
            TypeError,
            ["out.x_fp4 is torch.float32", "float4_e2m1fn_x2"],
        ),
        "out.x_sf shape": (
            lambda: J.quantize_nvfp4(X, out=buffers(x_sf=Q.x_sf[:2])),
            ValueError,
            ["out.x_sf has shape (2, 2)", "(4, 2)", "QuantizedActivation.empty"],
        ),
        "out.x_sf stride": (
            lambda: J.quantize_nvfp4(X, out=buffers(x_sf=empty((2, 64)).x_sf.view(torch.uint8).T)),
            ValueError,
            ["out.x_sf has strides", "contiguous"],
        ),
        "out.gsa device": (
            lambda: J.quantize_nvfp4(X, out=buffers(gsa=zeros(1, device="meta"))),
            ValueError,
            ["out.gsa is on meta", f"the input's device {on}"],
        ),
        "out of amax": (
            lambda: J.amax_gsa(X, out=zeros(2)),
            ValueError,
            ["out has shape (2,)", "(1,)"],
        ),
        "out of amax dtype": (
            lambda: J.amax_gsa(X, out=zeros(1).double()),
            TypeError,
            ["out is torch.float64", "torch.float32"],
        ),
        "out of amax type": (lambda: J.amax_gsa(X, out=[0.0]), TypeError, ["out is list"]),
        "out of dequantize": (
            lambda: J.dequantize_nvfp4(Q, out=zeros(4, 31)),
            ValueError,
            ["out has shape (4, 31)", "(4, 32)", "torch.empty(shape, ...) makes"],
        ),
        "out of dequantize dtype": (
            lambda: J.dequantize_nvfp4(Q, torch.float32, out=zeros(4, 32).half()),
            TypeError,
            ["out is torch.float16", "torch.float32"],
        ),
        "out of dequantize int": (
            lambda: J.dequantize_nvfp4(Q, out=zeros(4, 32).int()),
            TypeError,
            ["dtype is torch.int32"],
        ),
        "out of dequantize type": (lambda: Q.dequantize(out=[]), TypeError, ["out is list"]),
        "out of dequantize stride": (
            lambda: J.dequantize_nvfp4(Q, out=zeros(32, 4).T),
            ValueError,
            ["out has strides (1, 4)"],
        ),
    }


CASES = cases("cpu")
X = samples.randn(4, 32)
META = torch.zeros(4, 32, device="meta")


@pytest.mark.parametrize("name", CASES)
def test_message(name: str) -> None:
    call, error, texts = CASES[name]
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for text in texts:
        assert text in message
    assert "\n" not in message


def test_out_is_left_alone_by_a_refused_call() -> None:
    out = _EMPTY((4, 48))
    gsa = out.gsa
    with pytest.raises(ValueError, match=r"out\.shape"):
        J.quantize_nvfp4(X, torch.ones(1), out=out)
    assert out.gsa is gsa


def test_device_without_kernels() -> None:
    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("mps")

    x = torch.Tensor._make_subclass(Elsewhere, X)
    with pytest.raises(
        ValueError, match="x is on mps; accepted devices are cpu and cuda"
    ) as caught:
        J.quantize_nvfp4(x)
    assert "x.to('cuda')" in str(caught.value)


def test_sparse_input() -> None:
    from jitquant.ops import _checks

    with pytest.raises(TypeError, match=r"x has layout torch.sparse_coo.*x\.to_dense\(\)"):
        _checks.input_tensor(torch.eye(16).to_sparse(), "x")


def test_ops_check_too() -> None:
    q = J.quantize_nvfp4(X)
    with pytest.raises(ValueError, match=r"x\.contiguous\(\)"):
        torch.ops.jitquant.quantize_nvfp4(X.T)
    with pytest.raises(ValueError, match="recipe is 'a'"):
        torch.ops.jitquant.quantize_nvfp4(META, recipe="a")
    with pytest.raises(ValueError, match=r"out\.gsa has shape"):
        torch.ops.jitquant.quantize_nvfp4.out(X, x_fp4=q.x_fp4, x_sf=q.x_sf, gsa=torch.zeros(2))
