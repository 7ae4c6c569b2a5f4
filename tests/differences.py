"""How two tensors differ, for the first line of a failure."""

from __future__ import annotations

import torch
from torch import Tensor


class Different(int):
    """A false result of `torch.equal`, whose repr is what pytest shows after "assert"."""

    text: str

    def __repr__(self) -> str:
        return self.text


def difference(a: Tensor, b: Tensor) -> Different:
    """What is different about tensors that are not equal: their shapes, or which elements."""
    different = Different()
    different.text = _text(a, b)
    return different


def _text(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    if a.dtype == b.dtype and a.element_size() == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    differs = (a != b).reshape(-1)
    if not differs.any():  # equal bytes, as of a NaN in 8 bits
        return "values differ: a NaN is not equal to itself"
    first = int(differs.nonzero()[0, 0])
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), a.shape))
    return (
        f"{int(differs.sum())} of {differs.numel()} elements differ, first at {at}: "
        f"{a.reshape(-1)[first].item()} and {b.reshape(-1)[first].item()}"
    )
