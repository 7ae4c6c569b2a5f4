"""Translates the argument checks and plans of `jitquant.ops` to C++, so that they are written once.

Checks are plain functions: ``if`` something ``raise`` an error with this text. What they may use is
what `_Function` knows; anything else is an error. A check returns nothing. A plan returns the
shapes and dtypes of results. It is translated twice: its checks, and what it returns, each without
what only the other is computed from.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from jitquant import formats
from jitquant.numerics import recipes
from jitquant.ops import _checks, _checks_fp8, _checks_memory, linear

DTYPES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.bfloat16: "BFloat16",
    torch.float8_e4m3fn: "Float8_e4m3fn",
    torch.float8_e5m2: "Float8_e5m2",
    torch.float8_e8m0fnu: "Float8_e8m0fnu",
    torch.float4_e2m1fn_x2: "Float4_e2m1fn_x2",
}

#: Of a parameter, by its annotation.
TYPES = {
    "Tensor": "const View&",
    "Tensor | None": "const View*",
    "int": "int64_t",
    "int | None": "std::optional<int64_t>",
    "float": "double",
    "float | None": "std::optional<double>",
    "str": "std::string_view",
    "bool": "bool",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "std::optional<ScalarType>",
    "tuple[int, ...]": "const Shape&",
}

#: Functions with a version in bindings/common.h, and the types of what these return.
_WRITTEN: dict[Any, tuple[str, str]] = {
    _checks.row_count: ("count_of", "int"),
    _checks_memory.own_elements: ("check_own_elements", ""),
    formats.ceil_div: ("ceil_div", "int"),
    formats.fp4_shapes: ("fp4", "fp4_shapes"),
    formats.fp4_scales_shape: ("fp4_scales_shape", "tuple[int, ...]"),
    formats.scales_shape: ("scales_shape", "tuple[int, ...]"),
    linear._evenly_strided: ("evenly_strided", "bool"),
    recipes.hadamard_size: ("hadamard_size", "int"),
}

#: Devices are checked for all tensors at once, before anything else; bounds where they are rounded;
#: there are no sparse tensors in C++.
_ELSEWHERE = (
    _checks.same_device,
    _checks.strided,
    _checks._without_grad,
    _checks_fp8.bounds,
)


class Value(NamedTuple):
    """An expression in C++, and its type as in an annotation."""

    code: str
    type: str

    @property
    def optional(self) -> bool:
        return self.type.endswith("| None")


@dataclass(frozen=True)
class Known:
    """What has a value already as the code is written."""

    value: Any


@dataclass(frozen=True)
class Record:
    """A value with parts, which have the names of its attributes in Python."""

    parts: Mapping[str, Any]


Term = Value | Known | Record

_RESULTS = ("Result", "tuple[Result, ...]", "tuple[Result, Result]", "Plan")
"""What functions return that say what results are: these have no version in C++."""


class Translated:
    """The functions that checks call, by name: a declaration and a definition of each."""

    def __init__(self) -> None:
        self.declarations: dict[str, str] = {}
        self.definitions: dict[str, str] = {}
        self._functions: dict[str, Any] = {}

    def name_of(self, function: Callable[..., Any]) -> str:
        """The function's name in C++; translates it if it is new."""
        name = function.__name__.lstrip("_")
        if self._functions.setdefault(name, function) is not function:
            raise ValueError(f"{name}: expected one function of this name, got two")
        if name not in self.definitions:
            parameters = inspect.signature(function).parameters.values()
            listed = ", ".join(f"{TYPES[p.annotation]} {p.name}" for p in parameters)
            self.declarations[name] = f"void {name}({listed});\n"
            self.definitions[name] = ""  # its place, before those that it calls
            known: dict[str, Term] = {p.name: Value(p.name, p.annotation) for p in parameters}
            body = _Function(self, function, known).body("  ")
            self.definitions[name] = f"void {name}({listed}) {{\n{body}}}\n"
        return name

    def checks(self, function: Callable[..., Any], known: Mapping[str, Term]) -> str:
        """The statements of a function; a parameter that is not known has its default."""
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: Known(p.default) for p in parameters if p.default is not p.empty}
        return _Function(self, function, {**defaults, **known}).body("    ")

    def results(
        self, function: Callable[..., Any], known: Mapping[str, Term]
    ) -> list[tuple[str, str]]:
        """The dtype and the shape of each result of a plan."""
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: Known(p.default) for p in parameters if p.default is not p.empty}
        return [
            (_passed(r.parts["dtype"]), _passed(r.parts["shape"], "tuple"))
            for r in _Function(self, function, {**defaults, **known}).returned()
        ]

    def value(self, function: Callable[..., Any], known: Mapping[str, Term]) -> Value | Known:
        """What a function returns that is one expression."""
        return _Function(self, function, dict(known)).value()

    def call(self, function: Callable[..., Any], known: Mapping[str, Term]) -> str:
        """A statement that calls a function by the names of its parameters."""
        parameters = inspect.signature(function).parameters.values()
        arguments = [_passed(known[p.name], p.annotation) for p in parameters]
        return f"    checks::{self.name_of(function)}({', '.join(arguments)});\n"


def _literal(value: Any) -> str:
    """A value of Python in C++."""
    if isinstance(value, torch.dtype):
        return f"ScalarType::{DTYPES[value]}"
    if value == ():
        return "Shape()"
    if isinstance(value, tuple):
        return f"Shape().and_then({', '.join(map(_literal, value))})"
    if isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 2**31 else f"int64_t{{{value}}}"
    raise ValueError(f"expected a value that C++ has too, got {value!r}")


def _passed(value: Term, as_: str = "") -> str:
    """A value's code where one of a type is wanted; what is optional stays it if that is."""
    assert not isinstance(value, Record)
    if isinstance(value, Known):
        if value.value is None:
            return "nullptr" if as_.startswith("Tensor") else "std::nullopt"
        return _literal(value.value)
    if as_.endswith("| None"):
        return f"&{value.code}" if as_.startswith("Tensor") and not value.optional else value.code
    if value.type == "shape" and as_.startswith("tuple"):
        return f"Shape({value.code})"
    return f"*{value.code}" if value.optional else value.code


def _member(value: Value) -> str:
    """What comes before the name of a tensor's member."""
    if value.code.startswith("*"):
        return f"{value.code[1:]}->"
    return f"{value.code}{'->' if value.optional else '.'}"


def _index(of: str, at: Value | Known) -> str:
    """An index of a dimension, from the end if it is negative."""
    if isinstance(at, Value):
        return f"{at.code} < 0 ? {of}dim() + {at.code} : {at.code}"
    return f"{of}dim() - {-at.value}" if at.value < 0 else str(at.value)


def _bare(code: str) -> str:
    """Code without parentheses around all of it."""
    depths = list(itertools.accumulate((c == "(") - (c == ")") for c in code))
    return code[1:-1] if depths.index(0) == len(code) - 1 and code[0] == "(" else code


def _equal(one: str, other: str, *, negated: bool) -> str:
    """Whether two values are equal, or different."""
    if other.startswith('"'):
        return f"{'!' if negated else ''}is({one}, {other})"
    return f"{one} {'!=' if negated else '=='} {other}"


def _is_new(known: Term | None) -> bool:
    if isinstance(known, Known):
        return isinstance(known.value, tuple) and any(isinstance(v, Record) for v in known.value)
    return known is not None


def _item(node: ast.expr, at: int) -> ast.expr:
    return ast.Subscript(node, ast.Constant(at), ast.Load())


def _names(node: ast.AST | None) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if node else set()


_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SYMBOLS = ["+", "-", "*", "/", "%", "==", "!=", "==", "!=", "<", "<=", ">", ">=", "&&", "||"]
_OPERATORS = dict(zip((*_ARITHMETIC, *_COMPARISONS, ast.And, ast.Or), _SYMBOLS, strict=True))


@dataclass
class _Function:
    """Translates a function: ``known`` has its arguments, and values that it computes."""

    translated: Translated
    function: Callable[..., Any]
    known: dict[str, Term]

    def body(self, indent: str) -> str:
        """Its statements."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            return ""  # a lambda, which raises nothing
        statements = tree.body[1:] if ast.get_docstring(tree) else tree.body
        return self._block(self._needed(statements, set()), indent)

    def _last(self) -> tuple[list[ast.stmt], ast.expr]:
        """The statements before its last one, and what that returns."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]
        *statements, end = tree.body if isinstance(tree, ast.FunctionDef) else [tree]
        if not isinstance(end, ast.Return) or end.value is None:
            raise self._unknown(tree)
        return statements, end.value

    def value(self) -> Value | Known:
        """What it returns, if that is one expression."""
        return self._expression(self._last()[1])

    def returned(self) -> list[Record]:
        """What results are, as a plan or what it calls returns them."""
        statements, end = self._last()
        live, kept = _names(end), []
        for statement in reversed(statements):
            if isinstance(statement, ast.Assign) and _names(statement.targets[0]) & live:
                live |= _names(statement.value)
                kept.append(statement)
        for statement in kept[::-1]:
            self._keep(statement.targets[0], statement.value)
        return self._results(end)

    def _keep(self, target: ast.expr, node: ast.expr) -> None:
        """Keeps an expression in place of a name that it is assigned to."""
        if isinstance(target, ast.Tuple):
            for i, name in enumerate(target.elts):
                part = node.elts[i] if isinstance(node, ast.Tuple) else _item(node, i)
                self._keep(name, part)
            return
        assert isinstance(target, ast.Name)
        shown = node.body if isinstance(node, ast.IfExp) else node
        described = isinstance(shown, ast.Call) and self._describes(shown)
        known = Known(tuple(self._results(node))) if described else self._expression(node)
        self.known[target.id] = known

    def _describes(self, node: ast.Call) -> bool:
        """Whether a call says what results are."""
        if self._is_new(node.func):
            return False
        called = self._now(node.func)
        if called.__name__ in ("Result", "Plan"):
            return True
        return getattr(called, "__annotations__", {}).get("return") in _RESULTS

    def _described(self, node: ast.Call) -> Known:
        """What a call says of results, as a tuple of records."""
        called = self._now(node.func)
        if called.__name__ == "Plan":
            return Known(tuple(self._results(node.args[1])))
        if called.__name__ == "Result":
            shape, dtype = map(self._expression, node.args)
            return Known((Record({"shape": shape, "dtype": dtype}),))
        signature = inspect.signature(called)
        given = signature.bind(*node.args, **{k.arg or "": k.value for k in node.keywords})
        known: dict[str, Term] = {}
        for name, p in signature.parameters.items():
            if p.kind is p.VAR_POSITIONAL:
                sizes = ast.Tuple([*given.arguments.get(name, ())], ast.Load())
                known[name] = self._expression(sizes)
            elif name in given.arguments:
                known[name] = self._expression(given.arguments[name])
            else:
                known[name] = Known(p.default)
        return Known(tuple(_Function(self.translated, called, known).returned()))

    def _results(self, node: ast.expr) -> list[Record]:
        if isinstance(node, ast.Tuple):
            return [r for element in node.elts for r in self._results(element)]
        if isinstance(node, ast.Starred):
            return self._results(node.value)
        if isinstance(node, ast.Name):
            known = self.known[node.id]
            assert isinstance(known, Known)
            return list(known.value)
        if isinstance(node, ast.IfExp):
            test = self._expression(node.test)
            if isinstance(test, Known):
                return self._results(node.body if test.value else node.orelse)
            condition = _bare(self._condition(test))
            pairs = zip(self._results(node.body), self._results(node.orelse), strict=True)
            return [self._either(condition, one, other) for one, other in pairs]
        if isinstance(node, ast.Call) and self._describes(node):
            return list(self._described(node).value)
        raise self._unknown(node)

    def _either(self, condition: str, one: Record, other: Record) -> Record:
        parts: dict[str, Term] = {}
        for name, kind in (("shape", "tuple[int, ...]"), ("dtype", "torch.dtype")):
            codes = [_passed(r.parts[name], kind[:5]) for r in (one, other)]
            code = codes[0] if codes[0] == codes[1] else f"({condition} ? {' : '.join(codes)})"
            parts[name] = Value(code, kind)
        return Record(parts)

    def _needed(self, statements: Sequence[ast.stmt], live: set[str]) -> list[ast.stmt]:
        """Those that raise, and those that these need; adds what they use to ``live``."""
        kept: list[ast.stmt] = []
        for statement in reversed(statements):
            if isinstance(statement, ast.If):
                branches = [set(live), set(live)]
                body = self._needed(statement.body, branches[0])
                orelse = self._needed(statement.orelse, branches[1])
                if body or orelse:
                    live |= branches[0] | branches[1] | _names(statement.test)
                    kept.append(ast.If(statement.test, body, orelse))
                continue
            if isinstance(statement, ast.Assign):
                used = bool(_names(statement.targets[0]) & live)
            else:
                used = not isinstance(statement, ast.Return) or statement.value is None
            if used:
                live |= _names(statement)
                kept.append(statement)
            elif any(map(self._is_check, ast.walk(statement))):
                raise self._unknown(statement)
        return kept[::-1]

    def _is_check(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or self._is_new(node.func):
            return False
        return getattr(self._now(node.func), "__annotations__", {}).get("return") == "None"

    def _is_new(self, node: ast.expr) -> bool:
        """Whether a call of the function decides on an expression."""
        return any(_is_new(self.known.get(name)) for name in _names(node))

    def _now(self, node: ast.expr) -> Any:
        """The value of an expression on which a call of the function has no influence."""
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "", "eval")
        names = {name: v.value for name, v in self.known.items() if isinstance(v, Known)}
        return eval(code, {**self.function.__globals__, **names})

    def _block(self, statements: Sequence[ast.stmt], indent: str) -> str:
        return "".join(self._statement(s, indent) for s in statements)

    def _statement(self, node: ast.stmt, indent: str) -> str:
        if isinstance(node, ast.If):
            return self._if(node, indent)
        if isinstance(node, ast.Expr):
            called = self._expression(node.value)
            return f"{indent}{called.code};\n" if isinstance(called, Value) else ""
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            return f"{indent}fail_with({{{', '.join(self._parts(node.exc.args[0]))}}});\n"
        if isinstance(node, ast.Return):
            return f"{indent}return;\n"
        if isinstance(node, ast.Assign):
            return self._assign(node.targets[0], node.value, indent)
        raise self._unknown(node)

    def _if(self, node: ast.If, indent: str) -> str:
        test = self._expression(node.test)
        if isinstance(test, Known):
            return self._block(node.body if test.value else node.orelse, indent)
        before, parts = self.known, []
        for branch in (node.body, node.orelse):
            self.known = dict(before)
            parts.append(self._block(branch, indent + "  "))
        self.known = before
        if not any(parts):
            return ""
        text = f"{indent}if ({_bare(self._condition(test))}) {{\n{parts[0]}{indent}}}"
        return f"{text} else {{\n{parts[1]}{indent}}}\n" if parts[1] else f"{text}\n"

    def _assign(self, target: ast.expr, node: ast.expr, indent: str) -> str:
        if isinstance(target, ast.Tuple):
            if isinstance(node, ast.Tuple):
                pairs = zip(target.elts, node.elts, strict=True)
                return "".join(self._assign(t, n, indent) for t, n in pairs)
            # The shape of a tensor with so many dimensions.
            parts = [_item(node, i) for i in range(len(target.elts))]
            return self._assign(target, ast.Tuple(parts), indent)
        assert isinstance(target, ast.Name)
        if target.id in self.known:
            raise self._unknown(node)  # a second value, which may be of a branch
        value = self._expression(node)
        if not isinstance(value, Value) or re.fullmatch(r"[\w.>*-]+(size\(\d\))?", value.code):
            self.known[target.id] = value
            return ""
        self.known[target.id] = Value(target.id, value.type)
        return f"{indent}const auto {target.id} = {value.code};\n"

    def _expression(self, node: ast.expr) -> Value | Known:
        if not self._is_new(node):
            found = self._now(node)
            return found if isinstance(found, Value) else Known(found)
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._unknown(node)
        made: Value | Known = method(node)
        return made

    def _name(self, node: ast.Name) -> Value | Known:
        known = self.known[node.id]
        if isinstance(known, Record):
            raise self._unknown(node)
        return known

    def _attribute(self, node: ast.Attribute) -> Value | Known:
        record = self.known.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(record, Known) and isinstance(record.value, tuple):
            (record,) = record.value  # one result
        if isinstance(record, Record):
            part: Value | Known = record.parts[node.attr]
            return part
        base = self._expression(node.value)
        if isinstance(base, Value) and base.type.startswith("Tensor"):
            if node.attr == "shape":
                return Value(_passed(base), "shape")
            if node.attr == "dtype":
                return Value(f"{_member(base)}dtype", "torch.dtype")
            if node.attr == "layout":
                return Known(torch.strided)
        raise self._unknown(node)

    def _call(self, node: ast.Call) -> Value | Known:
        if self._is_new(node.func):
            return self._method(node)
        called = self._now(node.func)
        if called in _ELSEWHERE:
            return Known(None)
        if called is tuple:
            return self._expression(node.args[0])
        if called is int:
            return Value(f"int64_t{{{self._code(node.args[0])}}}", "int")
        if called is _checks.shape_text:
            return Value(self._code(node.args[0]), "shape")
        signature = inspect.signature(called)
        given = signature.bind(*node.args, **{k.arg or "": k.value for k in node.keywords})
        passed = ", ".join(
            _passed(self._expression(given.arguments[name]), p.annotation)
            if name in given.arguments
            else _passed(Known(p.default), p.annotation)
            for name, p in signature.parameters.items()
        )
        if called in _WRITTEN:
            name, type_ = _WRITTEN[called]
            return Value(f"{name}({passed})", type_)
        return Value(f"checks::{self.translated.name_of(called)}({passed})", "")

    def _method(self, node: ast.Call) -> Value:
        assert isinstance(node.func, ast.Attribute)
        base, name = self._expression(node.func.value), node.func.attr
        assert isinstance(base, Value)
        member = _member(base)
        if name in ("dim", "numel", "is_contiguous"):
            return Value(f"{member}{name}()", "bool" if name == "is_contiguous" else "int")
        if name == "stride" and not node.args:
            return Value(_passed(base), "strides")
        if name == "stride":
            return Value(f"{member}stride({_index(member, self._expression(node.args[0]))})", "int")
        raise self._unknown(node)

    def _subscript(self, node: ast.Subscript) -> Value:
        base, index = self._expression(node.value), node.slice
        assert isinstance(base, Value)
        if base.type == "fp4_shapes" and isinstance(index, ast.Constant):
            wanted = "scales" if index.value else "codes"
            return Value(f"{wanted}_of_{base.code}", "tuple[int, ...]")
        member = _member(base)
        if not isinstance(index, ast.Slice):
            return Value(f"{member}size({_index(member, self._expression(index))})", "int")
        if index.lower is not None or index.upper is None:
            raise self._unknown(node)
        last = _index(member, self._expression(index.upper))
        if base.type == "shape":
            return Value(f"Shape({base.code}, {last})", "tuple[int, ...]")
        return Value(f"{_passed(base, 'tuple')}.first({last})", "tuple[int, ...]")

    def _tuple(self, node: ast.Tuple) -> Value:
        code, rest = "Shape()", list(node.elts)
        first = rest[0]
        if isinstance(first, ast.Starred):
            code = _passed(self._expression(first.value), "tuple")
            rest.pop(0)
        if len(rest) > 3:
            raise self._unknown(node)  # a Shape has no room for them
        sizes = ", ".join(_bare(self._code(size)) for size in rest)
        return Value(f"{code}.and_then({sizes})", "tuple[int, ...]")

    def _binop(self, node: ast.BinOp) -> Value:
        operator = _OPERATORS[type(node.op)]
        return Value(f"({self._code(node.left)} {operator} {self._code(node.right)})", "int")

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        if not isinstance(node.op, ast.Not):
            raise self._unknown(node)
        return Value(f"!({_bare(self._condition(self._expression(node.operand)))})", "bool")

    def _boolop(self, node: ast.BoolOp) -> Value | Known:
        ends = isinstance(node.op, ast.Or)
        values = []
        for part in map(self._expression, node.values):
            if isinstance(part, Value):
                values.append(self._condition(part))
            elif bool(part.value) == ends:
                return Known(ends)
        return Value(f"({f' {_OPERATORS[type(node.op)]} '.join(values)})", "bool")

    def _compare(self, node: ast.Compare) -> Value | Known:
        operands = [node.left, *node.comparators]
        pairs = list(map(self._pair, operands, node.ops, operands[1:]))
        if len(pairs) == 1:
            return pairs[0]
        return Value(f"({' && '.join(map(self._condition, pairs))})", "bool")

    def _pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Value | Known:
        one = self._expression(left)
        if isinstance(op, (ast.In, ast.NotIn)):
            negated = isinstance(op, ast.NotIn)
            if isinstance(right, ast.Tuple) and self._is_new(right):
                others = [self._code(e) for e in right.elts]
            else:
                others = [_literal(v) for v in self._now(right)]
            each = [_equal(_passed(one), other, negated=negated) for other in others]
            return Value(f"({(' && ' if negated else ' || ').join(each)})", "bool")
        other, operator = self._expression(right), _OPERATORS[type(op)]
        if isinstance(one, Known) and isinstance(other, Known):
            return Known((one.value == other.value) == (operator == "=="))
        if isinstance(op, (ast.Is, ast.IsNot)):
            assert isinstance(one, Value)
            if not one.optional:
                return Known(operator == "!=")
            return Value(f"{one.code} {operator} {_passed(other, one.type)}", "bool")
        if isinstance(one, Value) and one.type == "shape":
            negation = "!" if operator == "!=" else ""
            return Value(f"{negation}{_passed(other, 'tuple')}.is_of({one.code})", "bool")
        codes = [
            f"({_passed(v)})" if isinstance(v, Value) and v.type == "bool" else _passed(v)
            for v in (one, other)
        ]
        if operator in ("==", "!="):
            return Value(_equal(codes[0], codes[1], negated=operator == "!="), "bool")
        return Value(f"{codes[0]} {operator} {codes[1]}", "bool")

    def _ifexp(self, node: ast.IfExp) -> Value | Known:
        test = self._expression(node.test)
        if isinstance(test, Known):
            return self._expression(node.body if test.value else node.orelse)
        one, other = self._expression(node.body), self._expression(node.orelse)
        types = [v.type if isinstance(v, Value) else "str" for v in (one, other)]
        code = f"({self._condition(test)} ? {_passed(one)} : {_passed(other)})"
        return Value(code, types[types[0] == "str"].removesuffix(" | None"))

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        return Value(f"text_of({{{', '.join(self._parts(node))}}})", "text")

    def _parts(self, node: ast.expr) -> list[str]:
        """A message as arguments of ``fail``."""
        parts: list[str] = []
        for value in node.values if isinstance(node, ast.JoinedStr) else [node]:
            for part in self._part(value):
                if parts and parts[-1].startswith('"') and part.startswith('"'):
                    part = json.dumps(json.loads(parts.pop()) + json.loads(part))
                parts.append(part)
        return parts

    def _part(self, node: ast.expr) -> list[str]:
        is_repr = isinstance(node, ast.FormattedValue) and node.conversion == ord("r")
        value = self._expression(node.value if isinstance(node, ast.FormattedValue) else node)
        if isinstance(value, Known):
            return [json.dumps(repr(value.value) if is_repr else str(value.value))]
        code = _passed(value)
        if is_repr and value.type == "str":
            return [json.dumps("'"), code, json.dumps("'")]
        texts = {"shape": "shape", "tuple[int, ...]": "shape", "strides": "strides"}
        kind = texts.get(value.type, "dtype" if value.type.startswith("torch.dtype") else "")
        return [f"{kind}_text({code})" if kind else code]

    def _code(self, node: ast.expr) -> str:
        return _passed(self._expression(node))

    def _condition(self, value: Value | Known) -> str:
        return (
            f"{_passed(value)}{' != 0' if isinstance(value, Value) and value.type == 'int' else ''}"
        )

    def _unknown(self, node: ast.AST) -> TypeError:
        return TypeError(
            f"{self.function.__name__}: expected what can be translated, got {ast.unparse(node)}"
        )
