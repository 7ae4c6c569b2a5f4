"""The command that builds a request, for error messages."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from .plan import Request


def command_of(request: Request, archs: Sequence[str]) -> str:
    """The shell command that builds ``request`` for ``archs``, from any directory."""
    name = request.name
    sources = [named_source(source) for source in request.sources]
    has_flags = request != Request(name, request.sources, archs=request.archs)
    if not has_flags and len(sources) == 1 and Path(sources[0]).stem == name:
        named = name if sources[0] == f"{name}.cu" else shlex.quote(sources[0])
        return f"jitquant build {named}" + (f" --arch {','.join(archs)}" if archs else "")
    given = {
        "include_dirs": [os.path.abspath(directory) for directory in request.include_dirs],
        "cuda_flags": list(request.cuda_flags),
        "cxx_flags": list(request.cxx_flags),
        "archs": list(archs),
    }
    # JSON, since its double quotes stay as they are within the single ones of a shell.
    arguments = [json.dumps(name), json.dumps(sources)]
    arguments += [f"{key}={json.dumps(value)}" for key, value in given.items() if value]
    code = f"import jitquant; jitquant.get_cuda_module({', '.join(arguments)})"
    return f"python -c {shlex.quote(code)}"


def named_source(source: object) -> str:
    """A bare name (the project's) unchanged; a caller's own file as an absolute path."""
    text = os.fspath(source)  # type: ignore[call-overload]
    bare = isinstance(source, str) and os.path.basename(text) == text
    return str(text if bare else os.path.abspath(text))
