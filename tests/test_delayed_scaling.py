"""DelayedScaling against the recipe, step by step in numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from samples import randn

import jitquant
from jitquant import DelayedScaling

F32 = np.float32


class Plain:
    """The recipe with lists and NumPy scalars."""

    def __init__(self, window: int, algorithm: str, top: float) -> None:
        self.history = [F32(0)] * window
        self.algorithm, self.top, self.scale = algorithm, F32(top), F32(1)

    def update(self, amax: float) -> None:
        self.history = [F32(amax), *self.history[:-1]]
        known = [a for a in self.history if not np.isnan(a)]
        a = max(known, default=F32(0)) if self.algorithm == "max" else self.history[0]
        if a > 0 and np.isfinite(a):
            with np.errstate(over="ignore"):
                self.scale = min(self.top / a, np.finfo(F32).max)


AMAXES = [3.0, 0.1, 0.0, math.inf, 2.0, math.nan, 0.7, 1e-40, 0.0, 5.0, 1e-45, 1e-45, 1e-45, 1.0]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_follows_the_recipe(algorithm: str, window: int, margin: int, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max * 2.0**-margin
    plain = Plain(window, algorithm, top)
    scaling = DelayedScaling(window=window, algorithm=algorithm, margin=margin, dtype=dtype)
    for amax in AMAXES:
        scaling.update(torch.tensor([amax]))
        plain.update(amax)
        assert scaling.scale.item() == plain.scale
        got = scaling.amax_history.reshape(-1).numpy()
        np.testing.assert_array_equal(got, np.array(plain.history))


def test_a_step_uses_the_scale_of_the_steps_before() -> None:
    scaling = DelayedScaling(window=4)
    x = randn(8, 32)
    for factor in (1.0, 4.0, 0.5):
        before = scaling.scale.clone()
        q = scaling.quantize(x * factor)
        want = jitquant.quantize_fp8(x * factor, scale=before)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
        assert torch.equal(q.scale_inv, 1 / before)
        assert scaling.amax_history[0] == q.amax
    assert torch.equal(scaling.scale, 448 / (x * 4).float().abs().amax().reshape(1))


def test_everything_stays_where_it_is() -> None:
    scaling = DelayedScaling(3, window=5)
    places = [t.data_ptr() for t in scaling.state_dict().values()]
    scaling.update(torch.rand(3))
    assert [t.data_ptr() for t in scaling.state_dict().values()] == places


def test_ragged_tensors() -> None:
    x, at = randn(128), torch.tensor([0, 32, 96, 128])
    scaling = DelayedScaling(3, window=2)
    q = jitquant.quantize_ragged(x, at, scale=scaling.scale)
    assert q.scale_inv.tolist() == [1.0] * 3
    scaling.update(q.amax)
    again = jitquant.quantize_ragged(x, at, scale=scaling.scale)
    dynamic = jitquant.quantize_ragged(x, at)
    assert torch.equal(again.data.view(torch.uint8), dynamic.data.view(torch.uint8))
    with pytest.raises(ValueError, match=r"num_tensors: expected 1, got 3.*quantize_ragged"):
        scaling.quantize(x)


def test_compiles() -> None:
    def step(scaling: DelayedScaling, x: torch.Tensor) -> torch.Tensor:
        return scaling.quantize(x).data.view(torch.uint8)

    eager, traced = DelayedScaling(window=3), DelayedScaling(window=3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x = randn(4, 32, seed=seed) * (seed + 1)
        assert torch.equal(compiled(traced, x), step(eager, x))
    assert torch.equal(traced.scale, eager.scale)
    assert torch.equal(traced.amax_history, eager.amax_history)


def test_state_dict() -> None:
    scaling = DelayedScaling(window=3)
    scaling.update(torch.tensor([2.0]))
    other = DelayedScaling(window=3)
    other.load_state_dict(scaling.state_dict())
    assert torch.equal(other.scale, scaling.scale)
    assert torch.equal(other.amax_history, scaling.amax_history)
    with pytest.raises(
        ValueError, match=r"amax_history: expected shape \(4, 1\), got shape \(3, 1\)"
    ):
        DelayedScaling(window=4).load_state_dict(scaling.state_dict())
    with pytest.raises(ValueError, match=r"state: .* got no amax_history"):
        other.load_state_dict({})
    assert "window=3" in repr(scaling)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"window": 0}, ValueError, "window: expected 1 or more, got 0"),
        ({"num_tensors": 0}, ValueError, "num_tensors: expected 1 or more, got 0"),
        (
            {"algorithm": "mean"},
            ValueError,
            "algorithm: expected one of 'max', 'most_recent', got 'mean'",
        ),
        (
            {"dtype": torch.int8},
            TypeError,
            r"dtype: expected torch\.float8_e4m3fn or torch\.float8_e5m2, got torch\.int8",
        ),
        ({"num_tensors": "2"}, TypeError, "num_tensors: expected an int, got str"),
        ({"window": 1.5}, TypeError, r"window: expected an int, got float.*int\(window\)"),
        ({"margin": None}, TypeError, "margin: expected an int, got NoneType"),
        ({"margin": 0.5}, TypeError, r"margin: expected an int, got float.*int\(margin\)"),
        ({"margin": 100}, ValueError, "margin: expected an integer from -64 to 64, got 100"),
    ],
)
def test_refuses(keywords: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DelayedScaling(**keywords)  # type: ignore[arg-type]


def test_refuses_another_number_of_amaxes() -> None:
    with pytest.raises(
        ValueError, match=r"amax: expected 1 elements, one for each tensor, got shape \(2,\)"
    ):
        DelayedScaling().update(torch.ones(2))


@pytest.mark.parametrize(
    ("amax", "error", "text"),
    [
        (
            1.0,
            TypeError,
            r"amax: expected a torch\.Tensor or anything with __dlpack__, such as a CuPy",
        ),
        *(
            (torch.ones(1).to(dtype), TypeError, f"amax: expected float32, got {dtype}")
            for dtype in (torch.int64, torch.float64, torch.bool, torch.complex64)
        ),
        (
            torch.ones(1, device="meta"),
            ValueError,
            "amax: expected a tensor on cpu, as scale is, got one on meta",
        ),
    ],
)
def test_refuses_what_is_no_amax(amax: object, error: type[Exception], text: str) -> None:
    scaling = DelayedScaling()
    with pytest.raises(error, match=text):
        scaling.update(amax)  # type: ignore[arg-type]
    assert not scaling.amax_history.any()
