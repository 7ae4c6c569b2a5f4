"""An op is declared once: everything that PyTorch and the tests need is made from its record.

From an `Op` come, in ``torch.ops.jitquant``, the functional op and its ``out`` overload, each with
its CPU, CUDA and meta implementation:

- CPU: the reference; ``out`` copies its results into the buffers.
- CUDA: the compiled module's function of the same arguments, and its own ``out`` overload.
- meta (fake tensors, ``torch.compile``, ``torch.export``): shapes and dtypes from ``plan``.

Arguments are checked however an op is reached: by ``plan``, or on CUDA by the compiled function,
which refuses what ``plan`` refuses; ``plan`` then writes the error.

Most ops are a product: a `Source` (where values come from) by a `Cast` (how the scale comes, and
what is written), put together by `product`. The functions of a record have parameters named like
the op's arguments, as many as they need, and are called by these names.

The dispatcher takes longer than a small kernel, so there is a way past it, `Op.direct`, for calls
with plain CUDA tensors that nothing looks at on their way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from jitquant.formats import (
    E8M0_DTYPE,
    FP4_DTYPE,
    FP8_DTYPES,
    FP32_MAX,
    GROUP_DTYPES,
    INPUT_DTYPES,
    NVFP4_BLOCK,
    SCALE_DTYPE,
    as_bytes,
    empty,
    fp4_shapes,
    one_of,
)
from jitquant.ops import _checks, _checks_memory
from jitquant.ops.library import REQUIRED, arguments_of, define, parameters, schemas
from jitquant.ops.parts import PARTS, Part


class Result(NamedTuple):
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def fp32(*shape: int) -> Result:
    """A result in fp32."""
    return Result(shape, torch.float32)


def fp4(
    shape: tuple[int, ...],
    scale_layout: str,
    dim: int = -1,
    *,
    block: int = NVFP4_BLOCK,
    scales: torch.dtype = SCALE_DTYPE,
) -> tuple[Result, Result]:
    """x_fp4 and x_sf, in ``scales``, of a tensor of a logical shape."""
    shapes = fp4_shapes(shape, scale_layout, dim, block)
    return Result(shapes[0], FP4_DTYPE), Result(shapes[1], scales)


class Plan(NamedTuple):
    """What a call with checked arguments gives."""

    device: torch.device
    results: tuple[Result, ...]

    def empty(self) -> tuple[Tensor, ...]:
        """Uninitialized results."""
        return tuple(empty(r.shape, r.dtype, self.device) for r in self.results)


class Number(NamedTuple):
    """What is accepted of an argument that is a number.

    Attributes:
        least, most: the ends of what is accepted, in fp64.
        expected: the words of an error after "expected".
        way_out: what an error ends with.
        shown: what the argument is called in an error; default: its name.
    """

    least: float
    expected: str
    way_out: str = ""
    shown: str = ""
    most: float = FP32_MAX

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError if ``value`` is not accepted."""
        if not self.least <= value <= self.most:
            raise ValueError(
                f"{self.shown or name}: expected {self.expected}, got {value}{self.way_out}"
            )


class Dtypes(NamedTuple):
    """What is accepted of an argument that is a dtype, or that has one.

    Attributes:
        accepted: these dtypes.
        way_out: what an error ends with; ``{name}`` in it is the argument.
    """

    accepted: tuple[torch.dtype, ...]
    way_out: str = ""

    @property
    def expected(self) -> str:
        """The words of an error after "expected"."""
        *first, last = (str(known).removeprefix("torch.") for known in self.accepted)
        return f"{', '.join(first)} or {last}" if first else last

    def check(self, name: str, value: Any) -> None:
        """Raises TypeError if ``value`` is not accepted."""
        dtype = value.dtype if isinstance(value, Tensor) else value
        if dtype not in self.accepted:
            way_out = self.way_out.format(name=name)
            raise TypeError(f"{name}: expected {self.expected}, got {dtype}{way_out}")


INPUT = Dtypes(INPUT_DTYPES, ". Convert it with {name}.to(torch.bfloat16)")
OUTPUT = Dtypes(INPUT_DTYPES, ". For another dtype, ask for float32 and convert the result")
FP8 = Dtypes(FP8_DTYPES)
EIGHT_BITS = Dtypes(GROUP_DTYPES)
FP32 = Dtypes((torch.float32,), ". Convert it with {name}.float()")
INT64 = Dtypes((torch.int64,), ". Convert it with {name}.long()")
INTEGERS = Dtypes((torch.int32, torch.int64), ". Convert it with {name}.int()")
SIGNS = Dtypes((torch.int8,), ". Convert it with {name}.char()")


class Values(NamedTuple):
    """A tensor that is quantized: of the dtypes of inputs, with contiguous columns.

    Attributes:
        least_dim: how many dimensions it has at least.
        shape: its shape, as an error says it.
    """

    least_dim: int = 1
    shape: str = "(..., N)"

    def check(self, name: str, value: Any) -> None:
        """Raises TypeError or ValueError if ``value`` is not accepted."""
        _checks.input_tensor(value, name, self.least_dim, self.shape)


MATRIX = Values(2, "(M, K)")

Rule = Number | Dtypes | Values
"""What an argument accepts where it is given, regardless of the others."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What an op uses of its compiled module; ``part`` is the only one that it was built for."""

    operator: Any
    direct: Callable[..., Any]
    fresh: Callable[[], bool]
    part: Part | None = None


Arguments = Mapping[str, Any]
"""The arguments of a call, by name."""


def by_name(function: Callable[..., Any], known: Collection[str]) -> Callable[[Arguments], Any]:
    """``function``, called with those arguments that its parameters are named for.

    Args:
        function: what is called. A parameter that is not known keeps its default. A single
            parameter that is positional only is for all arguments, by name.
        known: names of all arguments.
    """
    code = function.__code__
    if code.co_argcount == code.co_posonlyargcount == 1:
        return function
    names = _parameters(function, known)
    return lambda arguments: function(
        **dict(zip(names, map(arguments.__getitem__, names), strict=True))
    )


def _parameters(function: Callable[..., Any], known: Collection[str]) -> list[str]:
    """The parameters of a function that are known; others have to have a default."""
    found = parameters(function)
    for name, default in found.items():
        if name not in known and default is REQUIRED:
            raise TypeError(
                f"{function.__name__}: expected parameters among {', '.join(known)}, got {name}"
            )
    return [name for name in found if name in known]


_INTO = """
def into(out, /, {parameters}):
    if not is_dynamo_compiling() and (_kept := _op._kept) is not None and out is not False:
        if _kept.part is not None:
            _kept = _op._of_part(_kept, {part} if isinstance({first}, Tensor) else None)
        if _kept is not None and _kept.fresh():
            try:
                _done = {new} if out is None else {written}
                if _done is not NotImplemented:
                    return _done
            except RuntimeError as error:
                if not _op._lacks(_kept.part, error):
                    raise
    return {arguments}
"""


def _into(op: Op, part: Callable[..., Part | None] | None, others: Collection[str]) -> Any:
    """`Op.into`.

    It is compiled: to pass arguments by keyword to a function that has them as parameters takes
    about half the time of a mapping, or of ``*arguments``.
    """
    attributes = [f"out.{part}" for part in op.parts]
    if len(op.parts) == 1:
        attributes = ["out"]
    elif op.pair:
        attributes = [f"out[{p.endswith('_t'):d}].{p.removesuffix('_t')}" for p in op.parts]
    others = [name for name in others if name not in op.names]
    needs = [] if part is None else _parameters(part, op.names)
    text = _INTO.format(
        parameters=", ".join([*op.names, *(f"{name}=None" for name in others)]),
        part=f"_part({', '.join(f'{name}={name}' for name in needs)})"
        if part
        else f"PARTS.get({op.names[0]}.dtype)",
        first=op.names[0],
        new=f"_kept.direct(True, {', '.join(op.names)})",
        written=f"_kept.direct(True, {', '.join([*op.names, *attributes])})",
        arguments=f"{{{', '.join(f'{name!r}: {name}' for name in (*op.names, *others))}}}",
    )
    found: dict[str, Any] = {"_op": op, "_part": part, "PARTS": PARTS, "Tensor": Tensor}
    found["is_dynamo_compiling"] = is_dynamo_compiling
    exec(compile(text, __file__, "exec"), found)
    return found["into"]


def _is_e8m0(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == E8M0_DTYPE


def _no_direct(*_: Any) -> Any:
    return NotImplemented


class Op:
    """A declared and registered op.

    Attributes:
        name: its name in ``torch.ops.jitquant``.
        arguments: its arguments as schema text; those with an alias annotation are written to.
        names: its arguments' names.
        parts: the attributes of a container that the results become.
        pair: whether these are the attributes of two containers, ``_t`` for the second's.
        into: as `direct`, in less time: ``into(out, x=x, ...)``. ``out`` is None, or what
            `buffers_of` takes, or False if nothing is to be done. Where nothing was done the result
            is a dict of the arguments.
        inv_rms: whether one of the results is inv_rms.
        results: names of its results, which are the buffers' names in the ``out`` overload.
        module: the compiled module, from ``<module>.cu``.
        function: the module's function, which takes the same arguments.
        also: by other modules that have the function, its name there.
        choices: by argument, the names that are accepted.
        accepts: by argument, other rules of what is accepted.
        rules: these in the order that they are checked in.
        checks: other functions that refuse arguments, which bindings have too.
        source: where values come from, if it is a product.
        plan: checks the arguments and describes the results.
        default: the functional overload.
    """

    def __init__(
        self,
        name: str,
        results: Sequence[str],
        *,
        module: str,
        plan: Callable[..., Plan],
        reference: Callable[..., tuple[Tensor, ...]],
        arguments: str | None = None,
        function: str = "",
        choices: Mapping[str, tuple[str, ...]] | None = None,
        accepts: Mapping[str, Rule] | None = None,
        maker: str = "",
        attributes: Mapping[str, str] | None = None,
        rows_apart: bool = False,
        part: Callable[..., Part | None] | None = None,
        also: Mapping[str, str] | None = None,
        others: Collection[str] = (),
    ) -> None:
        """Registers it.

        Args:
            name, results, module: see the class.
            plan: of those arguments that it takes by name; choices and accepts are checked before.
            reference: of those arguments that it takes by name.
            arguments: schema text; default: those of the reference, from its annotations.
            function: default: the op's name.
            choices, accepts: see the class.
            maker: the call that makes buffers for the results, for errors.
            attributes: by result, what a container calls it, if that is another name.
            rows_apart: whether a buffer for ``data`` may have strided rows.
            part: of those arguments that it takes by name, the part of the module with all
                kernels that a call needs; None: the whole. Default: that of the first's dtype.
            also: see the class.
            others: what `into` takes beside the arguments, and does not use.
        """
        self.name = name
        self.arguments = arguments_of(reference) if arguments is None else arguments
        self.results = tuple(results)
        self.module = module
        self.function = function or name
        self.also = dict(also or {})
        self.choices = dict(choices or {})
        self.accepts = dict(accepts or {})
        self.numbers = {k: rule for k, rule in self.accepts.items() if isinstance(rule, Number)}
        self.rules = sorted(self.accepts.items(), key=lambda item: item[0] not in self.numbers)
        self.checks: tuple[Callable[..., object], ...] = (plan,)
        self.source: Source | None = None
        self._maker = maker
        self.rows_apart = rows_apart
        self._sources = [f"{module}.cu"]
        self._kept: Compiled | None = None
        self._others: dict[Part | None, Compiled] = {}
        self._lacking: set[Part] = set()
        names = {} if attributes is None else attributes
        self.parts = tuple(names.get(r, r) for r in self.results)
        self._returned: Callable[[tuple[Tensor, ...]], Any] = (
            tuple if len(self.results) > 1 else itemgetter(0)
        )
        self._labels = [f"out.{r}" for r in results] if len(self.results) > 1 else ["out"]
        self.pair = any(part.endswith("_t") for part in self.parts)
        if self.pair:
            parts = [(name.endswith("_t"), name.removesuffix("_t")) for name in results]
            self._labels = [f"out[{second:d}].{name}" for second, name in parts]
        functional, out = schemas(name, self.arguments, results)
        define(functional, cpu=self._cpu, cuda=self._cuda, meta=self._meta)
        define(out, cpu=self._cpu_out, cuda=self._cuda_out, meta=self._meta_out)
        self._packet = getattr(torch.ops.jitquant, name)
        self.default: Any = self._packet.default
        arguments_ = self.default._schema.arguments
        self.names = [a.name for a in arguments_]
        self._values = itemgetter(*self.names)
        self.into = _into(self, part, others)
        self.inv_rms = "inv_rms" in self.results
        self._positional = sum(not a.kwarg_only for a in arguments_)
        self._defaults = {
            a.name: a.default_value if a.has_default_value() else None for a in arguments_
        }
        # What says whether a part is made has the part's name in the public functions.
        kinds = ((a.name.removeprefix("with_"), str(a.real_type)) for a in arguments_)
        self._kinds = [
            (name, kind.removeprefix("Optional[").removesuffix("]"), kind.startswith("Optional"))
            for name, kind in kinds
        ]
        self._plan = by_name(plan, self.names)
        self._compute = by_name(reference, self.names)
        self._part = None if part is None else by_name(part, self.names)
        if arguments is None:
            self.reference = reference

    def __repr__(self) -> str:
        return f"Op({self.name!r})"

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Checks the arguments and describes the results.

        Raises:
            TypeError, ValueError: an argument is not accepted.
        """
        return self._checked(self._named(args, kwargs))

    @property
    def out(self) -> Any:
        """The overload that writes to buffers and returns nothing."""
        return self._packet.out

    @cached_property
    def reference(self) -> Callable[..., tuple[Tensor, ...]]:
        """The reference as a function with the op's name and arguments."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        signature = inspect.Signature(
            [
                inspect.Parameter(
                    a.name,
                    kinds[a.kwarg_only],
                    default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
                )
                for a in self.default._schema.arguments
            ]
        )

        def function(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            results: tuple[Tensor, ...] = self._compute(bound.arguments)
            return results

        function.__name__ = function.__qualname__ = self.name
        function.__doc__ = f"{', '.join(self.results)} of the op ``{self.name}``, as a tuple."
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    def compiled(self, part: Part | None = None) -> Any:
        """The compiled module's function, built now if need be.

        Args:
            part: if a function of it alone will do.

        Raises:
            jitquant.loader.LoaderError: it cannot be built or loaded.
        """
        kept = self._kept
        if kept is not None and kept.part is not None and kept.part != part:
            kept = self._others.get(part)
        if kept is None or not kept.fresh():
            kept = self._kept = self._compile(part)
            self._others = {o.part: o for o in (*self._others.values(), kept) if o.fresh()}
        return kept.operator

    def load(self, arguments: Arguments) -> None:
        """Loads the part that a call needs, where an op that is called before it finds kernels."""
        x = arguments[self.names[0]]
        if is_dynamo_compiling() or type(x) is not Tensor or not x.is_cuda:
            return
        if (part := self.part(arguments)) is not None:
            self.compiled(part)

    def part(self, arguments: Arguments) -> Part | None:
        """The part of the module that a call with these arguments needs; None: the whole."""
        if self._part is None:
            return PARTS.get(arguments[self.names[0]].dtype)
        part: Part | None = self._part(arguments)
        return self._with_kernels(part) if self._lacking else part

    def _with_kernels(self, part: Part | None) -> Part | None:
        """The part, or the first wider one that has not been found to lack kernels."""
        while part is not None and part in self._lacking:
            part = part.of
        return part

    def _lacks(self, part: Part | None, error: RuntimeError) -> bool:
        """Whether ``error`` says that the part lacks a call's kernels: calls get a wider one then.

        Which kernels a call needs also depends on addresses and devices, so the part is a guess.
        """
        if part is None or "cudaErrorInvalidDeviceFunction" not in str(error):
            return False
        self._lacking.add(part)
        return True

    def _run(self, overload: str, arguments: Arguments, *args: Any, **kwargs: Any) -> Any:
        """The compiled operator's results, of the first part that has the kernels."""
        while True:
            part = self.part(arguments)
            try:
                return getattr(self.compiled(part), overload)(*args, **kwargs)
            except RuntimeError as error:
                if not self._lacks(part, error):
                    raise

    def _compile(self, part: Part | None) -> Compiled:
        from jitquant.loader import get_cuda_module, get_part, up_to_date_check

        if part is not None:
            wider = [(other.name, other.flags) for other in part.wider]
            module, fresh, is_part = get_part(
                self.module, self._sources, part.name, part.flags, wider
            )
        else:
            module = get_cuda_module(self.module, self._sources)
            fresh, is_part = up_to_date_check(module), False
        direct = getattr(module, f"direct_{self.function}", _no_direct)
        operator = getattr(module, self.function)
        return Compiled(operator, direct, fresh, part if is_part else None)

    def _of_part(self, kept: Compiled, part: Part | None) -> Compiled | None:
        """What there is of the module for calls that need a part of it, unchecked."""
        if self._lacking:
            part = self._with_kernels(part)
        return kept if part is kept.part else self._others.get(part)

    def buffers_of(self, out: Any) -> tuple[Any, ...]:
        """The parts of a container, or of a tuple of two; of a tensor itself."""
        if self.pair:
            return tuple(getattr(out[p.endswith("_t")], p.removesuffix("_t")) for p in self.parts)
        return tuple(getattr(out, p) for p in self.parts) if len(self.parts) > 1 else (out,)

    def direct(
        self, arguments: Arguments, buffers: Sequence[Any] = (), *, in_dispatcher: bool = False
    ) -> Any:
        """The results on CUDA as a tuple, past the dispatcher; `into` takes less time.

        ``NotImplemented`` says that nothing was done: the module has to be loaded; a tensor is a
        subclass or on another device; a mode, a transform, a compiler or a profiler is to see the
        op; or an argument is not accepted. `dispatched` is to be called then, which does all of
        this, or says what is wrong.

        Args:
            arguments: by name; there may be others.
            buffers: for the results, in order; they are written to, and the result is None.
            in_dispatcher: whether the call comes from there.
        """
        if is_dynamo_compiling() or (kept := self._kept) is None:
            return NotImplemented
        if kept.part is not None:
            known = isinstance(arguments[self.names[0]], Tensor)
            kept = self._of_part(kept, self.part(arguments) if known else None)
        if kept is None or not kept.fresh():
            return NotImplemented
        try:
            return kept.direct(not in_dispatcher, *self._values(arguments), *buffers)
        except RuntimeError as error:
            if not self._lacks(kept.part, error):
                raise
        return NotImplemented

    def dispatched(self, args: Sequence[Any], buffers: Sequence[Any] = ()) -> Any:
        """As `direct`, by the op itself; its tensors are to be tensors."""
        first = list(args[: self._positional])
        keywords = dict(zip(self.names[self._positional :], args[self._positional :], strict=True))
        if buffers:
            if is_compiling() and any(map(_is_e8m0, (*args, *buffers))):
                # Inductor refuses ops that write and have a float8_e8m0fnu. Bytes fit many a
                # dtype, so the given arguments are checked first.
                self._plan_out(list(buffers), self._named(first, keywords))
                first = [as_bytes(t) if _is_e8m0(t) else t for t in first]
                buffers = [as_bytes(t) if _is_e8m0(t) else t for t in buffers]
            return self.out(*first, **keywords, **dict(zip(self.results, buffers, strict=True)))
        results = self.default(*first, **keywords)
        return results if len(self.results) > 1 else (results,)

    def check_call(self, args: Sequence[Any], buffers: Sequence[Any] = ()) -> None:
        """Raises what `dispatched` raises, and writes nothing."""
        arguments = dict(zip(self.names, args, strict=True))
        if buffers:
            self._plan_out(list(buffers), arguments)
        else:
            self._checked(arguments)
        if not is_compiling():
            self._check_memory(arguments, buffers)

    def made(self, arguments: Arguments) -> Any:
        """New results as a tuple, by the shortest way that there is.

        Args:
            arguments: by name; there may be others.
        """
        results = self.direct(arguments)
        return self.dispatched(self.tensors(arguments)) if results is NotImplemented else results

    def one_tensor(self, done: Any, out: Tensor | None) -> Tensor:
        """The only result of a call, new or in ``out``.

        Args:
            done: arguments by name, among others, or what `into` has returned.
            out: a buffer, or None.

        Raises:
            TypeError, ValueError: an argument is not accepted.
        """
        if isinstance(done, tuple) or out is None:
            result: Tensor = (done if isinstance(done, tuple) else self.made(done))[0]
            return result
        if done is not None and self.direct(done, (out,)) is NotImplemented:
            tensors = self.tensors(done)
            _checks.tensor_out(out)
            if (rule := self.accepts.get("dtype")) is not None:  # what the dtype may be from
                rule.check("out", out)
            self.dispatched(tensors, (out,))
        return out

    def tensors(self, arguments: Arguments) -> list[Any]:
        """All arguments by position, arrays of other libraries as tensors, others of their types.

        What is quantized is copied if its columns are not contiguous.

        Raises:
            TypeError, ValueError: an argument cannot be what the schema says.
        """
        seen: list[Any] = []
        for name, (label, kind, optional) in zip(self.names, self._kinds, strict=True):
            value = arguments[name]
            if optional and value is None:
                seen.append(None)
            elif kind == "Tensor":
                is_written = label == "residual" and "!" in self.arguments
                tensor = _checks.as_tensor(value, label, is_written=is_written)
                if isinstance(self.accepts.get(label), Values) and not tensor.is_contiguous():
                    tensor = _checks.with_columns(tensor)
                seen.append(tensor)
            else:
                is_tensor = isinstance(value, Tensor)
                accepted = _checks.SCALARS[kind][0]
                if not isinstance(value, accepted) or (is_tensor and not _checks.is_number(value)):
                    choices = self.choices.get(name, ())
                    raise _checks.wrong_scalar(value, label, kind, choices)
                seen.append(value)
        return seen

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name: the dispatcher leaves out what equals its default."""
        return {**self._defaults, **dict(zip(self.names, args)), **kwargs}  # noqa: B905

    def _check_memory(self, arguments: Arguments, buffers: Sequence[Tensor] = ()) -> None:
        written: list[tuple[str, Tensor]] = []
        read: list[tuple[str, Tensor]] = []
        for name in self.names:
            if isinstance(arguments[name], Tensor):
                in_place = name == "residual" and "!" in self.arguments
                (written if in_place else read).append((name, arguments[name]))
        written += zip(self._labels, buffers)  # noqa: B905
        _checks_memory.own_memory(written, read)

    def _checked(self, arguments: Arguments) -> Plan:
        for name, accepted in self.choices.items():
            if arguments[name] not in accepted:
                one_of(name, arguments[name], accepted)
        for name, rule in self.rules:
            if (value := arguments[name]) is not None:
                rule.check(name, value)
        plan: Plan = self._plan(arguments)
        return plan

    def _cpu(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._named(args, kwargs)
        self._checked(arguments)
        if "!" in self.arguments:
            self._check_memory(arguments)
        with torch.no_grad():
            return self._returned(self._compute(arguments))

    def _cuda(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._named(args, kwargs)
        results = self.direct(arguments, in_dispatcher=True)
        if results is not NotImplemented:
            return self._returned(results)
        plan = self._checked(arguments)
        self._check_memory(arguments)
        residual = kwargs.get("residual") if "!" in self.arguments else None
        if residual is not None:
            torch.autograd.graph.increment_version(residual)
        with torch.no_grad():
            if not torch.are_deterministic_algorithms_enabled():
                return self._run("default", arguments, *args, **kwargs)
            # PyTorch fills new memory then, and cannot with float4_e2m1fn_x2.
            made = plan.empty()
            buffers = dict(zip(self.results, made, strict=True))
            self._run("out", arguments, *args, **kwargs, **buffers)
            return self._returned(made)

    def _meta(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned(self.plan(*args, **kwargs).empty())

    def _buffers(self, kwargs: dict[str, Any]) -> list[Tensor]:
        return [kwargs.pop(name) for name in self.results]

    def _plan_out(self, buffers: list[Tensor], arguments: Arguments) -> Plan:
        plan = self._checked(arguments)
        for name, label, buffer, result in zip(
            self.results, self._labels, buffers, plan.results, strict=True
        ):
            if name == "data" and self.rows_apart and buffer.device == plan.device:
                _checks.out_elements(buffer, label, result.shape, result.dtype, self._maker)
            else:
                _checks.out_tensor(
                    buffer, label, result.shape, result.dtype, plan.device, self._maker
                )
        return plan

    def _cpu_out(self, *args: Any, **kwargs: Any) -> None:
        buffers, arguments = self._buffers(kwargs), self._named(args, kwargs)
        self._plan_out(buffers, arguments)
        self._check_memory(arguments, buffers)
        with torch.no_grad():
            self._store(self._compute(arguments), buffers, arguments)

    def _store(
        self, results: Sequence[Tensor], buffers: Sequence[Tensor], arguments: Arguments
    ) -> None:
        """Writes what a call with these arguments gives to its buffers."""
        for buffer, result in zip(buffers, results, strict=True):
            # As bytes: PyTorch lacks copy kernels for float4_e2m1fn_x2.
            as_bytes(buffer).copy_(as_bytes(result))

    def _cuda_out(self, *args: Any, **kwargs: Any) -> None:
        buffers, arguments = self._buffers(kwargs), self._named(args, kwargs)
        if self.direct(arguments, buffers, in_dispatcher=True) is None:
            return
        plan = self._plan_out(buffers, arguments)
        self._check_memory(arguments, buffers)
        residual = kwargs.get("residual") if "!" in self.arguments else None
        written = buffers if residual is None else [*buffers, residual]
        # Tells autograd of a write that PyTorch does not see.
        torch.autograd.graph.increment_version(written)
        typed = {
            name: buffer if buffer.dtype == result.dtype else buffer.view(result.dtype)
            for name, buffer, result in zip(self.results, buffers, plan.results, strict=True)
        }
        with torch.no_grad():
            self._run("out", arguments, *args, **kwargs, **typed)

    def _meta_out(self, *args: Any, **kwargs: Any) -> None:
        self._plan_out(self._buffers(kwargs), self._named(args, kwargs))


@dataclass(frozen=True)
class Rows:
    """The rows that are quantized, before anything is computed."""

    like: Tensor
    name: str
    leading: tuple[int, ...]
    cols: int

    @property
    def count(self) -> int:
        """How many rows."""
        return math.prod(self.leading)


class Source(NamedTuple):
    """Where values come from.

    Attributes:
        of: the argument that has the rows.
        takes: what it takes, as schema text; after it come a given scale and ``tail``.
        values: fp32 (rows, N); of a norm those before the factor of each row, and the factors.
        accepts: by argument, what is accepted of it.
        check: raises if its arguments do not go together.
        tail: arguments with a default that are given by position.
        written: what is written in place, by keyword.
        options: other arguments by keyword.
        granularity: the default of a scale that is computed; None: there is one for the tensor.
        reduced: how many last dimensions of ``of`` become the last of the result.
        cols: the result's columns; None: those of ``of``.
        inv_rms: whether the factor of each row is a result.
        choices: by argument, the names that are accepted.
    """

    of: str
    takes: str
    values: Callable[..., Any]
    accepts: Mapping[str, Rule]
    check: Callable[..., object] | None = None
    tail: str = ""
    written: str = ""
    options: str = ""
    granularity: str | None = "tensor"
    reduced: int = 1
    cols: Callable[..., int] | None = None
    inv_rms: bool = False
    choices: Mapping[str, tuple[str, ...]] = {}


class Cast(NamedTuple):
    """How the scale of rows comes, and what is written.

    Attributes:
        arguments: schema text with the parts of a source in braces.
        results: names of the results.
        plan: checks its arguments, with ``rows`` and ``source``, and describes the results.
        quantize: the results of fp32 values ``v`` with the dimensions ``leading``; after a norm
            ``inverse`` has the factor of each row.
        choices: by argument, the names that are accepted.
        accepts: by argument, other rules of what is accepted.
    """

    arguments: str
    results: tuple[str, ...]
    plan: Callable[..., tuple[Result, ...]]
    quantize: Callable[..., tuple[Tensor, ...]]
    choices: Mapping[str, tuple[str, ...]]
    accepts: Mapping[str, Rule] = {}


def product(name: str, source: Source, cast: Cast, *, kind: type[Op] = Op, **rest: Any) -> Op:
    """The op that quantizes what a source gives.

    Args:
        name: of the op.
        source: where values come from.
        cast: how the scale comes, and what is written.
        kind: what it is made as.
        rest: what an `Op` takes beside.
    """
    fragment = f'str granularity="{source.granularity}", ' if source.granularity else ""
    text = cast.arguments.format(
        takes=source.takes,
        tail=source.tail,
        written=source.written,
        options=source.options,
        granularity=fragment,
    )
    text = text.removesuffix(", ").removesuffix(", *")
    known = [a.name for a in torch._C.parse_schema(f"{name}({text}) -> ()").arguments]
    check = None if source.check is None else by_name(source.check, known)
    values = by_name(source.values, known)
    planned = by_name(cast.plan, [*known, "rows", "source"])
    quantize = by_name(cast.quantize, [*known, "v", "leading", "inverse"])
    of_cols = None if source.cols is None else by_name(source.cols, known)

    def plan(arguments: Arguments, /) -> Plan:
        if check is not None:
            check(arguments)
        like = arguments[source.of]
        cols = like.shape[-1] if of_cols is None else of_cols(arguments)
        rows = Rows(like, source.of, like.shape[: -source.reduced], cols)
        results = planned({**arguments, "rows": rows, "source": source})
        return Plan(like.device, (*results, fp32(rows.count)) if source.inv_rms else results)

    def reference(arguments: Arguments, /) -> tuple[Tensor, ...]:
        made = values(arguments)
        v, inverse = made if isinstance(made, tuple) else (made, None)
        leading = arguments[source.of].shape[: -source.reduced]
        results = quantize({**arguments, "v": v, "leading": leading, "inverse": inverse})
        return (*results, inverse) if source.inv_rms else results

    op = kind(
        name,
        (*cast.results, "inv_rms") if source.inv_rms else cast.results,
        arguments=text,
        plan=plan,
        reference=reference,
        choices={
            **source.choices,
            **{key: accepted for key, accepted in cast.choices.items() if key in known},
        },
        accepts={**source.accepts, **cast.accepts},
        **rest,
    )
    op.source = source
    op.checks = (cast.plan,) if source.check is None else (source.check, cast.plan)
    return op
