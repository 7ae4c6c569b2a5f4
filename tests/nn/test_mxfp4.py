"""MXFP4Linear: its product, gpt-oss's layout, conversion, files, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import randn
from torch import nn

import jitquant
from jitquant.nn import (
    MXFP4Linear,
    NVFP4Linear,
    convert,
    load_compressed_tensors,
    mxfp4,
    save_compressed_tensors,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _linear(dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(96, 40, bias, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_that_of_the_weight_in_nvfp4(dtype: torch.dtype) -> None:
    linear = _linear(dtype)
    layer = MXFP4Linear.from_linear(linear, scaling="rceil")
    codes, scales = jitquant.quantize_mxfp4(linear.weight.detach(), scaling="rceil")
    weight = jitquant.dequantize_mxfp4(codes, scales, dtype)
    assert torch.equal(layer.dequantize(), weight)
    x = randn(2, 5, 96, dtype=dtype).requires_grad_()
    y = layer(x)
    if dtype == torch.float32:  # not an input of these products
        assert torch.equal(y, nn.functional.linear(x, weight, layer.bias))
    else:
        assert torch.equal(y, NVFP4Linear.from_mxfp4(layer)(x))
        wide = (t.double() for t in (x, weight, linear.bias))
        torch.testing.assert_close(y, nn.functional.linear(*wide).to(dtype))
    grad = randn(2, 5, 40, dtype=dtype, seed=3)
    y.backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad @ weight)
    assert not any(p.requires_grad for p in layer.parameters())
    plain = linear.weight.detach().float()
    error = (weight.float() - plain).norm() / plain.norm()
    assert 0.05 < float(error) < 0.2


def test_exponents_that_nvfp4_has_no_scales_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight is dequantized, and the product is PyTorch's; until it is another weight."""
    layer = MXFP4Linear.from_linear(_linear())
    x = randn(3, 96)
    codes, scales = layer.weight_packed, layer.weight_scale.clone()
    with monkeypatch.context() as patch:
        patch.setattr(mxfp4, "dequantize_mxfp4", None)  # which a product does not call
        fast = layer(x)
    state = layer.state_dict()
    assert state.keys() == {"weight_packed", "weight_scale", "bias"}
    assert state["weight_packed"].data_ptr() == codes.data_ptr()

    scales[0, 0] = scales.max() - 18
    layer.load_state_dict({**state, "weight_scale": scales})
    layer.load_state_dict({**state, "weight_scale": scales.view(torch.float8_e8m0fnu)})
    assert layer.product_scale is None
    assert "dequantizes=True" in repr(layer)
    assert torch.equal(layer.state_dict()["weight_scale"], scales)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.dequantize(), layer.bias))
    with pytest.raises(ValueError, match="expected exponents within 17"):
        NVFP4Linear.from_mxfp4(layer)
    layer.weight_scale[0, 0] += 1
    layer.weight_changed()
    assert layer.product_scale is not None
    assert torch.equal(layer(x), NVFP4Linear.from_mxfp4(layer)(x))
    assert torch.equal(layer(x)[:, 1:], fast[:, 1:])


def test_a_layer_that_is_moved_or_made_elsewhere() -> None:
    layer = MXFP4Linear.from_linear(_linear())
    x = randn(2, 3, 96)
    want = layer(x)
    assert torch.equal(layer(x.transpose(0, 1)), want.transpose(0, 1))
    assert layer(x[:0]).shape == (0, 3, 40)
    with torch.device("meta"):
        made = MXFP4Linear(96, 40, dtype=torch.bfloat16)
    assert made.product_scale is None
    made.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(made(x), want)
    other = MXFP4Linear(96, 40, dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(other))(x), want)
    half = layer.half()
    assert half.product_scale is not None
    assert half.product_scale.dtype == torch.float8_e4m3fn
    assert torch.equal(half(x.half()), NVFP4Linear.from_mxfp4(half)(x.half()))
    compiled = torch.compile(half, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x.half()), half(x.half()))


def test_autocast_and_dtypes() -> None:
    layer = MXFP4Linear.from_linear(_linear())
    x = randn(3, 96, dtype=torch.float32)
    with pytest.raises(
        TypeError, match=r"x: expected torch\.bfloat16, as the layer has, got torch\.float32"
    ):
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.bfloat16()))
    codes = layer.weight_packed.clone()
    layer.to(torch.float32)
    assert layer(x).dtype == torch.float32
    assert torch.equal(layer.weight_packed, codes)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    with pytest.raises(ValueError, match="in_features"):
        layer(x[:, :95])
    with pytest.raises(TypeError, match=r"x: expected a torch\.Tensor, got ndarray"):
        layer(x.numpy())
    with pytest.raises(TypeError, match=r"got torch\.int32\. Call x\.to\(torch\.float32\)$"):
        layer(x.int())


def test_it_has_and_takes_the_layout_of_gpt_oss() -> None:
    layer = MXFP4Linear.from_linear(_linear())
    blocks, scales = layer.blocks
    assert (tuple(blocks.shape), tuple(scales.shape)) == ((40, 3, 16), (40, 3))
    # Element 2 i is in the low half of byte i; scales are exponents with a bias of 127.
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = torch.stack((e2m1[(blocks & 15).int()], e2m1[(blocks >> 4).int()]), -1)
    weight = torch.ldexp(values.flatten(2), scales.int()[..., None] - 127).reshape(40, 96)
    assert torch.equal(layer.dequantize(torch.float32), weight)
    again = MXFP4Linear.from_blocks(blocks, scales, layer.bias)
    x = randn(3, 96)
    assert torch.equal(again(x), layer(x))
    assert again.weight_packed.data_ptr() == layer.weight_packed.data_ptr()
    with pytest.raises(
        ValueError,
        match=r"blocks and scales: expected shapes \(N, K / 32, 16\) and \(N, K / 32\), got \(40,",
    ):
        MXFP4Linear.from_blocks(blocks[..., :8], scales)
    with pytest.raises(TypeError, match=r"scales: expected uint8, got torch\.int32"):
        MXFP4Linear.from_blocks(blocks, scales.int())


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.odd, self.lm_head = nn.Linear(48, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(self.up(x)) + self.odd(x[..., :48]))


def test_a_converted_model_goes_to_files_and_back(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = _Model().bfloat16()
    plain = copy.deepcopy(model)
    done = convert(model, "mxfp4")
    assert done.replaced == ["up", "down"]
    assert "not a multiple of 32" in done.skipped["odd"]
    assert "head" in done.skipped["lm_head"]
    elements = 2 * 64 * 96
    assert done.bytes_after == elements * 19 // 32 + 2 * 4  # and a factor for each product
    save_compressed_tensors(model, tmp_path)
    found = load_compressed_tensors(plain, tmp_path)
    assert found.replaced == ["up", "down"]
    assert isinstance(plain.up, MXFP4Linear)
    x = randn(3, 64)
    assert torch.equal(plain(x), model(x))
    with torch.device("meta"):
        on_meta = _Model().bfloat16()
    load_compressed_tensors(on_meta, tmp_path)
    assert torch.equal(on_meta(x), model(x))


def test_convert_takes_a_scaling() -> None:
    model = nn.ModuleDict({"up": _linear()})
    weight = model["up"].weight.detach().clone()
    with pytest.raises(
        ValueError, match="scaling: expected 'even' with recipe 'nvfp4', got 'ceil'"
    ):
        convert(model, "nvfp4", scaling="ceil")
    convert(model, "mxfp4", scaling="ceil")
    codes, scales = jitquant.quantize_mxfp4(weight, scaling="ceil")
    assert torch.equal(model["up"].weight_packed, codes.view(torch.uint8))
    assert torch.equal(model["up"].weight_scale, scales.view(torch.uint8))


def test_compressed_tensors_reads_the_files(tmp_path: Path) -> None:
    """The library's own decompressor gives the layer's weight."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from safetensors.torch import load_file

    model = nn.ModuleDict({"up": _linear(bias=False)})
    convert(model, "mxfp4")
    save_compressed_tensors(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {name.removeprefix("up."): t for name, t in tensors.items()}
    kind: Any = getattr(compressors, "MXFP4PackedCompressor", None)
    if kind is None:
        pytest.skip("this version has no MXFP4PackedCompressor")
    import json

    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**weights)
    )
    made = kind.decompress(parts, scheme)
    value = made["weight"] if isinstance(made, dict) else made
    assert torch.equal(value.float(), model["up"].dequantize(torch.float32))


def test_mixed_with_nvfp4(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = _Model().bfloat16()
    plain = copy.deepcopy(model)
    convert(model, "mxfp4", targets="up")
    convert(model, "nvfp4a16", targets="down")
    save_compressed_tensors(model, tmp_path)
    load_compressed_tensors(plain, tmp_path)
    assert isinstance(plain.up, MXFP4Linear)
    assert isinstance(plain.down, NVFP4Linear)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MXFP4Linear(48, 8), ValueError, "in_features: expected a multiple of 32, got 48"),
        (lambda: MXFP4Linear(64, 0), ValueError, "out_features: expected 1 or more, got 0"),
        (
            lambda: MXFP4Linear(64, 8, dtype=torch.float64),
            TypeError,
            r"dtype: expected bfloat16, float16 or float32, got torch\.float64",
        ),
        (lambda: MXFP4Linear.from_linear(nn.Bilinear(8, 8, 8)), TypeError, "nn.Linear itself"),
        (
            lambda: MXFP4Linear.from_linear(_linear(), scaling="up"),
            ValueError,
            "scaling: expected one of 'floor', 'ceil', 'even', 'rceil',.* got 'up'",
        ),
        (
            lambda: MXFP4Linear.from_linear(
                _linear(), weight=jitquant.quantize_mxfp4(randn(8, 96))
            ),
            ValueError,
            r"weight: expected codes and scales of shapes \(40, 48\) and \(40, 3\), got \(8, 48\)",
        ),
        (
            lambda: MXFP4Linear.from_blocks(
                *MXFP4Linear.from_linear(_linear()).blocks, torch.ones(1)
            ),
            ValueError,
            r"bias: expected shape \(40,\), one element for each row of blocks, got shape \(1,\)",
        ),
    ],
)
def test_what_it_refuses(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
