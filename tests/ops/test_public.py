"""The public functions: gsa in every form, ``out=``, DLPack, autograd."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu.second_device import CASES
from samples import randn

import jitquant
from jitquant import QuantizedActivation, reference

U8 = torch.uint8


def parts_of(q: QuantizedActivation) -> list[torch.Tensor]:
    return [q.x_fp4, q.x_sf, q.gsa] + ([] if q.inv_rms is None else [q.inv_rms])


def assert_same(q: QuantizedActivation, other: QuantizedActivation) -> None:
    assert repr(q) == repr(other)
    for a, b in zip(parts_of(q), parts_of(other), strict=True):
        assert torch.equal(a.contiguous().view(U8), b.contiguous().view(U8))


W = randn(48, seed=1)
# Each takes gsa, granularity, out, ...; with the logical shape of its result and the rows.
CALLS: dict[str, tuple[Callable[..., QuantizedActivation], tuple[int, ...], bool]] = {
    "quantize": (lambda **k: jitquant.quantize_nvfp4(randn(3, 5, 40), **k), (3, 5, 40), False),
    "one_row": (lambda **k: jitquant.quantize_nvfp4(randn(40), **k), (40,), False),
    "deinterleave": (
        lambda **k: jitquant.deinterleave_quantize_nvfp4(randn(6, 80), 40, **k),
        (6, 40),
        False,
    ),
    "rmsnorm": (lambda **k: jitquant.rmsnorm_quantize_nvfp4(randn(6, 48), W, **k), (6, 48), True),
    "mhc": (
        lambda **k: jitquant.mhc_rmsnorm_quantize_nvfp4(
            randn(2, 3, 4, 48), randn(2, 3, 4, seed=2), W, **k
        ),
        (2, 3, 48),
        True,
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_result_describes_itself(name: str, granularity: str, scale_layout: str) -> None:
    call, shape, has_inv_rms = CALLS[name]
    q = call(granularity=granularity, scale_layout=scale_layout, recipe="vllm")
    q.validate()
    assert q.shape == shape
    assert q.granularity == granularity
    assert q.scale_layout == scale_layout
    assert q.recipe == "vllm"
    assert q.dim == -1
    assert (q.inv_rms is not None) == has_inv_rms
    rows = q.num_tokens
    assert q.gsa.shape == ((rows,) if granularity == "row" else (1,))
    assert q.x_fp4.dtype == torch.float4_e2m1fn_x2
    assert q.x_sf.dtype == torch.float8_e4m3fn
    assert q.dequantize().shape == shape


@every_call
def test_number_as_gsa(name: str) -> None:
    call, _, _ = CALLS[name]
    tensor = call(gsa=torch.tensor([0.01]))
    for number in (0.01, np.float64(0.01), np.float32(0.01)):
        q = call(gsa=number)
        assert q.gsa.shape == (1,)
        assert_same(q, tensor)
    assert call(gsa=1).gsa.tolist() == [1.0]
    assert call(gsa=0.01, granularity="row").granularity == "tensor"


@every_call
def test_gsa_tensor_is_handed_on(name: str) -> None:
    call, _, _ = CALLS[name]
    one = torch.tensor([0.01])
    q = call(gsa=one)
    assert q.gsa is one
    assert q.granularity == "tensor"
    scalar = torch.tensor(0.01)
    assert call(gsa=scalar).gsa.data_ptr() == scalar.data_ptr()
    assert_same(call(gsa=scalar), q)
    assert_same(call(gsa=scalar.reshape(1, 1, 1)), q)
    rows = torch.linspace(0.01, 0.02, q.num_tokens)
    by_row = call(gsa=rows, granularity="tensor")
    assert by_row.gsa is rows
    assert by_row.granularity == ("row" if q.num_tokens > 1 else "tensor")
    by_row.validate()


@pytest.mark.parametrize("into", [False, True])
def test_strided_columns_are_copied(into: bool) -> None:
    transposed, halved = randn(48, 6).T, randn(6, 96)[:, ::2]
    for x in (transposed, halved):
        assert x.stride(-1) != 1
        calls: tuple[Any, ...] = (
            jitquant.quantize_nvfp4,
            jitquant.quantize_fp8,
            jitquant.quantize_per_token_group,
            jitquant.quantize_mxfp8,
            jitquant.quantize_block,
        )
        for call in calls:
            want = call(x.contiguous())
            got = call(x, out=copy.deepcopy(want)) if into else call(x)
            assert torch.equal(got.dequantize(torch.float32), want.dequantize(torch.float32))
        rotated = jitquant.quantize_nvfp4(x, rotate="16", gsa=0.01)
        want = jitquant.quantize_nvfp4(x.contiguous(), rotate="16", gsa=0.01)
        assert torch.equal(rotated.dequantize(), want.dequantize())
        assert torch.equal(jitquant.amax_gsa(x), jitquant.amax_gsa(x.contiguous()))


def test_gsa_of_rows_as_a_column() -> None:
    x = randn(2, 3, 40)
    gsa = torch.linspace(0.001, 0.01, 6)
    q = jitquant.quantize_nvfp4(x, gsa)
    for column in (gsa.view(6, 1), gsa.view(2, 3, 1), torch.stack((gsa, gsa), 1)[:, :1]):
        other = jitquant.quantize_nvfp4(x, column)
        assert other.gsa.shape == (6,)
        assert torch.equal(other.x_fp4_bytes, q.x_fp4_bytes)
        parts = (q.x_fp4, q.x_sf, column, torch.float32)
        values = jitquant.dequantize_nvfp4(*parts, cols=40)
        assert torch.equal(values, q.dequantize(torch.float32))
        of_numpy: Any = column.numpy()
        values = jitquant.dequantize_nvfp4(q.x_fp4, q.x_sf, of_numpy, torch.float32, cols=40)
        assert torch.equal(values, q.dequantize(torch.float32))


def test_strided_gsa_rows() -> None:
    x, gsa = randn(4, 32), torch.linspace(0.01, 0.02, 8)[::2]
    assert_same(jitquant.quantize_nvfp4(x, gsa), jitquant.quantize_nvfp4(x, gsa.contiguous()))


@every_call
@pytest.mark.parametrize("gsa", [None, 0.01, "tensor", "rows", "column"])
def test_direct_calls_have_every_argument_in_its_place(
    name: str, gsa: Any, direct: list[str]
) -> None:
    call, shape, _ = CALLS[name]
    rows = torch.linspace(0.01, 0.02, torch.Size(shape[:-1]).numel())
    given = {"tensor": rows[:1], "rows": rows, "column": rows[:, None]}.get(gsa, gsa)
    for granularity in ("tensor", "row"):
        how = {"gsa": given, "granularity": granularity, "recipe": "vllm"}
        q = call(**how)
        out = copy.deepcopy(q)
        for part in (out.x_fp4, out.x_sf):
            part.view(U8).fill_(0xA5)
        out.recipe = "te"
        assert call(**how, out=out) is out
        assert_same(out, q)
        assert len(direct) == 2
        direct.clear()
    assert torch.equal(jitquant.dequantize_nvfp4(q, out=q.dequantize()), q.dequantize())
    assert direct == ["dequantize_nvfp4"] * 3


def test_direct_calls_of_weights_and_with_recipes(direct: list[str]) -> None:
    for how in ({"dim": -1}, {"dim": 0}, {"rotate": "te"}):
        call = jitquant.quantize_nvfp4 if "rotate" in how else jitquant.quantize_weight_nvfp4
        q: Any = call(randn(32, 48), **how)  # type: ignore[operator]
        out = copy.deepcopy(q)
        out.x_fp4.view(U8).fill_(0xA5)
        assert_same(call(randn(32, 48), **how, out=out), q)  # type: ignore[operator]
    assert direct[:4] == ["quantize_weight_nvfp4"] * 4
    assert direct[4:] == ["rotated_amax", "quantize_nvfp4_recipe"] * 2


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("cols", 39),
        ("dim", 0),
        ("granularity", "row"),
        ("inv_rms", torch.empty(6)),
        ("scale_layout", "swizzled_128x4"),
    ],
)
def test_buffers_that_do_not_fit_reach_no_direct_call(
    attribute: str, value: Any, direct: list[str]
) -> None:
    out = QuantizedActivation.empty((6, 40))
    setattr(out, attribute, value)
    with pytest.raises(ValueError, match=r"expected .* for this call"):
        jitquant.quantize_nvfp4(randn(6, 40), out=out)
    assert direct == []


@every_call
@pytest.mark.parametrize("gsa", [None, 0.01, "tensor", "rows"])
@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
def test_out(name: str, gsa: Any, scale_layout: str) -> None:
    call, shape, has_inv_rms = CALLS[name]
    rows = int(np.prod(shape[:-1]))
    granularity = "row" if gsa is None else "tensor"
    if gsa == "tensor":
        gsa = torch.tensor([0.01])
    elif gsa == "rows":
        gsa = torch.linspace(0.01, 0.02, rows)
    want = call(gsa=gsa, granularity=granularity, scale_layout=scale_layout, recipe="vllm")
    out = QuantizedActivation.empty(
        shape, granularity=granularity, scale_layout=scale_layout, inv_rms=has_inv_rms
    )
    for t in parts_of(out):
        t.view(U8).fill_(0xA5)
    pointers = [t.data_ptr() for t in (out.x_fp4, out.x_sf, out.inv_rms) if t is not None]
    got = call(gsa=gsa, granularity=granularity, scale_layout=scale_layout, recipe="vllm", out=out)
    assert got is out
    assert_same(out, want)
    assert pointers == [t.data_ptr() for t in (out.x_fp4, out.x_sf, out.inv_rms) if t is not None]
    if isinstance(gsa, torch.Tensor):
        assert out.gsa is gsa


@every_call
@pytest.mark.parametrize(("gsa", "granularity"), [(None, "tensor"), (0.5, "tensor"), (None, "row")])
def test_a_given_gsa_is_not_written(name: str, gsa: Any, granularity: Any) -> None:
    """Not by a later call into the result, nor into a part of it."""
    call, shape, _ = CALLS[name]
    rows = int(np.prod(shape[:-1]))
    granularity = granularity if rows > 1 else "tensor"
    given = torch.linspace(0.01, 0.02, rows if granularity == "row" else 1)
    before = given.clone()
    out, other = call(gsa=given), call(gsa=given)
    want = call(gsa=gsa, granularity=granularity)
    assert call(gsa=gsa, granularity=granularity, out=out) is out
    assert_same(out, want)
    own = out.gsa
    call(gsa=gsa, granularity=granularity, out=out)
    assert out.gsa is own
    call(gsa=given, out=out)
    call(gsa=gsa, granularity=granularity, out=out)
    if len(shape) > 1:
        part = other[:1]
        x = randn(*part.shape)
        if part.inv_rms is None:
            jitquant.quantize_nvfp4(x, gsa, granularity=part.granularity, out=part)
    assert torch.equal(given, before)
    assert torch.equal(other.gsa, before)


def test_a_gsa_of_a_weight_is_not_written() -> None:
    w, gsa = randn(32, 24), torch.tensor([0.01])
    for dim in (-1, 0):
        q = jitquant.quantize_weight_nvfp4(w, gsa=gsa, dim=dim)
        whole, want = q[:16], jitquant.quantize_weight_nvfp4(w[:16], dim=dim)
        jitquant.quantize_weight_nvfp4(w[:16], dim=dim, out=whole)
        assert_same(whole, want)
        jitquant.quantize_weight_nvfp4(w, dim=dim, out=q)
    assert torch.equal(gsa, torch.tensor([0.01]))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("name", ["quantize", "rmsnorm"])
def test_a_given_gsa_is_not_written_over_a_group(name: str) -> None:
    call, _, _ = CALLS[name]
    gsa = torch.tensor([0.01])
    out, want = call(gsa=gsa), call(granularity="tensor")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        call(granularity="tensor", process_group=dist.group.WORLD, out=out)
    finally:
        dist.destroy_process_group()
    assert_same(out, want)
    assert torch.equal(gsa, torch.tensor([0.01]))


def test_a_refused_call_leaves_a_given_gsa() -> None:
    x, gsa = randn(4, 32), torch.tensor([0.01])
    q = jitquant.quantize_nvfp4(x, gsa)
    with pytest.raises(ValueError, match="divisor"):
        jitquant.quantize_nvfp4(x, divisor=-1.0, out=q)
    assert q.gsa is gsa


def test_a_given_gsa_is_not_written_by_a_direct_call(direct: list[str]) -> None:
    x, gsa = randn(4, 32), torch.tensor([0.01])
    q = jitquant.quantize_nvfp4(x, gsa)
    want = jitquant.quantize_nvfp4(x)
    direct.clear()
    jitquant.quantize_nvfp4(x, out=q)
    assert direct == []
    assert_same(q, want)
    jitquant.quantize_nvfp4(x, out=q)
    assert direct == ["quantize_nvfp4"]
    assert torch.equal(gsa, torch.tensor([0.01]))


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("block", ["1x16", "16x16"])
@pytest.mark.parametrize("gsa", [None, 0.01, "tensor"])
def test_weights(dim: int, block: str, gsa: Any) -> None:
    gsa = torch.tensor(0.01) if gsa == "tensor" else gsa
    w = randn(40, 24)
    q = jitquant.quantize_weight_nvfp4(w, block=block, dim=dim, gsa=gsa)
    q.validate()
    assert q.shape == (40, 24)
    assert q.dim == dim
    out = QuantizedActivation.empty((40, 24), dim=dim)
    for t in parts_of(out):
        t.view(U8).fill_(0xA5)
    assert jitquant.quantize_weight_nvfp4(w, block=block, dim=dim, gsa=gsa, out=out) is out
    assert_same(out, q)
    back = q.dequantize(torch.float32)
    assert back.shape == (40, 24)
    if gsa is None:
        noise = (back - w.float()).square().mean() / w.float().square().mean()
        assert noise < 0.02


def test_quantize_is_the_reference() -> None:
    x = randn(3, 5, 40)
    q = jitquant.quantize_nvfp4(x, granularity="row", divisor=1344.0)
    for a, b in zip(
        parts_of(q), reference.quantize_nvfp4(x, 1344.0, granularity="row"), strict=True
    ):
        assert torch.equal(a.view(U8), b.view(U8))


def test_deinterleave_defaults_are_swiglu_in_runs_of_eight() -> None:
    x = randn(6, 64)
    q = jitquant.deinterleave_quantize_nvfp4(x, 32)
    want = reference.deinterleave_quantize_nvfp4(x, 32, 8, op="swiglu")
    assert torch.equal(q.x_fp4.view(U8), want[0].view(U8))
    q = jitquant.deinterleave_quantize_nvfp4(x, 32, op="select", interleave=4)
    want = reference.deinterleave_quantize_nvfp4(x, 32, 4)
    assert torch.equal(q.x_fp4.view(U8), want[0].view(U8))
    q = jitquant.deinterleave_quantize_nvfp4(x, 32, interleave=0)
    want = reference.deinterleave_quantize_nvfp4(x, 32, 0, op="swiglu")
    assert torch.equal(q.x_fp4.view(U8), want[0].view(U8))


def test_residual_is_updated() -> None:
    x, residual = randn(4, 48), randn(4, 48, seed=3)
    total = x + residual
    q = jitquant.rmsnorm_quantize_nvfp4(x, W, residual=residual)
    assert torch.equal(residual, total)
    assert_same(q, jitquant.rmsnorm_quantize_nvfp4(total, W))
    strided = torch.zeros(4, 96, dtype=torch.bfloat16)[:, 24:72]
    strided.copy_(total - x)
    again = jitquant.rmsnorm_quantize_nvfp4(x, W, residual=strided, gsa=0.01)
    assert again.granularity == "tensor"


def test_amax_gsa() -> None:
    x = randn(3, 5, 40)
    want = (x.float().abs().amax() / 2688).reshape(1)
    assert torch.equal(jitquant.amax_gsa(x), want)
    out = torch.full((1,), 7.0)
    assert jitquant.amax_gsa(x, out=out) is out
    assert torch.equal(out, want)
    assert jitquant.amax_gsa(x, 6.0).item() == pytest.approx(448 * want.item())
    assert jitquant.amax_gsa(torch.zeros(0, 16)).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_dequantize(granularity: str, scale_layout: str, dtype: torch.dtype) -> None:
    x = randn(3, 5, 40)
    q = jitquant.quantize_nvfp4(x, granularity=granularity, scale_layout=scale_layout)
    values = jitquant.dequantize_nvfp4(q, dtype)
    assert values.dtype == dtype
    assert torch.equal(values, jitquant.dequantize_nvfp4(q, dtype=dtype))
    assert torch.equal(values, q.dequantize(dtype))
    keywords = {"cols": 40, "scale_layout": scale_layout}
    parts = jitquant.dequantize_nvfp4(q.x_fp4, q.x_sf, q.gsa, dtype, **keywords)
    assert torch.equal(values, parts)
    as_bytes = jitquant.dequantize_nvfp4(
        x_fp4=q.x_fp4_bytes, x_sf=q.x_sf_bytes, gsa=q.gsa, dtype=dtype, **keywords
    )
    assert torch.equal(values, as_bytes)
    out = torch.full((3, 5, 40), torch.nan, dtype=dtype)
    assert jitquant.dequantize_nvfp4(q, out=out) is out
    assert torch.equal(values, out)
    assert q.dequantize(dtype, out=torch.empty_like(out)).equal(values)


def test_dequantize_defaults_to_bfloat16() -> None:
    q = jitquant.quantize_nvfp4(randn(2, 32))
    assert q.dequantize().dtype == jitquant.dequantize_nvfp4(q).dtype == torch.bfloat16
    out = torch.empty(q.shape)
    assert q.dequantize(out=out) is out


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 17)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    for granularity in ("tensor", "row"):
        for scale_layout in ("linear", "swizzled_128x4"):
            q = jitquant.quantize_nvfp4(x, granularity=granularity, scale_layout=scale_layout)
            q.validate()
            assert q.num_tokens == 0
            assert q.dequantize().shape == shape
    assert jitquant.quantize_nvfp4(x).gsa.tolist() == [0.0]


def test_many_leading_dimensions() -> None:
    x = randn(2, 3, 2, 2, 2, 24).transpose(0, 4).transpose(1, 2)
    q = jitquant.quantize_nvfp4(x, granularity="row")
    assert_same(q, jitquant.quantize_nvfp4(x.contiguous(), granularity="row"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arrays_with_dlpack(dtype: Any) -> None:
    array = np.random.default_rng(0).standard_normal((4, 40)).astype(dtype)
    x = torch.from_numpy(array)
    assert_same(jitquant.quantize_nvfp4(array), jitquant.quantize_nvfp4(x))
    gsa = np.full(1, 0.01, np.float32)
    q = jitquant.quantize_nvfp4(array, gsa)
    assert q.gsa.data_ptr() == gsa.ctypes.data
    assert jitquant.amax_gsa(array).item() == jitquant.amax_gsa(x).item()
    weight = np.ones(40, np.float32)
    residual = array.copy()
    jitquant.rmsnorm_quantize_nvfp4(array, weight, residual=residual)
    np.testing.assert_array_equal(residual, array + array)
    assert_same(jitquant.quantize_weight_nvfp4(array), jitquant.quantize_weight_nvfp4(x))
    # And back: what NumPy has types for.
    np.testing.assert_array_equal(np.from_dlpack(q.x_fp4_bytes), q.x_fp4_bytes.numpy())
    np.testing.assert_array_equal(np.from_dlpack(q.x_sf_bytes), q.x_sf_bytes.numpy())


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_requires_grad(grad: bool) -> None:
    x = randn(4, 48, dtype=torch.float32).requires_grad_()
    weight = torch.ones(48, requires_grad=True)
    gsa = torch.tensor([0.01], requires_grad=True)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [
            *parts_of(jitquant.quantize_nvfp4(x)),
            *parts_of(jitquant.rmsnorm_quantize_nvfp4(x, weight)),
            jitquant.amax_gsa(x),
            *parts_of(jitquant.quantize_nvfp4(x, gsa)),
            *parts_of(jitquant.quantize_nvfp4(x, gsa, out=QuantizedActivation.empty((4, 48)))),
            *parts_of(jitquant.quantize_nvfp4(x, gsa, rotate="16")),
            *parts_of(jitquant.rmsnorm_quantize_nvfp4(x, weight, gsa=gsa)),
            jitquant.dequantize_nvfp4(*parts_of(jitquant.quantize_nvfp4(x))),
            jitquant.quantize_nvfp4(x, gsa).dequantize(),
        ]
    assert not any(t.requires_grad for t in results)
    assert jitquant.quantize_nvfp4(x, gsa).gsa.data_ptr() == gsa.data_ptr()
    (x * 2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = randn(4, 48)
        residual = randn(4, 48, seed=1)
        q = jitquant.rmsnorm_quantize_nvfp4(x, torch.ones(48), residual=residual)
        out = QuantizedActivation.empty((4, 48), granularity="row", inv_rms=True)
        jitquant.rmsnorm_quantize_nvfp4(residual, torch.ones(48), out=out)
        assert torch.equal(out.dequantize(), q.dequantize())


def test_a_process_with_another_gpu_alone_calls_every_function() -> None:
    """That of tests/gpu/test_second_device.py, which takes two GPUs."""
    functions = {name for name in jitquant.ops.__all__ if name[0].islower()}
    assert set(CASES) == {*functions, "DelayedScaling"}
