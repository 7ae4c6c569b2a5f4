"""``process_group=``: each rank gets its part of what the whole tensor gives, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from samples import byte_view, randn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import jitquant
from jitquant import QuantizedActivation, QuantizedRaggedTensor, QuantizedTensor
from jitquant.numerics import recipes as recipe_numerics
from jitquant.testing import count_launches

from .ranks import Here

BOTH_RECIPES = ("te", "vllm")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def same(a: Tensor, b: Tensor, what: Any = "") -> None:
    assert a.shape == b.shape, (what, a.shape, b.shape)
    assert a.dtype == b.dtype, what
    assert torch.equal(byte_view(a.contiguous()), byte_view(b.contiguous())), what


def part(t: Tensor, here: Here, dim: int = 0) -> Tensor:
    """The part of this rank, in memory of its own."""
    return t.chunk(here.world, dim)[here.rank].clone(memory_format=torch.contiguous_format)


def large_in_one_row(
    rows: int, cols: int, here: Here, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Normal values, the largest in the last part: an amax of one part alone would show."""
    x = randn(rows, cols, dtype=torch.float32, seed=rows + cols)
    x[-1, -1] = 37.3
    x[rows // 3, : cols // 2] *= 1e-3
    return x.to(dtype).to(here.device)


def parts_of(q: QuantizedActivation, here: Here, dim: int = 0) -> QuantizedActivation:
    """The part of a quantized whole that this rank should have."""
    rows = q.gsa.numel() > 1 and dim == 0
    codes, scales = (part(t, here, dim) for t in (q.x_fp4_bytes, q.x_sf_bytes))
    return QuantizedActivation(
        codes.view(torch.float4_e2m1fn_x2),
        scales.view(torch.float8_e4m3fn),
        part(q.gsa, here) if rows else q.gsa,
        None if q.inv_rms is None else part(q.inv_rms, here),
    )


def same_nvfp4(
    q: QuantizedActivation, whole: QuantizedActivation, here: Here, dim: int = 0
) -> None:
    q.validate()
    want = parts_of(whole, here, dim)
    same(q.x_fp4_bytes, want.x_fp4_bytes, "x_fp4")
    same(q.x_sf, want.x_sf, "x_sf")
    same(q.gsa, want.gsa, "gsa")
    if want.inv_rms is not None:
        assert q.inv_rms is not None
        same(q.inv_rms, want.inv_rms, "inv_rms")


def case_nvfp4_divided_between_rows(here: Here) -> None:
    for recipe, layout, dtype in itertools.product(
        BOTH_RECIPES, ("linear", "swizzled_128x4"), (torch.bfloat16, torch.float32)
    ):
        x = large_in_one_row(256, 208, here, dtype)
        keywords: dict[str, Any] = {"recipe": recipe, "scale_layout": layout, "divisor": 1344.0}
        q = jitquant.quantize_nvfp4(part(x, here), process_group=here.group, **keywords)
        same_nvfp4(q, jitquant.quantize_nvfp4(x, **keywords), here)
    x = large_in_one_row(10, 19, here)  # columns that are not a multiple of 16
    q = jitquant.quantize_nvfp4(part(x, here), process_group=here.group)
    same_nvfp4(q, jitquant.quantize_nvfp4(x), here)
    wide = large_in_one_row(10, 64, here)[:, 16:48]  # strided rows
    mine = wide.chunk(here.world)[here.rank]
    q = jitquant.quantize_nvfp4(mine, process_group=here.group)
    same_nvfp4(q, jitquant.quantize_nvfp4(wide), here)


def case_nvfp4_divided_between_columns(here: Here) -> None:
    for granularity, recipe, dtype in itertools.product(
        ("tensor", "row"), BOTH_RECIPES, (torch.bfloat16, torch.float16)
    ):
        x = large_in_one_row(37, 416, here, dtype)
        x[5] = 0
        keywords: dict[str, Any] = {"granularity": granularity, "recipe": recipe}
        q = jitquant.quantize_nvfp4(part(x, here, 1), process_group=here.group, **keywords)
        assert q.granularity == granularity
        same_nvfp4(q, jitquant.quantize_nvfp4(x, **keywords), here, 1)


def case_recipes(here: Here) -> None:
    angles = torch.arange(16.0, device=here.device)[None]
    recipes: list[dict[str, Any]] = [
        {"rotate": "te"},
        {"select": "4over6_mae", "e4m3_max": 256},
        {"rotate": "32", "select": "4over6_mse", "block": "1x16"},
        {"block": "16x16"},
        {"rotate": "32", "rope": (angles.cos(), angles.sin())},
    ]
    x = large_in_one_row(64, 96, here)
    for recipe in recipes:
        q = jitquant.quantize_nvfp4(part(x, here), process_group=here.group, **recipe)
        same_nvfp4(q, jitquant.quantize_nvfp4(x, **recipe), here)
    # Columns of a rank, with a scale for each row; bytes that are given.
    given = torch.arange(64 * 96, dtype=torch.uint8, device=here.device).view(64, 96)
    rows: list[dict[str, Any]] = [
        {"rotate": "16"},
        {"select": "static_4"},
        {"rounding": "stochastic", "random_bytes": given},
    ]
    for recipe in rows:
        mine = dict(recipe)
        if "random_bytes" in mine:
            mine["random_bytes"] = part(given, here, 1).contiguous()
        q = jitquant.quantize_nvfp4(
            part(x, here, 1), granularity="row", process_group=here.group, **mine
        )
        same_nvfp4(q, jitquant.quantize_nvfp4(x, granularity="row", **recipe), here, 1)
    # What is drawn depends on the place in the part.
    mine = part(x, here)
    state = torch.tensor([5, 7], device=here.device)
    drawn = recipe_numerics.random_bytes(state, mine.shape[0], mine.shape[1] // 16)
    for rounding in ({"rng_state": state}, {"random_bytes": drawn}):
        q = jitquant.quantize_nvfp4(
            mine, rounding="stochastic", **rounding, process_group=here.group
        )
        if "rng_state" in rounding:
            first = q
    same(q.x_fp4_bytes, first.x_fp4_bytes, "x_fp4")
    given_t = given.T.contiguous() ^ 0x5A
    both: list[dict[str, Any]] = [
        {"rotate": "te"},
        {"block": "16x16"},
        {"select": "4over6_mae", "e4m3_max": 256},
        {"rotate": "te", "rounding": "stochastic", "random_bytes": (given, given_t)},
    ]
    for recipe in both:
        whole = jitquant.quantize_nvfp4_both(x, **recipe)
        own = dict(recipe)
        if "random_bytes" in recipe:
            own["random_bytes"] = (part(given, here), part(given_t, here, 1))
        out = tuple(
            jitquant.NVFP4Tensor.empty(shape, device=here.device)
            for shape in ((64 // here.world, 96), (96, 64 // here.world))
        )
        jitquant.quantize_nvfp4_both(part(x, here), **own, process_group=here.group, out=out)
        same_nvfp4(out[0], whole[0], here)
        same_nvfp4(out[1], whole[1], here, 1)
    with pytest.raises(ValueError, match="gsa"):
        jitquant.quantize_nvfp4(x, 0.01, rotate="te", process_group=here.group)
    with pytest.raises(ValueError, match="process_group"):
        jitquant.quantize_fp8(x, granularity="row", rotate="32", process_group=here.group)


def case_many_values(here: Here) -> None:
    # More than one block of threads for a row, and more blocks than a GPU has at once.
    shape = (1200, 8192) if here.device.type == "cuda" else (100, 2048)
    x = large_in_one_row(*shape, here)
    for granularity in ("tensor", "row"):
        q = jitquant.quantize_nvfp4(
            part(x, here, 1), granularity=granularity, process_group=here.group
        )
        same_nvfp4(q, jitquant.quantize_nvfp4(x, granularity=granularity), here, 1)


def case_weights(here: Here) -> None:
    for block, dim, recipe in itertools.product(("1x16", "16x16"), (-1, 0), BOTH_RECIPES):
        w = large_in_one_row(64, 96, here)
        keywords: dict[str, Any] = {"block": block, "dim": dim, "recipe": recipe}
        for divided in (0, 1):
            q = jitquant.quantize_weight_nvfp4(
                part(w, here, divided), process_group=here.group, **keywords
            )
            whole = jitquant.quantize_weight_nvfp4(w, **keywords)
            same_nvfp4(q, whole, here, divided)


def case_gate_and_up(here: Here) -> None:
    for op, granularity in itertools.product(("select", "swiglu"), ("tensor", "row")):
        fused = large_in_one_row(22, 256, here)
        keywords: dict[str, Any] = {"op": op, "granularity": granularity}
        q = jitquant.deinterleave_quantize_nvfp4(
            part(fused, here, 1), 64, process_group=here.group, **keywords
        )
        whole = jitquant.deinterleave_quantize_nvfp4(fused, 128, **keywords)
        same_nvfp4(q, whole, here, 1)
        halves = torch.cat([part(t, here, 1) for t in fused.chunk(2, 1)], 1)
        q = jitquant.deinterleave_quantize_nvfp4(
            halves, 64, interleave=0, process_group=here.group, **keywords
        )
        whole = jitquant.deinterleave_quantize_nvfp4(fused, 128, interleave=0, **keywords)
        same_nvfp4(q, whole, here, 1)
    q = jitquant.deinterleave_quantize_nvfp4(part(fused, here), 128, process_group=here.group)
    same_nvfp4(q, jitquant.deinterleave_quantize_nvfp4(fused, 128), here)


def case_norms(here: Here) -> None:
    # As many rows that kernels divide the rows of a part and of the whole alike among threads.
    x = large_in_one_row(512, 112, here)
    weight = randn(112, seed=5).to(here.device)
    residual = randn(512, 112, seed=6).to(here.device)
    X = randn(512, 3, 112, seed=7).to(here.device)
    X[-1] *= 9
    A = randn(512, 3, seed=8).to(here.device)
    for recipe in BOTH_RECIPES:
        keywords: dict[str, Any] = {"granularity": "tensor", "recipe": recipe}
        q = jitquant.rmsnorm_quantize_nvfp4(
            part(x, here), weight, process_group=here.group, **keywords
        )
        same_nvfp4(q, jitquant.rmsnorm_quantize_nvfp4(x, weight, **keywords), here)
        mine, all_of_it = part(residual, here), residual.clone()
        q = jitquant.rmsnorm_quantize_nvfp4(
            part(x, here), weight, residual=mine, process_group=here.group, **keywords
        )
        whole = jitquant.rmsnorm_quantize_nvfp4(x, weight, residual=all_of_it, **keywords)
        same_nvfp4(q, whole, here)
        same(mine, part(all_of_it, here), "residual")
        q = jitquant.mhc_rmsnorm_quantize_nvfp4(
            part(X, here), part(A, here), weight, process_group=here.group, **keywords
        )
        same_nvfp4(q, jitquant.mhc_rmsnorm_quantize_nvfp4(X, A, weight, **keywords), here)


def same_fp8(q: QuantizedTensor, whole: QuantizedTensor, here: Here, dim: int = 0) -> None:
    q.validate()
    assert q.amax is not None
    assert whole.amax is not None
    same(q.data, part(whole.data.view(torch.uint8), here, dim).view(q.dtype), "data")
    same(q.scale_inv, whole.scale_inv, "scale_inv")
    same(q.amax, whole.amax, "amax")


def case_fp8(here: Here) -> None:
    for dtype, bound in itertools.product(FP8, (None, 1.5)):
        x = large_in_one_row(26, 76, here)
        keywords: dict[str, Any] = {"dtype": dtype, "scale_ub": bound}
        for dim in (0, 1):
            q = jitquant.quantize_fp8(part(x, here, dim), process_group=here.group, **keywords)
            same_fp8(q, jitquant.quantize_fp8(x, **keywords), here, dim)
        keywords["granularity"] = "row"
        q = jitquant.quantize_fp8(part(x, here, 1), process_group=here.group, **keywords)
        same_fp8(q, jitquant.quantize_fp8(x, **keywords), here, 1)
        q = jitquant.swiglu_quantize_fp8(
            part(x, here, 1), interleave=19, process_group=here.group, **keywords
        )
        same_fp8(q, jitquant.swiglu_quantize_fp8(x, interleave=19, **keywords), here, 1)
    q = jitquant.swiglu_quantize_fp8(part(x, here), granularity="tensor", process_group=here.group)
    parts = [jitquant.swiglu_quantize_fp8(t) for t in x.chunk(here.world)]
    largest = max(float(p.amax.max()) for p in parts if p.amax is not None)
    assert q.amax is not None
    assert q.amax.item() == largest


def case_many_tensors_in_a_buffer(here: Here) -> None:
    """Each rank has half of the rows of each of three matrices, one of them without a number."""
    sizes = (64, 0, 256, 128)
    matrices = [large_in_one_row(4, size + 1, here)[:, 1:] for size in sizes]
    matrices[3][0, 1] = math.nan
    x = torch.cat([m.reshape(-1) for m in matrices])
    mine = torch.cat([part(m, here).reshape(-1) for m in matrices])

    def offsets(rows: int) -> Tensor:
        counts = torch.tensor([0, *(rows * size for size in sizes)], device=here.device)
        return counts.cumsum(0)

    def matrix(flat: Tensor, i: int, rows: int, codes: int) -> Tensor:
        at = rows * sum(sizes[:i]) // codes
        return flat[at : at + rows * sizes[i] // codes].reshape(rows, sizes[i] // codes)

    for format, into in itertools.product(("fp8_tensor", "nvfp4"), (False, True)):
        out = QuantizedRaggedTensor.empty(mine.shape, offsets(2), format=format) if into else None
        q = jitquant.quantize_ragged(
            mine, offsets(2), format=format, process_group=here.group, out=out
        )
        assert (q is out) == into
        whole = jitquant.quantize_ragged(x, offsets(4), format=format)
        same(q.amax, whole.amax, "amax")
        same(q.scale_inv, whole.scale_inv, "scale_inv")
        codes = 2 if format == "nvfp4" else 1
        for i in (0, 2, 3):
            want = part(matrix(whole.data.view(torch.uint8), i, 4, codes), here)
            same(matrix(q.data.view(torch.uint8), i, 2, codes), want, (format, i))
            if whole.block_scales is not None:
                assert q.block_scales is not None
                want = part(matrix(whole.block_scales.view(torch.uint8), i, 4, 16), here)
                same(matrix(q.block_scales.view(torch.uint8), i, 2, 16), want, i)
    grad = large_in_one_row(8, 32, here)
    grad[:2] *= 100
    ends = torch.tensor([0, 2, 8], device=here.device)
    g = torch.cat([part(grad[:2], here), part(grad[2:], here)])
    q = jitquant.quantize_ragged_grad(g, ends // 2, process_group=here.group)
    whole = jitquant.quantize_ragged_grad(grad, ends)
    same(q.amax, whole.amax, "amax")
    want = torch.cat([part(t, here) for t in whole.data.view(torch.uint8).split((2, 6))])
    same(q.data.view(torch.uint8), want, "data")
    assert q.dbias is not None
    assert q.dbias.shape == (2, 32)


def case_no_numbers_and_nothing(here: Here) -> None:
    """NaN, infinity and zeros on one rank, or on all, and a rank without rows."""
    filled = ((1, math.nan), (0, math.nan), (1, math.inf), (0, -math.inf), (1, 0.0), (None, 0.0))
    for where, value in filled:
        x = large_in_one_row(12, 64, here)
        if where is None:
            x[:] = value
        elif value == 0.0:
            x.chunk(here.world)[where][:] = value
        else:
            x.chunk(here.world)[where][1, 3] = value
        mine = part(x, here)
        same_nvfp4(
            jitquant.quantize_nvfp4(mine, process_group=here.group),
            jitquant.quantize_nvfp4(x),
            here,
        )
        same_fp8(
            jitquant.quantize_fp8(mine, process_group=here.group), jitquant.quantize_fp8(x), here
        )
        columns = part(x, here, 1)
        q = jitquant.quantize_nvfp4(columns, granularity="row", process_group=here.group)
        same_nvfp4(q, jitquant.quantize_nvfp4(x, granularity="row"), here, 1)
        f = jitquant.quantize_fp8(columns, granularity="row", process_group=here.group)
        same_fp8(f, jitquant.quantize_fp8(x, granularity="row"), here, 1)
    x = large_in_one_row(6, 64, here)
    mine = x if here.rank == 0 else x[:0]
    q = jitquant.quantize_nvfp4(mine, process_group=here.group)
    whole = jitquant.quantize_nvfp4(x)
    same(q.gsa, whole.gsa)
    if here.rank == 0:
        same(q.x_fp4_bytes, whole.x_fp4_bytes)


def case_out(here: Here) -> None:
    x = large_in_one_row(512, 64, here)
    mine, weight = part(x, here), torch.ones(64, device=here.device)
    out = QuantizedActivation.empty(mine.shape, recipe="vllm", device=here.device)
    assert jitquant.quantize_nvfp4(mine, process_group=here.group, out=out) is out
    assert out.recipe == "te"
    same_nvfp4(out, jitquant.quantize_nvfp4(x), here)
    out = QuantizedActivation.empty(mine.shape, inv_rms=True, device=here.device)
    inv_rms = out.inv_rms
    got = jitquant.rmsnorm_quantize_nvfp4(
        mine, weight, granularity="tensor", process_group=here.group, out=out
    )
    assert got is out
    assert out.inv_rms is inv_rms
    same_nvfp4(out, jitquant.rmsnorm_quantize_nvfp4(x, weight, granularity="tensor"), here)
    for granularity in ("tensor", "row"):
        columns = part(x, here, 1)
        buffers = QuantizedTensor.empty(
            columns.shape, format=f"fp8_{granularity}", amax=True, device=here.device
        )
        got = jitquant.quantize_fp8(
            columns, granularity=granularity, process_group=here.group, out=buffers
        )
        assert got is buffers
        same_fp8(buffers, jitquant.quantize_fp8(x, granularity=granularity), here, 1)


class Copies(TorchDispatchMode):
    """Counts copies of tensors that functions make beside their ops."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def case_strided_columns_are_copied_once(here: Here) -> None:
    x, weight = large_in_one_row(128, 64, here), torch.ones(64, device=here.device)
    mixed = torch.stack([x, x], 1)
    group: dict[str, Any] = {"process_group": here.group}
    calls: dict[str, Any] = {
        "nvfp4": lambda t: jitquant.quantize_nvfp4(t, **group),
        "rotated": lambda t: jitquant.quantize_nvfp4(t, rotate="16", **group),
        "fp8": lambda t: jitquant.quantize_fp8(t, **group),
        "swiglu fp8": lambda t: jitquant.swiglu_quantize_fp8(t, granularity="tensor", **group),
        "swiglu": lambda t: jitquant.deinterleave_quantize_nvfp4(t, 32, **group),
        "norm": lambda t: jitquant.rmsnorm_quantize_nvfp4(t, weight, granularity="tensor", **group),
        "mhc": lambda t: jitquant.mhc_rmsnorm_quantize_nvfp4(
            t, torch.ones_like(t[..., 0]), weight, granularity="tensor", **group
        ),
        "both": lambda t: jitquant.quantize_nvfp4_both(t, **group)[1],
    }
    for name, call in calls.items():
        whole = part(mixed if name == "mhc" else x, here)
        strided = torch.stack([whole, whole], -1)[..., 0]
        assert strided.stride(-1) == 2
        with Copies() as copies:
            got = call(strided)
        assert copies.count == 1, (name, copies.count)
        want = call(whole)
        same(got.dequantize(torch.float32), want.dequantize(torch.float32), name)


def case_under_torch_compile(here: Here) -> None:
    x = large_in_one_row(32, 64, here)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def quantized(x: Tensor) -> tuple[QuantizedActivation, QuantizedTensor]:
        return (
            jitquant.quantize_nvfp4(x * 2, process_group=here.group),
            jitquant.quantize_fp8(x * 2, process_group=here.group),
        )

    q, f = quantized(part(x, here))
    same_nvfp4(q, jitquant.quantize_nvfp4(x * 2), here)
    same_fp8(f, jitquant.quantize_fp8(x * 2), here)


def case_refusals(here: Here) -> None:
    x = large_in_one_row(4, 24, here)
    with pytest.raises(TypeError, match=r"process_group: expected a torch.*, got str"):
        jitquant.quantize_nvfp4(x, process_group="tp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="process_group: expected None beside gsa"):
        jitquant.quantize_nvfp4(x, 0.1, process_group=here.group)
    with pytest.raises(ValueError, match="process_group: expected None beside scale"):
        jitquant.quantize_fp8(x, scale=0.1, process_group=here.group)
    with pytest.raises(
        ValueError, match="granularity: expected 'tensor' with process_group and a norm"
    ):
        jitquant.rmsnorm_quantize_nvfp4(x, x[0].contiguous(), process_group=here.group)
    spread = DTensor.from_local(x, here.mesh, [Shard(0)])
    with pytest.raises(
        TypeError, match=r"x: expected this rank\'s tensor, got a DTensor.*x\.to_local\(\)"
    ):
        jitquant.quantize_nvfp4(spread)
    with pytest.raises(TypeError, match="got a DTensor"):
        jitquant.quantize_fp8(spread, process_group=here.group)
    if here.rank == 0:
        with pytest.raises(ValueError, match="a block of 16 would be divided"):
            jitquant.quantize_nvfp4(x, granularity="row", process_group=here.group)


def case_a_refused_call_writes_nothing(here: Here) -> None:
    x = large_in_one_row(4, 32, here)
    weight, A = torch.ones(32, device=here.device), torch.ones(4, 1, device=here.device)
    residual = torch.zeros_like(x)
    norm = QuantizedActivation.empty((4, 32), inv_rms=True, device=here.device)
    eight = QuantizedTensor.empty((4, 32), amax=True, device=here.device)
    half = QuantizedTensor.empty((4, 16), amax=True, device=here.device)
    for t in (norm.inv_rms, eight.amax, half.amax):
        assert t is not None
        t.fill_(-1)
    group: dict[str, Any] = {"process_group": here.group}
    of_norm: dict[str, Any] = {"granularity": "tensor", **group}
    calls: dict[str, Callable[[], Any]] = {
        "recipe: expected one of": lambda: jitquant.rmsnorm_quantize_nvfp4(
            x, weight, residual=residual, recipe="fast", **of_norm
        ),
        r"out\.scale_layout: expected": lambda: jitquant.rmsnorm_quantize_nvfp4(
            x, weight, scale_layout="swizzled_128x4", out=norm, **of_norm
        ),
        r"out\.shape: expected": lambda: jitquant.mhc_rmsnorm_quantize_nvfp4(
            x[:2, None], A[:2], weight, out=norm, **of_norm
        ),
        r"out\.inv_rms: expected a buffer": lambda: jitquant.rmsnorm_quantize_nvfp4(
            x, weight, residual=residual, out=replace(norm, inv_rms=None), **of_norm
        ),
        r"out\.dtype: expected": lambda: jitquant.quantize_fp8(
            x, dtype=torch.float8_e5m2, out=eight, **group
        ),
        r"out\.shape: expected \(4, 16\)": lambda: jitquant.swiglu_quantize_fp8(
            x, granularity="tensor", out=eight, **group
        ),
        "amax_eps: expected": lambda: jitquant.swiglu_quantize_fp8(
            x, granularity="tensor", amax_eps=-1.0, out=half, **group
        ),
    }
    for says, call in calls.items():
        with pytest.raises(ValueError, match=says):
            call()
        assert not residual.any(), says
        for t in (norm.inv_rms, eight.amax, half.amax):
            assert t is not None
            assert (t == -1).all(), says


def cuda_case_capture(here: Here) -> None:
    """Captured once, replayed on other values; nothing waits for the device."""
    x = large_in_one_row(512, 416, here)
    mine, columns, weight = part(x, here), part(x, here, 1), randn(416, seed=5).to(here.device)

    def calls() -> list[Any]:
        group: dict[str, Any] = {"process_group": here.group}
        return [
            jitquant.quantize_nvfp4(mine, **group),
            jitquant.rmsnorm_quantize_nvfp4(mine, weight, granularity="tensor", **group),
            jitquant.quantize_fp8(mine, **group),
            jitquant.quantize_nvfp4(columns, granularity="row", **group),
            jitquant.quantize_fp8(columns, granularity="row", **group),
        ]

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    calls()
    torch.cuda.set_sync_debug_mode("default")
    # Two launches each, and the all_reduce between them.
    assert count_launches(calls) == 15
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = calls()
    for factor in (3.0, 0.1):
        y = x * factor
        mine.copy_(part(y, here))
        columns.copy_(part(y, here, 1))
        graph.replay()
        torch.cuda.synchronize()
        same_nvfp4(made[0], jitquant.quantize_nvfp4(y), here)
        whole = jitquant.rmsnorm_quantize_nvfp4(y, weight, granularity="tensor")
        same_nvfp4(made[1], whole, here)
        same_fp8(made[2], jitquant.quantize_fp8(y), here)
        same_nvfp4(made[3], jitquant.quantize_nvfp4(y, granularity="row"), here, 1)
        same_fp8(made[4], jitquant.quantize_fp8(y, granularity="row"), here, 1)
    del graph
