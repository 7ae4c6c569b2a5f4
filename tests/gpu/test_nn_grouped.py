"""`grouped_linear` on a GPU: the CPU's numbers, by grouped GEMMs, without a wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor

import jitquant
from jitquant.nn import _grouped, grouped_linear
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

MAJOR = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
grouped = pytest.mark.skipif(MAJOR not in (9, 10), reason="grouped GEMMs need sm_90 or sm_100")


def quantized(kind: str, x: Tensor) -> Any:
    if kind == "fp8":
        return jitquant.quantize_fp8(x, granularity="row")
    return jitquant.quantize_nvfp4(x, granularity="row" if kind == "row" else "tensor")


def operands(kind: str, cols: int, out: int) -> tuple[Any, Any]:
    w = randn(6, out, cols, seed=1) * torch.tensor([1, 8, 0.1, 3, 1, 0.5])[:, None, None]
    return quantized(kind, randn(300, cols)), quantized(kind, w.to(torch.bfloat16) * cols**-0.5)


@pytest.mark.parametrize("kind", ["tensor", "row", "fp8"])
@pytest.mark.parametrize(("cols", "out"), [(512, 384), (104, 72), (100, 7)])
@pytest.mark.parametrize(
    "offsets", [[50, 100, 150, 200, 250, 300], [0, 1, 1, 170, 170, 299], [0] * 6], ids=str
)
def test_the_cpus_numbers(kind: str, cols: int, out: int, offsets: list[int]) -> None:
    q, w = operands(kind, cols, out)
    want = grouped_linear(q, w, torch.tensor(offsets))
    got = grouped_linear(q.to("cuda"), w.to("cuda"), torch.tensor(offsets, device="cuda")).cpu()
    assert got.shape == want.shape
    assert (got[offsets[-1] :] == 0).all()
    if offsets[-1]:
        noise = (got.double() - want.double()).square().sum()
        assert 10 * torch.log10(want.double().square().sum() / noise) > 45


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("offsets", [[1] * 6, [0, 4, 8, 30, 47, 48], [0] * 6], ids=str)
def test_few_rows_read_weights_as_they_are_stored(kind: str, offsets: list[int]) -> None:
    _, w = operands(kind, 512, 384)
    q = quantized(kind, randn(48, 512))
    want = grouped_linear(q, w, torch.tensor(offsets))
    there = q.to("cuda"), w.to("cuda"), torch.tensor(offsets, device="cuda")
    got = grouped_linear(*there)
    assert torch.equal(got, jitquant.nvfp4_grouped_linear(*there))
    assert count_launches(grouped_linear, *there) == 1
    got = got.cpu()
    assert (got[offsets[-1] :] == 0).all()
    if offsets[-1]:
        noise = (got.double() - want.double()).square().sum()
        assert 10 * torch.log10(want.double().square().sum() / noise) > 45


@grouped
@pytest.mark.parametrize("kind", ["tensor", "row", "fp8"])
def test_nothing_waits_and_all_is_captured(kind: str) -> None:
    q, w = (t.to("cuda") for t in operands(kind, 512, 384))
    offsets = torch.tensor([0, 1, 1, 170, 170, 299], device="cuda")
    assert _grouped.has_grouped_mm(q.device)
    assert_no_sync(grouped_linear, q, w, offsets)
    assert_capturable(
        lambda x: grouped_linear(quantized(kind, x), w, offsets),
        randn(300, 512).cuda(),
        warmup_calls=1,
    )


@grouped
def test_wrong_offsets_stay_within_the_tensor() -> None:
    q, w = (t.to("cuda") for t in operands("tensor", 512, 384))
    offsets = torch.tensor([700, 3, -5, 1 << 40, 0, -1], device="cuda")
    assert grouped_linear(q, w, offsets).isfinite().all()
