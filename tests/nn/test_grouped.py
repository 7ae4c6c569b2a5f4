"""`grouped_linear` on the CPU, and what it would call on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from samples import randn
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import jitquant
from jitquant.nn import _grouped, grouped_linear, stack_experts

from .helpers import sqnr

BF16 = torch.bfloat16
EXPERTS, OUT, IN = 4, 40, 96

ROW = {"granularity": "row"}
NVFP4: dict[str, Callable[[Tensor], Any]] = {
    "tensor": jitquant.quantize_nvfp4,
    "row": lambda x: jitquant.quantize_nvfp4(x, **ROW),
    "swizzled": lambda x: jitquant.quantize_nvfp4(x, scale_layout="swizzled_128x4"),
    "swizzled_row": lambda x: jitquant.quantize_nvfp4(x, scale_layout="swizzled_128x4", **ROW),
}
FP8: dict[str, Callable[[Tensor], Any]] = {
    "fp8": lambda x: jitquant.quantize_fp8(x, **ROW),
}
FORMATS = NVFP4 | FP8
OFFSETS = {
    "even": [16, 32, 48, 64],
    "uneven": [1, 2, 50, 64],
    "empty experts": [0, 30, 30, 64],
    "rows left": [5, 9, 20, 33],
    "no rows used": [0, 0, 0, 0],
}


def experts(*, cols: int = IN, out: int = OUT) -> Tensor:
    """Weights whose magnitudes differ from expert to expert and row to row."""
    w = randn(EXPERTS, out, cols, seed=1).float() * cols**-0.5
    of_rows = torch.linspace(0.1, 1, out)[:, None]
    return (w * torch.tensor([1.0, 8, 0.1, 3])[:, None, None] * of_rows).to(BF16)


def wanted(q: Any, weights: Any, offsets: list[int]) -> Tensor:
    """In float64, expert by expert."""
    x, w = (t.dequantize(torch.float32).double() for t in (q, weights))
    y = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for expert, (begin, end) in enumerate(zip([0, *offsets], offsets, strict=False)):
        y[begin:end] = x[begin:end] @ w[expert].T
    return y


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_each_expert_has_its_rows(kind: str, offsets: list[int], dtype: torch.dtype) -> None:
    q, w = FORMATS[kind](randn(64, IN)), FORMATS[kind](experts())
    y = grouped_linear(q, w, torch.tensor(offsets), dtype=dtype)
    want = wanted(q, w, offsets)
    assert y.shape == (64, OUT)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert not y.requires_grad
    assert sqnr(y, want) > 48  # roundings to bf16
    assert (y[offsets[-1] :] == 0).all()
    again = grouped_linear(q, w, torch.tensor(offsets, dtype=torch.int32), dtype=dtype)
    assert torch.equal(again, y)
    out = torch.full((64, OUT), 7.0, dtype=dtype)
    with_zero = torch.tensor([0, *offsets])
    assert grouped_linear(q, w, with_zero, out=out) is out
    assert torch.equal(out, y)


@pytest.mark.parametrize("kind", FORMATS)
def test_against_the_plain_layers(kind: str) -> None:
    x, w = randn(64, IN), experts()
    offsets = OFFSETS["uneven"]
    y = grouped_linear(FORMATS[kind](x), FORMATS[kind](w), torch.tensor(offsets))
    bounds = zip([0, *offsets], offsets, w, strict=False)
    plain = torch.cat([x[a:b].float() @ expert.float().T for a, b, expert in bounds])
    assert sqnr(y, plain) > (27 if kind == "fp8" else 14)


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_stacked_nvfp4(layout: Any) -> None:
    """Weights that were quantized one by one keep their values to the bit."""
    w = experts(cols=88)
    each = [jitquant.quantize_weight_nvfp4(e, scale_layout=layout) for e in w]
    stacked = stack_experts(each)
    stacked.validate()
    assert stacked.shape == (EXPERTS, OUT, 88)
    values = torch.stack([q.dequantize(torch.float32) for q in each])
    assert torch.equal(stacked.dequantize(torch.float32), values)
    q, offsets = jitquant.quantize_nvfp4(randn(64, 88)), OFFSETS["uneven"]
    assert sqnr(grouped_linear(q, stacked, torch.tensor(offsets)), wanted(q, stacked, offsets)) > 48


def test_stacked_fp8() -> None:
    w = experts()
    each = [jitquant.quantize_fp8(e, **ROW) for e in w]
    stacked = stack_experts(each)
    stacked.validate()
    whole = jitquant.quantize_fp8(w, **ROW)
    assert torch.equal(stacked.data.view(torch.uint8), whole.data.view(torch.uint8))
    assert torch.equal(stacked.scale_inv, whole.scale_inv)


@pytest.mark.parametrize("kind", FORMATS)
def test_autocast_does_not_reach_the_sums(kind: str) -> None:
    q, w, offsets = FORMATS[kind](randn(64, IN)), FORMATS[kind](experts()), OFFSETS["uneven"]
    want = grouped_linear(q, w, torch.tensor(offsets), dtype=torch.float32)
    with torch.autocast("cpu", dtype=BF16):
        got = grouped_linear(q, w, torch.tensor(offsets), dtype=torch.float32)
    assert torch.equal(got, want)


def test_no_rows() -> None:
    q, w = jitquant.quantize_nvfp4(randn(64, IN))[:0], jitquant.quantize_nvfp4(experts())
    assert grouped_linear(q, w, torch.zeros(EXPERTS, dtype=torch.int32)).shape == (0, OUT)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compile() -> None:
    weights = jitquant.quantize_nvfp4(experts())
    eight = jitquant.quantize_fp8(experts(), **ROW)

    def f(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        a = grouped_linear(jitquant.quantize_nvfp4(x, **ROW), weights, offsets)
        return a, grouped_linear(jitquant.quantize_fp8(x, **ROW), eight, offsets)

    arguments = randn(64, IN), torch.tensor(OFFSETS["uneven"])
    got = torch.compile(f, fullgraph=True)(*arguments)
    assert all(map(torch.equal, got, f(*arguments)))


def as_grouped_gemm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """What PyTorch's grouped GEMMs do, expert by expert: past the last end nothing is written."""
    assert a.is_contiguous()
    assert b.transpose(-2, -1).is_contiguous()
    assert ends.dtype == torch.int32
    assert a.shape[1] * a.element_size() % 16 == 0
    y = torch.full((a.shape[0], b.shape[-1]), torch.nan)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        assert begin <= end <= a.shape[0]
        y[begin:end] = a[begin:end].float() @ b[expert].float()
        begin = end
    return y


@pytest.fixture
def grouped_gemms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has the CPU take the GPU's way; names of what was called."""
    calls = []

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        calls.append("bf16")
        assert a.dtype == b.dtype == BF16
        return as_grouped_gemm(a, b, offs).to(BF16)

    def scaled_grouped_mm(a: Tensor, b: Tensor, **given: Any) -> Tensor:
        calls.append("fp8")
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert given["scale_recipe_a"] is given["scale_recipe_b"] is ScalingType.RowWise
        scale_a, scale_b, offs = given["scale_a"], given["scale_b"], given["offs"]
        assert scale_a.shape == (a.shape[0],)
        assert scale_b.shape == (b.shape[0], b.shape[2])
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert b.shape[2] % 16 == 0
        y = as_grouped_gemm(a, b, offs)
        expert = torch.bucketize(torch.arange(len(a)), offs, right=True).clamp(max=len(b) - 1)
        return (y * scale_a[:, None] * scale_b[expert]).to(given["output_dtype"])

    monkeypatch.setattr(_grouped, "grouped_mm", grouped_mm)
    monkeypatch.setattr(_grouped.functional, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(_grouped, "has_grouped_mm", lambda device: True)
    monkeypatch.setattr(_grouped, "has_scaled_grouped_mm", lambda device: True)
    return calls


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize(("cols", "out"), [(96, 48), (104, 41), (100, 7)])
def test_what_is_called_on_a_gpu(
    kind: str, offsets: list[int], cols: int, out: int, grouped_gemms: list[str]
) -> None:
    """The same numbers, with the GEMMs replaced by a reading of their arguments."""
    q, w = FORMATS[kind](randn(64, cols)), FORMATS[kind](experts(cols=cols, out=out))
    got = grouped_linear(q, w, torch.tensor(offsets))
    assert grouped_gemms == ["fp8" if kind == "fp8" else "bf16"]
    assert sqnr(got, wanted(q, w, offsets)) > 48
    assert (got[offsets[-1] :] == 0).all()


def test_eight_bits_without_scaled_gemm(
    grouped_gemms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_grouped, "has_scaled_grouped_mm", lambda device: False)
    q, w = FP8["fp8"](randn(64, IN)), FP8["fp8"](experts())
    got = grouped_linear(q, w, torch.tensor(OFFSETS["rows left"]))
    assert grouped_gemms == ["bf16"]
    assert sqnr(got, wanted(q, w, OFFSETS["rows left"])) > 48


@pytest.mark.parametrize("call", [jitquant.nvfp4_grouped_linear, grouped_linear])
def test_offsets_of_another_library_may_have_a_leading_zero(call: Any) -> None:
    q, w = jitquant.quantize_nvfp4(randn(64, IN)), jitquant.quantize_nvfp4(experts())
    ends = np.array(OFFSETS["uneven"])
    want = call(q, w, torch.from_numpy(ends))
    for offsets in (ends, np.array([0, *ends]), np.array([0, *ends], dtype=np.int32)):
        assert torch.equal(call(q, w, offsets), want)
    for wrong in (ends[:3], np.array([0, 0, *ends]), ends[:, None]):
        with pytest.raises(ValueError, match=r"offsets: expected shape \(4,\), .* or \(5,\) with"):
            call(q, w, wrong)


@pytest.mark.parametrize("first", [3, -1])
def test_the_leading_zero_is_one(first: int) -> None:
    w, offsets = jitquant.quantize_nvfp4(experts()), torch.tensor([first, 16, 32, 48, 64])
    for call in (jitquant.nvfp4_grouped_linear, grouped_linear):
        x: Any = jitquant.quantize_nvfp4(randn(64, IN))
        with pytest.raises(
            ValueError, match=rf"offsets: expected 0 as the first of 5 .* 4 experts, got {first}\."
        ):
            call(x, w, offsets)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # which has no values
            assert call(x, w, mode.from_tensor(offsets)).shape == (64, OUT)


@pytest.mark.parametrize("kind", ["row", "fp8"])
@pytest.mark.parametrize("offsets", [[70, 3, -5, 1 << 40], [-1, -1, -1, -1], [64, 0, 0, 0]])
@pytest.mark.usefixtures("grouped_gemms")
def test_no_offsets_lead_out_of_the_tensor(kind: str, offsets: list[int]) -> None:
    """They are not read on a GPU, so kernels get some that ascend within it (asserted there)."""
    q, w = FORMATS[kind](randn(64, IN)), FORMATS[kind](experts())
    assert grouped_linear(q, w, torch.tensor(offsets)).isfinite().all()


def test_where_the_grouped_gemms_are(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for number, grouped, scaled in ((8, False, False), (9, True, True), (10, True, False)):
        monkeypatch.setattr(_grouped, "major", lambda _, number=number: number)
        assert _grouped.has_grouped_mm(device) is grouped
        assert _grouped.has_scaled_grouped_mm(device) is scaled


@pytest.mark.parametrize("kind", ["tensor", "fp8"])
def test_errors(kind: str) -> None:
    q, w = FORMATS[kind](randn(64, IN)), FORMATS[kind](experts())
    offsets = torch.tensor([16, 32, 48, 64])
    other = FORMATS["fp8" if kind == "tensor" else "tensor"](randn(64, IN))
    with pytest.raises(
        TypeError, match="q: expected an NVFP4Tensor or a QuantizedTensor, got Tensor"
    ):
        grouped_linear(randn(64, IN), w, offsets)
    with pytest.raises(
        TypeError,
        match=r"weights: expected an NVFP4Tensor or a QuantizedTensor, got list.*stack_experts",
    ):
        grouped_linear(q, [w, w], offsets)
    with pytest.raises(
        TypeError,
        match="q and weights: expected both in NVFP4 or both in FP8",
    ):
        grouped_linear(other, w, offsets)
    with pytest.raises(
        ValueError,
        match=r"q and weights: .* got \(64, 80\) and \(4, 40, 96\)",
    ):
        grouped_linear(FORMATS[kind](randn(64, 80)), w, offsets)
    with pytest.raises(
        ValueError,
        match=r"q and weights: .* and \(E, N, K\), got \(64, 96\) and \(64, 96\)",
    ):
        grouped_linear(q, q, offsets)
    with pytest.raises(
        TypeError, match=r"offsets: expected a tensor of int32 or int64, got torch\.float32"
    ):
        grouped_linear(q, w, offsets.float())
    with pytest.raises(TypeError, match="offsets: expected a tensor of int32 or int64, got list"):
        grouped_linear(q, w, [16, 32, 48, 64])
    with pytest.raises(
        ValueError,
        match=r"offsets: expected shape \(4,\), the end of each .* or \(5,\) .* got shape \(3,\)",
    ):
        grouped_linear(q, w, offsets[1:])
    with pytest.raises(
        ValueError, match="offsets: expected a tensor on cpu, as q is, got one on meta"
    ):
        grouped_linear(q, w, offsets.to("meta"))
    with pytest.raises(
        ValueError, match="q and weights: expected tensors on one device, got cpu and meta"
    ):
        grouped_linear(q, w.to("meta"), offsets)
    with pytest.raises(
        TypeError, match=r"dtype: expected bfloat16, float16 or float32, got torch\.float64"
    ):
        grouped_linear(q, w, offsets, dtype=torch.float64)
    for wrong in ([32, 16, 48, 64], [16, 32, 48, 65], [-1, 2, 3, 4]):
        with pytest.raises(
            ValueError,
            match=r"offsets\[\d\]: expected ascending ends of the experts' .* got -?\d+ after \d+",
        ):
            grouped_linear(q, w, torch.tensor(wrong))


@pytest.mark.parametrize("name", ["q", "weights"])
@pytest.mark.parametrize("kind", ["tensor", "fp8"])
def test_the_result_has_its_own_memory(kind: str, name: str) -> None:
    operands = {"q": FORMATS[kind](randn(64, IN)), "weights": FORMATS[kind](experts())}
    part = "x_fp4" if kind == "tensor" else "data"
    codes = getattr(operands[name], part)
    memory = torch.zeros(1 << 15, dtype=torch.uint8)
    kept = memory[: codes.numel()].view(codes.shape).copy_(codes.view(torch.uint8))
    operands[name] = replace(operands[name], **{part: kept.view(codes.dtype)})
    out = memory[: 64 * OUT * BF16.itemsize].view(BF16).view(64, OUT)
    with pytest.raises(ValueError, match=rf"out: .* memory that it shares with {name}\. Pass a"):
        grouped_linear(**operands, offsets=torch.tensor([16, 32, 48, 64]), out=out)
    assert torch.equal(kept, codes.view(torch.uint8))


def test_other_formats() -> None:
    w, offsets = jitquant.quantize_nvfp4(experts()), torch.tensor([16, 32, 48, 64])
    with pytest.raises(ValueError, match=r"q\.format: expected 'fp8_row', got 'fp8_tensor'"):
        grouped_linear(jitquant.quantize_fp8(randn(64, IN)), w, offsets)
    with pytest.raises(ValueError, match=r"q\.dim: expected -1 \(packed along K\), got 0"):
        grouped_linear(jitquant.quantize_weight_nvfp4(randn(IN, 64), dim=0), w, offsets)


def test_it_is_for_inference() -> None:
    q, w = jitquant.quantize_nvfp4(randn(64, IN)), jitquant.quantize_nvfp4(experts())
    offsets = torch.tensor([16, 32, 48, 64])
    q.gsa.requires_grad_()
    with pytest.raises(RuntimeError, match="scales of q require grad, and grouped_linear has no"):
        grouped_linear(q, w, offsets)
    with torch.no_grad():
        assert not grouped_linear(q, w, offsets).requires_grad


def test_what_cannot_be_stacked() -> None:
    a, b = jitquant.quantize_nvfp4(randn(16, 32)), jitquant.quantize_fp8(randn(16, 32), **ROW)
    with pytest.raises(
        ValueError, match="weights: expected one or more quantized weights, got none"
    ):
        stack_experts([])
    with pytest.raises(
        TypeError, match=r"weights\[1\]: expected an NVFP4Tensor or a QuantizedTensor, got Tensor"
    ):
        stack_experts([a, randn(16, 32)])
    with pytest.raises(
        TypeError,
        match=r"weights\[1\]: expected NVFP4Tensor, as weights\[0\] is, got QuantizedTensor",
    ):
        stack_experts([a, b])
    with pytest.raises(ValueError, match=r"weights\[1\]: .* \(\(16, 32\)\), got shape \(32, 32\)"):
        stack_experts([a, jitquant.quantize_nvfp4(randn(32, 32))])
    with pytest.raises(ValueError, match=r"weights\[0\]: .* got shape \(4, 40, 96\)"):
        stack_experts([jitquant.quantize_nvfp4(experts())])
    with pytest.raises(TypeError, match="weights: expected one dtype, got several"):
        stack_experts([b, jitquant.quantize_fp8(randn(16, 32), dtype=torch.float8_e5m2, **ROW)])


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_opcheck(kind: str) -> None:
    offsets, ops = torch.tensor(OFFSETS["uneven"]), torch.ops.jitquant
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    if kind == "nvfp4":
        q, w = (jitquant.quantize_nvfp4(t) for t in (randn(64, IN), experts()))
        sides = ((t.x_fp4_bytes, t.x_sf, t.gsa, "linear") for t in (q, w))
        parts: tuple[Any, ...] = (*next(sides), *next(sides), offsets, BF16)
        torch.library.opcheck(ops.nvfp4_grouped_mm.default, parts, test_utils=checks)
    else:
        a, b = (jitquant.quantize_fp8(t, **ROW) for t in (randn(64, IN), experts()))
        parts = (a.data, a.scale_inv, b.data, b.scale_inv.squeeze(-1), offsets, BF16)
        torch.library.opcheck(ops.fp8_grouped_mm.default, parts, test_utils=checks)


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_weights_as_they_are_stored(
    kind: str, offsets: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What few rows on a GPU take: the same product, rounded once."""
    q = NVFP4[kind](randn(64, IN))
    weights = NVFP4[kind](randn(EXPERTS, OUT, IN, seed=1))
    want = grouped_linear(q, weights, torch.tensor(offsets), dtype=dtype)
    calls: list[int] = []
    monkeypatch.setattr(_grouped, "_reads_as_stored", lambda *sizes: calls.append(1) or True)
    got = grouped_linear(q, weights, torch.tensor(offsets), dtype=dtype)
    assert calls == [1]
    assert got.dtype == dtype
    assert sqnr(want, got) > 45 or torch.equal(want, got)
    assert (got[offsets[-1] :] == 0).all()
    swizzled = NVFP4["swizzled"](randn(64, IN))
    grouped_linear(swizzled, weights, torch.tensor(offsets))
    assert calls == [1]


@pytest.mark.parametrize("kind", NVFP4)
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_many_rows_by_tiles(
    kind: str, offsets: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What many rows on Hopper take: packed weights, and x as the exact values of its codes."""
    cols = 128
    q = NVFP4[kind](randn(64, cols))
    weights = NVFP4["row" if kind.endswith("row") else "tensor"](experts(cols=cols))
    seen: list[torch.dtype] = []
    product = _grouped.GROUPED_LINEAR.one_tensor

    def noted(arguments: dict[str, Any], out: Tensor | None) -> Tensor:
        x = arguments["x"]
        assert arguments["x_sf"] is arguments["x_gsa"] is None
        seen.append(x.dtype)
        assert arguments["dtype"] in (x.dtype, torch.float32)  # what the kernel by tiles writes
        return product(arguments, out)

    monkeypatch.setattr(_grouped, "_has_tiles", lambda *_: True)
    monkeypatch.setattr(_grouped.GROUPED_LINEAR, "one_tensor", noted)
    got = grouped_linear(q, weights, torch.tensor(offsets), dtype=dtype)
    assert seen == [torch.float16 if dtype == torch.float16 else BF16]
    assert got.dtype == dtype
    assert sqnr(got, wanted(q, weights, offsets)) > 48
    assert (got[offsets[-1] :] == 0).all()
    out = torch.full_like(got, 7)
    assert grouped_linear(q, weights, torch.tensor(offsets), out=out) is out
    assert torch.equal(out, got)


def test_where_the_tiles_are(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    for number, k, count, taken in (
        (9, 128, 4, True),
        (9, 96, 4, False),
        (9, 128, 1025, False),
        (10, 128, 4, False),
        (8, 128, 4, False),
    ):
        monkeypatch.setattr(_grouped, "major", lambda _, number=number: number)
        assert _grouped._has_tiles(device, k, count) is taken


class Allocations(TorchDispatchMode):
    """Counts the tensors of a size that operations make, each memory once."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.memory = numel, set[int]()
        self._kept: list[Tensor] = []  # so that no memory is used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, Tensor) and each.numel() == self.numel:
                self._kept.append(each)
                self.memory.add(each.untyped_storage().data_ptr())
        return made


@pytest.mark.parametrize(("kind", "most"), [("stored", 0), ("tensor", 0), ("row", 1), ("fp8", 1)])
@pytest.mark.usefixtures("grouped_gemms")
def test_a_call_with_out_allocates_no_result(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in fp32 if each row has a gsa; the product of FP8, which PyTorch has no out= for."""
    form = {"stored": "tensor"}.get(kind, kind)
    q, w = FORMATS[form](randn(64, 128)), FORMATS[form](experts(cols=128, out=48))
    offsets = torch.tensor(OFFSETS["rows left"])
    want = grouped_linear(q, w, offsets)
    monkeypatch.setattr(_grouped, "_reads_as_stored", lambda *_: kind == "stored")
    monkeypatch.setattr(_grouped, "_has_tiles", lambda *_: True)

    def kernel(arguments: dict[str, Any], out: Tensor | None) -> Tensor:
        x, columns, dtype = arguments["x"], arguments["w_fp4"].shape[1], arguments["dtype"]
        y = x.new_empty((x.shape[0], columns), dtype=dtype) if out is None else out
        return y.zero_()

    monkeypatch.setattr(_grouped.GROUPED_LINEAR, "one_tensor", kernel)
    gemm = _grouped.functional.scaled_grouped_mm

    def quietly(*args: Any, **how: Any) -> Tensor:
        with _disable_current_modes():
            y = gemm(*args, **how)
        return torch.empty_like(y).copy_(y)  # the one that is counted

    monkeypatch.setattr(_grouped.functional, "scaled_grouped_mm", quietly)
    out = torch.full((64, 48), 7.0, dtype=BF16)
    if kind == "fp8":
        operands = (q.data, q.scale_inv, w.data, w.scale_inv.squeeze(-1), offsets, BF16, out)
        implementation: Any = _grouped._fp8_grouped_mm
    else:
        sides = ((t.x_fp4_bytes, t.x_sf, t.gsa, "linear") for t in (q, w))
        operands = (*next(sides), *next(sides), offsets, BF16, out)
        implementation = _grouped._nvfp4_grouped_mm
    with Allocations(out.numel()) as counted:
        assert implementation(*operands) is out
    assert len(counted.memory - {out.untyped_storage().data_ptr()}) == most
    if kind == "fp8":
        assert torch.equal(out, want)
    else:
        assert (out == 0).all()


def test_when_weights_are_read_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_grouped, "major", lambda device: 9)
    sizes = [(1, 1), (8, 1), (9, 1), (1024, 128), (1025, 256), (1, 1025)]
    taken = [_grouped._reads_as_stored(torch.device("cuda"), *size) for size in sizes]
    assert taken == [True, True, False, True, False, False]
    monkeypatch.setattr(_grouped, "major", lambda device: 7)
    assert not _grouped._reads_as_stored(torch.device("cuda"), 1, 1)
    assert not _grouped._reads_as_stored(torch.device("cpu"), 1, 1)
