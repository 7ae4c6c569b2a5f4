"""The kernels on the CPU: compiled with ``emulation/`` in CUDA's place, and called by name.

A library is a ``.cu`` with its binding, so that a call goes the way of a call on a GPU from the
binding's checks to the kernels' stores; only PyTorch and CUDA are others. ``emulation/machine.h``
says what the machine is like.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from host_code import compiled, link
from torch import Tensor

from jitquant.loader.request.sources import kernel_files

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels_cu"
EMULATION = Path(__file__).with_name("emulation")

DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e8m0fnu: 44,
    torch.float4_e2m1fn_x2: 45,
}
"""Torch's numbers, of which a schema's ScalarType is one."""

PAGE = 4096

SHARED = ("common", "function", "declared/checks")
"""The sources that all bindings are linked with."""

ALIGNED = ("-fsanitize=alignment", "-fno-sanitize=null", "-fsanitize-undefined-trap-on-error")
"""Loads and stores at other addresses fail; calls instead of traps take longer to compile."""

POISON = 0xA5
"""A byte that no result has everywhere: what is left of it has not been written."""


def poisoned(t: Tensor) -> Tensor:
    """A contiguous tensor as large as ``t``, full of POISON."""
    memory = torch.full((t.numel() * t.element_size(),), POISON, dtype=torch.uint8)
    return memory.view(t.dtype).view(t.shape)


class _Memory:
    """The tensors of a call in the machine's own memory, which it can protect."""

    def __init__(self, machine: ctypes.CDLL) -> None:
        self._machine = machine
        self._copies: dict[int, tuple[int, int]] = {}  # of a storage: address and bytes

    def address(self, t: Tensor) -> int:
        storage = t.untyped_storage()
        data, count = storage.data_ptr(), storage.nbytes()
        if count == 0:
            return data
        if data not in self._copies:
            # As far from the beginning of a page as it was.
            at = self._machine.emulation_allocate(count, data % PAGE)
            ctypes.memmove(at, data, count)
            self._copies[data] = (at, count)
        return self._copies[data][0] + t.data_ptr() - data

    def give_back(self) -> None:
        for data, (at, count) in self._copies.items():
            ctypes.memmove(data, at, count)
        self._machine.emulation_release_all()


class _Value(ctypes.Structure):
    """``Value`` of ``emulation/torch/csrc/stable/c/shim.h``."""

    _fields_ = (
        ("present", ctypes.c_bool),
        ("is_optional", ctypes.c_bool),
        ("is_number", ctypes.c_bool),
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("text", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )

    @classmethod
    def of(cls, value: Any, memory: _Memory) -> _Value:
        if value is None:
            return cls()
        if isinstance(value, Tensor):
            numbers = ctypes.c_int64 * value.dim()
            sizes, strides = numbers(*value.shape), numbers(*value.stride())
            pointer = ctypes.POINTER(ctypes.c_int64)
            return cls(
                present=True,
                integer=DTYPES[value.dtype],
                data=memory.address(value),
                rank=value.dim(),
                sizes=ctypes.cast(sizes, pointer),
                strides=ctypes.cast(strides, pointer),
            )
        if isinstance(value, torch.dtype):
            return cls(present=True, integer=DTYPES[value])
        if isinstance(value, str):
            return cls(present=True, text=value.encode())
        integer = int(value) if math.isfinite(value) else 0
        return cls(present=True, integer=integer, number=float(value))


class Machine:
    """The libraries ``names``, compiled into ``folder``, and the devices they run on.

    With ``python`` they are modules of Python too, with the functions that pass by the dispatcher.
    ``flags`` are the compiler's beside.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        *,
        python: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        # The fibers are changed by longjmp, which a check would take for an error.
        unchecked = "-U_FORTIFY_SOURCE"
        warnings = ("-Wall", "-Wextra", "-Werror")
        objects = [compiled(["-O2", unchecked, *warnings, EMULATION / "machine.cpp"])]
        machine = link(objects, folder / "libmachine.so")

        # Nothing is another library's, not even where the same template is in both.
        own = ["-fvisibility=hidden", "-fno-gnu-unique", "-fno-extern-tls-init"]
        headers = [f"-I{sysconfig.get_path('include')}"] if python else []
        headers += [f"-I{EMULATION}", f"-I{KERNELS / 'include'}"]
        common = ["-Og", "-w", unchecked, *own, *ALIGNED, *headers]
        files = kernel_files(KERNELS)
        bindings = KERNELS / "bindings"

        def build(name: str) -> Path:
            if name in SHARED:
                return compiled([*common, bindings / f"{name}.cpp"])
            named = [f"-DTORCH_EXTENSION_NAME={name}", "-include", files[name]]
            return compiled([*common, *flags, *named, bindings / f"{name}.cpp"])

        # What takes longest first.
        by_size = sorted(names, key=lambda name: -files[name].stat().st_size)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = dict(
                zip((*by_size, *SHARED), pool.map(build, (*by_size, *SHARED)), strict=True)
            )
        for name in names:
            made = [objects[part] for part in (name, *SHARED)]
            link(made, folder / f"{name}.so", machine)
        self._machine = ctypes.CDLL(str(machine))
        self._machine.emulation_allocate.restype = ctypes.c_size_t
        self._machine.emulation_allocate.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._machine.emulation_error.restype = ctypes.c_char_p
        self._machine.emulation_launches.restype = ctypes.c_int64
        self._machine.emulation_kernel.restype = ctypes.c_bool
        self.devices: int = self._machine.emulation_devices()
        self._libraries = {name: ctypes.CDLL(str(folder / f"{name}.so")) for name in names}
        for library in self._libraries.values():
            library.emulation_schema.restype = ctypes.c_char_p
            library.emulation_call.restype = ctypes.c_bool
            if library.jitquant_make_resident() != 0:  # the machine knows all its kernels then
                raise RuntimeError("a library cannot make its kernels resident")

    def use(self, device: int, *, descending: bool = False) -> None:
        """Which device runs, and in which order its warps and blocks do."""
        self._machine.emulation_use(device, int(descending))

    def make_current(self, cuda: int, torch: int) -> None:
        """What CUDA and PyTorch take for the current device; tensors stay where `use` has them."""
        self._machine.emulation_make_current(cuda, torch)

    @property
    def current(self) -> tuple[int, int]:
        """As `make_current` takes it."""
        return self._machine.emulation_current(0), self._machine.emulation_current(1)

    def multiprocessors(self, device: int) -> int:
        """Of a device."""
        count: int = self._machine.emulation_multiprocessors(device)
        return count

    def refuse(self, refuse: bool) -> None:
        """Whether launches fail."""
        self._machine.emulation_refuse(refuse)

    @property
    def last_error(self) -> int:
        """The error that the next one who asks CUDA would get."""
        error: int = self._machine.emulation_last_error()
        return error

    @property
    def launches(self) -> int:
        count: int = self._machine.emulation_launches()
        return count

    def kernels(self) -> dict[str, bool]:
        """All kernels of the libraries, by name, and whether they were launched."""
        names: dict[str, dict[int, str]] = {}
        found = {}
        launched, module, place = ctypes.c_bool(), ctypes.c_char_p(), ctypes.c_uint64()
        pointers = [ctypes.byref(value) for value in (launched, module, place)]
        index = 0
        while self._machine.emulation_kernel(index, *pointers):
            path = (module.value or b"").decode()
            if path not in names:
                listed = subprocess.run(
                    ["nm", "-C", path], check=True, capture_output=True, text=True
                ).stdout
                rows = [line.split(" ", 2) for line in listed.splitlines()]
                names[path] = {int(row[0], 16): row[2] for row in rows if row[0]}
            found[f"{Path(path).stem}: {names[path][place.value]}"] = launched.value
            index += 1
        return found

    def call(self, module: str, function: str, *args: Any, **kwargs: Any) -> None:
        """Calls the ``out`` overload of a module's function; tensors are the CPU's.

        Raises:
            RuntimeError: the binding refuses the call, or a kernel did what a GPU does not define.
        """
        library = self._libraries[module]
        name = f"{function}.out".encode()
        text = library.emulation_schema(name)
        if text is None:
            raise RuntimeError(f"{module} has no {name.decode()}")
        schema = torch._C.parse_schema(text.decode())
        complete = list(args)
        for argument in schema.arguments[len(args) :]:
            if argument.name in kwargs:
                complete.append(kwargs.pop(argument.name))
            else:
                complete.append(argument.default_value)
        if kwargs:
            raise RuntimeError(f"{text.decode()} has no {sorted(kwargs)}")
        memory = _Memory(self._machine)
        values = (_Value * len(complete))(*(_Value.of(value, memory) for value in complete))
        for value, argument in zip(values, schema.arguments, strict=True):
            declared = str(argument.real_type)
            value.is_optional = declared.startswith("Optional[")
            value.is_number = "float" in declared
        refusal = ctypes.create_string_buffer(1024)
        sizes = ctypes.c_size_t(len(complete)), ctypes.c_size_t(len(refusal))
        done = library.emulation_call(name, values, sizes[0], refusal, sizes[1])
        memory.give_back()
        error = self._machine.emulation_error().decode()
        if error or not done:
            raise RuntimeError(f"{function}: {error or refusal.value.decode()}")
