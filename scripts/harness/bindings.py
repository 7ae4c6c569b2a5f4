"""Writes the function of a binding from the declaration of an op and that of its launcher.

Each parameter of a launcher has a type and a name. An argument or a result of the op with that name
becomes it, by the function of ``kernels_cu/bindings`` that returns the type. A struct of several
arguments is made by the function that returns it and has their names as parameters. What neither
is, is workspace: a ``float*`` whose size a function of the ``.cu`` returns.

A function for ``launch_row_gsa(const Matrix& x, float divisor, float* gsa, cudaStream_t stream)``:

- ``x`` is an argument, a tensor: ``matrix_of(args.x, "x")``.
- ``divisor`` is a number.
- ``gsa`` is a result, with the shape and the dtype of the op's plan.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

BINDINGS = Path(__file__).parents[2] / "kernels_cu" / "bindings"

STREAM = "cudaStream_t"

_FUNCTION = re.compile(r"^(?:static |inline )*([\w:<>]+[*&]?) (\w+)\(([^(){};]*)\)(?: \{|;)", re.M)


class Parameter(NamedTuple):
    """A parameter of a function in C++; the type is without ``const`` and ``&`` at its ends."""

    type: str
    name: str


class Function(NamedTuple):
    """A function in C++, and the header that has it."""

    returns: str
    name: str
    parameters: tuple[Parameter, ...]
    header: str = ""


def parse(text: str, header: str = "") -> list[Function]:
    """The functions of a text that are not members."""
    found = []
    for returns, name, listed in _FUNCTION.findall(text):
        parameters = [_parameter(p) for p in re.split(r",\s*", listed) if p.strip()]
        found.append(Function(returns, name, tuple(parameters), header))
    return found


def _parameter(text: str) -> Parameter:
    type_, _, name = " ".join(text.split("=")[0].split()).rpartition(" ")
    return Parameter(_value_type(type_), name)


def _value_type(type_: str) -> str:
    """``T`` of ``const T&``."""
    return re.sub(r"^const (.+)&$", r"\1", type_)


@cache
def conversions() -> tuple[Function, ...]:
    """The functions of the bindings' headers."""
    return tuple(
        function
        for path in sorted(BINDINGS.glob("*.h"))
        for function in parse(path.read_text(), path.name)
    )


class _MissingError(Exception):
    """Nothing gives a parameter."""


@dataclass
class Binding:
    """What the function of an op is made of."""

    function: str
    struct: str
    arguments: Sequence[Parameter]
    results: Sequence[str]
    rows_apart: bool
    functions: Sequence[Function]  # of the .cu
    headers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._types = {a.name: a.type for a in self.arguments}
        self._locals: dict[tuple[str, str], tuple[str, bool]] = {}
        self._before: list[str] = []  # what may refuse an argument
        self._after: list[str] = []  # what needs the memory of results
        self._workspaces: list[str] = []
        self._resolving: list[Parameter] = []

    @property
    def launcher(self) -> Function:
        """The launcher with the longest name that this function's begins with."""
        fits = [
            f
            for f in self.functions
            if f.name.startswith("launch_")
            and f"{self.function}_".startswith(f"{f.name.removeprefix('launch_')}_")
        ]
        if not fits:
            raise ValueError(f"{self.function}: expected a function launch_{self.function}")
        return max(fits, key=lambda f: len(f.name))

    def text(self) -> str:
        """The function."""
        passed = [self._passed(p) for p in self.launcher.parameters]
        like = f"args.{self.arguments[0].name}"
        given = f"const declared::{self.struct}& args"
        results = "".join(f", Result& {name}_result" for name in self.results)
        made = [
            f"const Memory {name} = {name}_result."
            f"{'rows' if self.rows_apart and name == 'data' else 'memory'}"
            f'("{name}", planned[{i}], {like});'
            for i, name in enumerate(self.results)
        ]
        launched = f"{self.launcher.name}({', '.join(passed)})"
        lines = [
            *self._before,
            "const auto planned = args.plan();",
            *made,
            *self._after,
            f"const Launching at(call, {like});",
            *self._workspaces,
            f'check_launch({launched}, "{self.function}");',
        ]
        body = "".join(f"{_wrapped(line, 2)}\n" for line in lines)
        head = f"void {self.function}(Call& call, {given}{results}) {{"
        return f"{_wrapped(head, 0)}\n{body}}}\n"

    def _passed(self, parameter: Parameter) -> str:
        """A launcher's argument."""
        if parameter.type == STREAM:
            return "at.stream"
        try:
            return self._resolved(parameter)[0]
        except _MissingError:
            return self._workspace(parameter)

    def _workspace(self, parameter: Parameter) -> str:
        name = parameter.name
        sizes = [f for f in self.functions if f.name == f"{self._stem}_{name}"]
        if parameter.type != "float*" or len(sizes) != 1:
            raise ValueError(
                f"{self.launcher.name}: expected {name} ({parameter.type}) to be an argument or a "
                f"result of {self.function}, to be made of some by a function of "
                f"kernels_cu/bindings, or to be a float* whose size {self._stem}_{name}() returns"
            )
        size = f"{sizes[0].name}({', '.join(self._passed(p) for p in sizes[0].parameters)})"
        self._workspaces.append(f"const Workspace {name}({size}, args.{self.arguments[0].name});")
        return f"{name}.floats()"

    @property
    def _stem(self) -> str:
        return self.launcher.name.removeprefix("launch_")

    def _resolved(self, parameter: Parameter) -> tuple[str, bool]:
        """An expression for a parameter, and whether it needs the memory of results."""
        type_, name = parameter
        if (type_, name) in self._locals:
            return self._locals[type_, name]
        simple = self._simple(type_, name)
        if simple is not None:
            return simple
        if parameter in self._resolving:
            raise _MissingError
        self._resolving.append(parameter)
        try:
            return self._local(type_, name)
        finally:
            self._resolving.pop()

    def _local(self, type_: str, name: str) -> tuple[str, bool]:
        """A local variable for a parameter."""
        pointed = re.fullmatch(r"const (\w+)\*", type_)
        if pointed:
            optional, late = self._resolved(Parameter(f"std::optional<{pointed[1]}>", name))
            return f"pointer_to({optional})", late
        code, late = self._made(type_, name)
        taken = {local for local, _ in self._locals.values()} | {*self.results, "planned", "at"}
        local = name if name not in taken else f"{name}_"
        (self._after if late else self._before).append(f"const {type_} {local} = {code};")
        self._locals[type_, name] = local, late
        return self._locals[type_, name]

    def _simple(self, type_: str, name: str) -> tuple[str, bool] | None:
        """What needs no function."""
        pointer = re.fullmatch(r"(const )?(\w+)\*", type_)
        given = self._types.get(name)
        if given is not None:
            if given == type_:
                return f"args.{name}", False
            if (given, type_) in (("double", "float"), ("int64_t", "int")):
                return f"static_cast<{type_}>(args.{name})", False
            if pointer and pointer[1] and given == "View":
                return f"static_cast<{type_}>(args.{name}.data)", False
            if pointer and pointer[1] and given == "std::optional<View>" and _plain(pointer[2]):
                return f"data_of<{pointer[2]}>(args.{name})", False
        elif name in self.results:
            if type_ == "Memory":
                return name, True
            if pointer and not pointer[1]:
                value = f"{name}.data"
                return value if type_ == "void*" else f"static_cast<{type_}>({value})", True
        return None

    def _made(self, type_: str, name: str) -> tuple[str, bool]:
        """The call of a function that returns what is wanted."""
        of_one = [f for f in conversions() if f.returns == type_ and self._is_of(f, name)]
        of_all = [f for f in self._candidates(type_, name) if self._can_call(f)]
        fits = [f for f in of_all if f.name == f"{name}_of"] or [*of_one, *of_all]
        if not fits:
            raise _MissingError
        most = max(_count(f) for f in fits)
        best, *others = dict.fromkeys(f for f in fits if _count(f) == most)
        if others:
            names = " or ".join(f.name for f in (best, *others))
            raise ValueError(f"{self.function}: {name} could be made by {names}")
        self.headers.add(best.header)
        if best in of_one:
            label = f', "{name}"' if len(best.parameters) == 2 else ""
            return f"{best.name}(args.{name}{label})", False
        made = [self._resolved(self._own(p, name)) for p in best.parameters]
        return f"{best.name}({', '.join(code for code, _ in made)})", any(late for _, late in made)

    def _is_of(self, function: Function, name: str) -> bool:
        """Whether a function converts an argument, whatever it calls it."""
        types = [p.type for p in function.parameters]
        given = self._types.get(name)
        return given is not None and types in ([given], [given, "const char*"])

    def _candidates(self, type_: str, name: str) -> Iterator[Function]:
        for function in conversions():
            if function.returns != type_ or "const char*" in [p.type for p in function.parameters]:
                continue
            if type_ not in _NUMBERS or function.name == f"{name}_of":
                yield function

    def _can_call(self, function: Function) -> bool:
        """Whether all parameters can be given; nothing is written yet."""
        kept = dict(self._locals), list(self._before), list(self._after), set(self.headers)
        try:
            for parameter in function.parameters:
                self._resolved(parameter)
        except _MissingError:
            return False
        finally:
            self._locals, self._before, self._after, self.headers = kept
        return True

    def _own(self, parameter: Parameter, of: str) -> Parameter:
        """What ``out_t`` is made of is ``data_t``, if there is one, where it would be ``data``."""
        other = f"{parameter.name}_t"
        if of.endswith("_t") and (other in self.results or other in self._types):
            return Parameter(parameter.type, other)
        return parameter


def _wrapped(line: str, indent: int) -> str:
    """A statement in lines of at most 100 characters."""
    wrap = textwrap.TextWrapper(
        100,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrap.fill(line)


def _count(function: Function) -> int:
    """How many arguments and results a function takes."""
    return sum(p.type != "const char*" for p in function.parameters)


_NUMBERS = ("bool", "int", "int64_t", "float")


def _plain(type_: str) -> bool:
    """Whether it is an element of a tensor."""
    return type_ in ("void", "float", "uint8_t", "int8_t", "int32_t", "int64_t")
