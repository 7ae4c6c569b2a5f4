"""Products with a weight in NVFP4 on a GPU, against float64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import samples  # noqa: F401  (the samples of products are a part of it)
import torch
from samples_linear import packed
from torch import Tensor

import jitquant
from jitquant import NVFP4Tensor, reference
from jitquant.numerics.linear import refold_e4m3
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

from .helpers import in_threads

HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="FP8 products with a weight in NVFP4 are for compute capability 9.0",
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-22}


def _weight(n: int, k: int, seed: int = 0) -> NVFP4Tensor:
    codes, scales = (t.cuda() for t in packed(n, k, seed))
    gsa = torch.tensor([0.0007], device="cuda")
    return NVFP4Tensor(codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn), gsa)


def _packed_rows(rows: int, k: int, gsas: int) -> NVFP4Tensor:
    codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device="cuda")
    # Of 2^-2 to 2^2.
    scales = torch.randint(0x28, 0x48, (rows, k // 16), dtype=torch.uint8, device="cuda")
    gsa = torch.rand(gsas, device="cuda") + 0.5
    return NVFP4Tensor(codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn), gsa)


def _values(q: NVFP4Tensor) -> Tensor:
    one = torch.ones(1, device="cuda")
    plain = reference.dequantize_nvfp4(q.x_fp4, q.x_sf, one, dtype=torch.float32)[0].double()
    return plain * q.gsa.double().reshape(-1, 1)


def _check(got: Tensor, x: Tensor, w: Tensor, *added: Tensor) -> None:
    expected, bound = x @ w.t(), (x.abs() @ w.abs().t()) * 2e-6
    for t in added:
        expected, bound = expected + t.double(), bound + 1e-6 * t.double().abs()
    bound = bound + expected.abs() * EPSILON[got.dtype]
    near = (got.double() - expected).abs() <= bound
    # What the dtype cannot hold becomes infinite.
    large = expected.abs() + bound >= torch.finfo(got.dtype).max
    wrong = ~(near | (large & (got.double() == expected.sign() * math.inf)))
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off"


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_against_float64(seed: int) -> None:
    choose = random.Random(seed)
    for trial in range(24):
        m = choose.choice([1, 1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 65, 130])
        n = choose.choice([1, 15, 16, 17, 100, 256, 1000, 4096])
        k = choose.choice(
            [16, 48, 64, 256, 272, 512, 896, 1056, 1408, 2880, 4096, 4352, 7168, 14336]
        )
        w = _weight(n, k, seed=trial % 3)
        dtype = choose.choice(DTYPES)
        more: dict[str, Any] = {"dtype": dtype}
        if choose.random() < 0.5:
            more["bias"] = torch.randn(n, device="cuda").to(choose.choice(DTYPES))
        if choose.random() < 0.5:
            more["residual"] = torch.randn(m, n, device="cuda").to(dtype)
        if choose.random() < 0.3:
            x: Any = _packed_rows(m, k, choose.choice([1, m]))
            values = _values(x)
        else:
            pad = choose.choice([0, 0, 8, 1])
            x = torch.randn(m, k + pad, device="cuda")[:, :k].to(choose.choice(DTYPES[:2]))
            values = x.double()
        added = [more[name] for name in ("bias", "residual") if name in more]
        _check(jitquant.nvfp4_linear(x, w, **more), values, _values(w), *added)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("rows", [17, 64, 65, 128, 129, 192, 256, 300, 1000, 4097])
def test_many_rows_against_float64(rows: int, dtype: torch.dtype) -> None:
    for n, k, pad in ((1000, 640, 8), (6144, 512, 0), (130, 8192, 0), (257, 64, 24)):
        w, x = _weight(n, k), torch.randn(rows, k + pad, device="cuda")[:, :k].to(dtype)
        x_gsa = torch.rand(rows, device="cuda")
        bias = torch.randn(n, device="cuda")
        residual = torch.randn(rows, n, device="cuda").to(dtype)
        values = _values(w)
        y = jitquant.nvfp4_linear(x, w, bias, residual=residual)
        _check(y, x.double(), values, bias, residual)
        scaled = torch.ops.jitquant.nvfp4_linear(
            x, w.x_fp4, w.x_sf, w.gsa, None, x_gsa, dtype=torch.float32
        )
        _check(scaled, x.double() * x_gsa.double()[:, None], values)


@pytest.mark.parametrize(
    ("n", "rows", "k"),
    [
        *((1001, 30, 576), (5130, 20, 576), (9001, 30, 2112), (13001, 30, 2112)),
        *((17001, 30, 2112), (33000, 24, 576), (1001, 40, 576), (6144, 40, 576)),
        *((9001, 60, 2112), (13001, 60, 2112), (17001, 60, 2112), (33000, 40, 576)),
        *((1001, 90, 576), (6150, 90, 2112), (9001, 90, 2112), (13001, 90, 2112)),
        *((17001, 90, 2112), (33000, 90, 576), (1001, 100, 576), (6144, 100, 576)),
        *((6150, 100, 4160), (12601, 100, 2112), (20001, 100, 576), (33000, 100, 576)),
        *((6150, 150, 4160), (9001, 150, 2112), (13001, 150, 2112), (17001, 150, 2112)),
        *((13001, 180, 2112), (4100, 330, 576), (1001, 140, 576), (4100, 140, 576)),
        *((6150, 300, 576), (6150, 200, 576), (8450, 200, 576), (9000, 1000, 576)),
        *((5130, 2100, 576),),
    ],
)
def test_tiles_that_end_behind_the_last_row(n: int, rows: int, k: int) -> None:
    """On an H200 these take every kind of tile."""
    w, x = _weight(n, k), torch.randn(rows, k, device="cuda").bfloat16()
    residual = torch.randn(rows, n, device="cuda").bfloat16()
    y = jitquant.nvfp4_linear(x, w, residual=residual)
    _check(y, x.double(), _values(w), residual)
    assert torch.equal(jitquant.nvfp4_linear(x, w, residual=residual), y)


@pytest.mark.parametrize(("n", "rows"), [(4600, 1024), (5120, 1024), (6144, 1024)])
def test_the_last_rows_of_w_in_other_tiles(n: int, rows: int) -> None:
    """On an H200; other GPUs may have the same tiles for all."""
    k = 4096
    w, x = _weight(n, k), torch.randn(rows, k, device="cuda").bfloat16()
    _check(jitquant.nvfp4_linear(x, w), x.double(), _values(w))
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    if torch.cuda.get_device_capability() == (9, 0) and sms == 132:
        assert count_launches(lambda x: jitquant.nvfp4_linear(x, w), x) == 2


@pytest.mark.parametrize("n", [4240, 8496, 12720, 16944])
def test_an_odd_number_of_tiles_in_passes_over_k(n: int) -> None:
    """The last step of a thread block lacks a tile, in each pass."""
    for k in (8464, 12304, 20496):
        w = _weight(n, k)
        values = _values(w)
        for rows in (1, 2, 3, 9):
            x = torch.randn(rows, k, device="cuda").bfloat16()
            got = jitquant.nvfp4_linear(x, w, dtype=torch.float32)
            _check(got, x.double(), values)


@pytest.mark.parametrize("rows", [1, 9, 17, 300])
def test_the_longest_rows(rows: int) -> None:
    """Sums of small integers, exact in every order."""
    n, k = 1000, 65536
    x = torch.randint(-2, 3, (rows, k), device="cuda").bfloat16()
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    ones = torch.full((n, k // 16), 0x38, dtype=torch.uint8, device="cuda")
    w = NVFP4Tensor(
        codes.view(torch.float4_e2m1fn_x2),
        ones.view(torch.float8_e4m3fn),
        torch.ones(1, device="cuda"),
    )
    expected = x.double() @ _values(w).t()
    assert torch.equal(jitquant.nvfp4_linear(x, w, dtype=torch.float32).double(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [17, 64, 129, 300, 4097])
def test_many_quantized_rows_against_float64(rows: int, dtype: torch.dtype) -> None:
    """In tiles where K is a multiple of 64; the last K is not."""
    for n, k, gsas in ((1000, 640, rows), (6144, 512, 1), (130, 8192, rows), (257, 272, rows)):
        w, x = _weight(n, k), _packed_rows(rows, k, gsas)
        bias = torch.randn(n, device="cuda")
        residual = torch.randn(rows, n, device="cuda").to(dtype)
        y = jitquant.nvfp4_linear(x, w, bias, residual=residual, dtype=dtype)
        _check(y, _values(x), _values(w), bias, residual)


@pytest.mark.parametrize("rows", [16, 256])
def test_every_code_of_x_times_every_scale(rows: int) -> None:
    codes = torch.arange(64, device="cuda").remainder(16).to(torch.uint8)
    x_fp4 = (codes[::2] | codes[1::2] << 4).repeat(256, 1)
    x_sf = torch.arange(256, device="cuda").to(torch.uint8)[:, None].repeat(1, 4)
    gsa = torch.tensor([0.5, 3.0], device="cuda").repeat(128)
    eye = torch.eye(64, dtype=torch.uint8, device="cuda") * 2  # the code of one
    w = (eye[:, ::2] | eye[:, 1::2] << 4, torch.full_like(eye[:, :4], 0x38), gsa[:1])
    expected = reference.nvfp4_linear(x_fp4, *w, x_sf, gsa, dtype=torch.float32)[0]
    for first in range(0, 256, rows):
        own = slice(first, first + rows)
        y = torch.ops.jitquant.nvfp4_linear(
            x_fp4[own], *w, x_sf[own], gsa[own], dtype=torch.float32
        )
        torch.testing.assert_close(y, expected[own], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_every_code_times_every_scale(rows: int, dtype: torch.dtype) -> None:
    codes = torch.arange(64, device="cuda").add(1).remainder(16).to(torch.uint8)
    packed_codes = (codes[::2] | codes[1::2] << 4).expand(256, 32).contiguous()
    scales = torch.arange(256, device="cuda").to(torch.uint8)[:, None].expand(256, 4).contiguous()
    w = NVFP4Tensor(
        packed_codes.view(torch.float4_e2m1fn_x2),
        scales.view(torch.float8_e4m3fn),
        torch.ones(1, device="cuda"),
    )
    x = torch.eye(64, device="cuda", dtype=dtype)
    expected = reference.dequantize_nvfp4(w.x_fp4, w.x_sf, w.gsa, dtype=torch.float32)[0].t()
    for first in range(0, 64, rows):
        own = slice(first, first + rows)
        y = jitquant.nvfp4_linear(x[own], w, dtype=torch.float32)
        torch.testing.assert_close(y, expected[own], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 64, 100, 300])
def test_one_launch_that_is_captured_and_never_waited_for(rows: int) -> None:
    w, x = _weight(512, 1024), torch.randn(rows, 1024, device="cuda").bfloat16()
    out = torch.empty(rows, 512, device="cuda", dtype=torch.bfloat16)
    for call in (
        lambda t: jitquant.nvfp4_linear(t, w),
        lambda t: jitquant.nvfp4_linear(t, w, out=out),
    ):
        call(x)
        assert count_launches(call, x) == 1
        assert_no_sync(call, x)
        assert_capturable(call, x)


@HOPPER
@pytest.mark.parametrize("rows", [16, 17, 300])
def test_quantized_rows_take_up_to_two_launches_and_the_same_bits_each_time(rows: int) -> None:
    w, x = _weight(4096, 8192), _packed_rows(rows, 8192, rows)
    out = torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16)

    def call(t: Tensor) -> Tensor:
        q = NVFP4Tensor(t.view(torch.float4_e2m1fn_x2), x.x_sf, x.gsa)
        return jitquant.nvfp4_linear(q, w, out=out)

    first = call(x.x_fp4_bytes).clone()
    assert count_launches(call, x.x_fp4_bytes) == (1 if rows <= 16 else 2)
    assert_no_sync(call, x.x_fp4_bytes)
    assert_capturable(call, x.x_fp4_bytes)
    for _ in range(20):
        assert torch.equal(call(x.x_fp4_bytes), first)
    if rows > 16:  # the values in bf16 go through the same tiles
        plain = NVFP4Tensor(x.x_fp4, x.x_sf, torch.ones(1, device="cuda")).dequantize()
        args = (plain, w.x_fp4, w.x_sf, w.gsa, None, x.gsa)
        assert torch.equal(torch.ops.jitquant.nvfp4_linear(*args), first)


@HOPPER
def test_what_is_decoded_is_freed_after_the_call() -> None:
    w, x = _weight(512, 1024), _packed_rows(300, 1024, 1)
    out = torch.empty(300, 512, device="cuda", dtype=torch.bfloat16)
    jitquant.nvfp4_linear(x, w, out=out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    jitquant.nvfp4_linear(x, w, out=out)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 2 * 300 * 1024


@HOPPER
@pytest.mark.parametrize(("n", "rows", "ordered"), [(512, 64, 0), (17408, 64, 64), (17408, 16, 0)])
def test_x_in_order_is_freed_after_the_call(n: int, rows: int, ordered: int) -> None:
    """Large weights take a copy of 17 rows and more in the order of codes, others none."""
    w, x = _weight(n, 4096), torch.randn(rows, 4096, device="cuda").bfloat16()
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    jitquant.nvfp4_linear(x, w, out=out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    jitquant.nvfp4_linear(x, w, out=out)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 2 * ordered * 4096


@HOPPER
def test_what_is_refolded_is_freed_after_the_call() -> None:
    w = _weight(512, 1024)
    q = jitquant.quantize_fp8(torch.randn(300, 1024, device="cuda").bfloat16(), granularity="row")
    out = torch.empty(300, 512, device="cuda", dtype=torch.bfloat16)
    jitquant.nvfp4_linear(q, w, out=out, compute="fp8")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    jitquant.nvfp4_linear(q, w, out=out, compute="fp8")
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 512 * (1024 + 4)


def test_the_same_bits_each_time_and_beside_other_rows() -> None:
    w, x = _weight(4096, 8192), torch.randn(300, 8192, device="cuda").bfloat16()
    for most, least in ((2, 1), (8, 3), (16, 9), (64, 40), (300, 270)):
        whole = jitquant.nvfp4_linear(x[:most], w)
        for _ in range(20):
            assert torch.equal(jitquant.nvfp4_linear(x[:most], w), whole)
        assert torch.equal(jitquant.nvfp4_linear(x[:least], w), whole[:least])


@pytest.mark.parametrize("rows", [2, 16, 40, 300])
def test_one_row_that_is_expanded(rows: int) -> None:
    w, x = _weight(2048, 4096), torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    y = jitquant.nvfp4_linear(x.expand(rows, 4096), w)
    assert torch.equal(y, jitquant.nvfp4_linear(x.repeat(rows, 1), w))


def test_huge_and_tiny_elements_beside_each_other() -> None:
    w = _weight(64, 512)
    x = torch.randn(2, 512, device="cuda")
    x[0, ::3] *= 2.0**90
    x[0, 1::3] *= 2.0**-100
    x[1] *= 2.0**-120
    x = x.bfloat16()
    _check(jitquant.nvfp4_linear(x, w, dtype=torch.float32)[:1], x[:1].double(), _values(w))
    tiny = jitquant.nvfp4_linear(x, w, dtype=torch.float32)[1].double()
    torch.testing.assert_close(tiny, x[1].double() @ _values(w).t(), rtol=1e-3, atol=2.0**-145)


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
@pytest.mark.parametrize("rows", [1, 5, 12, 40, 200])
def test_what_is_not_finite_stays_in_its_row(rows: int, special: float) -> None:
    w, x = _weight(48, 512), torch.randn(rows, 512, device="cuda").bfloat16()
    plain = jitquant.nvfp4_linear(x, w)
    x[-1, 7] = special
    y = jitquant.nvfp4_linear(x, w)
    assert not y[-1].isfinite().any()
    assert torch.equal(y[:-1], plain[:-1])


@HOPPER
@pytest.mark.parametrize("rows", [1, 100, 128, 129, 300, 1000, 4097])
def test_products_in_fp8_against_float64(rows: int) -> None:
    for n, k in ((1008, 640), (6144, 512), (128, 8192), (272, 48)):
        w, x = _weight(n, k), torch.randn(rows, k, device="cuda").bfloat16()
        q = jitquant.quantize_fp8(x, granularity="row")
        data, scale_inv = refold_e4m3(w.x_fp4, w.x_sf)
        values = data.double() * scale_inv.double()[:, None] * w.gsa.double()
        residual = torch.randn(rows, n, device="cuda").bfloat16()
        y = jitquant.nvfp4_linear(q, w, residual=residual, dtype=torch.bfloat16, compute="fp8")
        xs = q.data.double() * q.scale_inv.double()
        product = xs @ values.t()
        expected = product + residual.double()
        # The tensor cores add up with 13 bits or more. The product is rounded, then the result.
        bound = xs.abs() @ values.abs().t() * 2.0**-11
        bound = bound + (product.abs() + expected.abs()) * EPSILON[y.dtype] * 1.01
        assert bool(((y.double() - expected).abs() <= bound).all())
        assert torch.equal(jitquant.nvfp4_linear(x, w, residual=residual, compute="fp8"), y)


@HOPPER
@pytest.mark.parametrize("rows", [16, 300])
def test_fp8_takes_few_launches_and_gives_the_same_bits_each_time(rows: int) -> None:
    w, x = _weight(4096, 8192), torch.randn(rows, 8192, device="cuda").bfloat16()
    out = torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16)

    def call(t: Tensor) -> Tensor:
        return jitquant.nvfp4_linear(t, w, compute="fp8", out=out)

    first = call(x).clone()
    assert 3 <= count_launches(call, x) <= 4  # cuBLAS may add up parts of K in one more
    assert_no_sync(call, x)
    assert_capturable(call, x)
    for _ in range(20):
        assert torch.equal(call(x), first)


def test_two_streams_at_once() -> None:
    w, x = _weight(4096, 4096), torch.randn(4, 4096, device="cuda").bfloat16()
    expected = jitquant.nvfp4_linear(x, w)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            results.append(jitquant.nvfp4_linear(x, w))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in results)


@pytest.mark.parametrize("rows", [1, 12, 40, 300])
def test_four_threads_on_streams_of_their_own(rows: int) -> None:
    """Two of them with x in NVFP4, which many rows decode to memory of the stream."""
    w = _weight(1000, 1024)
    inputs: list[Any] = [torch.randn(rows, 1024, device="cuda").bfloat16() for _ in range(2)]
    inputs += [_packed_rows(rows, 1024, rows) for _ in range(2)]
    expected = [jitquant.nvfp4_linear(x, w) for x in inputs]

    def work(i: int) -> None:
        out = torch.empty_like(expected[i])
        for _ in range(100):
            got = jitquant.nvfp4_linear(inputs[i], w)
            jitquant.nvfp4_linear(inputs[i], w, out=out)
        torch.cuda.current_stream().synchronize()
        assert torch.equal(got, expected[i])
        assert torch.equal(out, expected[i])

    in_threads(len(inputs), work)


def test_layers_use_it() -> None:
    layer = jitquant.nn.NVFP4Linear.from_linear(
        torch.nn.Linear(512, 96, device="cuda", dtype=torch.bfloat16)
    ).eval()
    for rows in (1, 16, 64, 65, 300):
        x = torch.randn(rows, 512, device="cuda").bfloat16()
        q = jitquant.quantize_nvfp4(x)
        _check(layer.run_from_quantized(q), _values(q), _values(layer.weight), layer.bias)
        assert torch.equal(layer(x), layer.run_from_quantized(q))
        if torch.cuda.get_device_capability() == (9, 0):
            assert count_launches(layer.run_from_quantized, q) == (1 if rows <= 16 else 2)
