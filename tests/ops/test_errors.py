"""Every bad argument: the error says what was expected, what it got, and the way out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import torch
from error_cases import Case, check_case, read_cases

import jitquant
from jitquant import QuantizedActivation

J = jitquant
TABLE = Path(__file__).with_name("errors_nvfp4.txt")
FILLED = ("zeros", "ones", "tensor")


def cases(device: str) -> dict[str, Case]:
    """The cases of ``errors_nvfp4.txt`` on a device, with the names that they use."""
    empty = partial(QuantizedActivation.empty, device=device)

    def randn(*shape: int) -> torch.Tensor:
        return samples.randn(*shape).to(device)

    x = randn(4, 32)

    def buffers(**changed: Any) -> QuantizedActivation:
        """Fitting buffers for X with some parts changed."""
        out = empty((4, 32))
        for name, value in changed.items():
            setattr(out, name, value)
        return out

    names = {
        **{name: getattr(jitquant, name) for name in jitquant.__all__},
        **{name: partial(getattr(torch, name), device=device) for name in FILLED},
        "math": math,
        "np": np,
        "torch": torch,
        "randn": randn,
        "empty": empty,
        "buffers": buffers,
        "X": x,
        "FUSED": randn(4, 64),
        "WEIGHT": torch.ones(32, device=device),
        "BYTES": torch.zeros(128, dtype=torch.uint8, device=device),
        "MIX": randn(4, 3, 32),
        "MIX_WEIGHTS": torch.ones(4, 3, device=device),
        "Q": jitquant.quantize_nvfp4(x),
        "META": torch.zeros(4, 32, device="meta"),
    }
    return read_cases(TABLE, names, str(x.device))


CASES = cases("cpu")
X = samples.randn(4, 32)
META = torch.zeros(4, 32, device="meta")


@pytest.mark.parametrize("name", CASES)
def test_message(name: str) -> None:
    check_case(name, CASES[name])


def test_out_is_left_alone_by_a_refused_call() -> None:
    out = QuantizedActivation.empty((4, 48))
    gsa = out.gsa
    with pytest.raises(ValueError, match=r"out\.shape"):
        J.quantize_nvfp4(X, torch.ones(1), out=out)
    assert out.gsa is gsa


def test_out_that_requires_grad() -> None:
    q, values = J.quantize_nvfp4(X), torch.ones(4, 32, requires_grad=True)
    for name, call in {
        "out": lambda: q.dequantize(torch.float32, out=values),
        r"out\.gsa": lambda: J.quantize_nvfp4(X, out=replace(q, gsa=values[0, :1])),
    }.items():
        with pytest.raises(
            ValueError, match=f"{name}: expected a buffer that does not require grad, got"
        ):
            call()
    assert (values == 1).all()
    with torch.no_grad():
        q.dequantize(torch.float32, out=values)
    assert torch.equal(values, q.dequantize(torch.float32))


def test_device_without_kernels() -> None:
    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("mps")

    x = torch.Tensor._make_subclass(Elsewhere, X)
    with pytest.raises(
        ValueError, match="x: expected a tensor on cpu or cuda, got one on mps"
    ) as caught:
        J.quantize_nvfp4(x)
    assert "x.to('cuda')" in str(caught.value)


def test_sparse_input() -> None:
    from jitquant.ops import _checks

    with pytest.raises(
        TypeError,
        match=r"x: expected layout torch\.strided, got torch\.sparse_coo.*x\.to_dense\(\)",
    ):
        _checks.input_tensor(torch.eye(16).to_sparse(), "x")


def test_ops_check_too() -> None:
    q = J.quantize_nvfp4(X)
    with pytest.raises(ValueError, match=r"x\.contiguous\(\)"):
        torch.ops.jitquant.quantize_nvfp4(X.T)
    with pytest.raises(
        ValueError, match="recipe: expected one of 'te', 'vllm', 'te_flush', got 'a'"
    ):
        torch.ops.jitquant.quantize_nvfp4(META, recipe="a")
    with pytest.raises(
        ValueError, match=r"out\.gsa: expected shape \(1,\) for this call, got shape \(2,\)"
    ):
        torch.ops.jitquant.quantize_nvfp4.out(X, x_fp4=q.x_fp4, x_sf=q.x_sf, gsa=torch.zeros(2))


def test_errors_say_expected_and_got() -> None:
    """One pattern, "argument: expected this, got that", in Python and in the bindings."""
    package = Path(jitquant.__file__).parent
    bindings = package.parent / "kernels_cu" / "bindings"
    seen = 0
    for path in (*package.rglob("*.py"), *bindings.glob("*.h"), *bindings.glob("*.cpp")):
        # Adjacent literals are one text.
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for line in text.splitlines():
            assert not re.search(r'"[^"]*; accepted (is|are) ', line), f"{path.name}: {line}"
        seen += len(re.findall(r": expected .*", text))
    assert seen > 300
