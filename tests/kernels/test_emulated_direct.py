"""The way past the dispatcher, on the CPU: `direct.h` with the emulated CUDA below it and PyTorch's
Python above it, which is told that tensors are on a GPU.

CUDA's and PyTorch's current device may differ: PyTorch only remembers a device that has no context.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor

from jitquant import reference
from jitquant.testing import bytes_of

from .emulated import Machine

_CAPSULE = b"dlpack_exchange_api"
_CUDA = 2


class _DLTensor(ctypes.Structure):
    """The first fields of DLPack's, which are what differs for a tensor on a GPU."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


_FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))


class _Exchange(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("other", ctypes.c_void_p * 4),
        ("tensor_from_object", _FromObject),
        ("current_work_stream", ctypes.c_void_p),
    )


class Torch:
    """PyTorch as `direct.h` sees it; ``devices`` has where each tensor lies, by its memory."""

    def __init__(self, machine: Machine, patch: pytest.MonkeyPatch) -> None:
        self.devices: dict[int, int] = {}
        self._machine = machine
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
        api.PyCapsule_New.restype = ctypes.py_object
        api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        own = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
        address = api.PyCapsule_GetPointer(own, _CAPSULE)
        real = _Exchange.from_address(address)

        def from_object(tensor: Any, out: Any) -> int:
            status: int = real.tensor_from_object(tensor, out)
            out.contents.device_type = _CUDA
            out.contents.device_id = self.devices[tensor.data_ptr()]
            return status

        self._exchange = _Exchange.from_buffer_copy(real)
        self._exchange.tensor_from_object = self._callback = _FromObject(from_object)
        capsule = api.PyCapsule_New(ctypes.addressof(self._exchange), _CAPSULE, None)
        patch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", capsule)
        patch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", self._empty)

    def _empty(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return self.on(self._machine.current[1], torch.empty_strided(size, stride, dtype=dtype))

    def on(self, device: int, tensor: Tensor) -> Tensor:
        self.devices[tensor.data_ptr()] = device
        return tensor


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Torch, Path]]:
    folder = tmp_path_factory.mktemp("direct")
    machine = Machine(["quantize_fp8", "quantize_mxfp8"], folder, python=True)
    with pytest.MonkeyPatch.context() as patch:
        yield machine, Torch(machine, patch), folder


def _module(machine: tuple[Machine, Torch, Path], name: str) -> ModuleType:
    path = str(machine[2] / f"{name}.so")
    loader = ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module")
def module(machine: tuple[Machine, Torch, Path]) -> ModuleType:
    return _module(machine, "quantize_mxfp8")


@pytest.fixture
def call(
    machine: tuple[Machine, Torch, Path], module: ModuleType
) -> Callable[[int, int, int], tuple[Any, list[int]]]:
    def call(device: int, cuda: int, torch_: int) -> tuple[Any, list[int]]:
        """What a call with a tensor on ``device`` gives, and the devices of what it made."""
        emulated, torch_of, _ = machine
        emulated.use(device)
        emulated.make_current(cuda, torch_)
        torch_of.devices.clear()
        x = torch_of.on(device, randn(8, 64))
        arguments = (x, torch.float8_e4m3fn, "linear")
        got = module.direct_quantize_mxfp8(True, *arguments)
        assert emulated.current == (cuda, torch_)
        del torch_of.devices[x.data_ptr()]
        return got, list(torch_of.devices.values())

    return call


@pytest.mark.parametrize(("device", "cuda"), [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_results_are_on_the_tensors_device(call: Any, device: int, cuda: int) -> None:
    got, made = call(device, cuda, device)
    assert made == [device, device]
    expected = reference.quantize_mxfp8(randn(8, 64), dtype=torch.float8_e4m3fn)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(bytes_of(a), bytes_of(b))


@pytest.mark.parametrize(("device", "cuda"), [(1, 1), (0, 0), (1, 0), (0, 1)])
def test_nothing_is_made_where_torch_is_on_another_device(
    call: Any, device: int, cuda: int
) -> None:
    """In a process that has used cuda:1 alone, CUDA is on it and PyTorch on cuda:0."""
    got, made = call(device, cuda, 1 - device)
    assert got is NotImplemented
    assert made == []


def test_none_stands_for_a_buffer_without_elements(machine: tuple[Machine, Torch, Path]) -> None:
    emulated, torch_of, _ = machine
    emulated.use(0)
    emulated.make_current(0, 0)
    torch_of.devices.clear()
    x = torch_of.on(0, randn(8, 64))
    data = torch_of.on(0, torch.zeros(8, 64, dtype=torch.float8_e4m3fn))
    scale_inv = torch_of.on(0, torch.zeros(1))
    quantize = _module(machine, "quantize_fp8").direct_quantize_fp8

    def into(with_amax: bool) -> Any:
        how = (None, torch.float8_e4m3fn, 2.0, None, None, "tensor", with_amax)
        return quantize(True, x, *how, data, scale_inv, None)

    assert into(True) is NotImplemented
    assert not bytes_of(data).any()
    assert into(False) is None
    wanted, inverse, _ = reference.quantize_fp8(
        x, dtype=torch.float8_e4m3fn, scale_value=2.0, with_amax=False
    )
    assert torch.equal(bytes_of(data), bytes_of(wanted))
    assert torch.equal(scale_inv, inverse)
