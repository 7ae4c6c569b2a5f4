"""Arrays of other libraries through every public function, by nothing but DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dlpack_cases import calls, parts, public_functions
from torch import Tensor

import jitquant

CPU = torch.device("cpu")


class Array:
    """What a library has to offer: the two methods of the protocol."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **how: Any) -> Any:
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.tensor.__dlpack_device__()


def test_every_public_function_is_here() -> None:
    assert set(calls(Array, CPU)) == public_functions()


@pytest.mark.parametrize("name", sorted(calls(Array, CPU)))
def test_arrays_give_what_tensors_give(name: str) -> None:
    want, got = (parts(calls(wrap, CPU)[name]()) for wrap in (Tensor.clone, Array))
    assert len(want) == len(got) > 0
    for one, other in zip(want, got, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


def test_memory_is_shared() -> None:
    array = np.ones((2, 16), np.float32)
    gsa = np.full(1, 0.5, np.float32)
    assert jitquant.quantize_nvfp4(array, gsa).gsa.data_ptr() == gsa.ctypes.data


def test_what_is_no_array() -> None:
    with pytest.raises(
        TypeError,
        match=r"x: expected a torch\.Tensor or anything with __dlpack__, such as a CuPy array,",
    ):
        jitquant.quantize_nvfp4([[1.0]])  # type: ignore[arg-type]


def test_what_is_reversed() -> None:
    """PyTorch aborts the process on it."""
    array = np.ones((2, 16), np.float32)[:, ::-1]
    with pytest.raises(ValueError, match="x: expected an array without negative strides, got nd"):
        jitquant.quantize_nvfp4(array)
    assert jitquant.quantize_nvfp4(array.copy()).shape == (2, 16)


def test_what_may_only_be_read_is_not_written() -> None:
    """To write to it would end the process, or change what Python takes for constant."""
    x, weight = np.ones((2, 16), np.float32), np.ones(16, np.float32)
    constant = np.frombuffer(x.tobytes(), np.float32).reshape(2, 16)
    calls: tuple[Any, ...] = (
        jitquant.rmsnorm_quantize_nvfp4,
        jitquant.rmsnorm_quantize_fp8,
        jitquant.rmsnorm_quantize_per_token_group,
    )
    for call in calls:
        with pytest.raises(
            ValueError,
            match=r"residual: expected a writable array, as it is written in place, got a "
            r"read-only ndarray\. Pass a copy, such as residual\.copy\(\)",
        ):
            call(x, weight, residual=constant)
    assert (constant == 1).all()
    assert jitquant.quantize_nvfp4(constant).shape == (2, 16)
    q = jitquant.quantize_nvfp4(x, np.frombuffer(weight.tobytes(), np.float32)[:1])
    jitquant.quantize_nvfp4(x * 2, out=q)  # whose gsa is a buffer of its own then
    assert torch.equal(q.gsa, jitquant.amax_gsa(x * 2))
