"""The driver and the GPUs of the machine, through NVML, without a CUDA context."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """One GPU of the machine, whether or not this process sees it."""

    name: str
    capability: int


class Driver(NamedTuple):
    """The driver, the newest CUDA that it knows (as in ``"13.0"``), and the GPUs."""

    version: str
    cuda: str
    gpus: tuple[Gpu, ...]


def read_driver() -> Driver | None:
    """The driver and its GPUs; ``None`` if NVML is missing or fails."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        gpus: list[Gpu] = []
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
                return None
            if nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            ):
                return None
            name = _text(nvml.nvmlDeviceGetName, handle)
            gpus.append(Gpu(name, major.value * 10 + minor.value))
        known = ctypes.c_int()
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(known))
        cuda = f"{known.value // 1000}.{known.value % 1000 // 10}"
        return Driver(_text(nvml.nvmlSystemGetDriverVersion), cuda, tuple(gpus))
    except AttributeError:
        return None
    finally:
        with contextlib.suppress(AttributeError):
            nvml.nvmlShutdown()


def _text(ask: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(128)
    return buffer.value.decode(errors="replace") if ask(*arguments, buffer, 128) == 0 else ""
