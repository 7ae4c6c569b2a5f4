"""Containers in checkpoints: torch.load as it is by default, pickle, copy.deepcopy, state_dict."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import byte_view, randn
from torch import nn
from torch.utils import _pytree as pytree

import jitquant
from jitquant import DelayedScaling, QuantizedActivation, QuantizedTensor

OFFSETS = torch.tensor([0, 2, 4])

MADE: dict[str, Callable[[], Any]] = {
    "nvfp4": lambda: jitquant.quantize_nvfp4(randn(4, 40)),
    "nvfp4 norm": lambda: jitquant.rmsnorm_quantize_nvfp4(randn(4, 40), torch.ones(40)),
    "nvfp4 weight": lambda: jitquant.quantize_weight_nvfp4(randn(40, 24), dim=0),
    "fp8": lambda: jitquant.quantize_fp8(randn(4, 40), dtype=torch.float8_e5m2),
    "fp8 group": lambda: jitquant.quantize_per_token_group(
        randn(4, 64), 16, scale_format="ue8m0_packed", scale_layout="column_tma"
    ),
    "int8 block": lambda: jitquant.quantize_block(randn(32, 64), (16, 16), dtype=torch.int8),
    "mxfp8": lambda: jitquant.quantize_mxfp8(randn(4, 64), scale_layout="swizzled_128x4"),
    "ragged": lambda: jitquant.quantize_ragged(randn(4, 32), OFFSETS),
    "ragged nvfp4": lambda: jitquant.quantize_ragged(
        randn(4, 32), OFFSETS, sizes=torch.tensor([48, 64]), format="nvfp4"
    ),
    "ragged grad": lambda: jitquant.quantize_ragged_grad(randn(4, 32), OFFSETS),
}

WAYS: dict[str, Callable[[Any], Any]] = {}


def way(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    WAYS[function.__name__] = function
    return function


@way
def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@way
def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@way
def copied(value: Any) -> Any:
    return copy.deepcopy(value)


def same(a: Any, b: Any) -> bool:
    leaves = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    return pytree.tree_structure(a) == pytree.tree_structure(b) and all(
        t.dtype == u.dtype and t.stride() == u.stride() and torch.equal(byte_view(t), byte_view(u))
        for t, u in leaves
    )


class Holder(nn.Module):
    """A module that keeps a container, in its state_dict too."""

    def __init__(self, q: Any = None) -> None:
        super().__init__()
        self.q = q
        self.register_buffer("other", torch.arange(3))

    def get_extra_state(self) -> Any:
        return self.q

    def set_extra_state(self, state: Any) -> None:
        self.q = state


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_a_container(name: str, how: str) -> None:
    q = MADE[name]()
    other = WAYS[how](q)
    assert type(other) is type(q)
    assert repr(other) == repr(q)
    assert same(other, q)
    assert torch.equal(other.dequantize(), q.dequantize())
    pairs = zip(pytree.tree_leaves(other), pytree.tree_leaves(q), strict=True)
    assert all(t.data_ptr() != u.data_ptr() for t, u in pairs)
    if not name.startswith("ragged"):
        other.validate()


def test_what_numpys_numbers_describe() -> None:
    n: Any = np.int64(32)
    for q in (
        jitquant.quantize_per_token_group(randn(4, 64), n),
        jitquant.deinterleave_quantize_nvfp4(randn(4, 64), n),
    ):
        assert same(saved(q), q)
        assert same(type(q).from_tensors(q.tensors(), q.metadata()), q)


@pytest.mark.parametrize("how", WAYS)
def test_what_is_shared_stays_shared(how: str) -> None:
    q = MADE["mxfp8"]()
    rows = jitquant.quantize_fp8(randn(6, 40), granularity="row")
    both, (whole, part) = WAYS[how]([[q, q], (rows, rows[2:4])])
    assert both[0] is both[1]
    assert same(part, rows[2:4])
    if how != "pickled":  # pickle alone divides what plain tensors share as well
        assert part.data.data_ptr() == whole.data[2:].data_ptr()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_in_a_state_dict(name: str, how: str) -> None:
    made = Holder(MADE[name]())
    back = Holder()
    back.load_state_dict(WAYS[how](made.state_dict()))
    assert same(back.q, made.q)
    if how != "saved":  # a whole module is not a checkpoint
        assert same(WAYS[how](nn.Sequential(made))[0].q, made.q)


def test_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "all.pt"
    torch.save({name: make() for name, make in MADE.items()}, path)
    code = f"import jitquant, torch; print(list(torch.load({str(path)!r})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == f"{list(MADE)}\n", run.stderr


def test_what_is_no_container_is_still_refused() -> None:
    q = MADE["fp8"]()
    assert isinstance(q, QuantizedTensor)
    q.amax = Holder()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        saved(q)
    q.amax, q.recipe = None, Holder()  # type: ignore[assignment]
    with pytest.raises(pickle.UnpicklingError, match="Holder"):
        saved(q)


@pytest.mark.parametrize("how", WAYS)
def test_delayed_scaling(how: str) -> None:
    history = DelayedScaling(2, window=3, margin=1)
    history.update(torch.tensor([2.0, 8.0]))
    fresh = DelayedScaling(2, window=3, margin=1)
    fresh.load_state_dict(WAYS[how](history.state_dict()))
    others = [fresh] if how == "saved" else [fresh, WAYS[how](history)]
    for other in others:
        assert torch.equal(other.scale, history.scale)
        assert torch.equal(other.amax_history, history.amax_history)
        assert other.scale.data_ptr() != history.scale.data_ptr()


@pytest.mark.parametrize("dim", [-1, 0])
def test_nvfp4_in_a_safetensors_file(dim: int, tmp_path: Path) -> None:
    path, q = tmp_path / "q.safetensors", jitquant.quantize_weight_nvfp4(randn(32, 48), dim=dim)
    save_file(q.tensors(), path, metadata=q.metadata())
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        read = QuantizedActivation.from_tensors(tensors, file.metadata())
    read.validate()
    assert (read.shape, read.dim, read.recipe) == (q.shape, q.dim, q.recipe)
    assert torch.equal(read.dequantize(), q.dequantize())
