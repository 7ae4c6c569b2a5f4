"""What the loader raises.

Every class derives from :class:`LoaderError`, so ``except LoaderError`` catches whatever can go
wrong between a source file and a loaded module. A wrong *argument* (a name that is not an
identifier, a source that does not exist) is a plain ``ValueError``, ``TypeError`` or
``FileNotFoundError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


def extra(name: str) -> str:
    """How a message names an extra of this package, which may not be on an index."""
    return f"jitquant's extra {name!r} (`pip install -e '.[{name}]'` in a checkout)"


class LoaderError(RuntimeError):
    """A module could not be built or loaded.

    Attributes:
        last_good: the module as it was before the edit that failed, ready to be used on; ``None``
            if this process has none. It does not travel with the error to another process.
    """

    last_good: ModuleType | None = None

    def offer(self, module: ModuleType) -> None:
        """Name ``module`` as the last good one, in the attribute and in the text."""
        self.last_good = module
        self.args = (
            f"{self.args[0]}\nThe module from before this edit still works: it is this error's "
            "`last_good`, and after jitquant.freeze() every call has it.",
            *self.args[1:],
        )

    def __reduce__(self) -> Any:
        state = {k: v for k, v in self.__dict__.items() if k != "last_good"}
        return (type(self), self.args, state)


class NvccNotFoundError(LoaderError):
    """No usable nvcc; the message lists the places looked at and what to install."""


class NvrtcNotFoundError(LoaderError):
    """backend='nvrtc' needs NVRTC and its Python bindings; the message says what to install."""


class HostCompilerNotFoundError(LoaderError):
    """No usable C++ compiler for the host side of a module."""


class UnsupportedArchError(LoaderError, ValueError):
    """A GPU architecture that cannot be compiled for; the message names those that can."""


class Diagnostic(NamedTuple):
    """One message of a compiler: ``severity`` is ``"error"``, ``"fatal error"`` or ``"warning"``.

    ``file`` is ``""`` and ``line`` 0 where the tool named none (ptxas, the linker).
    """

    file: str
    line: int
    column: int | None
    severity: str
    message: str

    @property
    def is_error(self) -> bool:
        """Whether this message made the command fail."""
        return self.severity != "warning"


class CompileError(LoaderError):
    """One compiler or linker command failed.

    Attributes:
        diagnostics: what the command said, in its order, as :class:`Diagnostic`.
        command: the one command that failed, as an argument vector.
        log_path: the file that holds the whole output, or ``None``.
        out_of_memory: whether the command ended because memory ran out, as far as can be told.
    """

    def __init__(
        self,
        message: str,
        *,
        diagnostics: Sequence[Diagnostic] = (),
        command: Sequence[str] = (),
        log_path: Path | None = None,
        out_of_memory: bool = False,
    ) -> None:
        super().__init__(message)
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        self.command: tuple[str, ...] = tuple(command)
        self.log_path = log_path
        self.out_of_memory = out_of_memory


class FirstLoadError(LoaderError):
    """A library was built, but loading it failed or hangs; the message says why."""


class LockTimeoutError(LoaderError, TimeoutError):
    """Another process held the build lock for longer than the limit; the message names it."""


class CacheError(LoaderError):
    """The cache directory cannot be used; the message says why and how to fix it."""


class ToolNotFoundError(LoaderError):
    """A program of the CUDA toolkit that looks into binaries is not there."""


class BundleError(LoaderError):
    """A directory in ``JITQUANT_BUNDLES`` is not a usable bundle; the message says why."""


class DamagedEntryWarning(UserWarning):
    """A cache entry did not match its digest; it was set aside and is built again."""


class OldGraphWarning(UserWarning):
    """A CUDA graph was captured with code that an edit has replaced; it still replays that code."""


class DamagedEntryError(LoaderError):
    """A cache entry is damaged and could neither be repaired nor replaced."""


class CaptureError(LoaderError):
    """A build would be needed while a CUDA graph is being captured."""


class NoBuildError(LoaderError):
    """A module would have to be built, and ``JITQUANT_NO_BUILD`` says that none may be.

    The message names the module and the command that builds it.
    """


class FrozenError(NoBuildError):
    """The same after :func:`jitquant.loader.freeze`; the message names the line that asked."""
