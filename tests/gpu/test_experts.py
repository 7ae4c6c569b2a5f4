"""Products with the NVFP4 weights of experts on a GPU, against float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from samples import randn
from samples_experts import routed
from samples_linear import packed
from torch import Tensor

import jitquant
from jitquant import NVFP4Tensor, reference
from jitquant.formats import FP4_DTYPE, SCALE_DTYPE
from jitquant.testing import assert_capturable, assert_no_sync, checked, count_launches

from .helpers import in_threads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-22}


def _weights(experts: int, n: int, k: int, seed: int = 0, rows: bool = False) -> NVFP4Tensor:
    """Random codes and scales, with one gsa or one for each row."""
    made = torch.Generator("cuda").manual_seed(seed)
    how: dict[str, Any] = {"dtype": torch.uint8, "device": "cuda", "generator": made}
    codes = torch.randint(0, 256, (experts, n, k // 2), **how)
    scales = torch.randint(0x20, 0x40, (experts, n, k // 16), **how)
    scales |= torch.randint(0, 2, scales.shape, **how) << 7
    gsa = torch.linspace(0.005, 0.02, experts * n if rows else 1, device="cuda")
    return NVFP4Tensor(
        codes.view(FP4_DTYPE),
        scales.view(SCALE_DTYPE),
        gsa,
        granularity="row" if rows else "tensor",
    )


def _expert(w: NVFP4Tensor, expert: int) -> Tensor:
    """An expert's weight in float64."""
    one = torch.ones(1, device="cuda")
    codes, scales = w.x_fp4.view(torch.uint8)[expert], w.x_sf.view(torch.uint8)[expert]
    plain = reference.dequantize_nvfp4(codes, scales, one, dtype=torch.float32)[0].double()
    rows = w.shape[1]
    gsa = w.gsa.view(-1, rows)[expert] if w.gsa.numel() > 1 else w.gsa
    return plain * gsa.double().reshape(-1, 1)


def _layer(
    x: Tensor, up: NVFP4Tensor, down: NVFP4Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The layer in float64 but for h, and how far roundings of h may take it."""
    y = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64, device="cuda")
    off = torch.zeros_like(y)
    for expert in ids.unique().tolist():
        if not 0 <= expert < up.shape[0]:
            continue
        row, choice = (ids == expert).nonzero(as_tuple=True)
        gate, both = (x[row].double() @ _expert(up, expert).t()).chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * both
        w, weight = _expert(down, expert).t(), weights[row, choice, None].double()
        y.index_add_(0, row, weight * (h.to(x.dtype).double() @ w))
        off.index_add_(0, row, weight * EPSILON[x.dtype] * (h.abs() @ w.abs()))
    return y, off


def _check_layer(x: Tensor, up: NVFP4Tensor, down: NVFP4Tensor, ids: Tensor, **more: Any) -> None:
    weights = torch.rand(ids.shape, device="cuda")
    got = jitquant.nvfp4_experts(x, up, down, ids, weights, **more)
    expected, off = _layer(x, up, down, ids, weights)
    error = got.double() - expected
    wrong = ~(error.abs() <= off + expected.abs() * EPSILON[got.dtype])
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off"
    # Few of the roundings are others than those of float64.
    assert error.norm() <= (EPSILON[got.dtype] + 5e-4) * expected.norm()


def _ends(rows: int, experts: int, choose: random.Random) -> Tensor:
    kind = choose.choice(["any", "any", "one", "few", "none"])
    if kind == "none":
        return torch.zeros(experts, dtype=torch.int64, device="cuda")
    if kind == "one":
        first = choose.randrange(experts)
        return torch.tensor([rows * (e >= first) for e in range(experts)], device="cuda")
    last = rows if kind == "any" else rows // 2
    ends = sorted(choose.randint(0, last) for _ in range(experts))
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("seed", range(6))
def test_random_groups_against_float64(seed: int) -> None:
    choose = random.Random(seed)
    for trial in range(12):
        rows, experts = choose.choice([1, 2, 5, 16, 40, 100]), choose.choice([1, 3, 8, 60])
        n = choose.choice([1, 15, 16, 17, 100, 256, 1000])
        k = choose.choice([16, 48, 256, 272, 512, 768, 1040, 4096, 8704])
        if n * k * experts > 60 * 10**6:
            experts = 3
        w = _weights(experts, n, k, trial, choose.random() < 0.5)
        ends = _ends(rows, experts, choose)
        dtype = choose.choice(DTYPES)
        x: Any
        if choose.random() < 0.3:
            codes, scales = (t.cuda() for t in packed(rows, k, seed=trial))
            gsa = torch.rand(choose.choice([1, rows]), device="cuda") + 0.5
            x = NVFP4Tensor(codes.view(FP4_DTYPE), scales.view(SCALE_DTYPE), gsa)
            one = torch.ones(1, device="cuda")
            plain = reference.dequantize_nvfp4(codes, scales, one, dtype=torch.float32)[0]
            values = plain.double() * gsa.double().reshape(-1, 1)
        else:
            pad = choose.choice([0, 0, 8, 1])
            x = torch.randn(rows, k + pad, device="cuda")[:, :k].to(choose.choice(DTYPES[:2]))
            values = x.double()
        got = jitquant.nvfp4_grouped_linear(x, w, ends, dtype=dtype)
        expected = torch.zeros(rows, n, dtype=torch.float64, device="cuda")
        bound, begin = torch.zeros_like(expected), 0
        for expert, end in enumerate(ends.tolist()):
            own, weight = values[begin:end], _expert(w, expert).t()
            expected[begin:end] = own @ weight
            bound[begin:end] = own.abs() @ weight.abs() * 2e-6
            begin = end
        bound += expected.abs() * EPSILON[dtype]
        wrong = ~((got.double() - expected).abs() <= bound)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off"


@pytest.mark.parametrize("seed", range(4))
def test_random_layers_against_float64(seed: int) -> None:
    choose = random.Random(seed)
    for trial in range(8):
        experts = choose.choice([3, 8, 33])
        hidden = choose.choice([32, 48, 256, 1040, 2048])
        inter = choose.choice([16, 48, 256, 768, 1408])
        top_k = choose.choice([1, 2, 3])
        rows = choose.choice([1, 4, 8, 20, 33, 130])
        up = _weights(experts, 2 * inter, hidden, trial, choose.random() < 0.5)
        down = _weights(experts, hidden, inter, trial + 1, choose.random() < 0.5)
        kind = choose.choice(["any", "any", "one", "absent", "none"])
        ids = routed(rows, top_k, experts, kind, trial).to(
            "cuda", choose.choice([torch.int32, torch.int64])
        )
        x = (4 * torch.randn(rows, hidden, device="cuda")).to(choose.choice(DTYPES[:2]))
        _check_layer(x, up, down, ids, dtype=choose.choice(DTYPES))


@pytest.mark.parametrize(
    ("experts", "hidden", "inter"), [(10, 7168, 2048), (16, 2048, 768), (9, 2880, 2880)]
)
def test_layers_of_models(experts: int, hidden: int, inter: int) -> None:
    up, down = (
        _weights(experts, 2 * inter, hidden, 1),
        _weights(experts, hidden, inter, 2, rows=True),
    )
    for rows, kind in ((1, "any"), (2, "any"), (4, "one"), (8, "any"), (64, "any"), (64, "one")):
        ids = routed(rows, 8, experts, kind).cuda()
        _check_layer(torch.randn(rows, hidden, device="cuda").bfloat16(), up, down, ids)


def test_more_rows_than_one_set_of_launches_takes() -> None:
    up, down = _weights(4, 64, 256), _weights(4, 256, 32)
    x = torch.randn(1500, 256, device="cuda").bfloat16()
    _check_layer(x, up, down, routed(1500, 3, 4, "any").cuda())
    ends = torch.tensor([100, 2100, 2300, 2400], device="cuda")
    x = torch.randn(2500, 256, device="cuda").bfloat16()
    y = jitquant.nvfp4_grouped_linear(x, up, ends)
    part = jitquant.nvfp4_grouped_linear(x[2100:2300], up, torch.tensor([0, 0, 200, 200]).cuda())
    assert torch.equal(y[2100:2300], part)
    assert not y[2400:].any()


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", ["any", "one", "absent"])
@pytest.mark.parametrize("rows", [33, 64, 260, 900])
def test_experts_with_many_rows(rows: int, kind: str, dtype: torch.dtype) -> None:
    """Some with few rows and some with many; with many for each, all by the same kernels."""
    for experts, hidden, inter in ((9, 320, 192), (40, 1024, 448)):
        up = _weights(experts, 2 * inter, hidden, rows=True)
        down = _weights(experts, hidden, inter, 1)
        ids = routed(rows, 3, experts, kind).cuda()
        ids[: rows // 2, 0] = 4
        x = torch.randn(rows, hidden + 8, device="cuda").to(dtype)[:, :hidden]
        _check_layer(x, up, down, ids, dtype=dtype if rows % 2 == 0 else torch.float32)


def test_layers_of_more_pairs_than_one_set_of_tiles_takes() -> None:
    up, down = _weights(5, 128, 128), _weights(5, 128, 64)
    x, ids = torch.randn(5600, 128, device="cuda").bfloat16(), routed(5600, 3, 5, "any").cuda()
    weights = torch.rand(ids.shape, device="cuda")
    y = jitquant.nvfp4_experts(x, up, down, ids, weights)
    _check_layer(x, up, down, ids)
    # The order of sums depends on the number of an expert's rows, but not beyond 16 of them.
    part = slice(5500, 5600)
    own = jitquant.nvfp4_experts(x[part], up, down, ids[part], weights[part])
    assert torch.equal(y[part], own)


def test_launches_that_are_captured_and_never_waited_for() -> None:
    up, down = _weights(8, 512, 1024), _weights(8, 1024, 256)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    cases = (
        (1, 3, 2),
        (8, 3, 2),
        (9, 3, 3),
        (33, 2, 6 if hopper else 3),
        (40, 3, 4 if hopper else 3),
    )
    for rows, top_k, launches in cases:
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        ids, weights = routed(rows, top_k, 8, "any").cuda(), torch.rand(rows, top_k, device="cuda")
        out = torch.empty_like(x)
        for call in (
            lambda t, i=ids, w=weights: jitquant.nvfp4_experts(t, up, down, i, w),
            lambda t, i=ids, w=weights, o=out: jitquant.nvfp4_experts(t, up, down, i, w, out=o),
        ):
            call(x)
            assert count_launches(call, x) == launches
            assert_no_sync(call, x)
            assert_capturable(call, x)
    ends = torch.tensor([0, 2, 2, 3, 3, 4, 4, 5], device="cuda")

    def grouped(t: Tensor) -> Tensor:
        return jitquant.nvfp4_grouped_linear(t, up, ends)

    x = torch.randn(5, 1024, device="cuda").bfloat16()
    grouped(x)
    assert count_launches(grouped, x) == 1
    assert_no_sync(grouped, x)
    assert_capturable(grouped, x)


@pytest.mark.parametrize("kind", ["any", "one"])
def test_the_same_bits_each_time(kind: str) -> None:
    up, down = _weights(16, 1536, 2048), _weights(16, 2048, 768)
    for rows in (1, 3, 10, 40, 300):
        x, ids = torch.randn(rows, 2048, device="cuda").bfloat16(), routed(rows, 8, 16, kind).cuda()
        weights = torch.rand(rows, 8, device="cuda")
        first = jitquant.nvfp4_experts(x, up, down, ids, weights)
        for _ in range(20):
            assert torch.equal(jitquant.nvfp4_experts(x, up, down, ids, weights), first)


def test_weights_of_experts_without_rows_change_nothing() -> None:
    up, down = _weights(8, 512, 512), _weights(8, 512, 256)
    for rows in (1, 4, 50):
        x, ids = torch.randn(rows, 512, device="cuda").bfloat16(), routed(rows, 2, 3, "any").cuda()
        weights = torch.rand(rows, 2, device="cuda")
        plain = jitquant.nvfp4_experts(x, up, down, ids, weights)
        for w in (up, down):
            w.x_sf.view(torch.uint8)[3:] = 0x7F  # NaN
        assert torch.equal(jitquant.nvfp4_experts(x, up, down, ids, weights), plain)


def test_ids_that_the_kernel_before_writes() -> None:
    """Each launch reads them after its own wait."""
    up, down = _weights(64, 512, 512), _weights(64, 512, 256)
    for rows in (1, 7, 9, 400):
        x = torch.randn(rows, 512, device="cuda").bfloat16()
        weights = torch.rand(rows, 4, device="cuda")
        routings = [routed(rows, 4, 64, "any", seed).cuda() for seed in range(20)]
        expected = [jitquant.nvfp4_experts(x, up, down, ids, weights) for ids in routings]
        ids, scores = torch.empty_like(routings[0]), torch.empty_like(weights)
        results = []
        for _ in range(10):
            for routing in routings:
                ids.fill_(-1)
                scores.copy_(weights)
                ids.copy_(routing)
                results.append(jitquant.nvfp4_experts(x, up, down, ids, scores))
        assert all(torch.equal(y, expected[i % 20]) for i, y in enumerate(results))


def test_two_streams_at_once() -> None:
    up, down = _weights(16, 1536, 2048), _weights(16, 2048, 768)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for rows in (1, 6, 100):
        x = torch.randn(rows, 2048, device="cuda").bfloat16()
        ids, weights = routed(rows, 4, 16, "any").cuda(), randn(rows, 4, seed=3).float().cuda()
        expected, results = jitquant.nvfp4_experts(x, up, down, ids, weights), []
        torch.cuda.synchronize()
        for i in range(40):
            with torch.cuda.stream(streams[i % 2]):
                results.append(jitquant.nvfp4_experts(x, up, down, ids, weights))
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected) for y in results)


@pytest.mark.parametrize("rows", [1, 6, 100])
def test_four_threads_on_streams_of_their_own(rows: int) -> None:
    """Sorted rows and activations are the stream's."""
    up, down = _weights(8, 512, 1024), _weights(8, 1024, 256)
    inputs = [torch.randn(rows, 1024, device="cuda").bfloat16() for _ in range(4)]
    ids = [routed(rows, 2, 8, "any", seed).cuda() for seed in range(4)]
    weights = torch.rand(rows, 2, device="cuda")

    def layer(i: int, **more: Any) -> Tensor:
        return jitquant.nvfp4_experts(inputs[i], up, down, ids[i], weights, **more)

    expected = [layer(i) for i in range(4)]

    def work(i: int) -> None:
        out = torch.empty_like(expected[i])
        for _ in range(100):
            got = layer(i)
            layer(i, out=out)
        torch.cuda.current_stream().synchronize()
        assert torch.equal(got, expected[i])
        assert torch.equal(out, expected[i])

    in_threads(4, work)


def test_a_leading_zero_is_looked_at_when_calls_are_checked() -> None:
    x, w = torch.randn(8, 64, device="cuda").bfloat16(), _weights(2, 32, 64)
    offsets = torch.tensor([3, 4, 8], device="cuda")
    assert_no_sync(jitquant.nvfp4_grouped_linear, x, w, offsets)
    for call in (jitquant.nvfp4_grouped_linear, jitquant.nn.grouped_linear):
        q: Any = jitquant.quantize_nvfp4(x)
        with checked(), pytest.raises(ValueError, match="offsets: expected 0 as the first of 3"):
            call(q, w, offsets)
