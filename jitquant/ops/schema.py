"""An op is declared once: everything that PyTorch and the tests need is made from the declaration.

From an `Op` come, in ``torch.ops.jitquant``, the functional op and its ``out`` overload, each with
its CPU, CUDA and fake implementation:

- CPU: the reference; ``out`` copies its results into the buffers.
- CUDA: the compiled module's function of the same arguments, and its own ``out`` overload.
- fake (meta tensors, ``torch.compile``, ``torch.export``): shapes and dtypes from ``plan``.

Arguments are checked however an op is reached: by ``plan``, or on CUDA by the compiled function,
which refuses whatever ``plan`` would; only then is ``plan`` asked what is wrong.

The dispatcher takes longer than a small kernel, so there is a way past it, `Op.direct`, for calls
with plain CUDA tensors that nothing looks at on their way.

Ops have no derivative: no result requires grad, whatever the inputs do. PyTorch's default for an op
without one would give its results a grad_fn that warns in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from jitquant.formats import E8M0_DTYPE, as_bytes
from jitquant.ops import _checks, _checks_memory

LIBRARY: Any = torch.library.Library("jitquant", "DEF")  # type: ignore[no-untyped-call]


class Result(NamedTuple):
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def fp32(*shape: int) -> Result:
    """A result in fp32."""
    return Result(shape, torch.float32)


class Plan(NamedTuple):
    """What a call with checked arguments gives."""

    device: torch.device
    results: tuple[Result, ...]


class Compiled(NamedTuple):
    """What an op uses of its compiled module; ``dtype`` is the only one that it was built for."""

    operator: Any
    direct: Callable[..., Any]
    fresh: Callable[[], bool]
    dtype: torch.dtype | None = None


#: A module for one dtype of the first argument takes the compilers about half of the time (13.1
#: against 24.1 s for fused_amax_quantize), so it is what a first call waits for. The flag is for
#: `dispatch` of nvfp4_kernels.cuh.
_PARTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_FLAGS = {dtype: (f"-DJITQUANT_DTYPE={number}",) for number, dtype in enumerate(_PARTS)}


def _alone(buffer: Tensor) -> tuple[Tensor]:
    return (buffer,)


def _is_e8m0(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == E8M0_DTYPE


def _no_direct(*_: Any) -> Any:
    return NotImplemented


class Op:
    """A declared and registered op.

    Attributes:
        name: its name in ``torch.ops.jitquant``.
        arguments: its arguments as schema text; those with an alias annotation are written to.
        results: names of its results, which are the buffers' names in the ``out`` overload.
        module: the compiled module, from ``<module>.cu``.
        function: the module's function, which takes the same arguments.
        plan: checks the arguments and says what the results are.
        reference: computes the results, as a tuple.
        default: the functional overload.
        out: the overload that writes to buffers and returns nothing.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        results: Sequence[str],
        *,
        module: str,
        function: str,
        plan: Callable[..., Plan],
        reference: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.results = tuple(results)
        self.module = module
        self.function = function
        self.plan = plan
        self.reference = reference
        self._sources = [f"{module}.cu"]
        self._kept: Compiled | None = None
        self._others: dict[torch.dtype | None, Compiled] = {}
        self._parts = attrgetter(*results) if len(self.results) > 1 else _alone
        self._labels = [f"out.{r}" for r in results] if len(self.results) > 1 else ["out"]
        self._register()
        packet = getattr(torch.ops.jitquant, name)
        self.default: Any = packet.default
        self.out: Any = packet.out
        arguments_ = self.default._schema.arguments
        self._defaults = [
            (a.name, a.default_value if a.has_default_value() else None) for a in arguments_
        ]
        # What says whether a part is made has the part's name in the public functions.
        self._kinds = [
            (
                a.name.removeprefix("with_"),
                str(a.real_type).removeprefix("Optional[").removesuffix("]"),
                str(a.real_type).startswith("Optional"),
            )
            for a in arguments_
        ]
        self._positional = sum(not a.kwarg_only for a in arguments_)

    def __repr__(self) -> str:
        return f"Op({self.name!r})"

    @property
    def schemas(self) -> tuple[str, str]:
        """Schema text of the functional overload and of ``out``."""
        used = self.arguments.count("!")
        letters = "abcdefgh"[used:]
        pairs = zip(letters, self.results, strict=False)
        buffers = ", ".join(f"Tensor({letter}!) {name}" for letter, name in pairs)
        comma = ", " if "*" in self.arguments else ", *, "
        returned = (
            "Tensor"
            if len(self.results) == 1
            else f"({', '.join(f'Tensor {name}' for name in self.results)})"
        )
        return (
            f"{self.name}({self.arguments}) -> {returned}",
            f"{self.name}.out({self.arguments}{comma}{buffers}) -> ()",
        )

    def compiled(self, dtype: torch.dtype | None = None) -> Any:
        """The compiled module's function, built now if need be.

        Args:
            dtype: that of the first argument, if a function for it alone will do.

        Raises:
            jitquant.loader.LoaderError: it cannot be built or loaded.
        """
        kept = self._kept_for(dtype)
        if kept is None:
            kept = self._kept = self._compile(dtype)
            self._others = {o.dtype: o for o in (*self._others.values(), kept) if o.fresh()}
        return kept.operator

    def _kept_for(self, dtype: torch.dtype | None) -> Compiled | None:
        kept = self._kept
        if kept is not None and kept.dtype is not None and kept.dtype is not dtype:
            kept = self._others.get(dtype)
        return kept if kept is not None and kept.fresh() else None

    def _compile(self, dtype: torch.dtype | None) -> Compiled:
        from jitquant.loader import freshness, get_cuda_module, get_part

        if dtype in _PARTS:
            module, fresh, is_part = get_part(
                self.module, self._sources, _PARTS[dtype], _FLAGS[dtype]
            )
        else:
            module = get_cuda_module(self.module, self._sources)
            fresh, is_part = freshness(module), False
        direct = getattr(module, f"direct_{self.function}", _no_direct)
        operator = getattr(module, self.function)
        return Compiled(operator, direct, fresh, dtype if is_part else None)

    def direct(self, args: Sequence[Any], out: Any = None) -> Any:
        """The results on CUDA as a tuple, past the dispatcher, or else ``NotImplemented``.

        Args:
            args: all arguments, by position in the schema's order.
            out: the buffer for a single result, or what has the buffers as attributes of the
                results' names. They are written to, and the result is None.

        Nothing was done where it is ``NotImplemented``: the module has to be loaded; a tensor is
        none of torch's own on the current GPU; a mode, a transform, a compiler or a profiler is to
        see the op; or an argument is not accepted. `dispatched` is to be called then, which does
        all of this, or says what is wrong.
        """
        kept = None if is_dynamo_compiling() else self._kept
        if kept is not None and kept.dtype is not None:
            kept = self._kept_for(getattr(args[0], "dtype", None))
        if kept is None or not kept.fresh():
            return NotImplemented
        if out is None:
            return kept.direct(True, *args)
        return kept.direct(True, *args, *self._parts(out))

    def _direct_in_dispatcher(self, args: Sequence[Any]) -> Any:
        """As `direct`, where the dispatcher has done its part."""
        kept = self._kept_for(args[0].dtype)
        return kept.direct(False, *args) if kept is not None else NotImplemented

    def dispatched(self, args: Sequence[Any], buffers: Sequence[Any] = ()) -> Any:
        """As `direct`, by the op itself; its tensors are to be tensors."""
        keywords = {name: value for (name, _), value in zip(self._defaults, args, strict=True)}
        first = [keywords.pop(name) for name, _ in self._defaults[: self._positional]]
        if buffers:
            if is_compiling() and any(map(_is_e8m0, (*args, *buffers))):
                # Inductor refuses ops that write and have a float8_e8m0fnu. Bytes fit many a
                # dtype, so what is given is looked at first.
                self._plan_out(list(buffers), *first, **keywords)
                first = [as_bytes(t) if _is_e8m0(t) else t for t in first]
                buffers = [as_bytes(t) if _is_e8m0(t) else t for t in buffers]
            return self.out(*first, **keywords, **dict(zip(self.results, buffers, strict=True)))
        results = self.default(*first, **keywords)
        return results if len(self.results) > 1 else (results,)

    def made(self, args: Sequence[Any]) -> Any:
        """New results as a tuple, by the shortest way that there is."""
        results = self.direct(args)
        return self.dispatched(self.tensors(args)) if results is NotImplemented else results

    def one_tensor(self, args: Sequence[Any], out: Tensor | None) -> Tensor:
        """The only result of a call, new or in ``out``.

        Raises:
            TypeError, ValueError: an argument is not accepted.
        """
        if out is None:
            result: Tensor = self.made(args)[0]
            return result
        if self.direct(args, out) is NotImplemented:
            tensors = self.tensors(args)
            _checks.tensor_out(out)
            self.dispatched(tensors, (out,))
        return out

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """``args`` with arrays of other libraries seen as tensors, the others of their types.

        Raises:
            TypeError, ValueError: an argument cannot be what the schema says.
        """
        seen: list[Any] = []
        for (name, kind, optional), value in zip(self._kinds, args, strict=True):
            if optional and value is None:
                seen.append(None)
            elif kind == "Tensor":
                seen.append(_checks.as_tensor(value, name))
            else:
                _checks.scalar(value, name, kind)
                seen.append(value)
        return seen

    def _complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments by position: the dispatcher leaves out what equals its default."""
        return [*args, *(kwargs.get(name, value) for name, value in self._defaults[len(args) :])]

    def _returned(self, results: tuple[Tensor, ...]) -> Any:
        return results if len(results) > 1 else results[0]

    def _check_memory(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], buffers: Sequence[Tensor] = ()
    ) -> None:
        written: list[tuple[str, Tensor]] = []
        read: list[tuple[str, Tensor]] = []
        for (name, _), value in zip(self._defaults, self._complete(args, kwargs), strict=True):
            if isinstance(value, Tensor):
                in_place = value is self._written_residual({name: value})
                (written if in_place else read).append((name, value))
        written += zip(self._labels, buffers, strict=False)
        _checks_memory.own_memory(written, read)

    def _cpu(self, *args: Any, **kwargs: Any) -> Any:
        self.plan(*args, **kwargs)
        self._check_memory(args, kwargs)
        with torch.no_grad():
            return self._returned(self.reference(*args, **kwargs))

    def _cuda(self, *args: Any, **kwargs: Any) -> Any:
        results = self._direct_in_dispatcher(self._complete(args, kwargs))
        if results is not NotImplemented:
            return self._returned(results)
        self.plan(*args, **kwargs)
        self._check_memory(args, kwargs)
        residual = self._written_residual(kwargs)
        if residual is not None:
            torch.autograd.graph.increment_version(residual)
        with torch.no_grad():
            return self.compiled(args[0].dtype).default(*args, **kwargs)

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan(*args, **kwargs)
        return self._returned(
            tuple(torch.empty(r.shape, dtype=r.dtype, device=plan.device) for r in plan.results)
        )

    def _written_residual(self, kwargs: dict[str, Any]) -> Tensor | None:
        return kwargs.get("residual") if "!" in self.arguments else None

    def _buffers(self, kwargs: dict[str, Any]) -> list[Tensor]:
        return [kwargs.pop(name) for name in self.results]

    def _plan_out(self, buffers: list[Tensor], *args: Any, **kwargs: Any) -> Plan:
        plan = self.plan(*args, **kwargs)
        for label, buffer, result in zip(self._labels, buffers, plan.results, strict=True):
            _checks.out_tensor(buffer, label, result.shape, result.dtype, plan.device)
        return plan

    def _cpu_out(self, *args: Any, **kwargs: Any) -> None:
        buffers = self._buffers(kwargs)
        self._plan_out(buffers, *args, **kwargs)
        self._check_memory(args, kwargs, buffers)
        with torch.no_grad():
            for buffer, result in zip(buffers, self.reference(*args, **kwargs), strict=True):
                # As bytes: PyTorch lacks copy kernels for float4_e2m1fn_x2.
                as_bytes(buffer).copy_(as_bytes(result))

    def _cuda_out(self, *args: Any, **kwargs: Any) -> None:
        buffers = self._buffers(kwargs)
        if self._direct_in_dispatcher([*self._complete(args, kwargs), *buffers]) is None:
            return
        plan = self._plan_out(buffers, *args, **kwargs)
        self._check_memory(args, kwargs, buffers)
        residual = self._written_residual(kwargs)
        written = buffers if residual is None else [*buffers, residual]
        # Tells autograd of a write that PyTorch does not see.
        torch.autograd.graph.increment_version(written)
        typed = {
            name: buffer if buffer.dtype == result.dtype else buffer.view(result.dtype)
            for name, buffer, result in zip(self.results, buffers, plan.results, strict=True)
        }
        with torch.no_grad():
            self.compiled(args[0].dtype).out(*args, **kwargs, **typed)

    def _fake_out(self, *args: Any, **kwargs: Any) -> None:
        self._plan_out(self._buffers(kwargs), *args, **kwargs)

    def _register(self) -> None:
        implementations = (
            (self.name, self._cpu, self._cuda, self._fake),
            (f"{self.name}.out", self._cpu_out, self._cuda_out, self._fake_out),
        )
        for schema, (name, cpu, cuda, fake) in zip(self.schemas, implementations, strict=True):
            LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
            LIBRARY.impl(name, cpu, "CPU")
            LIBRARY.impl(name, cuda, "CUDA")
            LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
            torch.library.register_fake(f"jitquant::{name}", fake, lib=LIBRARY)
