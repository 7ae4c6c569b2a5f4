"""What a source may include, as far as its text tells before a compiler reads it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .directives import INCLUDES_MACRO, Text, parse, plain

# Compiled where they are used: a module that is built already needs none of them.
_INCLUDE = rb"(?m)^[ \t]*#[ \t]*include[ \t]*([\"<])([^\">\n]+)[\">]"
_TORCH = r"(?:torch|ATen|c10|caffe2|pybind11)/|Python\.h"
_STABLE = r"torch/(?:csrc/stable|csrc/inductor/aoti_torch/c|headeronly)/"
_DEFINES = r"\0\s*(?:-D|--define-macro)[=\s\0]*(\w+)=([^\0]*)"
_FILES = r"\0\s*(?:--pre-include|-include|--use-pch)"


class IncludeScan(NamedTuple):
    """Whether a source includes headers of torch, itself or by the caller's headers.

    ``files`` are the source and the caller's headers that were found so.
    """

    torch: bool
    files: tuple[str, ...]


def scan_includes(path: str, directories: Sequence[str]) -> IncludeScan:
    """Read the ``#include`` lines of ``path`` and of the caller's headers that it includes."""
    torch = False

    def includes(current: str, text: bytes) -> Iterator[str]:
        nonlocal torch
        for quote, raw in re.findall(_INCLUDE, text):
            name = os.fsdecode(raw)
            if re.match(_TORCH, name) and not re.match(_STABLE, name):
                torch = True
                continue
            beside = [os.path.dirname(current)] if quote == b'"' else []
            paths = (os.path.join(directory, name) for directory in (*beside, *directories))
            for found in itertools.islice(filter(os.path.isfile, paths), 1):
                yield os.path.realpath(found) if os.pardir in name else found

    files = _reached(path, includes)
    return IncludeScan(torch, tuple(sorted(files)))


def may_be_read(source: str, directories: Sequence[str], flags: Sequence[str]) -> dict[str, bytes]:
    """The files that ``source`` may include, in whichever order directories are searched.

    With their contents.

    Raises:
        ValueError: only a compiler can tell what one of them includes or asks for.
    """
    words = "\0".join(["", *flags])
    if re.search(_FILES, words):
        raise ValueError(
            "cuda_flags: backend='nvrtc' sees no edits of a file that a flag includes."
        )
    defined = re.findall(_DEFINES, words)
    given = parse("".join(f"#define {name} {text}\n" for name, text in defined).encode())
    texts: dict[str, Text] = {}

    def includes(path: str, content: bytes) -> Iterator[str]:
        text = texts[path] = parse(content)
        macros = (include for _, include in (*text.macros, *given.macros))
        for include in {*text.includes, *given.includes, *macros}:
            for directory in (os.path.dirname(path), *directories):
                yield os.path.join(directory, include.name)

    contents = _reached(source, includes)
    known = {name for text in (given, *texts.values()) for name, _ in text.macros}
    for path, text in texts.items():
        if text.asks_itself - known or INCLUDES_MACRO.search(b"\n" + plain(contents[path])):
            raise ValueError(
                f"backend='nvrtc': {path} includes what a macro names, or asks for it; name a file."
            )
    return contents


def _reached(source: str, includes: Callable[[str, bytes], Iterable[str]]) -> dict[str, bytes]:
    """The files that ``includes`` leads to from ``source``, with their contents."""
    contents: dict[str, bytes] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        # A file by one spelling, since a circle of "../" has no end; a link may be beside others.
        key = (os.path.realpath(path), os.path.realpath(os.path.dirname(path)))
        if key in seen or not os.path.isfile(path):
            continue
        seen.add(key)
        try:
            with open(path, "rb") as stream:
                contents[path] = stream.read()
        except OSError:
            continue
        waiting += includes(path, contents[path])
    return contents
