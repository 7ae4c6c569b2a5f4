"""The public functions of FP8, INT8, MXFP8 and ragged tensors: scales, ``out=``, experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from samples import byte_view, randn
from torch import Tensor
from torch.utils import _pytree as pytree

import jitquant
import jitquant.loader
from jitquant import QuantizedRaggedTensor, QuantizedTensor, reference
from jitquant.formats import QUANTIZED_MAX
from jitquant.ops import _checks_fp8

U8 = torch.uint8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X, W = randn(6, 48), torch.ones(48)
FUSED = randn(6, 96)
OFFSETS = torch.tensor([0, 2, 2, 5])


def same(a: Any, b: Any) -> bool:
    leaves = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return repr(a) == repr(b) and all(
        t.shape == u.shape and torch.equal(byte_view(t.contiguous()), byte_view(u.contiguous()))
        for t, u in leaves
    )


def buffers_like(q: Any) -> Any:
    """Fitting buffers for a call's result, full of a byte that none should keep."""
    if isinstance(q, tuple):
        return tuple(map(buffers_like, q))
    out = q.clone()
    for part in results_of(out):
        part.view(U8).fill_(0xA5)
    return out


def results_of(q: Any) -> list[Tensor]:
    """The tensors that a call has made, or written."""
    if isinstance(q, QuantizedRaggedTensor):
        q = [q.data, q.scale_inv, q.amax, q.block_scales, q.dbias]
    return [t for t in pytree.tree_leaves(q) if isinstance(t, Tensor)]


Call = Callable[..., QuantizedTensor]


def calls(x: Tensor, w: Tensor, fused: Tensor, scale: Tensor) -> dict[str, Call]:
    """Calls with one result of a tensor (M, N), a weight (N,), gate and up (M, 2 * N), a scale."""
    return {
        "tensor": lambda **k: jitquant.quantize_fp8(x, **k),
        "tensor e5m2": lambda **k: jitquant.quantize_fp8(x, dtype=E5M2, **k),
        "row": lambda **k: jitquant.quantize_fp8(x, granularity="row", **k),
        "given": lambda **k: jitquant.quantize_fp8(x, scale=scale, **k),
        "given without amax": lambda **k: jitquant.quantize_fp8(x, scale=3.0, amax=False, **k),
        "silu": lambda **k: jitquant.swiglu_quantize_fp8(fused, **k),
        "silu given": lambda **k: jitquant.swiglu_quantize_fp8(fused, scale=2.0, **k),
        "norm": lambda **k: jitquant.rmsnorm_quantize_fp8(x, w, **k),
        "norm given": lambda **k: jitquant.rmsnorm_quantize_fp8(x, w, scale=2.0, amax=False, **k),
        "group": lambda **k: jitquant.quantize_per_token_group(x, 16, **k),
        "group rotated": lambda **k: jitquant.quantize_per_token_group(x, 16, rotate="16", **k),
        "row rotated": lambda **k: jitquant.quantize_fp8(x, granularity="row", rotate="16", **k),
        "group tma": lambda **k: jitquant.quantize_per_token_group(
            x, 16, scale_layout="column_tma", scale_format="ue8m0_packed", recipe="deepgemm", **k
        ),
        "int8": lambda **k: jitquant.quantize_per_token_group(
            x, 32, dtype=torch.int8, recipe="vllm", **k
        ),
        "silu group": lambda **k: jitquant.swiglu_quantize_per_token_group(
            fused, 16, interleave=8, **k
        ),
        "norm group": lambda **k: jitquant.rmsnorm_quantize_per_token_group(x, w, 16, **k),
        "block": lambda **k: jitquant.quantize_block(x, (16, 16), scale_layout="row_padded", **k),
        "mxfp8": lambda **k: jitquant.quantize_mxfp8(x, **k),
        "mxfp8 swizzled": lambda **k: jitquant.quantize_mxfp8(
            x, scale_layout="swizzled_128x4", **k
        ),
    }


CALLS = calls(X, W, FUSED, torch.tensor(3.0))
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_out(name: str) -> None:
    q = CALLS[name]()
    q.validate()
    out = buffers_like(q)
    assert CALLS[name](out=out) is out
    assert same(out, q)


@every_call
def test_rows_of_a_buffer_may_lie_apart(name: str) -> None:
    q = CALLS[name]()
    whole = torch.full((6, 80), 0xA5, dtype=U8)
    out = buffers_like(q)
    out.data = whole[:, 16:64].view(q.dtype)
    CALLS[name](out=out)
    assert torch.equal(whole[:, 16:64], q.data.view(U8))
    assert (whole[:, :16] == 0xA5).all()
    assert (whole[:, 64:] == 0xA5).all()


def test_dimensions_of_a_buffer_may_be_in_any_order() -> None:
    x = randn(2, 3, 32)
    q = jitquant.quantize_fp8(x)
    out = q.clone()
    out.data = torch.empty(3, 2, 40, dtype=E4M3).transpose(0, 1)[..., 4:36]
    assert same(jitquant.quantize_fp8(x, out=out), q)


@every_call
def test_no_result_requires_grad(name: str) -> None:
    X.requires_grad_()
    FUSED.requires_grad_()
    try:
        q = CALLS[name]()
    finally:
        X.requires_grad_(False)
        FUSED.requires_grad_(False)
    assert not any(t.requires_grad for t in pytree.tree_leaves(q))


@pytest.mark.parametrize(
    "scale", [2.0, np.float32(2.0), 2, torch.tensor(2.0), torch.full((1, 1), 2.0)]
)
def test_a_scale_in_every_form(scale: Any) -> None:
    q = jitquant.quantize_fp8(X, scale=scale)
    assert q.format == "fp8_tensor"
    assert q.scale_inv.tolist() == [0.5]
    assert torch.equal(q.amax, X.float().abs().amax().reshape(1))
    assert torch.equal(q.data.view(U8), (X.float() * 2).clamp(-448, 448).to(E4M3).view(U8))
    assert jitquant.quantize_fp8(X, scale=scale, granularity="row").format == "fp8_tensor"


def test_the_least_and_the_largest_numbers() -> None:
    least = np.nextafter(np.float32(2.0**-128), np.float32(1))
    for scale in (least, np.finfo(np.float32).max):
        (scale_inv,) = jitquant.quantize_fp8(X, scale=scale).scale_inv.tolist()
        assert 0 < scale_inv < math.inf
    tiniest = np.nextafter(np.float32(0), np.float32(1))
    top = np.finfo(np.float32).max
    assert jitquant.quantize_fp8(X, scale_ub=tiniest).scale_inv == 1 / torch.tensor(top)
    assert jitquant.quantize_fp8(X, scale_ub=top).scale_inv == jitquant.quantize_fp8(X).scale_inv


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3, 1)])
def test_a_scale_a_row(shape: tuple[int, ...]) -> None:
    scale = torch.linspace(1, 6, 6).reshape(shape)
    q = jitquant.quantize_fp8(X, scale=scale)
    assert q.format == "fp8_row"
    assert q.scale_inv.shape == q.amax.shape == (6, 1)
    assert torch.equal(q.scale_inv.reshape(-1), 1 / scale.reshape(-1))
    one = jitquant.quantize_fp8(X[:1], scale=scale.reshape(-1)[:1], granularity="row")
    assert one.format == "fp8_row"
    assert one.scale_inv.shape == (1, 1)


def test_one_name_for_every_granularity() -> None:
    x = torch.randn(200, 300)
    for granularity, wanted in (
        ("1x128", jitquant.quantize_per_token_group(x)),
        ("128x128", jitquant.quantize_block(x)),
    ):
        out = QuantizedTensor.empty(x.shape, format=wanted.format, device=x.device)
        assert jitquant.quantize_fp8(x, granularity=granularity, out=out) is out
        for q in (out, jitquant.quantize_fp8(x, granularity=granularity)):
            assert q.block == wanted.block
            assert torch.equal(byte_view(q.data), byte_view(wanted.data))
            assert torch.equal(q.scale_inv, wanted.scale_inv)


def test_amax_is_of_the_input_before_the_bound() -> None:
    q = jitquant.quantize_fp8(X, granularity="row", scale_ub=0.5)
    amax = X.float().abs().amax(dim=1, keepdim=True)
    assert torch.equal(q.amax, amax)
    used = amax.clamp(max=0.5)
    scale = torch.div(torch.tensor(448.0), used)
    assert torch.equal(q.scale_inv, torch.div(torch.tensor(1.0), scale))


@pytest.mark.parametrize("recipe", ["te", "deepgemm", "vllm"])
def test_round_trip_of_a_weight(recipe: str) -> None:
    w = randn(200, 300)
    q = jitquant.quantize_block(w, recipe=recipe)
    assert q.scale_inv.shape == (2, 3)
    assert ((q.dequantize(torch.float32) - w.float()).abs() <= w.float().abs() / 15 + 1e-3).all()


def test_dequantize_out() -> None:
    q = jitquant.quantize_mxfp8(X)
    out = torch.empty(6, 48, dtype=torch.float16)
    assert jitquant.dequantize(q, out=out) is out
    assert torch.equal(out, q.dequantize(torch.float16))
    assert torch.equal(q.dequantize(torch.float16, out=out), out)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, U8])
def test_dequantize_padded_scales_of_a_byte(dtype: torch.dtype) -> None:
    data = torch.arange(5 * 40, dtype=torch.int8).reshape(5, 40)
    exponents = torch.arange(120, 140, dtype=U8).reshape(5, 4)
    got = torch.ops.jitquant.dequantize(
        data, exponents.view(dtype), 1, 16, scale_layout="row_padded"
    )
    powers = torch.exp2(exponents[:, :3].float() - 127).repeat_interleave(16, dim=1)[:, :40]
    assert torch.equal(got, (data * powers).bfloat16())


def test_residual_is_updated() -> None:
    residual = randn(6, 48, seed=3)
    want = (X.float() + residual.float()).bfloat16()
    for call in (jitquant.rmsnorm_quantize_fp8, jitquant.rmsnorm_quantize_per_token_group):
        added = residual.clone()
        call(X, W, residual=added)
        assert torch.equal(added, want)


def test_numbers_of_other_libraries() -> None:
    pairs = (
        (
            jitquant.quantize_per_token_group(X, np.int64(16), eps=np.float32(0.5)),
            jitquant.quantize_per_token_group(X, 16, eps=0.5),
        ),
        (
            jitquant.quantize_block(X, (np.int64(16), torch.tensor(16))),
            jitquant.quantize_block(X, (16, 16)),
        ),
        (
            jitquant.quantize_fp8(X, scale=2, amax=np.False_),
            jitquant.quantize_fp8(X, scale=2.0, amax=False),
        ),
    )
    for got, wanted in pairs:
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
            assert torch.equal(byte_view(a), byte_view(b))


def test_a_description_has_pythons_own_numbers() -> None:
    x = randn(32, 64)
    for sixteen in (torch.tensor(16), np.int64(16), np.array(16)):
        block = (sixteen, sixteen)
        results: tuple[Any, ...] = (
            jitquant.quantize_per_token_group(x, sixteen),
            jitquant.swiglu_quantize_per_token_group(x, sixteen),
            jitquant.rmsnorm_quantize_per_token_group(x, torch.ones(64), sixteen),
            *jitquant.quantize_per_token_group_both(x, sixteen),
            jitquant.quantize_block(x, block),
            *jitquant.quantize_block_both(x, block),
        )
        for q in results:
            assert [type(n) for n in q.block] == [int, int]
            assert q.block[1] == 16
    q4 = jitquant.deinterleave_quantize_nvfp4(x, torch.tensor(32))
    assert type(q4.cols) is int
    assert q4.shape == (32, 32)


def test_numpy_arrays() -> None:
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    assert same(jitquant.quantize_fp8(x), jitquant.quantize_fp8(torch.from_numpy(x)))
    scale = np.array([2.0], np.float32)
    assert jitquant.quantize_fp8(x, scale=scale).scale_inv.item() == 0.5


# ---- experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "scale_format"),
    list(itertools.product(["row", "column", "column_tma"], ["float32", "ue8m0_packed"])),
)
@pytest.mark.parametrize("fused", [False, True])
def test_rows_past_the_count(layout: str, scale_format: str, fused: bool) -> None:
    call = jitquant.swiglu_quantize_per_token_group if fused else jitquant.quantize_per_token_group
    x = randn(3, 6, 160 if fused else 80)
    counts = torch.tensor([2, 0, 6], dtype=torch.int32)
    keywords = {"scale_layout": layout, "scale_format": scale_format}
    full = call(x, 32, **keywords)
    there = torch.arange(6) < counts[:, None]
    x[~there] = math.nan
    zeroed = call(x, 32, counts=counts, **keywords)
    assert torch.equal(zeroed.data.view(U8), full.data.view(U8) * there[:, :, None])
    assert torch.equal(zeroed.scale_inv, full.scale_inv * there[:, :, None])
    out = buffers_like(full)
    assert call(x, 32, counts=counts, zero_padding=False, out=out, **keywords) is out
    assert torch.equal(out.data.view(U8)[there], full.data.view(U8)[there])
    assert (out.data.view(U8)[~there] == 0xA5).all()
    assert torch.equal(out.scale_inv[there], full.scale_inv[there])
    left = out.scale_inv[~there].contiguous()
    assert (left.view(U8) == 0xA5).all()
    if layout == "column_tma":
        assert not out.stored_scales[:, :, 6:].any()
    fresh = call(x, 32, counts=counts, zero_padding=False, **keywords)
    assert torch.equal(fresh.data.view(U8)[there], full.data.view(U8)[there])
    zeros = buffers_like(full)
    assert same(call(x, 32, counts=counts, out=zeros, **keywords), zeroed)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_the_upper_bound_is_a_value_of_the_dtype(dtype: torch.dtype) -> None:
    """As a float32: what the kernels get."""
    top = QUANTIZED_MAX[dtype]
    numbers = torch.cat([torch.arange(16.0, min(top, 600.0) + 1), torch.linspace(16, top, 500)])
    for number, own in zip(numbers.tolist(), numbers.to(dtype).float().tolist(), strict=True):
        for near in (number, number * (1 + 1e-9)):
            if own == number:
                _checks_fp8.bounds(dtype, None, near)
            else:
                with pytest.raises(ValueError, match="fp8_max: expected a value of"):
                    _checks_fp8.bounds(dtype, None, near)
    with pytest.raises(ValueError, match="fp8_max: expected a value of"):
        _checks_fp8.bounds(dtype, None, top * (1 + 1e-6))


def test_bounds_need_no_tensor() -> None:
    x, counts = randn(2, 4, 32), torch.tensor([1, 3])

    def call(x: Tensor, counts: Tensor, fp8_max: float) -> QuantizedTensor:
        return jitquant.quantize_per_token_group(
            x, 16, counts=counts, zero_padding=False, fp8_max=fp8_max
        )

    with torch.device("meta"):
        assert call(x, counts, 240.0).data.device.type == "cpu"
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for fp8_max in (240.0, 16.0, 16.0000000001):
        got = compiled(x, counts, fp8_max)
        assert same(got.data[1, :3], call(x, counts, fp8_max).data[1, :3])


def test_without_counts_every_row_is_there() -> None:
    want = jitquant.quantize_per_token_group(X, 16)
    assert same(jitquant.quantize_per_token_group(X, 16, zero_padding=False), want)
    out = buffers_like(want)
    assert same(jitquant.quantize_per_token_group(X, 16, zero_padding=False, out=out), want)


def test_one_count_for_a_matrix() -> None:
    x = randn(5, 32)
    q = jitquant.quantize_per_token_group(x, 16, counts=torch.tensor([3]))
    assert not q.data.view(U8)[3:].any()
    assert torch.equal(
        q.data[:3].view(U8), jitquant.quantize_per_token_group(x[:3], 16).data.view(U8)
    )


# ---- both orientations -------------------------------------------------------------------------


def both_calls(x: Tensor) -> dict[str, Callable[..., tuple[QuantizedTensor, QuantizedTensor]]]:
    return {
        "group both": lambda **k: jitquant.quantize_per_token_group_both(x, **k),
        "block both": lambda **k: jitquant.quantize_block_both(x, **k),
        "mxfp8 both": lambda **k: jitquant.quantize_mxfp8_both(x, **k),
    }


@pytest.mark.parametrize("layout", ["row", "column", "column_tma"])
def test_both_orientations(layout: str) -> None:
    x = randn(40, 70)
    keywords = {"scale_layout": layout, "recipe": "deepgemm"}
    got = jitquant.quantize_per_token_group_both(x, 32, **keywords)
    want = (
        jitquant.quantize_per_token_group(x, 32, **keywords),
        jitquant.quantize_per_token_group(x.T.contiguous(), 32, **keywords),
    )
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    out = buffers_like(got)
    assert jitquant.quantize_per_token_group_both(x, 32, **keywords, out=out) is out
    assert all(same(a, b) for a, b in zip(out, want, strict=True))


@pytest.mark.parametrize("layout", ["row", "row_padded"])
def test_both_orientations_of_blocks(layout: str) -> None:
    w = randn(40, 70)
    keywords = {"scale_layout": layout, "scale_format": "ue8m0"}
    got = jitquant.quantize_block_both(w, (16, 16), **keywords)
    want = (
        jitquant.quantize_block(w, (16, 16), **keywords),
        jitquant.quantize_block(w.T.contiguous(), (16, 16), **keywords),
    )
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(got[1].data.view(U8), got[0].data.view(U8).T)
    out = buffers_like(got)
    assert jitquant.quantize_block_both(w, (16, 16), **keywords, out=out) is out
    assert all(same(a, b) for a, b in zip(out, want, strict=True))


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_both_orientations_of_mxfp8(layout: str) -> None:
    x = randn(40, 70)
    got = jitquant.quantize_mxfp8_both(x, scale_layout=layout)
    want = tuple(jitquant.quantize_mxfp8(t.contiguous(), scale_layout=layout) for t in (x, x.T))
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    out = buffers_like(got)
    assert jitquant.quantize_mxfp8_both(x, scale_layout=layout, out=out) is out
    assert all(same(a, b) for a, b in zip(out, want, strict=True))


# ---- ragged -----------------------------------------------------------------------------------


def ragged_calls(device: str = "cpu") -> dict[str, Callable[..., QuantizedRaggedTensor]]:
    x, at = randn(5, 48).to(device), OFFSETS.to(device)
    sizes = torch.tensor([2, 0, 1], device=device)
    scale = torch.tensor([1.0, 2.0, 3.0], device=device)
    return {
        "fp8": lambda **k: jitquant.quantize_ragged(x, at, **k),
        "sizes": lambda **k: jitquant.quantize_ragged(x, at, sizes=sizes, dtype=E5M2, **k),
        "given": lambda **k: jitquant.quantize_ragged(x, at, scale=scale, **k),
        "nvfp4": lambda **k: jitquant.quantize_ragged(x, at, format="nvfp4", **k),
        "nvfp4 given": lambda **k: jitquant.quantize_ragged(
            x, at, format="nvfp4", scale=scale, sizes=sizes, recipe="vllm", **k
        ),
        "mxfp8": lambda **k: jitquant.quantize_ragged(x, at, format="mxfp8", sizes=sizes, **k),
        "qgelu": lambda **k: jitquant.quantize_ragged(x, at, activation="qgelu", **k),
        "grad": lambda **k: jitquant.quantize_ragged_grad(x, at, **k),
        "grad silu": lambda **k: jitquant.quantize_ragged_grad(
            x, at, act_input=x, activation="silu", scale=scale, dbias=False, **k
        ),
    }


@pytest.mark.parametrize("name", ragged_calls())
def test_ragged_out(name: str) -> None:
    call = ragged_calls()[name]
    q = call()
    out = buffers_like(q)
    assert call(out=out) is out
    assert same(out, q)
    assert out.offsets is OFFSETS
    buffer = torch.empty(5, 48, dtype=torch.float32)
    assert jitquant.dequantize_ragged(q, out=buffer) is buffer
    assert torch.equal(buffer, q.dequantize(torch.float32))
    assert q.dequantize().shape == (5, 48)


def test_offsets_of_matrices_in_a_buffer() -> None:
    shapes = [(3, 16), (0, 32), (2, 48)]
    rows, cols = (torch.tensor(sizes, dtype=torch.int32) for sizes in zip(*shapes, strict=True))
    at = jitquant.ragged_offsets(rows, cols)
    assert (at.dtype, at.tolist()) == (torch.int64, [0, 48, 48, 144])
    assert jitquant.ragged_offsets(rows.long(), 16).tolist() == [0, 48, 48, 80]
    assert jitquant.ragged_offsets(rows[:0], 16).tolist() == [0]
    large = torch.full((3,), 2**20, dtype=torch.int32)
    assert jitquant.ragged_offsets(large, large)[-1] == 3 * 2**40
    x = randn(144)
    q = jitquant.quantize_ragged(x, at)
    assert same(q.data[96:], jitquant.quantize_ragged(x, torch.tensor([0, 48, 144])).data[96:])
    of_rows = jitquant.quantize_ragged(x.view(9, 16), jitquant.ragged_offsets(rows, 1))
    of_elements = jitquant.quantize_ragged(x, jitquant.ragged_offsets(rows, 16))
    assert same(of_rows.data.flatten(), of_elements.data)


def test_one_width_may_be_any_int() -> None:
    rows = torch.tensor([2, 5])
    for width in (np.int64(3), np.uint8(3)):
        assert jitquant.ragged_offsets(rows, width).tolist() == [0, 6, 21]  # type: ignore[arg-type]


def test_ragged_is_a_tensor_each() -> None:
    x = randn(5, 48)
    q = jitquant.quantize_ragged(x, OFFSETS)
    for i, (start, stop) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        if start < stop:
            one = jitquant.quantize_fp8(x[start:stop])
            assert torch.equal(q.data[start:stop].view(U8), one.data.view(U8))
            assert torch.equal(q.scale_inv[i : i + 1], one.scale_inv)
            assert torch.equal(q.amax[i : i + 1], one.amax)


def test_gradients_of_elements_have_no_sums() -> None:
    grad = randn(4, 32).view(-1)
    q = jitquant.quantize_ragged_grad(grad, OFFSETS, dbias=False)
    assert q.dbias is None
    want = jitquant.quantize_ragged(grad, OFFSETS, dtype=torch.float8_e5m2)
    assert same((q.data, q.scale_inv), (want.data, want.scale_inv))


def test_bias_gradients() -> None:
    grad = randn(5, 48)
    q = jitquant.quantize_ragged_grad(grad, OFFSETS)
    assert q.data.dtype == E5M2
    want = torch.stack(
        [grad[:2].double().sum(0), grad[:0].double().sum(0), grad[2:].double().sum(0)]
    )
    torch.testing.assert_close(q.dbias.double(), want, rtol=1e-6, atol=1e-6)


# ---- the way past the dispatcher ---------------------------------------------------------------


@every_call
def test_direct_calls_have_every_argument_in_its_place(name: str, direct: list[str]) -> None:
    q = CALLS[name]()
    out = buffers_like(q)
    assert CALLS[name](out=out) is out
    assert same(out, q)
    assert len(direct) == 2
    direct.clear()
    values = q.dequantize()
    buffer = torch.empty(6, 48, dtype=torch.bfloat16)
    assert torch.equal(q.dequantize(out=buffer), values)
    assert direct == ["dequantize"] * 2


@pytest.mark.parametrize("name", ragged_calls())
def test_direct_ragged_calls(name: str, direct: list[str]) -> None:
    call = ragged_calls()[name]
    q = call()
    assert same(call(out=q.clone()), q)
    assert len(direct) == 2
    assert q.dequantize().shape == (5, 48)
    assert len(direct) == 3


def test_direct_calls_of_both_orientations(direct: list[str]) -> None:
    for call in both_calls(randn(40, 70)).values():
        q = call()
        assert all(same(a, b) for a, b in zip(call(out=buffers_like(q)), q, strict=True))
    assert len(direct) == 6


def test_buffers_that_do_not_fit_reach_no_direct_call(direct: list[str]) -> None:
    x, at = randn(32, 32), torch.tensor([0, 512, 1024])
    first, second = (QuantizedTensor.empty((32, 32), format="mxfp8") for _ in range(2))
    second.amax = torch.empty(1)
    with pytest.raises(
        ValueError,
        match=r"out\[1\]\.amax: expected None for this call of quantize_mxfp8_both, got a buffer",
    ):
        jitquant.quantize_mxfp8_both(x, out=(first, second))
    ragged = QuantizedRaggedTensor.empty((32, 32), at)
    ragged.block_scales = torch.empty(64, dtype=E4M3)
    with pytest.raises(
        ValueError, match=r"out\.block_scales: expected None with format 'fp8_tensor', got a buffer"
    ):
        jitquant.quantize_ragged(x, at, out=ragged)
    assert direct == []


def test_direct_calls_leave_rows_alone(direct: list[str]) -> None:
    counts = torch.tensor([2])
    q = jitquant.quantize_per_token_group(X, 16, counts=counts, zero_padding=False)
    assert direct == ["quantize_per_token_group"]
    assert torch.equal(
        q.data[:2].view(U8), jitquant.quantize_per_token_group(X[:2], 16).data.view(U8)
    )


def test_meta_tensors() -> None:
    x = torch.empty(4, 64, device="meta")
    for q in (
        jitquant.quantize_fp8(x),
        jitquant.quantize_per_token_group(x, 16, scale_layout="column_tma"),
        jitquant.quantize_mxfp8(x, scale_layout="swizzled_128x4"),
        jitquant.quantize_block(x),
    ):
        q.validate()
        assert q.device.type == "meta"
        assert q.dequantize().shape == (4, 64)


def test_the_reference_is_what_runs() -> None:
    data, scale_inv, amax = reference.quantize_fp8(X, dtype=E4M3)
    q = jitquant.quantize_fp8(X)
    assert torch.equal(q.data.view(U8), data.view(U8))
    assert torch.equal(q.scale_inv, scale_inv)
    assert torch.equal(q.amax, amax)
