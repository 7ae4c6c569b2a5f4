"""``JITQUANT_EXPORT(launcher, "schema")`` in a ``.cu``: finding it, and the binding made from it.

The macro (``jitquant/export.h``) checks the launcher's parameters against the schema where the
``.cu`` is compiled, and defines a C function that calls it. Here the schema is read by torch's own
parser, and a C++ source is generated that registers the operator and calls that function.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import CompileError, Diagnostic
from .sources import exports_something

_MACRO = "JITQUANT_EXPORT"
#: As many as the macro looks at.
_MOST_ARGUMENTS = 24
_TOKEN = r"""(?xsm)
    (?P<skipped> \s+ | //(?:\\.|[^\n\\])* | /\*.*?\*/ | ^[ \t]*\#(?:\\.|[^\n\\])* )
  | R"(?P<delimiter>[^()\\\s]{0,16})\((?P<raw>.*?)\)(?P=delimiter)"
  | "(?P<string>(?:\\.|[^"\\\n])*)"
  | '(?:\\.|[^'\\\n])+'
  | \d[\w'.]*
  | (?P<word>[A-Za-z_]\w*)
  | .
"""
_ESCAPE = r"(?s)\\(?:(\n)|(.))"
_CONTROLS = {"n": "\n", "t": "\t", "0": "\0"}
#: What each type of a schema is in the generated function.
_TYPES = {
    "Tensor": "const Tensor&",
    "Optional[Tensor]": "const std::optional<Tensor>&",
    "int": "int64_t",
    "Optional[int]": "std::optional<int64_t>",
    "float": "double",
    "Optional[float]": "std::optional<double>",
    "bool": "bool",
    "Optional[bool]": "std::optional<bool>",
    "str": "const std::string&",
    "Optional[str]": "const std::optional<std::string>&",
}
_ACCEPTED = "Tensor, int, float, bool and str, each also with '?'"


class Argument(NamedTuple):
    """One argument of a schema; ``kind`` is a key of the table of types."""

    name: str
    kind: str
    written: bool


class Export(NamedTuple):
    """One ``JITQUANT_EXPORT``: the launcher, the schema and the line number."""

    launcher: str
    schema: str
    line: int
    op: str
    arguments: tuple[Argument, ...]


class Binding(NamedTuple):
    """The binding of one source, which is generated from its exports."""

    source: str
    exports: tuple[Export, ...]

    @property
    def file_name(self) -> str:
        """What the generated file is called."""
        return f"{os.path.splitext(os.path.basename(self.source))[0]}.export.cpp"

    def text(self, shown: str) -> str:
        """The C++ source; messages about it name ``shown`` and the line of the macro."""
        place = shown.replace("\\", "\\\\").replace('"', '\\"')
        lines = [
            f"// Generated from {os.path.basename(self.source)}: each function wraps one",
            f"// {_MACRO}, whose line the compiler is told.",
            '#include "export.h"',
            "",
            'extern "C" {',
        ]
        # Weak: a macro within an #if that is not compiled has no function, and gives no operator.
        lines += [
            f'__attribute__((weak, visibility("hidden"))) cudaError_t {_thunk(e)}('
            "const jitquant::exported::Argument*, cudaStream_t, jitquant::Refusal*);"
            for e in self.exports
        ]
        lines += ["}", "", "namespace {", "", "using torch::stable::Tensor;", ""]
        for index, export in enumerate(self.exports):
            types = [_TYPES[a.kind] for a in export.arguments]
            declared = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types))
            added = " ".join(
                f'call.add("{a.name}", a{i}{_written(a)});' for i, a in enumerate(export.arguments)
            )
            lines += [
                f'#line {export.line} "{place}"',
                f"void call_{index}({declared}) {{ "
                f'jitquant::exported::Call<{len(types)}> call("{export.op}"); {added} '
                f"call.run(&{_thunk(export)}); }}",
                f'#line {export.line} "{place}"',
                f"void trace_{index}({', '.join(types)}) {{}}",
            ]
        lines += ["", "}  // namespace", ""]
        lines += self._registration(
            "FRAGMENT(TORCH_EXTENSION_NAME, m)",
            place,
            [f"m.def({_literal(export.schema)})" for export in self.exports],
        )
        # On a CPU the same function says which tensor is on the wrong device. It returns nothing,
        # so tracing it has nothing to work out.
        for backend, function in (("CUDA", "call"), ("CPU", "call"), ("Meta", "trace")):
            lines += self._registration(
                f"IMPL(TORCH_EXTENSION_NAME, {backend}, m)",
                place,
                [
                    f'm.impl("{_full_name(export)}", TORCH_BOX(&{function}_{index}))'
                    for index, export in enumerate(self.exports)
                ],
            )
        return "\n".join(lines)

    def _registration(self, head: str, place: str, statements: list[str]) -> list[str]:
        lines = [f"STABLE_TORCH_LIBRARY_{head} {{"]
        for export, statement in zip(self.exports, statements, strict=True):
            lines += [
                f'#line {export.line} "{place}"',
                f"  if (&{_thunk(export)} != nullptr) {statement};",
            ]
        return [*lines, "}", ""]


def _thunk(export: Export) -> str:
    return f"jitquant_export_{export.launcher}"


def _written(argument: Argument) -> str:
    return f", {str(argument.written).lower()}" if "Tensor" in argument.kind else ""


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def generator_file() -> str:
    """The file whose contents decide what is generated."""
    return os.path.abspath(__file__)


def find_binding(module: str, path: str) -> Binding | None:
    """The binding to generate for the source at ``path``; ``None`` if it exports nothing."""
    if not exports_something(path):
        return None
    text = Path(path).read_bytes().decode(errors="replace")
    exports: list[Export] = []
    for place, launcher, schema in _macros(module, path, text):
        export = _understood(place, launcher, schema)
        for other in exports:
            if other.launcher == launcher:
                raise place.error(f"{launcher} is exported on line {other.line} already")
            if _full_name(other) == _full_name(export):
                raise place.error(
                    f"operator {_full_name(export)!r} is defined on line {other.line} already; "
                    f"give one of them another name, or an overload name ('{export.op}.out(...)')"
                )
        exports.append(export)
    return Binding(path, tuple(exports)) if exports else None


class _Place(NamedTuple):
    module: str
    path: str
    line: int
    column: int

    def error(self, message: str) -> CompileError:
        return unusable_export(self.module, self.path, message, self.line, self.column)


def unusable_export(
    module: str, path: str, message: str, line: int = 0, column: int | None = None
) -> CompileError:
    """The error for a JITQUANT_EXPORT in ``path`` that gives no function."""
    from ..diagnostics import excerpt

    found = Diagnostic(path, line, column, "error", f"{_MACRO}: {message}")
    shown = excerpt(found, Path(path).parent) if line else ""
    place = f"{path}:{line}" if line else path
    text = f"building {module!r} failed: {_MACRO}.\n\n{place}: error: {found.message}"
    return CompileError(f"{text}\n{shown}" if shown else text, diagnostics=[found])


def _full_name(export: Export) -> str:
    return export.schema.partition("(")[0].strip()


def _macros(module: str, path: str, text: str) -> Iterator[tuple[_Place, str, str]]:
    """(place, launcher, schema) of each macro outside of comments and directives."""
    tokens = [m for m in re.finditer(_TOKEN, text) if m["skipped"] is None]
    index = 0
    while index < len(tokens):
        start = tokens[index]
        index += 1
        if start["word"] != _MACRO:
            continue
        line = text.count("\n", 0, start.start()) + 1
        column = start.start() - (text.rfind("\n", 0, start.start()) + 1) + 1
        place = _Place(module, path, line, column)
        usage = f'write {_MACRO}(launcher, "name(Tensor x, *, Tensor(a!) out) -> ()")'
        rest = tokens[index:]
        if len(rest) < 3 or rest[0].group() != "(" or rest[1]["word"] is None:
            raise place.error(f"the name of a launcher has to follow; {usage}")
        if rest[2].group() == ":":
            raise place.error(
                f"{rest[1].group()}:: is a qualified name; write the macro in the launcher's own "
                "namespace, with its plain name"
            )
        if rest[2].group() != ",":
            raise place.error(f"a comma has to follow {rest[1].group()}; {usage}")
        pieces: list[str] = []
        position = 3
        while position < len(rest) and (
            rest[position]["string"] is not None or rest[position]["raw"] is not None
        ):
            pieces.append(_value(rest[position]))
            position += 1
        if not pieces or position >= len(rest) or rest[position].group() != ")":
            raise place.error(
                "the schema has to be a string literal (or several in a row), which the loader can "
                f"read without compiling; {usage}"
            )
        yield place, rest[1].group(), "".join(pieces)
        index += position + 1


def _value(token: re.Match[str]) -> str:
    if token["raw"] is not None:
        return str(token["raw"])
    return re.sub(
        _ESCAPE, lambda m: "" if m[1] else _CONTROLS.get(m[2], m[2]), str(token["string"])
    )


def _understood(place: _Place, launcher: str, schema: str) -> Export:
    import torch

    try:
        parsed = torch._C.parse_schema(schema)
    except RuntimeError as error:
        said = str(error).partition("\nException raised")[0].strip()
        raise place.error(f"the schema is not valid: {said}") from None
    name = schema.partition("(")[0].strip()
    if "::" in name:
        raise place.error(
            f"operator {name!r} has a namespace; leave it out: the loader gives each build its own"
        )
    if parsed.returns:
        raise place.error(
            f"{name!r} returns something, and a launcher allocates nothing. Let it write to "
            "arguments such as 'Tensor(a!) out', and return '()'"
        )
    if len(parsed.arguments) > _MOST_ARGUMENTS:
        raise place.error(
            f"{name!r} has {len(parsed.arguments)} arguments; at most {_MOST_ARGUMENTS} are "
            "supported"
        )
    arguments: list[Argument] = []
    for argument in parsed.arguments:
        kind = str(argument.type)
        if kind not in _TYPES:
            raise place.error(
                f"argument {argument.name!r} has type {kind}; supported are {_ACCEPTED}. For "
                "anything else write a binding by hand (bindings/<name>.cpp beside the .cu)"
            )
        alias = argument.alias_info
        arguments.append(Argument(argument.name, kind, bool(alias and alias.is_write)))
    if not any("Tensor" in a.kind for a in arguments):
        raise place.error(
            f"{name!r} has no Tensor argument: the device and the stream of the launch are those "
            "of a tensor"
        )
    return Export(launcher, schema, place.line, name.partition(".")[0], tuple(arguments))
