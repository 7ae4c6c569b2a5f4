"""The plug-in with vLLM's own classes on a CPU; they come from the wheel, without its kernels.

What stands in for a Hopper GPU is `JitquantNvFp4LinearKernel.is_supported`, and for vLLM's process
groups one rank. The server itself is not run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nn.helpers import sqnr
from safetensors.torch import load_file, save_file
from samples import randn
from torch import Tensor, nn

import jitquant
from jitquant.loader import NvccNotFoundError
from jitquant.nn import quantize_checkpoint

pytest.importorskip("vllm", reason="vLLM is not installed; its wheel is enough, with --no-deps")
try:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes
    from vllm.platforms import PlatformEnum

    from jitquant.integrations import _vllm_experts as of_experts
    from jitquant.integrations import vllm as plugin
except ImportError as error:
    pytest.skip(f"vLLM does not import here: {error}", allow_module_level=True)

Kernel = plugin.JitquantNvFp4LinearKernel
BF16 = torch.bfloat16
FUNCTIONS = (
    "select_nvfp4_moe_backend",
    "convert_to_nvfp4_moe_kernel_format",
    "make_nvfp4_moe_quant_config",
)
K, SIZES = 128, {"q_proj": 64, "k_proj": 32, "v_proj": 32}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it is on a Hopper GPU, with the plug-in; undone afterwards."""
    monkeypatch.setattr(Kernel, "is_supported", classmethod(lambda *_: (True, None)))
    ours = of_experts.JitquantNvFp4Experts
    monkeypatch.setattr(ours, "_supports_current_device", staticmethod(lambda: True))
    cuda = list(linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA])
    monkeypatch.setitem(linear._POSSIBLE_NVFP4_KERNELS, PlatformEnum.CUDA, cuda)
    for module in (linear, modelopt):
        kept = module.MarlinNvFp4LinearKernel
        monkeypatch.setattr(module, "MarlinNvFp4LinearKernel", kept)
    for module in (of_experts.compressed_tensors, of_experts.modelopt):
        for name in FUNCTIONS:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(linear, "current_platform", SimpleNamespace(_enum=PlatformEnum.CUDA))
    import vllm.model_executor.parameter as parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(plugin, "find_nvcc", lambda _: None)
    plugin.register()
    plugin.register()  # vLLM may


def folder(path: Path) -> tuple[Path, Tensor]:
    weights = {name: randn(size, K, seed=size) * size for name, size in SIZES.items()}
    path.mkdir()
    at = "model.layers.0.self_attn"
    save_file({f"{at}.{n}.weight": w for n, w in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path, torch.cat(list(weights.values()))


def fused(method: Any, path: Path) -> Any:
    """q, k and v of a folder in one layer, as vLLM's loader puts them there."""
    layer: Any = nn.Module()
    method.create_weights(
        layer,
        input_size_per_partition=K,
        output_partition_sizes=list(SIZES.values()),
        input_size=K,
        output_size=sum(SIZES.values()),
        params_dtype=BF16,
        weight_loader=lambda *_: None,
    )
    begin = 0
    tensors = load_file(path / "model.safetensors")
    for i, (name, size) in enumerate(SIZES.items()):
        for part, parameter in layer.named_parameters():
            given = tensors.get(f"model.layers.0.self_attn.{name}.{part}")
            if parameter.numel() == len(SIZES):
                if given is not None:
                    parameter.data[i] = given.reshape(())
            else:
                assert given is not None, part
                parameter.data[begin : begin + size] = given
        begin += size
    method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("scheme", ["nvfp4a16", "nvfp4", "modelopt", "W4A16_NVFP4"])
@pytest.mark.usefixtures("hopper")
def test_a_fused_layer(scheme: str, tmp_path: Path) -> None:
    """Files of `quantize_checkpoint` through vLLM's methods have the values of one quantization."""
    source, weight = folder(tmp_path / "in")
    of_modelopt = scheme in ("modelopt", "W4A16_NVFP4")
    quantize_checkpoint(
        source,
        tmp_path / "out",
        format="nvfp4a16" if scheme == "nvfp4a16" else "nvfp4",
        layout="modelopt" if of_modelopt else "compressed-tensors",
        input_amax=None if scheme == "nvfp4a16" else 8.0,
        device="cpu",
    )
    method: Any
    if of_modelopt:
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        own = {**config["quantization_config"]}
        if scheme == "W4A16_NVFP4":
            own["quant_algo"] = scheme
        parsed = modelopt.ModelOptNvFp4Config.from_config(own)
        aside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert modelopt.ModelOptNvFp4Config.from_config(aside).group_size == parsed.group_size
        method = parsed.LinearMethodCls(parsed)
    else:
        method = schemes.CompressedTensorsW4A4Fp4(use_a16=scheme == "nvfp4a16")
    assert type(method.kernel) is Kernel
    layer = fused(method, tmp_path / "out")
    q = jitquant.quantize_weight_nvfp4(weight, gsa=jitquant.amax_gsa(weight))
    assert torch.equal(layer.weight, q.x_fp4_bytes)
    assert torch.equal(layer.weight_scale.float(), q.x_sf.float())
    torch.testing.assert_close(layer.weight_global_scale.data, q.gsa, rtol=3e-7, atol=0)
    bias = randn(128)
    for shape in ((5, K), (2, 3, K), (100, K), (0, K)):
        x = randn(*shape)
        apply = method.apply if of_modelopt else method.apply_weights
        y = apply(layer, x, bias=bias)
        want = x.double() @ q.dequantize(torch.float32).double().t() + bias
        assert (y.shape, y.dtype) == (want.shape, BF16)
        if x.numel():
            assert sqnr(y, want) > 45


class Recorder:
    """In place of a class of schemes: its name, and the arguments that are true."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **how: Any) -> str:
        return " ".join([self.name, *(key for key, value in how.items() if value is True)])

    def get_min_capability(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        ("nvfp4", "W4A4Fp4"),
        ("nvfp4a16", "W4A4Fp4 use_a16"),
        ("fp8_block", "W8A8Fp8"),
        ("fp8_row", "W8A8Fp8"),
        ("int8", "W8A8Int8 input_symmetric"),
        ("mxfp4", "W4A4Mxfp4"),
    ],
)
def test_vllm_knows_the_scheme(
    format: Any, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM makes of the ``quantization_config`` of a folder, by the name of its class."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    for name in vars(compressed_tensors).copy():
        if name.startswith("CompressedTensorsW"):
            recorded = Recorder(name.removeprefix("CompressedTensors"))
            monkeypatch.setattr(compressed_tensors, name, recorded)
    source, _ = folder(tmp_path / "in")
    amax = 8.0 if format == "nvfp4" else None
    quantize_checkpoint(source, tmp_path / "out", format=format, input_amax=amax, device="cpu")
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = compressed_tensors.CompressedTensorsConfig.from_config(described)
    linears = config.target_scheme_map["Linear"]
    parts = linears["weights"], linears["input_activations"]
    assert config._get_scheme_from_parts(*parts, format=linears["format"]) == scheme


@pytest.mark.usefixtures("hopper")
def test_what_vllm_takes() -> None:
    first, *others = linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    assert first is Kernel
    assert Kernel not in others
    marlin = linear._LINEAR_BACKEND_KERNEL_MAP["marlin"]
    assert any(kernel.__name__ == "MarlinNvFp4LinearKernel" for kernel in marlin)
    assert Kernel not in marlin  # --linear-backend marlin is Marlin still


def test_elsewhere_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = linear.MarlinNvFp4LinearKernel
    plugin.register()
    assert linear.MarlinNvFp4LinearKernel is before
    assert Kernel not in linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    assert "need CUDA" in str(Kernel.is_supported()[1])
    capability = SimpleNamespace(to_int=lambda: 100)
    cuda = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: capability)
    monkeypatch.setattr(plugin, "current_platform", cuda)
    assert "capability 9.0" in str(Kernel.is_supported()[1])
    assert Kernel.is_supported(90) == (True, None)
    assert not of_experts.JitquantNvFp4Experts._supports_current_device()


def test_without_a_compiler_vllms_own_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(_: Any) -> None:
        raise NvccNotFoundError("no CUDA compiler (nvcc) was found")

    monkeypatch.setattr(Kernel, "is_supported", classmethod(lambda *_: (True, None)))
    monkeypatch.setattr(plugin, "find_nvcc", missing)
    before = linear.MarlinNvFp4LinearKernel
    plugin.register()
    assert linear.MarlinNvFp4LinearKernel is before
    assert "keep vLLM's kernels, because no CUDA compiler" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_it_is_compiled_without_a_break(tmp_path: Path) -> None:
    source, _ = folder(tmp_path / "in")
    quantize_checkpoint(source, tmp_path / "out", device="cpu")
    method = schemes.CompressedTensorsW4A4Fp4(use_a16=True)
    layer = fused(method, tmp_path / "out")
    run = torch.compile(
        lambda x: method.apply_weights(layer, x), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (3, 7):
        x = randn(rows, K)
        assert torch.equal(run(x), method.apply_weights(layer, x))


EXPERTS, HIDDEN, INNER, CHOSEN = 4, 64, 32, 2


def moe_config(**other: Any) -> Any:
    """Of a layer of experts on one rank."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    about: dict[str, Any] = {
        "num_experts": EXPERTS,
        "experts_per_token": CHOSEN,
        "hidden_dim": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": BF16,
    }
    return FusedMoEConfig(**about | other)


def experts_folder(path: Path) -> dict[str, Tensor]:
    at = "model.layers.0.mlp.experts"
    shapes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    weights = {
        f"{at}.{e}.{name}.weight": randn(*shape, seed=10 * e + i) * (e + 1)
        for e in range(EXPERTS)
        for i, (name, shape) in enumerate(shapes.items())
    }
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return weights


def loaded(method: Any, path: Path, names: dict[str, str]) -> Any:
    """Experts of a folder in one layer, as vLLM's loader puts them there.

    Args:
        names: of each parameter's parts in files.
    """
    layer: Any = nn.Module()
    method.create_weights(
        layer,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INNER,
        params_dtype=BF16,
        weight_loader=lambda *_: None,
        global_num_experts=EXPERTS,
    )
    tensors = load_file(path / "model.safetensors")
    for own, part in names.items():
        for which, pieces in (("w13", ["gate_proj", "up_proj"]), ("w2", ["down_proj"])):
            parameter = getattr(layer, f"{which}_{own}").data
            for e in range(EXPERTS):
                given = [
                    tensors.get(f"model.layers.0.mlp.experts.{e}.{piece}.{part}")
                    for piece in pieces
                ]
                if given[0] is None:
                    parameter[e] = 1.0
                else:
                    parameter[e] = torch.stack(given).reshape(parameter[e].shape)  # type: ignore[arg-type]
    layer.activation = moe_config().activation
    layer.global_num_experts, layer.expert_map = EXPERTS, None
    layer.apply_router_weight_on_input = False
    layer._expert_routing_tables = lambda: None
    method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("scheme", ["nvfp4a16", "nvfp4", "modelopt"])
@pytest.mark.usefixtures("hopper")
def test_experts(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a folder through vLLM's methods and its kernel's frame: the dense result."""
    from vllm.v1.worker import workspace

    memory = workspace.WorkspaceManager(torch.device("cpu"))
    monkeypatch.setattr(workspace, "_manager", memory)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is none here
    weights = experts_folder(tmp_path / "in")
    quantize_checkpoint(
        tmp_path / "in",
        tmp_path / "out",
        format="nvfp4a16" if scheme == "nvfp4a16" else "nvfp4",
        layout="modelopt" if scheme == "modelopt" else "compressed-tensors",
        input_amax=None if scheme == "nvfp4a16" else 8.0,
        device="cpu",
    )
    method: Any
    if scheme == "modelopt":
        config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        parsed = modelopt.ModelOptNvFp4Config.from_config(config)
        method = modelopt.ModelOptNvFp4FusedMoE(parsed, moe_config())
        names = {n: n for n in ("weight", "weight_scale", "weight_scale_2", "input_scale")}
    else:
        method = of_experts.compressed_tensors.CompressedTensorsW4A4Nvfp4MoEMethod(
            moe_config(), use_a16=scheme == "nvfp4a16"
        )
        names = {n: n for n in ("weight_packed", "weight_scale", "weight_global_scale")}
        names["input_global_scale"] = "input_global_scale"
    assert method.experts_cls is of_experts.JitquantNvFp4Experts
    layer = loaded(method, tmp_path / "out", names)
    made = method.moe_kernel.fused_experts.experts
    assert made.gate_up_proj_packed.data_ptr() == layer.w13_weight.data_ptr()  # not a copy
    dense = {}
    for e in range(EXPERTS):
        at = f"model.layers.0.mlp.experts.{e}"
        both = [weights[f"{at}.{n}_proj.weight"] for n in ("gate", "up")]
        gsa = torch.stack([jitquant.amax_gsa(w) for w in both]).amax(0)
        down = weights[f"{at}.down_proj.weight"]
        for name, w, g in (("up", torch.cat(both), gsa), ("down", down, jitquant.amax_gsa(down))):
            dense[name, e] = jitquant.quantize_weight_nvfp4(w, gsa=g).dequantize(torch.float32)
    for tokens in (1, 5, 1500):
        x = randn(tokens, HIDDEN, seed=tokens)
        chosen = torch.rand(tokens, EXPERTS).argsort(1)[:, :CHOSEN].int()
        share = torch.rand(tokens, CHOSEN)
        y = method.apply(layer, x, share, chosen, None, None)
        want = torch.zeros(tokens, HIDDEN)
        for e in range(EXPERTS):
            gate, up = (x.float() @ dense["up", e].T).chunk(2, -1)
            h = (nn.functional.silu(gate) * up) @ dense["down", e].T
            want += h * (share * (chosen == e)).sum(1, keepdim=True)
        assert (y.shape, y.dtype) == (x.shape, BF16)
        assert sqnr(y, want) > 40
        ours = method.moe_kernel.fused_experts
        out = torch.empty_like(x)
        weightless = dict.fromkeys(("a1q_scale", "a2_scale", "workspace13", "workspace2"))
        ours.apply(
            *(out, x, layer.w13_weight, layer.w2_weight, share, chosen.long(), layer.activation),
            *(EXPERTS, torch.tensor([0, -1, 2, -1])),  # two experts are another process's
            **weightless,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        part = torch.zeros(tokens, HIDDEN)
        for e in (0, 2):
            gate, up = (x.float() @ dense["up", e].T).chunk(2, -1)
            h = (nn.functional.silu(gate) * up) @ dense["down", e].T
            part += h * (share * (chosen == e)).sum(1, keepdim=True)
        assert sqnr(out, part) > 40


@pytest.mark.usefixtures("hopper")
def test_experts_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, limits, sizes and other activations keep vLLM's kernels, and so does a choice."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

    monkeypatch.setattr(
        of_experts.oracle, "select_nvfp4_moe_backend", lambda *_: ("vllm's", object)
    )
    select = of_experts.modelopt.select_nvfp4_moe_backend
    ours = (of_experts.Backend.JITQUANT, of_experts.JitquantNvFp4Experts)
    assert select(moe_config(), kNvfp4Static, None) == ours
    for other in (
        {"has_bias": True},
        {"swiglu_limit": 7.0},
        {"hidden_dim": 72},
        {"activation": MoEActivation.GELU},
        {"moe_backend": "marlin"},
        {"is_lora_enabled": True},
    ):
        assert select(moe_config(**other), kNvfp4Static, None)[0] == "vllm's", other


@pytest.mark.usefixtures("hopper")
def test_products_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``JITQUANT_COMPUTE=fp8`` reaches many rows of linears, and anything else is refused."""
    source, _ = folder(tmp_path / "in")
    quantize_checkpoint(source, tmp_path / "out", device="cpu")
    method = schemes.CompressedTensorsW4A4Fp4(use_a16=True)
    exact = fused(method, tmp_path / "out")
    monkeypatch.setenv("JITQUANT_COMPUTE", "fp8")
    fast = fused(method, tmp_path / "out")
    few, many = randn(8, K), randn(256, K)
    assert torch.equal(method.apply_weights(fast, few), method.apply_weights(exact, few))
    y = method.apply_weights(fast, many)
    q = jitquant.NVFP4Tensor(
        exact.weight.data.view(torch.float4_e2m1fn_x2),
        *(exact.weight_scale.data, exact.weight_global_scale.data, None, K),
    )
    assert torch.equal(y, jitquant.nvfp4_linear(many, q, compute="fp8"))
    assert not torch.equal(y, method.apply_weights(exact, many))
    monkeypatch.setenv("JITQUANT_COMPUTE", "int8")
    with pytest.raises(ValueError, match=r"JITQUANT_COMPUTE.*'int8'"):
        plugin.register()
