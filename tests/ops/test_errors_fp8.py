"""Every bad argument of the 8-bit functions: the error names it and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import samples
import torch

import jitquant
from jitquant import QuantizedGroups, QuantizedTensor

J = jitquant

Case = tuple[Callable[[], Any], type[Exception], list[str]]


def cases(device: str) -> dict[str, Case]:
    """Calls with a bad argument on a device, the error, and what it says."""
    zeros, ones = partial(torch.zeros, device=device), partial(torch.ones, device=device)
    tensor, hollow = partial(torch.tensor, device=device), partial(torch.empty, device=device)
    empty = partial(QuantizedTensor.empty, device=device)

    def randn(*shape: int) -> torch.Tensor:
        return samples.randn(*shape).to(device)

    X, W, FUSED = randn(4, 32), ones(32), randn(4, 64)
    META = torch.zeros(4, 32, device="meta")
    AT, ONE = tensor([0, 64, 128]), ones(1)
    on = str(ONE.device)
    Q, GROUPS = J.quantize_fp8(X), J.quantize_grouped(X, AT)
    SQUARE, BUFFERS = randn(32, 32), empty((32, 32), format="mxfp8")

    def changed(**parts: Any) -> QuantizedTensor:
        out = empty((4, 32))
        for name, value in parts.items():
            setattr(out, name, value)
        return out

    def changed_groups(format: str = "fp8_tensor", **parts: Any) -> QuantizedGroups:
        out = QuantizedGroups.empty((4, 32), AT, format=format)
        for name, value in parts.items():
            setattr(out, name, value)
        return out

    def grouped(shape: tuple[int, int], **extras: bool) -> QuantizedTensor:
        return empty(shape, format="fp8_group", group_size=16, layout="column", **extras)

    return {
        "x list": (lambda: J.quantize_fp8([1.0]), TypeError, ["x is list", "__dlpack__"]),
        "x int": (lambda: J.quantize_group(X.int()), TypeError, ["x is torch.int32", "bfloat16"]),
        "x transposed": (
            lambda: J.quantize_mxfp8(X.T),
            ValueError,
            ["strides (1, 32)", "contiguous()"],
        ),
        "x 0-dim": (lambda: J.quantize_fp8(tensor(1.0)), ValueError, ["x has shape ()"]),
        "x no columns": (lambda: J.quantize_group(zeros(3, 0)), ValueError, ["N of 1 or more"]),
        "granularity": (
            lambda: J.quantize_fp8(X, granularity="token"),
            ValueError,
            ["granularity is 'token'", "'tensor', 'row'"],
        ),
        "granularity beside a scale": (
            lambda: J.quantize_fp8(X, granularity="token", scale=2.0),
            ValueError,
            ["granularity is 'token'", "'tensor', 'row'"],
        ),
        "granularity of a norm beside a scale": (
            lambda: J.rmsnorm_quantize_fp8(X, W, granularity="zzz", scale=ONE),
            ValueError,
            ["granularity is 'zzz'"],
        ),
        "granularity of a product beside a scale": (
            lambda: J.silu_mul_quantize_fp8(FUSED, granularity="zzz", scale=1.0),
            ValueError,
            ["granularity is 'zzz'"],
        ),
        "x list with a scale a row": (
            lambda: J.quantize_fp8([[1.0]], scale=ONE, granularity="row"),
            TypeError,
            ["x is list", "__dlpack__"],
        ),
        "fused list with a scale a row": (
            lambda: J.silu_mul_quantize_fp8([[1.0, 2.0]], scale=ONE),
            TypeError,
            ["fused is list"],
        ),
        "dtype": (
            lambda: J.quantize_fp8(X, dtype=torch.int8),
            TypeError,
            ["dtype is torch.int8", "float8_e4m3fn", "float8_e5m2"],
        ),
        "dtype of groups": (
            lambda: J.quantize_group(X, dtype=torch.float16),
            TypeError,
            ["dtype is torch.float16", "torch.int8"],
        ),
        "dtype of mxfp8": (
            lambda: J.quantize_mxfp8(X, dtype=torch.int8),
            TypeError,
            ["dtype is torch.int8"],
        ),
        # Types.
        "x sparse": (
            lambda: J.quantize_fp8(X.to_sparse()),
            TypeError,
            ["x has layout torch.sparse_coo", "torch.strided", "x.to_dense()"],
        ),
        "x sparse in NVFP4": (
            lambda: J.quantize_nvfp4(X.to_sparse()),
            TypeError,
            ["x has layout torch.sparse_coo"],
        ),
        "x sparse of groups": (
            lambda: J.quantize_grouped(X.to_sparse(), AT),
            TypeError,
            ["x has layout torch.sparse_coo"],
        ),
        "group_size str": (
            lambda: J.quantize_group(X, "128"),
            TypeError,
            ["group_size is str", "an int", "int(group_size)"],
        ),
        "group_size float": (
            lambda: J.quantize_group_both(X, 16.0),
            TypeError,
            ["group_size is float", "an int"],
        ),
        "group_size str with buffers": (
            lambda: J.quantize_group(X, "16", out=grouped((4, 32))),
            TypeError,
            ["group_size is str"],
        ),
        "dtype None": (
            lambda: J.quantize_group(X, dtype=None),
            TypeError,
            ["dtype is NoneType", "a torch.dtype", "torch.float8_e4m3fn"],
        ),
        "dtype number": (lambda: J.quantize_fp8(X, dtype=24), TypeError, ["dtype is int"]),
        "dtype str of dequantize": (lambda: J.dequantize(Q, "bf16"), TypeError, ["dtype is str"]),
        "eps str": (
            lambda: J.quantize_group(X, eps="1"),
            TypeError,
            ["eps is str", "a number", "float(eps)"],
        ),
        "eps of the norm None": (
            lambda: J.rmsnorm_quantize_fp8(X, W, None),
            TypeError,
            ["eps is NoneType", "a number"],
        ),
        "scale_ub str": (lambda: J.quantize_fp8(X, scale_ub="1"), TypeError, ["scale_ub is str"]),
        "recipe None": (
            lambda: J.quantize_group(X, recipe=None),
            TypeError,
            ["recipe is NoneType", "a str", "default"],
        ),
        "amax str": (
            lambda: J.quantize_fp8(X, scale=1.0, amax="yes"),
            TypeError,
            ["amax is str", "a bool", "bool(amax)"],
        ),
        "interleave None": (
            lambda: J.silu_mul_quantize_group(FUSED, interleave=None),
            TypeError,
            ["interleave is NoneType", "an int"],
        ),
        "activation None": (
            lambda: J.quantize_grouped_grad(X, AT, activation=None),
            TypeError,
            ["activation is NoneType"],
        ),
        "block of floats": (
            lambda: J.quantize_block(X, (128.0, 128.0)),
            TypeError,
            ["block is (128.0, 128.0)", "two ints", "(128, 128)"],
        ),
        # Scales.
        "scale str": (
            lambda: J.quantize_fp8(X, scale="1"),
            TypeError,
            ["scale is str", "a number", "float32 tensor"],
        ),
        "scale bool": (lambda: J.quantize_fp8(X, scale=True), TypeError, ["scale is bool"]),
        "scale 0": (
            lambda: J.quantize_fp8(X, scale=0.0),
            ValueError,
            ["scale is 0.0", "finite positive", "448 / amax"],
        ),
        "scale that is 0 in float32": (
            lambda: J.quantize_fp8(X, scale=1e-46),
            ValueError,
            ["scale is 1e-46", "2.94e-39 or more"],
        ),
        "scale without a reciprocal": (
            lambda: J.silu_mul_quantize_fp8(FUSED, scale=2.0**-128),
            ValueError,
            ["scale is 2.938", "reciprocal is finite in float32"],
        ),
        "scale inf": (lambda: J.rmsnorm_quantize_fp8(X, W, scale=math.inf), ValueError, ["is inf"]),
        "scale nan": (lambda: J.quantize_fp8(X, scale=math.nan), ValueError, ["scale is nan"]),
        "scale dtype": (
            lambda: J.quantize_fp8(X, scale=ONE.half()),
            TypeError,
            ["scale is torch.float16", "scale.float()"],
        ),
        "scale count": (
            lambda: J.quantize_fp8(X, scale=ones(3)),
            ValueError,
            ["scale has shape (3,)", "'row'", "4 elements"],
        ),
        "scale strides": (
            lambda: J.quantize_fp8(X, scale=ones(8)[::2]),
            ValueError,
            ["scale has strides (2,)", "scale.contiguous()"],
        ),
        "scale device": (
            lambda: J.quantize_fp8(META, scale=ONE),
            ValueError,
            [f"scale is on {on} and x on meta"],
        ),
        "scale_ub 0": (lambda: J.quantize_fp8(X, scale_ub=0.0), ValueError, ["scale_ub is 0.0"]),
        "scale_ub that is 0 in float32": (
            lambda: J.quantize_fp8(X, scale_ub=1e-46),
            ValueError,
            ["scale_ub is 1e-46", "2**-149 or more", "Leave it out"],
        ),
        "scale_ub inf": (
            lambda: J.rmsnorm_quantize_fp8(X, W, scale_ub=math.inf),
            ValueError,
            ["scale_ub is inf"],
        ),
        "scale_ub beside a scale": (
            lambda: J.quantize_fp8(X, scale=1.0, scale_ub=2.0),
            ValueError,
            ["scale_ub is 2.0 beside a scale"],
        ),
        "tensor scale of a fused producer": (
            lambda: J.rmsnorm_quantize_fp8(X, W, granularity="tensor"),
            ValueError,
            ["granularity is 'tensor' without a scale", "'row'", "quantize_fp8"],
        ),
        "scale twice": (
            lambda: torch.ops.jitquant.quantize_fp8(
                X, ONE, dtype=torch.float8_e4m3fn, scale_value=2.0
            ),
            ValueError,
            ["as a tensor and as a number"],
        ),
        "number with rows": (
            lambda: torch.ops.jitquant.quantize_fp8(
                X, dtype=torch.float8_e4m3fn, scale_value=2.0, granularity="row"
            ),
            ValueError,
            ["scale is one number", "granularity 'tensor'"],
        ),
        # Groups and blocks.
        "group_size": (
            lambda: J.quantize_group(X, 48),
            ValueError,
            ["group_size is 48", "16, 32, 64, 128, 256", "granularity='row'"],
        ),
        "scale_format": (
            lambda: J.quantize_group(X, scale_format="e8m0"),
            ValueError,
            ["scale_format is 'e8m0'", "'float32', 'ue8m0', 'ue8m0_packed'"],
        ),
        "scale_layout": (
            lambda: J.quantize_group(X, scale_layout="tma"),
            ValueError,
            ["scale_layout is 'tma'", "'row', 'column', 'column_tma'"],
        ),
        "recipe": (
            lambda: J.quantize_group(X, recipe="trt"),
            ValueError,
            ["recipe is 'trt'", "'te', 'deepgemm', 'vllm'"],
        ),
        "eps": (
            lambda: J.quantize_group(X, eps=0.0),
            ValueError,
            ["eps is 0.0", "from 1e-32 on", "group of zeros"],
        ),
        "eps nan": (lambda: J.quantize_block(X, eps=math.nan), ValueError, ["eps is nan"]),
        "amax_eps": (
            lambda: J.rmsnorm_quantize_group(X, W, amax_eps=math.inf),
            ValueError,
            ["amax_eps is inf"],
        ),
        "eps of the norm": (
            lambda: J.rmsnorm_quantize_group(X, W, eps=-1.0),
            ValueError,
            ["eps is -1.0", "not negative"],
        ),
        "block": (
            lambda: J.quantize_block(X, (128, 64)),
            ValueError,
            ["block is (128, 64)", "(128, 128)", "quantize_group"],
        ),
        "block_cols of dequantize": (
            lambda: torch.ops.jitquant.dequantize(
                zeros(4, 24, dtype=torch.int8), ones(4, 2), 1, 12
            ),
            ValueError,
            ["block_rows is 1 and block_cols is 12", "a multiple of 16"],
        ),
        "block_rows of dequantize": (
            lambda: torch.ops.jitquant.dequantize(
                zeros(4, 16, dtype=torch.int8), ones(4, 1), -1, 16
            ),
            ValueError,
            ["block_rows is -1 and block_cols is 16", "not negative"],
        ),
        "block number": (
            lambda: J.quantize_block(X, 128),
            ValueError,
            ["block is 128", "(128, 128)"],
        ),
        "block 1-D": (
            lambda: J.quantize_block(X[0]),
            ValueError,
            ["w has shape (32,)", "(..., N, K)"],
        ),
        "packed block": (
            lambda: J.quantize_block(X, scale_format="ue8m0_packed"),
            ValueError,
            ["scale_format is 'ue8m0_packed'", "'float32', 'ue8m0'"],
        ),
        "layout of blocks": (
            lambda: J.quantize_block(X, scale_layout="column"),
            ValueError,
            ["scale_layout is 'column'", "'row', 'row_padded'"],
        ),
        "layout of mxfp8": (
            lambda: J.quantize_mxfp8(X, scale_layout="row"),
            ValueError,
            ["scale_layout is 'row'", "'linear', 'swizzled_128x4'"],
        ),
        "both of three dimensions": (
            lambda: J.quantize_group_both(randn(2, 3, 32)),
            ValueError,
            ["x has shape (2, 3, 32)", "(M, K)", "x.flatten(0, -2)"],
        ),
        "blocks of both of three dimensions": (
            lambda: J.quantize_block_both(randn(2, 3, 32)),
            ValueError,
            ["w has shape (2, 3, 32)", "(M, K)"],
        ),
        "blocks of both": (
            lambda: J.quantize_block_both(X, (1, 128)),
            ValueError,
            ["block is (1, 128)", "(128, 128)"],
        ),
        "both of no rows": (
            lambda: J.quantize_mxfp8_both(zeros(0, 32)),
            ValueError,
            ["x has shape (0, 32)"],
        ),
        # Experts.
        "counts dtype": (
            lambda: J.quantize_group(X, counts=ones(1)),
            TypeError,
            ["counts is torch.float32", "int32 and int64", "counts.int()"],
        ),
        "counts number": (
            lambda: J.quantize_group(randn(3, 4, 32), counts=ones(2, dtype=torch.int32)),
            ValueError,
            ["counts has shape (2,)", "3 numbers"],
        ),
        "counts of one row": (
            lambda: J.quantize_group(X[0], counts=ones(1, dtype=torch.int32)),
            ValueError,
            ["counts is given with x of shape (32,)", "(E, T, N)"],
        ),
        "counts device": (
            lambda: J.quantize_group(META, counts=ones(1, dtype=torch.int32)),
            ValueError,
            [f"counts is on {on} and x on meta"],
        ),
        "counts strides": (
            lambda: J.quantize_group(randn(2, 3, 32), counts=ones(4, dtype=torch.int32)[::2]),
            ValueError,
            ["counts has strides (2,)", "counts.contiguous()"],
        ),
        # Fused.
        "fused odd": (
            lambda: J.silu_mul_quantize_fp8(randn(4, 33)),
            ValueError,
            ["fused has shape (4, 33)", "(..., 2 * N)"],
        ),
        "interleave": (
            lambda: J.silu_mul_quantize_group(FUSED, interleave=5),
            ValueError,
            ["interleave is 5 with N = 32", "divisors of N"],
        ),
        "weight": (
            lambda: J.rmsnorm_quantize_fp8(X, W[:5]),
            ValueError,
            ["weight has shape (5,)", "(32,)"],
        ),
        "residual": (
            lambda: J.rmsnorm_quantize_group(X, W, residual=X[:2]),
            ValueError,
            ["residual has shape (2, 32)"],
        ),
        # Grouped.
        "offsets dtype": (
            lambda: J.quantize_grouped(X, AT.int()),
            TypeError,
            ["offsets is torch.int32", "int64", "offsets.long()"],
        ),
        "offsets shape": (
            lambda: J.quantize_grouped(X, AT[None]),
            ValueError,
            ["offsets has shape (1, 3)", "(G + 1,)"],
        ),
        "no offsets": (
            lambda: J.quantize_grouped(X, AT[:0]),
            ValueError,
            ["offsets has shape (0,)"],
        ),
        "offsets strides": (
            lambda: J.quantize_grouped(X, tensor([0, 1, 2, 3, 4, 5])[::2]),
            ValueError,
            ["offsets has strides (2,)"],
        ),
        "offsets device": (
            lambda: J.quantize_grouped(META, AT),
            ValueError,
            [f"offsets is on {on} and x on meta"],
        ),
        "sizes": (
            lambda: J.quantize_grouped(X, AT, sizes=AT),
            ValueError,
            ["sizes has shape (3,)", "(2,)"],
        ),
        "scale of groups": (
            lambda: J.quantize_grouped(X, AT, scale=ONE),
            ValueError,
            ["scale has shape (1,)", "(2,)"],
        ),
        "grouped strides": (
            lambda: J.quantize_grouped(X[:, ::2], AT),
            ValueError,
            ["x is not contiguous", "x.contiguous()"],
        ),
        "format": (
            lambda: J.quantize_grouped(X, AT, format="mxfp8"),
            ValueError,
            ["format is 'mxfp8'", "'fp8_tensor', 'nvfp4'"],
        ),
        "recipe of groups": (
            lambda: J.quantize_grouped(X, AT, format="nvfp4", recipe="deepgemm"),
            ValueError,
            ["recipe is 'deepgemm'", "'te', 'vllm'"],
        ),
        "recipe of groups in FP8": (
            lambda: J.quantize_grouped(X, AT, recipe="bogus"),
            ValueError,
            ["recipe is 'bogus'", "'te', 'vllm'"],
        ),
        "dtype of groups in NVFP4": (
            lambda: J.quantize_grouped(X, AT, format="nvfp4", dtype=torch.int8),
            TypeError,
            ["dtype is torch.int8", "float8_e4m3fn"],
        ),
        "activation": (
            lambda: J.quantize_grouped_grad(X, AT, act_input=X, activation="tanh"),
            ValueError,
            ["activation is 'tanh'", "'silu'"],
        ),
        "activation without its input": (
            lambda: J.quantize_grouped_grad(X, AT, activation="silu"),
            ValueError,
            ["activation is 'silu' and act_input is None", "both or neither"],
        ),
        "act_input": (
            lambda: J.quantize_grouped_grad(X, AT, act_input=X.float(), activation="silu"),
            ValueError,
            ["act_input is torch.float32", "torch.bfloat16 (4, 32)"],
        ),
        # Dequantization.
        "q": (lambda: J.dequantize(X), TypeError, ["q is Tensor", "dequantize_nvfp4"]),
        "q grouped": (lambda: J.dequantize_grouped(Q), TypeError, ["q is QuantizedTensor"]),
        "to float64": (
            lambda: J.dequantize(Q, torch.float64),
            TypeError,
            ["dtype is torch.float64"],
        ),
        "data": (
            lambda: J.dequantize(changed(data=X)),
            TypeError,
            ["data is torch.bfloat16", "float8_e4m3fn"],
        ),
        "scales shape": (
            lambda: J.dequantize(changed(stored_scales=ones(3))),
            ValueError,
            ["scale_inv has shape (3,)", "(1,)"],
        ),
        "scales dtype": (
            lambda: J.dequantize(changed(stored_scales=ONE.half())),
            TypeError,
            ["scale_inv is torch.float16", "float32"],
        ),
        "out of dequantize": (
            lambda: J.dequantize(Q, out=zeros(4, 31)),
            ValueError,
            ["out has shape (4, 31)", "(4, 32)", "torch.empty(shape, ...) makes"],
        ),
        # out.
        "out type": (
            lambda: J.quantize_fp8(X, out=X),
            TypeError,
            ["out is Tensor", "QuantizedTensor.empty"],
        ),
        "out shape": (
            lambda: J.quantize_fp8(X, out=empty((4, 31))),
            ValueError,
            ["out.shape is (4, 31)", "(4, 32)"],
        ),
        "out dtype": (
            lambda: J.quantize_fp8(X, out=empty((4, 32), dtype=torch.float8_e5m2)),
            ValueError,
            ["out.dtype is torch.float8_e5m2", "torch.float8_e4m3fn"],
        ),
        "out format": (
            lambda: J.quantize_fp8(X, out=empty((4, 32), format="fp8_row")),
            ValueError,
            ["out.format is 'fp8_row'", "'fp8_tensor'"],
        ),
        "out layout": (
            lambda: J.quantize_group(
                X, 16, out=empty((4, 32), format="fp8_group", group_size=16, layout="column")
            ),
            ValueError,
            ["out.layout is 'column'", "'row'"],
        ),
        "out without amax": (
            lambda: J.quantize_fp8(X, out=empty((4, 32), amax=False)),
            ValueError,
            ["out.amax is None", "amax=True"],
        ),
        "out with amax": (
            lambda: J.quantize_fp8(X, scale=1.0, amax=False, out=empty((4, 32))),
            ValueError,
            ["out.amax is given", "amax=False"],
        ),
        "out without inv_rms": (
            lambda: J.rmsnorm_quantize_fp8(X, W, out=empty((4, 32), format="fp8_row")),
            ValueError,
            ["out.inv_rms is None", "inv_rms=True"],
        ),
        "out.data device": (
            lambda: J.quantize_fp8(X, out=changed(data=Q.data.to("meta"))),
            ValueError,
            ["out.data is on meta"],
        ),
        "out.data strides": (
            lambda: J.quantize_fp8(X, out=changed(data=hollow(32, 4, dtype=torch.float8_e4m3fn).T)),
            ValueError,
            ["out.data has strides (1, 4)", "last dimension"],
        ),
        "out.data expanded": (
            lambda: J.quantize_fp8(
                X, out=changed(data=hollow(1, 32, dtype=torch.float8_e4m3fn).expand(4, 32))
            ),
            ValueError,
            ["out.data has strides (0, 1)", "memory of its own"],
        ),
        "out.data expanded of no rows": (
            lambda: J.quantize_fp8(
                randn(0, 4, 32),
                out=replace(
                    empty((0, 4, 32)), data=hollow(1, dtype=torch.float8_e4m3fn).expand(0, 4, 32)
                ),
            ),
            ValueError,
            ["out.data has strides"],
        ),
        "out.data with rows in each other": (
            lambda: J.quantize_fp8(
                X,
                out=changed(
                    data=hollow(128, dtype=torch.float8_e4m3fn).as_strided((4, 32), (16, 1))
                ),
            ),
            ValueError,
            ["out.data has strides (16, 1)", "memory of its own", "slice"],
        ),
        "out.data with batches in each other": (
            lambda: J.quantize_fp8(
                randn(2, 4, 32),
                out=replace(
                    empty((2, 4, 32)),
                    data=hollow(256, dtype=torch.float8_e4m3fn).as_strided((2, 4, 32), (96, 32, 1)),
                ),
            ),
            ValueError,
            ["out.data has strides (96, 32, 1)", "memory of its own"],
        ),
        "out.scale_inv": (
            lambda: J.quantize_fp8(X, out=changed(stored_scales=ones(2))),
            ValueError,
            ["out.scale_inv has shape (2,)", "(1,)", "QuantizedTensor.empty(shape, ...) makes"],
        ),
        "out of both": (
            lambda: J.quantize_group_both(X, out=empty((4, 32))),
            TypeError,
            ["out is QuantizedTensor", "tuple of two"],
        ),
        "out of both swapped": (
            lambda: J.quantize_mxfp8_both(
                X, out=(empty((32, 4), format="mxfp8"), empty((4, 32), format="mxfp8"))
            ),
            ValueError,
            ["out[0].shape is (32, 4)", "(4, 32)"],
        ),
        "out of both with amax": (
            lambda: J.quantize_group_both(
                X, 16, out=(grouped((4, 32), amax=True), grouped((32, 4)))
            ),
            ValueError,
            ["out[0].amax is given", "quantize_group_both", "amax=False"],
        ),
        "out of both with inv_rms": (
            lambda: J.quantize_block_both(
                X,
                out=(
                    empty((4, 32), format="fp8_block"),
                    empty((32, 4), format="fp8_block", inv_rms=True),
                ),
            ),
            ValueError,
            ["out[1].inv_rms is given", "inv_rms=False"],
        ),
        "out of both is one": (
            lambda: J.quantize_mxfp8_both(SQUARE, out=(BUFFERS, BUFFERS)),
            ValueError,
            ["out[0] and out[1] have one data", "share no memory", "two calls"],
        ),
        "out of both with the same scales": (
            lambda: J.quantize_mxfp8_both(
                SQUARE, out=(BUFFERS, replace(BUFFERS, data=torch.empty_like(BUFFERS.data)))
            ),
            ValueError,
            ["out[0] and out[1] have one stored_scales"],
        ),
        "out of both without scales": (
            lambda: J.quantize_mxfp8_both(
                SQUARE, out=(BUFFERS, replace(BUFFERS, stored_scales=None))
            ),
            TypeError,
            ["out[1].stored_scales is NoneType", "QuantizedTensor.empty"],
        ),
        "out without data": (
            lambda: J.quantize_fp8(X, out=changed(data=None)),
            TypeError,
            ["out.data is NoneType", "torch.Tensor", "QuantizedTensor.empty"],
        ),
        "out without scales": (
            lambda: J.quantize_fp8(X, out=changed(stored_scales=None)),
            TypeError,
            ["out.stored_scales is NoneType"],
        ),
        "out with an amax that is no tensor": (
            lambda: J.quantize_fp8(X, out=changed(amax=1.0)),
            TypeError,
            ["out.amax is float"],
        ),
        "out of groups": (
            lambda: J.quantize_grouped(X, AT, out=Q),
            TypeError,
            ["out is QuantizedTensor", "QuantizedGroups.empty"],
        ),
        "out format of groups": (
            lambda: J.quantize_grouped(
                X, AT, format="nvfp4", out=QuantizedGroups.empty((4, 32), AT)
            ),
            ValueError,
            ["out.format is 'fp8_tensor'", "'nvfp4'"],
        ),
        "out with block_scales of groups": (
            lambda: J.quantize_grouped(X, AT, out=changed_groups(block_scales=ONE)),
            ValueError,
            [
                "out.block_scales is given",
                "'fp8_tensor' has no such result",
                "QuantizedGroups.empty",
            ],
        ),
        "out without block_scales of groups": (
            lambda: J.quantize_grouped(
                X, AT, format="nvfp4", out=changed_groups("nvfp4", block_scales=None)
            ),
            ValueError,
            ["out.block_scales is None", "'nvfp4' has such a result"],
        ),
        "out without data of groups": (
            lambda: J.quantize_grouped(X, AT, out=changed_groups(data=None)),
            TypeError,
            ["out.data is NoneType", "QuantizedGroups.empty"],
        ),
        "out.amax of groups": (
            lambda: J.quantize_grouped(X, AT, out=changed_groups(amax=ONE)),
            ValueError,
            ["out.amax has shape (1,)", "(2,)", "QuantizedGroups.empty(shape, offsets, ...) makes"],
        ),
        "out without amax of groups": (
            lambda: J.quantize_grouped_grad(X, AT, dbias=False, out=changed_groups(amax=None)),
            TypeError,
            ["out.amax is NoneType"],
        ),
        "out strides of groups": (
            lambda: J.quantize_grouped(
                X,
                AT,
                out=QuantizedGroups(
                    **{
                        **{
                            f: getattr(GROUPS, f) for f in ("scale_inv", "amax", "offsets", "shape")
                        },
                        "data": hollow(4, 48, dtype=torch.float8_e4m3fn)[:, :32],
                    }
                ),
            ),
            ValueError,
            ["out.data has strides (48, 1)", "contiguous"],
        ),
        "out dbias": (
            lambda: J.quantize_grouped_grad(
                X, AT, dtype=torch.float8_e4m3fn, out=QuantizedGroups.empty((4, 32), AT)
            ),
            ValueError,
            ["out.dbias is None", "dbias=True"],
        ),
        "out of dequantize_grouped": (
            lambda: J.dequantize_grouped(GROUPS, out=zeros(128)),
            ValueError,
            ["out has shape (128,)", "(4, 32)", "torch.empty(shape, ...) makes"],
        ),
    }


RAW: dict[str, Case] = {
    **{
        f"{dtype} for a tensor": (
            lambda dtype=dtype: torch.ops.jitquant.dequantize(
                torch.zeros(4, 16, dtype=torch.int8), torch.zeros(1, dtype=dtype), 0, 0
            ),
            TypeError,
            [f"scale_inv is {dtype} with block_rows 0", "float32"],
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
            [f"scale_inv is {dtype} with scale_layout 'swizzled_128x4'", "float8_e8m0fnu"],
        )
        for dtype in (torch.float32, torch.int32)
    },
}
"""Of an op that is called by itself."""

CASES = cases("cpu") | RAW


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    call, error, parts = CASES[name]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text


def test_a_refused_call_writes_nothing() -> None:
    x, out = samples.randn(4, 32), QuantizedTensor.empty((4, 32))
    for part in (out.data, out.stored_scales, out.amax):
        part.view(torch.uint8).fill_(0xA5)
    with pytest.raises(ValueError, match="scale_ub"):
        J.quantize_fp8(x, scale_ub=-1.0, out=out)
    out.amax = torch.empty(2)
    with pytest.raises(ValueError, match=r"out\.amax has shape \(2,\)"):
        J.quantize_fp8(x, out=out)
    assert (out.data.view(torch.uint8) == 0xA5).all()
    assert (out.stored_scales.view(torch.uint8) == 0xA5).all()
