"""jitquant.testing without a GPU: what needs one says so; `checked` looks at CPU tensors too."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import randn
from torch import Tensor

import jitquant
from jitquant.formats import FP8_SCALE_MIN
from jitquant.ops import ALL_OPS
from jitquant.ops._checks_values import RULES
from jitquant.testing import bytes_of, checked


def test_it_comes_with_the_package() -> None:
    code = "import jitquant; print(jitquant.testing.count_launches, 'testing' in dir(jitquant))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "count_launches" in done.stdout
    assert done.stdout.endswith("True\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["assert_capturable", "assert_no_sync", "count_launches"])
def test_it_says_that_it_needs_a_gpu(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        getattr(jitquant.testing, name)(lambda: None)


def test_bytes_of_any_dtype() -> None:
    x = torch.tensor([[1.0, float("nan")]])
    assert jitquant.testing.bytes_of(x).tolist() == x.view(torch.uint8).flatten().tolist()
    q = jitquant.quantize_nvfp4(torch.randn(2, 16))
    assert torch.equal(jitquant.testing.bytes_of(q.x_fp4), q.x_fp4_bytes.flatten())


def experts(n: int, k: int) -> jitquant.NVFP4Tensor:
    """Two experts with weights of ones."""
    one = jitquant.quantize_weight_nvfp4(torch.ones(n, k))
    return jitquant.nn.stack_experts([one, one])


def _calls() -> dict[str, tuple[Callable[[], Any], list[str]]]:
    """Calls that only `checked` refuses, and what it says."""
    J = jitquant
    x, flat, batches = randn(4, 32), randn(64), randn(2, 4, 32)
    weight = torch.ones(32)
    q, q8 = J.quantize_nvfp4(x), J.quantize_fp8(x)
    at, ends = torch.tensor([0, 32, 64]), [32, 64]
    ragged = J.quantize_ragged(flat, at)

    def offsets(*values: int, sizes: list[int] | None = None, **how: Any) -> Callable[[], Any]:
        given = None if sizes is None else torch.tensor(sizes)
        return lambda: J.quantize_ragged(flat, torch.tensor(values), sizes=given, **how)

    def gsa(*values: float) -> Tensor:
        return torch.tensor(values)

    def grad(*values: int) -> Callable[[], Any]:
        return lambda: J.quantize_ragged_grad(x, torch.tensor(values))

    of_groups = ["quantize_ragged_fp8: offsets: expected"]
    return {
        "offsets descend": (offsets(0, 40, 32, 64), [*of_groups, "[0, 40, 32, 64]", "ascending"]),
        "offsets end early": (offsets(0, 32, 60), [*of_groups, "from 0 to 64", "pass sizes"]),
        "offsets begin late": (offsets(8, 32, 64), [*of_groups, "from 0 to 64"]),
        "offsets are negative": (offsets(-1, 32, 64), [*of_groups, "0 to 64"]),
        "offsets pass the end": (offsets(0, 32, 65), [*of_groups, "0 to 64"]),
        "offsets pass it with sizes": (
            offsets(0, 32, 65, sizes=ends),
            ["offsets: expected", "0 to 64"],
        ),
        "offsets between blocks": (
            offsets(0, 24, 64, format="nvfp4"),
            ["quantize_ragged_nvfp4: offsets: expected", "got [0, 24, 64]", "multiples of 16"],
        ),
        "offsets of elements": (
            grad(0, 64, 128),
            ["offsets: expected", "got [0, 64, 128]", "0 to 4, the rows of the buffer"],
        ),
        "offsets of codes": (
            lambda: J.dequantize_ragged(
                J.QuantizedRaggedTensor(**{**vars(ragged), "offsets": torch.tensor([0, 64, 32])})
            ),
            ["dequantize_ragged_fp8: offsets: expected", "got [0, 64, 32]"],
        ),
        "sizes are negative": (
            offsets(0, 32, 64, sizes=[-1, 32]),
            ["sizes: expected", "got [0] = -1"],
        ),
        "sizes reach the next": (
            offsets(0, 32, 64, sizes=[33, 32]),
            ["sizes: expected", "got [0] = 33"],
        ),
        "counts are negative": (
            lambda: J.quantize_per_token_group(batches, 32, counts=torch.tensor([-1, 4])),
            ["quantize_per_token_group: counts: expected", "got [0] = -1", "0 to 4"],
        ),
        "counts are too large": (
            lambda: J.quantize_per_token_group(batches, 32, counts=torch.tensor([4, 5])),
            ["counts: expected", "got [1] = 5", "the rows of a batch"],
        ),
        "gsa is zero": (
            lambda: J.quantize_nvfp4(x, gsa(0.0)),
            ["gsa: expected", "got [0] = 0.0", "positive"],
        ),
        "gsa is negative": (
            lambda: J.rmsnorm_quantize_nvfp4(x, weight, gsa=gsa(1.0, 1.0, -1.0, 1.0)),
            ["rmsnorm_quantize_nvfp4_from_gsa: gsa: expected", "got [2] = -1.0"],
        ),
        "gsa is nan": (lambda: J.quantize_weight_nvfp4(x, gsa=gsa(math.nan)), ["[0] = nan"]),
        "gsa is infinite": (lambda: J.quantize_nvfp4(x, gsa(math.inf)), ["[0] = inf"]),
        "gsa of codes": (
            lambda: J.dequantize_nvfp4(q.x_fp4, q.x_sf, gsa(-1.0)),
            ["dequantize_nvfp4: gsa: expected", "got [0] = -1.0", "not negative"],
        ),
        "signs of another size": (
            lambda: J.quantize_nvfp4(x, rotate="16", signs=torch.arange(16, dtype=torch.int8)),
            ["rotated_amax: signs: expected", "got [0] = 0", "+1 and -1"],
        ),
        "an offset is negative": (
            lambda: J.quantize_nvfp4(x, rounding="stochastic", rng_state=torch.tensor([1, -1])),
            ["rng_state: expected", "got [0] = -1", "an offset that is not negative"],
        ),
        "scale bytes": (
            lambda: J.dequantize_nvfp4(q.x_fp4, torch.full_like(q.x_sf_bytes, 0x81), q.gsa),
            ["x_sf: expected", "got [0] = 129", "0 to 127"],
        ),
        "scale is negative": (
            lambda: J.quantize_fp8(x, scale=gsa(-1.0)),
            ["quantize_fp8: scale: expected", "got [0] = -1.0", "reciprocals"],
        ),
        "scale is too small": (
            lambda: J.quantize_fp8(x, scale=gsa(FP8_SCALE_MIN / 2)),
            ["scale: expected", "got [0]"],
        ),
        "scale of a group": (
            lambda: J.quantize_ragged(flat, at, scale=gsa(1.0, math.inf)),
            ["scale: expected", "got [1] = inf"],
        ),
        "scale of codes": (
            lambda: J.dequantize(J.QuantizedTensor(**{**vars(q8), "stored_scales": gsa(-1.0)})),
            ["dequantize: scale_inv: expected", "got [0] = -1.0"],
        ),
        "amax": (
            lambda: torch.ops.jitquant.quantize_nvfp4_from_amax(x, gsa(-1.0)),
            ["quantize_nvfp4_from_amax: amax: expected", "got [0] = -1.0"],
        ),
        "amax is nan": (
            lambda: torch.ops.jitquant.quantize_nvfp4_from_amax(x, gsa(math.nan)),
            ["quantize_nvfp4_from_amax: amax: expected", "got [0] = nan"],
        ),
        "gsa of a recipe": (
            lambda: J.quantize_nvfp4(x, gsa(0.0), select="4over6_mse"),
            ["quantize_nvfp4_recipe: gsa: expected", "got [0] = 0.0", "positive"],
        ),
        "ends of experts": (
            lambda: J.nvfp4_grouped_linear(
                x.bfloat16(), experts(16, 32), torch.tensor([3, 5], dtype=torch.int32)
            ),
            ["nvfp4_grouped_linear: offsets: expected", "got [1] = 5", "0 to 4"],
        ),
        "ids of experts": (
            lambda: J.nvfp4_experts(
                x.bfloat16(),
                experts(32, 32),
                experts(32, 16),
                torch.full((4, 1), 3),
                x[:, :1].contiguous(),
            ),
            ["nvfp4_experts: topk_ids: expected", "got [0] = 3", "0 to 1"],
        ),
        "inv_rms": (
            lambda: torch.ops.jitquant.rmsnorm_quantize_nvfp4_from_amax(
                x, weight, torch.full((4,), -1.0), gsa(1.0)
            ),
            ["inv_rms: expected", "got [0] = -1.0, [1] = -1.0"],
        ),
    }


@pytest.mark.parametrize("name", _calls())
def test_checked_looks_at_values(name: str) -> None:
    call, words = _calls()[name]
    call()  # accepted without a look
    with checked(), pytest.raises(ValueError) as raised:
        call()
    for word in words:
        assert word in str(raised.value)
    call()


def test_checked_leaves_what_ops_refuse_to_them() -> None:
    x, at = randn(4, 32), torch.tensor([0, 2, 4])
    calls: dict[str, Callable[[], Any]] = {
        "x: expected a tensor of one dimension or more": lambda: jitquant.quantize_ragged(
            torch.tensor(1.0), at
        ),
        "offsets: expected shape": lambda: jitquant.quantize_ragged(x, at[None]),
        "offsets: expected shape (G + 1,)": lambda: jitquant.quantize_ragged(x, at[:0]),
        "sizes: expected shape (2,)": lambda: jitquant.quantize_ragged(x, at, sizes=at),
        "counts: expected None": lambda: jitquant.quantize_per_token_group(
            x[0], 32, counts=torch.tensor([1])
        ),
    }
    for said, call in calls.items():
        with checked(), pytest.raises(ValueError) as raised:
            call()
        assert said in str(raised.value)


def test_checked_has_a_rule_for_what_has_values() -> None:
    """Each argument that is not elements, codes or a weight."""
    elements = {"x", "X", "A", "w", "fused", "weight", "bias", "residual", "grad", "act_input"}
    elements |= {"topk_weights", "random_bytes", "random_bytes_t", "cos", "sin"}
    codes = {"x_fp4", "w_fp4", "gate_up_fp4", "down_fp4", "data"}
    codes.add("block_scales")  # of MXFP8: every byte is an E8M0 scale
    names = {
        a.name
        for op in ALL_OPS
        for a in op.default._schema.arguments
        if "Tensor" in str(a.real_type)
    }
    assert names - elements - codes == set(RULES)


def test_checked_changes_no_result() -> None:
    x, at, row = randn(4, 32), torch.tensor([0, 2, 4]), {"granularity": "row"}
    q, q8 = jitquant.quantize_nvfp4(x), jitquant.quantize_fp8(x, **row)
    w, w8 = experts(16, 32), jitquant.quantize_fp8(randn(2, 16, 32), **row)
    calls: list[Callable[[], Any]] = [
        lambda: jitquant.quantize_nvfp4(x, torch.tensor([0.01])).x_fp4,
        lambda: jitquant.quantize_ragged(x, at).data,
        lambda: jitquant.quantize_ragged(x, at, sizes=torch.tensor([1, 0])).data,
        lambda: jitquant.quantize_per_token_group(x, 32, counts=torch.tensor([0])).data,
        lambda: jitquant.quantize_nvfp4(torch.zeros(4, 32)).dequantize(),
        lambda: jitquant.dequantize_mxfp4(*jitquant.quantize_mxfp4(1000 * x)),
        lambda: jitquant.quantize_nvfp4(torch.full((4, 32), math.inf)).dequantize(),
        lambda: jitquant.quantize_fp8(x, out=jitquant.QuantizedTensor.empty((4, 32))).data,
        lambda: jitquant.nn.grouped_linear(q, w, torch.tensor([1, 3])),
        lambda: jitquant.nn.grouped_linear(q8, w8, torch.tensor([1, 3])),
    ]
    for call in calls:
        expected = bytes_of(call())
        with checked():
            got = call()
        assert torch.equal(bytes_of(got), expected)


def test_checked_leaves_fake_tensors_alone() -> None:
    x, at = randn(4, 32), torch.tensor([0, 6, 4])
    with checked():
        q = jitquant.quantize_ragged(x.to("meta"), at.to("meta"))
    assert q.data.is_meta
