"""The plug-in with sglang's own hooks and layers on a CPU; they come from its wheel.

What stands in for a Hopper GPU is `is_hopper`. The server itself is not run here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from nn.helpers import sqnr
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.loader import NvccNotFoundError

pytest.importorskip("sglang", reason="sglang is not installed; its wheel is enough, with --no-deps")
try:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from jitquant.integrations import sglang as plugin
except ImportError as error:
    pytest.skip(f"sglang does not import here: {error}", allow_module_level=True)

N, K = 64, 128
FUNCTIONS = ("prepare_nvfp4_layer_for_marlin", "apply_fp4_marlin_linear")
Called = list[Any]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The calls of sglang's functions, in stand-ins for the modules that import them."""
    calls: Called = []
    for name in plugin.USERS:
        module = ModuleType(name)
        for function in FUNCTIONS:
            setattr(module, function, lambda *args, f=function, **how: calls.append((f, args, how)))
        parent, _, last = name.rpartition(".")
        for i in range(1, name.count(".")):
            owner = name.rsplit(".", i)[0]
            monkeypatch.setitem(sys.modules, owner, sys.modules.get(owner) or ModuleType(owner))
        monkeypatch.setattr(sys.modules[parent], last, module, raising=False)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(plugin, "find_nvcc", lambda _: None)
    plugin.register()
    HookRegistry.apply_hooks()
    return calls


def layer(weight: Tensor) -> Any:
    """As sglang's methods leave it to `prepare_nvfp4_layer_for_marlin`."""
    q = jitquant.quantize_weight_nvfp4(weight)
    made: Any = nn.Module()
    for name, part in (("weight", q.x_fp4_bytes), ("weight_scale", q.x_sf)):
        made.register_parameter(name, nn.Parameter(part, requires_grad=False))
    made.weight_global_scale = nn.Parameter(q.gsa.reshape(()), requires_grad=False)
    return made


def product(module: Any, made: Any, x: Tensor, bias: Tensor | None = None) -> Any:
    """As sglang's methods call it."""
    return module.apply_fp4_marlin_linear(
        input=x,
        weight=made.weight,
        weight_scale=made.weight_scale,
        weight_global_scale=made.weight_global_scale,
        workspace=made.workspace,
        size_n=N,
        size_k=K,
        bias=bias,
    )


@pytest.mark.parametrize("user", plugin.USERS)
def test_on_hopper(user: str, called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(user)
    monkeypatch.setattr(plugin, "is_hopper", lambda _: True)
    weight = randn(N, K)
    made = layer(weight)
    codes = made.weight.data_ptr()
    module.prepare_nvfp4_layer_for_marlin(made)
    assert made.weight.data_ptr() == codes  # nothing is repacked
    dense = jitquant.quantize_weight_nvfp4(weight).dequantize(torch.float32).double()
    bias = randn(N)
    for shape in ((5, K), (2, 3, K), (100, K), (0, K)):
        x = randn(*shape)
        y = product(module, made, x, bias)
        want = x.double() @ dense.t() + bias
        assert (y.shape, y.dtype) == (want.shape, torch.bfloat16)
        if x.numel():
            assert sqnr(y, want) > 45
    monkeypatch.setattr(plugin, "COMPUTE", "fp8")
    x = randn(256, K)
    fast = jitquant.nvfp4_linear(x, jitquant.quantize_weight_nvfp4(weight), compute="fp8")
    assert torch.equal(product(module, made, x), fast)
    assert called == []


@pytest.mark.parametrize("user", plugin.USERS)
def test_elsewhere_marlin_stays(user: str, called: Called) -> None:
    module = importlib.import_module(user)
    made = layer(randn(N, K))
    module.prepare_nvfp4_layer_for_marlin(made)
    made.weight = nn.Parameter(torch.zeros(K // 16, 2 * N, dtype=torch.int32), requires_grad=False)
    made.workspace = torch.zeros(1)
    product(module, made, randn(5, K))
    assert [name for name, *_ in called] == list(FUNCTIONS)
    assert called[0][1] == (made,)
    assert called[1][1][1] is made.weight


def test_is_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert not plugin.is_hopper(torch.device("cpu"))
    for capability, is_it in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert plugin.is_hopper(cuda) == is_it


def test_without_a_compiler_sglangs_own_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(_: Any) -> None:
        raise NvccNotFoundError("no CUDA compiler (nvcc) was found")

    monkeypatch.setattr(plugin, "find_nvcc", missing)
    monkeypatch.setattr(plugin, "HookRegistry", SimpleNamespace())  # nothing may be registered
    plugin.register()
    assert "keep sglang's kernels, because no CUDA compiler" in caplog.text


def test_sglangs_own_modules_have_what_is_hooked() -> None:
    """Names and parameters, in the source: its layers do not import without a GPU's libraries."""
    import sglang

    def tree(module: str) -> list[ast.stmt]:
        path = Path(sglang.__path__[0]).parent / f"{module.replace('.', '/')}.py"
        return ast.parse(path.read_text(encoding="utf-8")).body

    marlin = f"{plugin.USERS[0].rpartition('.')[0]}.marlin_utils_fp4"
    for user in plugin.USERS:
        taken = {
            name.name
            for each in tree(user)
            if isinstance(each, ast.ImportFrom) and each.module == marlin
            for name in each.names
        }
        assert set(FUNCTIONS) <= taken
    found = {
        each.name: [a.arg for a in each.args.args]
        for each in tree(marlin)
        if isinstance(each, ast.FunctionDef)
    }
    ours = list(inspect.signature(plugin.apply).parameters)[1:-1]
    assert found["apply_fp4_marlin_linear"][: len(ours)] == ours
    assert found["prepare_nvfp4_layer_for_marlin"] == ["layer"]
