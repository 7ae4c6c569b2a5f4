"""The torch that modules are built against, without importing it.

Importing torch takes a second or two, longer than the rest of a cache lookup. So if it is not
imported yet, its properties are read from its files.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from typing import NamedTuple

from ..errors import LoaderError

#: The oldest torch that this works with, whose stable ABI the bindings are written against.
OLDEST_TORCH = (2, 11)


class TorchInstall(NamedTuple):
    """A torch: its package directory, and what a compiled module depends on."""

    directory: str
    version: str
    git_version: str
    cuda: str | None

    @property
    def identity(self) -> str:
        """The version and the commit, as they are part of a key."""
        return f"{self.version} {self.git_version}"

    @property
    def include_dirs(self) -> tuple[str, ...]:
        """Its include directories, as from ``torch.utils.cpp_extension.include_paths``."""
        base = os.path.join(self.directory, "include")
        return (base, os.path.join(base, "torch", "csrc", "api", "include"))

    @property
    def library_dir(self) -> str:
        """The directory of its shared libraries."""
        return os.path.join(self.directory, "lib")


def torch_install() -> TorchInstall:
    """The torch that ``import torch`` gives."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "_C") and hasattr(torch, "version"):
        return TorchInstall(
            os.path.dirname(os.path.abspath(str(torch.__file__))),
            str(torch.__version__),
            str(torch.version.git_version),
            torch.version.cuda,
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise LoaderError("torch is not installed for this interpreter. Run `pip install torch`.")
    directory = os.path.dirname(os.path.abspath(spec.origin))
    try:
        stated = runpy.run_path(os.path.join(directory, "version.py"))
        return TorchInstall(
            directory,
            str(stated["__version__"]),
            str(stated["git_version"]),
            stated.get("cuda"),
        )
    except (OSError, KeyError, ValueError) as error:
        raise LoaderError(
            f"the torch in {directory} is incomplete ({error}). Install it again."
        ) from error
