"""Models that use the ops under torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant import NVFP4Tensor, QuantizedActivation

pytestmark = pytest.mark.usefixtures("_fresh_compiler")

U8 = torch.uint8


class Block(nn.Module):
    """Norm, gate-up projection, SwiGLU, down projection; activations go through NVFP4."""

    def __init__(self, hidden: int = 32, intermediate: int = 48) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.intermediate = intermediate
        self.norm = nn.Parameter(torch.ones(hidden))
        self.up = nn.Parameter(torch.randn(2 * intermediate, hidden, generator=generator) / 6)
        self.down = nn.Parameter(torch.randn(hidden, intermediate, generator=generator) / 6)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, QuantizedActivation]:
        q = jitquant.rmsnorm_quantize_nvfp4(x, self.norm, residual=residual)
        fused = q.dequantize(torch.float32) @ self.up.T
        h = jitquant.deinterleave_quantize_nvfp4(fused, self.intermediate)
        y = h.dequantize(torch.float32) @ self.down.T
        last = jitquant.quantize_nvfp4(y, jitquant.amax_gsa(y), scale_layout="swizzled_128x4")
        return y, residual, last


def assert_same(q: QuantizedActivation, other: QuantizedActivation) -> None:
    assert repr(q) == repr(other)
    assert torch.equal(q.x_fp4_bytes, other.x_fp4_bytes)
    assert torch.equal(q.x_sf_bytes, other.x_sf_bytes)
    assert torch.equal(q.gsa, other.gsa)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_model(backend: str) -> None:
    model = Block()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        x, residual = randn(4, 32, dtype=torch.float32), randn(4, 32, dtype=torch.float32, seed=1)
        want = model(x, residual.clone())
        got = compiled(x, residual)
    # Inductor may sum a product in another order.
    torch.testing.assert_close(got[0], want[0], rtol=0.05, atol=0.05)
    assert torch.equal(got[1], want[1])
    assert torch.equal(residual, want[1])
    if backend == "aot_eager":
        assert_same(got[2], want[2])
    assert got[2].shape == (4, 32)
    assert got[2].scale_layout == "swizzled_128x4"


def test_dynamic_rows_compile_once() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def f(x: Tensor) -> tuple[QuantizedActivation, QuantizedActivation]:
        return (
            jitquant.quantize_nvfp4(x, granularity="row", scale_layout="swizzled_128x4"),
            jitquant.quantize_nvfp4(x + 1, 0.01),
        )

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 6, 130, 257):
        x = randn(rows, 40)
        for a, b in zip(compiled(x), f(x), strict=True):
            assert_same(a, b)
            assert a.shape == (rows, 40)
    assert len(graphs) == 1


def test_model_with_dynamic_rows() -> None:
    model = Block()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (3, 7, 130):
            x = randn(rows, 32, dtype=torch.float32)
            assert_same(compiled(x, x.clone())[2], model(x, x.clone())[2])


def test_quantized_activation_goes_in_and_out() -> None:
    def f(q: QuantizedActivation, w: Tensor) -> tuple[Tensor, QuantizedActivation]:
        return q.dequantize(torch.float32) @ w, q[1:3]

    q = jitquant.quantize_nvfp4(randn(4, 32), granularity="row")
    w = randn(32, 8, dtype=torch.float32)
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(q, w)
    want = f(q, w)
    assert torch.equal(got[0], want[0])
    assert_same(got[1], want[1])


def test_out_buffers() -> None:
    def f(x: Tensor, out: QuantizedActivation) -> QuantizedActivation:
        return jitquant.quantize_nvfp4(x * 2, recipe="vllm", out=out)

    x = randn(4, 32)
    out = QuantizedActivation.empty((4, 32))
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(x, out)
    assert_same(out, jitquant.quantize_nvfp4(x * 2, recipe="vllm"))
    assert got is out


def test_a_buffer_on_another_device_is_refused() -> None:
    def f(x: Tensor, out: Tensor) -> Tensor:
        return jitquant.amax_gsa(x, out=out)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="out: expected a buffer on cpu, as the input is"):
        compiled(randn(4, 32), torch.empty(1, device="meta"))


def test_buffers_made_inside_with_inductor() -> None:
    def f(x: Tensor) -> Tensor:
        out = QuantizedActivation.empty((4, 32))
        return jitquant.quantize_nvfp4(x, out=out).dequantize()

    x = randn(4, 32)
    assert torch.equal(torch.compile(f, fullgraph=True)(x), f(x))


def test_weights_and_mhc() -> None:
    def f(w: Tensor, X: Tensor, A: Tensor, g: Tensor) -> tuple[QuantizedActivation, ...]:
        return (
            jitquant.quantize_weight_nvfp4(w, block="16x16", dim=0),
            jitquant.mhc_rmsnorm_quantize_nvfp4(X, A, g, granularity="tensor"),
        )

    args = (randn(40, 24), randn(3, 4, 32), randn(3, 4, seed=1), randn(32, seed=2))
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(*args)
    for a, b in zip(got, f(*args), strict=True):
        assert_same(a, b)


def test_training_step_around_a_quantizer() -> None:
    linear = nn.Linear(32, 32)

    def f(x: Tensor) -> Tensor:
        h = linear(x)
        noise = jitquant.quantize_nvfp4(h).dequantize(torch.float32) - h.detach()
        return (h + noise).square().sum()

    x = randn(4, 32, dtype=torch.float32)
    f(x).backward()
    want = linear.weight.grad.clone()
    linear.weight.grad = None
    torch.compile(f, fullgraph=True, backend="aot_eager")(x).backward()
    torch.testing.assert_close(linear.weight.grad, want)


def test_error_names_the_argument() -> None:
    def f(x: Tensor) -> QuantizedActivation:
        return jitquant.quantize_nvfp4(x[0, 0])

    with pytest.raises(Exception, match=r"x\.reshape\(\.\.\.\)"):
        torch.compile(f, fullgraph=True, backend="aot_eager")(randn(4, 32))


def test_strided_columns() -> None:
    x = randn(32, 4)
    compiled = torch.compile(
        lambda x: jitquant.quantize_nvfp4(x.T), fullgraph=True, backend="aot_eager"
    )
    want = jitquant.quantize_nvfp4(x.T.contiguous())
    assert torch.equal(compiled(x).dequantize(), want.dequantize())


def test_export() -> None:
    class Quantize(nn.Module):
        def forward(self, x: Tensor) -> QuantizedActivation:
            return jitquant.quantize_nvfp4(x, granularity="row")

    rows = torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(
        Quantize(), (randn(4, 32),), dynamic_shapes={"x": {0: rows}}, strict=False
    )
    x = randn(9, 32)
    got = program.module()(x)
    assert isinstance(got, QuantizedActivation)
    assert_same(got, jitquant.quantize_nvfp4(x, granularity="row"))
    assert torch.ops.jitquant.quantize_nvfp4.default in {n.target for n in program.graph.nodes}


def test_a_given_gsa_is_not_written() -> None:
    x, gsa = randn(4, 48), torch.tensor([0.01])

    def twice(x: Tensor, gsa: Tensor, out: NVFP4Tensor) -> tuple[NVFP4Tensor, Tensor]:
        q = jitquant.quantize_nvfp4(x, gsa)
        jitquant.quantize_nvfp4(x, out=q)
        return jitquant.quantize_nvfp4(x, out=out), q.gsa

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    out, want = jitquant.quantize_nvfp4(x, gsa), jitquant.quantize_nvfp4(x)
    got, own = compiled(x, gsa, out)
    assert got is out
    assert torch.equal(out.dequantize(), want.dequantize())
    assert torch.equal(own, want.gsa)
    assert torch.equal(gsa, torch.tensor([0.01]))
