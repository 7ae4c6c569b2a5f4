"""How the kernels run: launches, captures, streams, workspaces, bounds, devices, sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jitquant import reference
from jitquant.testing import assert_capturable, assert_no_sync, bytes_of, count_launches

from .helpers import module, randn, same

N = 768
# Of up to 7168 blocks of 16 values, where a GPU has clusters of blocks.
ONE = 1 if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else 2


def _pipelines() -> dict[str, tuple[Callable[..., object], Callable[[], list[Tensor]], int]]:
    """Per pipeline: the function, its arguments, its launches."""
    fused = module("fused_amax_quantize")
    deinterleave = module("deinterleave_quantize")
    norm, mhc = module("fused_rmsnorm_quantize"), module("fused_mhc_rmsnorm_quantize")
    weight, dequant = module("quantize_weight_nvfp4"), module("dequant_nvfp4")
    given = module("quantize_nvfp4")

    def x() -> list[Tensor]:
        return [randn(150, N)]

    def with_weight() -> list[Tensor]:
        return [randn(150, N), torch.rand(N, device="cuda").bfloat16()]

    def with_residual() -> list[Tensor]:
        return [*with_weight(), randn(150, N)]

    def streams() -> list[Tensor]:
        return [randn(150, 4, N), torch.rand(150, 4, device="cuda"), with_weight()[1]]

    gsa = torch.tensor([0.002], device="cuda")
    rows = torch.full((150,), 0.002, device="cuda")
    packed = fused.amax_quantize_nvfp4(randn(150, N))
    return {
        "amax": (module("amax_gsa").compute_amax_gsa, x, 1),
        "tensor": (fused.amax_quantize_nvfp4, x, 2),
        "tensor swizzled": (
            lambda t: fused.amax_quantize_nvfp4(t, scale_layout="swizzled_128x4"), x, 2),
        "row": (lambda t: fused.amax_quantize_nvfp4(t, granularity="row"), x, 1),
        "given number": (lambda t: fused.amax_quantize_nvfp4(t, gsa_value=0.002), x, 1),
        "given": (lambda t: given.quantize_nvfp4(t, gsa), x, 1),
        "given rows": (lambda t: given.quantize_nvfp4(t, rows), x, 1),
        "from buffer": (lambda t: fused.quantize_nvfp4_from_buffer(t, gsa), x, 1),
        "select": (lambda t: deinterleave.deinterleave_amax_quantize_nvfp4(t, N // 2, 8), x, ONE),
        "select given": (
            lambda t: deinterleave.deinterleave_quantize_nvfp4(t, N // 2, 8, gsa), x, 1),
        "swiglu": (
            lambda t: deinterleave.deinterleave_amax_quantize_nvfp4(
                t, N // 2, 8, op="swiglu"), x, ONE),
        "swiglu row": (
            lambda t: deinterleave.deinterleave_amax_quantize_nvfp4(
                t, N // 2, 8, op="swiglu", granularity="row"), x, 1),
        "rmsnorm": (lambda t, w: norm.rmsnorm_quantize_nvfp4(t, w), with_weight, 1),
        "rmsnorm residual": (
            lambda t, w, r: norm.rmsnorm_quantize_nvfp4(t, w, residual=r), with_residual, 1),
        "rmsnorm tensor": (
            lambda t, w, r: norm.rmsnorm_quantize_nvfp4(t, w, residual=r, granularity="tensor"),
            with_residual, 2),
        "rmsnorm given": (
            lambda t, w: norm.rmsnorm_quantize_nvfp4_from_gsa(t, w, gsa), with_weight, 1),
        "mhc": (lambda t, a, w: mhc.mhc_rmsnorm_quantize_nvfp4(t, a, w), streams, 1),
        "mhc tensor": (
            lambda t, a, w: mhc.mhc_rmsnorm_quantize_nvfp4(t, a, w, granularity="tensor"),
            streams, 2),
        "weight 16x16": (lambda t: weight.quantize_weight_nvfp4(t, block="16x16"), x, 2),
        "dequantize": (lambda t: dequant.dequant_nvfp4(*packed), x, 1),
    }  # fmt: skip


def test_launches_are_exact() -> None:
    for name, (fn, arguments, launches) in _pipelines().items():
        assert count_launches(fn, *arguments()) == launches, name


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_launch_up_to_7168_blocks(dtype: torch.dtype, scale_layout: str) -> None:
    quantize = module("fused_amax_quantize").amax_quantize_nvfp4
    for shape, launches in [
        *(((1, 16 * blocks), ONE) for blocks in (1, 31, 448, 512, 513, 2049, 4097, 7167, 7168)),
        *(((rows, 7168), ONE) for rows in (2, 3, 9, 16)),
        *(((rows, 40), ONE) for rows in (1, 33, 700)),
        *(((1, 16 * 7168 + 1), 2), ((17, 7168), 2), ((1100, 100), 2)),
    ]:
        x = randn(*shape, dtype=dtype)
        same(
            quantize(x, scale_layout=scale_layout),
            reference.quantize_nvfp4(x, scale_layout=scale_layout),
        )
        assert count_launches(lambda t: quantize(t, scale_layout=scale_layout), x) == launches, (
            shape
        )


def test_no_call_waits_for_the_gpu() -> None:
    for _, (fn, arguments, _) in _pipelines().items():
        assert_no_sync(fn, *arguments())


def test_captures_as_the_first_call_and_replays_on_new_data() -> None:
    for _, (fn, arguments, _) in _pipelines().items():
        assert_capturable(fn, *arguments(), replays=3)


def test_results_do_not_depend_on_the_run() -> None:
    for name, (fn, arguments, _) in _pipelines().items():
        args = arguments()
        once = fn(*[a.clone() for a in args])
        again = fn(*[a.clone() for a in args])
        first, second = (r if isinstance(r, tuple) else (r,) for r in (once, again))
        same(first, second, what=name)


def test_streams_and_threads_at_once() -> None:
    kernels = module("fused_amax_quantize"), module("amax_gsa")
    inputs = [randn(500 + 37 * i, 1024, scale=10.0**i) for i in range(6)]
    expected = [reference.quantize_nvfp4(x) for x in inputs]
    torch.cuda.synchronize()
    failures: list[str] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(60):
                    got = kernels[0].amax_quantize_nvfp4(inputs[i])
                    gsa = kernels[1].compute_amax_gsa(inputs[i])
                torch.cuda.current_stream().synchronize()
                same([*got, gsa], [*expected[i], expected[i][2]], what=f"thread {i}")
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_two_graphs_replay_at_once() -> None:
    kernel, amax = module("fused_amax_quantize"), module("amax_gsa")
    inputs = [randn(3000, 2048), randn(2999, 2048, scale=100)]
    graphs, results = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append((*kernel.amax_quantize_nvfp4(x), amax.compute_amax_gsa(x)))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for x, got in zip(inputs, results, strict=True):
        expected = reference.quantize_nvfp4(x)
        same(got, [*expected, expected[2]])


def _give_up(*_: object) -> None:
    raise ZeroDivisionError


def test_a_launch_that_never_ran_leaves_nothing_behind() -> None:
    """A capture that is given up holds launches that never run; the next calls are right."""
    kernel, amax = module("fused_amax_quantize"), module("amax_gsa")
    x = randn(2000, 2048)
    expected = reference.quantize_nvfp4(x)
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ZeroDivisionError), torch.cuda.graph(graph):
            _give_up(kernel.amax_quantize_nvfp4(x), amax.compute_amax_gsa(x))
        del graph
        same([*kernel.amax_quantize_nvfp4(x), amax.compute_amax_gsa(x)], [*expected, expected[2]])


def test_out_is_overwritten_whole_and_nothing_else_is() -> None:
    kernel = module("fused_amax_quantize")
    for layout in ("linear", "swizzled_128x4"):
        x = randn(131, 1000)
        expected = reference.quantize_nvfp4(x, scale_layout=layout)
        buffers, outs = [], []
        for t in expected:
            buffer = torch.full(
                (t.numel() * t.element_size() + 1024,), 0xAB, dtype=torch.uint8, device="cuda"
            )
            buffers.append(buffer)
            outs.append(buffer[512:-512].view(t.dtype).view(t.shape))
        x_fp4, x_sf, gsa = outs
        kernel.amax_quantize_nvfp4.out(x, scale_layout=layout, x_fp4=x_fp4, x_sf=x_sf, gsa=gsa)
        same(outs, expected)
        for buffer in buffers:
            assert bool((buffer[:512] == 0xAB).all())
            assert bool((buffer[-512:] == 0xAB).all())


def test_the_current_stream_is_used() -> None:
    kernel = module("fused_amax_quantize")
    x = torch.zeros(64, 1024, device="cuda", dtype=torch.bfloat16)
    values = randn(64, 1024)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(values)
        got = kernel.amax_quantize_nvfp4(x)
    stream.synchronize()
    same(got, reference.quantize_nvfp4(values))


def test_the_tensors_own_device_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for name, (fn, arguments, _) in _pipelines().items():
        if name.startswith(("given", "from buffer", "select given", "rmsnorm given", "dequantize")):
            continue  # these close over a tensor of device 0
        torch.cuda.set_device(0)
        args = arguments()
        expected = fn(*[a.clone() for a in args])
        got = fn(*[a.to("cuda:1") for a in args])
        assert torch.cuda.current_device() == 0
        first, second = (r if isinstance(r, tuple) else (r,) for r in (got, expected))
        assert all(t.device.index == 1 for t in first)
        same(first, [bytes_of(t).to("cuda:1").view(t.dtype).view(t.shape) for t in second])
    x, gsa = randn(4, 64), torch.ones(1, device="cuda:1")
    with pytest.raises(
        RuntimeError, match="gsa: expected a tensor on cuda:0, as the input is, got one on cuda:1"
    ):
        module("quantize_nvfp4").quantize_nvfp4(x, gsa)


def test_empty_tensors() -> None:
    fused = module("fused_amax_quantize")
    for shape in ((0, 64), (3, 0, 64), (0, 17)):
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        for granularity in ("tensor", "row"):
            for layout in ("linear", "swizzled_128x4"):
                options = {"granularity": granularity, "scale_layout": layout}
                got = fused.amax_quantize_nvfp4(x, **options)
                same(got, reference.quantize_nvfp4(x, **options))
    x = torch.empty((0, 64), device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(64, device="cuda")
    for granularity in ("tensor", "row"):
        got = module("fused_rmsnorm_quantize").rmsnorm_quantize_nvfp4(
            x, weight, granularity=granularity
        )
        same(got, reference.rmsnorm_quantize_nvfp4(x, weight, granularity=granularity))
    parts = fused.amax_quantize_nvfp4(x)
    assert module("dequant_nvfp4").dequant_nvfp4(*parts).shape == (0, 64)
    same([module("amax_gsa").compute_amax_gsa(x)], [torch.zeros(1)])


def test_bad_arguments_reach_no_kernel() -> None:
    fused = module("fused_amax_quantize")
    x = randn(4, 64)
    gsa = torch.ones(1, device="cuda")
    cases: list[tuple[str, Callable[[], object]]] = [
        ("x: expected bfloat16, .* got torch.int32", lambda: fused.amax_quantize_nvfp4(x.int())),
        (r"contiguous last dimension.*x\.contiguous\(\)", lambda: fused.amax_quantize_nvfp4(x.T)),
        (
            "recipe: .* 'te', 'vllm', 'te_flush', got 'x'",
            lambda: fused.amax_quantize_nvfp4(x, recipe="x"),
        ),
        ("scale_layout: .* got 'x'", lambda: fused.amax_quantize_nvfp4(x, scale_layout="x")),
        ("granularity: .* got 'x'", lambda: fused.amax_quantize_nvfp4(x, granularity="x")),
        ("divisor: .* got 0.0", lambda: fused.amax_quantize_nvfp4(x, 0.0)),
        ("divisor: .* got nan", lambda: fused.amax_quantize_nvfp4(x, float("nan"))),
        ("with N >= 1", lambda: fused.amax_quantize_nvfp4(x[:, :0])),
        (r"x: expected shape .* got shape \(\)", lambda: fused.amax_quantize_nvfp4(x[0, 0])),
        ("gsa: expected float32, got torch.float16",
         lambda: fused.quantize_nvfp4_from_buffer(x, gsa.half())),
        (r"gsa: expected one element or shape \(4,\), one for each row of x",
         lambda: fused.quantize_nvfp4_from_buffer(x, gsa.expand(3))),
        ("gsa: expected a tensor on cuda", lambda: fused.quantize_nvfp4_from_buffer(x, gsa.cpu())),
        ("interleave: expected 0 .* or a divisor of 32",
         lambda: fused.deinterleave_quantize_from_buffer(x, 32, 5, gsa)),
        ("intermediate: expected fused.* got 30",
         lambda: fused.deinterleave_quantize_from_buffer(x, 30, 5, gsa)),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(RuntimeError, match=message):
            call()
    good = fused.amax_quantize_nvfp4(x)
    for bad, message in (
        ((good[0][:2], good[1], good[2]), "x_fp4: expected shape"),
        ((good[0].view(torch.int8), good[1], good[2]), "x_fp4: expected torch.float4_e2m1fn_x2"),
        ((good[0], good[1].T.contiguous().T, good[2]), "x_sf: expected a contiguous buffer"),
        ((good[0], good[1], good[2].expand(2)), "gsa: expected shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fused.amax_quantize_nvfp4.out(x, x_fp4=bad[0], x_sf=bad[1], gsa=bad[2])


@pytest.mark.parametrize("cols", [16, 4096, 65536])
def test_beyond_two_to_the_31_elements(cols: int) -> None:
    """2^32 elements and a row: the first, the middle and the last row, against the reference."""
    rows = 2**32 // cols + 1
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    probes = [0, rows // 2, rows - 1]
    for i in probes:
        x[i] = randn(cols, scale=i % 7 + 1)
    gsa = reference.amax_gsa(x[probes])[0]
    same([module("amax_gsa").compute_amax_gsa(x)], [gsa])
    x_fp4, x_sf, got = module("fused_amax_quantize").amax_quantize_nvfp4(x)
    same([got], [gsa])
    expected = reference.quantize_nvfp4_from_gsa(x[probes], gsa)
    same([x_fp4[probes[0]], x_fp4[probes[1]], x_fp4[probes[2]]], list(expected[0].unbind()))
    assert torch.equal(x_sf.view(torch.uint8)[probes], expected[1].view(torch.uint8))
    back = module("dequant_nvfp4").dequant_nvfp4(x_fp4, x_sf, got)
    same([back[probes]], reference.dequantize_nvfp4(*expected, gsa))
    del back, x_fp4, x_sf
    rows_fp4, _, rows_gsa = module("fused_amax_quantize").amax_quantize_nvfp4(x, granularity="row")
    per_row = reference.quantize_nvfp4(x[probes], granularity="row")
    same([rows_gsa[probes]], [per_row[2]])
    assert torch.equal(rows_fp4.view(torch.uint8)[probes], per_row[0].view(torch.uint8))
