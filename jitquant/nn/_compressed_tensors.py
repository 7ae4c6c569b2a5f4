"""Saves converted models in the layout of the compressed-tensors library.

The layout of compressed-tensors 0.20 (its ``compressors/nvfp4`` and ``naive_quantized``):

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
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jitquant.formats import GROUP_EPS_MIN, MXFP4_BLOCK, NVFP4_BLOCK, NVFP4_DIVISOR
from jitquant.nn._hugging_face import (
    Place,
    in_file,
    own_config,
    places_in_file,
)
from jitquant.nn._matmul import block_scale_format
from jitquant.nn._model_folder import INDEX, WHOLE, read_json
from jitquant.nn._safetensors import safetensors_functions
from jitquant.nn.experts import (
    Experts,
    Float8BlockwiseExperts,
    NVFP4Experts,
    has_experts,
    projections_of,
)
from jitquant.nn.float8 import Float8BlockwiseLinear, ScaleFormat
from jitquant.nn.mxfp4 import MXFP4Linear
from jitquant.nn.nvfp4 import NVFP4Linear
from jitquant.ops import quantize_block

METHOD = "compressed-tensors"
DYNAMIC_INPUTS = "jitquant_dynamic_inputs"
"""A key of ``quantization_config`` that only this project reads: patterns of layers in NVFP4 that
compute the gsa of their inputs at each call. The layout has no scheme for them.
"""
BLOCK = (128, 128)

NVFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": NVFP4_BLOCK,
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}
MXFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": MXFP4_BLOCK,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}
# The scales of blocks are computed at each call, the one above them is from calibration.
NVFP4_INPUTS = {**NVFP4_WEIGHTS, "dynamic": "local", "observer": "static_minmax"}
FP8_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "block",
    "block_structure": list(BLOCK),
    "dynamic": False,
}
FP8_INPUTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": BLOCK[1],
    "dynamic": True,
}
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and activation checkpointing have the module that they wrap."""
FileScheme = tuple[str, Mapping[str, Any], Mapping[str, Any] | None]
"""The name of a format, and its arguments of weights and of inputs in config.json."""
_SCHEMES: dict[type[nn.Module], FileScheme] = {
    NVFP4Linear: ("nvfp4-pack-quantized", NVFP4_WEIGHTS, None),
    MXFP4Linear: ("mxfp4-pack-quantized", MXFP4_WEIGHTS, None),
    Float8BlockwiseLinear: ("float-quantized", FP8_WEIGHTS, FP8_INPUTS),
}
_LINEAR_OF: dict[type[nn.Module], type[nn.Module]] = {
    NVFP4Experts: NVFP4Linear,
    Float8BlockwiseExperts: Float8BlockwiseLinear,
}


def save_compressed_tensors(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    input_amax: Mapping[str, float] | None = None,
) -> None:
    """Writes a converted model for vLLM, transformers and other readers of compressed-tensors.

    ``model.safetensors`` has the weights of `NVFP4Linear` in NVFP4, of `MXFP4Linear` in MXFP4 and
    of `Float8BlockwiseLinear` in FP8, except those shared with another module, such as tied
    embeddings. Everything else is unchanged; tensors that share memory are written once, under the
    first name. ``config.json`` is the model's (or the one in the directory) plus
    ``quantization_config``. Tokenizer and generation settings are not written. Both files are
    complete before they replace others; an index in the directory, and the shards that it lists,
    are deleted.

    The scheme of FP8 is "FP8_BLOCK". That of NVFP4 is "NVFP4" (weights and activations) with
    ``input_amax`` or if layers have an ``input_gsa``: engines then quantize inputs with
    ``input_global_scale``, 2688 / amax or 1 / input_gsa. Otherwise it is "NVFP4A16" (only weights);
    `load_compressed_tensors` still restores layers that quantize their inputs. One file may have
    both: layers that are ``weight_only`` stay "NVFP4A16" beside others with an ``input_gsa``, and
    experts that are beside linears with ``input_amax``. FP8 layers whose in_features is not a
    multiple of 128 have a weight-only scheme, because readers divide inputs into whole groups.

    Codes and block scales are written bit for bit. The file has the reciprocal of a gsa, so a
    loaded gsa may differ by an ulp of fp32; a ``state_dict`` has the gsa itself.

    Args:
        model: contains `NVFP4Linear`, `MXFP4Linear` or `Float8BlockwiseLinear`.
        directory: created if missing.
        input_amax: the largest magnitude of the input of each `NVFP4Linear`, by name, from
            `report` on the unquantized model: ``{l.name: l.input_amax for l in found.layers}``.
            Other names are ignored. None: the ``input_gsa`` of the layers. Experts keep theirs,
            from ``static_input_scales=True`` of `convert`.

    Raises:
        ValueError: the model has no such layer, wrappers that rename its layers, or weights on
            meta; the in_features of one in NVFP4 is not a multiple of 16, files have experts in a
            layout that is not known, an amax is missing or not positive, a weight is too small for
            files, or a file in the directory is broken. Nothing is written then.
        TypeError: ``input_amax`` is not a mapping.
        FileExistsError, NotADirectoryError: ``directory`` is a file, or in one.
        ImportError: safetensors is not installed.
    """
    _, save_file = safetensors_functions()
    tensors, config = compressed_tensors(model, input_amax)
    directory = Path(directory)
    described = own_config(model) or _own_json(directory / "config.json")
    described["quantization_config"] = config
    old = _old_weights(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise type(error)(
            f"directory: expected a folder, existing or new, got {directory}, which is a file or "
            "in one. Give another path"
        ) from error
    weights, about = directory / f"{WHOLE}.tmp", directory / "config.json.tmp"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
        about.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        weights.unlink(missing_ok=True)
        about.unlink(missing_ok=True)
        raise
    # Until the last step nothing can be loaded, so nothing is mixed with what was here.
    for path in old:
        path.unlink(missing_ok=True)
    about.replace(directory / "config.json")
    weights.replace(directory / WHOLE)


def _own_json(path: Path) -> dict[str, Any]:
    """A JSON object in the directory of a model that is saved; empty without a file.

    Raises:
        ValueError: it is something else.
    """
    try:
        return read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"directory: expected a JSON object in {path}, or no such file, got something else. "
            "Repair or delete it, or save to another directory"
        ) from error


def _old_weights(directory: Path) -> list[Path]:
    """An index and what is read with it: what has to go before new weights are there."""
    files = _own_json(directory / INDEX).get("weight_map")
    names = [n for n in files.values() if isinstance(n, str)] if isinstance(files, dict) else []
    shards = {n for n in names if Path(n).name == n and n.endswith(".safetensors")}
    return [directory / name for name in (INDEX, WHOLE, *sorted(shards))]


def compressed_tensors(
    model: nn.Module, input_amax: Mapping[str, float] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_compressed_tensors` writes: tensors by name, and the ``quantization_config``.

    Args:
        model, input_amax: as there.

    Raises:
        ValueError: as there.
    """
    check_unwrapped(model)
    holders = Counter(
        id(p) for m in model.modules() for p in m.parameters(recurse=False)
    )  # how many modules have a parameter
    layers: dict[str, nn.Module] = {}
    others: dict[str, tuple[int, int]] = {}  # not quantized: linears and routers
    linears: list[str] = []  # of these; by the names in the model, which transformers looks for
    plain_experts: dict[str, tuple[int, int]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    biases: dict[str, Tensor] = {}  # of linears
    of_experts: dict[str, Tensor] = {}
    plain = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    lost = next((name for name, tensor in plain.items() if tensor.is_meta), None)
    if lost is not None:
        raise ValueError(
            f"model: expected weights with values, got {lost} on meta: it is not loaded yet, or "
            "offloaded. Load the model onto one device"
        )
    for name, module in model.named_modules(remove_duplicate=False):
        dot = f"{name}." if name else ""
        if isinstance(module, (NVFP4Experts, Float8BlockwiseExperts)):
            _check_experts(name, module)
            layers[name] = module
            for projection in module.projections:
                shapes[f"{dot}{projection.name}"] = (module.num_experts, projection.pieces)
        elif isinstance(module, (NVFP4Linear, MXFP4Linear)) or (
            isinstance(module, Float8BlockwiseLinear) and holders[id(module.weight)] == 1
        ):
            layers[name] = module
            shapes[f"{dot}weight"] = (0, 0)
        elif isinstance(module, nn.Linear) or _is_router(module):
            others[f"{dot}weight"] = (0, 0)
            linears += [f"{dot}weight"] if isinstance(module, nn.Linear) else []
        elif has_experts(module):  # those that are not converted, too: engines look for all
            for projection in projections_of(module):
                weight = module._parameters.get(projection.name)
                size = 0 if weight is None else weight.shape[0]
                if size:
                    plain_experts[f"{dot}{projection.name}"] = (size, projection.pieces)
        for part in module.state_dict() if name in layers else ():
            tensor = plain.pop(f"{dot}{part}")
            if part == "bias":
                biases[f"{dot}bias"] = tensor
            elif part.endswith("_bias"):
                of_experts[f"{dot}{part}"] = tensor
    if not layers:
        raise ValueError(
            "model: expected layers that are NVFP4Linear, MXFP4Linear or Float8BlockwiseLinear, "
            "got none. Call convert(model, ...) first, for NVFP4TrainingLinear after loading the "
            "state_dict into the plain model"
        )
    places = places_in_file(model, shapes)
    unknown = shapes.keys() - {place.name for place in places.values()}
    if unknown:
        raise ValueError(
            f"{min(unknown)}: expected a weight that files store with a name for each matrix, got "
            f"one of {type(model).__name__}, whose layout is not known. Leave it out when "
            "converting, by ignore="
        )
    inputs = _input_scales(layers, input_amax)
    quantized = in_file(model, biases)
    schemes: dict[str, FileScheme] = {}
    in_model: dict[str, FileScheme] = {}
    dynamic: list[str] = []
    for file_name, place in places.items():
        owner, _, part = place.name.rpartition(".")
        layer, target = layers[owner], file_name.removesuffix("weight").removesuffix(".")
        dot = f"{target}." if target else ""
        parts = _matrix(layer, part, place) if place.expert is not None else _parts(owner, layer)
        quantized |= {f"{dot}{part}": t for part, t in parts.items()}
        if (bias := of_experts.get(f"{place.name}_bias")) is not None:
            assert isinstance(layer, Experts)
            quantized[f"{dot}bias"] = _cut(layer, part, place, bias)
        scaled = owner if place.expert is None else place.name
        of_input = None if inputs is None else inputs.get(scaled)
        if of_input is not None:
            quantized[f"{dot}input_global_scale"] = of_input.clone()
        schemes[target] = _scheme(layer, parts, of_input is not None)
        if place.expert is None:
            in_model[owner] = schemes[target]
        if isinstance(layer, (NVFP4Linear, NVFP4Experts)) and not layer.weight_only:
            dynamic.append(target)
    _check_scales(quantized)
    unquantized = [*places_of(model, others), *places_of(model, plain_experts), *linears]
    ignored = [name.removesuffix("weight").removesuffix(".") for name in unquantized]
    config = quantization_config(schemes | in_model, [*dict.fromkeys(ignored)])
    if dynamic and inputs is None:
        every = sum(s == _SCHEMES[NVFP4Linear] for s in schemes.values()) == len(dynamic)
        config[DYNAMIC_INPUTS] = ["*"] if every else dynamic
    return _for_a_file(in_file(model, _once(plain)) | quantized), config


def places_of(model: nn.Module, weights: Mapping[str, tuple[int, int]]) -> list[str]:
    """The names in the files of weights that are there as they are, or else their own."""
    places = places_in_file(model, weights)
    known = {place.name for place in places.values()}
    return [*places, *(name for name in weights if name not in known)]


def check_unwrapped(model: nn.Module) -> None:
    """Rejects wrappers that add a part to the names of what is in them.

    Raises:
        ValueError: there is one.
    """
    for name, module in model.named_modules():
        parallel = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        own = next((n for n in _WRAPPED if n in module._modules), "module" if parallel else None)
        if own is not None:
            raise ValueError(
                f"model: expected modules under their own names, got {type(module).__name__} at "
                f"{name!r}, which renames them. Use its attribute {own} instead; model.compile() "
                "compiles without a wrapper"
            )


def _is_router(module: nn.Module) -> bool:
    """A matrix that is multiplied, and in no linear: engines may have one there."""
    weight = module._parameters.get("weight")
    return (
        weight is not None
        and weight.dim() == 2
        and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and hasattr(module, "top_k")
    )


def _check_experts(name: str, experts: NVFP4Experts | Float8BlockwiseExperts) -> None:
    columns = experts.columns.values() if isinstance(experts, NVFP4Experts) else ()
    if any(size % NVFP4_BLOCK for size in columns):
        raise ValueError(
            f"{name}: expected matrices of a multiple of {NVFP4_BLOCK} columns, as "
            f"compressed-tensors has them, got {tuple(columns)}. Leave it out when converting, by "
            "ignore="
        )


def _matrix(layer: nn.Module, name: str, place: Place) -> dict[str, Tensor]:
    """One matrix of one expert in compressed-tensors' names."""
    assert place.expert is not None
    assert isinstance(layer, (NVFP4Experts, Float8BlockwiseExperts))
    if isinstance(layer, Float8BlockwiseExperts):
        return _fp8_parts(_cut(layer, name, place, layer.matrices(name)), layer.scale_format)
    gsa = layer.get_buffer(f"{name}_gsa")[place.expert].reshape(1)
    packed, scale = (layer.get_buffer(f"{name}_{part}") for part in ("packed", "scale"))
    return {
        "weight_packed": _cut(layer, name, place, packed),
        "weight_scale": _cut(layer, name, place, scale.view(torch.uint8)).view(scale.dtype),
        "weight_global_scale": global_scale(gsa),
    }


def _cut(layer: Experts, name: str, place: Place, whole: Tensor) -> Tensor:
    """The rows of one matrix of one expert, of weights (E, N, ...) or of biases (E, N)."""
    projection = next(p for p in layer.projections if p.name == name)
    return whole[place.expert][projection.rows(place.piece or 0, whole.shape[1])]


def _input_scales(
    layers: Mapping[str, nn.Module], amaxes: Mapping[str, float] | None
) -> dict[str, Tensor] | None:
    """The ``input_global_scale`` of each layer in NVFP4, which may have several names, and of each
    projection of experts; None without static scales. Layers that are ``weight_only`` have none,
    linears only without ``amaxes``."""
    names: dict[int, list[str]] = {}
    static: dict[str, Tensor] = {}
    of_experts: list[str] = []
    unscaled: set[str] = set()
    for name, layer in layers.items():
        if isinstance(layer, NVFP4Linear):
            names.setdefault(id(layer), []).append(name)
            if layer.weight_only:
                unscaled.add(name)
            if layer.input_gsa is not None:
                static[name] = 1 / layer.input_gsa
        elif isinstance(layer, NVFP4Experts):
            for projection in layer.projections:
                of_experts.append(f"{name}.{projection.name}")
                if layer.weight_only:
                    unscaled.add(of_experts[-1])
                gsa = layer._buffers[f"{projection.name}_input_gsa"]
                if gsa is not None:
                    static[of_experts[-1]] = 1 / gsa
    if amaxes is None and not static:
        return None
    if amaxes is not None and not isinstance(amaxes, Mapping):
        raise TypeError(
            f"input_amax: expected amaxes by the names of layers, or None, got {amaxes!r}. For one "
            "number use dict.fromkeys(names, number)"
        )
    wanted = of_experts if amaxes is not None else [*(p[0] for p in names.values()), *of_experts]
    absent = [name for name in wanted if name not in static and name not in unscaled]
    if absent:
        hint = "Leave the layer out when converting, or run it when calibrating"
        if amaxes is None and absent[0] not in of_experts:
            hint += ", or pass input_amax"
        if amaxes is not None and not static:
            hint += ", or leave out input_amax"
        raise ValueError(
            f"{absent[0]}: expected a static scale of its input, as other layers have it, got "
            f"none. {hint}"
        )
    if amaxes is None:
        return static
    made = {name: static[name] for name in of_experts if name in static}
    for places in names.values():
        amax = next((amaxes[name] for name in places if name in amaxes), None)
        if amax is None or not 0 < amax < math.inf:
            raise ValueError(
                f"input_amax[{places[0]!r}]: expected a positive number, got {amax}. Measure it "
                "with report(model, inputs) before the model is converted"
            )
        made |= dict.fromkeys(places, torch.tensor([NVFP4_DIVISOR / amax], dtype=torch.float32))
    return made


def _fp8_parts(weight: Tensor, scale_format: ScaleFormat | None) -> dict[str, Tensor]:
    """What a layer with this ``scale_format`` multiplies with."""
    weight = weight.detach()
    q = quantize_block(
        weight if weight.stride(-1) == 1 else weight.contiguous(),
        BLOCK,
        scale_format=scale_format or block_scale_format(weight.device),
        eps=GROUP_EPS_MIN,
    )
    return {"weight": q.data, "weight_scale": q.scale_inv}


def global_scale(gsa: Tensor) -> Tensor:
    """What files have in place of a gsa: its reciprocal, ``2688 / amax``.

    A weight of zeros has the gsa 0. Its codes are zero, whatever they are multiplied by, so it gets
    the global scale 1.

    Args:
        gsa: fp32 (1,).

    Returns:
        fp32 (1,).
    """
    return torch.where(gsa == 0, 1.0, 1 / gsa)


def _check_scales(tensors: Mapping[str, Tensor]) -> None:
    """Checks the reciprocals of gsas."""
    for name, tensor in tensors.items():
        if name.endswith("_global_scale") and not bool(tensor.isfinite().all()):
            what = "weights" if name.endswith("weight_global_scale") else "inputs"
            raise ValueError(
                f"{name}: expected a finite number, the reciprocal of a gsa, got "
                f"{tensor.tolist()}: the {what} are too small for the files. Leave the layer out "
                "when converting, by ignore="
            )


def _parts(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """The weight of a layer in compressed-tensors' names."""
    if isinstance(layer, Float8BlockwiseLinear):
        return _fp8_parts(layer.weight, layer.scale_format)
    if isinstance(layer, MXFP4Linear):
        return {"weight_packed": layer.weight_packed, "weight_scale": layer.weight_scale}
    assert isinstance(layer, NVFP4Linear)
    if layer.in_features % NVFP4_BLOCK:
        raise ValueError(
            f"{name}.in_features: expected a multiple of {NVFP4_BLOCK}, as compressed-tensors has "
            f"it, got {layer.in_features}. Leave the layer out when converting, by ignore="
        )
    state = layer.state_dict()  # its scales are linear
    return {
        "weight_packed": state["weight_packed"],
        "weight_scale": state["weight_scale"],
        "weight_global_scale": global_scale(state["weight_gsa"]),
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
    """Contiguous, and each with its own memory, as safetensors wants them."""
    dense = {name: t.detach().contiguous() for name, t in tensors.items()}
    count = Counter(t.untyped_storage().data_ptr() for t in dense.values())
    return {
        name: t.clone() if count[t.untyped_storage().data_ptr()] > 1 else t
        for name, t in dense.items()
    }


def _scheme(layer: nn.Module, parts: Mapping[str, Tensor], nvfp4_inputs: bool) -> FileScheme:
    """That of a matrix with these parts."""
    kind = _LINEAR_OF.get(type(layer), type(layer))
    name, weights, inputs = _SCHEMES[kind]
    if kind is NVFP4Linear and nvfp4_inputs:
        inputs = NVFP4_INPUTS
    if kind is Float8BlockwiseLinear and parts["weight"].shape[1] % BLOCK[1]:
        # Readers pad weights to whole blocks, but not inputs.
        name, inputs = "naive-quantized", None
    return name, weights, inputs


def quantization_config(layers: Mapping[str, FileScheme], ignored: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    Args:
        layers: schemes by the names of the files.
        ignored: names of the linears that are not quantized.
    """
    schemes: list[FileScheme] = []
    for scheme in layers.values():
        if scheme not in schemes:
            schemes.append(scheme)
    groups = {
        f"group_{i}": {
            "targets": [n for n, its in layers.items() if its == scheme]
            if len(schemes) > 1
            else ["Linear"],
            "weights": dict(scheme[1]),
            "input_activations": None if scheme[2] is None else dict(scheme[2]),
            "output_activations": None,
            "format": scheme[0],
        }
        for i, scheme in enumerate(schemes)
    }
    formats = list(dict.fromkeys(name for name, _, _ in schemes))
    return {
        "quant_method": METHOD,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
