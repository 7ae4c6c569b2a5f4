"""The device half of a ``.cu``: what is left of it without the functions of the host.

A function at namespace scope belongs to the host if it has neither ``__global__`` nor
``__device__``, is not ``constexpr``, and no macro stands before it that could say otherwise. That
is CUDA's own rule, as far as it can be seen without expanding macros.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<skipped> \s+ | //(?:\\.|[^\n\\])* | /\*.*?\*/ | ^[ \t]*\#(?:\\.|[^\n\\])* )
  | R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
  | "(?:\\.|[^"\\\n])*"
  | '(?:\\.|[^'\\\n])+'
  | \d[\w'.]*
  | [A-Za-z_]\w*
  | ::
  | .
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_DEVICE = {"__global__", "__device__", "constexpr", "consteval"}
_TYPES = {"struct", "class", "union", "enum", "concept"}
_MACRO = re.compile(r"[A-Z][A-Z0-9_]{2,}")
_HOST_MACROS = "JITQUANT_EXPORT"
_HOST_TYPES = {"cudaError_t", "cudaStream_t"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Kernel:
    """A ``__global__`` function; ``name`` is qualified, and ``template`` tells how it is named."""

    name: str
    template: bool
    line: int


@dataclass(frozen=True)
class DeviceHalf:
    """The text without host functions, with every line where it was, and the kernels in it."""

    text: str
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class _Word:
    text: str
    start: int
    end: int


def device_half(text: str) -> DeviceHalf:
    """The device half of a source."""
    words = [
        _Word(match.group(), match.start(), match.end())
        for match in _TOKEN.finditer(text)
        if match["skipped"] is None
    ]
    removed: list[tuple[int, int]] = []
    kernels: list[Kernel] = []
    scopes: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word.text == "}":
            if scopes:
                scopes.pop()
            at += 1
            continue
        if word.text == ";":
            at += 1
            continue
        opened = _opens_scope(words, at)
        if opened is not None:
            name, at = opened
            scopes.append(name)
            continue
        if _MACRO.fullmatch(word.text) and at + 1 < len(words) and words[at + 1].text == "(":
            end = _after_bracket(words, at + 1)
            if word.text.startswith(_HOST_MACROS):
                removed.append((word.start, words[end - 1].end))
            at = end
            continue
        end, head, has_body = _declaration(words, at)
        tokens = [w.text for w in words[at:head]]
        if _is_function(tokens):
            if "__global__" in tokens:
                if has_body:
                    line = text.count("\n", 0, word.start) + 1
                    kernels.append(
                        Kernel(
                            "::".join([*filter(None, scopes), _function_name(tokens)]),
                            tokens[0] == "template",
                            line,
                        )
                    )
            elif not any(t in _DEVICE or _MACRO.fullmatch(t) for t in _before_list(tokens)) and (
                has_body or _HOST_TYPES & set(tokens)
            ):
                removed.append((word.start, words[end - 1].end))
        at = end
    return DeviceHalf(_blank(text, removed), tuple(kernels))


def _opens_scope(words: Sequence[_Word], at: int) -> tuple[str, int] | None:
    """The name of the namespace (or ``""``) that begins at ``at``, and where its contents do."""
    if words[at].text == "inline" and at + 1 < len(words) and words[at + 1].text == "namespace":
        at += 1
    if words[at].text == "namespace":
        end = at + 1
        while end < len(words) and words[end].text not in "{;=":
            end += 1
        if end < len(words) and words[end].text == "{":
            return "".join(w.text for w in words[at + 1 : end]), end + 1
    if (
        words[at].text == "extern"
        and at + 2 < len(words)
        and words[at + 1].text.startswith('"')
        and words[at + 2].text == "{"
    ):
        return "", at + 3
    return None


def _after_bracket(words: Sequence[_Word], at: int) -> int:
    """The position after the bracket that is opened at ``at`` has been closed."""
    depth = 0
    while at < len(words):
        if words[at].text in _CLOSING:
            depth += 1
        elif words[at].text in _CLOSING.values():
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at


def _declaration(words: Sequence[_Word], at: int) -> tuple[int, int, bool]:
    """(end, end of the part before a body, whether there is a body) of what begins at ``at``."""
    start = at
    while at < len(words):
        text = words[at].text
        if text == ";":
            return at + 1, at, False
        if text == "{":
            after = _after_bracket(words, at)
            if _is_function([w.text for w in words[start:at]]):
                return after, at, True
            head = at
            while after < len(words) and words[after].text != ";":
                after = _after_bracket(words, after) if words[after].text in _CLOSING else after + 1
            return min(after + 1, len(words)), head, False
        at = _after_bracket(words, at) if text in "([" else at + 1
    return at, at, False


def _before_list(tokens: Sequence[str]) -> list[str]:
    """The tokens before the parameter list, without template parameters."""
    rest = list(tokens)
    if rest and rest[0] == "template":
        depth = 0
        for index, token in enumerate(rest):
            depth += (token == "<") - (token == ">")
            if index > 0 and depth == 0:
                rest = rest[index + 1 :]
                break
    depth = 0
    for index, token in enumerate(rest):
        depth += (token == "<") - (token == ">")
        if token == "(" and depth <= 0:
            return rest[:index]
    return []


def _is_function(tokens: Sequence[str]) -> bool:
    before = _before_list(tokens)
    if not before or before[0] in ("using", "typedef", "static_assert", "asm"):
        return False
    return not (_TYPES & set(before[:1])) and "=" not in before


def _function_name(tokens: Sequence[str]) -> str:
    """The name before the last list in brackets; attributes of a kernel have such lists too."""
    name, depth = "", 0
    for index, token in enumerate(tokens):
        if token == "(" and depth == 0:
            name = tokens[index - 1]
        depth += (token in _CLOSING) - (token in _CLOSING.values())
    return name


def _blank(text: str, removed: Sequence[tuple[int, int]]) -> str:
    pieces: list[str] = []
    position = 0
    for start, end in removed:
        pieces += [text[position:start], re.sub(r"[^\n]+", "", text[start:end])]
        position = end
    return "".join([*pieces, text[position:]])
