"""What the layers in place of ``nn.Linear`` ask of it and of their input, in the same words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jitquant.formats import INPUT_DTYPES


def check_linear(linear: nn.Module) -> None:
    """``linear`` is ``nn.Linear`` itself, of a dtype that can be quantized.

    Raises:
        TypeError: it is not.
    """
    if type(linear) is not nn.Linear:
        raise TypeError(
            f"linear: expected torch.nn.Linear itself, got {type(linear).__name__}. A subclass may "
            "compute something else"
        )
    check_dtype(linear.weight.dtype, "linear.weight")


def check_dtype(dtype: Any, name: str = "dtype") -> None:
    """A dtype that can be quantized and computed with.

    Raises:
        TypeError: it is another one.
    """
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {dtype}")


def check_tensor(x: object, name: str = "x") -> None:
    """An argument is a tensor.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def check_input_gsa(gsa: Tensor, name: str) -> None:
    """A static gsa of inputs is float32 (1,).

    Raises:
        TypeError: it is no tensor, or of another dtype.
        ValueError: it is of another shape.
    """
    check_tensor(gsa, name)
    if gsa.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {gsa.dtype}. Convert it with .float()")
    if gsa.shape != (1,):
        raise ValueError(
            f"{name}: expected shape (1,), amax / 2688 of all inputs, got shape {tuple(gsa.shape)}"
        )


def check_columns(shape: torch.Size | tuple[int, ...], in_features: int, name: str = "x") -> None:
    """An input is (..., in_features).

    Raises:
        ValueError: it is of another shape.
    """
    if len(shape) == 0 or shape[-1] != in_features:
        raise ValueError(
            f"{name}: expected shape (..., {in_features}), got shape {tuple(shape)}. in_features "
            f"is {in_features}"
        )


def check_same_dtype(x: Tensor, dtype: torch.dtype, name: str = "x") -> None:
    """An input is of the layer's dtype, or of any under autocast.

    Raises:
        TypeError: it is of another one.
    """
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        ways = f"Call {name}.to({dtype})"
        if x.dtype in INPUT_DTYPES:
            ways += f" or layer.to({x.dtype}), or use torch.autocast"
        raise TypeError(f"{name}: expected {dtype}, as the layer has, got {x.dtype}. {ways}")


def check_input(x: Tensor, in_features: int, dtype: torch.dtype) -> None:
    """An input to quantize: (..., in_features), of the layer's dtype, or under autocast of any of
    the three.

    Raises:
        TypeError: it is no tensor, or of another dtype.
        ValueError: it is of another shape.
    """
    check_tensor(x)
    check_dtype(x.dtype, "x")
    check_columns(x.shape, in_features)
    check_same_dtype(x, dtype)
