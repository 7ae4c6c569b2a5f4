"""The first line of a failure of ``assert torch.equal(a, b)``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

X = torch.arange(6.0).reshape(2, 3)
Y = X + torch.tensor([[0.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
NAN = torch.tensor([float("nan")])


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (X, Y, "2 of 6 elements differ, first at (0, 2): 2.0 and 2.5"),
        (X, X[:, :2], "shapes differ: (2, 3) and (2, 2)"),
        (X.to(torch.float8_e4m3fn), (X + 1).to(torch.float8_e4m3fn), "6 of 6 elements differ"),
        (torch.tensor(1), torch.tensor(2), "1 of 1 elements differ, first at (): 1 and 2"),
        (NAN, NAN.clone(), "1 of 1 elements differ, first at (0,): nan and nan"),
        (NAN.to(torch.float8_e4m3fn), NAN.to(torch.float8_e4m3fn), "a NaN is not equal"),
    ],
)
def test_a_failure_says_which_elements_differ(a: Tensor, b: Tensor, said: str) -> None:
    with pytest.raises(AssertionError) as caught:
        assert torch.equal(a, b)
    assert said in str(caught.value).splitlines()[0]


def test_equal_tensors_are_equal() -> None:
    assert torch.equal(X, X.clone()) is True
    assert not torch.equal(X, Y)
    assert torch.equal(X, Y) == False  # noqa: E712 - what a caller may compare it with
