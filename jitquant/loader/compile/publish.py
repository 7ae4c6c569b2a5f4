"""Describing a finished build: the metadata of its cache entry."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from dataclasses import asdict, dataclass

from ..errors import LoaderError
from ..request.plan import Plan, python_abi
from ..request.sources import FileHasher, visible_names
from ..store.cache import Entry
from .build import Built

_HAS_INCLUDE = re.compile(rb"__has_include(?:_next)?\s*\(\s*[\"<]([^\">\n]+)[\">]")


@dataclass(frozen=True)
class Described:
    """The entry of a build, and the paths of the caller's headers that it read."""

    entry: Entry
    own_headers: tuple[str, ...]


def describe(
    plan: Plan, extension: str, built: Built, hasher: FileHasher, seconds: float
) -> Described:
    """The metadata of a build.

    Headers of the caller and of the project are represented by their contents, those of the
    compilers, CUDA, torch and Python by versions that are in the level-1 key already (Python's,
    which few modules read, by its ABI here).

    Raises:
        LoaderError: a header went away while it was being compiled.
    """
    headers: dict[str, str] = {}
    own: list[str] = []
    included: set[str] = set()
    families: set[str] = set()
    for path in built.read:
        label, rest = plan.roots.name(path)
        if label.startswith("="):
            families.add(label[1:])
            included.add(rest)
            continue
        state = hasher.state(path)
        if state is None:
            raise LoaderError(f"module {plan.name!r}: {path} went away while it was compiled.")
        headers[f"{label}/{rest}"] = state.digest
        included.add(rest)
        own.append(path)
    for path in (*plan.sources, *own):
        with open(path, "rb") as stream:
            included.update(
                name.decode(errors="replace") for name in _HAS_INCLUDE.findall(stream.read())
            )
    headers = dict(sorted(headers.items()))
    with open(built.library, "rb") as stream:
        library = stream.read()
    entry = Entry(
        name=plan.name,
        extension=extension,
        level1=plan.level1,
        inputs=plan.inputs,
        headers=headers,
        visible=visible_names(plan.roots, included, headers),
        included=sorted(included),
        python_abi=python_abi() if "python" in families or built.trial.init_symbols else None,
        library_sha256=hashlib.sha256(library).hexdigest(),
        library_size=len(library),
        ops=built.trial.ops,
        init_symbols=built.trial.init_symbols,
        stable_abi=built.stable,
        info={
            "seconds": round(seconds, 3),
            "built": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "sources": list(plan.sources),
            "include_dirs": [os.path.abspath(d) for d in plan.request.include_dirs],
            "steps": [[label, round(took, 3)] for label, took in built.steps],
            "kernels": [asdict(kernel) for kernel in built.kernels],
            "archs_from": plan.archs.origin,
            "nvcc": plan.nvcc.path if plan.nvcc else None,
        },
    )
    return Described(entry, tuple(own))
