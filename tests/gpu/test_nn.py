"""The layers on a GPU: the CPU's numbers, in graphs, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.nn import Float8BlockwiseLinear, NVFP4Linear, _matmul, _nvfp4_mm
from jitquant.testing import assert_capturable, assert_no_sync, count_launches

BF16 = torch.bfloat16
MAJOR = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
sm_90 = pytest.mark.skipif(MAJOR != 9, reason="blockwise scaled_mm needs sm_90")
sm_100 = pytest.mark.skipif(MAJOR < 10, reason="NVFP4 scaled_mm needs sm_100")


def ratio(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))


def linear(cols: int, out: int, *, dtype: torch.dtype = BF16) -> nn.Linear:
    made = nn.Linear(cols, out, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(randn(out, cols, seed=1) * cols**-0.5)
        made.bias.copy_(randn(out, seed=2))
    return made


def passes(f: Any, weight: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = f(x)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), grad.to(y.dtype)))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Dtypes of the results of scaled_mm, in turn."""
    calls: list[torch.dtype] = []
    real = _matmul.scaled_mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["output_dtype"])
        return real(*args, **kwargs)

    monkeypatch.setattr(_matmul, "scaled_mm", counted)
    return calls


# Sizes of tiles, of none, one row, and several leading dimensions; no two alike.
@pytest.mark.parametrize(
    ("leading", "cols", "out"),
    [((256,), 384, 640), ((384,), 1152, 512), ((2, 3, 50), 300, 200), ((1,), 128, 640)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_float8_has_the_cpus_numbers(
    leading: tuple[int, ...],
    cols: int,
    out: int,
    dtype: torch.dtype,
    products: list[torch.dtype],
) -> None:
    cpu = Float8BlockwiseLinear.from_linear(linear(cols, out, dtype=dtype))
    x, grad = randn(*leading, cols, dtype=dtype), randn(*leading, out, dtype=dtype, seed=5)
    want = passes(cpu, cpu.weight, x, grad)
    gpu = Float8BlockwiseLinear.from_linear(linear(cols, out, dtype=dtype).cuda())
    got = passes(gpu, gpu.weight, x.cuda(), grad.cuda())
    # The same operands to the bit. What differs is the sum: Hopper's FP8 tensor cores keep some 14
    # bits of it within 128 products.
    least = 45 if dtype == BF16 else 50
    for name, a, b in zip(("y", "dx", "dW"), got, want, strict=True):
        assert a.dtype == b.dtype == dtype
        assert a.shape == b.shape
        assert ratio(a, b) > least, name
    if _matmul.has_fp8_blockwise(torch.device("cuda")):
        assert products == 3 * [BF16 if dtype == BF16 else torch.float32]


@sm_90
def test_float8_uses_scaled_mm_there() -> None:
    assert _matmul.has_fp8_blockwise(torch.device("cuda"))
    assert _matmul.has_fp8_blockwise(torch.device("cuda", 0))


def test_float8_forward_is_captured() -> None:
    made = Float8BlockwiseLinear.from_linear(linear(384, 256).cuda())
    with torch.no_grad():
        assert_capturable(made, randn(2, 64, 384).cuda(), warmup_calls=1)


def test_float8_forward_and_backward_are_captured() -> None:
    made = Float8BlockwiseLinear.from_linear(linear(384, 256).cuda())

    def step(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return passes(made, made.weight, x, grad)

    assert_capturable(step, randn(256, 384).cuda(), randn(256, 256).cuda(), warmup_calls=2)


def test_a_graph_sees_the_weight_as_it_is_at_replay() -> None:
    made = Float8BlockwiseLinear.from_linear(linear(384, 256).cuda())
    x = randn(128, 384).cuda()
    with torch.no_grad():
        made(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made(x)
        made.weight.mul_(-2)
        graph.replay()
        assert torch.equal(y, made(x))


def test_float8_does_not_wait() -> None:
    made = Float8BlockwiseLinear.from_linear(linear(384, 256).cuda())
    x, grad = randn(128, 384).cuda(), randn(128, 256).cuda()
    passes(made, made.weight, x, grad)
    made.weight_changed()
    assert_no_sync(passes, made, made.weight, x, grad)


@pytest.mark.parametrize("fused", [False, True])
def test_float8_follows_optimizers(fused: bool) -> None:
    made = Float8BlockwiseLinear.from_linear(linear(256, 128).cuda())
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, fused=fused)
    x = randn(128, 256).cuda()
    for _ in range(2):
        made(x).float().square().mean().backward()
        optimizer.step()
        fresh = Float8BlockwiseLinear(256, 128, dtype=BF16, device="cuda")
        fresh.load_state_dict(made.state_dict())
        assert torch.equal(made(x), fresh(x))


@pytest.mark.usefixtures("_fresh_compiler")
def test_float8_compiled() -> None:
    made = Float8BlockwiseLinear.from_linear(linear(300, 200).cuda())
    compiled = torch.compile(made, fullgraph=True)
    x, grad = randn(3, 50, 300).cuda(), randn(3, 50, 200).cuda()
    want = passes(made, made.weight, x, grad)
    for a, b in zip(passes(compiled, made.weight, x, grad), want, strict=True):
        assert ratio(a, b) > 45
    with torch.no_grad():
        made.weight.mul_(-1)
    assert torch.allclose(compiled(x), made(x), rtol=0.02, atol=0.02)


def test_float8_under_autocast() -> None:
    made = Float8BlockwiseLinear.from_linear(linear(256, 128, dtype=torch.float32).cuda())
    with torch.autocast("cuda", dtype=BF16):
        y, grad_x, grad_weight = passes(
            made, made.weight, randn(64, 256).float().cuda(), randn(64, 128).cuda()
        )
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (BF16, torch.float32, torch.float32)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize(("cols", "out"), [(256, 384), (104, 72), (96, 7)])
def test_nvfp4_has_the_cpus_numbers(granularity: Any, layout: Any, cols: int, out: int) -> None:
    how = {"granularity": granularity, "scale_layout": layout}
    cpu = NVFP4Linear.from_linear(linear(cols, out).eval(), **how)
    gpu = NVFP4Linear.from_linear(linear(cols, out).eval().cuda(), **how)
    x = randn(3, 50, cols)
    assert torch.equal(gpu.weight_packed.cpu(), cpu.weight_packed)
    assert ratio(gpu(x.cuda()), cpu(x)) > 48
    q = jitquant.quantize_nvfp4(x, granularity=granularity)
    assert ratio(gpu.run_from_quantized(q.to("cuda")), cpu.run_from_quantized(q)) > 48
    assert ratio(gpu.float()(x.float().cuda()), cpu.float()(x.float())) > 90


@sm_100
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_nvfp4_uses_scaled_mm_there(granularity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = NVFP4Linear.from_linear(linear(256, 384).eval().cuda(), granularity=granularity)
    assert made.scale_layout == "swizzled_128x4"
    calls: list[Tensor] = []
    real = _nvfp4_mm.scaled_mm_into
    monkeypatch.setattr(
        _nvfp4_mm, "scaled_mm_into", lambda out, **kw: (calls.append(out), real(out, **kw))
    )
    made(randn(130, 256).cuda())
    assert len(calls) == 1


@sm_90
def test_scaled_mm_writes_to_given_memory() -> None:
    """That of FP8, as an sm_90 has none of NVFP4: the same function of PyTorch's."""
    a = jitquant.quantize_per_token_group(randn(256, 384).cuda(), scale_layout="column")
    b = jitquant.quantize_block(randn(640, 384, seed=1).cuda(), scale_layout="row_padded")
    arguments = _matmul.fp8_arguments(a, b, BF16)
    lists = {key: [value] if key.startswith("scale") else value for key, value in arguments.items()}
    out = torch.empty(256, 640, dtype=BF16, device="cuda")
    _nvfp4_mm.scaled_mm_into(out, swizzle_a=[], swizzle_b=[], **lists)
    assert torch.equal(out, _matmul.scaled_mm(**arguments))


def test_nvfp4_decode_is_captured() -> None:
    made = NVFP4Linear.from_linear(linear(256, 384).eval().cuda(), granularity="row")
    out = torch.empty(4, 384, dtype=BF16, device="cuda")
    decode = lambda x, out: made(x, out=out)  # noqa: E731
    assert_capturable(decode, randn(4, 256).cuda(), out, warmup_calls=1)
    assert_no_sync(made, randn(4, 256).cuda())


def allocations() -> tuple[int, int]:
    """Blocks that PyTorch's allocator has handed out, and segments it has asked CUDA for."""
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["segment.all.allocated"]


@pytest.mark.skipif(MAJOR >= 10, reason="scaled_mm takes it")
def test_one_norm_feeds_three_without_an_allocation() -> None:
    """A norm with buffers of its own, then three layers that read the weight as it is stored."""
    layers = [NVFP4Linear.from_linear(linear(1024, n).eval().cuda()) for n in (1024, 256, 512)]
    x, residual = randn(4, 1024).cuda(), randn(4, 1024, seed=3).cuda()
    weight = torch.ones(1024, dtype=BF16, device="cuda")
    how: dict[str, Any] = {"granularity": "row", "inv_rms": True, "device": "cuda"}
    q = jitquant.QuantizedActivation.empty((4, 1024), **how)
    outs = [torch.empty(4, layer.out_features, dtype=BF16, device="cuda") for layer in layers]

    def step() -> None:
        jitquant.rmsnorm_quantize_nvfp4(x, weight, residual=residual, out=q)
        for layer, out in zip(layers, outs, strict=True):
            layer.run_from_quantized(q, out=out)

    step()
    before = allocations()
    step()
    assert allocations() == before
    for layer, out in zip(layers, outs, strict=True):
        assert torch.equal(out, layer.run_from_quantized(q))


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 200])
@pytest.mark.parametrize("weight_only", [False, True])
def test_nvfp4_with_a_residual(rows: int, weight_only: bool) -> None:
    """Few rows and many take different ways to the same product."""
    made = NVFP4Linear.from_linear(linear(264, 384).eval().cuda(), weight_only=weight_only)
    x, residual = randn(rows, 264).cuda(), randn(rows, 384, seed=3).cuda()
    values = x if weight_only else jitquant.quantize_nvfp4(x).dequantize(torch.float32)
    weight = made.weight.dequantize(torch.float32).double()
    want = values.double() @ weight.t() + made.bias.double() + residual.double()
    assert ratio(made(x, residual=residual), want) > 48
    out = torch.empty_like(residual)
    assert made(x, residual=residual, out=out) is out
    assert torch.equal(out, made(x, residual=residual))
    if rows <= 16 and MAJOR < 10:
        before = 0 if weight_only else count_launches(jitquant.quantize_nvfp4, x)
        assert count_launches(lambda: made(x, residual=residual)) == before + 1


@pytest.mark.usefixtures("_fresh_compiler")
def test_nvfp4_compiled() -> None:
    made = NVFP4Linear.from_linear(linear(256, 384).eval().cuda())
    x = randn(4, 256).cuda()
    with torch.no_grad():
        assert ratio(torch.compile(made, fullgraph=True)(x), made(x)) > 48


def test_nvfp4_weight_memory() -> None:
    plain = linear(4096, 4096).cuda()
    before = torch.cuda.memory_allocated()
    made = NVFP4Linear.from_linear(plain)
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated() - before
    assert used < 0.3 * plain.weight.nbytes
    assert made.weight_packed.is_cuda
