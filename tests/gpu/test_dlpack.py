"""CuPy arrays through every public function, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dlpack_cases import calls, parts, public_functions
from torch import Tensor

cupy: Any = pytest.importorskip("cupy")


def on_gpu(tensor: Tensor) -> Tensor:
    """CuPy has no bfloat16."""
    return tensor.to("cuda", torch.float16 if tensor.dtype == torch.bfloat16 else tensor.dtype)


def array(tensor: Tensor) -> Any:
    return cupy.from_dlpack(on_gpu(tensor))


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_cupy_arrays_give_what_tensors_give(name: str) -> None:
    device = torch.device("cuda")
    want, got = (parts(calls(wrap, device)[name]()) for wrap in (on_gpu, array))
    assert len(want) == len(got) > 0
    for one, other in zip(want, got, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
