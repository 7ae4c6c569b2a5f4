"""The code of a build: SASS from its library, PTX by compiling again, both with source lines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping

from .errors import LoaderError
from .toolchain import wheel_roots


class ToolNotFoundError(LoaderError):
    """A program of the CUDA toolkit that looks into binaries is not there."""


def find_tool(name: str, env: Mapping[str, str] | None = None) -> str:
    """The path of ``cuobjdump`` or ``nvdisasm``; a newer one reads the code of older compilers.

    Order: ``CUDA_HOME``, ``CUDA_PATH``, the PyPI wheels, ``PATH``, ``/usr/local/cuda``, triton.

    Raises:
        ToolNotFoundError: it is in none of these places.
    """
    env = os.environ if env is None else env
    for path in _places(name, env):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise ToolNotFoundError(
        f"{name} was not found in CUDA_HOME, CUDA_PATH, the PyPI wheels, PATH, /usr/local/cuda or "
        "triton. Install it with `pip install jitquant[inspect]`."
    )


def _places(name: str, env: Mapping[str, str]) -> Iterator[str]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(variable):
            yield os.path.join(env[variable], "bin", name)
    for root in wheel_roots():
        for package in sorted(os.listdir(root), reverse=True):
            yield os.path.join(root, package, "bin", name)
    yield shutil.which(name, path=env.get("PATH")) or ""
    yield os.path.join("/usr/local/cuda/bin", name)
    # It brings its own, for what it compiles itself.
    import importlib.util

    spec = importlib.util.find_spec("triton")
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        yield os.path.join(directory, "backends", "nvidia", "bin", name)
