"""The way past the dispatcher: taken where nothing looks on, left where something does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from ops.test_errors import cases
from ops.test_errors_fp8 import cases as cases_of_8_bits
from ops.test_public_fp8 import both_calls, buffers_like, ragged_calls, results_of
from ops.test_public_fp8 import calls as calls_of_one_result
from samples import COMPILED_OPS, OPS, SAMPLES, poisoned_buffers, randn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import jitquant
from jitquant import QuantizedActivation
from jitquant.ops import Op
from jitquant.testing import bytes_of, count_launches

from .helpers import in_threads, same

# Not those whose number of maxima is the device's affair.
NAMES = sorted(name for name, op in COMPILED_OPS.items() if op.results != ("amax", "inv_rms"))
COLS = 768


def _calls() -> dict[str, Callable[[], Any]]:
    """Each public function, with new results and into buffers, with each kind of gsa."""
    x, w, residual = randn(5, COLS).cuda(), randn(COLS).abs().cuda(), randn(5, COLS).cuda()
    X, A = randn(5, 4, COLS).cuda(), torch.rand(5, 4, device="cuda")
    gsa, rows = torch.tensor([0.002], device="cuda"), torch.full((5,), 0.002, device="cuda")
    half = (5, COLS // 2)
    q = jitquant.quantize_nvfp4(x)

    def empty(shape: tuple[int, ...] = (5, COLS), **kwargs: Any) -> QuantizedActivation:
        return QuantizedActivation.empty(shape, device="cuda", **kwargs)

    J = jitquant
    by_row, normed = {"granularity": "row"}, {"granularity": "row", "inv_rms": True}
    swizzled = {"scale_layout": "swizzled_128x4"}
    return {
        "amax_gsa": lambda: J.amax_gsa(x),
        "amax_gsa out": lambda: J.amax_gsa(x, out=torch.empty(1, device="cuda")),
        "tensor": lambda: J.quantize_nvfp4(x),
        "tensor out": lambda: J.quantize_nvfp4(x, out=empty()),
        "row": lambda: J.quantize_nvfp4(x, **by_row, **swizzled),
        "row out": lambda: J.quantize_nvfp4(
            x, **by_row, **swizzled, out=empty(**by_row, **swizzled)
        ),
        "number": lambda: J.quantize_nvfp4(x, 1),
        "number out": lambda: J.quantize_nvfp4(x, 0.002, out=empty()),
        "given": lambda: J.quantize_nvfp4(x, gsa, recipe="vllm"),
        "given out": lambda: J.quantize_nvfp4(x, rows, out=empty()),
        "weight": lambda: J.quantize_weight_nvfp4(nn.Parameter(x), block="16x16"),
        "weight out": lambda: J.quantize_weight_nvfp4(x, dim=0, out=empty(dim=0)),
        "weight given": lambda: J.quantize_weight_nvfp4(x, gsa=gsa),
        "swiglu": lambda: J.deinterleave_quantize_nvfp4(x, COLS // 2),
        "swiglu out": lambda: J.deinterleave_quantize_nvfp4(x, COLS // 2, out=empty(half)),
        "select given": lambda: J.deinterleave_quantize_nvfp4(x, COLS // 2, gsa, op="select"),
        "rmsnorm": lambda: J.rmsnorm_quantize_nvfp4(x, nn.Parameter(w), residual=residual),
        "rmsnorm out": lambda: J.rmsnorm_quantize_nvfp4(x, w, out=empty(**normed)),
        "rmsnorm given": lambda: J.rmsnorm_quantize_nvfp4(x, w, gsa=gsa),
        "mhc": lambda: J.mhc_rmsnorm_quantize_nvfp4(X, A, w),
        "mhc out": lambda: J.mhc_rmsnorm_quantize_nvfp4(X, A, w, out=empty(**normed)),
        "mhc given": lambda: J.mhc_rmsnorm_quantize_nvfp4(X, A, w, gsa=rows),
        "dequantize": lambda: q.dequantize(),
        "dequantize out": lambda: J.dequantize_nvfp4(q, out=torch.empty_like(x)),
        "dequantize parts": lambda: J.dequantize_nvfp4(q.x_fp4_bytes, q.x_sf_bytes, q.gsa),
    }


def _inputs_of_8_bits() -> list[Tensor]:
    """A tensor, a weight, gate and up, a scale."""
    inputs = (randn(6, 48), torch.ones(48), randn(6, 96), torch.tensor(3.0))
    return [t.cuda() for t in inputs]


def _functions_of_8_bits(inputs: list[Tensor]) -> dict[str, Callable[..., Any]]:
    """Each public function of 8 bits and of groups, which takes ``out``."""
    ragged = ragged_calls("cuda").items()
    return {
        **calls_of_one_result(*inputs),
        **both_calls(inputs[0]),
        **{f"ragged {name}": call for name, call in ragged},
    }


def _calls_of_8_bits() -> dict[str, Callable[[], Any]]:
    """As `_calls`."""
    x, w, *_ = inputs = _inputs_of_8_bits()
    residual = randn(6, 48, seed=1).cuda()
    made: dict[str, Callable[[], Any]] = {
        "residual": lambda: jitquant.rmsnorm_quantize_fp8(x, w, residual=residual),
        "group residual": lambda: jitquant.rmsnorm_quantize_per_token_group(
            x, w, residual=residual
        ),
    }
    for name, call in _functions_of_8_bits(inputs).items():
        q = call()
        made |= {name: call, f"{name} out": partial(call, out=buffers_like(q))}
        if not isinstance(q, tuple):
            made[f"{name} dequantize"] = q.dequantize
    return made


FAMILIES = {"nvfp4": _calls, "8 bits": _calls_of_8_bits}


def _loaded(made: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    """All modules are loaded: the first call of an op is the dispatcher's."""
    for call in made.values():
        call()
    return made


@pytest.fixture
def calls() -> dict[str, Callable[[], Any]]:
    return _loaded(_calls())


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> dict[str, Callable[[], Any]]:
    return _loaded(FAMILIES[request.param]())


@pytest.fixture(scope="module")
def all_loaded() -> None:
    for make in FAMILIES.values():
        _loaded(make())


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the ops that went through the dispatcher."""
    names: list[str] = []
    plain = Op.dispatched

    def dispatched(self: Op, *args: Any) -> Any:
        names.append(self.name)
        return plain(self, *args)

    monkeypatch.setattr(Op, "dispatched", dispatched)
    return names


def test_no_call_goes_through_the_dispatcher(
    family: dict[str, Callable[[], Any]], dispatched: list[str]
) -> None:
    for name, call in family.items():
        call()
        assert dispatched == [], name


def test_nor_does_one_that_is_captured(
    family: dict[str, Callable[[], Any]], dispatched: list[str]
) -> None:
    for name, call in family.items():
        assert count_launches(call) >= 1
        assert dispatched == [], name


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_give_the_same_bytes(name: str) -> None:
    op, taken = OPS[name], 0
    for sample in SAMPLES[name]:
        ways = []
        for way in ("direct", "compiled"):
            args, kwargs = sample.make("cuda")
            op.default(*args, **kwargs)
            args, kwargs = sample.make("cuda")
            named = op._named(args, kwargs)
            results = (
                op.direct(named) if way == "direct" else op.compiled().default(*args, **kwargs)
            )
            if results is NotImplemented:  # such as a gsa whose rows are expanded
                break
            results = results if isinstance(results, tuple) else (results,)
            residual = kwargs.get("residual")
            ways.append([*results, *([] if residual is None else [residual])])
        else:
            taken += 1
            for a, b in zip(*ways, strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), sample
                assert torch.equal(bytes_of(a), bytes_of(b)), sample
            args, kwargs = sample.make("cuda")
            buffers = poisoned_buffers(op, args, kwargs)
            named = op._named(args, kwargs)
            assert op.direct(named, tuple(buffers.values())) is None
            for a, b in zip(buffers.values(), ways[0], strict=False):
                assert torch.equal(bytes_of(a), bytes_of(b)), sample
    assert taken > len(SAMPLES[name]) / 2


ERRORS: dict[str, Any] = {}
if torch.cuda.is_available():
    of_8_bits = {f"8 bits {name}": case for name, case in cases_of_8_bits("cuda").items()}
    ERRORS = {**cases("cuda"), **of_8_bits}


@pytest.mark.parametrize("name", ERRORS or ["none"])
def test_a_bad_argument_is_refused_as_on_the_cpu(name: str, all_loaded: None) -> None:
    call, error, texts = ERRORS[name]
    with pytest.raises(error) as caught:
        call()
    assert [text for text in texts if text not in str(caught.value)] == []


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Dispatches, Functions])
def test_modes_see_every_op(mode: Any, family: dict[str, Callable[[], Any]]) -> None:
    for name, call in family.items():
        with mode() as active:
            call()
        seen = {each.removeprefix("jitquant::").split(".")[0] for each in active.seen}
        assert not seen.isdisjoint(OPS), name


def test_results_under_a_default_device(calls: dict[str, Callable[[], Any]]) -> None:
    want = results_of(calls["tensor"]())
    with torch.device("cuda"):
        same(results_of(calls["tensor"]()), want)


class Wrapped(Tensor):
    """A subclass that sees what is done with it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_sees_the_op(calls: dict[str, Callable[[], Any]]) -> None:
    x = randn(4, 64).cuda()
    want = jitquant.quantize_nvfp4(x)
    got = jitquant.quantize_nvfp4(x.as_subclass(Wrapped))
    assert any("quantize_nvfp4" in seen for seen in Wrapped.seen)
    assert torch.equal(bytes_of(got.x_fp4), bytes_of(want.x_fp4))


def test_fakeresults_of(calls: dict[str, Callable[[], Any]]) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:
        x = torch.empty(4, 64, device="cuda", dtype=torch.bfloat16)
        q = jitquant.quantize_nvfp4(x)
    assert isinstance(q.x_fp4, FakeTensor)
    outside = jitquant.quantize_nvfp4(mode.from_tensor(randn(4, 64).cuda()))
    assert isinstance(outside.x_fp4, FakeTensor)
    assert outside.x_fp4.shape == (4, 32)


def test_transforms_are_not_passed_by(calls: dict[str, Callable[[], Any]]) -> None:
    x = randn(3, 4, 64).cuda()
    with pytest.raises(RuntimeError, match=r"vmap|[Bb]atching"):
        torch.vmap(lambda t: jitquant.quantize_nvfp4(t).x_sf.view(torch.uint8))(x)


def test_a_profiler_sees_the_op_and_a_trace_has_it(calls: dict[str, Callable[[], Any]]) -> None:
    x = randn(4, 64).cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        jitquant.amax_gsa(x)
    assert "jitquant::amax_gsa" in {event.key for event in profile.key_averages()}
    traced = torch.jit.trace(lambda t: jitquant.amax_gsa(t) + 0, (x,), check_trace=False)
    assert "jitquant::amax_gsa" in str(traced.graph)
    y = randn(4, 64, seed=1).cuda()
    assert torch.equal(traced(y), jitquant.amax_gsa(y))


def test_compiled_functions_have_no_break(calls: dict[str, Callable[[], Any]]) -> None:
    x, residual = randn(4, 64).cuda(), randn(4, 64, seed=1).cuda()
    w = torch.ones(64, device="cuda", dtype=torch.bfloat16)

    def f(x: Tensor, residual: Tensor) -> Tensor:
        q = jitquant.rmsnorm_quantize_nvfp4(x, w, residual=residual)
        out = QuantizedActivation.empty((4, 64), device="cuda")
        return jitquant.quantize_nvfp4(q.dequantize(), out=out).dequantize()

    want_residual, got_residual = residual.clone(), residual.clone()
    want = f(x, want_residual)
    torch.compiler.reset()
    assert torch.equal(torch.compile(f, fullgraph=True)(x, got_residual), want)
    assert torch.equal(want_residual, got_residual)


def test_versions_grow_with_each_write(calls: dict[str, Callable[[], Any]]) -> None:
    x, w = randn(4, 64).cuda(), torch.ones(64, device="cuda")
    out = QuantizedActivation.empty((4, 64), device="cuda", granularity="row", inv_rms=True)
    residual = randn(4, 64).cuda()
    written = [*results_of(out), residual]
    before = [t._version for t in written]
    jitquant.rmsnorm_quantize_nvfp4(x, w, residual=residual, out=out)
    assert [t._version for t in written] == [v + 1 for v in before]
    assert (x._version, w._version) == (0, 0)
    with pytest.raises(ValueError, match="eps"):
        jitquant.rmsnorm_quantize_nvfp4(x, w, -1.0, residual=residual, out=out)
    assert [t._version for t in written] == [v + 1 for v in before]
    a = torch.ones(1, device="cuda", requires_grad=True)
    product = a * out.gsa
    jitquant.rmsnorm_quantize_nvfp4(x, w, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_versions_of_8_bits_grow_with_each_write(all_loaded: None) -> None:
    inputs = _inputs_of_8_bits()
    for name, call in _functions_of_8_bits(inputs).items():
        out = buffers_like(call())
        before = [t._version for t in results_of(out)]
        call(out=out)
        assert [t._version for t in results_of(out)] == [v + 1 for v in before], name
    assert [t._version for t in inputs] == [0] * len(inputs)
    x, w, *_ = inputs
    for normed in (jitquant.rmsnorm_quantize_fp8, jitquant.rmsnorm_quantize_per_token_group):
        residual = randn(6, 48, seed=1).cuda()
        out = buffers_like(normed(x, w, residual=residual))
        written = [*results_of(out), residual]
        before = [t._version for t in written]
        normed(x, w, residual=residual, out=out)
        assert [t._version for t in written] == [v + 1 for v in before]
        with pytest.raises(ValueError, match="eps"):
            normed(x, w, eps=-1.0, residual=residual, out=out)
        assert [t._version for t in written] == [v + 1 for v in before]


def test_gradients_and_inference(
    calls: dict[str, Callable[[], Any]], dispatched: list[str]
) -> None:
    x = randn(4, 64).cuda().requires_grad_()
    w = nn.Parameter(torch.ones(64, device="cuda"))
    results = results_of(jitquant.rmsnorm_quantize_nvfp4(x, w))
    assert not any(t.requires_grad for t in results)
    with pytest.raises(ValueError, match=r"residual: .* does not require grad"):
        jitquant.rmsnorm_quantize_nvfp4(x, w, residual=x.clone())
    out = torch.zeros(4, 64, device="cuda", requires_grad=True)
    with pytest.raises(ValueError, match=r"out: .* does not require grad"):
        jitquant.quantize_nvfp4(x).dequantize(out=out)
    assert not out.any()
    with torch.no_grad():
        jitquant.rmsnorm_quantize_nvfp4(x, w, residual=x.detach().clone().requires_grad_())
        jitquant.quantize_nvfp4(x).dequantize(out=out)
    assert out.any()
    dispatched.clear()
    with torch.inference_mode():
        q = jitquant.quantize_nvfp4(x)
        jitquant.quantize_nvfp4(x, out=q)
    assert all(t.is_inference() for t in results_of(q))
    assert dispatched == []


def test_results_are_tensors_of_the_allocator(calls: dict[str, Callable[[], Any]]) -> None:
    """Each has memory of its own, which waits for a stream that it was recorded on."""
    x = randn(64, 1024).cuda()
    parts = results_of(jitquant.rmsnorm_quantize_nvfp4(x, torch.ones(1024, device="cuda")))
    assert len({t.untyped_storage().data_ptr() for t in parts}) == 4
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in parts)
    other = torch.cuda.Stream()
    codes = parts.pop(0)
    address = codes.data_ptr()
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
    codes.record_stream(other)
    del codes
    again = [jitquant.quantize_nvfp4(x).x_fp4 for _ in range(4)]
    assert address not in {t.data_ptr() for t in again}
    other.synchronize()


def test_negated_views_and_strides_are_resolved(calls: dict[str, Callable[[], Any]]) -> None:
    z = torch.randn(16, 1, dtype=torch.complex64, device="cuda")
    x = z.conj().imag
    assert x.is_neg()
    want = jitquant.quantize_nvfp4(x.resolve_neg().contiguous())
    same(results_of(jitquant.quantize_nvfp4(x)), results_of(want))
    gsa = torch.full((16, 2), 0.5, device="cuda")[:, 0]
    y = torch.randn(16, 64, device="cuda")
    same(
        results_of(jitquant.quantize_nvfp4(y, gsa))[:2],
        results_of(jitquant.quantize_nvfp4(y, gsa.contiguous()))[:2],
    )


def test_no_reference_and_no_memory_is_left(calls: dict[str, Callable[[], Any]]) -> None:
    x, gsa = randn(4, 64).cuda(), torch.tensor([0.002], device="cuda")
    out = QuantizedActivation.empty((4, 64), device="cuda")
    held: list[Any] = [x, gsa, out.x_fp4, out.x_sf, out.gsa, torch.float32, torch.float8_e4m3fn]
    bad = QuantizedActivation.empty((4, 80), device="cuda")
    bad.cols = 64

    def work() -> None:
        for _ in range(50):
            jitquant.quantize_nvfp4(x)
            jitquant.quantize_nvfp4(x, gsa)
            jitquant.quantize_nvfp4(x, out=out)
            with pytest.raises(ValueError, match="out"):
                jitquant.quantize_nvfp4(x, out=bad)

    work()
    before = [*map(sys.getrefcount, held), torch.cuda.memory_allocated()]
    work()
    assert [*map(sys.getrefcount, held), torch.cuda.memory_allocated()] == before


def test_no_reference_and_no_memory_of_8_bits_is_left(all_loaded: None) -> None:
    inputs = _inputs_of_8_bits()
    made = _functions_of_8_bits(inputs)
    outs = {name: buffers_like(call()) for name, call in made.items()}
    held: list[Any] = [*inputs, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
    held += [t for out in outs.values() for t in results_of(out)]

    def work() -> None:
        for _ in range(20):
            for name, call in made.items():
                call()
                call(out=outs[name])
            with pytest.raises(ValueError, match="out"):
                jitquant.quantize_fp8(inputs[2], out=outs["tensor"])

    work()
    before = [*map(sys.getrefcount, held), torch.cuda.memory_allocated()]
    work()
    assert [*map(sys.getrefcount, held), torch.cuda.memory_allocated()] == before


@cache
def _offsets() -> Tensor:
    return torch.arange(0, 32, 4, device="cuda")


THREADED: dict[str, Callable[..., Any]] = {
    "nvfp4": partial(jitquant.quantize_nvfp4, granularity="row"),
    "fp8": jitquant.quantize_fp8,
    "both": jitquant.quantize_per_token_group_both,
    "ragged": lambda x, **k: jitquant.quantize_ragged(x, _offsets(), **k),
}


@pytest.mark.parametrize("name", THREADED)
def test_threads_on_streams_of_their_own(name: str, all_loaded: None) -> None:
    call = THREADED[name]
    inputs = [randn(30 + i, 512, seed=i).cuda() for i in range(6)]
    want = [results_of(call(x)) for x in inputs]

    def work(i: int) -> None:
        out = buffers_like(call(inputs[i]))
        for _ in range(200):
            got = call(inputs[i])
            call(inputs[i], out=out)
        torch.cuda.current_stream().synchronize()
        same(results_of(got), want[i])
        same(results_of(out), want[i])

    in_threads(len(inputs), work)


def test_another_thread_runs_while_a_launch_waits(calls: dict[str, Callable[[], Any]]) -> None:
    """A full queue makes a launch wait for the GPU; the GIL is free meanwhile."""
    x = randn(4, 64).cuda()
    out = QuantizedActivation.empty((4, 64), device="cuda")
    torch.cuda.synchronize()
    stop, ticks = threading.Event(), [0]

    def tick() -> None:
        while not stop.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    thread.start()
    for _ in range(3000):
        jitquant.quantize_nvfp4(x, 0.5, out=out)
    stop.set()
    thread.join()
    torch.cuda.synchronize()
    assert ticks[0] > 20


def test_the_tensors_own_device_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for call in _calls().values():
        call()
    x = randn(5, COLS)
    torch.cuda.set_device(0)
    there = jitquant.quantize_nvfp4(x.to("cuda:1"))
    assert {t.device.index for t in results_of(there)} == {1}
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        again = jitquant.quantize_nvfp4(x.to("cuda:1"))
    assert {t.device.index for t in results_of(again)} == {1}
    assert torch.equal(there.dequantize(), again.dequantize())
