"""Editing in a live process: whether edits are looked for, and what of the old code lives on."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterable

from ..errors import OldGraphWarning
from ..module import CudaModule
from ..report import outside
from ..settings import setting

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: An int of the library, which the project's bindings and the generated ones set (captured.h).
_CAPTURED_SYMBOL = "jitquant_captured"


def reloads(paths: Iterable[str] = ()) -> bool:
    """Whether the next call picks up an edit of a source or header.

    ``JITQUANT_RELOAD`` set to 1 or 0 decides. The default is yes, except for the project's own
    kernels in an installed wheel. A loaded module keeps what was decided; in a running process use
    :func:`jitquant.freeze` with ``build=True``, and :func:`jitquant.unfreeze`.

    Args:
        paths: the sources and include directories of a module, absolute; none for one of the
            project's kernels.

    Raises:
        ValueError: ``JITQUANT_RELOAD`` is neither 0 nor 1.
    """
    if chosen := setting("JITQUANT_RELOAD"):
        return chosen == "1"
    if not os.path.isdir(os.path.join(_PACKAGE, "kernels_cu")):
        return True
    return any(not path.startswith(_PACKAGE + os.sep) for path in paths)


def was_captured(module: CudaModule) -> bool:
    """Whether a CUDA graph contains launches of ``module``.

    Custom bindings, which do not report it, count as not captured.
    """
    try:
        return ctypes.c_int.in_dll(module.library, _CAPTURED_SYMBOL).value != 0
    except ValueError:
        return False


def warn_of_old_graphs(new: CudaModule, old: Iterable[CudaModule], warned: set[str]) -> None:
    """Warn once about each of ``old`` that a graph contains, because ``new`` has replaced it."""
    for module in old:
        if module is new or module.key in warned or not was_captured(module):
            continue
        warned.add(module.key)
        warnings.warn(
            f"jitquant: module {module.__name__!r} was edited and has been built again, and CUDA "
            f"graphs were captured with the code before the edit (build {module.key[:12]}). "
            "They still replay that code; capture them again to have the new one.",
            OldGraphWarning,
            stacklevel=outside(),
        )
