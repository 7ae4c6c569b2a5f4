"""Compile CUDA sources on first use and load them: :func:`get_cuda_module`.

The loader knows nothing of quantization; it compiles any ``.cu`` and ``.cpp``. ``docs/loader.md``
describes how the cache works and every environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from .core import Loader
from .errors import (
    BundleError,
    CacheError,
    CaptureError,
    CompileError,
    DamagedEntryError,
    DamagedEntryWarning,
    Diagnostic,
    FirstLoadError,
    FrozenError,
    HostCompilerNotFoundError,
    LoaderError,
    LockTimeoutError,
    NoBuildError,
    NvccNotFoundError,
    NvrtcNotFoundError,
    OldGraphWarning,
    ToolNotFoundError,
    UnsupportedArchError,
)
from .module import CudaModule
from .request.sources import Source
from .watch.live import reloads

if TYPE_CHECKING:
    from .nvrtc.build import DeviceModule
    from .nvrtc.kernel import DeviceKernel

__all__ = [
    "BundleError",
    "CacheError",
    "CaptureError",
    "CompileError",
    "CudaModule",
    "DamagedEntryError",
    "DamagedEntryWarning",
    "DeviceKernel",
    "DeviceModule",
    "Diagnostic",
    "FirstLoadError",
    "FrozenError",
    "HostCompilerNotFoundError",
    "Loader",
    "LoaderError",
    "LockTimeoutError",
    "NoBuildError",
    "NvccNotFoundError",
    "NvrtcNotFoundError",
    "OldGraphWarning",
    "Source",
    "ToolNotFoundError",
    "UnsupportedArchError",
    "freeze",
    "get_cuda_module",
    "get_part",
    "reloads",
    "unfreeze",
    "up_to_date_check",
    "warmup",
]

_default = Loader()


def __getattr__(name: str) -> Any:
    # Imported on demand: only backend="nvrtc" needs it.
    if name not in ("DeviceKernel", "DeviceModule"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .nvrtc import build

    return getattr(build, name)


@overload
def get_cuda_module(
    name: str,
    sources: Sequence[str | os.PathLike[str] | Source],
    *,
    include_dirs: Sequence[str | os.PathLike[str]] = ...,
    cuda_flags: Sequence[str] = ...,
    cxx_flags: Sequence[str] = ...,
    archs: str | Sequence[str] | None = ...,
    backend: Literal["nvcc"] = ...,
) -> CudaModule: ...


@overload
def get_cuda_module(
    name: str,
    sources: Sequence[str | os.PathLike[str] | Source],
    *,
    include_dirs: Sequence[str | os.PathLike[str]] = ...,
    cuda_flags: Sequence[str] = ...,
    archs: str | Sequence[str] | None = ...,
    backend: Literal["nvrtc"],
) -> DeviceModule: ...


def get_cuda_module(
    name: str,
    sources: Sequence[str | os.PathLike[str] | Source],
    *,
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    cuda_flags: Sequence[str] = (),
    cxx_flags: Sequence[str] = (),
    archs: str | Sequence[str] | None = None,
    backend: Literal["nvcc", "nvrtc"] = "nvcc",
) -> CudaModule | DeviceModule:
    """Compile ``sources``, unless a build of the same contents is cached, and load the module.

    You can call it before every use: if nothing has changed it takes microseconds and returns the
    same object. After an edit of a source or of a header that it includes, it returns the new code
    (see :func:`reloads`); the old module stays loaded while it is referenced.

    Args:
        name: the module's name, an identifier. Builds with the same name and different contents
            can coexist: each has its own value of the macro ``TORCH_EXTENSION_NAME``.
        sources: ``.cu`` and ``.cpp`` files. A bare name (``"amax_gsa.cu"``) is one of the
            project's kernels, in any of its folders; a :class:`~pathlib.Path` or a string with a
            directory part (``"./k.cu"``) is your own file. ``bindings/k.cpp`` next to ``k.cu`` is
            compiled with it unless you pass a C++ source. A :class:`Source` contains the text.
        include_dirs: searched before the project's own device headers, which are always found.
        cuda_flags: more flags for nvcc; select architectures with ``archs`` instead.
        cxx_flags: more flags for the C++ compiler; ``-l``, ``-L``, ``-Wl,`` and ``-Xlinker`` go to
            the linker.
        archs: GPU architectures, such as ``"9.0"`` or ``["90a", "100a"]``; ``None`` means
            ``JITQUANT_CUDA_ARCHS``, else ``TORCH_CUDA_ARCH_LIST``, else the visible GPUs, else
            sm_90a.
        backend: ``"nvcc"``, or ``"nvrtc"`` for only the kernels of one ``.cu``, compiled in a
            fraction of a second without nvcc or a host compiler. You launch them yourself.

    Returns:
        A :class:`CudaModule`, whose attributes are the operators (TORCH_LIBRARY,
        STABLE_TORCH_LIBRARY, JITQUANT_EXPORT) and functions (PYBIND11_MODULE) of the sources;
        with ``backend="nvrtc"`` a :class:`DeviceModule`, whose attributes are kernels.

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument is invalid.
        NvccNotFoundError, HostCompilerNotFoundError, NvrtcNotFoundError: a compiler is missing.
        UnsupportedArchError: an architecture is not supported.
        CompileError: a source does not compile or link.
        LockTimeoutError: another process has been building it for too long.
        CacheError: the cache directory cannot be used, or its disk is full.
        CaptureError: it has to be built or loaded during CUDA graph capture.
        NoBuildError: it has to be built, and ``JITQUANT_NO_BUILD`` is 1.
        FrozenError: it has to be built, and :func:`freeze` was called.
        LoaderError: the library does not load.

    If an edit fails to compile, ``last_good`` of the error is the module from before the edit.
    """
    if backend != "nvcc":
        if backend != "nvrtc":
            raise ValueError(f"backend={backend!r}: give 'nvcc' or 'nvrtc'.")
        if cxx_flags:
            raise ValueError("cxx_flags: backend='nvrtc' compiles no C++ source; leave them out.")
        return _default.get_device_module(
            name, sources, include_dirs=include_dirs, cuda_flags=cuda_flags, archs=archs
        )
    return _default.get(
        name,
        sources,
        include_dirs=include_dirs,
        cuda_flags=cuda_flags,
        cxx_flags=cxx_flags,
        archs=archs,
    )


def freeze(*, build: bool = False) -> None:
    """Ignore edits from now on, and do not build.

    Loaded modules are returned unchanged. Others are loaded from a bundle or the cache; if neither
    has a module, :class:`FrozenError` names the line that requested it, and the command that builds
    it.

    Args:
        build: whether a module that is not loaded may still be built.
    """
    _default.freeze(build=build)


def unfreeze() -> None:
    """Undo :func:`freeze`."""
    _default.unfreeze()


get_part = _default.get_part
up_to_date_check = _default.up_to_date_check
warmup = _default.warmup
