"""Resolves a name on the command line: a kernel of the project, a file, or an earlier build."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..request.plan import Request
from ..request.sources import SUFFIXES, check_name, kernel_names, near_names

if TYPE_CHECKING:
    from ..core import Loader

#: They name architectures, which those of an earlier build must not replace.
_ARCH_VARIABLES = ("JITQUANT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST")


def request_of(loader: Loader, name: str, archs: str | None = None) -> Request:
    """The request for ``name``.

    Args:
        name: a kernel of the project (``"amax_gsa"``), a file (``"./mine.cu"``), or a module that
            was built before, whose sources and flags are then those of its last build. A file has
            the flags of its last build, too.
        archs: architectures to request; ``None`` means the default. For a module that was built
            before, it means those that its last build was given, unless a variable names others.

    Raises:
        ValueError: not a name of any of these.
        FileNotFoundError: the file, or a source of the earlier build, does not exist.
    """
    kernels = kernel_names(loader.kernels_dir())
    if name in kernels:
        return Request(name, (f"{name}.cu",), archs=archs)
    path = Path(name)
    if path.suffix in SUFFIXES:
        path = Path(os.path.abspath(path))
        stem = check_name(path.stem)
        last = loader.cache().last(stem)
        if last is not None and str(path) in last.get("info", {}).get("sources", ()):
            return _as_built(stem, last)._replace(archs=archs)
        return Request(stem, (path,), archs=archs)
    last = loader.cache().last(check_name(name))
    if last is None or not last.get("info", {}).get("sources"):
        raise ValueError(
            f"{name!r} is not a kernel of this project, and no module of that name is in the cache "
            f"{loader.cache().root}. {near_names(name, kernels)} For your own file, give its "
            f"path: ./{name}.cu"
        )
    request = _as_built(name, last)
    if archs is not None or any(map(os.environ.get, _ARCH_VARIABLES)):
        return request._replace(archs=archs)
    return request


def _as_built(name: str, last: dict[str, Any]) -> Request:
    info, inputs = last["info"], last["inputs"]
    return Request(
        name,
        tuple(Path(source) for source in info["sources"]),
        include_dirs=tuple(info.get("include_dirs", ())),
        cuda_flags=tuple(inputs["cuda_flags"]),
        cxx_flags=tuple(inputs["cxx_flags"]),
        archs=tuple(inputs["archs"]) if info.get("archs_from") == "archs=" else None,
    )
