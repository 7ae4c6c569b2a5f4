"""`convert`: replaces the linears of a model by quantized layers, and reports what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from jitquant.formats import (
    COMPUTES,
    INPUT_DTYPES,
    MXFP4_BLOCK,
    MXFP4_SCALINGS,
    SELECTS,
    Compute,
    Mxfp4Scaling,
    Select,
    one_of,
)
from jitquant.nn._calibration import (
    Calibration,
    check_statistics,
    lowest,
    mib,
    output_sqnr,
    static_gsa,
)
from jitquant.nn._hugging_face import is_pretrained
from jitquant.nn._rounding import WEIGHT_ROUNDINGS, WeightRounding, quantized_weights
from jitquant.nn._targets import (
    FUSED_LAYERS,
    as_families,
    as_patterns,
    check_targets,
    families,
    idle,
    ignoring,
    refusal,
    unused,
)
from jitquant.nn.experts import (
    Float8BlockwiseExperts,
    NVFP4Experts,
    has_experts,
    projections_of,
)
from jitquant.nn.experts import refusal as experts_refusal
from jitquant.nn.float8 import Float8BlockwiseLinear
from jitquant.nn.mxfp4 import MXFP4Linear
from jitquant.nn.nvfp4 import NVFP4Linear
from jitquant.nn.nvfp4_training import NVFP4TrainingLinear, NVFP4TrainingRecipe
from jitquant.ops.recipes import quantize_mxfp4
from jitquant.tensors.nvfp4 import NVFP4Tensor

LinearRecipe = Literal["fp8_block", "nvfp4", "nvfp4a16", "mxfp4"]
Kind = (
    type[Float8BlockwiseLinear] | type[NVFP4Linear] | type[MXFP4Linear] | type[NVFP4TrainingLinear]
)
LAYERS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "fp8_block": (Float8BlockwiseLinear, {}),
    "nvfp4": (NVFP4Linear, {}),
    "nvfp4a16": (NVFP4Linear, {"weight_only": True}),
    "mxfp4": (MXFP4Linear, {}),
}
_TRAINING = "nvfp4_training"
_CODES = (NVFP4Linear, MXFP4Linear, NVFP4Experts)
"""What has codes in place of its weights."""
_EXPERTS: dict[str, type[Float8BlockwiseExperts] | type[NVFP4Experts]] = {
    "fp8_block": Float8BlockwiseExperts,
    "nvfp4": NVFP4Experts,
    "nvfp4a16": NVFP4Experts,
}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
# They read the weights of their linears past forward, in eval mode at least.
_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass
class Conversion:
    """The result of `convert`.

    Attributes:
        recipe: the requested recipe.
        replaced: names of the replaced linears and experts, with each name that a layer has.
        skipped: names of those that were left unchanged, and why.
        bytes_before, bytes_after: size of the replaced weights, without biases.
        elements: number of elements of the replaced weights.
        model_elements, model_bytes: number and size of all parameters of the model, before.
        left: elements of each parameter that is not quantized, by name, in linears or elsewhere.
        in_fp8: names of the linears that ``fp8_share`` keeps in FP8.
        sqnr: with ``fp8_share``: the SQNR of each linear in NVFP4, in dB, by name.
        uncalibrated: names of linears and experts without inputs in the calibration. They are
            rounded like "mse" instead of "gptq", and have no static scale. Single experts that no
            token chose are rounded like "mse" too, but not listed.
        idle: patterns of ``ignore`` that mean no module, and the nearest name.
    """

    recipe: str
    replaced: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    elements: int = 0
    model_elements: int = 0
    model_bytes: int = 0
    left: dict[str, int] = field(default_factory=dict)
    in_fp8: list[str] = field(default_factory=list)
    sqnr: dict[str, float] = field(default_factory=dict)
    uncalibrated: list[str] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        count = len(self.replaced) + len(self.skipped)
        lines = [
            f"{self.recipe}: {len(self.replaced)} of {count} layers replaced, weights "
            f"{mib(self.bytes_before)} -> {mib(self.bytes_after)}"
        ]
        if self.model_elements:
            lines.append(
                f"  {self.elements:,} of {self.model_elements:,} parameters quantized "
                f"({self.elements / self.model_elements:.1%}), {mib(self.bytes_before)} of "
                f"{mib(self.model_bytes)}"
            )
        lines += [f"  in FP8: {name}: {self.sqnr[name]:.1f} dB in NVFP4" for name in self.in_fp8]
        lines += [f"  not in the calibration: {name}" for name in self.uncalibrated]
        lines += [f"  {unused(pattern, near)}" for pattern, near in self.idle.items()]
        lines += [f"  unchanged: {name}: {why}" for name, why in self.skipped.items()]
        largest = sorted(self.left.items(), key=lambda item: -item[1])
        shown = [(n, size) for n, size in largest if n.rpartition(".")[0] not in self.skipped]
        lines += [f"  not quantized: {name}: {size:,}" for name, size in shown[:_SHOWN]]
        if len(shown) > _SHOWN:
            rest = sum(size for _, size in shown[_SHOWN:])
            lines.append(f"  not quantized: {len(shown) - _SHOWN} more: {rest:,}")
        return "\n".join(lines)

    def count(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Records the size of a model before anything is replaced, and returns its parameters."""
        parameters = dict(model.named_parameters())
        self.model_elements = sum(p.numel() for p in parameters.values())
        self.model_bytes = sum(p.nbytes for p in parameters.values())
        return parameters

    def finish(self, before: dict[str, nn.Parameter], quantized: set[int]) -> None:
        """Records what is not quantized.

        Args:
            before: from `count`.
            quantized: ids of the parameters that were quantized.
        """
        self.left = {n: p.numel() for n, p in before.items() if id(p) not in quantized}
        self.elements = self.model_elements - sum(self.left.values())


_SHOWN = 8


def convert(
    model: nn.Module,
    recipe: LinearRecipe | NVFP4TrainingRecipe,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    targets: str | Sequence[str] = "all",
    ignore: str | Sequence[str] | None = None,
    fused_layers: Sequence[Sequence[str]] = FUSED_LAYERS,
    rounding: WeightRounding = "nearest",
    calibration: Calibration | None = None,
    static_input_scales: bool = False,
    fp8_share: float = 0.0,
    compute: Compute = "exact",
    input_select: Select = "none",
    scaling: Mxfp4Scaling = "even",
) -> Conversion:
    """Replaces the linears and the experts of a model, in place.

    These are skipped, with a reason:

    - heads (``lm_head``, the result of ``get_output_embeddings``), routers and their gates, and
      what engines do not quantize in DeepSeek's models, unless ``ignore`` says otherwise
    - layers that ``targets`` or ``filter`` exclude
    - subclasses of ``nn.Linear``, which may compute something else, and linears with hooks
    - linears in ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``, which read weights
      directly, and ``dt_proj``, which Mamba's mixer reads so
    - weights that cannot be quantized and, for NVFP4 and MXFP4, weights shared with another module,
      such as tied embeddings

    A linear that is used in several places is replaced by one layer in all of them.

    In NVFP4, layers that engines fuse (q, k, v; gate, up) share one gsa, the largest of theirs,
    because engines take one for all of them.

    Afterwards ``save_pretrained`` of a transformers model in NVFP4 writes the layout of
    `save_compressed_tensors`.

    Args:
        model: any module that contains linears.
        recipe: "fp8_block": `Float8BlockwiseLinear`, with the same parameters; "nvfp4":
            `NVFP4Linear`; "nvfp4a16": the same, but inputs stay in bf16 or fp16; "mxfp4":
            `MXFP4Linear`, also with unquantized inputs. An `NVFP4TrainingRecipe`:
            `NVFP4TrainingLinear`, with the same parameters. Experts whose weights are
            three-dimensional tensors, as in transformers 5, become
            `jitquant.nn.Float8BlockwiseExperts` or `jitquant.nn.NVFP4Experts`; the last two
            recipes skip them.
        filter: called with the name and the module of each linear and of experts; False skips it.
            To skip by name use ``ignore``.
        targets: "all", "attention", "mlp", "experts", or patterns: names or their last parts, with
            ``*`` and ``?``, or regular expressions after ``re:``.
        ignore: patterns to skip, such as ``("lm_head", "model.layers.0.*")``; None: heads and
            routers, as above; ``()``: nothing.
        fused_layers: linears that engines fuse into one product, as tuples of the last parts of
            their names: ``[("q_proj", "k_proj", "v_proj"), ("mlp.gate", "mlp.up")]``. The linears
            of a tuple share one gsa in NVFP4. ``()``: each linear has its own gsa.
        rounding: of weights to NVFP4; kernels, files and speed are the same. "nearest"; "4over6":
            a block's amax maps to 6 or 4, whichever has the smaller error; "mse": searches the
            block scales and the gsa for the smallest squared error; "gptq": like "mse", and
            compensates errors if inputs are correlated. For different roundings per layer call
            `convert` several times with ``targets``.
        calibration: of this model, from `calibrate`: for "gptq", which rounds layers that are not
            in it like "mse", and for the next two arguments.
        static_input_scales: whether to quantize the inputs of "nvfp4" with the amax of the
            calibration. This saves a launch, and writes the scales that engines need to files.
            Experts of a layer share one, the largest of theirs.
        fp8_share: 0 to 1: the share of linears that become `Float8BlockwiseLinear` instead, those
            with the lowest SQNR of the outputs in NVFP4, or of the weights without statistics of
            the inputs. Layers that engines fuse stay together. Experts stay in NVFP4.
        compute: of `NVFP4Linear`, with recipe "nvfp4a16": "fp8" multiplies 256 rows or
            more in FP8; experts stay exact. "fp8_loss" from `report` shows its cost.
        input_select: of `NVFP4Linear`, with recipe "nvfp4": "4over6_mse" and the like quantize
            inputs more accurately. Files do not have it, and experts do not use it.
        scaling: of weights, with recipe "mxfp4", as for `jitquant.quantize_mxfp4`.

    Returns:
        What was replaced and what was not, including all parameters of the model; ``print`` it.

    Raises:
        ValueError: ``recipe`` is unknown, ``model`` is a linear itself, a weight has NaN or
            infinity in it, or arguments conflict. Nothing is replaced then.
        TypeError: ``model`` is not a module, or ``filter`` is not callable.
    """
    plan = Plan(
        recipe,
        filter=filter,
        targets=targets,
        ignore=ignore,
        fused_layers=fused_layers,
        rounding=rounding,
        calibration=calibration,
        static_input_scales=static_input_scales,
        fp8_share=fp8_share,
        compute=compute,
        input_select=input_select,
        scaling=scaling,
    )
    return plan.convert(model)


class Rounded(NamedTuple):
    """A weight in NVFP4, and the gsa of its inputs if known."""

    weight: NVFP4Tensor
    input_gsa: Tensor | None


QuantizedLinear = Rounded | tuple[Tensor, Tensor]
Quantized = QuantizedLinear | dict[str, dict[str, Tensor]]
"""A weight of `NVFP4Linear`, of `MXFP4Linear`, or the projections of `NVFP4Experts` by name."""


class Chosen(NamedTuple):
    """Which layers of a model are replaced.

    Attributes:
        modules: these, by name.
        skipped: the others, and why.
        families: linears that share a gsa, two or more each.
        places: all names of a module, by its id.
    """

    modules: dict[str, nn.Module]
    skipped: dict[str, str]
    families: list[list[str]]
    places: dict[int, list[str]]


class Plan:
    """The arguments of `convert`, checked, and what it does with them.

    Attributes:
        recipe: its name.
        kind: of the layers that replace linears.
    """

    def __init__(
        self,
        recipe: LinearRecipe | NVFP4TrainingRecipe,
        *,
        filter: Callable[[str, nn.Module], bool] | None,
        targets: str | Sequence[str],
        ignore: str | Sequence[str] | None,
        fused_layers: Sequence[Sequence[str]],
        rounding: WeightRounding,
        calibration: Calibration | None,
        static_input_scales: bool,
        fp8_share: float,
        compute: Compute,
        input_select: Select,
        scaling: Mxfp4Scaling,
    ) -> None:
        self.kind: Kind
        self.how: dict[str, Any]
        if isinstance(recipe, NVFP4TrainingRecipe):
            self.kind, self.how, self.recipe = NVFP4TrainingLinear, {"recipe": recipe}, _TRAINING
        else:
            if recipe not in tuple(LAYERS):  # it may have no hash
                raise ValueError(
                    f"recipe: expected one of {', '.join(map(repr, LAYERS))}, or an "
                    f"NVFP4TrainingRecipe, got {recipe!r}"
                )
            (self.kind, self.how), self.recipe = LAYERS[recipe], recipe
        check_filter(filter)
        accuracy = (rounding, calibration, static_input_scales, fp8_share, compute, input_select)
        check_arguments(self.recipe, *accuracy, scaling)
        self.filter, self.targets = filter, targets
        self.ignored = None if ignore is None else as_patterns("ignore", ignore)
        self.fused_layers = as_families(fused_layers)
        self.rounding: WeightRounding = rounding
        self.known = {} if calibration is None else calibration.layers
        self.static_input_scales, self.fp8_share = static_input_scales, fp8_share
        self.compute, self.input_select = compute, input_select
        self.scaling: Mxfp4Scaling = scaling

    @property
    def keeps_weights(self) -> bool:
        """Whether a layer may need its weight after it was quantized."""
        return self.kind not in _CODES or self.fp8_share > 0

    def choose(self, model: nn.Module) -> Chosen:
        """The layers to replace.

        Raises:
            TypeError, ValueError: as `convert`.
        """
        check_root(model, f"For a single linear call {self.kind.__name__}.from_linear(model)")
        parents = parents_of(model)
        holders: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), []).append(name)
        places: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            places.setdefault(id(module), []).append(name)
        head = _output_embeddings(model)
        shapes = {n: m.weight.shape for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        chosen: dict[str, nn.Module] = {}
        skipped: dict[str, str] = {}
        check_targets(self.targets, [n for n, m in model.named_modules() if _is_candidate(m)])
        for name, module in model.named_modules():
            if not _is_candidate(module):
                continue
            why: str | None = None
            if isinstance(module, CONVERTED):
                why = f"already converted to {type(module).__name__}"
                if isinstance(module, nn.Linear) and not isinstance(module, self.kind):
                    why += "; its state_dict fits the plain model, which can be converted"
            elif isinstance(module, nn.Linear):
                mine = {f"{place}.weight" for place in places[id(module)]}
                others = [n for n in holders.get(id(module.weight), []) if n not in mine]
                why = linear_refusal(module, parents[id(module)])
                if why is None and self.kind in _CODES and others:
                    why = f"its weight is also {others[0]}"
                if why is None and self.kind is MXFP4Linear and module.in_features % MXFP4_BLOCK:
                    why = f"its in_features is not a multiple of {MXFP4_BLOCK}"
                if why is None and module is head and self.ignored is None:
                    why = "a head, left alone by default"
            else:
                why = experts_refusal(module)
                if why is None and self.recipe not in _EXPERTS:
                    why = f"experts have no layer for {self.recipe}"
                if why is None and any(getattr(module, hooks) for hooks in _HOOKS):
                    why = "it has hooks, which would be lost"
            if why is None:
                why = refusal(name, shapes, self.targets, self.ignored)
            if why is None and self.filter is not None and not self.filter(name, module):
                why = "refused by filter"
            if why is None:
                chosen[name] = module
            else:
                skipped[name] = why
        linears = {n: m for n, m in chosen.items() if isinstance(m, nn.Linear)}
        together: list[list[str]] = []
        if self.kind is NVFP4Linear:
            together = families(linears, shapes, self.fused_layers)
            for name, module in chosen.items():
                self._check_calibration(name, module)
        return Chosen(chosen, skipped, together, places)

    def quantize(self, weights: Mapping[str, Tensor]) -> dict[str, QuantizedLinear]:
        """The weights of linears, by their names; in NVFP4 they share a gsa, and an input gsa."""
        if self.kind is MXFP4Linear:
            return {
                name: quantize_mxfp4(weight.detach().contiguous(), scaling=self.scaling)
                for name, weight in weights.items()
            }
        found = [self.known.get(name) for name in weights]
        moments = [None if statistics is None else statistics.moment for statistics in found]
        with _named(*weights):
            made = quantized_weights([*weights.values()], self.rounding, moments)
        amaxes = [statistics.amax for statistics in found if statistics is not None]
        static = static_gsa(amaxes) if amaxes else None
        return {
            name: Rounded(weight, None if static is None else static.to(weight.device, copy=True))
            for name, weight in zip(weights, made, strict=True)
        }

    def quantize_experts(self, name: str, projection: str, weight: Tensor) -> dict[str, Tensor]:
        """A projection (E, N, K) of `NVFP4Experts`; ``name`` is that of the experts."""
        moments = self._moments(name, projection, weight)
        with _named(f"{name}.{projection}"):
            return NVFP4Experts.quantize(projection, weight, self.rounding, moments)

    def convert(
        self, model: nn.Module, quantized: Mapping[str, Quantized] | None = None
    ) -> Conversion:
        """Replaces the layers of a model, once all of the new ones are made.

        Args:
            model: as for `convert`.
            quantized: weights that are quantized already, by the names of their layers. Those of
                the model have their shape, dtype and device, and are not read.

        Raises:
            TypeError, ValueError: as `convert`.
        """
        quantized = {} if quantized is None else quantized
        chosen, skipped, together, places = self.choose(model)
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        done = Conversion(self.recipe, skipped=skipped, idle=idle(self.ignored or (), names))
        before = done.count(model)
        for name, module in chosen.items():
            parts = quantized.get(name)
            for parameter, weight in _weights(module).items():
                if parts is None or (isinstance(parts, dict) and parameter not in parts):
                    check_finite(name, weight)
        ready = {n: q for n, q in quantized.items() if not isinstance(q, dict)}
        linears = {n: m for n, m in chosen.items() if isinstance(m, nn.Linear)}
        relatives = {name: family for family in together for name in family}
        if self.kind is NVFP4Linear and (self.rounding == "gptq" or self.static_input_scales):
            done.uncalibrated = [name for name in linears if name not in self.known]

        def quantize(name: str) -> Any:
            if name not in ready:
                weights = {n: linears[n].weight for n in relatives.get(name, [name])}
                ready.update(self.quantize(weights))
            return ready[name]

        if self.fp8_share:
            for name, linear in linears.items():
                found, only = self.known.get(name), bool(self.how.get("weight_only"))
                done.sqnr[name] = output_sqnr(linear.weight, quantize(name).weight, found, only)
            groups = [relatives.get(name, [name]) for name in linears]
            done.in_fp8 = lowest(done.sqnr, groups, int(self.fp8_share * len(linears) + 0.5))
        seen: set[int] = set()
        layers: list[tuple[nn.Module, nn.Module]] = []
        for name, module in chosen.items():
            weights = [p for p in _weights(module).values() if id(p) not in seen]
            seen |= {id(p) for p in weights}
            done.bytes_before += sum(p.nbytes for p in weights)
            made: nn.Module
            if not isinstance(module, nn.Linear):
                made = self._experts(name, module, quantized.get(name), done)
            elif name in done.in_fp8:
                made = Float8BlockwiseLinear.from_linear(module)
            elif self.kind is NVFP4Linear:
                weight, gsa = quantize(name)
                made = NVFP4Linear.from_linear(
                    module,
                    weight=weight,
                    input_gsa=gsa if self.static_input_scales else None,
                    compute=self.compute,
                    input_select=self.input_select,
                    **self.how,
                )
            elif self.kind is MXFP4Linear:
                made = MXFP4Linear.from_linear(module, weight=quantize(name))
            else:
                made = self.kind.from_linear(module, **self.how)
            ready.pop(name, None)
            layers.append((module, made))
            is_codes = isinstance(made, _CODES)
            done.bytes_after += sum(t.nbytes for t in (made.buffers() if is_codes else weights))
            done.replaced.append(name)
        for module, made in layers:
            _replace(model, places[id(module)], made)
        done.finish(before, seen)
        if done.replaced and self.kind in _CODES:  # in FP8 the parameters are what they were
            attach(model)
        return done

    def _experts(
        self, name: str, module: nn.Module, quantized: Quantized | None, done: Conversion
    ) -> nn.Module:
        kind = _EXPERTS[self.recipe]
        if kind is Float8BlockwiseExperts:
            return Float8BlockwiseExperts(module)
        assert quantized is None or isinstance(quantized, dict)
        names = [projection.name for projection in projections_of(module)]
        moments = {n: self._moments(name, n, module.get_parameter(n)) for n in names}
        if self.rounding == "gptq" and all(m is None for each in moments.values() for m in each):
            done.uncalibrated.append(name)
        gsas: dict[str, Tensor] = {}
        if self.static_input_scales:
            gsas = self._input_gsas_of_experts(name, module)
            if not gsas and name not in done.uncalibrated:
                done.uncalibrated.append(name)
        with _named(name):
            return NVFP4Experts(
                module,
                rounding=self.rounding,
                moments=moments,
                input_gsas=gsas,
                quantized=quantized,
                **self.how,
            )

    def _check_calibration(self, name: str, module: nn.Module) -> None:
        """Checks what is known of the inputs of a linear, or of each of some experts."""
        moment = self.rounding == "gptq" or self.fp8_share > 0
        sizes: dict[str, int] = {}
        if isinstance(module, nn.Linear):
            sizes[name] = module.in_features
        else:
            for projection in projections_of(module):
                experts, *matrix = module.get_parameter(projection.name).shape
                columns = matrix[0 if module.is_transposed else 1]
                sizes |= {f"{name}.{projection.name}.{e}": columns for e in range(experts)}
        for part, columns in sizes.items():
            if part in self.known:
                check_statistics(part, self.known[part], columns, moment)

    def _moments(self, name: str, projection: str, weight: Tensor) -> list[Tensor | None]:
        """Of the inputs of each expert, on the device of the weight; None if it is not needed."""
        if self.rounding != "gptq":
            return [None] * weight.shape[0]
        found = [self.known.get(f"{name}.{projection}.{e}") for e in range(weight.shape[0])]
        return [None if f is None else f.moment.to(weight.device) for f in found]

    def _input_gsas_of_experts(self, name: str, experts: nn.Module) -> dict[str, Tensor]:
        """Of each projection the largest of its experts, as engines take it; none without
        inputs."""
        made: dict[str, Tensor] = {}
        for projection in projections_of(experts):
            weight = experts.get_parameter(projection.name)
            found = [
                self.known.get(f"{name}.{projection.name}.{e}") for e in range(weight.shape[0])
            ]
            amaxes = [f.amax for f in found if f is not None]
            if amaxes:
                made[projection.name] = static_gsa(amaxes).to(weight.device)
        return made


@contextmanager
def _named(*layers: str) -> Iterator[None]:
    """Has an error of a calibration say which layers it is for."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"calibration: expected statistics that {', '.join(layers)} can be rounded with, got "
            f"others ({error}). Calibrate again"
        ) from error


def check_arguments(
    recipe: str,
    rounding: str,
    calibration: Calibration | None,
    static_input_scales: bool,
    fp8_share: float,
    compute: str,
    input_select: str,
    scaling: str,
) -> None:
    """Checks that arguments of `convert` are compatible.

    Raises:
        TypeError, ValueError: they are not.
    """
    one_of("compute", compute, COMPUTES)
    if compute == "fp8" and recipe != "nvfp4a16":
        raise ValueError(
            f"compute: expected 'exact' with recipe {recipe!r}, got 'fp8'. It needs recipe "
            "'nvfp4a16', whose inputs are not quantized to NVFP4"
        )
    one_of("input_select", input_select, SELECTS)
    if input_select != "none" and recipe != "nvfp4":
        raise ValueError(
            f"input_select: expected 'none' with recipe {recipe!r}, got {input_select!r}. Other "
            "values are for recipe 'nvfp4', which quantizes inputs"
        )
    one_of("scaling", scaling, MXFP4_SCALINGS)
    if scaling != "even" and recipe != "mxfp4":
        raise ValueError(
            f"scaling: expected 'even' with recipe {recipe!r}, got {scaling!r}. Other values are "
            "for recipe 'mxfp4'"
        )
    one_of("rounding", rounding, WEIGHT_ROUNDINGS)
    if calibration is not None and not isinstance(calibration, Calibration):
        raise TypeError(
            f"calibration: expected what calibrate returned, got {type(calibration).__name__}"
        )
    if not 0 <= fp8_share <= 1:
        raise ValueError(f"fp8_share: expected a number from 0 to 1, such as 0.05, got {fp8_share}")
    is_nvfp4 = recipe in ("nvfp4", "nvfp4a16")
    given = {"rounding": (rounding, "nearest"), "fp8_share": (fp8_share, 0)}
    for name, (value, default) in given.items():
        if value != default and not is_nvfp4:
            raise ValueError(
                f"{name}: expected {default!r} with recipe {recipe!r}, got {value!r}. Other values "
                "are for NVFP4"
            )
    if static_input_scales and recipe != "nvfp4":
        raise ValueError(f"static_input_scales: expected False with recipe {recipe!r}, got True")
    for name, is_given in {
        "rounding 'gptq'": rounding == "gptq",
        "static_input_scales": static_input_scales,
    }.items():
        if is_given and calibration is None:
            raise ValueError(
                f"calibration: expected one with {name}, got None. Make it with "
                "jitquant.nn.calibrate(model, batches)"
            )


CONVERTED = (*_CODES, NVFP4TrainingLinear, Float8BlockwiseLinear, Float8BlockwiseExperts)


def check_root(model: object, way_out: str) -> None:
    """Checks that layers of a model can be replaced: that it is not one itself.

    Raises:
        TypeError, ValueError: it is, or no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.Linear) or has_experts(model):
        raise ValueError(
            f"model: expected a module that contains linear layers, got {type(model).__name__}. "
            f"{way_out}"
        )


def parents_of(model: nn.Module) -> dict[int, nn.Module]:
    """A module that each module of a model is in, by the id of the latter."""
    return {id(child): parent for parent in model.modules() for child in parent.children()}


def _is_candidate(module: nn.Module) -> bool:
    """Whether a module is a linear or experts, converted or not."""
    return isinstance(module, (nn.Linear, *CONVERTED)) or has_experts(module)


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a linear or of experts that get quantized, by their names in it."""
    if isinstance(module, nn.Linear):
        return {"weight": module.get_parameter("weight")}
    return {n: p for n, p in module.named_parameters(recurse=False) if not n.endswith("_bias")}


def check_finite(name: str, weight: Tensor) -> None:
    """Checks a weight of a layer.

    Raises:
        ValueError: it has NaN or infinity in it, or is a DTensor.
    """
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            f"weight of {name}: expected a tensor, got a DTensor. Call convert before fully_shard "
            "or parallelize_module"
        )
    if not weight.is_meta and not bool(weight.detach().isfinite().all()):
        raise ValueError(
            f"weight of {name}: expected finite values, got NaN or infinity. Check where the "
            f"weights come from, or {ignoring(name)}"
        )


def check_filter(filter: object) -> None:
    """Checks that a filter is callable.

    Raises:
        TypeError: it is not.
    """
    if filter is not None and not callable(filter):
        raise TypeError(
            "filter: expected a function of a layer's name and module that returns whether to "
            f"convert it, got {filter!r}. To leave layers out by name use ignore="
        )


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """The head of a transformers model."""
    try:
        head = getattr(model, "get_output_embeddings", lambda: None)()
    except NotImplementedError:
        return None
    return head if isinstance(head, nn.Module) else None


def attach(model: nn.Module) -> None:
    """Makes ``save_pretrained`` of a converted transformers model write files for engines."""
    if is_pretrained(model):
        from jitquant.nn._hf_quantizer import attach_quantizer

        attach_quantizer(model)


def replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces a module everywhere in a model."""
    named = model.named_modules(remove_duplicate=False)
    _replace(model, [name for name, module in named if module is old], new)


def _replace(model: nn.Module, places: list[str], new: nn.Module) -> None:
    for place in places:
        owner, _, attribute = place.rpartition(".")
        setattr(model.get_submodule(owner), attribute, new)


def linear_refusal(linear: nn.Linear, parent: nn.Module) -> str | None:
    """Why a linear cannot be replaced."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, which may compute something else"
    if isinstance(parent, _READERS):
        return f"{type(parent).__name__} reads its weight past its forward"
    if any(getattr(linear, hooks) for hooks in _HOOKS):
        return "it has hooks, which would be lost"
    if linear.weight.dtype not in INPUT_DTYPES:
        return f"its weight is {linear.weight.dtype}"
    if 0 in linear.weight.shape:
        return f"its weight has the shape {tuple(linear.weight.shape)}"
    return None
