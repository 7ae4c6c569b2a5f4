"""Source files: which are meant, what they contain, which headers they read.

A header is named relative to the directory through which it was found (``inc0/k.cuh`` for the
first include directory, ``src0/k.cuh`` beside the first source, ``lib/jitquant/x.cuh`` for the
project's own), so that the same tree elsewhere has the same names.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CUDA_SUFFIXES = (".cu",)
CXX_SUFFIXES = (".cpp", ".cc", ".cxx")
#: Below this many nanoseconds between a change and its hashing a second change could go unseen.
_RACY_NS = 100_000_000
_RACY_COARSE_NS = 2_100_000_000

#: How a compiler may have written a path, cheapest first.
_SPELLINGS: tuple[Callable[[str], str], ...] = (str, os.path.normpath, os.path.realpath)

Signature = tuple[int, int, int, int]
#: Paths of files and directories with the signatures that they must keep.
Watched = tuple[tuple[str, Signature | None], ...]


def check_name(name: object) -> str:
    """``name`` if it can name a module.

    Raises:
        TypeError: not a string.
        ValueError: not an ASCII identifier.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__} ({name!r}).")
    if not (name.isascii() and name.isidentifier() and len(name) <= 100):
        raise ValueError(
            f"name: {name!r} is not accepted; it becomes a C identifier, so give at most 100 "
            "letters, digits and underscores, not starting with a digit."
        )
    return name


def as_strings(value: object, argument: str, example: str) -> tuple[str, ...]:
    """A sequence of strings or paths as a tuple of strings.

    Raises:
        TypeError: a bare string (a likely slip for a list of one) or anything else.
    """
    if isinstance(value, str | os.PathLike):
        raise TypeError(f"{argument}: expected a list, got {value!r}; give [{example}].")
    if not isinstance(value, Iterable):
        raise TypeError(f"{argument}: expected a list such as [{example}], got {value!r}.")
    result: list[str] = []
    for item in value:
        text = os.fspath(item) if isinstance(item, str | os.PathLike) else item
        if not isinstance(text, str):
            raise TypeError(f"{argument}: {item!r} is {type(item).__name__}; give strings.")
        result.append(text)
    return tuple(result)


def kernel_names(kernels_dir: Path) -> list[str]:
    """The kernels in ``kernels_dir``, by the names that their modules have."""
    return sorted(path.stem for path in kernels_dir.glob("*.cu"))


def resolve_sources(sources: Sequence[object], kernels_dir: Path) -> tuple[str, ...]:
    """Absolute paths of ``sources``, with the binding of each kernel where none was named.

    A bare file name is looked up in ``kernels_dir``; a :class:`~pathlib.Path`, or a string with a
    directory part, is the caller's own file. ``bindings/k.cpp`` beside ``k.cu`` is added unless a
    C++ source was named.

    Raises:
        FileNotFoundError: a source does not exist; near names are listed.
        ValueError: no source, a directory, a name twice, or a suffix that is not compiled.
        TypeError: an item is neither a string nor a path.
    """
    resolved: list[str] = []
    for item in sources:
        if not isinstance(item, str | os.PathLike):
            raise TypeError(f"sources: {item!r} is {type(item).__name__}; give names or paths.")
        text = os.fspath(item)
        bare = isinstance(item, str) and os.path.basename(text) == text
        path = os.path.abspath(os.path.join(kernels_dir, text) if bare else text)
        if os.path.isdir(path):
            raise ValueError(f"sources: {text!r} is a directory; name the file in it.")
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in CUDA_SUFFIXES + CXX_SUFFIXES:
            raise ValueError(
                f"sources: {text!r} has suffix {suffix!r}; "
                f"{', '.join(CUDA_SUFFIXES + CXX_SUFFIXES)} are compiled."
            )
        if not os.path.isfile(path):
            raise FileNotFoundError(_missing(text, path, bare, kernels_dir))
        if path in resolved:
            raise ValueError(f"sources: {text!r} is named twice.")
        resolved.append(path)
    if not resolved:
        raise ValueError("sources: the list is empty; name at least one .cu or .cpp file.")
    if not any(path.lower().endswith(CXX_SUFFIXES) for path in resolved):
        for path in list(resolved):
            directory, base = os.path.split(path)
            binding = os.path.join(directory, "bindings", os.path.splitext(base)[0] + ".cpp")
            if os.path.isfile(binding):
                resolved.append(binding)
    return tuple(resolved)


def _missing(text: str, path: str, bare: bool, kernels_dir: Path) -> str:
    ours = sorted(p.name for p in kernels_dir.glob("*.cu"))
    message = f"sources: {text!r} does not exist (looked at {path})."
    near = difflib.get_close_matches(os.path.basename(text), ours, n=3, cutoff=0.5)
    if near:
        message += f" Near names: {', '.join(near)}."
    elif bare and ours:
        message += f" There are: {', '.join(ours)}."
    if bare:
        message += f" For a file of your own give a path: './{text}' or pathlib.Path({text!r})."
    return message


class FileState(NamedTuple):
    """Digest of a file, with the ``stat`` that tells whether it is still that file.

    ``signature`` is ``None`` while the file is so fresh that another change could leave the same
    signature behind; it then has to be read again.
    """

    digest: str
    signature: Signature | None


def signature_of(status: os.stat_result) -> Signature:
    """What of a ``stat`` changes whenever the file does."""
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def settled(status: os.stat_result, now_ns: int) -> bool:
    """Whether a change after ``now_ns`` would be seen in the signature of ``status``."""
    latest = max(status.st_mtime_ns, status.st_ctime_ns)
    window = _RACY_COARSE_NS if latest % 1_000_000_000 == 0 else _RACY_NS
    return latest < now_ns - window


class FileHasher:
    """SHA-256 of files, remembered as long as their ``stat`` stays the same."""

    def __init__(self) -> None:
        self._known: dict[str, FileState] = {}

    def state(self, path: str) -> FileState | None:
        """The state of ``path``, or ``None`` where there is no such regular file."""
        try:
            status = os.stat(path)
            known = self._known.get(path)
            if known is not None and known.signature == signature_of(status):
                return known
            now = time.time_ns()
            with open(path, "rb") as stream:
                before = os.fstat(stream.fileno())
                digest = hashlib.sha256(stream.read()).hexdigest()
        except OSError:
            self._known.pop(path, None)
            return None
        fresh = FileState(digest, signature_of(before) if settled(before, now) else None)
        self._known[path] = fresh
        return fresh


class Roots:
    """The places that files are named after.

    ``labels`` maps a label to a directory of the caller or the project, in search order; files
    under ``versioned`` directories (the compilers', CUDA's, torch's, Python's) are represented by
    the versions of those instead of their contents.
    """

    def __init__(self, labels: Mapping[str, str], versioned: Mapping[str, tuple[str, ...]]) -> None:
        self.labels = labels
        self.versioned = versioned
        pairs = [
            (directory.rstrip(os.sep) + os.sep, label) for label, directory in self.labels.items()
        ]
        pairs += [
            (directory.rstrip(os.sep) + os.sep, "=" + family)
            for family, directories in self.versioned.items()
            for spelling in directories
            for directory in {spelling, os.path.realpath(spelling)}
        ]
        # The longest prefix names a file; for equal ones a label of the caller does.
        self._sorted = sorted(pairs, key=lambda p: (-len(p[0]), p[1].startswith("=")))

    def name(self, path: str) -> tuple[str, str]:
        """(label, rest) of ``path``; the label of a versioned family starts with ``=``."""
        for spell in _SPELLINGS:
            spelled = spell(path)
            for prefix, label in self._sorted:
                if spelled.startswith(prefix):
                    return label, spelled[len(prefix) :]
        first = next(iter(self.labels))
        return first, os.path.relpath(path, self.labels[first])

    def path(self, name: str) -> str:
        """The path that ``label/rest`` stands for, in these roots; ``""`` for an unknown label."""
        label, _, rest = name.partition("/")
        directory = self.labels.get(label)
        return "" if directory is None else os.path.join(directory, rest)


def parse_depfile(text: str) -> list[str]:
    """Prerequisites listed in a make-style depfile, in order, without duplicates."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    _, _, listed = text.partition(": ")
    names: dict[str, None] = {}
    for token in re.findall(r"(?:\\.|[^\s\\])+", listed):
        name = re.sub(r"\\([\s#:\\])", r"\1", token).replace("$$", "$")
        names.setdefault(name)
    return list(names)


def visible_names(roots: Roots, rests: Iterable[str], header_names: Iterable[str]) -> list[str]:
    """Which of the names that were included exist in which of the caller's directories.

    A header that appears in a directory searched earlier shadows the one that was read. So the
    set of places where an included name is found belongs to what a build depends on. Directories
    are listed once; only those that hold the first component of a name are looked at further.
    """
    by_first: dict[str, list[str]] = {}
    for rest in rests:
        by_first.setdefault(rest.split("/", 1)[0], []).append(rest)
    found: list[str] = []
    for place in search_places(roots, header_names):
        directory = roots.path(place)
        try:
            listed = os.listdir(directory)
        except OSError:
            continue
        for first in by_first.keys() & set(listed):
            for rest in by_first[first]:
                if rest == first or os.path.exists(os.path.join(directory, rest)):
                    found.append(f"{place}{rest}")
    return sorted(found)


def search_places(roots: Roots, header_names: Iterable[str]) -> list[str]:
    """The caller's directories that an ``#include`` can be found in, as names ending in ``/``."""
    places = {f"{label}/": None for label in roots.labels}
    for name in header_names:
        places.setdefault(name.rpartition("/")[0] + "/")
    return list(places)


# Compiled where they are used: a module that is built already needs none of them.
INCLUDE = rb"(?m)^[ \t]*#[ \t]*include[ \t]*([\"<])([^\">\n]+)[\">]"
_TORCH = r"(?:torch|ATen|c10|caffe2|pybind11)/|Python\.h"
_STABLE = r"torch/(?:csrc/stable|csrc/inductor/aoti_torch/c|headeronly)/"
_PYTHON = (
    r"torch/(?:extension|python)\.h|torch/csrc/(?!stable|inductor)|pybind11/"
    r"|Python\.h"
)


def exports_something(path: str) -> bool:
    """Whether the source at ``path`` names JITQUANT_EXPORT, maybe in a comment only."""
    if not path.lower().endswith(CUDA_SUFFIXES):
        return False
    with open(path, "rb") as stream:
        return re.search(rb"\bJITQUANT_EXPORT\b", stream.read()) is not None


class IncludeScan(NamedTuple):
    """Which families of headers a source includes, directly or through the caller's headers."""

    torch: bool
    python: bool


def scan_includes(path: str, directories: Sequence[str]) -> IncludeScan:
    """Read the ``#include`` lines of ``path`` and of the caller's headers that it includes."""
    torch = python = False
    queue, seen = [path], {path}
    while queue:
        current = queue.pop()
        try:
            with open(current, "rb") as stream:
                text = stream.read()
        except OSError:
            continue
        for quote, raw in re.findall(INCLUDE, text):
            name = raw.decode(errors="replace")
            if re.match(_TORCH, name) and not re.match(_STABLE, name):
                torch = True
                python = python or bool(re.match(_PYTHON, name))
                continue
            beside = [os.path.dirname(current)] if quote == b'"' else []
            for directory in [*beside, *directories]:
                candidate = os.path.join(directory, name)
                if candidate not in seen and os.path.isfile(candidate):
                    seen.add(candidate)
                    queue.append(candidate)
                    break
    return IncludeScan(torch, python)
