"""What the text of a file includes and asks for, before a compiler reads it."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

# Between two words may be comments. To find what is in a comment itself too does no harm. What
# begins with a literal is found several times as fast. A comment ends at its first "*/", or
# a pattern that does not match would try each way to divide comments that follow one another.
_GAP = rb"(?:[ \t\f\v]|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
_NAME = rb"(?:\"([^\"\n]+)\"|<([^>\n]+)>)"
_SPLICE = re.compile(rb"\\[ \t\f\v]*\r?\n")


def _pattern(*parts: bytes) -> re.Pattern[bytes]:
    return re.compile(_GAP.join(parts), re.DOTALL)


_INCLUDED = _pattern(rb"#", rb"(include_next|include|import|embed)\b", _NAME + rb"?")
#: A line that includes what a macro names, of which a compiler alone can tell whether it is read.
INCLUDES_MACRO = _pattern(rb"\n", rb"#", rb"include\b", rb"[A-Za-z_]")
_ASKED = _pattern(rb"__has_(?:include|embed)(_next)?", rb"\(", _NAME)
_ASKED_BY_MACRO = _pattern(rb"__has_(?:include|embed)(?:_next)?", rb"\(", rb"(\w+)")
#: The definition of a macro with parameters, whose names are no macros.
_FUNCTION = _pattern(rb"#", rb"define\b", rb"\w+\([^\n]*")
#: The same where another macro stands for the parenthesis, but not in the text of a comment.
_ASKED_IN_PARTS = _pattern(
    rb"#", rb"(?:(?:el)?if|define)\b[^\n]*__has_(?:include|embed)(?:_next)?", rb"([A-Za-z_]\w*)"
)
#: Where a macro may stand for __has_include, with the name of a header or of a macro: a condition,
#: or the definition of a macro for one, with its name and parameters.
_CONDITION = _pattern(rb"#", rb"(?:el)?if\b([^\n]*\([^\n]*)")
_DEFINITION = _pattern(rb"#", rb"define\b", rb"(\w+)(\([^)\n]*\))?([^\n]*\([^\n]*)")
_ARGUMENT = _pattern(rb"\(", rb"()" + _NAME)
_CALL = _pattern(rb"\b(\w+)", rb"\(", rb"(?:(\w+)|" + _NAME + rb")")
_MACRO = _pattern(rb"#", rb"define\b", rb"(\w+)", _NAME)
_OTHER_MACRO = _pattern(rb"#", rb"define\b", rb"(\w+)[ \t]+(?![\"<\s])")
#: A macro that stands for __has_include.
_ASKING = _pattern(rb"#", rb"define\b", rb"(\w+)[^\n]*__has_(?:include|embed)")
#: The way to a directory above, and a part of one: in a macro, or before what joins it to others.
UP = re.compile(rb"(?<!\.)\.\.(?:/\.\.)*(?!\.)")
UP_IN_PARTS = re.compile(rb"define\b[^\n\"]*(?<!\.)\.\.(?!\.)|(?<!\.)\.\.[\s),]")
#: A line in which a name may be computed, and the beginning of an absolute path in it.
COMPUTES = re.compile(rb"^[^\w\n]*(?:define|if|elif)\b.*", re.MULTILINE)
ABSOLUTE = re.compile(rb"[\s(,\"<](/[^\s\"<>(),/*][^\s\"<>(),]*)")
#: Other ways to write what directives consist of.
_SPELLINGS = ((b"%:", b"#"), (b"??=", b"#"), (b"??/", b"\\"), (b"\0", b" "))


class Include(NamedTuple):
    """A name that a file includes or asks for; "" if a macro has it."""

    name: str
    quoted: bool
    asked: bool
    following: bool


class Text(NamedTuple):
    """What a file includes, which macros it asks for, and macros that are names of headers.

    ``asks`` are all words that may be such macros, ``asks_itself`` those that are. ``calls`` are
    macros in conditions and definitions with such words, ``named`` those in definitions with the
    name of a header, ``uses`` are macros with those that they call, ``asking`` macros that ask,
    ``others`` all macros that are something else than the name of a header.
    """

    includes: list[Include]
    asks: set[bytes]
    asks_itself: set[bytes]
    macros: list[tuple[bytes, Include]]
    calls: set[tuple[bytes, bytes]]
    named: list[tuple[bytes, Include]]
    uses: set[tuple[bytes, bytes]]
    asking: set[bytes]
    others: set[bytes]


def content(file: str) -> bytes:
    """What is in a file; nothing if it cannot be read."""
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        return stream.read()
    return b""


def plain(text: bytes) -> bytes:
    """``text`` in the usual spelling, and without the ends of lines that go on."""
    for spelling, usual in _SPELLINGS:
        if spelling in text:
            text = text.replace(spelling, usual)
    return _SPLICE.sub(b"", text)


def parse(text: bytes) -> Text:
    """What ``text`` includes and asks for."""
    text = plain(text)

    def include(quoted: bytes, bracketed: bytes, *, asked: bool, following: bool) -> Include:
        return Include(os.fsdecode(quoted or bracketed), not bracketed, asked, following)

    includes = [
        include(*names, asked=False, following=how == b"include_next")
        for how, *names in _INCLUDED.findall(text)
    ]
    asked, asks = _ASKED.findall(text), set(_ASKED_BY_MACRO.findall(text))
    asks_itself = set(_ASKED_BY_MACRO.findall(_FUNCTION.sub(b"", text))) if asks else set()
    asking: set[bytes] = set()
    if b"__has_" in text:
        asks_itself.update(_ASKED_IN_PARTS.findall(text))
        asking.update(_ASKING.findall(text))
    calls: set[tuple[bytes, bytes]] = set()
    named: list[tuple[bytes, Include]] = []
    uses: set[tuple[bytes, bytes]] = set()
    for condition in _CONDITION.findall(text):
        asked += _ARGUMENT.findall(condition)
        calls.update((called, word) for called, word, *_ in _CALL.findall(condition) if word)
    asks.update(word for _, word in calls)
    for macro, parameters, body in _DEFINITION.findall(text):
        own = re.findall(rb"\w+", parameters)
        for called, word, *names in _CALL.findall(body):
            uses.add((macro, called))
            if not word:
                named.append((called, include(*names, asked=True, following=False)))
            elif word not in own:
                calls.add((called, word))
    includes += [include(*names, asked=True, following=bool(after)) for after, *names in asked]
    macros = [
        (name, include(*names, asked=True, following=True)) for name, *names in _MACRO.findall(text)
    ]
    others = set(_OTHER_MACRO.findall(text))
    return Text(includes, asks, asks_itself, macros, calls, named, uses, asking, others)
