"""Describing a finished build: the metadata of its cache entry."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from dataclasses import asdict, dataclass

from ..errors import LoaderError
from ..request.includes import searched_by, visible_now
from ..request.plan import Plan, python_abi
from ..request.sources import FileHasher
from ..store.cache import Entry
from .build import Built


@dataclass(frozen=True)
class Described:
    """The entry of a build, and the paths of the files that were read for it."""

    entry: Entry
    read: tuple[str, ...]


def describe(
    plan: Plan, extension: str, built: Built, hasher: FileHasher, seconds: float
) -> Described:
    """The metadata of a build: the digest of every file that was read, and what was looked for.

    Raises:
        LoaderError: a header disappeared while it was being compiled.
    """
    headers: dict[str, str] = {}
    read = dict.fromkeys([path for unit in built.units for path in unit.read] + [*built.linked])
    for path in read:
        state = hasher.state(path)
        if state is None:
            raise LoaderError(f"module {plan.name!r}: {path} disappeared while it was compiled.")
        headers[plan.roots.name(path)] = state.digest
    for path in plan.sources:
        headers.pop(plan.roots.name(path), None)
    headers = dict(sorted(headers.items()))
    searched = [*searched_by(built.units, plan.roots), *built.searched]
    uses_python = bool(built.trial.init_symbols) or any(
        name.startswith("=python/") for name in headers
    )
    with open(built.library, "rb") as stream:
        library = stream.read()
    entry = Entry(
        name=plan.name,
        extension=extension,
        level1=plan.level1,
        inputs=plan.inputs,
        headers=headers,
        searched=searched,
        visible=visible_now(searched, plan.roots).names,
        python_abi=python_abi() if uses_python else None,
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
    return Described(entry, tuple(read))
