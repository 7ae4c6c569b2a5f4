"""Writes ``kernels_cu/bindings/declared``: what the bindings need of the ops' declarations.

A header a module, with a struct for each op of it: the schema's text, the arguments as a binding
takes them, and the checks of names and numbers, in the words that Python has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from jitquant.ops import ALL_OPS, Op

BINDINGS = Path(__file__).parents[2] / "kernels_cu" / "bindings"

_TYPES = {
    "Tensor": "View",
    "int": "int64_t",
    "float": "double",
    "str": "std::string_view",
    "bool": "bool",
    "ScalarType": "ScalarType",
}


def headers() -> dict[Path, str]:
    """The text of each header, by its path."""
    modules: dict[str, list[Op]] = {}
    for op in ALL_OPS:
        modules.setdefault(op.module, []).append(op)
    return {BINDINGS / "declared" / f"{module}.h": _header(ops) for module, ops in modules.items()}


def _header(ops: list[Op]) -> str:
    structs = "\n".join(map(_struct, ops))
    return (
        "// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.\n"
        "// clang-format off\n"
        "#pragma once\n\n"
        '#include "../function.h"\n\n'
        f"namespace jitquant::declared {{\n\n{structs}\n}}  // namespace jitquant::declared\n"
    )


def _struct(op: Op) -> str:
    schema = torch._C.parse_schema(f"f({op.arguments}) -> ()")
    fields, inputs = [], []
    for argument in schema.arguments:
        kind = str(argument.real_type)
        optional = kind.startswith("Optional[")
        written = argument.alias_info is not None and argument.alias_info.is_write
        name = kind.removeprefix("Optional[").removesuffix("]")
        type_ = "InPlace" if written else _TYPES[name]
        type_ = f"std::optional<{type_}>" if optional else type_
        inputs.append(type_)
        fields.append(f"  {f'const {type_}&' if name == 'Tensor' else type_} {argument.name};\n")
    checks = [
        f"    check_name({_quoted(name)}, {name}, {{{', '.join(map(_quoted, accepted))}}});\n"
        for name, accepted in op.choices.items()
    ]
    checks += [
        f"    check_number({_quoted(number.shown or name)}, {name}, {number.least.hex()}, "
        f"{number.most.hex()},\n                 {_quoted(number.accepted)});\n"
        for name, number in op.numbers.items()
    ]
    results = ", ".join(map(_quoted, op.results))
    arguments = op.arguments.replace('"', "'")
    return (
        f"struct {_camel(op.function)} {{\n"
        f"  static constexpr const char* kName = {_quoted(op.function)};\n"
        f"  static constexpr const char* kArguments =\n      {_quoted(arguments)};\n"
        f"  static constexpr std::initializer_list<const char*> kResults = {{{results}}};\n"
        f"  using Inputs = std::tuple<{', '.join(inputs)}>;\n\n"
        f"{''.join(fields)}\n"
        f"  void check() const {{\n{''.join(checks)}  }}\n"
        "};\n"
    )


def _quoted(text: str) -> str:
    return json.dumps(text)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def write(texts: Mapping[Path, str]) -> list[Path]:
    """Writes those that are not as they should be, and deletes others; returns which these were."""
    folder = BINDINGS / "declared"
    folder.mkdir(exist_ok=True)
    changed = [p for p in folder.iterdir() if p not in texts]
    for path in changed:
        path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    return changed


if __name__ == "__main__":
    for path in write(headers()):
        print(path.relative_to(BINDINGS.parents[1]), file=sys.stderr)
