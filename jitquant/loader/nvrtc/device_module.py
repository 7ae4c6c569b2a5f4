"""Kernels compiled by ``backend="nvrtc"``, launched directly on torch tensors and CuPy arrays."""

from __future__ import annotations

import contextlib
import difflib
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import LoaderError, extra
from .compiler import Parameter


class Kernel(NamedTuple):
    """A kernel in a cubin: its symbol and its parameters."""

    symbol: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, eq=False)
class Cubin:
    """Compiled code, and its kernels by qualified name or by the expression asked for."""

    code: bytes
    kernels: dict[str, Kernel]


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
        grid, block = (_triple(self.name, what) for what in configuration[:2])
        shape = Shape(grid, block, int(configuration[2]) if len(configuration) > 2 else 0)
        stream = configuration[3] if len(configuration) > 3 else None

        def launch(*arguments: Any) -> None:
            values, device = self._values(arguments)
            launcher = self._launch or make_launch()
            launcher(self._cubin, self.symbol, shape, stream, values, device)

        return launch

    def _values(self, arguments: Sequence[Any]) -> tuple[list[Any], _Device]:
        if len(arguments) != len(self.parameters):
            raise TypeError(
                f"kernel {self.name!r} takes {len(self.parameters)} arguments "
                f"({', '.join(p.kind for p in self.parameters)}), and {len(arguments)} were given."
            )
        device = _Device()
        pairs = zip(arguments, self.parameters, strict=True)
        return [
            _value(f"kernel {self.name!r}: argument {index}", argument, parameter, device)
            for index, (argument, parameter) in enumerate(pairs)
        ], device


class _Device:
    """The device of the arguments of a launch, and whether torch's stream is meant."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.torch = True

    def add(self, what: str, index: int, *, torch: bool) -> None:
        if self.index is None:
            self.index, self.torch = index, torch
        elif index != self.index:
            raise ValueError(f"{what} is on cuda:{index}, and one before it on cuda:{self.index}.")


class Shape(NamedTuple):
    """How a kernel is launched; ``shared`` in bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int


#: Launches a kernel of a cubin: (cubin, symbol, shape, stream, values, device).
Launch = Callable[[Cubin, str, Shape, Any, list[Any], _Device], None]


def _triple(name: str, value: Any) -> tuple[int, int, int]:
    items = tuple(value) if isinstance(value, Sequence) else (value,)
    if not 1 <= len(items) <= 3 or not all(
        isinstance(i, int) and not isinstance(i, bool) and i > 0 for i in items
    ):
        raise ValueError(
            f"kernel {name!r}: a grid and a block are positive integers or tuples of up to three, "
            f"not {value!r}."
        )
    return (*items, 1, 1)[:3]


def _value(what: str, argument: Any, parameter: Parameter, device: _Device) -> Any:
    """The NumPy scalar to pass for a parameter."""
    import numpy as np
    import torch

    kind, size = parameter.kind, parameter.size
    if isinstance(argument, torch.Tensor):
        if not argument.is_cuda:
            raise ValueError(f"{what} is a tensor on {argument.device}; move it with .to('cuda').")
        device.add(what, argument.get_device(), torch=True)
        pointer = argument.data_ptr()
    elif hasattr(argument, "__cuda_array_interface__"):
        own = getattr(argument, "device", None)
        device.add(what, int(getattr(own, "id", 0) or 0), torch=False)
        pointer = int(argument.__cuda_array_interface__["data"][0])
    elif kind == "b8":
        raw = memoryview(argument).cast("B") if not isinstance(argument, bytes) else argument
        if len(raw) != size:
            raise ValueError(f"{what} has {len(raw)} bytes; the parameter has {size}.")
        return np.frombuffer(raw, dtype=f"V{size}")[0]
    elif argument is None and kind in ("u64", "b64"):
        return np.uint64(0)
    elif kind in ("f32", "f64"):
        if not isinstance(argument, int | float | np.number) or isinstance(argument, bool):
            raise TypeError(f"{what} is {type(argument).__name__}; the parameter is {kind}.")
        return np.float32(argument) if kind == "f32" else np.float64(argument)
    else:
        if isinstance(argument, float | np.floating) or not isinstance(
            argument, int | bool | np.integer | np.bool_
        ):
            raise TypeError(
                f"{what} is {type(argument).__name__}; the parameter is an integer of "
                f"{8 * size} bits, or a pointer."
            )
        number = int(argument)
        if not -(1 << (8 * size - 1)) <= number < 1 << (8 * size):
            raise ValueError(f"{what} is {number}, which does not fit {8 * size} bits.")
        return np.dtype(f"u{size}").type(number % (1 << (8 * size)))
    if kind not in ("u64", "b64"):
        raise TypeError(f"{what} is an array; the parameter is {kind}, not a pointer.")
    return np.uint64(pointer)


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
        self,
        name: str,
        arch: str,
        key: str,
        cubin: Cubin,
        compile_one: Callable[[str], Cubin],
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
        known = self._kernels.get(expression)
        if known is None:
            cubin = self._cubin if expression in self._cubin.kernels else None
            known = DeviceKernel(expression, cubin or self._compile_one(expression), self._launch)
            self._kernels[expression] = known
        return known

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


def _stream_of(stream: Any, device: _Device) -> int:
    """The handle of a stream of torch's, CuPy's or cuda.core's, or an integer."""
    if stream is None:
        import torch

        return int(torch.cuda.current_stream(device.index).cuda_stream)
    for attribute in ("cuda_stream", "ptr", "handle"):
        stream = getattr(stream, attribute, stream)
    return int(stream)


class _Handle(NamedTuple):
    """A stream in the protocol of CUDA's Python packages."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def with_cupy() -> Launch:
    """Launching through CuPy; a cubin is loaded once on each device."""
    import cupy

    modules: dict[Cubin, Any] = {}

    def launch(
        cubin: Cubin, symbol: str, shape: Shape, stream: Any, values: list[Any], device: _Device
    ) -> None:
        if cubin not in modules:
            # The file stays: CuPy reads it again for another device.
            file = tempfile.NamedTemporaryFile(suffix=".cubin")  # noqa: SIM115
            file.write(cubin.code)
            file.flush()
            modules[cubin] = cupy.RawModule(path=file.name), file
        with contextlib.ExitStack() as stack:
            if device.index is not None:
                stack.enter_context(cupy.cuda.Device(device.index))
            if stream is not None or device.torch:
                handle = _Handle(_stream_of(stream, device))
                stack.enter_context(cupy.cuda.Stream.from_external(handle))
            function = modules[cubin][0].get_function(symbol)
            if shape.shared > 48 << 10:
                function.max_dynamic_shared_size_bytes = shape.shared
            function(shape.grid, shape.block, tuple(values), shared_mem=shape.shared)

    return launch


def with_cuda_core() -> Launch:
    """Launching through cuda.core; a cubin is loaded once."""
    from cuda.core import Device, LaunchConfig, ObjectCode, Stream
    from cuda.core import launch as launch_kernel

    codes: dict[Cubin, Any] = {}

    def launch(
        cubin: Cubin, symbol: str, shape: Shape, stream: Any, values: list[Any], device: _Device
    ) -> None:
        import torch

        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            Device(index).set_current()
            if cubin not in codes:
                codes[cubin] = ObjectCode.from_cubin(cubin.code)
            config = LaunchConfig(grid=shape.grid, block=shape.block, shmem_size=shape.shared)
            kernel = codes[cubin].get_kernel(symbol)
            launch_kernel(Stream.from_handle(_stream_of(stream, device)), config, kernel, *values)

    return launch
