"""Many tensors in one buffer: back from eight and four bits, whatever the groups are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jitquant import reference
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

from .helpers import module, same

E4M3 = torch.float8_e4m3fn


def _groups(count: int, longest: int) -> tuple[Tensor, Tensor, int]:
    """Offsets and sizes of groups, a fifth of them empty, with gaps; and the buffer's elements."""
    sizes = torch.randint(0, longest, (count,))
    sizes[torch.rand(count) < 0.2] = 0
    ends = (sizes + torch.randint(0, 40, (count,))).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends)) + 5
    return offsets, sizes, int(offsets[-1]) + 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 3, 64, 65, 257, 4096])
def test_back_to_values(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    kernels = module("dequantize_grouped")
    for longest in (2, 700, 40_000 if count < 100 else 60):
        offsets, sizes, numel = _groups(count, longest)
        scales = torch.rand(count)
        data = torch.randint(0, 256, (numel,), dtype=torch.uint8).view(E4M3)
        blocks = -(-numel // 16)
        codes = torch.randint(0, 256, (blocks * 8,), dtype=torch.uint8)
        factors = torch.randint(0, 127, (blocks,), dtype=torch.uint8)
        for lengths in (None, sizes):
            there = None if lengths is None else lengths.cuda()
            got = kernels.dequantize_grouped_fp8(
                data.cuda(), scales.cuda(), offsets.cuda(), sizes=there, dtype=dtype
            )
            want = reference.dequantize_grouped_fp8(
                data, scales, offsets, sizes=lengths, dtype=dtype
            )
            same([got], want, what=f"{count} {longest}")
            got = kernels.dequantize_grouped_nvfp4(
                *(t.cuda() for t in (codes, factors, scales, offsets)),
                numel=numel,
                sizes=there,
                dtype=dtype,
            )
            want = reference.dequantize_grouped_nvfp4(
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
    module("dequantize_grouped").dequantize_grouped_fp8.out(
        data, torch.ones(6, device="cuda"), offsets, sizes=sizes, dtype=torch.float32, out=out
    )
    assert bool((guarded[:1024] == 7).all())
    assert bool((guarded[2024:] == 7).all())


def test_one_launch_that_can_be_captured_and_never_waits() -> None:
    offsets, sizes, numel = _groups(65, 5000)
    data = torch.randn(numel).to(E4M3).cuda()
    scales, at, lengths = torch.rand(65).cuda(), offsets.cuda(), sizes.cuda()

    def call(x: Tensor) -> Tensor:
        out: Tensor = module("dequantize_grouped").dequantize_grouped_fp8(
            data, x, at, sizes=lengths
        )
        return out

    assert count_launches(call, scales) == 1
    assert_no_sync(call, scales)
    assert_capturable(call, scales, replays=2)


def test_a_group_of_more_than_2_to_the_31_elements() -> None:
    numel = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    data = torch.zeros(numel, dtype=torch.uint8, device="cuda").view(E4M3)
    data[-700:] = torch.ones(700, device="cuda").to(E4M3)
    offsets = torch.tensor([0, 100, numel - 50, numel], device="cuda")
    got = module("dequantize_grouped").dequantize_grouped_fp8(
        data, torch.tensor([2.0, 4.0, 8.0], device="cuda"), offsets
    )
    assert got[-700:-50].unique().tolist() == [4.0]
    assert got[-50:].unique().tolist() == [8.0]
    assert int(got.count_nonzero()) == 700
