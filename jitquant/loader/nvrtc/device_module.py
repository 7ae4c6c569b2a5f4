"""Kernels compiled by ``backend="nvrtc"``, launched directly on torch tensors and CuPy arrays."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import LoaderError, extra
from .compiler import Cubin, Parameter


class Shape(NamedTuple):
    """How a kernel is launched: ``shared`` in bytes, and a stream, or None for the current one."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    stream: Any = None


class Values(NamedTuple):
    """A launch's arguments as NumPy scalars, the device of its arrays, and if one is torch's."""

    scalars: list[Any]
    device: int | None
    of_torch: bool


#: Launches the kernel of a cubin with this symbol.
Launch = Callable[[Cubin, str, Shape, Values], None]


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

    def __init__(self, name: str, cubin: Cubin, launch: Launch | None = None) -> None:
        self.name = name
        self.symbol, self.parameters = cubin.kernels[name]
        self._cubin = cubin
        self._launch = launch

    def __repr__(self) -> str:
        kinds = ", ".join(p.kind if p.kind != "b8" else f"{p.size} bytes" for p in self.parameters)
        return f"<DeviceKernel {self.name!r} ({kinds})>"

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
            raise TypeError(
                f"kernel {self.name!r}: give kernel[grid, block], with the bytes of shared memory "
                f"and a stream after them if need be, not {configuration!r}."
            )
        grid, block = (v if isinstance(v, Sequence) else (v,) for v in configuration[:2])
        for size in (grid, block):
            if not 1 <= len(size) <= 3 or not all(type(n) is int and n > 0 for n in size):
                raise ValueError(
                    f"kernel {self.name!r}: a grid and a block are positive integers or tuples of "
                    f"up to three, not {size!r}."
                )
        shape = Shape((*grid, 1, 1)[:3], (*block, 1, 1)[:3], *configuration[2:])
        return functools.partial(self._start, shape)

    def _start(self, shape: Shape, *arguments: Any) -> None:
        if len(arguments) != len(self.parameters):
            raise TypeError(
                f"kernel {self.name!r} takes {len(self.parameters)} arguments "
                f"({', '.join(p.kind for p in self.parameters)}), and {len(arguments)} were given."
            )
        scalars: list[Any] = []
        device, of_torch = None, True
        for index, (argument, parameter) in enumerate(zip(arguments, self.parameters, strict=True)):
            what = f"kernel {self.name!r}: argument {index}"
            if found := _array(what, argument, parameter):
                argument, on, is_torchs = found
                if device is None:
                    device, of_torch = on, is_torchs
                if on != device:
                    raise ValueError(f"{what} is on cuda:{on}, and one before it on cuda:{device}.")
            scalars.append(_scalar(what, argument, parameter))
        values = Values(scalars, device, of_torch)
        (self._launch or make_launch())(self._cubin, self.symbol, shape, values)


def _array(what: str, argument: Any, parameter: Parameter) -> tuple[int, int, bool] | None:
    """The pointer and device of an array, and whether it is torch's; None for anything else."""
    import torch

    is_torchs = isinstance(argument, torch.Tensor)
    if not is_torchs and not hasattr(argument, "__cuda_array_interface__"):
        return None
    if parameter.kind not in ("u64", "b64"):
        raise TypeError(f"{what} is an array; the parameter is {parameter.kind}, not a pointer.")
    if not is_torchs:
        device = getattr(getattr(argument, "device", None), "id", 0)
        return int(argument.__cuda_array_interface__["data"][0]), int(device), False
    if not argument.is_cuda:
        raise ValueError(f"{what} is a tensor on {argument.device}; move it with .to('cuda').")
    return argument.data_ptr(), argument.get_device(), True


def _scalar(what: str, argument: Any, parameter: Parameter) -> Any:
    """The NumPy scalar to pass for a parameter."""
    import numpy as np

    kind, size = parameter
    given = type(argument).__name__
    if kind == "b8":
        raw = memoryview(argument).cast("B")
        if len(raw) != size:
            raise ValueError(f"{what} has {len(raw)} bytes; the parameter has {size}.")
        return np.frombuffer(raw, dtype=f"V{size}")[0]
    if kind in ("f32", "f64"):
        if not isinstance(argument, int | float | np.number) or isinstance(argument, bool):
            raise TypeError(f"{what} is {given}; the parameter is {kind}.")
        return np.dtype(f"f{size}").type(argument)
    if argument is None and size == 8:
        argument = 0
    if not isinstance(argument, int | np.integer | np.bool_):
        raise TypeError(
            f"{what} is {given}; the parameter is an integer of {8 * size} bits, or a pointer."
        )
    number = int(argument)
    if not -(1 << (8 * size - 1)) <= number < 1 << (8 * size):
        raise ValueError(f"{what} is {number}, which does not fit {8 * size} bits.")
    return np.dtype(f"u{size}").type(number % (1 << (8 * size)))


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
        self._cubin = cubin
        self._compile_one = compile_one
        self._launch: Launch | None = None
        self._kernels: dict[str, DeviceKernel] = {}
        self._plain = {n.rpartition("::")[2]: n for n in cubin.kernels}

    def kernel(self, expression: str) -> DeviceKernel:
        """A kernel by a C++ name expression, such as ``"scale<__nv_bfloat16, 4>"``.

        An instance of a template is compiled on first use.

        Raises:
            CompileError: there is no such kernel, or it does not compile.
        """
        if expression not in self._kernels:
            known = expression in self._cubin.kernels
            cubin = self._cubin if known else self._compile_one(expression)
            self._kernels[expression] = DeviceKernel(expression, cubin, self._launch)
        return self._kernels[expression]

    def __getattr__(self, attribute: str) -> DeviceKernel:
        plain = self.__dict__.get("_plain", {})
        if attribute in plain:
            return self.kernel(plain[attribute])
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        near = difflib.get_close_matches(attribute, plain, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(
            f"module {self.__dict__.get('name')!r} has no kernel {attribute!r}.{hint} It has: "
            f"{', '.join(plain) or 'none'}. An instance of a template is had with "
            "module.kernel('name<...>')."
        )

    def __dir__(self) -> list[str]:
        return [*self._plain, "arch", "kernel", "key", "name"]

    def __repr__(self) -> str:
        names = ", ".join(self._cubin.kernels) or "templates alone"
        return f"<DeviceModule {self.name!r} (sm_{self.arch}) key {self.key[:12]}: {names}>"


@functools.cache
def make_launch() -> Launch:
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


def _stream_of(shape: Shape, values: Values) -> _Stream:
    """A stream of torch's, CuPy's or cuda.core's, or an integer; torch's current one for None."""
    stream = shape.stream
    if stream is None:
        import torch

        stream = torch.cuda.current_stream(values.device)
    for attribute in ("cuda_stream", "ptr", "handle"):
        stream = getattr(stream, attribute, stream)
    return _Stream(int(stream))


def with_cupy() -> Launch:
    """Launching through CuPy; a cubin is loaded once on each device."""
    import cupy

    @functools.cache
    def load(cubin: Cubin) -> Any:
        # The file is in memory and is never closed, because CuPy reads it again for each device.
        file = os.memfd_create("cubin")
        os.write(file, cubin.code)
        return cupy.RawModule(path=f"/proc/self/fd/{file}")

    def launch(cubin: Cubin, symbol: str, shape: Shape, values: Values) -> None:
        with contextlib.ExitStack() as stack:
            if values.device is not None:
                stack.enter_context(cupy.cuda.Device(values.device))
            if shape.stream is not None or values.of_torch:
                stream = _stream_of(shape, values)
                stack.enter_context(cupy.cuda.Stream.from_external(stream))
            function = load(cubin).get_function(symbol)
            if shape.shared > 48 << 10:
                function.max_dynamic_shared_size_bytes = shape.shared
            function(shape.grid, shape.block, tuple(values.scalars), shared_mem=shape.shared)

    return launch


def with_cuda_core() -> Launch:
    """Launching through cuda.core; a cubin is loaded once."""
    import torch
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream
    from cuda.core import launch as launch_kernel

    load = functools.cache(lambda cubin: ObjectCode.from_cubin(cubin.code))

    def launch(cubin: Cubin, symbol: str, shape: Shape, values: Values) -> None:
        index = torch.cuda.current_device() if values.device is None else values.device
        with torch.cuda.device(index):
            Device(index).set_current()
            config = LaunchConfig(grid=shape.grid, block=shape.block, shmem_size=shape.shared)
            stream = Stream.from_handle(_stream_of(shape, values).handle)
            launch_kernel(stream, config, load(cubin).get_kernel(symbol), *values.scalars)

    return launch
