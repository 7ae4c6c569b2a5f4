"""The 8-bit functions under torch.compile and torch.export."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from samples import byte_view, randn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import jitquant
from jitquant import QuantizedTensor

pytestmark = pytest.mark.usefixtures("_fresh_compiler")


def same(a: Any, b: Any) -> bool:
    leaves = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return len(leaves) > 0 and all(
        t.shape == u.shape and torch.equal(byte_view(t.contiguous()), byte_view(u.contiguous()))
        for t, u in leaves
    )


def everything(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Any, ...]:
    """Every quantizer of a matrix."""
    offsets = torch.tensor([0, 2, 4])
    ragged = jitquant.quantize_ragged(x, offsets)
    rows = jitquant.quantize_fp8(x, granularity="row")
    return (
        jitquant.quantize_fp8(x),
        rows,
        jitquant.quantize_fp8(x, scale=w[:1]),
        jitquant.quantize_per_token_group(
            x, 16, scale_layout="column_tma", scale_format="ue8m0_packed"
        ),
        jitquant.quantize_block(x, (32, 32), scale_layout="row_padded"),
        jitquant.quantize_per_token_group_both(x, 16),
        jitquant.quantize_block_both(x, (16, 16)),
        jitquant.quantize_mxfp8(x, scale_layout="swizzled_128x4"),
        jitquant.quantize_mxfp8_both(x),
        jitquant.swiglu_quantize_fp8(x),
        jitquant.swiglu_quantize_per_token_group(x, 16),
        jitquant.rmsnorm_quantize_fp8(x, w, residual=residual),
        jitquant.rmsnorm_quantize_per_token_group(x, w, 16),
        jitquant.quantize_ragged_grad(x, offsets, act_input=x, activation="silu"),
        rows.dequantize(),
        ragged.dequantize(),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_everything(backend: str) -> None:
    x, w = randn(4, 32, dtype=torch.float32), randn(32, dtype=torch.float32).abs()
    residual = randn(4, 32, dtype=torch.float32, seed=1)
    want = everything(x, w, residual.clone())
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    got = compiled(x, w, residual)
    assert same(got, want)
    assert [repr(q) for q in got[:5]] == [repr(q) for q in want[:5]]


def test_dynamic_rows_compile_once() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def f(x: Tensor) -> tuple[Any, ...]:
        q = jitquant.quantize_per_token_group(x, 16, scale_layout="column_tma")
        return (
            q,
            q.scale_inv,
            jitquant.quantize_fp8(x, granularity="row"),
            jitquant.quantize_mxfp8(x, scale_layout="swizzled_128x4"),
            jitquant.quantize_block(x, (32, 32)),
            q.dequantize(),
            # Sizes are arguments of these.
            jitquant.quantize_ragged(x, torch.tensor([0, 2, 4]), format="nvfp4").dequantize(),
            jitquant.quantize_weight_nvfp4(x, dim=0).dequantize(),
        )

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 6, 130, 257):
        x = randn(rows, 40)
        assert same(compiled(x), f(x))
    assert len(graphs) == 1


def test_numbers_that_change() -> None:
    def f(scale: float, cols: int) -> tuple[Any, ...]:
        return jitquant.quantize_fp8(x, scale=scale), jitquant.ragged_offsets(rows, cols)

    x, rows = randn(4, 32), torch.tensor([1, 2])
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    for scale, cols in ((0.5, 3), (2.0, 5), (0.25, 7)):
        assert same(compiled(scale, cols), f(scale, cols))


def test_ints_of_numpy() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        q = jitquant.deinterleave_quantize_nvfp4(x, np.int64(16))  # type: ignore[arg-type]
        return jitquant.quantize_per_token_group(x, np.int64(16)).scale_inv, q.x_sf_bytes

    x = randn(4, 32)
    assert same(torch.compile(f, fullgraph=True, backend="eager")(x), f(x))


@pytest.mark.slow
def test_inductor() -> None:
    def f(x: Tensor) -> Tensor:
        q = jitquant.quantize_per_token_group(torch.relu(x), 16)
        return q.dequantize(torch.float32) * 2

    x = randn(4, 32)
    assert torch.equal(torch.compile(f, fullgraph=True)(x), f(x))


def test_containers_go_in_and_out() -> None:
    def f(q: QuantizedTensor) -> tuple[Tensor, QuantizedTensor]:
        return q.dequantize(torch.float32) + q.scale_inv, q[1:3]

    q = jitquant.quantize_fp8(randn(4, 32), granularity="row")
    assert same(torch.compile(f, fullgraph=True, backend="aot_eager")(q), f(q))


def test_out_buffers() -> None:
    def f(x: Tensor, out: QuantizedTensor) -> QuantizedTensor:
        return jitquant.quantize_per_token_group(x * 2, 16, recipe="vllm", out=out)

    x = randn(4, 32)
    out = QuantizedTensor.empty((4, 32), format="fp8_group", group_size=16)
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(x, out)
    assert got is out
    assert same(out, jitquant.quantize_per_token_group(x * 2, 16, recipe="vllm"))
    assert out.recipe == "vllm"


def test_export() -> None:
    class Quantize(nn.Module):
        def forward(self, x: Tensor) -> QuantizedTensor:
            return jitquant.quantize_per_token_group(x, 16, scale_layout="column")

    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(
        Quantize(), (randn(4, 32),), dynamic_shapes={"x": {0: rows}}, strict=False
    )
    x = randn(9, 32)
    got = program.module()(x)
    assert isinstance(got, QuantizedTensor)
    assert same(got, jitquant.quantize_per_token_group(x, 16, scale_layout="column"))
