"""transformers: quantize while a model is loaded, and run quantized folders on these layers.

    from jitquant.integrations.transformers import JitquantConfig, jitquant_layers

    config = JitquantConfig("nvfp4")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    model.save_pretrained(other)                # compressed-tensors, which engines read
    with jitquant_layers():
        model = AutoModelForCausalLM.from_pretrained(other)

Importing this module registers the quantizer "jitquant", and "modelopt" if nobody else has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from jitquant.formats import COMPUTES, Compute, Mxfp4Scaling, Select, one_of
from jitquant.nn import Conversion, load_compressed_tensors
from jitquant.nn._calibration import Calibration
from jitquant.nn._convert import LAYERS, LinearRecipe, Plan
from jitquant.nn._hf_quantizer import SavingQuantizer, attach_quantizer
from jitquant.nn._load import quantized_modules, tensor_names
from jitquant.nn._rounding import WeightRounding
from jitquant.nn._targets import FUSED_LAYERS, as_families
from jitquant.nn._while_loading import WhileLoading

__all__ = ["JitquantConfig", "jitquant_layers"]

METHOD = "jitquant"
FILES = ("compressed-tensors", "modelopt")


class JitquantConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How ``from_pretrained`` quantizes a model.

    Attributes:
        recipe, targets, ignore, fused_layers, rounding, static_input_scales, fp8_share, compute,
            input_select, scaling: as for `jitquant.nn.convert`.
        calibration: path of the file that ``calibrate(model, batches).save(path)`` wrote, or None.
    """

    def __init__(
        self,
        recipe: LinearRecipe = "nvfp4",
        *,
        targets: str | Sequence[str] = "all",
        ignore: str | Sequence[str] | None = None,
        fused_layers: Sequence[Sequence[str]] = FUSED_LAYERS,
        rounding: WeightRounding = "nearest",
        calibration: str | PathLike[str] | None = None,
        static_input_scales: bool = False,
        fp8_share: float = 0.0,
        compute: Compute = "exact",
        input_select: Select = "none",
        scaling: Mxfp4Scaling = "even",
        **others: Any,
    ) -> None:
        """The arguments of `jitquant.nn.convert`, except ``filter``.

        Raises:
            TypeError, ValueError: one is invalid or unknown, or they conflict.
            FileNotFoundError: ``calibration`` does not exist.
        """
        unknown = others.keys() - {"quant_method"}  # which transformers passes
        if unknown:
            raise TypeError(
                f"JitquantConfig: expected arguments of jitquant.nn.convert, except filter, got "
                f"{min(unknown)!r}"
            )
        one_of("recipe", recipe, tuple(LAYERS))
        self.quant_method = METHOD
        self.recipe, self.targets, self.ignore = recipe, targets, ignore
        self.fused_layers = [list(family) for family in as_families(fused_layers)]  # as JSON has it
        self.rounding, self.fp8_share = rounding, fp8_share
        self.static_input_scales = static_input_scales
        self.compute, self.input_select, self.scaling = compute, input_select, scaling
        self.calibration = None if calibration is None else str(calibration)
        self.plan()  # before a model is read

    def plan(self) -> Plan:
        """What `jitquant.nn.convert` would do with these arguments; reads the calibration.

        Raises:
            TypeError, ValueError, FileNotFoundError: as `JitquantConfig`.
        """
        found = None if self.calibration is None else Calibration.load(self.calibration)
        return Plan(
            self.recipe,
            filter=None,
            targets=self.targets,
            ignore=self.ignore,
            fused_layers=self.fused_layers,
            rounding=self.rounding,
            calibration=found,
            static_input_scales=self.static_input_scales,
            fp8_share=self.fp8_share,
            compute=self.compute,
            input_select=self.input_select,
            scaling=self.scaling,
        )


class JitquantFilesConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` of a quantized folder, unchanged."""

    def __init__(self, **described: Any) -> None:
        self.quant_method = described.get("quant_method")
        self.described = described

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **_: Any) -> JitquantFilesConfig:
        """Of a folder's config.json."""
        return cls(**config_dict)

    def to_dict(self) -> dict[str, Any]:
        """See the base class."""
        return dict(self.described)


class JitquantQuantizer(SavingQuantizer):
    """Quantizes weights as they are read, or fills a model from quantized files.

    Attributes:
        done: what was converted or loaded.
        compute: of layers from files, as for `load_compressed_tensors`.
    """

    done: Conversion | None = None
    compute: Compute = "exact"

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._waiting: dict[str, nn.Module] = {}
        self._folder: Path | None = None
        self._loading: WhileLoading | None = None

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuses to offload a part of a model: its layers would be replaced, not moved."""
        devices = {str(d) for d in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError(
                f"device_map: expected GPUs that hold the whole model, or the CPU, got "
                f"{', '.join(sorted(devices))}. Layers of jitquant cannot be offloaded; give more "
                "GPUs or another recipe"
            )

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a parameter is quantized when it is read."""
        return self._loading is not None and self._loading.wants(model, param_name)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element, for what places layers on devices before they are read."""
        if self.param_needs_quantization(model, param_name):
            return _ELEMENT_SIZES[self.quantization_config.recipe]
        return float(param.element_size())

    def get_quantize_ops(self) -> ConversionOps:
        """What takes a weight that was read."""
        assert self._loading is not None
        return _Take(self._loading)

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Leaves Llama 4's experts in one tensor until it is known how the files have them."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            tied = getattr(model, "all_tied_weights_keys", None) or {}
            # transformers casts to the model's dtype before we see a weight. Those that the model
            # has in another dtype are converted once they are loaded.
            cast = [n for n, p in model.named_parameters() if p.dtype != torch.get_default_dtype()]
            kept = {*tied.keys(), *tied.values(), *cast}
            self._loading = WhileLoading(self.quantization_config.plan(), model, kept)
            return
        files = kwargs.get("checkpoint_files") or ()
        if not files:
            raise ValueError("checkpoint_files: expected those of a quantized folder, got none")
        self._folder = Path(files[0]).parent
        if any(".experts.0." in name for name in tensor_names(self._folder)):
            super()._convert_model_for_quantization(model)
        # transformers loads what is not quantized. The rest keeps its place, on meta, aside.
        for name, module in quantized_modules(model, self._folder).items():
            owner, _, attribute = name.rpartition(".")
            self._waiting[name] = module
            setattr(model.get_submodule(owner), attribute, _stand_in(module))
        model._keys_to_ignore_on_load_unexpected = {"."}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        attach_quantizer(model, self)
        if not self.pre_quantized:
            assert self._loading is not None
            loading, self._loading = self._loading, None
            self.done = loading.finish(model)
            return
        assert self._folder is not None
        # Those of the loading lack what was aside; None: the ones that transformers knows.
        self.conversions = None
        devices = {name: _device_near(model, name) for name in self._waiting}
        for name, module in self._waiting.items():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, module.eval())
        self.done = load_compressed_tensors(model, self._folder, compute=self.compute)
        for name, device in devices.items():
            model.get_submodule(name).to(device)
        self._waiting.clear()


_ELEMENT_SIZES = {"nvfp4": 0.5625, "nvfp4a16": 0.5625, "mxfp4": 0.59375}


class _Take(ConversionOps):  # type: ignore[misc]
    """The step of transformers in which a weight that was read is quantized.

    It returns only what it did not take, which transformers then puts into the model.
    """

    def __init__(self, loading: WhileLoading) -> None:
        self._loading = loading

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        model: Any = None,
        missing_keys: set[str] | None = None,
        **__: Any,
    ) -> dict[str, Any]:
        left: dict[str, Any] = {}
        for name in [*input_dict]:
            tensors = input_dict.pop(name)
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            if not self._loading.take(model, name, tensor):
                left[name] = tensors
            elif missing_keys is not None:
                missing_keys.discard(name)
        return left


def _stand_in(module: nn.Module) -> nn.Module:
    """A module without parameters that nevertheless has them as attributes, where the
    initialization of the module around it looks for them."""
    made = module.__class__.__new__(module.__class__)
    made.__dict__ = {**module.__dict__, **module._parameters, "_parameters": {}}
    return made


def _device_near(model: nn.Module, name: str) -> torch.device:
    """Where the nearest tensor around a module is."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        near = model.get_submodule(owner)
        for tensor in (*near.parameters(), *near.buffers()):
            if not tensor.is_meta:
                return tensor.device
    return torch.device("cpu")


def _register(method: str, config: type, quantizer: type) -> None:
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(method, config)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(method, quantizer)


_register(METHOD, JitquantConfig, JitquantQuantizer)
_register("modelopt", JitquantFilesConfig, JitquantQuantizer)


@contextlib.contextmanager
def jitquant_layers(compute: Compute = "exact") -> Iterator[None]:
    """A context in which ``from_pretrained`` runs quantized folders on the layers of `jitquant.nn`.

    For folders of compressed-tensors (NVFP4 and FP8 in blocks, including experts) and of ModelOpt
    in NVFP4. Without it, transformers decompresses the former with another library and computes in
    bf16.

    Args:
        compute: as for `jitquant.nn.load_compressed_tensors`.
    """
    one_of("compute", compute, COMPUTES)
    quantizer = type("JitquantQuantizer", (JitquantQuantizer,), {"compute": compute})
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    before = {method: (configs.get(method), quantizers.get(method)) for method in FILES}
    for method in FILES:
        configs[method], quantizers[method] = JitquantFilesConfig, quantizer
    try:
        yield
    finally:
        for method, (config, kept) in before.items():
            for mapping, value in ((configs, config), (quantizers, kept)):
                if value is None:
                    mapping.pop(method, None)
                else:
                    mapping[method] = value
