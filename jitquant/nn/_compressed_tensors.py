"""Converted models as files in the layout of the compressed-tensors library, and back.

The layout, as compressed-tensors 0.20 has it (its ``compressors/nvfp4`` and ``naive_quantized``):

- NVFP4, format "nvfp4-pack-quantized": ``weight_packed`` uint8 (N, K / 2), the even element in the
  low nibble; ``weight_scale`` ``float8_e4m3fn`` (N, K / 16); ``weight_global_scale`` fp32 (1,),
  2688 / amax: the reciprocal of a gsa. A value is ``e2m1 * (s / weight_global_scale)``.
- FP8, format "float-quantized": ``weight`` ``float8_e4m3fn`` (N, K); ``weight_scale`` (N / 128,
  K / 128, rounded up), the factor that dequantizes.

``quantization_config`` in config.json says which layers have which.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jitquant.formats import GROUP_EPS_MIN, INPUT_DTYPES, NVFP4_BLOCK, NVFP4_DIVISOR
from jitquant.nn._convert import Conversion, replace_everywhere
from jitquant.nn.float8 import Float8BlockwiseLinear
from jitquant.nn.nvfp4 import NVFP4Linear
from jitquant.ops import quantize_block
from jitquant.tensors.fp8 import QuantizedTensor

METHOD = "compressed-tensors"
BLOCK = (128, 128)

_NVFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": NVFP4_BLOCK,
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}
# The scales of blocks are computed at each call, the one above them is from calibration.
_NVFP4_INPUTS = {**_NVFP4_WEIGHTS, "dynamic": "local", "observer": "static_minmax"}
_FP8_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "block",
    "block_structure": list(BLOCK),
    "dynamic": False,
}
_FP8_INPUTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": BLOCK[1],
    "dynamic": True,
}
_SCHEMES: dict[type[nn.Module], tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    NVFP4Linear: ("nvfp4-pack-quantized", _NVFP4_WEIGHTS, None),
    Float8BlockwiseLinear: ("float-quantized", _FP8_WEIGHTS, _FP8_INPUTS),
}


def save_compressed_tensors(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    input_amax: Mapping[str, float] | None = None,
) -> None:
    """Writes a converted model for vLLM, transformers and others that read compressed-tensors.

    ``model.safetensors`` has the weights of `NVFP4Linear` in NVFP4 and those of
    `Float8BlockwiseLinear` in FP8, but for those that another module has as well, such as tied
    embeddings, and all else as it is; tensors that are one memory are there once, under the first
    name. ``config.json`` is the model's (or what lies in the directory) with
    ``quantization_config`` in it. Tokenizer and generation settings are left to whoever has them.

    The scheme of FP8 is "FP8_BLOCK". That of NVFP4 is "NVFP4A16", weights alone, or with
    ``input_amax`` "NVFP4", activations too: engines then take ``input_global_scale``,
    2688 / amax, in place of the gsa that `NVFP4Linear` computes at each call.

    Codes and block scales are the layer's to the bit. The file has the reciprocal of a gsa, and two
    readings of it may differ from ``gsa`` by an ulp of fp32; a ``state_dict`` has the gsa itself.

    Args:
        model: with `NVFP4Linear` and `Float8BlockwiseLinear` in it.
        directory: is made where there is none.
        input_amax: largest magnitude of the input of each `NVFP4Linear`, by name; `report` on the
            unquantized model has them: ``{l.name: l.input_amax for l in found.layers}``. Other
            names are not looked at.

    Raises:
        ValueError: there is no such layer, one of NVFP4 whose in_features is no multiple of 16, or
            an amax that is missing or not positive.
        ImportError: safetensors is not installed.
    """
    _, save_file = _safetensors()
    tensors, config = compressed_tensors(model, input_amax)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    described: dict[str, Any] = {}
    own = getattr(model, "config", None)
    if own is not None and hasattr(own, "to_json_string"):
        described = json.loads(own.to_json_string())
        described.setdefault("architectures", None)
        described["architectures"] = described["architectures"] or [type(model).__name__]
    elif path.is_file():
        described = json.loads(path.read_text(encoding="utf-8"))
    described["quantization_config"] = config
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def compressed_tensors(
    model: nn.Module, input_amax: Mapping[str, float] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_compressed_tensors` writes: tensors by name, and the ``quantization_config``.

    Args:
        model, input_amax: as there.

    Raises:
        ValueError: as there.
    """
    holders = Counter(
        id(p) for m in model.modules() for p in m.parameters(recurse=False)
    )  # how many modules have a parameter
    layers: dict[str, NVFP4Linear | Float8BlockwiseLinear] = {}
    ignored: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, NVFP4Linear) or (
            isinstance(module, Float8BlockwiseLinear) and holders[id(module.weight)] == 1
        ):
            layers[name] = module
        elif isinstance(module, nn.Linear):
            ignored.append(name)
    if not layers:
        raise ValueError(
            "the model has no NVFP4Linear and no Float8BlockwiseLinear with a weight of its own; "
            "convert(model, ...) puts them in"
        )
    plain = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    quantized: dict[str, Tensor] = {}
    for name, layer in layers.items():
        dot = f"{name}." if name else ""
        for part in ("weight", "weight_packed", "weight_scale", "weight_gsa", "bias"):
            plain.pop(f"{dot}{part}", None)
        quantized |= {f"{dot}{part}": t for part, t in _parts(name, layer).items()}
        if layer.bias is not None:
            quantized[f"{dot}bias"] = layer.bias
    if input_amax is not None:
        quantized |= _input_scales(layers, input_amax)
    inputs = input_amax is not None
    return _for_a_file(_once(plain) | quantized), _config(layers, ignored, inputs)


def _input_scales(
    layers: Mapping[str, nn.Module], amaxes: Mapping[str, float]
) -> dict[str, Tensor]:
    """The ``input_global_scale`` of each layer in NVFP4; a layer may have several names."""
    names: dict[int, list[str]] = {}
    for name, layer in layers.items():
        if isinstance(layer, NVFP4Linear):
            names.setdefault(id(layer), []).append(name)
    made = {}
    for places in names.values():
        amax = next((amaxes[name] for name in places if name in amaxes), None)
        if amax is None or not 0 < amax < math.inf:
            raise ValueError(
                f"input_amax[{places[0]!r}] is {amax}; accepted is a positive number for each "
                "NVFP4Linear. report(model, inputs) measures it before the model is converted"
            )
        for name in places:
            dot = f"{name}." if name else ""
            made[f"{dot}input_global_scale"] = torch.tensor([NVFP4_DIVISOR / amax])
    return made


def _parts(name: str, layer: NVFP4Linear | Float8BlockwiseLinear) -> dict[str, Tensor]:
    """The weight of a layer in compressed-tensors' names."""
    if isinstance(layer, Float8BlockwiseLinear):
        weight = layer.weight.detach()
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        q = quantize_block(weight, BLOCK, eps=GROUP_EPS_MIN)
        return {"weight": q.data, "weight_scale": q.scale_inv}
    if layer.in_features % NVFP4_BLOCK:
        raise ValueError(
            f"{name}.in_features is {layer.in_features}; compressed-tensors has multiples of "
            f"{NVFP4_BLOCK}. Leave the layer out when converting, by filter="
        )
    state = layer.state_dict()  # its scales are linear
    gsa = state["weight_gsa"]
    # A weight of zeros has the gsa 0; its codes are zero, whatever they are multiplied with.
    scale = torch.where(gsa == 0, 1.0, 1 / gsa)
    return {
        "weight_packed": state["weight_packed"],
        "weight_scale": state["weight_scale"],
        "weight_global_scale": scale,
    }


def _once(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that are the same memory as an earlier one left out."""
    seen: set[tuple[Any, ...]] = set()
    kept = {}
    for name, tensor in tensors.items():
        where = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or where not in seen:
            seen.add(where)
            kept[name] = tensor
    return kept


def _for_a_file(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and each with a memory of its own, as safetensors wants them."""
    dense = {name: t.detach().contiguous() for name, t in tensors.items()}
    count = Counter(t.untyped_storage().data_ptr() for t in dense.values())
    return {
        name: t.clone() if count[t.untyped_storage().data_ptr()] > 1 else t
        for name, t in dense.items()
    }


def _config(layers: dict[str, Any], ignored: list[str], nvfp4_inputs: bool) -> dict[str, Any]:
    groups = {}
    kinds = list(dict.fromkeys(map(type, layers.values())))
    for i, kind in enumerate(kinds):
        name, weights, inputs = _SCHEMES[kind]
        if kind is NVFP4Linear and nvfp4_inputs:
            inputs = _NVFP4_INPUTS
        groups[f"group_{i}"] = {
            "targets": [n for n, layer in layers.items() if type(layer) is kind]
            if len(kinds) > 1
            else ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": name,
        }
    return {
        "quant_method": METHOD,
        "format": groups["group_0"]["format"] if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def load_compressed_tensors(model: nn.Module, directory: str | PathLike[str]) -> Conversion:
    """Reads such files, whoever wrote them, into a model whose linears are not converted.

    A linear whose weight is in NVFP4 there becomes an `NVFP4Linear` with the file's codes and
    scales. One whose weight is in FP8 in 128x128 blocks becomes a `Float8BlockwiseLinear` with the
    dequantized weight. All else is loaded as it is. Scales for activations from calibration are
    left alone: both layers compute theirs.

    Args:
        model: of the architecture of the files, with weights in memory; their values are lost.
        directory: with config.json and model.safetensors, or parts of the latter and their index.

    Returns:
        Which linears were replaced, and which were left as they are.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files are of another format, or the weights of other layers than the
            model's.
        ImportError: safetensors is not installed.
    """
    directory = Path(directory)
    described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = described.get("quantization_config") or {}
    if config.get("quant_method") != METHOD:
        raise ValueError(
            f"quant_method in {directory / 'config.json'} is {config.get('quant_method')!r}; "
            f"accepted is {METHOD!r}"
        )
    tensors = _read(directory)
    done = Conversion(METHOD)
    made: list[tuple[nn.Linear, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        dot = f"{name}." if name else ""
        if f"{dot}weight_packed" in tensors:
            layer: nn.Module = _nvfp4_layer(dot, module, tensors)
        elif f"{dot}weight_scale" in tensors:
            layer = _fp8_layer(dot, module, tensors)
        else:
            done.skipped[name] = "its weight is not quantized in the files"
            continue
        made.append((module, layer))
        done.replaced.append(name)
        done.bytes_before += module.weight.nbytes
        kept = layer.buffers() if isinstance(layer, NVFP4Linear) else layer.parameters()
        done.bytes_after += sum(t.nbytes for t in kept if t is not getattr(layer, "bias", None))
    for module, layer in made:
        replace_everywhere(model, module, layer)
    _load_the_rest(model, tensors)
    return done


def _nvfp4_layer(dot: str, linear: nn.Linear, tensors: dict[str, Tensor]) -> NVFP4Linear:
    """Takes the layer's parts out of ``tensors``."""
    packed, scale = tensors.pop(f"{dot}weight_packed"), tensors.pop(f"{dot}weight_scale")
    global_scale = tensors.pop(f"{dot}weight_global_scale", None)
    tensors.pop(f"{dot}input_global_scale", None)
    shape = (linear.out_features, linear.in_features)
    if (
        global_scale is None
        or packed.dtype != torch.uint8
        or tuple(packed.shape) != (shape[0], shape[1] // 2)
        or tuple(scale.shape) != (shape[0], shape[1] // NVFP4_BLOCK)
    ):
        raise ValueError(
            f"{dot}weight_packed is {packed.dtype} {tuple(packed.shape)} with scales "
            f"{scale.dtype} {tuple(scale.shape)} and "
            f"{'no' if global_scale is None else 'a'} weight_global_scale; accepted is NVFP4 of "
            f"the linear's {shape}: uint8, a scale for 16 elements, and a weight_global_scale"
        )
    made = NVFP4Linear(
        *(linear.in_features, linear.out_features, linear.bias is not None),
        *(linear.weight.device, linear.weight.dtype),
    )
    parts = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_gsa": 1 / global_scale.to(torch.float32).reshape(1),
    }
    if linear.bias is not None:
        parts["bias"] = tensors.pop(f"{dot}bias")
    made.load_state_dict(parts)
    return made.train(linear.training)


def _fp8_layer(dot: str, linear: nn.Linear, tensors: dict[str, Tensor]) -> Float8BlockwiseLinear:
    """Puts the dequantized weight in place of that in ``tensors``."""
    device = linear.weight.device
    weight, scale = (tensors.pop(f"{dot}{part}").to(device) for part in ("weight", "weight_scale"))
    tensors.pop(f"{dot}input_scale", None)
    blocks = tuple(-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=False))
    if weight.dtype != torch.float8_e4m3fn or tuple(scale.shape) != blocks:
        raise ValueError(
            f"{dot}weight is {weight.dtype} {tuple(weight.shape)} with scales of shape "
            f"{tuple(scale.shape)}; accepted is float8_e4m3fn with a scale for each 128x128 block: "
            f"{blocks}"
        )
    q = QuantizedTensor(weight, scale.to(torch.float32), None, None, "fp8_block", BLOCK)
    dtype = linear.weight.dtype if linear.weight.dtype in INPUT_DTYPES else torch.float32
    tensors[f"{dot}weight"] = q.dequantize(dtype)
    return Float8BlockwiseLinear.from_linear(linear)


def _load_the_rest(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    # What the layers in NVFP4 have is there already.
    filled = {
        f"{name}.{part}" if name else part
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, NVFP4Linear)
        for part in module.state_dict()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    state = model.state_dict()
    loaded = {state[name].data_ptr() for name in tensors if name in state}
    absent = [n for n in missing if n not in filled and state[n].data_ptr() not in loaded]
    if absent or unexpected:
        raise ValueError(
            f"the files lack {', '.join(absent) or 'nothing'} and have "
            f"{', '.join(unexpected) or 'nothing'} besides; accepted are files of this model"
        )


def _read(directory: Path) -> dict[str, Tensor]:
    load_file, _ = _safetensors()
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} has no {name}")
        tensors |= load_file(directory / name)
    return tensors


def _safetensors() -> tuple[Callable[..., dict[str, Tensor]], Callable[..., None]]:
    try:
        from safetensors.torch import load_file, save_file
    except ImportError as error:
        raise ImportError(
            "files of this layout need safetensors, which is not installed: pip install safetensors"
        ) from error
    return load_file, save_file
