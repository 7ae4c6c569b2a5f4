"""The plug-in with sglang's own hooks and layers on a CPU; they come from its wheel.

What stands in for a Hopper GPU is `is_hopper`. The server itself is not run here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
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
from jitquant.nn import quantize_checkpoint

pytest.importorskip("sglang", reason="sglang is not installed; no GPU and no sgl-kernel is needed")
try:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from jitquant.integrations import sglang as plugin
except ImportError as error:
    pytest.skip(f"sglang does not import here: {error}", allow_module_level=True)

N, K = 64, 128
FUNCTIONS = ("prepare_nvfp4_layer_for_marlin", "apply_fp4_marlin_linear")
PREPARE_EXPERTS, BY_EXPERTS = "prepare_moe_nvfp4_layer_for_marlin", "fused_marlin_moe"
MODULES: dict[str, tuple[str, ...]] = dict.fromkeys(plugin.USERS, FUNCTIONS)
MODULES |= {name: (*MODULES.get(name, ()), PREPARE_EXPERTS) for name in plugin.EXPERTS_USERS}
MODULES[plugin.EXPERTS] = (BY_EXPERTS,)
Called = list[Any]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The calls of sglang's functions, in stand-ins for the modules that have them."""
    calls: Called = []
    for name, functions in MODULES.items():
        module = ModuleType(name)
        for function in functions:
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


E, H, INNER = 3, 128, 64


def layer_of_experts(**config: Any) -> Any:
    """As sglang's methods leave it to `PREPARE_EXPERTS`; the gsas of experts differ."""
    made: Any = nn.Module()
    made.dense = []
    for name, shape in (("w13", (2 * INNER, H)), ("w2", (H, INNER))):
        each = [jitquant.quantize_weight_nvfp4(randn(*shape, seed=e) * 2**e) for e in range(E)]
        made.dense.append(torch.stack([q.dequantize(torch.float32) for q in each]).double())
        for part, data in (
            ("weight", torch.stack([q.x_fp4_bytes for q in each])),
            ("weight_scale", torch.stack([q.x_sf.view(torch.uint8) for q in each])),
            ("weight_scale_2", torch.cat([q.gsa for q in each])),
        ):
            data = data.view(torch.float8_e4m3fn) if part == "weight_scale" else data
            made.register_parameter(f"{name}_{part}", nn.Parameter(data, requires_grad=False))
    plain = {"is_gated": True, "activation": "silu", "top_k": 2}
    made.moe_runner_config = SimpleNamespace(**(plain | config))
    return made


def by_experts(made: Any, x: Tensor, weights: Tensor, ids: Tensor, **more: Any) -> Tensor:
    """As sglang's runner for Marlin calls it."""
    y: Tensor = importlib.import_module(plugin.EXPERTS).fused_marlin_moe(
        hidden_states=x,
        w1=made.w13_weight,
        w2=made.w2_weight,
        w1_scale=made.w13_weight_scale,
        w2_scale=made.w2_weight_scale,
        gating_output=torch.zeros(x.shape[0], E),
        topk_weights=weights,
        topk_ids=ids,
        w1_global_scale=made.w13_weight_scale_2,
        w2_global_scale=made.w2_weight_scale_2,
        num_bits=4,
        activation="silu",
        is_gated=True,
        **({"global_num_experts": -1, "expert_map": None, "no_combine": False} | more),
    )
    return y


def expected(made: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Of each row and expert, in float64: (T, k, H). Negative ids give zeros."""
    up, down = made.dense
    y = torch.zeros(*ids.shape, H, dtype=torch.float64)
    for row, experts in enumerate(ids.tolist()):
        for j, e in enumerate(experts):
            if e >= 0:
                gate, value = (x[row].double() @ up[e].t()).chunk(2)
                y[row, j] = weights[row, j] * ((gate * gate.sigmoid() * value) @ down[e].t())
    return y


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server's arguments."""
    args = SimpleNamespace(enable_lora=None, lora_paths=None)
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: args
    monkeypatch.setitem(sys.modules, context.__name__, context)
    monkeypatch.setattr(plugin.of_experts, "is_hopper", lambda _: True)
    return args


@pytest.mark.parametrize("user", plugin.EXPERTS_USERS)
@pytest.mark.usefixtures("on_hopper")
def test_experts_on_hopper(user: str, called: Called) -> None:
    made = layer_of_experts()
    codes = made.w13_weight.data_ptr()
    importlib.import_module(user).prepare_moe_nvfp4_layer_for_marlin(made, group_size=16)
    assert made.w13_weight.data_ptr() == codes  # nothing is repacked
    for rows in (1, 7, 40):
        x, weights = randn(rows, H), randn(rows, 2, dtype=torch.float32).abs()
        ids = torch.stack([torch.randperm(E)[:2] for _ in range(rows)]).to(torch.int32)
        want = expected(made, x, weights, ids)
        y = by_experts(made, x, weights, ids)
        assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
        assert sqnr(y, want.sum(1)) > 40
        assert sqnr(by_experts(made, x, weights, ids, routed_scaling_factor=2.5), y * 2.5) > 40
        each = by_experts(made, x, weights, ids, no_combine=True, routed_scaling_factor=2.5)
        assert each.shape == (rows, 2, H)
        assert sqnr(each, want) > 40
        # Of five experts this process has the last three; one row is padding.
        others = torch.where(ids == 0, 0, ids + 2)
        others[-1] = -1
        map_ = torch.tensor([-1, -1, 0, 1, 2], dtype=torch.int32)
        local = torch.where(others < 0, -1, map_[others.clamp(min=0)])
        y = by_experts(made, x, weights, others, expert_map=map_, global_num_experts=5)
        want = expected(made, x, weights, local).sum(1)
        assert not y[-1].any()
        assert rows == 1 or sqnr(y, want) > 40
    assert called == []


@pytest.mark.parametrize(
    "config",
    [
        {"is_gated": False},
        {"activation": "situ"},
        {"swiglu_limit": 7.0},
        {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0},
        {"top_k": 65},
        "bias",
        "lora",
        "elsewhere",
    ],
)
def test_other_experts_keep_marlin(
    config: Any, called: Called, on_hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layer_of_experts(**(config if isinstance(config, dict) else {}))
    if config == "bias":
        made.w13_bias = nn.Parameter(torch.zeros(E, 2 * INNER))
    if config == "lora":
        on_hopper.lora_paths = ["adapter"]
    if config == "elsewhere":
        monkeypatch.setattr(plugin.of_experts, "is_hopper", lambda _: False)
    importlib.import_module(plugin.EXPERTS_USERS[0]).prepare_moe_nvfp4_layer_for_marlin(made)
    made.w13_weight = nn.Parameter(torch.zeros(E, 8, 256, dtype=torch.int32), requires_grad=False)
    by_experts(made, randn(2, H), randn(2, 2), torch.zeros(2, 2, dtype=torch.int32))
    assert [name for name, *_ in called] == [PREPARE_EXPERTS, BY_EXPERTS]
    assert called[0][1][0] is made
    assert called[1][2]["w1"] is made.w13_weight
    assert called[1][2]["num_bits"] == 4


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
    by_experts = {
        each.name: [a.arg for a in each.args.args]
        for each in tree(plugin.EXPERTS)
        if isinstance(each, ast.FunctionDef)
    }
    for name, hook in (
        ("apply_fp4_marlin_linear", plugin.apply),
        ("fused_marlin_moe", plugin.of_experts.experts),
    ):
        ours = list(inspect.signature(hook).parameters)[1:-1]
        assert (found | by_experts)[name][: len(ours)] == ours
    assert found["prepare_nvfp4_layer_for_marlin"] == ["layer"]
    assert found[PREPARE_EXPERTS] == ["layer", "group_size"]
    more = {"w1_global_scale", "w2_global_scale", "routed_scaling_factor", "no_combine"}
    assert more <= set(by_experts[BY_EXPERTS])
    config = next(
        each
        for each in tree("sglang.srt.layers.moe.moe_runner.base")
        if isinstance(each, ast.ClassDef) and each.name == "MoeRunnerConfig"
    )
    fields = {e.target.id for e in config.body if isinstance(e, ast.AnnAssign)}  # type: ignore[union-attr]
    asked = {"is_gated", "activation", "top_k", *plugin.of_experts.LIMITS}
    assert asked <= fields


SCHEMES = {
    "nvfp4": "CompressedTensorsW4A16Fp4",  # what sglang does with W4A4 on Hopper, by Marlin
    "nvfp4a16": "CompressedTensorsW4A16Fp4",
    "fp8_block": "CompressedTensorsW8A8Fp8",
    "fp8_row": "CompressedTensorsW8A8Fp8",
    "int8": "CompressedTensorsW8A8Int8",
    "mxfp4": None,  # sglang 0.5.23 has MXFP4 of this layout for experts only
}


@pytest.mark.parametrize("format", [*SCHEMES, "modelopt"])
def test_configs_that_are_written_are_read(
    format: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By sglang's own classes, as on Hopper."""
    from nn.test_checkpoint import folder, tensors

    try:
        from sglang.srt.layers.quantization import compressed_tensors, modelopt_quant
    except ImportError as error:
        pytest.skip(f"sglang's layers do not import here: {error}")
    how: dict[str, Any] = {"format": format}
    if format in ("nvfp4", "modelopt"):
        how = {"format": "nvfp4", "input_amax": 20.0}
    if format == "modelopt":
        how["layout"] = "modelopt"
    source = folder(tmp_path / "in", tensors(times=4), 1)
    quantize_checkpoint(source, tmp_path / "out", **how)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    left = ["lm_head", "model.embed_tokens"]
    if format == "modelopt":
        read = modelopt_quant.ModelOptFp4Config.from_config(written)
        assert read.is_checkpoint_nvfp4_serialized
        assert (read.group_size, read.exclude_modules) == (16, left)
        return
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    config = compressed_tensors.compressed_tensors.CompressedTensorsConfig.from_config(written)
    assert config.ignore == left
    (parts,) = config.target_scheme_map.values()
    arguments = parts["weights"], parts["input_activations"]
    if SCHEMES[format] is None:
        with pytest.raises(NotImplementedError, match="No compressed-tensors compatible scheme"):
            config._get_scheme_from_parts(*arguments)
        return
    assert type(config._get_scheme_from_parts(*arguments)).__name__ == SCHEMES[format]
