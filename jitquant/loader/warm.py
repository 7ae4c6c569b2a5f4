"""Prepares modules before they are needed: builds them, loads them, makes kernels resident."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence

from .errors import LoaderError
from .machine.side_by_side import OnTick, call_all
from .module import CudaModule
from .request.plan import Request
from .request.sources import near_names

#: A C function, ``int (*)(void)``, that a library may export to load its kernels on the current
#: device; CUDA otherwise loads each at its first launch, which a capture does not allow.
RESIDENT_SYMBOL = "jitquant_make_resident"


def warm(
    wanted: Mapping[str, Callable[[OnTick], CudaModule]], devices: Iterable[int] | None
) -> dict[str, CudaModule]:
    """Call all of ``wanted`` in parallel, then make the kernels of the modules resident.

    Raises:
        LoaderError: a module could not be built; the others are finished first.
    """
    modules: dict[str, CudaModule] = {}
    failed: dict[str, BaseException] = {}
    for name, future in call_all(wanted).items():
        try:
            modules[name] = future.result()
        except LoaderError as error:
            failed[name] = error
    if failed:
        first = next(iter(failed.values()))
        if len(failed) > 1:
            first.args = (
                f"{first.args[0]}\n\nwarmup: {len(failed)} modules failed: {', '.join(failed)}",
            )
        raise first
    make_resident(modules.values(), devices)
    return modules


def request_to_warm(name: str, known: Mapping[str, Request], available: Sequence[str]) -> Request:
    """The newest request with that name, otherwise the kernel of the project with that name."""
    if not isinstance(name, str):
        raise TypeError(f"warmup: {name!r} is {type(name).__name__}; give names of modules.")
    if name in known:
        return known[name]
    if name not in available:
        raise ValueError(
            f"warmup: {name!r} is neither a kernel of this project nor a module that was asked "
            f"for in this process. {near_names(name, available)} For sources of your own "
            "call get_cuda_module itself."
        )
    return Request(name, (f"{name}.cu",))


def make_resident(modules: Iterable[CudaModule], devices: Iterable[int] | None) -> None:
    """Load the kernels of ``modules`` on ``devices`` (the current one if ``None``).

    Nothing happens without a usable GPU.

    Raises:
        LoaderError: CUDA refuses; the message has its error code.
    """
    import torch

    if not torch.cuda.is_available():
        return
    chosen = [torch.cuda.current_device()] if devices is None else list(devices)
    for device in chosen:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            for module in modules:
                symbol = getattr(module.library, RESIDENT_SYMBOL, None)
                if symbol is None:
                    continue
                symbol.restype, symbol.argtypes = ctypes.c_int, ()
                code = symbol()
                if code != 0:
                    raise LoaderError(
                        f"module {module.__name__!r}: its kernels could not be loaded on device "
                        f"{device} (CUDA error {code}). It holds code for "
                        f"{', '.join('sm_' + a for a in module.archs)}; the device is "
                        f"sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}."
                    )
