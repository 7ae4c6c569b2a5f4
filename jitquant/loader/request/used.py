"""The modules that a run has used: recorded by each process, collected in a manifest.

A manifest is JSON, with paths below its own directory relative to it::

    {"format": 1, "modules": [{"name": "k", "sources": ["src/k.cu"], "cuda_flags": ["-DX"],
                               "archs": null, "built_for": ["90a"], ...}]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import LoaderError
from .command import named_source
from .plan import Request
from .text import Source

#: Names the file that the processes of a run add their lines to.
VARIABLE = "JITQUANT_RECORD"
FORMAT = 1


def note_use(request: Request, built_for: Sequence[str]) -> None:
    """Record a module that was just loaded in the file that ``JITQUANT_RECORD`` names."""
    target = os.environ[VARIABLE]
    line = {
        "name": request.name,
        "sources": [
            {"text": source.text, "suffix": source.suffix}
            if isinstance(source, Source)
            else named_source(source)
            for source in request.sources
        ],
        "include_dirs": [os.path.abspath(directory) for directory in request.include_dirs],
        "cuda_flags": list(request.cuda_flags),
        "cxx_flags": list(request.cxx_flags),
        "archs": request.archs if isinstance(request.archs, str | None) else list(request.archs),
        "built_for": list(built_for),
    }
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Whole, beside other processes.
            os.write(descriptor, f"{json.dumps(line)}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LoaderError(
            f"{VARIABLE}={target!r} cannot be written to ({error.strerror}). Unset it, or name a "
            "file that can."
        ) from error


def write_manifest(notes: Path, manifest: Path) -> list[str]:
    """Collect the lines of ``notes`` in ``manifest``. Returns the names of its modules."""
    lines = dict.fromkeys(notes.read_text(encoding="utf-8").splitlines())
    modules = [json.loads(line) for line in lines]
    root = os.path.dirname(os.path.abspath(manifest))
    for module in modules:
        for key in ("sources", "include_dirs"):
            module[key] = [
                _relative(path, root) if isinstance(path, str) else path for path in module[key]
            ]
    modules.sort(key=lambda module: str(module["name"]))
    text = json.dumps({"format": FORMAT, "modules": modules}, indent=1)
    manifest.write_text(text + "\n", encoding="utf-8")
    return [module["name"] for module in modules]


def read_manifest(manifest: Path, *, as_built: bool) -> dict[str, Request]:
    """The requests in ``manifest``, each under its name; a second one of a name as ``"name (2)"``.

    Args:
        as_built: whether to request the architectures of that run; otherwise those that the caller
            passed, usually those of the machine.

    Raises:
        ValueError: the file is not a manifest.
        OSError: it cannot be read.
    """
    root = os.path.dirname(os.path.abspath(manifest))
    requests: dict[str, Request] = {}
    try:
        stated = json.loads(manifest.read_text(encoding="utf-8"))
        if stated["format"] != FORMAT:
            raise ValueError(f"format {stated['format']}, and this jitquant reads {FORMAT}")
        for module in stated["modules"]:
            request = _request(module, root, as_built)
            requests[_label(request.name, requests)] = request
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{manifest} is not a manifest of `jitquant record` ({error}). Record it again."
        ) from error
    return requests


def _request(module: Mapping[str, Any], root: str, as_built: bool) -> Request:
    archs = module["built_for"] if as_built else module["archs"]
    return Request(
        module["name"],
        tuple(
            Source(**source)
            if isinstance(source, dict)
            else source
            if os.path.basename(source) == source
            else Path(root, source)
            for source in module["sources"]
        ),
        include_dirs=tuple(os.path.join(root, directory) for directory in module["include_dirs"]),
        cuda_flags=tuple(module["cuda_flags"]),
        cxx_flags=tuple(module["cxx_flags"]),
        archs=archs if isinstance(archs, str | None) else tuple(archs) or None,
    )


def _label(name: str, taken: Iterable[str]) -> str:
    label, number = name, 1
    while label in taken:
        number += 1
        label = f"{name} ({number})"
    return label


def _relative(path: str, root: str) -> str:
    """``path`` relative to ``root`` if it is below it, with a directory part."""
    if not path.startswith(root + os.sep):
        return path
    return os.path.join(os.curdir, os.path.relpath(path, root))
