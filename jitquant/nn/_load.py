"""Loads checkpoints of compressed-tensors, ModelOpt and DeepSeek into a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jitquant.formats import (
    COMPUTES,
    E8M0_DTYPE,
    FP8_DTYPES,
    INPUT_DTYPES,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    SCALE_DTYPE,
    Compute,
    one_of,
)
from jitquant.nn._compressed_tensors import BLOCK, DYNAMIC_INPUTS, METHOD, check_unwrapped
from jitquant.nn._convert import (
    CONVERTED,
    Conversion,
    attach,
    check_root,
    linear_refusal,
    parents_of,
    replace_everywhere,
)
from jitquant.nn._hugging_face import fill_buffers, is_pretrained, places_in_file
from jitquant.nn._model_folder import INDEX, WHOLE, object_in, read_config, read_index, read_json
from jitquant.nn._safetensors import read_header, safetensors_functions
from jitquant.nn._targets import matches
from jitquant.nn.experts import (
    Float8BlockwiseExperts,
    NVFP4Experts,
    Projection,
    projections_of,
)
from jitquant.nn.experts import refusal as experts_refusal
from jitquant.nn.float8 import Float8BlockwiseLinear, ScaleFormat
from jitquant.nn.mxfp4 import MXFP4Linear
from jitquant.nn.nvfp4 import NVFP4Linear
from jitquant.tensors.fp8 import QuantizedTensor

_CODES = (NVFP4Linear, MXFP4Linear, NVFP4Experts)
_CODE_DTYPES = (*FP8_DTYPES, torch.int8, torch.uint8)
_NVFP4_INPUTS = {"num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
_OF_CACHES = (".k_scale", ".v_scale")
"""Scales of keys and values, which engines cache in FP8."""


def load_compressed_tensors(
    model: nn.Module, directory: str | PathLike[str], *, compute: Compute = "exact"
) -> Conversion:
    """Loads a checkpoint in the layout of compressed-tensors into an unconverted model.

    Layers are replaced according to the format of their weight in the files:

    - NVFP4: `NVFP4Linear` with the codes and scales of the file. It is ``weight_only`` if the
      files say that inputs are not quantized to NVFP4 (as in NVFP4A16), unless they were saved from
      layers that quantize them.
    - MXFP4: `MXFP4Linear`.
    - FP8 in 128x128 blocks: `Float8BlockwiseLinear` with the dequantized weight. If all scales are
      powers of two, its ``scale_format`` is "ue8m0", which keeps the codes.
    - Experts in NVFP4 or MXFP4: `NVFP4Experts`; MXFP4 values are kept exactly. Experts in FP8 in
      128x128 blocks: `Float8BlockwiseExperts`.

    Everything else is loaded unchanged. Calibrated input scales become ``input_gsa``; experts of a
    layer share the largest of theirs.

    Also reads NVFP4 files of ModelOpt (``quant_method`` "modelopt"), FP8 blocks of DeepSeek ("fp8")
    and experts of gpt-oss in MXFP4 ("mxfp4"), which become `NVFP4Experts` with the same values.

    Args:
        model: with the architecture of the files; its weights are overwritten. If it is on the
            meta device, its weights are created on the CPU.
        directory: with config.json and model.safetensors, or the latter's shards and index.
        compute: of each `NVFP4Linear` that is ``weight_only``: "fp8" multiplies 256 rows or more
            in FP8. Other layers and experts do not use it.

    Returns:
        Which layers were replaced, and which were left unchanged.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the files are broken or have another format, nothing that is quantized although
            config.json says so, or weights of layers that the model does not have; the model is a
            linear itself, has converted layers, layers that cannot be replaced, such as subclasses
            of ``nn.Linear``, wrappers that rename its layers, or buffers on meta that are in no
            file; or ``compute`` is unknown. The model is unchanged then.
        ImportError: safetensors is not installed.
    """
    one_of("compute", compute, COMPUTES)
    _check_unconverted(model)
    check_unwrapped(model)
    directory = Path(directory)
    config = _quantization_config(directory)
    tensors = read_quantized(directory, config["quant_method"])
    check_root(model, "Load into the model that contains it")
    linears: dict[nn.Linear, list[str]] = {}  # with all names that each has
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            linears.setdefault(module, []).append(name)
    experts = {n: m for n, m in model.named_modules() if experts_refusal(m) is None}
    shapes = {f"{name}.weight": (0, 0) for names in linears.values() for name in names}
    for name, module in experts.items():
        shapes |= {f"{name}.{part}": size for part, size in _matrices_of(module).items()}
    _check_meta_buffers(model)
    done = Conversion(METHOD)
    before, quantized = done.count(model), set()
    tied = _shared_names(model)
    found: dict[str, dict[tuple[int, int], str]] = {}
    for file_name, place in places_in_file(model, shapes).items():
        base = file_name.removesuffix("weight")
        found.setdefault(place.name, {})[place.expert or 0, place.piece or 0] = base
    made: list[tuple[nn.Module, nn.Module]] = []
    parents = parents_of(model)
    for linear, (name, *others) in linears.items():
        dot, *again = (found[f"{n}.weight"][0, 0] for n in (name, *others))
        if not {f"{dot}weight_packed", f"{dot}weight_scale"} & tensors.keys():
            done.skipped[name] = "its weight is not quantized in the files"
            continue
        why = linear_refusal(linear, parents[id(linear)])
        if why is not None:
            raise ValueError(
                f"model: expected a torch.nn.Linear that can be replaced at {name!r}, whose weight "
                f"is quantized in the files, got one that cannot: {why}. Load files in which it is "
                "not quantized"
            )
        layer: nn.Module
        if _is_mxfp4(dot, tensors):
            layer = _mxfp4_layer(dot, linear, tensors)
        elif f"{dot}weight_packed" in tensors:
            only = not _quantizes_inputs(name, dot.removesuffix("."), config)
            layer = _nvfp4_layer(dot, linear, tensors, only)
            layer.compute = compute if only else "exact"
        else:
            layer = _fp8_layer(dot, linear, tensors)
        if again:  # under these names, files may have it a second time
            tensors = {n: t for n, t in tensors.items() if not n.startswith(tuple(again))}
        made.append((linear, layer))
        done.replaced.append(name)
        done.bytes_before += linear.weight.nbytes
        quantized.add(id(linear.weight))
        codes = isinstance(layer, _CODES)
        kept = layer.buffers() if codes else [layer.get_parameter("weight")]
        done.bytes_after += sum(t.nbytes for t in kept)
    for name, module in experts.items():
        files = {part: found.get(f"{name}.{part}", {}) for part in _matrices_of(module)}
        new = _experts(name, module, files, tensors) if all(files.values()) else None
        if new is None:
            done.skipped[name] = "its weights are not quantized in the files"
            continue
        if isinstance(new, NVFP4Experts):
            first = next(iter(next(iter(files.values())).values()))
            new.weight_only = not _quantizes_inputs(name, first.removesuffix("."), config)
            if new.weight_only:
                new.forget_input_gsas()
        made.append((module, new))
        done.replaced.append(name)
        weights = [module.get_parameter(part) for part in files]
        done.bytes_before += sum(p.nbytes for p in weights)
        quantized |= {id(p) for p in weights}
        codes = isinstance(new, _CODES)
        done.bytes_after += sum(t.nbytes for t in (new.buffers() if codes else weights))
    done.finish(before, quantized)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    done.replaced.sort(key=order.__getitem__)
    codes_of = {id(module): layer for module, layer in made if isinstance(layer, _CODES)}
    rest, on_meta = _rest(model, tensors, tied, codes_of)
    if not made and config.get("config_groups"):
        raise ValueError(
            f"directory: expected quantized weights, as its config.json says, got {directory}, "
            "where none are. Its weights may be older than config.json; save the model again"
        )
    if on_meta and is_pretrained(model):
        fill_buffers(model)
    for module, layer in made:
        replace_everywhere(model, module, layer)
    model.load_state_dict(rest, strict=False, assign=on_meta)
    if on_meta:
        _tie_again(model, tied)
    if any(isinstance(layer, _CODES) for _, layer in made):
        attach(model)
    return done


def quantized_modules(model: nn.Module, directory: Path) -> dict[str, nn.Module]:
    """The linears and experts of a model that are quantized in a folder, by name.

    Args:
        model: as for `load_compressed_tensors`.
        directory: as there.
    """
    scaled = {
        name.rpartition(".")[0] + "."
        for name in tensor_names(directory)
        if name.endswith((".weight_scale", ".weight_scale_inv"))
    }
    candidates: dict[str, nn.Module] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            candidates[f"{name}.weight"] = module
            shapes[f"{name}.weight"] = (0, 0)
        elif experts_refusal(module) is None:
            sizes = {f"{name}.{part}": size for part, size in _matrices_of(module).items()}
            candidates |= dict.fromkeys(sizes, module)
            shapes |= sizes
    return {
        place.name.rpartition(".")[0]: candidates[place.name]
        for file_name, place in places_in_file(model, shapes).items()
        if file_name.removesuffix("weight") in scaled
    }


def _matrices_of(experts: nn.Module) -> dict[str, tuple[int, int]]:
    """The tensors of experts and their numbers of matrices: experts, and pieces per expert."""
    return {
        projection.name: (experts.get_parameter(projection.name).shape[0], projection.pieces)
        for projection in projections_of(experts)
    }


def _check_unconverted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, CONVERTED):
            raise ValueError(
                f"model: expected an unconverted model, got {type(module).__name__} at {name!r}. "
                "Load into a new model, and convert nothing before"
            )


def _check_meta_buffers(model: nn.Module) -> None:
    """Rejects buffers on meta that no file contains, before the model is changed."""
    if is_pretrained(model):  # these compute theirs
        return
    saved = model.state_dict().keys()
    lost = [n for n, b in model.named_buffers() if b.is_meta and n not in saved]
    if lost:
        raise ValueError(
            f"model: expected buffers with values, or in the state_dict, got {', '.join(lost)} on "
            "meta, whose values no file has. Create them on a device, or compute them after "
            "model.to_empty(device='cpu')"
        )


def _shared_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that share a parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _taken(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Pops a tensor of the files."""
    if name not in tensors:
        raise _another_model(name)
    return tensors.pop(name)


def _nvfp4_parts(dot: str, shape: tuple[int, int], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pops the codes, block scales and gsa of a matrix from ``tensors``."""
    packed, scale = (_taken(f"{dot}weight_{part}", tensors) for part in ("packed", "scale"))
    gsa, input_gsa = (_gsa(f"{dot}{of}", tensors) for of in ("weight", "input"))
    if (
        gsa is None
        or packed.dtype != torch.uint8
        or tuple(packed.shape) != (shape[0], shape[1] // 2)
        or scale.element_size() != 1
        or tuple(scale.shape) != (shape[0], shape[1] // NVFP4_BLOCK)
    ):
        raise ValueError(
            f"{dot}weight_packed: expected NVFP4 for the linear's {shape} (uint8, a scale for 16 "
            f"elements, weight_global_scale), got {packed.dtype} {tuple(packed.shape)} with scales "
            f"{scale.dtype} {tuple(scale.shape)} and {'no' if gsa is None else 'a'} "
            "weight_global_scale"
        )
    parts = {"packed": packed, "scale": scale, "gsa": gsa}
    if input_gsa is not None:
        parts["input_gsa"] = input_gsa
    return parts


def _gsa(name: str, tensors: dict[str, Tensor]) -> Tensor | None:
    """Pops a gsa, or the global scale whose reciprocal it is, from ``tensors``; fp32 (1,)."""
    scale, gsa = (tensors.pop(f"{name}_{kind}", None) for kind in ("global_scale", "gsa"))
    if gsa is None:
        if scale is None:
            return None
        gsa = 1 / scale.to(torch.float32)
    gsa = gsa.to(torch.float32)
    is_infinite = scale is not None and scale.isinf().any()  # of a gsa that fp32 does not have
    if gsa.numel() != 1 or not 0 <= gsa.item() < math.inf or is_infinite:
        raise ValueError(
            f"{name}_global_scale: expected one positive number, got {(1 / gsa).tolist()}. Get "
            "the file again, or quantize the model with jitquant quantize"
        )
    return gsa.reshape(1)


def _nvfp4_layer(
    dot: str, linear: nn.Linear, tensors: dict[str, Tensor], weight_only: bool
) -> NVFP4Linear:
    """Takes the layer's parts out of ``tensors``, except the bias."""
    parts = _nvfp4_parts(dot, (linear.out_features, linear.in_features), tensors)
    if weight_only:
        parts.pop("input_gsa", None)
    device = linear.weight.device
    made = NVFP4Linear(
        *(linear.in_features, linear.out_features, linear.bias is not None),
        *(parts["packed"].device if device.type == "meta" else device, linear.weight.dtype),
        weight_only=weight_only,
    )
    state = {n if n == "input_gsa" else f"weight_{n}": t for n, t in parts.items()}
    made.load_state_dict(state, strict=False)
    return made.train(linear.training)


def _another_model(lost: str) -> ValueError:
    return ValueError(
        "directory: expected the files of this model, got those of another one: the files lack "
        f"{lost}"
    )


def _is_mxfp4(dot: str, tensors: dict[str, Tensor]) -> bool:
    """Whether a matrix is MXFP4: codes with byte scales and no global scale. The scales of FP8 may
    be bytes too."""
    scale = tensors.get(f"{dot}weight_scale")
    of_bytes = scale is not None and scale.dtype in (torch.uint8, E8M0_DTYPE)
    return of_bytes and f"{dot}weight_packed" in tensors


def _mxfp4_parts(
    dot: str, shape: tuple[int, int], tensors: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Pops the codes and exponents of a matrix from ``tensors``, both uint8."""
    codes, scales = tensors.pop(f"{dot}weight_packed"), tensors.pop(f"{dot}weight_scale")
    expected = (shape[0], shape[1] // 2), (shape[0], shape[1] // MXFP4_BLOCK)
    if (tuple(codes.shape), tuple(scales.shape)) != expected:
        raise ValueError(
            f"{dot}weight_packed: expected MXFP4 for the linear's {shape}, {expected[0]} with "
            f"scales {expected[1]}, got {tuple(codes.shape)} with scales {tuple(scales.shape)}"
        )
    return codes, scales.view(torch.uint8)


def _mxfp4_layer(dot: str, linear: nn.Linear, tensors: dict[str, Tensor]) -> MXFP4Linear:
    """Takes the layer's parts out of ``tensors``, except the bias."""
    rows, cols = linear.out_features, linear.in_features
    codes, scales = _mxfp4_parts(dot, (rows, cols), tensors)
    state = {"weight_packed": codes, "weight_scale": scales}
    device = linear.weight.device
    where = codes.device if device.type == "meta" else device
    made = MXFP4Linear(cols, rows, linear.bias is not None, where, linear.weight.dtype)
    made.load_state_dict(state, strict=False)
    return made.train(linear.training)


def _fp8_matrix(
    dot: str, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Pops a matrix in FP8 blocks from ``tensors`` and dequantizes it."""
    weight, scale = (_taken(f"{dot}{part}", tensors) for part in ("weight", "weight_scale"))
    if device.type != "meta":
        weight, scale = weight.to(device), scale.to(device)
    tensors.pop(f"{dot}input_scale", None)
    blocks = tuple(-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=False))
    if weight.dtype != torch.float8_e4m3fn or tuple(scale.shape) != blocks:
        raise ValueError(
            f"{dot}weight: expected float8_e4m3fn with a scale for each 128x128 block, {blocks}, "
            f"got {weight.dtype} {tuple(weight.shape)} with scales of shape {tuple(scale.shape)}. "
            "jitquant.nn has no layer for this format; inference engines and transformers alone "
            "(without jitquant_layers) read it"
        )
    q = QuantizedTensor(weight, scale.to(torch.float32), None, None, "fp8_block", BLOCK)
    return q.dequantize(dtype)


def _scale_format(dots: Iterable[str], tensors: Mapping[str, Tensor]) -> ScaleFormat | None:
    """With which a layer has the codes of matrices in FP8 blocks again, if scales are powers of
    two: others would round the weights a second time."""
    scales = (tensors[f"{dot}weight_scale"].to(torch.float32) for dot in dots)
    return "ue8m0" if all(bool((s.frexp().mantissa == 0.5).all()) for s in scales) else None


def _fp8_layer(dot: str, linear: nn.Linear, tensors: dict[str, Tensor]) -> Float8BlockwiseLinear:
    """Replaces the weight in ``tensors`` by the dequantized one."""
    own = linear.weight
    made = Float8BlockwiseLinear.from_linear(linear, scale_format=_scale_format([dot], tensors))
    tensors[f"{dot}weight"] = _fp8_matrix(dot, tensors, own.device, own.dtype)
    return made


def _experts(
    name: str,
    module: nn.Module,
    files: Mapping[str, Mapping[tuple[int, int], str]],
    tensors: dict[str, Tensor],
) -> NVFP4Experts | Float8BlockwiseExperts | None:
    """Experts from the files. Matrices in other formats are stacked.

    Args:
        name: of the experts in the model.
        module: the experts of the model.
        files: where each matrix is, by parameter, expert and piece.
        tensors: of the files, from which the matrices are taken.
    """
    if all(f"{name}.{part}_blocks" in tensors for part in files):
        parts_of = {
            part: (
                _taken(f"{name}.{part}_blocks", tensors),
                _taken(f"{name}.{part}_scales", tensors),
            )
            for part in files
        }
        return NVFP4Experts.from_mxfp4(module, parts_of)
    bases = [base for part in files.values() for base in part.values()]
    if all(_is_mxfp4(base, tensors) for base in bases):
        stacks: dict[str, tuple[Tensor, Tensor]] = {}
        for part, places in files.items():
            together = _projection(module, part).together
            experts, pieces = (max(numbers) + 1 for numbers in zip(*places, strict=True))
            _, rows, cols = _shape_of(module, part)
            found = {
                key: _mxfp4_parts(base, (rows // pieces, cols), tensors)
                for key, base in places.items()
            }
            codes, scales = (
                torch.stack(
                    [together([found[e, p][i] for p in range(pieces)]) for e in range(experts)]
                )
                for i in range(2)
            )
            stacks[part] = codes.view(*scales.shape, -1), scales
        _take_biases(name, module, files, tensors)
        return NVFP4Experts.from_mxfp4(module, stacks)
    if all(f"{base}weight_packed" in tensors for base in bases):
        parts: dict[str, Tensor] = {}
        for part, places in files.items():
            pieces = max(piece for _, piece in places) + 1
            _, rows, cols = _shape_of(module, part)
            each = {
                key: _nvfp4_parts(base, (rows // pieces, cols), tensors)
                for key, base in places.items()
            }
            experts = range(len(places) // pieces)
            together = _projection(module, part).together
            gsas = [[each[e, p]["gsa"] for p in range(pieces)] for e in experts]
            if any(not torch.equal(g, own[0]) for own in gsas for g in own):
                raise ValueError(
                    f"gate and up of an expert in {name}: expected one global scale, as inference "
                    "engines take it, got two. Quantize the model with jitquant quantize"
                )
            for kind in ("packed", "scale"):
                rows_of = [
                    together([each[e, p][kind].view(torch.uint8) for p in range(pieces)])
                    for e in experts
                ]
                stacked = torch.stack(rows_of)
                parts[f"{part}_{kind}"] = stacked if kind == "packed" else stacked.view(SCALE_DTYPE)
            parts[f"{part}_gsa"] = torch.cat([own[0] for own in gsas])
            static = [one["input_gsa"] for one in each.values() if "input_gsa" in one]
            if len(static) == len(each):
                parts[f"{part}_input_gsa"] = torch.stack(static).amax(0)
        _take_biases(name, module, files, tensors)
        return NVFP4Experts.from_parts(module, parts)
    fp8 = all(f"{base}weight_scale" in tensors for base in bases)
    if not fp8 and not all(f"{base}weight" in tensors for base in bases):
        return None  # reported with the other missing tensors
    scale_format = _scale_format(bases, tensors) if fp8 else None
    for part, places in files.items():
        own = module.get_parameter(part)
        pieces = max(piece for _, piece in places) + 1
        together = _projection(module, part).together
        stacked = torch.stack(
            [
                together(
                    [
                        _fp8_matrix(places[e, p], tensors, own.device, own.dtype)
                        if fp8
                        else tensors.pop(f"{places[e, p]}weight")
                        for p in range(pieces)
                    ]
                )
                for e in range(own.shape[0])
            ]
        )
        transposed = bool(getattr(module, "is_transposed", False))
        tensors[f"{name}.{part}"] = (
            stacked.transpose(-2, -1).contiguous() if transposed else stacked
        )
    _take_biases(name, module, files, tensors)
    return Float8BlockwiseExperts(module, scale_format=scale_format) if fp8 else None


def _take_biases(
    name: str,
    module: nn.Module,
    files: Mapping[str, Mapping[tuple[int, int], str]],
    tensors: dict[str, Tensor],
) -> None:
    """Stacks the biases of experts in ``tensors``, if the model has any."""
    for part, places in files.items():
        if getattr(module, f"{part}_bias", None) is None:
            continue
        absent = [f"{base}bias" for base in places.values() if f"{base}bias" not in tensors]
        if absent:
            raise _another_model(absent[0])
        together = _projection(module, part).together
        experts, pieces = (max(numbers) + 1 for numbers in zip(*places, strict=True))
        tensors[f"{name}.{part}_bias"] = torch.stack(
            [
                together([tensors.pop(f"{places[e, p]}bias") for p in range(pieces)])
                for e in range(experts)
            ]
        )


def _projection(experts: nn.Module, name: str) -> Projection:
    return next(p for p in projections_of(experts) if p.name == name)


def _shape_of(experts: nn.Module, name: str) -> tuple[int, ...]:
    """(E, N, K) of a tensor of experts."""
    e, n, k = experts.get_parameter(name).shape
    return (e, k, n) if getattr(experts, "is_transposed", False) else (e, n, k)


def _rest(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    tied: list[list[str]],
    codes_of: Mapping[int, nn.Module],
) -> tuple[dict[str, Tensor], bool]:
    """Finds the place of what is left of the files, and changes nothing.

    Args:
        model: before anything is replaced.
        tensors: of the files, without what the layers have that have codes.
        tied: names that share a parameter.
        codes_of: layers that have codes, by the ids of the modules that they will replace.

    Returns:
        Tensors by name in the model, and whether some of these are on meta there.

    Raises:
        ValueError: the files have other names or shapes than the model.
    """
    gone: set[str] = set()
    filled: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if (layer := codes_of.get(id(module))) is not None:
            dot = f"{name}." if name else ""
            gone |= {f"{dot}{part}" for part in module.state_dict() if not part.endswith("bias")}
            filled |= {f"{dot}{part}": t for part, t in layer.state_dict().items()}
    own = model.state_dict().items()
    kept = {n: t for n, t in own if isinstance(t, Tensor) and n not in gone}
    state = kept | filled
    wanted = {name: (0, 0) for name in kept if name not in tensors}
    names = {name: place.name for name, place in places_in_file(model, wanted).items()}
    named = {names.get(name, name): t for name, t in tensors.items()}
    on_meta = any(t.is_meta for t in state.values())
    for name, tensor in named.items():
        if tensor.dtype in _CODE_DTYPES and name in state and state[name].dtype in INPUT_DTYPES:
            raise ValueError(
                f"directory: expected {state[name].dtype}, or codes with scales, for {name}, got "
                f"{tensor.dtype} without scales that are known. Download the files again, or "
                "quantize the model with jitquant quantize"
            )
    if on_meta:
        named = {n: t.to(state[n].dtype) if n in state else t for n, t in named.items()}
    for group in tied:
        given = next((named[name] for name in group if name in named), None)
        if given is not None:
            named |= {name: given for name in group if name in state and name not in named}
    shapes = {
        n: torch.empty(t.shape, dtype=state[n].dtype if n in state else t.dtype, device="meta")
        for n, t in named.items()
    }
    missing, unexpected = _try_to_load(model, shapes)
    absent = [n for n in missing if n not in gone]
    unexpected = [n for n in unexpected if not n.endswith(_OF_CACHES)]
    unexpected += [n for n in named if n in gone and n not in filled]
    if absent or unexpected:
        raise ValueError(
            "directory: expected the files of this model, got those of another one: the files lack "
            f"{', '.join(absent) or 'nothing'} and have {', '.join(unexpected) or 'nothing'} "
            "besides"
        )
    return named, on_meta


def _try_to_load(model: nn.Module, shapes: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """The names that ``load_state_dict`` misses and does not expect. Leaves the model as it is.

    Args:
        model: any.
        shapes: tensors on meta.

    Raises:
        ValueError: a shape is another one than in the model.
    """
    kept = [(m.__dict__, m._parameters, m._buffers) for m in model.modules()]
    try:
        for attributes, parameters, buffers in kept:
            attributes["_parameters"] = {
                n: None if p is None else nn.Parameter(p.detach().to("meta"), p.requires_grad)
                for n, p in parameters.items()
            }
            attributes["_buffers"] = {
                n: None if b is None else b.to("meta") for n, b in buffers.items()
            }
        missing, unexpected = model.load_state_dict(shapes, strict=False, assign=True)
        return missing, unexpected
    except RuntimeError as error:
        raise ValueError(
            f"directory: expected the files of this model, got those of another one: {error}"
        ) from error
    finally:
        for attributes, parameters, buffers in kept:
            attributes |= {"_parameters": parameters, "_buffers": buffers}


def _tie_again(model: nn.Module, tied: list[list[str]]) -> None:
    """Ties parameters again that loading by assignment has separated."""
    for first, *others in tied:
        try:
            parameter = model.get_parameter(first)
        except AttributeError:  # the layer is another now
            continue
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)


def _quantization_config(directory: Path) -> dict[str, Any]:
    """The ``quantization_config`` of a folder; ModelOpt may have it in a separate file.

    Raises:
        FileNotFoundError, ValueError: as `load_compressed_tensors`.
    """
    path, aside = directory / "config.json", directory / "hf_quant_config.json"
    config = object_in(path, read_config(directory, "directory"), "quantization_config")
    _check_transforms(path, config)
    if config.get("quant_method") is None and aside.is_file():
        own = object_in(aside, read_json(aside), "quantization")
        config = {**own, "quant_method": "modelopt"}
    method = config.get("quant_method")
    if method not in (METHOD, "modelopt", "fp8", "mxfp4"):
        raise ValueError(
            f"quant_method in {path}: expected one of {METHOD!r}, 'modelopt', 'fp8', 'mxfp4', got "
            f"{method!r}"
        )
    return config


def _check_transforms(path: Path, config: dict[str, Any]) -> None:
    """Rejects files whose inputs or outputs are to be transformed, as their weights are already."""
    transforms = object_in(path, config, "transform_config").get("config_groups") or {}
    locations = {a.get("location") for g in transforms.values() for a in g.get("apply") or ()}
    online = sorted(map(str, locations - {"weight_input", "weight_output"}))
    if online:
        raise ValueError(
            f"transform_config in {path}: expected transforms of weights only, got those at "
            f"{', '.join(online)}, which layers of jitquant.nn do not compute. Quantize the model "
            "with jitquant quantize"
        )


def _quantizes_inputs(in_model: str, in_files: str, config: Mapping[str, Any]) -> bool:
    """Whether the input of an NVFP4 matrix is quantized to NVFP4 too.

    Args:
        in_model, in_files: its names, without ``weight``.
        config: of the folder.

    Raises:
        ValueError: inputs are in a format of ModelOpt that is not known.
    """
    if config["quant_method"] == "modelopt":
        algorithm = str(config.get("quant_algo"))
        if algorithm not in ("NVFP4", "W4A16_NVFP4"):
            raise ValueError(
                f"quant_algo of {in_files}: expected 'NVFP4' or 'W4A16_NVFP4', got {algorithm!r}. "
                "jitquant.nn has no layer for its inputs; quantize the model with jitquant quantize"
            )
        return algorithm == "NVFP4"
    if matches(in_files, config.get(DYNAMIC_INPUTS) or ()):
        return True
    groups = (config.get("config_groups") or {}).values()
    targets = [(g, g.get("targets") or ()) for g in groups]
    named = [g for g, each in targets if matches(in_files, each) or matches(in_model, each)]
    of_the_class = [g for g, each in targets if "Linear" in each]
    inputs: list[dict[str, Any]]
    inputs = [g.get("input_activations") or {} for g in named or of_the_class or groups]
    return any(i.items() >= _NVFP4_INPUTS.items() for i in inputs)


def read_quantized(directory: Path, method: str) -> dict[str, Tensor]:
    """The tensors of a folder, with their parts named as in compressed-tensors.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: inputs are to be multiplied by something first.
    """
    tensors = _read(directory)
    if method == "fp8":
        return {name.replace("weight_scale_inv", "weight_scale"): t for name, t in tensors.items()}
    if method == "modelopt":
        smoothed = next((name for name in tensors if name.endswith(".pre_quant_scale")), None)
        if smoothed is not None:
            raise ValueError(
                f"directory: expected weights for inputs as they are, got {smoothed} in "
                f"{directory}: AWQ, whose inputs are multiplied by it. Quantize the model with "
                "jitquant quantize"
            )
        return dict(_of_modelopt(name, t) for name, t in tensors.items())
    return tensors


def _of_modelopt(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name.endswith(".weight_scale_2"):
        return name.removesuffix("scale_2") + "gsa", tensor.to(torch.float32).reshape(1)
    if name.endswith(".input_scale"):
        return name.removesuffix("scale") + "gsa", tensor
    if name.endswith(".weight") and tensor.dtype == torch.uint8:
        return f"{name}_packed", tensor
    return name, tensor


def tensor_names(directory: Path) -> set[str]:
    """The names of all tensors in the files of a folder."""
    return {name for file in _files(directory) for name in read_header(file)}


def _read(directory: Path) -> dict[str, Tensor]:
    load_file, _ = safetensors_functions()
    index = read_index(directory, "directory") or {}
    tensors: dict[str, Tensor] = {}
    for file in _files(directory):
        read_header(file)  # its errors say which file is broken, and how
        tensors |= {
            n: t for n, t in load_file(file).items() if index.get(n, file.name) == file.name
        }
    return tensors


def _files(directory: Path) -> list[Path]:
    index = read_index(directory, "directory")
    if index is not None:
        return [directory / name for name in sorted(set(index.values()))]
    whole = directory / WHOLE
    if not whole.is_file():
        raise FileNotFoundError(
            f"directory: expected a folder with {whole.name} or {INDEX}, got {directory}, which "
            "has neither"
        )
    return [whole]
