"""Every public function through Inductor: functional, and with ``out=``, to the bits of eager."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import one_tensor
import pytest
import torch
from samples import byte_view, randn
from torch import Tensor
from torch.utils import _pytree as pytree

import jitquant
from jitquant import QuantizedActivation, QuantizedRaggedTensor, QuantizedTensor
from jitquant.formats import E8M0_DTYPE, FP4_DTYPE

pytestmark = pytest.mark.usefixtures("_fresh_compiler")

ROWS, COLS = 4, 64


@dataclass(frozen=True)
class Case:
    """A call, and buffers for its results.

    Attributes:
        call: of an input and keywords, ``out`` among them.
        empty: buffers for the result of an input of so many rows.
    """

    call: Callable[..., Any]
    empty: Callable[[int], Any]


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def offsets() -> Tensor:
    return torch.tensor([0, 2, 4])


def weight(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1])


def activation(cols: int = COLS, **form: Any) -> Callable[[int], QuantizedActivation]:
    return lambda rows: QuantizedActivation.empty((rows, cols), **form)


def experts(n: int, k: int) -> Any:
    """Two experts with weights of ones, made here: Inductor writes no code for views of codes."""
    w = torch.ones(n, k)
    q = jitquant.quantize_weight_nvfp4(w)
    codes = torch.stack([q.x_fp4.view(torch.uint8)] * 2).view(q.x_fp4.dtype)
    scales = torch.stack([q.x_sf.view(torch.uint8)] * 2).view(q.x_sf.dtype)
    return type(q)(codes, scales, q.gsa)


GATE_UP, DOWN = experts(32, COLS), experts(COLS, 16)


def tensor(cols: int = COLS, **form: Any) -> Callable[[int], QuantizedTensor]:
    return lambda rows: QuantizedTensor.empty((rows, cols), **form)


def both(**form: Any) -> Callable[[int], tuple[QuantizedTensor, QuantizedTensor]]:
    return lambda rows: (
        QuantizedTensor.empty((rows, COLS), **form),
        QuantizedTensor.empty((COLS, rows), **form),
    )


def ragged(**form: Any) -> Callable[[int], QuantizedRaggedTensor]:
    return lambda rows: QuantizedRaggedTensor.empty((rows, COLS), offsets(), **form)


def values(rows: int = ROWS) -> Tensor:
    return randn(rows, COLS, dtype=torch.float32)


def like(t: Tensor) -> Callable[[int], Tensor]:
    shape, dtype = t.shape, t.dtype
    return lambda rows: torch.empty(shape, dtype=dtype)


GROUP = {"format": "fp8_group", "group_size": 16}
BLOCK = {"format": "fp8_block", "block": (16, 16)}

CASES = {
    **{name: Case(f, like(f(values()))) for name, f in one_tensor.functions("Tensor").items()},
    "quantize_nvfp4": Case(jitquant.quantize_nvfp4, activation()),
    "quantize_nvfp4-row": Case(
        lambda x, **out: jitquant.quantize_nvfp4(x, granularity="row", **out),
        activation(granularity="row"),
    ),
    "quantize_nvfp4-static": Case(
        lambda x, **out: jitquant.quantize_nvfp4(x, 0.01, scale_layout="swizzled_128x4", **out),
        activation(scale_layout="swizzled_128x4"),
    ),
    "quantize_weight_nvfp4": Case(
        lambda x, **out: jitquant.quantize_weight_nvfp4(x, dim=0, **out), activation(dim=0)
    ),
    "deinterleave_quantize_nvfp4": Case(
        lambda x, **out: jitquant.deinterleave_quantize_nvfp4(x, COLS // 2, **out),
        activation(COLS // 2),
    ),
    "rmsnorm_quantize_nvfp4": Case(
        lambda x, **out: jitquant.rmsnorm_quantize_nvfp4(x, weight(x), **out),
        activation(granularity="row", inv_rms=True),
    ),
    "mhc_rmsnorm_quantize_nvfp4": Case(
        lambda x, **out: jitquant.mhc_rmsnorm_quantize_nvfp4(
            x.view(-1, 2, COLS // 2), x[:, :2].contiguous(), torch.ones(COLS // 2), **out
        ),
        activation(COLS // 2, granularity="row", inv_rms=True),
    ),
    "dequantize_nvfp4": Case(
        lambda x, **out: jitquant.dequantize_nvfp4(
            jitquant.quantize_nvfp4(x), torch.float32, **out
        ),
        lambda rows: floats(rows, COLS),
    ),
    "quantize_nvfp4-recipe": Case(
        lambda x, **out: jitquant.quantize_nvfp4(x, rotate="te", select="4over6_mae", **out),
        activation(),
    ),
    "dequantize_mxfp4": Case(
        lambda x, **out: jitquant.dequantize_mxfp4(
            (x.abs() * 40).to(torch.uint8),
            (x.abs()[:, : COLS // 16] * 40).to(torch.uint8).contiguous(),
            torch.float32,
            **out,
        ),
        lambda rows: floats(rows, 2 * COLS),
    ),
    "nvfp4_linear": Case(
        lambda x, **out: jitquant.nvfp4_linear(
            x.bfloat16(), jitquant.quantize_weight_nvfp4(x), **out
        ),
        lambda rows: floats(rows, rows).bfloat16(),
    ),
    "nvfp4_linear-fp8": Case(
        lambda x, **out: jitquant.nvfp4_linear(
            x.bfloat16(), jitquant.quantize_weight_nvfp4(x), compute="fp8", **out
        ),
        lambda rows: floats(rows, rows).bfloat16(),
    ),
    "nvfp4_grouped_linear": Case(
        lambda x, **out: jitquant.nvfp4_grouped_linear(
            x.bfloat16(), GATE_UP, torch.tensor([1, 4]), **out
        ),
        lambda rows: floats(rows, 32).bfloat16(),
    ),
    "nvfp4_experts": Case(
        lambda x, **out: jitquant.nvfp4_experts(
            x.bfloat16(),
            GATE_UP,
            DOWN,
            (x[:, :2] > 0).long(),
            x[:, 2:4].contiguous(),
            **out,
        ),
        lambda rows: floats(rows, COLS).bfloat16(),
    ),
    "quantize_fp8": Case(jitquant.quantize_fp8, tensor()),
    "quantize_fp8-e5m2": Case(
        lambda x, **out: jitquant.quantize_fp8(
            x, dtype=torch.float8_e5m2, scale=2.0, amax=False, **out
        ),
        tensor(dtype=torch.float8_e5m2, amax=False),
    ),
    "swiglu_quantize_fp8": Case(jitquant.swiglu_quantize_fp8, tensor(COLS // 2, format="fp8_row")),
    "rmsnorm_quantize_fp8": Case(
        lambda x, **out: jitquant.rmsnorm_quantize_fp8(x, weight(x), **out),
        tensor(format="fp8_row", inv_rms=True),
    ),
    "quantize_per_token_group": Case(
        lambda x, **out: jitquant.quantize_per_token_group(
            x, 16, scale_format="ue8m0_packed", scale_layout="column_tma", **out
        ),
        tensor(**GROUP, scale_format="ue8m0_packed", layout="column_tma"),
    ),
    "quantize_per_token_group-int8": Case(
        lambda x, **out: jitquant.quantize_per_token_group(x, 16, dtype=torch.int8, **out),
        tensor(format="int8_group", group_size=16),
    ),
    "swiglu_quantize_per_token_group": Case(
        lambda x, **out: jitquant.swiglu_quantize_per_token_group(x, 16, **out),
        tensor(COLS // 2, **GROUP),
    ),
    "rmsnorm_quantize_per_token_group": Case(
        lambda x, **out: jitquant.rmsnorm_quantize_per_token_group(x, weight(x), 16, **out),
        tensor(**GROUP, inv_rms=True),
    ),
    "quantize_block": Case(
        lambda x, **out: jitquant.quantize_block(x, (16, 16), **out), tensor(**BLOCK)
    ),
    "quantize_per_token_group_both": Case(
        lambda x, **out: jitquant.quantize_per_token_group_both(x, 16, **out),
        both(**GROUP, layout="column"),
    ),
    "quantize_block_both": Case(
        lambda x, **out: jitquant.quantize_block_both(x, (16, 16), **out), both(**BLOCK)
    ),
    "quantize_mxfp8": Case(jitquant.quantize_mxfp8, tensor(format="mxfp8")),
    "quantize_mxfp8-swizzled": Case(
        lambda x, **out: jitquant.quantize_mxfp8(x, scale_layout="swizzled_128x4", **out),
        tensor(format="mxfp8", layout="swizzled_128x4"),
    ),
    "quantize_mxfp4": Case(
        jitquant.quantize_mxfp4,
        lambda rows: (
            torch.empty(rows, COLS // 2, dtype=FP4_DTYPE),
            torch.empty(rows, COLS // 32, dtype=E8M0_DTYPE),
        ),
    ),
    "quantize_nvfp4_both": Case(
        jitquant.quantize_nvfp4_both,
        lambda rows: (
            QuantizedActivation.empty((rows, COLS)),
            QuantizedActivation.empty((COLS, rows)),
        ),
    ),
    "quantize_per_token_group-rotated": Case(
        lambda x, **out: jitquant.quantize_per_token_group(x, 16, rotate="32", **out),
        tensor(**GROUP),
    ),
    "quantize_mxfp8_both": Case(jitquant.quantize_mxfp8_both, both(format="mxfp8")),
    "dequantize": Case(
        lambda x, **out: jitquant.dequantize(jitquant.quantize_mxfp8(x), torch.float32, **out),
        lambda rows: floats(rows, COLS),
    ),
    "quantize_ragged": Case(
        lambda x, **out: jitquant.quantize_ragged(x, offsets(), **out), ragged()
    ),
    "quantize_ragged-nvfp4": Case(
        lambda x, **out: jitquant.quantize_ragged(x, offsets(), format="nvfp4", **out),
        ragged(format="nvfp4"),
    ),
    "quantize_ragged_grad": Case(
        lambda x, **out: jitquant.quantize_ragged_grad(x, offsets(), **out),
        ragged(dtype=torch.float8_e5m2, dbias=True),
    ),
    "dequantize_ragged": Case(
        lambda x, **out: jitquant.dequantize_ragged(
            jitquant.quantize_ragged(x, offsets(), format="nvfp4"), torch.float32, **out
        ),
        lambda rows: floats(rows, COLS),
    ),
}

# One of each kind of result; Inductor compiles C++ for each case, which takes a second or more.
QUICK = {
    "quantize_nvfp4",
    "rmsnorm_quantize_nvfp4",
    "dequantize_nvfp4",
    "nvfp4_experts",
    "quantize_fp8",
    "quantize_per_token_group",
    "quantize_block_both",
    "quantize_ragged_grad",
}
PARAMETERS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]

# Inductor's C++ backend has no float8_e8m0fnu, and ends such a graph with a copy to its input.
NOT_FROM_OUTSIDE = [name for name in CASES if name.startswith("quantize_mxfp")]


def same(a: Any, b: Any) -> bool:
    leaves = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return len(leaves) > 0 and all(
        t.dtype == u.dtype
        and t.shape == u.shape
        and torch.equal(byte_view(t.contiguous()), byte_view(u.contiguous()))
        for t, u in leaves
    )


def test_every_function_is_here() -> None:
    public = {
        name
        for name in jitquant.__all__
        if inspect.isfunction(getattr(jitquant, name))
        and {"out", "kwargs"} & set(inspect.signature(getattr(jitquant, name)).parameters)
    }
    assert {name.partition("-")[0] for name in CASES} == public


@pytest.mark.parametrize("name", PARAMETERS)
def test_functional_and_into_buffers_made_inside(name: str) -> None:
    case = CASES[name]

    def f(x: Tensor) -> tuple[Any, Any]:
        return case.call(x), case.call(x, out=case.empty(ROWS))

    got = torch.compile(f, fullgraph=True)(values())
    want = case.call(values())
    assert same(got, (want, want))


@pytest.mark.parametrize("name", [p for p in PARAMETERS if p.values[0] not in NOT_FROM_OUTSIDE])
def test_into_buffers_from_outside(name: str) -> None:
    case = CASES[name]
    out = case.empty(ROWS)
    data = pytree.tree_leaves(out)[0].data_ptr()
    got = torch.compile(case.call, fullgraph=True)(values(), out=out)
    assert same((got, out), (case.call(values()),) * 2)
    assert pytree.tree_leaves(out)[0].data_ptr() == data


@pytest.mark.parametrize("name", NOT_FROM_OUTSIDE)
def test_mxfp8_into_buffers_from_outside(name: str) -> None:
    case = CASES[name]
    out = case.empty(ROWS)
    torch.compile(case.call, fullgraph=True, backend="aot_eager")(values(), out=out)
    assert same(out, case.call(values()))
    with pytest.raises(Exception, match="float8_e8m0fnu"):
        torch.compile(case.call, fullgraph=True)(values(), out=out)


@pytest.mark.parametrize("name", ["quantize_nvfp4", "quantize_fp8", "quantize_mxfp8"])
def test_rows_may_be_dynamic(name: str) -> None:
    case = CASES[name]

    def f(x: Tensor) -> Any:
        return case.call(x, out=case.empty(x.shape[0]))

    compiled = torch.compile(f, fullgraph=True, dynamic=True)
    for rows in (4, 5, 130):
        assert same(compiled(values(rows)), case.call(values(rows)))


def test_a_buffer_of_another_dtype_is_refused() -> None:
    wrong = QuantizedActivation.empty((ROWS, COLS))
    wrong.x_sf = wrong.x_sf_bytes.view(torch.float8_e8m0fnu)
    compiled = torch.compile(jitquant.quantize_nvfp4, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"out\.x_sf: expected torch\.float8_e4m3fn"):
        compiled(values(), out=wrong)
