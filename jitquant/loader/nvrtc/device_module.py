"""Kernels compiled by ``backend="nvrtc"``, launched directly on torch tensors and CuPy arrays."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import LoaderError, extra
from ..module import no_attribute
from .compiler import Cubin, Parameter


class Shape(NamedTuple):
    """How a kernel is launched: ``shared`` in bytes, and a stream, or None for the current one."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    stream: Any = None


#: Launches the kernel of a cubin with this symbol: with these NumPy scalars, on this device. The
#: stream of the shape is a handle, or None for CuPy's current one.
Launch = Callable[[Cubin, str, Shape, list[Any], int], None]


class DeviceKernel:
    """A kernel; ``kernel[grid, block](...)`` launches it.

    ``grid`` and ``block`` are integers or tuples of up to three. Optional third and fourth items
    are the bytes of dynamic shared memory and the stream: ``kernel[grid, block, shared, stream]``.
    The default is torch's current stream (CuPy's, if there are only CuPy arrays).

    Arguments are CUDA tensors, CuPy arrays or other objects with ``__cuda_array_interface__`` (the
    kernel gets the pointer, whatever the dtype), numbers, which are converted to the parameter's
    size, and, for a struct, an object with a buffer of its size.

    Attributes:
        name: the name it was requested by.
        symbol: its name in the cubin.
        parameters: its parameters, as :class:`Parameter`.
    """

    def __init__(self, name: str, cubin: Cubin) -> None:
        self.name = name
        self.symbol, self.parameters = cubin.kernels[name]
        self._cubin = cubin

    def __repr__(self) -> str:
        kinds = ", ".join(p.kind if p.kind != "b8" else f"{p.size} bytes" for p in self.parameters)
        return f"<DeviceKernel {self.name!r} ({kinds})>"

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        given = configuration if isinstance(configuration, tuple) else ()
        sizes = [size if isinstance(size, Sequence) else (size,) for size in given[:2]]
        # CuPy would take a size of 0 for 1, and leave out a fourth one.
        if not 2 <= len(given) <= 4 or not all(map(_is_size, sizes)):
            raise TypeError(
                f"kernel {self.name!r}: give kernel[grid, block], each a positive integer or a "
                "tuple of up to three, with the bytes of shared memory and a stream after them if "
                f"need be, not {configuration!r}."
            )
        grid, block = ((*size, 1, 1)[:3] for size in sizes)
        return functools.partial(self._start, Shape(grid, block, *given[2:]))

    def _start(self, shape: Shape, *arguments: Any) -> None:
        import torch

        if len(arguments) != len(self.parameters):
            raise TypeError(
                f"kernel {self.name!r} takes {len(self.parameters)} arguments "
                f"({', '.join(p.kind for p in self.parameters)}), and {len(arguments)} were given."
            )
        scalars: list[Any] = []
        devices: set[int] = set()
        for index, (argument, parameter) in enumerate(zip(arguments, self.parameters, strict=True)):
            try:
                array = _array(argument)
                if array is not None and parameter.kind not in ("u64", "b64"):
                    raise TypeError("it is not a pointer")
                scalars.append(_scalar(argument if array is None else array[0], parameter))
            except (TypeError, ValueError, OverflowError) as error:
                raise type(error)(
                    f"kernel {self.name!r}: argument {index} is {type(argument).__name__}, and the "
                    f"parameter {parameter.kind}: {error}."
                ) from None
            if array is not None:
                devices.add(array[1])
        if len(devices) > 1:
            raise ValueError(f"kernel {self.name!r}: its arrays are on devices {sorted(devices)}.")
        device = next(iter(devices)) if devices else torch.cuda.current_device()
        stream = shape.stream
        of_torch = not devices or any(isinstance(a, torch.Tensor) for a in arguments)
        if stream is None and of_torch:
            stream = torch.cuda.current_stream(device)
        for attribute in ("cuda_stream", "ptr", "handle"):  # of torch's, CuPy's and cuda.core's
            stream = getattr(stream, attribute, stream)
        launcher()(self._cubin, self.symbol, shape._replace(stream=stream), scalars, device)


def _is_size(size: Sequence[Any]) -> bool:
    return 1 <= len(size) <= 3 and all(type(n) is int and n > 0 for n in size)


def _array(argument: Any) -> tuple[int, int] | None:
    """The pointer and device of an array; None for anything else."""
    import torch

    if isinstance(argument, torch.Tensor):
        if not argument.is_cuda:
            raise ValueError(f"it is on {argument.device}; move it with .to('cuda')")
        return argument.data_ptr(), argument.get_device()
    interface = getattr(argument, "__cuda_array_interface__", None)
    if interface is None:
        return None
    return interface["data"][0], getattr(getattr(argument, "device", None), "id", 0)


def _scalar(argument: Any, parameter: Parameter) -> Any:
    """The NumPy scalar to pass for a parameter."""
    import numpy as np

    kind, size = parameter
    if kind == "b8":
        raw = bytes(memoryview(argument))
        if len(raw) != size:
            raise ValueError(f"{len(raw)} bytes instead of {size}")
        return np.frombuffer(raw, dtype=f"V{size}")[0]
    if kind in ("f32", "f64"):
        return np.dtype(f"f{size}").type(float(argument))
    if argument is None and size == 8:
        argument = 0
    if not isinstance(argument, int | np.integer | np.bool_):
        raise TypeError("it is not an integer")
    number = int(argument)
    raw = number.to_bytes(size, "little", signed=number < 0)
    return np.frombuffer(raw, dtype=f"u{size}")[0]


class DeviceModule:
    """The kernels of one source, compiled by NVRTC.

    A kernel that is not a template is an attribute, named without namespaces. :meth:`kernel`
    returns any kernel, also of a header.

    Attributes:
        name: the module's name.
        arch: the architecture.
        key: a hash of the sources, headers and options that it was compiled from.
    """

    def __init__(
        self, name: str, arch: str, key: str, cubin: Cubin, compile_one: Callable[[str], Cubin]
    ) -> None:
        self.name = name
        self.arch = arch
        self.key = key
        self._compile_one = compile_one
        self._kernels = {
            expression: DeviceKernel(expression, cubin) for expression in cubin.kernels
        }
        self._plain = {kernel.rpartition("::")[2]: kernel for kernel in self._kernels}

    def kernel(self, expression: str) -> DeviceKernel:
        """A kernel by a C++ name expression, such as ``"scale<__nv_bfloat16, 4>"``.

        An instance of a template is compiled on first use.

        Raises:
            CompileError: there is no such kernel, or it does not compile.
        """
        if expression not in self._kernels:
            self._kernels[expression] = DeviceKernel(expression, self._compile_one(expression))
        return self._kernels[expression]

    def __getattr__(self, attribute: str) -> DeviceKernel:
        plain = self.__dict__.get("_plain", {})
        if attribute in plain:
            return self._kernels[plain[attribute]]
        raise no_attribute(f"module {self.__dict__.get('name')!r}", attribute, plain)

    def __dir__(self) -> list[str]:
        return [*self._plain, "arch", "kernel", "key", "name"]

    def __repr__(self) -> str:
        names = ", ".join(self._plain) or "templates alone"
        return f"<DeviceModule {self.name!r} (sm_{self.arch}) key {self.key[:12]}: {names}>"


@functools.cache
def launcher() -> Launch:
    """Launching through CuPy if that is installed, and through cuda.core otherwise."""
    for way in (with_cupy, with_cuda_core):
        with contextlib.suppress(ImportError):
            return way()
    raise LoaderError(
        "launching a kernel of backend='nvrtc' needs CuPy or cuda.core, and neither is installed. "
        f"Install {extra('cupy')}, or 'nvrtc'."
    )


class _Stream(NamedTuple):
    """A stream in the protocol of CUDA's Python packages."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def with_cupy() -> Launch:
    """Launching through CuPy; a cubin is loaded once on each device."""
    import cupy

    @functools.cache
    def load(cubin: Cubin) -> Any:
        # The file is in memory and is never closed, because CuPy reads it again for each device.
        file = os.memfd_create("cubin")
        os.write(file, cubin.code)
        return cupy.RawModule(path=f"/proc/self/fd/{file}")

    def launch(cubin: Cubin, symbol: str, shape: Shape, arguments: list[Any], device: int) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(cupy.cuda.Device(device))
            if shape.stream is not None:
                stack.enter_context(cupy.cuda.Stream.from_external(_Stream(shape.stream)))
            function = load(cubin).get_function(symbol)
            if shape.shared > 48 << 10:
                function.max_dynamic_shared_size_bytes = shape.shared
            function(shape.grid, shape.block, tuple(arguments), shared_mem=shape.shared)

    return launch


def with_cuda_core() -> Launch:
    """Launching through cuda.core; a cubin is loaded once."""
    import torch
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream
    from cuda.core import launch as launch_kernel

    load = functools.cache(lambda cubin: ObjectCode.from_cubin(cubin.code))

    def launch(cubin: Cubin, symbol: str, shape: Shape, arguments: list[Any], device: int) -> None:
        handle = shape.stream
        if handle is None:
            handle = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            Device(device).set_current()
            config = LaunchConfig(grid=shape.grid, block=shape.block, shmem_size=shape.shared)
            kernel = load(cubin).get_kernel(symbol)
            launch_kernel(Stream.from_handle(handle), config, kernel, *arguments)

    return launch
