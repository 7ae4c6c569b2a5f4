"""QuantizedActivation: buffers, moves, slices, pytree, description, consistency."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from samples import randn
from torch.utils import _pytree as pytree

import jitquant
from jitquant import QuantizedActivation, QuantizedRaggedTensor

U8 = torch.uint8


def quantized(*shape: int, **kwargs: Any) -> QuantizedActivation:
    return jitquant.quantize_nvfp4(randn(*shape), **kwargs)


def same(q: QuantizedActivation, other: QuantizedActivation) -> bool:
    pairs = zip(pytree.tree_leaves(q), pytree.tree_leaves(other), strict=True)
    return repr(q) == repr(other) and all(torch.equal(a.view(U8), b.view(U8)) for a, b in pairs)


def test_properties() -> None:
    q = quantized(3, 5, 40, granularity="row")
    assert q.shape == (3, 5, 40)
    assert q.num_tokens == 15
    assert q.device == torch.device("cpu")
    assert q.nbytes == 15 * (24 + 3 + 4)
    assert len(q) == 3
    assert q.x_fp4_bytes.dtype == q.x_sf_bytes.dtype == U8
    assert q.x_fp4_bytes.data_ptr() == q.x_fp4.data_ptr()
    assert q.x_sf_bytes.data_ptr() == q.x_sf.data_ptr()
    one = quantized(40)
    assert one.shape == (40,)
    assert one.num_tokens == 1
    norm = jitquant.rmsnorm_quantize_nvfp4(randn(4, 16), torch.ones(16))
    assert norm.nbytes == 4 * (8 + 1 + 4 + 4)


def test_cols_default_to_what_is_packed() -> None:
    q = quantized(4, 40)
    bare = QuantizedActivation(q.x_fp4, q.x_sf, q.gsa)
    assert bare.shape == (4, 48)
    assert torch.equal(bare.dequantize()[:, :40], q.dequantize())
    w = jitquant.quantize_weight_nvfp4(randn(40, 7), dim=0)
    assert QuantizedActivation(w.x_fp4, w.x_sf, w.gsa, dim=0).shape == (48, 7)


def test_repr() -> None:
    q = quantized(4, 40, granularity="row", scale_layout="swizzled_128x4")
    assert repr(q) == (
        "NVFP4Tensor(shape=(4, 40), nvfp4, recipe='te', granularity='row', "
        "scale_layout='swizzled_128x4', dim=-1, inv_rms=no, 624 bytes, device='cpu')"
    )
    assert "device='meta'" in repr(QuantizedActivation.empty((2, 16), device="meta"))


@pytest.mark.parametrize("scale_layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("shape", [(48,), (5, 40), (2, 70, 17), (0, 16), (130, 1)])
def test_empty_fits_what_quantize_makes(
    shape: tuple[int, ...], granularity: str, scale_layout: str
) -> None:
    q = quantized(*shape, granularity=granularity, scale_layout=scale_layout)
    buffers = QuantizedActivation.empty(
        list(shape), granularity=granularity, scale_layout=scale_layout
    )
    assert repr(buffers) == repr(q)
    for a, b in zip(pytree.tree_leaves(buffers), pytree.tree_leaves(q), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    buffers.validate()
    q.validate()
    with_norm = QuantizedActivation.empty(shape, inv_rms=True, recipe="vllm", device="meta")
    assert with_norm.inv_rms.shape == (q.num_tokens,)
    assert with_norm.recipe == "vllm"
    assert with_norm.device.type == "meta"


def test_buffers_in_deterministic_mode() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        made = QuantizedActivation.empty((2, 16))
        ragged = QuantizedRaggedTensor.empty((2, 16), torch.tensor([0, 2]), format="nvfp4")
    finally:
        torch.use_deterministic_algorithms(False)
    made.validate()
    ragged.validate()


@pytest.mark.parametrize(
    ("shape", "kwargs", "text"),
    [
        (
            (),
            {},
            r"shape: expected \(\.\.\., N\) with N >= 1, .* got \(\)",
        ),
        (
            (4, 0),
            {},
            r"shape: expected \(\.\.\., N\) with N >= 1, or \(K, N\) with K >= 1 and dim=0, got",
        ),
        (
            (4,),
            {"dim": 0},
            r"shape: expected \(\.\.\., N\) with N >= 1, or \(K, N\) with K >= 1 and dim=0, got",
        ),
        (
            (0, 4),
            {"dim": 0},
            r"shape: expected \(\.\.\., N\) with N >= 1, or \(K, N\) with K >= 1 and dim=0, got",
        ),
        ((4, 16), {"dim": 1}, r"dim: expected -1 \(the last dimension\) or 0, got 1"),
        (
            (4, 16),
            {"granularity": "rows"},
            "granularity: expected one of 'tensor', 'row', got 'rows'",
        ),
        (
            (4, 16),
            {"scale_layout": "tiled"},
            "scale_layout: expected one of 'linear', 'swizzled_128x4', got 'tiled'",
        ),
        ((4, 16), {"recipe": "nv"}, "recipe: expected one of 'te', 'vllm', 'te_flush', got 'nv'"),
        ((16, 4), {"dim": 0, "scale_layout": "swizzled_128x4"}, "expected 'linear' with dim=0"),
        ((16, 4), {"dim": 0, "granularity": "row"}, "expected 'tensor' with dim=0"),
    ],
)
def test_empty_refuses(shape: tuple[int, ...], kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        QuantizedActivation.empty(shape, **kwargs)


def test_to() -> None:
    q = jitquant.rmsnorm_quantize_nvfp4(randn(4, 40), torch.ones(40))
    assert q.to("cpu") is q
    assert q.to(torch.device("cpu")) is q
    moved = q.to("meta", non_blocking=True)
    assert moved.device.type == "meta"
    assert moved.shape == q.shape
    assert moved.inv_rms.device.type == "meta"
    assert moved.x_fp4.dtype == torch.float4_e2m1fn_x2
    assert moved.x_sf.dtype == torch.float8_e4m3fn
    moved.validate()
    assert quantized(4, 40).to("meta").inv_rms is None
    with pytest.raises(TypeError, match=r"dequantize\(torch.float32\)"):
        q.to(torch.float32)


def test_clone() -> None:
    q = jitquant.rmsnorm_quantize_nvfp4(randn(4, 40), torch.ones(40))
    other = q.clone()
    assert same(q, other)
    assert other.x_fp4.data_ptr() != q.x_fp4.data_ptr()
    assert other.inv_rms.data_ptr() != q.inv_rms.data_ptr()
    assert quantized(4, 40).clone().inv_rms is None


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("index", [slice(2, 5), slice(None), slice(-2, None), slice(3, 3)])
@pytest.mark.parametrize("shape", [(6, 40), (6, 3, 17)])
def test_slice_of_linear(shape: tuple[int, ...], index: slice, granularity: str) -> None:
    q = quantized(*shape, granularity=granularity)
    part = q[index]
    part.validate()
    assert part.shape == randn(*shape)[index].shape
    assert torch.equal(part.dequantize(), q.dequantize()[index])
    if part.num_tokens:
        start = index.indices(6)[0]
        assert part.x_fp4.data_ptr() == q.x_fp4[start].data_ptr()
        assert part.x_sf.data_ptr() == q.x_sf[start].data_ptr()
    if granularity == "tensor":
        assert part.gsa is q.gsa


@pytest.mark.parametrize("start", [None, -9, -6, -2, 0, 3, 6, 9])
@pytest.mark.parametrize("stop", [None, -9, -6, -2, 0, 3, 6, 9])
def test_slice_bounds_are_pythons(start: int | None, stop: int | None) -> None:
    q = quantized(6, 16)
    assert q[start:stop].shape == (len(range(6)[start:stop]), 16)


def test_slice_with_inv_rms() -> None:
    q = jitquant.rmsnorm_quantize_nvfp4(randn(6, 2, 32), torch.ones(32))
    part = q[1:4]
    assert torch.equal(part.inv_rms, q.inv_rms[2:8])
    assert torch.equal(part.gsa, q.gsa[2:8])
    part.validate()


@pytest.mark.parametrize("shape", [(300, 40), (300, 1, 80), (150, 2, 40)])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_slice_of_swizzled(shape: tuple[int, ...], granularity: str) -> None:
    q = quantized(*shape, granularity=granularity, scale_layout="swizzled_128x4")
    inner = shape[1] if len(shape) == 3 else 1
    for start, stop in ((0, 128), (128, 256), (128, 300), (0, 300), (256, 300), (128, 128)):
        index = slice(start // inner, stop // inner)
        part = q[index]
        part.validate()
        assert torch.equal(part.dequantize(), q.dequantize()[index])
    with pytest.raises(ValueError, match=r"multiples of 128.*scale_layout='linear'"):
        q[2:10]
    with pytest.raises(ValueError, match="multiples of 128"):
        q[0 : 100 // inner]


def test_slice_of_dim_0() -> None:
    q = jitquant.quantize_weight_nvfp4(randn(40, 7), dim=0)
    for start, stop in ((0, 16), (16, 40), (16, 32), (0, 40)):
        part = q[start:stop]
        part.validate()
        assert part.shape == (stop - start, 7)
        assert torch.equal(part.dequantize(), q.dequantize()[start:stop])
    with pytest.raises(ValueError, match="multiples of 16"):
        q[2:10]
    with pytest.raises(
        ValueError, match="rows of a slice along dim 0: expected a stop after the start, got 16:16"
    ):
        q[16:16]


def test_slice_refuses() -> None:
    q = quantized(6, 40)
    with pytest.raises(
        TypeError,
        match=r"index: expected a slice of the first dimension, .* got 3.*q\[i:i \+ 1\]",
    ):
        q[3]
    with pytest.raises(
        TypeError, match=r"index: expected a slice of the first dimension, such as q\[2:10\], got"
    ):
        q[1:2, 3:4]
    with pytest.raises(ValueError, match="step of the slice: expected 1, got 2"):
        q[::2]
    with pytest.raises(IndexError, match="one row"):
        quantized(40)[0:1]


def test_pytree() -> None:
    q = jitquant.rmsnorm_quantize_nvfp4(randn(4, 40), torch.ones(40), recipe="vllm")
    leaves, spec = pytree.tree_flatten(q)
    assert len(leaves) == 4
    again = pytree.tree_unflatten(leaves, spec)
    assert again.x_fp4 is q.x_fp4
    assert same(again, q)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(q)[0]]
    assert keys == [".x_fp4", ".x_sf", ".gsa", ".inv_rms"]
    on_meta = pytree.tree_map(lambda t: t.to("meta"), quantized(4, 40))
    assert on_meta.device.type == "meta"
    assert len(pytree.tree_leaves(quantized(4, 40))) == 3
    # Different meta data are different trees.
    assert pytree.tree_structure(quantized(4, 40)) != pytree.tree_structure(quantized(4, 41))


def test_copies_and_pickles() -> None:
    q = quantized(4, 40)
    assert copy.copy(q).x_fp4.data_ptr() == q.x_fp4.data_ptr()
    assert copy.deepcopy(q).x_fp4.data_ptr() != q.x_fp4.data_ptr()
    for other in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert same(other, q)
        assert other.x_fp4.dtype == torch.float4_e2m1fn_x2
        other.validate()
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    assert same(torch.load(file), q)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"scale_layout": "tiles"},
            ValueError,
            r"q\.scale_layout: expected one of 'linear', 'swizzled_128x4', got 'tiles'",
        ),
        (
            {"granularity": "all"},
            ValueError,
            r"q\.granularity: expected one of 'tensor', 'row', got 'all'",
        ),
        (
            {"recipe": "x"},
            ValueError,
            r"q\.recipe: expected one of 'te', 'vllm', 'te_flush', got 'x'",
        ),
        ({"dim": 1}, ValueError, r"q\.dim: expected -1 or 0, got 1"),
        (
            {"x_fp4": None},
            TypeError,
            r"q\.x_fp4: expected a tensor of torch\.float4_e2m1fn_x2, got NoneType",
        ),
        (
            {"x_fp4": torch.zeros(4, 24, dtype=U8)},
            TypeError,
            r"q\.x_fp4: expected a tensor of torch\.float4_e2m1fn_x2, got torch\.uint8",
        ),
        (
            {"x_sf": torch.zeros(4, 3)},
            TypeError,
            r"q\.x_sf: expected a tensor of torch\.float8_e4m3fn, got torch\.float32",
        ),
        (
            {"gsa": torch.zeros(1).half()},
            TypeError,
            r"q\.gsa: expected a tensor of torch\.float32, got torch\.float16",
        ),
        (
            {"gsa": torch.zeros(3)},
            ValueError,
            r"q\.gsa: expected shape \(1,\) for the logical shape \(4, 40\), scale_layout",
        ),
        (
            {"granularity": "row"},
            ValueError,
            r"q\.gsa: expected shape \(4,\) for the logical shape \(4, 40\), scale_layout",
        ),
        (
            {"inv_rms": torch.zeros(3)},
            ValueError,
            r"q\.inv_rms: expected shape \(4,\) for the logical shape \(4, 40\), scale_layout",
        ),
        (
            {"inv_rms": torch.zeros(4, device="meta")},
            ValueError,
            r"q\.inv_rms: expected a tensor on cpu, as q\.x_fp4 is, got one on meta",
        ),
        (
            {"cols": 32},
            ValueError,
            r"q\.x_fp4: expected ceil\(cols / 16\) \* 8 bytes along the packed dimension for",
        ),
        (
            {"scale_layout": "swizzled_128x4"},
            ValueError,
            r"q\.x_sf: expected shape \(128, 4\) for the logical shape \(4, 40\), scale_layout",
        ),
    ],
)
def test_validate(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    q = quantized(4, 40)
    q.validate()
    for name, value in changes.items():
        setattr(q, name, value)
    with pytest.raises(error, match=text):
        q.validate()


def test_validate_says_the_name_it_is_given() -> None:
    q = quantized(4, 40)
    q.recipe = "x"
    with pytest.raises(ValueError, match=r"weights\.recipe"):
        q.validate("weights")
