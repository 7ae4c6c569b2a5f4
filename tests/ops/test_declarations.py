"""What is made from each declaration: schemas, implementations, ``out``, fakes, the CUDA call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samples import ALL_SAMPLES, OPS, SAMPLES, Sample, byte_view, poisoned_buffers
from torch._dynamo.testing import CompileCounter

import jitquant
import jitquant.loader
from jitquant import reference
from jitquant.ops import ALL_OPS, KERNEL_OPS, Op
from jitquant.ops.library import arguments_of
from jitquant.ops.parts import PARTS
from jitquant.ops.schema import by_name

U8 = torch.uint8
by_op = pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
by_kernel_op = pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(byte_view(a), byte_view(b))


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def test_every_op_has_samples() -> None:
    assert {op.name for op in ALL_OPS} == set(SAMPLES)


def test_samples_are_told_apart_by_their_names() -> None:
    assert len({str(s) for s in ALL_SAMPLES}) == len(ALL_SAMPLES)


@by_op
def test_schema(op: Op) -> None:
    functional, out = op.default._schema, op.out._schema
    assert functional.name == out.name == f"jitquant::{op.name}"
    assert out.overload_name == "out"
    assert len(functional.returns) == len(op.results)
    assert not out.returns
    written = [a.name for a in functional.arguments if a.alias_info and a.alias_info.is_write]
    residual = ["residual"] if "Tensor(a!)? residual" in op.arguments else []
    assert written == residual
    written = [a.name for a in out.arguments if a.alias_info and a.alias_info.is_write]
    assert written == [*residual, *op.results]
    assert [a.name for a in functional.arguments] == [
        a.name for a in out.arguments if a.name not in op.results
    ]


@by_op
def test_the_reference_takes_the_schemas_arguments(op: Op) -> None:
    assert getattr(reference, op.name) is op.reference
    assert op.reference.__name__ == op.name
    arguments = op.default._schema.arguments
    parameters = list(inspect.signature(op.reference).parameters.values())
    assert len(parameters) == len(arguments)
    for parameter, argument in zip(parameters, arguments, strict=True):
        keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword == argument.kwarg_only
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            assert parameter.default == argument.default_value
        assert parameter.name == argument.name


def test_a_function_gets_the_arguments_that_it_is_named_for() -> None:
    call = by_name(lambda b, a=0, missing=5: (a, b, missing), ("a", "b", "c"))
    assert call({"a": 1, "b": 2, "c": 3}) == (1, 2, 5)
    everything = by_name(lambda all_of_them, /: all_of_them, ("a", "b"))
    assert everything({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(TypeError, match="<lambda>: expected parameters among a, b, got z"):
        by_name(lambda z: z, ("a", "b"))


def test_arguments_follow_from_annotations() -> None:
    def function(
        x: torch.Tensor,
        n: int,
        scale: torch.Tensor | None = None,
        eps: float = 0.5,
        *,
        dtype: torch.dtype,
        cols: int | None = None,
        recipe: str = "te",
        keep: bool = False,
    ) -> tuple[torch.Tensor]: ...

    arguments = arguments_of(function)
    assert arguments == (
        "Tensor x, int n, Tensor? scale=None, float eps=0.5, *, ScalarType dtype, "
        'int? cols=None, str recipe="te", bool keep=False'
    )
    inferred = torch.library.infer_schema(function, mutates_args=()).replace("SymInt", "int")
    assert inferred.startswith(f"({arguments}) -> ")


@by_op
def test_registered_for_every_backend(op: Op) -> None:
    for suffix in ("", ".out"):
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(
                f"jitquant::{op.name}{suffix}", key
            )


@pytest.mark.parametrize("name", SAMPLES)
def test_cpu_is_the_reference(name: str) -> None:
    for sample in SAMPLES[name]:
        op = OPS[sample.op]
        args, kwargs = sample.make("cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which no result depends on
            got = as_tuple(op.default(*args, **kwargs))
        args, kwargs = sample.make("cpu")
        for a, b in zip(got, op.reference(*args, **kwargs), strict=True):
            assert same(a, b), sample


@contextmanager
def other_defaults() -> Iterator[None]:
    """As while a model is loaded: no result depends on PyTorch's default dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", SAMPLES)
def test_results_are_those_of_the_plan(name: str) -> None:
    for sample in SAMPLES[name]:
        op = OPS[sample.op]
        args, kwargs = sample.make("cpu")
        plan = op.plan(*args, **kwargs)
        with other_defaults():
            results = as_tuple(op.default(*args, **kwargs))
        for t, planned in zip(results, plan.results, strict=True):
            assert t.shape == planned.shape, sample
            assert t.dtype == planned.dtype, sample
            assert t.is_contiguous(), sample
            assert t.device == plan.device, sample


@pytest.mark.parametrize("name", SAMPLES)
def test_out_overwrites_every_byte(name: str) -> None:
    for sample in SAMPLES[name]:
        op = OPS[sample.op]
        args, kwargs = sample.make("cpu")
        want = as_tuple(op.default(*args, **kwargs))
        args, kwargs = sample.make("cpu")
        buffers = poisoned_buffers(op, args, kwargs)
        assert op.out(*args, **kwargs, **buffers) is None
        for a, b in zip(buffers.values(), want, strict=True):
            assert same(a, b), sample


@pytest.mark.parametrize("name", SAMPLES)
def test_meta_tensors(name: str) -> None:
    def to_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    for sample in SAMPLES[name]:
        op = OPS[sample.op]
        args, kwargs = sample.make("cpu")
        want = op.plan(*args, **kwargs).results
        args = tuple(map(to_meta, args))
        kwargs = {k: to_meta(v) for k, v in kwargs.items()}
        for t, planned in zip(as_tuple(op.default(*args, **kwargs)), want, strict=True):
            assert (t.shape, t.dtype, t.device.type) == (planned.shape, planned.dtype, "meta")
        op.out(*args, **kwargs, **poisoned_meta(op, args, kwargs))


def poisoned_meta(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    results = op.plan(*args, **kwargs).results
    return {
        name: torch.empty(r.shape, dtype=r.dtype, device="meta")
        for name, r in zip(op.results, results, strict=True)
    }


def test_out_takes_bytes_for_codes_and_scales() -> None:
    op = OPS["quantize_nvfp4"]
    x = torch.randn(3, 20)
    want = op.default(x)
    x_fp4, x_sf, gsa = torch.empty(3, 16, dtype=U8), torch.empty(3, 2, dtype=U8), torch.empty(1)
    op.out(x, x_fp4=x_fp4, x_sf=x_sf, gsa=gsa)
    assert torch.equal(x_fp4, want[0].view(U8))
    assert torch.equal(x_sf, want[1].view(U8))
    assert torch.equal(gsa, want[2])


class Recorder:
    """Stands in for a compiled module's function: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def default(self, *args: Any, **kwargs: Any) -> str:
        assert not torch.is_grad_enabled()
        self.calls.append(("default", args, kwargs))
        return "results"

    def out(self, *args: Any, **kwargs: Any) -> None:
        assert not torch.is_grad_enabled()
        self.calls.append(("out", args, kwargs))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """get_cuda_module gives modules of recorders; the list of what it was asked for."""
    asked: list[tuple[str, list[str]]] = []

    def get_cuda_module(name: str, sources: list[str]) -> SimpleNamespace:
        asked.append((name, sources))
        function = next(op.function for op in ALL_OPS if op.module == name)
        functions = {op.function: recorders.setdefault(op.function, Recorder()) for op in ALL_OPS}
        assert function in functions
        return SimpleNamespace(**functions)

    def get_part(
        name: str, sources: list[str], part: str, flags: Sequence[str], wider: object
    ) -> tuple[SimpleNamespace, Callable[[], bool], bool]:
        module = get_cuda_module(name, sources)
        return module, jitquant.loader.up_to_date_check(module), False

    recorders: dict[str, Recorder] = {}
    monkeypatch.setattr(jitquant.loader, "get_cuda_module", get_cuda_module)
    monkeypatch.setattr(jitquant.loader, "get_part", get_part)
    monkeypatch.setattr(jitquant.loader, "up_to_date_check", lambda _: lambda: True)
    for op in ALL_OPS:
        monkeypatch.setattr(op, "_kept", None)
    return asked


def first_with_residual(op: Op) -> Sample:
    group = SAMPLES[op.name]
    return next((s for s in group if s.make("cpu")[1].get("residual") is not None), group[0])


@by_kernel_op
def test_cuda_hands_the_arguments_on(op: Op, modules: list[tuple[str, list[str]]]) -> None:
    args, kwargs = first_with_residual(op).make("cpu")
    assert op._cuda(*args, **kwargs) == "results"
    assert modules == [(op.module, [f"{op.module}.cu"])]
    recorder = op.compiled()
    kind, got_args, got_kwargs = recorder.calls[-1]
    assert kind == "default"
    assert got_args == args
    assert got_kwargs.keys() == kwargs.keys()
    assert all(got_kwargs[k] is kwargs[k] for k in kwargs)
    # Buffers of bytes reach the kernel in the results' dtypes, as the same memory.
    buffers = poisoned_buffers(op, args, kwargs)
    as_bytes = {k: t.view(U8) if t.dtype.itemsize == 1 else t for k, t in buffers.items()}
    op._cuda_out(*args, **kwargs, **as_bytes)
    kind, got_args, got_kwargs = recorder.calls[-1]
    assert kind == "out"
    for name, buffer in buffers.items():
        assert got_kwargs[name].dtype == buffer.dtype
        assert got_kwargs[name].data_ptr() == buffer.data_ptr()


@by_kernel_op
def test_cuda_makes_buffers_in_deterministic_mode(op: Op, modules: list[Any]) -> None:
    args, kwargs = first_with_residual(op).make("cpu")
    planned = op.plan(*args, **kwargs).results
    torch.use_deterministic_algorithms(True)
    try:
        results = as_tuple(op._cuda(*args, **kwargs))
    finally:
        torch.use_deterministic_algorithms(False)
    kind, _, got = op.compiled().calls[-1]
    assert kind == "out"
    for name, result, expected in zip(op.results, results, planned, strict=True):
        assert got[name] is result
        assert (tuple(result.shape), result.dtype) == (tuple(expected.shape), expected.dtype)


def test_cuda_checks_its_arguments(modules: list[tuple[str, list[str]]]) -> None:
    with pytest.raises(
        ValueError, match="granularity: expected one of 'tensor', 'row', got 'column'"
    ):
        OPS["quantize_nvfp4"]._cuda(torch.zeros(2, 16), granularity="column")
    assert modules == []


def test_cuda_tells_autograd_of_its_writes(modules: list[tuple[str, list[str]]]) -> None:
    op = OPS["rmsnorm_quantize_nvfp4"]
    x, weight, residual = torch.ones(2, 16), torch.ones(16), torch.ones(2, 16)
    before = residual._version
    op._cuda(x, weight, residual=residual)
    assert residual._version == before + 1
    with torch.inference_mode():
        op._cuda(x, weight, residual=torch.ones(2, 16))


class Direct:
    """Stands in for a module's direct function: keeps its arguments, and refuses or not."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = False

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return NotImplemented if self.refuses else ("a", "b")


@by_kernel_op
def test_a_direct_function_gets_all_arguments(
    op: Op, modules: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, kwargs = first_with_residual(op).make("cpu")
    named = op._named(args, kwargs)
    complete = [named[name] for name in op.names]
    given = dict(zip(op.names, args, strict=False)) | kwargs
    for argument in op.default._schema.arguments:
        if argument.name in given:
            assert named[argument.name] is given[argument.name]
        else:
            assert named[argument.name] == argument.default_value
    assert op.direct(named) is NotImplemented  # nothing is loaded
    rest = op.into(None, **named)
    assert [*map(id, (rest.pop(name) for name in op.names))] == [*map(id, complete)]
    assert set(rest.values()) <= {None}
    assert modules == []
    op.compiled()
    direct = Direct()
    assert op._kept is not None
    monkeypatch.setattr(op, "_kept", replace(op._kept, direct=direct))
    assert op.direct({"other": 1, **named}) == ("a", "b")
    assert direct.calls.pop() == (True, *complete)
    assert op.into(None, **named) == ("a", "b")
    assert direct.calls.pop() == (True, *complete)
    assert isinstance(op.into(False, **named), dict)
    assert op._cuda(*args, **kwargs) in (("a", "b"), "a")
    assert direct.calls.pop() == (False, *complete)
    buffers = poisoned_buffers(op, args, kwargs)
    op.direct(named, tuple(buffers.values()))
    op._cuda_out(*args, **kwargs, **buffers)
    for call, for_dispatcher in zip(direct.calls, (True, False), strict=True):
        assert call[0] is for_dispatcher
        assert [*map(id, call[1:])] == [*map(id, (*complete, *buffers.values()))]


def test_an_op_asks_for_the_dtype_that_it_is_called_with(
    modules: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes the whole module once that is there; a call never meets another dtype's part."""
    op = OPS["amax_gsa"]
    asked: list[tuple[str, tuple[str, ...]]] = []
    whole = False
    parts: dict[str, Direct] = {}

    def get_part(
        name: str, sources: list[str], part: str, flags: Sequence[str], wider: object
    ) -> tuple[SimpleNamespace, Callable[[], bool], bool]:
        asked.append((part, tuple(flags)))
        direct = parts[part] = Direct()
        functions = {op.function: Recorder(), f"direct_{op.function}": direct}
        return SimpleNamespace(**functions), lambda: not whole, not whole

    monkeypatch.setattr(jitquant.loader, "get_part", get_part)
    monkeypatch.setattr(op, "_others", {})
    bf16, fp16, fp32 = (
        torch.ones(1, 16, dtype=d) for d in (torch.bfloat16, torch.half, torch.float32)
    )
    for _ in range(2):
        for x in (bf16, fp16, fp32):
            assert op._cuda(x) in ("results", "a")
    assert asked == [
        (n, (f"-DJITQUANT_DTYPE={i}",)) for i, n in enumerate(("bf16", "fp16", "fp32"))
    ]
    for name, x in (("bf16", bf16), ("fp16", fp16), ("fp32", fp32), ("bf16", bf16)):
        for direct in parts.values():
            direct.calls.clear()
        assert op.direct({"divisor": 2688.0, "x": x}) == ("a", "b")
        out, divisor = x[0], 2688.0
        assert op.into(out, divisor=divisor, x=x) == ("a", "b")
        assert [(n, len(d.calls)) for n, d in parts.items() if d.calls] == [(name, 2)]
        assert [*map(id, parts[name].calls[1][1:])] == [*map(id, (x, divisor, out))]
    for other in (object(), [1.0]):
        assert op.direct({"x": other, "divisor": 2688.0}) is NotImplemented
        assert isinstance(op.into(None, x=other, divisor=2688.0), dict)
    whole = True  # no part is fresh any longer
    assert op.direct({"x": bf16, "divisor": 2688.0}) is NotImplemented
    assert isinstance(op.into(None, x=bf16, divisor=2688.0), dict)
    op._cuda(bf16)
    assert len(asked) == 4
    assert op._kept is not None
    assert op._kept.part is None
    monkeypatch.setattr(op, "_kept", replace(op._kept, part=PARTS[torch.half]))
    op.compiled()  # for whatever call
    assert modules == [("amax_gsa", ["amax_gsa.cu"])]


def test_what_a_direct_function_refuses_goes_on_to_the_operator(
    modules: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, x = OPS["amax_gsa"], torch.ones(1, 16)
    op.compiled()
    direct = Direct()
    direct.refuses = True
    assert op._kept is not None
    monkeypatch.setattr(op, "_kept", replace(op._kept, direct=direct))
    assert op._cuda(x) == "results"
    op._cuda_out(x, gsa=torch.ones(1))
    assert [kind for kind, _, _ in op.compiled().calls] == ["default", "out"]
    with pytest.raises(
        ValueError, match=r"divisor: expected a positive number that is finite in float32, got 0\.0"
    ):
        op._cuda(x, 0.0)
    assert len(op.compiled().calls) == 2


def test_nothing_goes_past_the_dispatcher_in_a_compiled_function(
    modules: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, x, counter = OPS["amax_gsa"], torch.ones(1, 16), CompileCounter()
    f = torch.compile(jitquant.amax_gsa, fullgraph=True, backend=counter)
    torch.compiler.reset()
    f(x)
    op.compiled()
    direct = Direct()
    assert op._kept is not None
    monkeypatch.setattr(op, "_kept", replace(op._kept, direct=direct))
    assert f(x).item() == pytest.approx(1 / 2688)
    assert direct.calls == []
    assert counter.frame_count == 1  # what is loaded is no reason to compile again


def test_the_loader_is_asked_again_after_an_edit(
    modules: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, x = OPS["amax_gsa"], torch.ones(1, 16)
    fresh = [True]
    monkeypatch.setattr(jitquant.loader, "up_to_date_check", lambda _: lambda: fresh[0])
    op._cuda(x)
    op._cuda(x)
    assert len(modules) == 1
    fresh[0] = False
    op._cuda(x)
    assert len(modules) > 1
