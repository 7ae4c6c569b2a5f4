"""The benchmark of whole models: tiny ones on the CPU, beside transformers' own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.bench import decoder
from harness.bench import model as bench
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import jitquant

pytest.importorskip("transformers")
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
}
OF_EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
TOKENS = torch.arange(12).view(2, 6) * 7 % 256


@pytest.fixture(params=["LlamaConfig", "Qwen3Config", "Qwen3MoeConfig"])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model with random weights, norms of its heads among them."""
    sizes = SIZES | (OF_EXPERTS if "Moe" in request.param else {})
    monkeypatch.setattr(bench, "SHAPES", {"tiny": (request.param, sizes)})
    torch.manual_seed(0)
    model = bench.filled(bench.empty_model("tiny"), CPU)
    for parameter in model.parameters():
        parameter.data.mul_(4) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    return model


def sqnr(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / noise))


def has_experts(plain: Any) -> bool:
    return hasattr(plain.model.layers[0].mlp, "experts")


def both_steps(model: Any) -> Tensor:
    """Logits after a prompt, and after one token more, for each of two sequences."""
    model.set_cache(2, 9)
    position = torch.zeros(1, dtype=torch.long)
    if isinstance(model, bench.OfTransformers):
        model.set_position(0)
    first = model(TOKENS[:, :5], position)
    position.fill_(5)
    return torch.stack((first, model(TOKENS[:, 5:], position)))


@torch.no_grad()
def expected(plain: Any) -> Tensor:
    """The same of transformers without a cache, in fp32."""
    logits = plain.float()(TOKENS).logits[:, 4:6].transpose(0, 1)
    plain.to(torch.bfloat16)
    result: Tensor = logits
    return result


@pytest.mark.parametrize(
    ("format", "least"),
    [("bf16-few", 35), ("fp8", 10), ("w4a16", 6), ("w4a16-fp8-prefill", 6), ("w4a4", 4)],
)
def test_the_decoder_gives_the_logits_of_transformers(
    plain: Any, format: str, least: float
) -> None:
    want = expected(plain)
    if format == "fp8" and has_experts(plain):
        with pytest.raises(ValueError, match="no FP8 format for experts"):
            decoder.Decoder(plain, decoder.Fp8Row(), CPU)
        return
    got = both_steps(decoder.Decoder(plain, decoder.FORMATS[format](), CPU))
    assert got.shape == (2, 2, 256)
    assert sqnr(got, want) > least


def test_a_prompt_in_fp8(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From some rows on the products of a prompt are in FP8, and fewer rows are as without it."""
    exact = decoder.Decoder(plain, decoder.WeightOnly(), CPU)
    made = decoder.Decoder(plain, decoder.FORMATS["w4a16-fp8-prefill"](), CPU)
    assert made.blocks[0].qkv.compute == "fp8"
    assert torch.equal(both_steps(made), both_steps(exact))
    rows = 2 * 5  # of the prompt; then 2
    monkeypatch.setattr(decoder, "FP8_ROWS", rows)
    monkeypatch.setattr("jitquant.nn._nvfp4_mm.FP8_ROWS", rows)
    calls: list[int] = []
    product = jitquant.nvfp4_linear

    def counted(x: Any, *given: Any, compute: str, **how: Any) -> Tensor:
        assert compute == "fp8"
        calls.append(x.shape[0])
        return product(x, *given, compute="fp8", **how)

    monkeypatch.setattr(jitquant, "nvfp4_linear", counted)
    got = both_steps(made)
    assert calls == [rows] * (1 if has_experts(plain) else 3) * 2  # o quantizes its own
    assert 15 < sqnr(got, both_steps(exact)) < 50


def test_weights_alone_are_what_four_bits_change(plain: Any) -> None:
    packed = decoder.Decoder(plain, decoder.WeightOnly(), CPU)
    wide = decoder.Decoder(plain, decoder.Bf16(), CPU)
    for mine, its in zip(wide.blocks, packed.blocks, strict=True):
        mine.experts = tuple(q.dequantize(torch.bfloat16) for q in its.experts)
        for name in ("qkv", "o") if its.experts else ("qkv", "o", "gate_up", "down"):
            setattr(mine, name, getattr(its, name).weight.dequantize(torch.bfloat16))
    assert sqnr(both_steps(packed), both_steps(wide)) > 30


class NoSynchronization(TorchDispatchMode):
    """Raises where a tensor's value is asked for, which a capture on a GPU refuses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


def test_transformers_with_its_static_cache(plain: Any) -> None:
    made = bench.OfTransformers.__new__(bench.OfTransformers)
    made.model = made.forward = plain
    made.device = CPU
    assert sqnr(both_steps(made), expected(plain)) > 35
    made.set_position(5)
    with NoSynchronization():
        made(TOKENS[:, 5:], torch.zeros(1))


@pytest.mark.parametrize("format", ["bf16", *decoder.FORMATS])
def test_random_weights(plain: Any, format: str) -> None:
    if format == "fp8" and has_experts(plain):
        pytest.skip("there are no experts in FP8")
    logits = both_steps(bench.made("tiny", format, CPU, layers=1))
    assert logits.isfinite().all()
    assert 0.01 < logits.float().std() < 10


def test_bytes_of_weights(plain: Any) -> None:
    """An expert is read if a row chose it."""
    attention = 64 * 32 * (4 + 2 + 2 + 4)
    rest = 256 * 64 * 2 + sum(p.nbytes for p in plain.parameters() if p.dim() == 1)
    for rows in (1, 5):
        mlp, router = 3 * 64 * 96.0, 0
        if has_experts(plain):
            mlp, router = 8 * 3 * 64 * 48 * (1 - 0.75**rows), 8 * 64 * 2
        for bits in (16.0, 4.5):
            want = rest + 2 * ((attention + mlp) * bits / 8 + router)
            assert math.isclose(bench.weight_bytes(plain, bits, rows), want)


def test_run(plain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "made", lambda shape, format, *_: None)
    monkeypatch.setattr(bench, "weight_bytes", lambda model, bits, rows: bits * 100 + rows)
    monkeypatch.setattr(bench, "decode_us", lambda model, sequences, context: (2.0, 7))
    monkeypatch.setattr(bench, "prefill_us", lambda model, prompt: 10.0)
    times = list(
        bench.run("tiny", ["bf16", "w4a4"], bandwidth=1.0, sequences=[1, 4], context=3, prompt=8)
    )
    assert [(t.format, t.sequences, t.tokens) for t in times] == [
        (format, count, count or 8) for format in ("bf16", "w4a4") for count in (1, 4, 0)
    ]
    assert times[1].per_second == 4 / 2e-6
    assert math.isclose(times[1].floor_us, (1604 + 4 * 3 * 2 * (2 * 2 * 32 * 2)) * 1e-3)
    assert math.isclose(times[4].floor_us, (454 + 4 * 3 * 2 * (2 * 2 * 32 * 2)) * 1e-3)
    assert "7 launches" in times[0].text()
    assert "launches" not in times[2].text()
    pytest.importorskip("matplotlib")
    from dataclasses import asdict

    rows = [{**asdict(t), "per_second": t.per_second} for t in times]
    bench.picture(rows, "a GPU", tmp_path / "model.png")
    assert (tmp_path / "model.png").stat().st_size > 1000
