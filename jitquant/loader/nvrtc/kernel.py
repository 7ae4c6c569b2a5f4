"""Kernels compiled by ``backend="nvrtc"``, launched directly on torch tensors and CuPy arrays."""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import LoaderError, extra


class Parameter(NamedTuple):
    """A kernel's parameter as PTX has it: ``"f32"``, ``"u64"`` (a pointer too), ``"b8"`` bytes."""

    kind: str
    size: int


class Shape(NamedTuple):
    """How a kernel is launched: ``shared`` in bytes; ``stream`` has ``__cuda_stream__``."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    stream: Any = None


@dataclass(frozen=True, repr=False, eq=False)
class DeviceKernel:
    """A kernel; ``kernel[grid, block](...)`` launches it.

    ``grid`` and ``block`` are integers or tuples of up to three. Optional third and fourth items
    are the bytes of dynamic shared memory and the stream, one of torch, CuPy or cuda.core:
    ``kernel[grid, block, shared, stream]``. The default is torch's current stream, of the device of
    the first torch tensor; without one, of the current device.

    Arguments are CUDA tensors, CuPy arrays or other objects with ``__cuda_array_interface__`` (the
    kernel gets the pointer, whatever the dtype), numbers, which are converted to the parameter's
    size, and, for a struct, an object with a buffer of its size (by cuda.core up to 8 bytes).

    Attributes:
        name: the name it was requested by.
        symbol: its name in ``cubin``.
        parameters: its parameters, as :class:`Parameter`.
    """

    name: str
    symbol: str
    parameters: tuple[Parameter, ...]
    cubin: bytes

    def __repr__(self) -> str:
        kinds = ", ".join(p.kind if p.kind != "b8" else f"{p.size} bytes" for p in self.parameters)
        return f"<DeviceKernel {self.name!r} ({kinds})>"

    def __getitem__(self, configuration: tuple[Any, ...]) -> Callable[..., None]:
        shape = Shape(*configuration)
        grid, block = (n if isinstance(n, tuple) else (n,) for n in shape[:2])
        # CuPy would take a size of 0 for 1, and leave out a fourth one.
        if min(*grid, *block) < 1 or max(len(grid), len(block)) > 3:
            raise ValueError(f"{self}: there are no {grid} blocks of {block} threads.")
        return functools.partial(self._launch, shape._replace(grid=grid, block=block))

    def _launch(self, shape: Shape, *arguments: Any) -> None:
        if len(arguments) != len(self.parameters):
            raise TypeError(f"{self} does not take {len(arguments)} arguments.")
        values = []
        for index, (argument, parameter) in enumerate(zip(arguments, self.parameters, strict=True)):
            try:
                values.append(_value(argument, *parameter))
            except (TypeError, ValueError, OverflowError) as error:
                raise type(error)(f"{self}, argument {index}: {error}.") from None
        devices = (x.get_device() for x in arguments if isinstance(x, torch.Tensor))
        with torch.cuda.device(next(devices, -1)):  # -1 is the current one
            if shape.stream is None:
                shape = shape._replace(stream=torch.cuda.current_stream())
            launcher()(self, shape, values)


def _value(argument: Any, kind: str, size: int) -> Any:
    """A NumPy scalar with the bytes that a parameter gets."""
    import numpy as np

    if kind in ("f32", "f64"):
        return np.dtype(f"f{size}").type(float(argument))
    if kind == "b8":
        raw = bytes(memoryview(argument))
        if len(raw) != size:
            raise ValueError(f"{len(raw)} bytes instead of {size}")
    else:
        number = operator.index(_address(argument) if size == 8 else argument)
        raw = number.to_bytes(size, "little", signed=number < 0)
    return np.frombuffer(raw, f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")[0]


def _address(argument: Any) -> Any:
    """The pointer to what an array contains; a number as it is."""
    if isinstance(argument, torch.Tensor):
        if not argument.is_cuda:
            raise ValueError(f"it is on {argument.device}; move it with .to('cuda')")
        return argument.data_ptr()
    if hasattr(argument, "__cuda_array_interface__"):
        return argument.__cuda_array_interface__["data"][0]
    return 0 if argument is None else argument


@functools.cache
def launcher() -> Callable[[DeviceKernel, Shape, list[Any]], None]:
    """Launching through CuPy if that is installed, and through cuda.core otherwise."""
    for package, way in (("cupy", by_cupy), ("cuda.core", by_cuda_core)):
        if importlib.util.find_spec(package):
            return way
    raise LoaderError(
        "launching a kernel of backend='nvrtc' needs CuPy or cuda.core, and neither is installed. "
        f"Install {extra('cupy')}, or 'nvrtc'."
    )


def by_cupy(kernel: DeviceKernel, shape: Shape, values: list[Any]) -> None:
    """Launch through CuPy, with NumPy scalars, on the current device."""
    import cupy

    function = _loaded_by_cupy(kernel.cubin).get_function(kernel.symbol)
    with cupy.cuda.Stream.from_external(shape.stream):
        if shape.shared > 48 << 10:
            function.max_dynamic_shared_size_bytes = shape.shared
        function(shape.grid, shape.block, tuple(values), shared_mem=shape.shared)


@functools.cache
def _loaded_by_cupy(cubin: bytes) -> Any:
    import cupy

    # The file is in memory and is never closed, because CuPy reads it again for each device.
    file = os.memfd_create("cubin")
    os.write(file, cubin)
    return cupy.RawModule(path=f"/proc/self/fd/{file}")


def by_cuda_core(kernel: DeviceKernel, shape: Shape, values: list[Any]) -> None:
    """Launch through cuda.core, with NumPy scalars, on the current device."""
    from cuda.core import Device, LaunchConfig, Stream, launch

    Device(torch.cuda.current_device()).set_current()
    config = LaunchConfig(grid=shape.grid, block=shape.block, shmem_size=shape.shared)
    stream = Stream.from_handle(shape.stream.__cuda_stream__()[1])
    code = _loaded_by_cuda_core(kernel.cubin)
    launch(stream, config, code.get_kernel(kernel.symbol), *values)


@functools.cache
def _loaded_by_cuda_core(cubin: bytes) -> Any:
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(cubin)
