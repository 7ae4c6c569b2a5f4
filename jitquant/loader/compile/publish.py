"""Describing a finished build: the metadata of its cache entry."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from dataclasses import asdict

from ..machine.memo import Memo
from ..request.includes import visible_now
from ..request.plan import Plan, python_abi
from ..request.searches import named_by_path
from ..request.sources import ABSOLUTE, is_own
from ..store.cache import Entry
from .build import Built


def describe(
    plan: Plan, extension: str, built: Built, memo: Memo, seconds: float
) -> tuple[Entry, tuple[str, ...]]:
    """The metadata of a build: the digest of every file that was read, and what was looked for.

    And the paths of the files that it depends on: if one of them was changed since the compilers
    began, it may not be what they saw. One that cannot be read has the digest ``""``.
    """
    headers: dict[str, str] = {}
    paths = [path for unit in built.units for path in (*unit.read, *unit.path.tools)]
    read = dict.fromkeys((*paths, *built.twins, *built.linked))
    callers = {path for unit in built.units for path in named_by_path(unit, plan.roots)}
    for path in read:
        name = ABSOLUTE + path if path in callers else plan.roots.name(path)
        state = memo.state(path, own=is_own(name))
        headers[name] = state.digest if state else ""
    for path in plan.sources:
        headers.pop(plan.roots.name(path), None)
    headers = dict(sorted(headers.items()))
    uses_python = bool(built.trial.init_symbols) or any(
        name.startswith("=python/") for name in headers
    )
    visible = visible_now(built.searched, plan.roots)
    with open(built.library, "rb") as stream:
        library = stream.read()
    entry = Entry(
        name=plan.name,
        extension=extension,
        level1=plan.level1,
        inputs=plan.inputs,
        headers=headers,
        searched=built.searched,
        visible=visible.names,
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
    return entry, (*read, *plan.sources, *visible.paths(plan.roots))
