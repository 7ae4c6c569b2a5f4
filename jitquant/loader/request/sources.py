"""Source files: how names are resolved, their contents, and the headers that they include.

A header is named relative to the directory where it was found (``inc0/k.cuh`` for the first
include directory, ``src0/k.cuh`` next to the first source, ``lib/fp8/k.cuh`` for the project's
own, ``=cuda/...`` for the toolkit's), so that the same tree elsewhere has the same names.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..machine.memo import Signature
from ..report import shorten

CUDA_SUFFIXES = (".cu",)
CXX_SUFFIXES = (".cpp", ".cc", ".cxx")
SUFFIXES = CUDA_SUFFIXES + CXX_SUFFIXES
#: How a compiler may have written a path, cheapest first.
_SPELLINGS: tuple[Callable[[str], str], ...] = (str, os.path.normpath, os.path.realpath)

#: Begins the name of a file of the project.
PROJECT = "lib"
#: Begins the name of a caller's file that is in no known directory.
ABSOLUTE = "abs"

#: Paths of files and directories with the signatures that they must keep; ``None`` means to look
#: closer each time.
Signatures = tuple[tuple[str, Signature | None], ...]


def is_cuda(path: str) -> bool:
    """Whether nvcc compiles a source."""
    return path.endswith(CUDA_SUFFIXES)


@dataclass(frozen=True)
class Source:
    """The text of a source instead of a file: for a notebook, or for generated kernels.

    It is stored as a file in the cache, which compiler messages and debuggers refer to. Its
    includes are searched in ``include_dirs``, not in the working directory.

    Attributes:
        text: CUDA or C++.
        suffix: ``".cu"``, or ``".cpp"``, ``".cc"`` or ``".cxx"`` for the C++ compiler.

    Raises:
        TypeError: the text is not a string.
        ValueError: the suffix is none of these, or the text cannot be written as UTF-8.
    """

    text: str
    suffix: str = ".cu"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Source: the text is {type(self.text).__name__}; give a string.")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Source: character {error.start} of the text, {self.text[error.start]!r}, cannot "
                "be written as UTF-8; leave it out."
            ) from None
        if self.suffix not in SUFFIXES:
            raise ValueError(
                f"Source: suffix={self.suffix!r} is not compiled; {', '.join(SUFFIXES)} are."
            )

    def __repr__(self) -> str:
        first = self.text.strip().partition("\n")[0]
        return f"<Source of {len(self.text)} characters: {first[:40]!r}>"


class Watched(NamedTuple):
    """Files that must not change: of the caller and the project, and of compilers and toolkits."""

    own: Signatures
    installed: Signatures = ()


def check_name(name: object) -> str:
    """``name`` if it can name a module."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__} ({name!r}).")
    if not (name.isascii() and name.isidentifier() and len(name) <= 100):
        raise ValueError(
            "name: expected a C identifier (at most 100 letters, digits and underscores, not "
            f"starting with a digit), got {name!r}."
        )
    return name


def as_strings(value: object, argument: str, example: str) -> tuple[str, ...]:
    """A sequence of strings or paths as a tuple of strings."""
    return tuple(map(os.fspath, as_items(value, argument, example)))


def as_items(
    value: object, argument: str, example: str, kinds: tuple[type, ...] = (str, os.PathLike)
) -> tuple[Any, ...]:
    """A sequence of objects of these kinds as a tuple, with paths of every class as `Path`."""
    if isinstance(value, kinds):
        example = "Source(...)" if isinstance(value, Source) else example
        raise TypeError(f"{argument}: expected a list, got {value!r}; give [{example}].")
    if isinstance(value, Iterator):  # the look for a loaded module has used it up
        raise TypeError(
            f"{argument}: expected a list such as [{example}], got {value!r}, which gives its "
            "items only once; give list(...) of it."
        )
    if not isinstance(value, Iterable):
        raise TypeError(f"{argument}: expected a list such as [{example}], got {value!r}.")
    items = tuple(value)
    for item in items:
        if not isinstance(item, kinds):
            raise TypeError(f"{argument}: {item!r} is {type(item).__name__}; give strings.")
        if isinstance(item, str) and "\0" in item:
            raise ValueError(f"{argument}: {item!r} contains a null character; leave it out.")
    return tuple(Path(os.fsdecode(i)) if isinstance(i, os.PathLike) else i for i in items)


def kernel_files(kernels_dir: Path) -> dict[str, Path]:
    """The kernels in ``kernels_dir`` and its folders, by module name."""
    found = {path.stem: path for path in sorted(kernels_dir.glob("*/*.cu"), reverse=True)}
    found |= {path.stem: path for path in kernels_dir.glob("*.cu")}
    return dict(sorted(found.items()))


def kernel_names(kernels_dir: Path) -> list[str]:
    """The names of :func:`kernel_files`, in order."""
    return list(kernel_files(kernels_dir))


def _of_project(name: str, kernels_dir: Path) -> str:
    """The path of the project's file ``name``, in ``kernels_dir`` or one of its folders."""
    path = os.path.join(kernels_dir, name)
    if os.path.isfile(path):
        return path
    with contextlib.suppress(OSError):
        for folder in sorted(os.listdir(kernels_dir)):
            inside = os.path.join(kernels_dir, folder, name)
            if os.path.isfile(inside):
                return inside
    return path


def absolute(path: str, argument: str) -> str:
    """``path`` as it is from every directory.

    Raises:
        ValueError: it goes up from a link, so it names another file for the system than as text.
    """
    plain = os.path.abspath(path)
    if os.pardir in path.split(os.sep) and os.path.realpath(path) != os.path.realpath(plain):
        raise ValueError(
            f"{argument}: {path!r} goes up from a link, so it leads to {os.path.realpath(path)}, "
            f"and not to {plain}. Give the path of the one that is meant."
        )
    return plain


def resolve_sources(sources: Sequence[Any], kernels_dir: Path) -> tuple[str, ...]:
    """Absolute paths of ``sources``, with the binding of each kernel unless one is given.

    A bare file name is looked up in ``kernels_dir`` and its folders; a :class:`~pathlib.Path`, or a
    string with a directory part, is the caller's own file. ``bindings/k.cpp`` next to ``k.cu`` is
    added unless a C++ source is given; for a kernel in a folder of ``kernels_dir``, also the one
    in ``kernels_dir`` itself.

    Raises:
        FileNotFoundError: a source does not exist; similar names are listed.
        ValueError: no source, a directory or a pipe, a duplicate name, an unknown suffix, or a path
            that goes up from a link.
    """
    resolved: list[str] = []
    for item in sources:
        text = os.fspath(item)
        bare = isinstance(item, str) and os.path.basename(text) == text
        path = absolute(_of_project(text, kernels_dir) if bare else text, "sources")
        if os.path.isdir(path):
            raise ValueError(f"sources: {text!r} is a directory; name the file in it.")
        suffix = os.path.splitext(path)[1]
        if suffix not in SUFFIXES:
            raise ValueError(
                f"sources: {text!r} has suffix {suffix!r}; {', '.join(SUFFIXES)} are compiled."
            )
        if not os.path.isfile(path):
            if os.path.exists(path):
                raise ValueError(f"sources: {text!r} is a pipe or a device; give a regular file.")
            raise FileNotFoundError(_missing(text, path, bare, kernels_dir))
        if path in resolved:
            raise ValueError(f"sources: {text!r} is named twice.")
        resolved.append(path)
    if not resolved:
        raise ValueError("sources: the list is empty; name at least one .cu or .cpp file.")
    if not any(path.endswith(CXX_SUFFIXES) for path in resolved):
        for path in list(resolved):
            binding = _binding_of(path, os.path.abspath(kernels_dir))
            if binding is not None:
                resolved.append(binding)
    return tuple(resolved)


def _binding_of(source: str, kernels_dir: str) -> str | None:
    directory, base = os.path.split(source)
    places = [directory]
    if os.path.dirname(directory) == kernels_dir:
        places.append(kernels_dir)
    for place in places:
        binding = os.path.join(place, "bindings", os.path.splitext(base)[0] + ".cpp")
        if os.path.isfile(binding):
            return binding
    return None


def near_names(name: str, known: Sequence[str]) -> str:
    """Which of ``known`` may be meant by ``name``, for a message."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Near names: {', '.join(near)}." if near else f"There are: {shorten(known, 40)}."


def _missing(text: str, path: str, bare: bool, kernels_dir: Path) -> str:
    known: list[str] = []
    if bare:
        known = [f"{name}.cu" for name in kernel_names(kernels_dir)]
    else:
        with contextlib.suppress(OSError):
            beside = sorted(os.listdir(os.path.dirname(path)))
            known = [file for file in beside if file.endswith(SUFFIXES)]
    message = f"sources: {text!r} does not exist (looked at {path})."
    if known:
        message += f" {near_names(os.path.basename(text), known)}"
    if bare:
        message += f" For a file of your own give a path: './{text}' or pathlib.Path({text!r})."
    return message


class Roots:
    """The directories that file names are relative to: the same tree elsewhere has the same names.

    ``labels`` maps a label to a directory: of the caller or of the project, or, if the label begins
    with ``=``, of an installation (CUDA, torch, Python). Any other file is named by its path; one
    that no compiler finds by itself, as a file of the caller, by ``abs`` and its path.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        spelled = [(directory, label) for label, directory in labels.items()]
        real = [(os.path.realpath(directory), label) for directory, label in spelled]
        pairs = [(directory.rstrip(os.sep) + os.sep, label) for directory, label in spelled + real]
        # The longest prefix names a file; of equal ones that which is spelled so, where a link to
        # the directory has a label too.
        self._sorted = sorted(pairs, key=lambda pair: -len(pair[0]))

    def layout(self) -> list[str]:
        """Which of the caller's directories are others too, or are inside them.

        A file there has the name of one, and says nothing of a build where these are apart. That
        the project is inside a directory of the caller, in an environment, does not count.
        """
        return sorted(
            {
                f"{label} = {around}/{path[len(outer) :]}"
                for path, label in self._sorted
                for outer, around in self._sorted
                if label != around and is_own(label) and path.startswith(outer)
                if label != PROJECT or path == outer
            }
        )

    def name(self, path: str) -> str:
        """``label/rest`` of ``path``, or its absolute path."""
        for spell in _SPELLINGS:
            spelled = spell(path)
            for prefix, label in self._sorted:
                if spelled.startswith(prefix):
                    name = f"{label}/{spelled[len(prefix) :]}"
                    if "/../" in name and is_own(name):
                        plain = os.path.normpath(spelled)
                        if os.path.realpath(plain) == os.path.realpath(path):
                            shorter = self.name(plain)
                            return name if shorter == plain else shorter
                    return name
        return path

    def place(self, directory: str) -> str:
        """The name of a directory, which ends in ``/``: that of a file in it begins so."""
        return self.name(os.path.join(directory, "_"))[:-1]

    def path(self, name: str) -> str:
        """The path of a recorded name, in these roots; ``""`` for an unknown label."""
        if name.startswith(os.sep):
            return name
        label, _, rest = name.partition("/")
        directory = os.sep if label == ABSOLUTE else self.labels.get(label)
        return "" if directory is None else os.path.join(directory, rest)


def is_own(name: str) -> bool:
    """Whether a file of this name is the caller's or the project's, not an installation's."""
    return not name.startswith(("=", os.sep))


def parse_depfile(text: str) -> list[str]:
    """Prerequisites listed in a make-style depfile, in order, without duplicates."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    _, _, listed = text.partition(": ")
    names: dict[str, None] = {}
    for token in re.findall(r"(?a)(?:\\.|[^\s\\])+", listed):
        name = re.sub(r"(?a)\\([\s#:\\])", r"\1", token).replace("$$", "$")
        names.setdefault(name)
    return list(names)


def exports_something(path: str) -> bool:
    """Whether the source at ``path`` contains JITQUANT_EXPORT, maybe only in a comment."""
    if not is_cuda(path):
        return False
    with open(path, "rb") as stream:
        return re.search(rb"\bJITQUANT_EXPORT\b", stream.read()) is not None
