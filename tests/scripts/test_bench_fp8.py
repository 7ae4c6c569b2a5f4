"""The benchmark's plain FP8 code has the ops' bits, and its sums of bytes are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.bench.op import Op, Traffic
from harness.bench.ops import OPS, chosen
from harness.bench.ops_fp8 import FP8_OPS
from harness.bench.ops_nvfp4 import NVFP4_OPS
from harness.bench.ops_ragged import RAGGED_OPS
from torch import Tensor

from jitquant import QuantizedRaggedTensor, QuantizedTensor

# Each once; that of NVFP4 among them has tests of its own.
MEASURED = [op for op in dict.fromkeys((*FP8_OPS, *RAGGED_OPS)) if op not in NVFP4_OPS]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _parts(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, QuantizedRaggedTensor):
        parts = (result.data, result.scale_inv, result.amax, result.block_scales, result.dbias)
        return [part for part in parts if part is not None]
    if isinstance(result, tuple):
        return [part for both in result for part in _parts(both)]
    assert isinstance(result, QuantizedTensor)
    parts = (result.data, result.scale_inv, result.amax, result.inv_rms)
    return [part for part in parts if part is not None]


def _nbytes(result: object) -> int:
    """Bytes in memory: the padding of scales is written too."""
    if isinstance(result, tuple):
        return sum(_nbytes(both) for both in result)
    if isinstance(result, QuantizedTensor):
        return result.nbytes
    return sum(part.nbytes for part in _parts(result))


def _as_bytes(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _arguments(op: Op, m: int, n: int, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(m + n)
    shaped = [torch.randn(shape, dtype=dtype) for shape in op.shapes(m, n)]
    if op.quantized is not None:
        return [op.quantized.make(shaped[0])]
    return [*shaped, *op.extra(n, dtype, torch.device("cpu"))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", MEASURED, ids=lambda op: op.name)
def test_plain_code_has_the_bits_of_the_op(op: Op, dtype: torch.dtype) -> None:
    shape = (1024, 16) if "1024" in op.name else (64, 256)  # a row for each group
    _check_plain(op, _arguments(op, *shape, dtype))


@pytest.mark.parametrize("shape", [(2, 128), (5, 384), (130, 640)], ids=str)
@pytest.mark.parametrize("op", FP8_OPS, ids=lambda op: op.name)
def test_tiles_that_are_not_filled_are_right(op: Op, shape: tuple[int, int]) -> None:
    _check_plain(op, _arguments(op, *shape, torch.bfloat16))
    _check_traffic(op, *shape)


def _check_plain(op: Op, arguments: list[Any]) -> None:
    if op.quantized is None:
        arguments[0][3:4] = 0
    copies = arguments if op.quantized else [argument.clone() for argument in arguments]
    plain = op.plain(*copies)
    results = [plain] if isinstance(plain, Tensor) else plain
    for mine, theirs in zip(results, _parts(op.run(*arguments)), strict=True):
        assert mine.shape == theirs.shape
        if mine.dtype == torch.float32:  # sums of squares in whatever order
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
        else:
            same = _as_bytes(mine) == _as_bytes(theirs)
            assert (~same).float().mean() <= (1e-3 if "rmsnorm" in op.name else 0)


@pytest.mark.parametrize("op", MEASURED, ids=lambda op: op.name)
def test_traffic_is_that_of_the_tensors(op: Op) -> None:
    _check_traffic(op, 64, 256)


def _check_traffic(op: Op, m: int, n: int) -> None:
    arguments = _arguments(op, m, n, torch.bfloat16)
    inputs = _parts(arguments[0]) if op.quantized else arguments[: len(op.shapes(m, n))]
    read = sum(part.nbytes for part in inputs)
    written = _nbytes(op.run(*arguments))
    written += arguments[1].nbytes if "rmsnorm-residual" in op.name else 0
    assert op.traffic(m, n, 2) == Traffic(read + written, op.reads * read, written)


def test_they_are_chosen_by_name() -> None:
    assert list(chosen("fp8")) == list(FP8_OPS)
    assert [op.name for op in chosen("cast,quantize-row")] == ["cast", "quantize-row"]
    assert list(chosen("ragged")) == list(RAGGED_OPS)
    new = [op for op in RAGGED_OPS if op not in (*NVFP4_OPS, *FP8_OPS)]
    assert len(OPS) == len(NVFP4_OPS) + len(FP8_OPS) + len(new)  # no name twice
