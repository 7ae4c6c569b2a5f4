"""Requests as text: the modules that a run has used, and the command that builds a module.

Each process records the modules that it uses, and their records are collected in a manifest.

A manifest is JSON, with paths below its own directory relative to it::

    {"format": 1, "modules": [{"name": "k", "sources": ["src/k.cu"], "cuda_flags": ["-DX"],
                               "archs": null, "built_for": ["90a"], ...}]}
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import LoaderError
from ..machine.trust import write_output
from .plan import Request, checked_request
from .sources import Source, as_items, as_strings

#: Names the file that the processes of a run add their lines to.
VARIABLE = "JITQUANT_RECORD"
FORMAT = 1


def command_of(request: Request, archs: Sequence[str]) -> str:
    """The shell command that builds ``request`` for ``archs``, from any directory."""
    given = {**_described(request), "archs": archs}
    name, sources = given.pop("name"), given.pop("sources")
    # `jitquant build` gives a file of the caller's the flags of its last build.
    if request == Request(name, (f"{name}.cu",), archs=request.archs):
        return f"jitquant build {name}" + (f" --arch {','.join(archs)}" if archs else "")
    # JSON, since its double quotes stay as they are within the single ones of a shell.
    arguments = [json.dumps(name), json.dumps(sources)]
    arguments += [f"{key}={json.dumps(value)}" for key, value in given.items() if value]
    code = f"import jitquant; jitquant.get_cuda_module({', '.join(arguments)})"
    return f"python -c {shlex.quote(code)}"


def _described(request: Request) -> dict[str, Any]:
    return {
        **request._asdict(),
        "sources": list(map(_source, request.sources)),
        "include_dirs": list(map(os.path.abspath, request.include_dirs)),
    }


def _source(source: Any) -> Any:
    """A text as it is, a bare name (the project's) too; a caller's own file as an absolute path."""
    if isinstance(source, Source):
        return asdict(source)
    text = os.fspath(source)
    bare = isinstance(source, str) and os.path.basename(text) == text
    return text if bare else os.path.abspath(text)


def note_use(request: Request, built_for: Sequence[str]) -> None:
    """Record a module that was just loaded in the file that ``JITQUANT_RECORD`` names."""
    target = os.environ[VARIABLE]
    line = {**_described(request), "built_for": built_for}
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # In one call, beside other processes; on a new line, after what one left unfinished.
            text = f"\n{json.dumps(line)}\n".encode()
            if os.write(descriptor, text) < len(text):
                raise OSError(errno.EIO, "only a part was written")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LoaderError(
            f"{VARIABLE}={target!r} cannot be written to ({error.strerror}). Unset it, or name a "
            "file that can."
        ) from error


def write_manifest(notes: Path, manifest: Path) -> tuple[list[str], int]:
    """Collect the lines of ``notes`` in ``manifest``.

    Returns the names of its modules, and the number of lines that are damaged and left out.
    """
    lines = dict.fromkeys(filter(None, notes.read_text(encoding="utf-8").splitlines()))
    modules, damaged = [], 0
    for line in lines:
        try:
            modules.append(json.loads(line))
        except ValueError:
            damaged += 1
    root = os.path.dirname(os.path.abspath(manifest))
    for module in modules:
        for key in ("sources", "include_dirs"):
            module[key] = [
                _relative(path, root) if isinstance(path, str) else path for path in module[key]
            ]
    modules.sort(key=lambda module: str(module["name"]))
    text = json.dumps({"format": FORMAT, "modules": modules}, indent=1)
    write_output(manifest, text + "\n")
    return [module["name"] for module in modules], damaged


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
    given = as_items(module["sources"], "sources", "'./kernel.cu'", (str, dict))
    directories = as_strings(module["include_dirs"], "include_dirs", "'include'")
    return checked_request(
        module["name"],
        [
            Source(**source)
            if isinstance(source, dict)
            else source
            if os.path.basename(source) == source
            else Path(root, source)
            for source in given
        ],
        [os.path.join(root, directory) for directory in directories],
        module["cuda_flags"],
        module["cxx_flags"],
        archs or None,
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
