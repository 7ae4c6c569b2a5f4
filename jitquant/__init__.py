"""NVFP4, MXFP4, MXFP8, FP8 and INT8 quantization by CUDA kernels, compiled on first use.

Importing it registers ``torch.ops.jitquant`` and nothing else: it compiles nothing, touches no GPU
and creates no directory. The command line, which must respond before torch could be imported,
registers the operators when one is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jitquant._command import started_as_command

if TYPE_CHECKING or not started_as_command():
    from jitquant import delayed_scaling, ops, tensors
    from jitquant.delayed_scaling import *
    from jitquant.ops import *
    from jitquant.tensors import *

    __all__ = ["Source", "__version__", "freeze", "get_cuda_module", "unfreeze", "warmup"]
    __all__ += delayed_scaling.__all__
    __all__ += ops.__all__
    __all__ += tensors.__all__

if TYPE_CHECKING:
    from jitquant._warmup import warmup
    from jitquant.loader import Source, freeze, get_cuda_module, unfreeze

    __version__: str

_LOADER_NAMES = ("Source", "freeze", "get_cuda_module", "unfreeze", "warmup")
_MODULES = ("loader", "nn", "reference", "testing")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jitquant")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def _import_public(name: str) -> Any:
    """Imports all public names, and returns the one called ``name``, or None."""
    modules = [import_module(f"{__name__}.{m}") for m in ("delayed_scaling", "ops", "tensors")]
    public = {key: getattr(module, key) for module in modules for key in module.__all__}
    globals().update(public, __all__=[*_LOADER_NAMES, "__version__", *public])
    return globals().get(name)


def __getattr__(name: str) -> Any:
    # The loader and the package's metadata are imported on demand.
    value: Any = None
    if name == "warmup":
        from jitquant._warmup import warmup as value
    elif name in _LOADER_NAMES:
        from jitquant import loader

        value = getattr(loader, name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    elif name == "__version__":
        value = _version()
    elif "__all__" not in globals() and (name == "__all__" or not name.startswith("_")):
        value = _import_public(name)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
