"""Many tensors in one buffer: to eight and four bits and back, whatever the segments are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import OPS
from torch import Tensor

import jitquant
from jitquant import reference
from jitquant.formats import ACTIVATIONS, as_bytes
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

from .helpers import module, randn, room_for, same

E4M3 = torch.float8_e4m3fn


def _segments(count: int, longest: int) -> tuple[Tensor, Tensor, int]:
    """Offsets and sizes of segments, a fifth of them empty, with gaps; the buffer's elements."""
    sizes = torch.randint(0, longest, (count,))
    sizes[torch.rand(count) < 0.2] = 0
    ends = (sizes + torch.randint(0, 40, (count,))).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends)) + 5
    return offsets, sizes, int(offsets[-1]) + 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 64, 65, 257, 4096])
def test_back_to_values(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    kernels = module("dequantize_ragged")
    for longest in (2, 700, 40_000 if count < 100 else 60):
        offsets, sizes, numel = _segments(count, longest)
        scales = torch.rand(count)
        data = torch.randint(0, 256, (numel,), dtype=torch.uint8).view(E4M3)
        blocks = -(-numel // 16)
        codes = torch.randint(0, 256, (blocks * 8,), dtype=torch.uint8)
        factors = torch.randint(0, 127, (blocks,), dtype=torch.uint8)
        for lengths in (None, sizes):
            there = None if lengths is None else lengths.cuda()
            got = kernels.dequantize_ragged_fp8(
                data.cuda(), scales.cuda(), offsets.cuda(), sizes=there, dtype=dtype
            )
            want = reference.dequantize_ragged_fp8(
                data, scales, offsets, sizes=lengths, dtype=dtype
            )
            same([got], want, what=f"{count} {longest}")
            got = kernels.dequantize_ragged_nvfp4(
                *(t.cuda() for t in (codes, factors, scales, offsets)),
                numel=numel,
                sizes=there,
                dtype=dtype,
            )
            want = reference.dequantize_ragged_nvfp4(
                codes,
                factors.view(E4M3),
                scales,
                offsets,
                numel=numel,
                sizes=lengths,
                dtype=dtype,
            )
            same([got], want, what=f"nvfp4 {count} {longest}")


def test_offsets_out_of_order_stay_in_the_buffer() -> None:
    guarded = torch.full((4096,), 7.0, device="cuda")
    out = guarded[1024:2024]
    data = torch.ones(1000, device="cuda").to(E4M3)
    offsets = torch.tensor([500, -3, 10**12, 7, -(2**62), 900, 2**62], device="cuda")
    sizes = torch.tensor([2**62, -1, 2**63 - 1, 5, 9, 3], device="cuda")
    module("dequantize_ragged").dequantize_ragged_fp8.out(
        data, torch.ones(6, device="cuda"), offsets, sizes=sizes, dtype=torch.float32, out=out
    )
    assert bool((guarded[:1024] == 7).all())
    assert bool((guarded[2024:] == 7).all())


def test_one_launch_that_can_be_captured_and_never_waits() -> None:
    offsets, sizes, numel = _segments(65, 5000)
    data = torch.randn(numel).to(E4M3).cuda()
    scales, at, lengths = torch.rand(65).cuda(), offsets.cuda(), sizes.cuda()

    def call(x: Tensor) -> Tensor:
        out: Tensor = module("dequantize_ragged").dequantize_ragged_fp8(data, x, at, sizes=lengths)
        return out

    assert count_launches(call, scales) == 1
    assert_no_sync(call, scales)
    assert_capturable(call, scales, replays=2)


def test_a_segment_of_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 4096
    room_for(12)
    data = torch.zeros(numel, dtype=torch.uint8, device="cuda").view(E4M3)
    data[-700:] = torch.ones(700, device="cuda").to(E4M3)
    offsets = torch.tensor([0, 100, numel - 50, numel], device="cuda")
    got = module("dequantize_ragged").dequantize_ragged_fp8(
        data, torch.tensor([2.0, 4.0, 8.0], device="cuda"), offsets
    )
    assert got[-700:-50].unique().tolist() == [4.0]
    assert got[-50:].unique().tolist() == [8.0]
    assert int(got.count_nonzero()) == 700


FORMATS = {
    "fp8": ("quantize_ragged", "quantize_ragged_fp8", {"dtype": E4M3}),
    "e5m2": ("quantize_ragged", "quantize_ragged_fp8", {"dtype": torch.float8_e5m2}),
    "nvfp4": ("quantize_ragged_nvfp4", "quantize_ragged_nvfp4", {"recipe": "vllm"}),
}


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("count", [1, 3, 65, 4096])
def test_mxfp8(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    quantize = module("quantize_ragged_mxfp8").quantize_ragged_mxfp8
    back = module("dequantize_ragged").dequantize_ragged_mxfp8
    for i, longest in enumerate((2, 700, 3_000_000 // count)):
        offsets, sizes, numel = _segments(count, longest)
        values = torch.randn(numel + 1) * torch.logspace(-3, 3, numel + 1)
        values[::10_007] = float("nan")
        given = (torch.float16, torch.float32, torch.bfloat16)[i]
        for x in (values.to(given)[1:], values.to(given)[:-1]):  # aligned and not
            for lengths in (None, sizes):
                at, there = offsets.cuda(), None if lengths is None else lengths.cuda()
                got = quantize(x.cuda(), at, sizes=there, dtype=dtype)
                want = reference.quantize_ragged_mxfp8(x, offsets, sizes=lengths, dtype=dtype)
                same(got, want, what=f"{count} {longest}")
                values_back = back(*got, at, sizes=there, dtype=given)
                same(
                    [values_back],
                    reference.dequantize_ragged_mxfp8(*want, offsets, sizes=lengths, dtype=given),
                )


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations(activation: str) -> None:
    """Before the cast, with computed and given scales; of srelu and relu to the bit."""
    torch.manual_seed(5)
    kernel = module("quantize_ragged").quantize_ragged_fp8
    offsets, sizes, numel = _segments(65, 5000)
    for dtype in (torch.bfloat16, torch.float32):
        x = (3 * torch.randn(numel)).to(dtype)
        for scale in (None, torch.rand(65) * 9):
            how = {"dtype": E4M3, "activation": activation}
            tensors = _on_gpu(x, offsets, scale)
            got = kernel(*tensors, sizes=sizes.cuda(), **how)
            want = reference.quantize_ragged_fp8(x, offsets, scale, sizes=sizes, **how)
            if activation in ("relu", "srelu"):
                same(got, want, what=activation)
            differ = got[0].cpu().view(torch.uint8) != want[0].view(torch.uint8)
            assert differ.sum() <= max(2, 1e-3 * differ.numel())
            for mine, theirs in zip(got[1:], want[1:], strict=True):
                torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-4)


def _on_gpu(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.cuda() for t in tensors]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 3, 64, 65, 257, 4096])
def test_to_codes(count: int, name: str) -> None:
    torch.manual_seed(count)
    file, function, options = FORMATS[name]
    kernel = getattr(module(file), function)
    for i, longest in enumerate((2, 700, 3_000_000 // count)):
        offsets, sizes, numel = _segments(count, longest)
        values = torch.randn(numel + 1) * torch.logspace(-3, 3, numel + 1)
        values[::10_007] = float("nan")
        dtype = (torch.float16, torch.float32, torch.bfloat16)[i]
        for x in (values.to(dtype)[1:], values.to(dtype)[:-1]):  # aligned and not
            for lengths in (None, sizes):
                for given in (None, torch.rand(count) * 9):
                    got = kernel(*_on_gpu(x, offsets, given), sizes=_on_gpu(lengths)[0], **options)
                    want = getattr(reference, function)(x, offsets, given, sizes=lengths, **options)
                    same(got, want, what=f"{name} {count} {longest} {given is not None}")


@pytest.mark.parametrize("name", FORMATS)
def test_more_tiles_than_the_cache_holds_and_many_segments_in_one(name: str) -> None:
    numel = 24_000_000
    file, function, options = FORMATS[name]
    far = torch.linspace(0, numel - 40_000, 150).long()
    close = torch.arange(far[70] + 3, far[70] + 30_000, 7)
    offsets = torch.cat((far, close, torch.tensor([numel]))).sort().values
    x = (torch.randn(numel) * torch.logspace(-3, 3, numel)).bfloat16()
    got = getattr(module(file), function)(*_on_gpu(x, offsets), **options)
    same(got, getattr(reference, function)(x, offsets, **options), what=name)


@pytest.mark.parametrize("name", FORMATS)
def test_segments_unlike_each_other_and_much_between_them(name: str) -> None:
    torch.manual_seed(7)
    file, function, options = FORMATS[name]
    sizes = (torch.rand(300) ** 8 * 20_000).long() // 16 * 16
    sizes[3] = 5_000_000  # more than half of the ranges of a launch
    between = torch.zeros(300, dtype=torch.int64)
    between[150], between[151] = 160_000, 48
    offsets = torch.cat((torch.tensor([48]), 48 + (sizes + between).cumsum(0)))
    x = torch.randn(int(offsets[-1]) + 100_003).bfloat16()
    for lengths in (None, sizes):
        for given in (None, torch.rand(300) * 9):
            got = getattr(module(file), function)(
                *_on_gpu(x, offsets, given), sizes=_on_gpu(lengths)[0], **options
            )
            want = getattr(reference, function)(x, offsets, given, sizes=lengths, **options)
            same(got, want, what=f"{name} {given is not None}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_first_segment_far_from_the_beginning(name: str) -> None:
    file, function, options = FORMATS[name]
    x = torch.randn(2_000_000).bfloat16()
    for first in torch.randint(1, len(x) // 16, (60,)).tolist():
        offsets = torch.tensor([16 * first, 16 * first + 16, 16 * first + 16, len(x)])
        got = getattr(module(file), function)(*_on_gpu(x, offsets), **options)
        same(got, getattr(reference, function)(x, offsets, **options), what=f"{name} {first}")


@pytest.mark.parametrize("name", FORMATS)
def test_offsets_that_do_not_ascend_end(name: str) -> None:
    file, function, options = FORMATS[name]
    for seed, numel in enumerate((1000, 40_000, 3_000_000) * 20):
        torch.manual_seed(seed)
        offsets = torch.randint(-numel // 2, numel * 3 // 2, (2 + 97 * seed % 700,), device="cuda")
        getattr(module(file), function)(torch.randn(numel, device="cuda"), offsets, **options)
        torch.cuda.synchronize()


def _check_gradients(cols: int, count: int, longest: int, activation: str) -> None:
    """The kernel's results are the reference's, with scales and sizes and without."""
    kernel = module("quantize_ragged_grad").quantize_ragged_grad_fp8
    rows = torch.randint(0, longest, (count,))
    ends = (rows + torch.randint(0, 2, (count,))).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    for dtype in (torch.bfloat16, torch.float32):
        grad, x = torch.randn(2, int(ends[-1]) + 2, cols).to(dtype)
        act = None if activation == "none" else x
        for given in (None, torch.rand(count) * 9):
            for sizes in (None, rows):
                options = {"activation": activation, "dtype": torch.float8_e5m2}
                tensors = _on_gpu(grad, offsets, given, sizes, act)
                got = kernel(*tensors[:3], sizes=tensors[3], act_input=tensors[4], **options)
                want = reference.quantize_ragged_grad_fp8(
                    grad, offsets, given, sizes=sizes, act_input=act, **options
                )
                if activation in ("none", "relu", "srelu"):
                    same(got[:3], want[:3], what=f"{cols} {count}")
                differ = got[0].cpu().view(torch.uint8) != want[0].view(torch.uint8)
                assert differ.sum() <= max(2, 1e-3 * differ.numel())
                for mine, theirs in zip(got[1:], want[1:], strict=True):
                    torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-4)
                again = kernel(*tensors[:3], sizes=tensors[3], act_input=tensors[4], **options)
                same(again, got)


@pytest.mark.parametrize("cols", [1, 5, 16, 640, 1000, 4608])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(cols: int, activation: str) -> None:
    torch.manual_seed(cols)
    for count, longest in ((1, 700), (3, 300), (70, 12), (2, 3)):
        _check_gradients(cols, count, longest, activation)


@pytest.mark.parametrize("count", [64, 65, 257, 4096])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_gradients_of_many_segments(count: int, activation: str) -> None:
    torch.manual_seed(count)
    for cols in (1, 16):
        _check_gradients(cols, count, 12, activation)


def _calls() -> dict[str, tuple[Callable[[Tensor], object], int]]:
    """A call for each way, and its launches for a buffer that is not small."""
    offsets, sizes, _ = _segments(65, 4000)
    at, lengths = offsets.cuda(), sizes.cuda()
    scale = torch.rand(65).cuda()
    quantize, grad = jitquant.quantize_ragged, jitquant.quantize_ragged_grad
    return {
        "fp8": (lambda x: quantize(x, at, sizes=lengths), 2),
        "fp8 given": (lambda x: quantize(x, at, scale=scale), 1),
        "nvfp4": (lambda x: quantize(x, at, format="nvfp4"), 2),
        "nvfp4 given": (lambda x: quantize(x, at, format="nvfp4", scale=scale), 1),
        "grad": (lambda x: grad(x, at), 2),
        "grad given": (lambda x: grad(x, at, scale=scale, act_input=x, activation="silu"), 1),
    }


def test_launches_capture_and_never_wait() -> None:
    for (name, (call, launches)), rows in itertools.product(_calls().items(), (100, 150_000)):
        x = torch.randn(rows, 16, device="cuda", dtype=torch.bfloat16)
        assert count_launches(call, x) == (1 if rows == 100 else launches), name
        assert_no_sync(call, x)
        assert_capturable(call, x, replays=2)


@pytest.mark.parametrize("numel", [1000, 40_000])
def test_quantizing_offsets_out_of_order_stays_in_the_buffer(numel: int) -> None:
    offsets = torch.tensor([500, -3, 10**12, 7, -(2**62), 900, 2**62], device="cuda")
    sizes = torch.tensor([2**62, -1, 2**63 - 1, 5, 9, 3], device="cuda")
    guarded = torch.full((numel + 2048,), 7, device="cuda", dtype=torch.uint8)
    x, scales = torch.randn(numel, device="cuda"), torch.ones(2, 6, device="cuda")
    module("quantize_ragged").quantize_ragged_fp8.out(
        x,
        offsets,
        sizes=sizes,
        dtype=E4M3,
        data=guarded[1024:-1024].view(E4M3),
        scale_inv=scales[0],
        amax=scales[1],
    )
    assert bool((guarded[:1024] == 7).all())
    assert bool((guarded[-1024:] == 7).all())


def test_quantizing_a_segment_of_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 4096
    room_for(16)
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[100], x[-51], x[-1] = 1.0, 7.0, 3.0
    offsets = torch.tensor([0, 100, numel - 50, numel], device="cuda")
    for scale in (None, torch.full((3,), 2.0, device="cuda")):
        q = jitquant.quantize_ragged(x, offsets, scale=scale)
        assert q.amax.tolist() == [0.0, 7.0, 3.0]
        factor = q.scale_inv.reciprocal() if scale is None else scale
        for i, segment in ((100, 1), (numel - 51, 1), (numel - 1, 2)):
            want = (x[i].float() * factor[segment]).to(E4M3)
            assert q.data[i].view(torch.uint8) == want.view(torch.uint8)
        assert int(q.data.view(torch.uint8).count_nonzero()) == 3


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("quantize_ragged_nvfp4", None),
        ("quantize_ragged_grad_fp8", "none"),
        ("quantize_ragged_grad_fp8", "relu"),
    ],
)
def test_segments_beyond_2_to_the_31_elements(
    name: str, activation: str | None, given: bool
) -> None:
    """Zeros but for rows at the ends and around element 2^31: as if these were the whole buffer."""
    room_for(16)
    rows, cols = 2**25 + 64, 64
    windows = (slice(0, 4), slice(2**25 - 2, 2**25 + 2), slice(rows - 4, rows))

    def near(t: Tensor) -> Tensor:
        return torch.cat([as_bytes(t).reshape(rows, -1)[window] for window in windows])

    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    for i, window in enumerate(windows):
        x[window] = randn(4, cols, scale=3.0**i)
    short = near(x).cpu()
    far_at = torch.tensor([0, 1, rows - 2, rows])
    near_at = torch.tensor([0, 1, 10, 12])
    scale = torch.tensor([2.0, 7.0, 0.3]) if given else None
    acts: list[dict[str, Tensor]] = [{}, {}]
    options: dict[str, Any] = {}
    if activation is not None:
        options = {"activation": activation, "dtype": torch.float8_e5m2}
        acts = [{} if activation == "none" else {"act_input": t} for t in (x, short)]
    got = OPS[name].compiled().default(x, *_on_gpu(far_at, scale), **options, **acts[0])
    want = OPS[name].reference(short, near_at, scale, **options, **acts[1])
    elements = 1 if activation else 2
    for mine, theirs in zip(got[:elements], want[:elements], strict=True):
        few = near(mine)
        same([few], [theirs.reshape(few.shape)], what=name)
        assert few.count_nonzero() == as_bytes(mine).count_nonzero()
    same(got[elements : elements + 2], want[elements : elements + 2], what=name)
    if activation:
        torch.testing.assert_close(got[3].cpu(), want[3], rtol=1e-5, atol=1e-4)
        return
    back = OPS["dequantize_ragged_nvfp4"]
    each = {"row_size": cols}
    values = back.compiled().default(*got[:3], far_at.cuda(), numel=x.numel(), **each)
    (expected,) = back.reference(*want[:3], near_at, numel=short.numel(), **each)
    same([near(values)], [expected.reshape(short.shape)])
    assert int(values.count_nonzero()) == int(expected.count_nonzero())


@pytest.mark.parametrize("widths", ["each", "one"])
def test_offsets_are_captured_and_never_waited_for(widths: str) -> None:
    """Of rows that the kernel before counts, others in each replay."""
    counts = torch.rand(64, device="cuda") * 100
    last = torch.randint(1, 5, (64,), device="cuda") * 16 if widths == "each" else 16

    def call(counts: Tensor) -> Tensor:
        return jitquant.ragged_offsets(counts.int(), last)

    sizes = counts.cpu().long() * (last.cpu() if isinstance(last, Tensor) else last)
    assert call(counts).tolist() == [0, *sizes.cumsum(0).tolist()]
    assert_no_sync(call, counts)
    assert_capturable(call, counts)
