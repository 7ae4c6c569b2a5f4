"""Getting modules ready before they are needed: built, loaded, resident on the GPU."""

from __future__ import annotations

import ctypes
import difflib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from .errors import LoaderError
from .machine.processes import default_jobs
from .module import CudaModule
from .request.plan import Request
from .tools.names import kernel_names

if TYPE_CHECKING:
    from .core import Loader

#: A C function, ``int (*)(void)``, that a library may export to load its kernels on the current
#: device; CUDA otherwise loads each at its first launch, which a capture does not allow.
RESIDENT_SYMBOL = "jitquant_make_resident"


def warm(
    loader: Loader, names: Sequence[str], devices: Iterable[int] | None
) -> dict[str, CudaModule]:
    """Build and load ``names`` side by side, then make their kernels resident.

    Raises:
        ValueError: a name that is neither a kernel of the project nor was asked for before.
        LoaderError: a module could not be built; the others are finished first.
    """
    import torch  # noqa: F401  (threads that import it at the same time see half of it)

    requests = {name: _request(loader, name) for name in names or kernel_names(loader)}
    modules: dict[str, CudaModule] = {}
    failed: dict[str, BaseException] = {}
    # Twice the compilers: a thread is also busy with hashing, linking and loading.
    with ThreadPoolExecutor(max_workers=max(1, min(len(requests), 2 * default_jobs()))) as pool:
        futures = {
            name: pool.submit(
                loader.get,
                name,
                request.sources,  # type: ignore[arg-type]
                include_dirs=request.include_dirs,
                cuda_flags=request.cuda_flags,
                cxx_flags=request.cxx_flags,
                archs=request.archs,
            )
            for name, request in requests.items()
        }
        for name, future in futures.items():
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


def _request(loader: Loader, name: str) -> Request:
    if not isinstance(name, str):
        raise TypeError(f"warmup: {name!r} is {type(name).__name__}; give names of modules.")
    known = loader.known_request(name)
    if known is not None:
        return known[1]
    available = kernel_names(loader)
    if name not in available:
        near = difflib.get_close_matches(name, available, n=3, cutoff=0.5)
        hint = f"Near names: {', '.join(near)}." if near else f"There are: {', '.join(available)}."
        raise ValueError(
            f"warmup: {name!r} is neither a kernel of this project nor a module that was asked "
            f"for in this process. {hint} For sources of your own call get_cuda_module itself."
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
