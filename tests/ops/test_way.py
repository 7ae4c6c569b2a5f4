"""The way of a call from a public function to the numbers and back: few files, few turns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from samples import randn

import jitquant
from jitquant.ops import ALL_OPS, Op
from jitquant.ops.schema import Compiled

PACKAGE = Path(jitquant.__file__).parent


class Entered(NamedTuple):
    """A function of the package that a call went through."""

    file: str
    name: str


def way(call: Callable[[], object]) -> list[Entered]:
    """The functions that a second call enters, in order."""
    call()
    entered: list[Entered] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            file, name = path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname
            entered.append(Entered(file, name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


class Call(NamedTuple):
    """A call of a public function.

    Attributes:
        call: it.
        files: how many files it goes through at most, beside those of the numbers and formats.
        functions: how many functions it enters at most, beside those of the numbers.
    """

    call: Callable[[], object]
    files: int
    functions: int


X, W, OFFSETS = randn(2, 32), randn(32, 32), torch.tensor([0, 16, 32])
Q4, Q8, W4 = jitquant.quantize_nvfp4(W), jitquant.quantize_fp8(W), jitquant.quantize_weight_nvfp4(W)
RAGGED = jitquant.quantize_ragged(W, OFFSETS)
CALLS = {
    "quantize_nvfp4": Call(lambda: jitquant.quantize_nvfp4(X), 3, 26),
    "quantize_weight_nvfp4": Call(lambda: jitquant.quantize_weight_nvfp4(W), 3, 30),
    "rmsnorm_quantize_nvfp4": Call(lambda: jitquant.rmsnorm_quantize_nvfp4(X, X[0]), 5, 42),
    "deinterleave_quantize_nvfp4": Call(lambda: jitquant.deinterleave_quantize_nvfp4(X, 16), 5, 32),
    "dequantize_nvfp4": Call(lambda: jitquant.dequantize_nvfp4(Q4), 3, 32),
    "nvfp4_linear": Call(lambda: jitquant.nvfp4_linear(X, W4), 4, 44),
    "quantize_fp8": Call(lambda: jitquant.quantize_fp8(X), 4, 25),
    "quantize_per_token_group": Call(lambda: jitquant.quantize_per_token_group(X, 16), 5, 30),
    "quantize_block": Call(lambda: jitquant.quantize_block(X, (16, 16)), 5, 30),
    "quantize_mxfp8": Call(lambda: jitquant.quantize_mxfp8(X), 4, 24),
    "dequantize": Call(lambda: jitquant.dequantize(Q8), 3, 19),
    "quantize_ragged": Call(lambda: jitquant.quantize_ragged(W, OFFSETS), 4, 30),
    "dequantize_ragged": Call(lambda: jitquant.dequantize_ragged(RAGGED), 4, 28),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_short_and_its_arguments_have_names(name: str) -> None:
    call, most_files, most_functions = CALLS[name]
    entered = [e for e in way(call) if not e.file.startswith("numerics/")]
    assert entered[0].name == name
    files = {e.file for e in entered} - {"formats.py"}
    assert len(files) <= most_files, files
    assert len(entered) <= most_functions, [e.name for e in entered]
    assert {"direct", "into"} & {e.name.rpartition(".")[2] for e in entered}


def test_a_call_goes_through_four_files() -> None:
    entered = [e.file for e in way(CALLS["quantize_nvfp4"].call)]
    assert len(entered) <= 50, entered
    # And through the table of formats, for the shapes of what is packed.
    turned = [file for file in entered if file != "formats.py"]
    files = {"ops/nvfp4.py", "ops/schema.py", "ops/_checks.py", "numerics/nvfp4.py"}
    assert set(turned) == files
    assert sum(a != b for a, b in pairwise(turned)) <= 12, turned


def _loaded(op: Op) -> Compiled:
    """A stand-in for the op's compiled function, with the results of its reference."""
    results: list[Any] = []

    def direct(_: bool, *args: Any) -> Any:
        if not results:
            results.append(op.dispatched(op.tensors(dict(zip(op.names, args, strict=True)))))
        return results[0]

    return Compiled(None, direct, lambda: True)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_loaded_kernel_goes_through_three_files(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in ALL_OPS:
        monkeypatch.setattr(op, "_kept", _loaded(op))
    entered = way(CALLS[name].call)
    assert len({e.file for e in entered} - {"formats.py"}) <= 3, entered
    assert len(entered) <= 8, entered
