"""`QuantizedTensor` and `QuantizedRaggedTensor`: description, buffers, pytrees, copies, files."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import byte_view, randn
from torch.utils import _pytree as pytree

import jitquant
from jitquant import QuantizedRaggedTensor, QuantizedTensor
from jitquant.formats import GROUP_SCALE_LAYOUTS, SCALE_FORMATS

OFFSETS = torch.tensor([0, 32, 32, 80])


def made(shape: tuple[int, ...] = (6, 40)) -> dict[str, QuantizedTensor]:
    x = randn(*shape)
    ones = torch.ones(shape[-1])
    groups = {
        f"group {layout} {scale_format}": jitquant.quantize_per_token_group(
            x, 16, scale_layout=layout, scale_format=scale_format
        )
        for layout, scale_format in itertools.product(GROUP_SCALE_LAYOUTS, SCALE_FORMATS)
    }
    return {
        "tensor": jitquant.quantize_fp8(x),
        "tensor e5m2": jitquant.quantize_fp8(x, dtype=torch.float8_e5m2),
        "row": jitquant.quantize_fp8(x, granularity="row"),
        "static": jitquant.quantize_fp8(x, scale=3.0, amax=False),
        "norm": jitquant.rmsnorm_quantize_fp8(x, ones),
        "norm group": jitquant.rmsnorm_quantize_per_token_group(x, ones, 32),
        **groups,
        "int8": jitquant.quantize_per_token_group(x, 32, dtype=torch.int8, recipe="vllm"),
        "block": jitquant.quantize_block(randn(40, 70), (16, 16)),
        "block padded": jitquant.quantize_block(
            randn(40, 70), (32, 32), scale_layout="row_padded", scale_format="ue8m0"
        ),
        "block int8": jitquant.quantize_block(randn(40, 70), dtype=torch.int8),
        "mxfp8": jitquant.quantize_mxfp8(x),
        "mxfp8 swizzled": jitquant.quantize_mxfp8(x, scale_layout="swizzled_128x4"),
        "block both": jitquant.quantize_block_both(randn(33, 70), (32, 32))[1],
        "both": jitquant.quantize_per_token_group_both(randn(33, 70), 32)[1],
        "silu": jitquant.swiglu_quantize_per_token_group(randn(5, 64), 16),
    }


MADE = made()
RAGGED = {
    "fp8": jitquant.quantize_ragged(randn(80), OFFSETS),
    "sizes": jitquant.quantize_ragged(randn(5, 16), OFFSETS // 16, sizes=torch.tensor([1, 0, 2])),
    "nvfp4": jitquant.quantize_ragged(randn(80), OFFSETS, format="nvfp4", recipe="vllm"),
    "mxfp8": jitquant.quantize_ragged(randn(5, 16), OFFSETS // 16, format="mxfp8"),
    "grad": jitquant.quantize_ragged_grad(randn(5, 16), OFFSETS // 16),
}
every = pytest.mark.parametrize("name", MADE)
every_ragged = pytest.mark.parametrize("name", RAGGED)


def same(a: Any, b: Any) -> bool:
    leaves = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return (
        repr(a) == repr(b)
        and all(t.dtype == u.dtype and t.shape == u.shape for t, u in leaves)
        and all(
            torch.equal(byte_view(t.contiguous()), byte_view(u.contiguous())) for t, u in leaves
        )
    )


def like(q: QuantizedTensor, **changed: Any) -> QuantizedTensor:
    keywords: dict[str, Any] = {
        "format": q.format,
        "dtype": q.dtype,
        "group_size": q.block[1],
        "block": q.block,
        "scale_format": q.scale_format,
        "layout": q.layout,
        "recipe": q.recipe,
        "amax": q.amax is not None,
        "inv_rms": q.inv_rms is not None,
    }
    return QuantizedTensor.empty(q.shape, **{**keywords, **changed})


@every
def test_validates_and_describes_itself(name: str) -> None:
    q = MADE[name]
    q.validate()
    assert q.shape == tuple(q.data.shape)
    assert len(q) == q.shape[0]
    assert q.device.type == "cpu"
    assert q.nbytes == sum(t.nbytes for t in pytree.tree_leaves(q))
    assert q.format in repr(q)
    assert q.dequantize(torch.float32).shape == q.shape
    assert q.stored_scales.is_contiguous()


@every
def test_empty_fits_what_is_made(name: str) -> None:
    q = MADE[name]
    buffers = like(q)
    assert repr(buffers) == repr(q)
    for a, b in zip(pytree.tree_leaves(buffers), pytree.tree_leaves(q), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    buffers.validate()
    assert like(q, device="meta").device.type == "meta"


@every
def test_scale_inv_dequantizes(name: str) -> None:
    q = MADE[name]
    if q.scale_format == "ue8m0_packed" or q.layout == "swizzled_128x4":
        return
    scale = q.scale_inv.float()
    rows, cols = q.block
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=-2)[: q.shape[-2]]
    if cols:
        scale = scale.repeat_interleave(cols, dim=-1)[..., : q.shape[-1]]
    assert torch.equal(q.data.float() * scale, q.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        ("row", (6, 40), (3, 1)),
        ("column", (6, 40), (1, 6)),
        ("column_tma", (6, 40), (1, 8)),
        ("column", (2, 6, 40), (18, 1, 6)),
        ("column_tma", (2, 6, 40), (24, 1, 8)),
    ],
)
def test_strides_of_group_scales(
    layout: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    q = jitquant.quantize_per_token_group(randn(*shape), 16, scale_layout=layout)
    assert q.scale_inv.shape == (*shape[:-1], 3)
    assert q.scale_inv.stride() == strides
    packed = jitquant.quantize_per_token_group(
        randn(*shape), 16, scale_layout=layout, scale_format="ue8m0_packed"
    )
    assert packed.scale_inv.shape == (*shape[:-1], 1)
    one = jitquant.quantize_per_token_group(randn(40), 16, scale_layout=layout)
    assert one.scale_inv.shape == (3,)


def test_scales_as_scaled_mm_takes_them() -> None:
    rowwise, columnwise = jitquant.quantize_per_token_group_both(randn(256, 384))
    assert (rowwise.shape, columnwise.shape) == ((256, 384), (384, 256))
    assert rowwise.data.is_contiguous()
    assert columnwise.data.is_contiguous()
    assert (rowwise.scale_inv.shape, rowwise.scale_inv.stride()) == ((256, 3), (1, 256))
    assert (columnwise.scale_inv.shape, columnwise.scale_inv.stride()) == ((384, 2), (1, 384))
    weight = jitquant.quantize_block(randn(384, 640), scale_layout="row_padded")
    assert (weight.scale_inv.shape, weight.scale_inv.stride()) == ((3, 8), (8, 1))
    assert not weight.scale_inv[:, 5:].any()


@every
def test_pytree(name: str) -> None:
    q = MADE[name]
    leaves, spec = pytree.tree_flatten(q)
    again = pytree.tree_unflatten(leaves, spec)
    assert again.data is q.data
    assert same(again, q)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(q)[0]]
    assert keys[:2] == [".data", ".stored_scales"]
    assert (".amax" in keys) == (q.amax is not None)
    assert pytree.tree_map(lambda t: t.to("meta"), q).device.type == "meta"


def test_other_descriptions_are_other_trees() -> None:
    a = jitquant.quantize_per_token_group(randn(4, 32), 16)
    b = jitquant.quantize_per_token_group(randn(4, 32), 16, recipe="vllm")
    assert pytree.tree_structure(a) != pytree.tree_structure(b)


@pytest.mark.parametrize("q", [*MADE.values(), *RAGGED.values()], ids=[*MADE, *RAGGED])
def test_copies(q: QuantizedTensor | QuantizedRaggedTensor) -> None:
    assert q.to("cpu") is q
    assert q.to("meta").device.type == "meta"
    assert q.clone().data.data_ptr() != q.data.data_ptr()
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    for other in (
        q.clone(),
        copy.copy(q),
        copy.deepcopy(q),
        pickle.loads(pickle.dumps(q)),
        torch.load(file),
    ):
        assert same(other, q)
        assert torch.equal(other.dequantize(), q.dequantize())
    with pytest.raises(TypeError, match=r"dequantize\(torch.float32\)"):
        q.to(torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [*MADE.values(), *RAGGED.values()], ids=[*MADE, *RAGGED])
def test_safetensors(q: QuantizedTensor | QuantizedRaggedTensor, tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    save_file(q.tensors(), path, metadata={**q.metadata(), "other": "text"})
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    assert same(type(q).from_tensors(tensors, metadata), q)
    with pytest.raises(KeyError, match="data"):
        type(q).from_tensors({}, metadata)
    with pytest.raises(KeyError, match="format"):
        type(q).from_tensors(tensors, {})
    with pytest.raises(KeyError, match=r"stored_scales|offsets"):
        type(q).from_tensors({"data": tensors["data"]}, metadata)
    with pytest.raises(ValueError, match=r"format: expected what metadata\(\) writes, got 'a b'"):
        type(q).from_tensors(tensors, {**metadata, "format": "a b"})


@pytest.mark.parametrize("q", [*MADE.values(), *RAGGED.values()], ids=[*MADE, *RAGGED])
def test_values_have_the_dtype_of_the_buffer(q: QuantizedTensor | QuantizedRaggedTensor) -> None:
    out = torch.empty(q.shape)
    assert q.dequantize(out=out) is out
    assert torch.equal(out, q.dequantize(torch.float32))


@pytest.mark.parametrize(
    "name", ["tensor", "row", "norm", "norm group", "group row float32", "int8", "mxfp8"]
)
@pytest.mark.parametrize("index", [slice(2, 5), slice(None), slice(-2, None), slice(3, 3)])
@pytest.mark.parametrize("shape", [(6, 40), (6, 3, 17)])
def test_slice(name: str, index: slice, shape: tuple[int, ...]) -> None:
    q = made(shape)[name]
    part = q[index]
    part.validate()
    assert part.shape == randn(*shape)[index].shape
    assert torch.equal(part.dequantize(), q.dequantize()[index])
    if q.inv_rms is not None:
        inner = math.prod(shape[1:-1])
        start, stop, _ = index.indices(6)
        assert torch.equal(part.inv_rms, q.inv_rms[start * inner : stop * inner])


def test_slice_refuses() -> None:
    with pytest.raises(
        TypeError,
        match=r"index: expected a slice of the first dimension, .* got 3.*q\[i:i \+ 1\]",
    ):
        MADE["row"][3]  # type: ignore[index]
    with pytest.raises(ValueError, match="step of the slice: expected 1, got 2"):
        MADE["row"][::2]
    with pytest.raises(IndexError, match="one row"):
        jitquant.quantize_fp8(randn(8))[0:1]
    for name in ("block", "group column float32", "mxfp8 swizzled"):
        with pytest.raises(ValueError, match="Slice before quantizing"):
            MADE[name][0:1]


@pytest.mark.parametrize(
    ("shape", "keywords", "error", "text"),
    [
        ((), {}, ValueError, r"shape: expected \(\.\.\., N\) with N >= 1, got \(\)"),
        ((4, 0), {}, ValueError, r"shape: expected \(\.\.\., N\) with N >= 1, got \(4, 0\)"),
        ((4,), {"format": "fp8_block"}, ValueError, r"\(\.\.\., N, K\)"),
        (
            (4, 4),
            {"format": "fp4"},
            ValueError,
            "format: expected one of 'fp8_tensor', 'int8_tensor', 'fp8_row', 'int8_row',",
        ),
        (
            (4, 4),
            {"dtype": torch.int8},
            TypeError,
            r"dtype: expected torch\.float8_e4m3fn or torch\.float8_e5m2 with format",
        ),
        ((4, 4), {"format": "int8_group", "dtype": torch.float8_e5m2}, TypeError, "torch.int8"),
        (
            (4, 4),
            {"format": "fp8_group", "group_size": 48},
            ValueError,
            r"block: expected one of \(1, 16\), .* got \(1,",
        ),
        ((4, 4), {"format": "fp8_block", "block": (128, 64)}, ValueError, r"\(128, 128\)"),
        ((4, 4), {"format": "fp8_block", "scale_format": "ue8m0_packed"}, ValueError, "'ue8m0'"),
        (
            (4, 4),
            {"format": "fp8_row", "layout": "column"},
            ValueError,
            "layout: expected 'row', got 'column'",
        ),
        (
            (4, 4),
            {"format": "mxfp8", "layout": "row"},
            ValueError,
            "layout: expected one of 'linear', 'swizzled_128x4', got 'row'",
        ),
        (
            (4, 4),
            {"format": "fp8_group", "recipe": "nv"},
            ValueError,
            "recipe: expected one of 'te', 'deepgemm', 'vllm', got 'nv'",
        ),
    ],
)
def test_empty_refuses(
    shape: tuple[int, ...], keywords: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        QuantizedTensor.empty(shape, **keywords)


@pytest.mark.parametrize(
    ("name", "changes", "error", "text"),
    [
        (
            "row",
            {"format": "x"},
            ValueError,
            r"q\.format: expected one of 'fp8_tensor', 'int8_tensor', 'fp8_row', 'int8_row',",
        ),
        ("row", {"block": (1, 16)}, ValueError, r"q\.block: expected \(1, 0\), got \(1, 16\)"),
        ("row", {"layout": "column"}, ValueError, r"q\.layout: expected 'row', got 'column'"),
        (
            "row",
            {"recipe": "x"},
            ValueError,
            r"q\.recipe: expected one of 'te', 'deepgemm', 'vllm', got 'x'",
        ),
        (
            "row",
            {"scale_format": "e8m0"},
            ValueError,
            r"q\.scale_format: expected 'float32', got 'e8m0'",
        ),
        (
            "row",
            {"data": torch.zeros(6, 40)},
            TypeError,
            r"q\.data: expected a tensor of torch\.float8_e4m3fn, torch\.float8_e5m2 with",
        ),
        (
            "row",
            {"data": None},
            TypeError,
            r"q\.data: expected a tensor of torch\.float8_e4m3fn, torch\.float8_e5m2 with",
        ),
        (
            "row",
            {"stored_scales": torch.zeros(6)},
            ValueError,
            r"q\.stored_scales: expected shape \(6, 1\) for the logical shape \(6, 40\), format",
        ),
        ("row", {"stored_scales": torch.zeros(6, 1).half()}, TypeError, "torch.float16"),
        (
            "row",
            {"amax": torch.zeros(1)},
            ValueError,
            r"q\.amax: expected shape \(6, 1\) for the logical shape \(6, 40\), format 'fp8_row'",
        ),
        (
            "norm",
            {"inv_rms": torch.zeros(5)},
            ValueError,
            r"q\.inv_rms: expected shape \(6,\) for the logical shape \(6, 40\), format",
        ),
        (
            "row",
            {"amax": torch.zeros(6, 1, device="meta")},
            ValueError,
            r"q\.amax: expected a tensor on cpu, as q\.data is, got one on meta",
        ),
        (
            "mxfp8",
            {"layout": "swizzled_128x4"},
            ValueError,
            r"q\.stored_scales: expected shape \(128, 4\) for the logical shape \(6, 40\),",
        ),
    ],
)
def test_validate(name: str, changes: dict[str, Any], error: type[Exception], text: str) -> None:
    q = copy.copy(MADE[name])
    for field, value in changes.items():
        setattr(q, field, value)
    with pytest.raises(error, match=text):
        q.validate()


@every_ragged
def test_ragged(name: str) -> None:
    q = RAGGED[name]
    assert len(q) == q.num_segments == 3
    q.validate()
    if name == "mxfp8":
        assert q.scale_inv is q.amax is None
        assert q.block_scales.shape == (3,)
    else:
        assert q.scale_inv.shape == q.amax.shape == (3,)
    assert q.dequantize(torch.float32).shape == q.shape
    leaves, spec = pytree.tree_flatten(q)
    assert same(pytree.tree_unflatten(leaves, spec), q)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    buffers = QuantizedRaggedTensor.empty(
        q.shape,
        q.offsets,
        sizes=q.sizes,
        format=q.format,
        dtype=torch.float8_e4m3fn if q.format == "nvfp4" else q.data.dtype,
        dbias=q.dbias is not None,
        recipe=q.recipe,
    )
    buffers.validate()
    assert repr(buffers) == repr(q)
    for a, b in zip(pytree.tree_leaves(buffers), leaves, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_ragged_empty_refuses() -> None:
    with pytest.raises(
        ValueError, match="format: expected one of 'fp8_tensor', 'nvfp4', 'mxfp8', got 'fp8'"
    ):
        QuantizedRaggedTensor.empty((8,), OFFSETS, format="fp8")
    with pytest.raises(
        TypeError,
        match=r"dtype: expected torch\.float8_e4m3fn or torch\.float8_e5m2, got torch\.int8",
    ):
        QuantizedRaggedTensor.empty((8,), OFFSETS, dtype=torch.int8)
    with pytest.raises(
        ValueError, match="recipe: expected one of 'te', 'vllm', 'te_flush', got 'deepgemm'"
    ):
        QuantizedRaggedTensor.empty((8,), OFFSETS, recipe="deepgemm")
    with pytest.raises(
        ValueError, match=r"shape: expected a shape of one dimension or more, got \(\)"
    ):
        QuantizedRaggedTensor.empty((), OFFSETS, dbias=True)


BOUNDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"offsets": [0, 8]}, TypeError, r"offsets: .* got list\. .*torch\.tensor\(offsets\)"),
    ({"offsets": OFFSETS.int()}, TypeError, r"offsets: .* got torch\.int32\. .*offsets\.long\(\)"),
    (
        {"offsets": OFFSETS[None]},
        ValueError,
        r"offsets: expected shape \(G \+ 1,\), got shape \(1, 4\)",
    ),
    ({"offsets": OFFSETS[:0]}, ValueError, r"offsets: .* got shape \(0,\)"),
    ({"sizes": [1, 2, 3]}, TypeError, "sizes: expected a tensor of int64, got list"),
    ({"sizes": OFFSETS[:3].int()}, TypeError, r"sizes: expected int64, got torch\.int32"),
    ({"sizes": OFFSETS}, ValueError, r"sizes: expected shape \(3,\), .* got shape \(4,\)"),
    (
        {"sizes": OFFSETS[:3].to("meta")},
        ValueError,
        "sizes: expected a tensor on cpu, as .*offsets is, got one on meta",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BOUNDS)
def test_bounds_of_segments(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        QuantizedRaggedTensor.empty((80,), **{"offsets": OFFSETS, **changes})
    q = copy.copy(RAGGED["fp8"])
    vars(q).update(changes)
    with pytest.raises(error, match=rf"^q\.{text}"):
        q.validate()


@pytest.mark.parametrize(
    ("name", "changes", "error", "text"),
    [
        (
            "fp8",
            {"format": "fp8"},
            ValueError,
            r"q\.format: expected one of 'fp8_tensor', 'nvfp4', 'mxfp8', got 'fp8'",
        ),
        (
            "fp8",
            {"recipe": "deepgemm"},
            ValueError,
            r"q\.recipe: expected one of 'te', 'vllm', 'te_flush', got 'deepgemm'",
        ),
        (
            "fp8",
            {"shape": ()},
            ValueError,
            r"q\.shape: expected a shape of one dimension or more, got \(\)",
        ),
        (
            "fp8",
            {"shape": (81,)},
            ValueError,
            r"q\.data: expected shape \(81,\) for 3 segments in a buffer of shape \(81,\) and",
        ),
        (
            "fp8",
            {"data": None},
            TypeError,
            r"q\.data: expected a tensor of torch\.float8_e4m3fn, torch\.float8_e5m2 with",
        ),
        (
            "fp8",
            {"data": torch.zeros(80)},
            TypeError,
            r"q\.data: expected a tensor of torch\.float8_e4m3fn, torch\.float8_e5m2 with",
        ),
        (
            "fp8",
            {"amax": None},
            TypeError,
            r"q\.amax: expected a tensor of torch\.float32 with format 'fp8_tensor', got",
        ),
        (
            "fp8",
            {"scale_inv": torch.ones(2)},
            ValueError,
            r"q\.scale_inv: expected shape \(3,\) for 3 segments in a buffer of shape \(80,\)",
        ),
        (
            "fp8",
            {"amax": torch.ones(3, device="meta")},
            ValueError,
            r"q\.amax: expected a tensor on cpu, as q\.offsets is, got one on meta",
        ),
        (
            "fp8",
            {"block_scales": torch.ones(5)},
            ValueError,
            r"q\.block_scales: expected None with format 'fp8_tensor', got a tensor",
        ),
        (
            "nvfp4",
            {"block_scales": None},
            ValueError,
            r"q\.block_scales: expected a tensor with format 'nvfp4', got None",
        ),
        (
            "nvfp4",
            {"shape": (96,)},
            ValueError,
            r"q\.data: expected shape \(48,\) for 3 segments in a buffer of shape \(96,\) and",
        ),
        (
            "grad",
            {"dbias": torch.ones(3, 8)},
            ValueError,
            r"q\.dbias: expected shape \(3, 16\) for 3 segments in a buffer of shape \(5, 16\)",
        ),
    ],
)
def test_ragged_validates(
    name: str, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    q = copy.copy(RAGGED[name])
    vars(q).update(changes)
    with pytest.raises(error, match=text):
        q.validate()
