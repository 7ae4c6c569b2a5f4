"""`report`: the accuracy of each linear of a model in each number format."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from jitquant.formats import GROUP_EPS_MIN, INPUT_DTYPES, one_of
from jitquant.nn._calibration import Inputs, call_model, decibels, mib
from jitquant.nn.float8 import Float8BlockwiseLinear
from jitquant.nn.mxfp4 import MXFP4Linear
from jitquant.nn.nvfp4 import NVFP4Linear
from jitquant.numerics.linear import refold_e4m3
from jitquant.ops import quantize_block, quantize_fp8, quantize_per_token_group
from jitquant.ops.nvfp4 import quantize_nvfp4, quantize_weight_nvfp4

if TYPE_CHECKING:
    from rich.table import Table

Quantizer = Callable[[Tensor], Any]
Operand = Literal["output", "activation", "weight"]


class _Refolded:
    """An NVFP4 weight, rounded for products in FP8."""

    def __init__(self, weight: Tensor) -> None:
        q = quantize_weight_nvfp4(weight)
        self._data, scale_inv = refold_e4m3(q.x_fp4, q.x_sf)
        self._factor = (q.gsa * scale_inv)[:, None]
        self._cols = weight.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self._data.float()[:, : self._cols] * self._factor).to(dtype)


FORMATS: dict[str, tuple[Quantizer, Quantizer]] = {
    "nvfp4": (quantize_nvfp4, quantize_weight_nvfp4),
    "nvfp4_fp8": (lambda x: quantize_fp8(x, granularity="row"), _Refolded),
    "fp8_block": (
        lambda x: quantize_per_token_group(x, eps=GROUP_EPS_MIN),
        lambda w: quantize_block(w, eps=GROUP_EPS_MIN),
    ),
    "fp8_row": (
        lambda x: quantize_fp8(x, granularity="row"),
        lambda w: quantize_fp8(w, granularity="row"),
    ),
    "int8": (
        lambda x: quantize_per_token_group(x, dtype=torch.int8),
        lambda w: quantize_block(w, dtype=torch.int8),
    ),
}
"""How activation and weight are quantized in each format of a report."""

_OPERANDS = ("output", "activation", "weight")
_CHUNK = 1 << 26  # elements of a product that are compared at a time
_SHOWN = 8  # parameters that are named
_COLORS = ("#c44e52", "#4c72b0", "#55a868", "#8172b3", "#ccb974")
_MARKERS = "osD^v"


@dataclass
class LayerReport:
    """The SQNR of one linear in dB, by format; infinite without noise.

    Attributes:
        name: in the model.
        tokens: rows of all of its calls.
        in_features, out_features: of the layer.
        input_amax: the largest magnitude of its input, for static scales; NaN if it contains one.
        output: SQNR of the product of quantized activation and quantized weight, without bias.
        activation, weight: SQNR of either alone.
    """

    name: str
    tokens: int
    in_features: int
    out_features: int
    input_amax: float
    output: dict[str, float] = field(default_factory=dict)
    activation: dict[str, float] = field(default_factory=dict)
    weight: dict[str, float] = field(default_factory=dict)

    @property
    def fp8_loss(self) -> float:
        """How much products in FP8 lower the weight's SQNR, in dB; NaN if not measured.

        Negative if they raise it, as for uniformly distributed weights.
        """
        before, after = (self.weight.get(name, math.nan) for name in ("nvfp4", "nvfp4_fp8"))
        return 0.0 if before == after else before - after


@dataclass
class ModelReport:
    """The result of `report`; ``print`` it, or read the layers.

    Attributes:
        formats: in the requested order.
        layers: in the order of their first calls.
        skipped: names of linears that were not measured, and why.
        elements, weight_bytes: number and size of the elements of the measured weights.
        model_elements, model_bytes: of all parameters of the model.
        left: elements of each parameter that was not measured, by name: of skipped linears, and of
            anything outside of linears, such as three-dimensional experts.
    """

    formats: tuple[str, ...]
    layers: list[LayerReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    elements: int = 0
    weight_bytes: int = 0
    model_elements: int = 0
    model_bytes: int = 0
    left: dict[str, int] = field(default_factory=dict)

    def mean(self, format: str, of: Operand = "output") -> float:
        """Mean over the layers with noise, in dB; NaN if there are none."""
        finite = [value for value in self._values(format, of) if math.isfinite(value)]
        return sum(finite) / len(finite) if finite else math.nan

    def lowest(self, format: str, of: Operand = "output") -> float:
        """Of the layers, in dB; NaN if there is none."""
        return min(self._values(format, of), default=math.nan)

    def _values(self, format: str, of: Operand) -> list[float]:
        one_of("format", format, self.formats)
        one_of("of", of, _OPERANDS)
        return [getattr(layer, of)[format] for layer in self.layers]

    def table(self, of: Operand = "output") -> Table:
        """For ``rich.print``: a row for each layer, a column for each format, in dB."""
        from rich import box
        from rich.table import Table

        one_of("of", of, _OPERANDS)
        view = Table(
            title=f"SQNR of the {of} in dB",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
        )
        view.add_column("layer", overflow="fold")
        view.add_column("tokens x\nin x out", no_wrap=True)
        for name in self.formats:
            view.add_column(name, justify="right", no_wrap=True)
        changes = self._fp8_changes() if of == "weight" else []
        if changes:
            view.add_column("change by\nnvfp4_fp8", justify="right", no_wrap=True)
        for i, layer in enumerate(self.layers):
            shape = f"{layer.tokens}x{layer.in_features}x{layer.out_features}"
            values = getattr(layer, of)
            change = [f"{changes[i]:+.2f}"] if changes else []
            view.add_row(
                layer.name, shape, *(f"{values[name]:.1f}" for name in self.formats), *change
            )
        view.add_section()
        view.add_row("mean", "", *(f"{self.mean(name, of):.1f}" for name in self.formats))
        view.add_row("lowest", "", *(f"{self.lowest(name, of):.1f}" for name in self.formats))
        return view

    def _fp8_changes(self) -> list[float]:
        """``-fp8_loss`` of each layer; empty if it was not measured."""
        both = {"nvfp4", "nvfp4_fp8"} <= set(self.formats)
        return [0.0 - layer.fp8_loss for layer in self.layers] if both else []

    def __str__(self) -> str:
        import io

        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False)
        console.print(self.table())
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        if changes := self._fp8_changes():
            worst = min(range(len(changes)), key=lambda i: changes[i])
            lines.append(
                "  FP8 products change the SQNR of weights by "
                f"{sum(changes) / len(changes):+.2f} dB, at worst {changes[worst]:+.2f} "
                f"({self.layers[worst].name})"
            )
        share = self.elements / max(1, self.model_elements)
        lines.append(
            f"  {self.elements:,} of {self.model_elements:,} parameters measured ({share:.1%}), "
            f"{mib(self.weight_bytes)} of {mib(self.model_bytes)}"
        )
        lines += [f"  not measured: {name}: {why}" for name, why in self.skipped.items()]
        largest = sorted(self.left.items(), key=lambda item: -item[1])
        lines += [
            f"  not measured: {name}: {size:,} parameters in no linear"
            for name, size in largest[:_SHOWN]
            if name.rpartition(".")[0] not in self.skipped
        ]
        return "\n".join(lines)

    def picture(self, path: str | os.PathLike[str], of: Operand = "output") -> None:
        """Plots the table, with a marker for each layer and format.

        Args:
            path: of the file; its suffix selects the format: .png, .svg, .pdf.
            of: "output", "activation" or "weight".

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no layer was measured.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "a picture needs matplotlib, which is not installed: pip install matplotlib"
            ) from error
        one_of("of", of, _OPERANDS)
        if not self.layers:
            raise ValueError(
                "report: expected layers that were measured, got none. print(report) says why"
            )
        names = _short([layer.name for layer in self.layers])
        width = min(24.0, max(7.0, 0.3 * len(names)))
        figure = Figure(figsize=(width, 5.2), layout="constrained")
        axes = figure.add_subplot()
        for i, name in enumerate(self.formats):
            axes.plot(
                [v if math.isfinite(v) else math.nan for v in self._values(name, of)],
                marker=_MARKERS[i % len(_MARKERS)],
                color=_COLORS[i % len(_COLORS)],
                markersize=5.5,
                linestyle="none",
                label=f"{name} (mean {self.mean(name, of):.1f} dB)",
            )
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlim(-0.7, len(names) - 0.3)
        axes.set_ylabel(f"SQNR of the {of} in dB (higher is better)")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
        figure.savefig(path, dpi=150)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; what is infinite or not measured as None."""
        plain = asdict(self)
        plain["formats"] = list(self.formats)
        for layer, found in zip(plain["layers"], self.layers, strict=True):
            layer["input_amax"] = _finite(found.input_amax)
            layer["fp8_loss"] = _finite(found.fp8_loss)
            for of in _OPERANDS:
                layer[of] = {name: _finite(value) for name, value in layer[of].items()}
        return plain


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _short(names: list[str]) -> list[str]:
    """Names without their common prefix."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return [".".join(p[shared:]) for p in parts]


class _Energy:
    """Signal and noise, summed in fp64 where the tensors are."""

    def __init__(self) -> None:
        self.signal: Tensor | float = 0.0
        self.noise: Tensor | float = 0.0

    def add(self, exact: Tensor, approximate: Tensor) -> None:
        self.signal = self.signal + exact.square().sum(dtype=torch.float64)
        self.noise = self.noise + (exact - approximate).square().sum(dtype=torch.float64)

    def decibels(self) -> float:
        return decibels(float(self.signal), float(self.noise))


class _Measured:
    """One linear while the model runs."""

    def __init__(self, linear: nn.Linear, formats: Sequence[str]) -> None:
        self.linear = linear
        self.formats = formats
        self.tokens = 0
        self.amax: Tensor | None = None
        self.why = "its forward was not called"
        self.energies = {of: {name: _Energy() for name in formats} for of in _OPERANDS}

    @torch.no_grad()
    def call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or x.dtype not in INPUT_DTYPES:
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            self.why = f"its input is {given}"
            return
        x = x.detach().reshape(-1, x.shape[-1])
        if x.numel() == 0:
            self.why = "its input had no rows"
            return
        with torch.autocast(x.device.type, enabled=False):
            self._measure(x if x.stride(-1) == 1 else x.contiguous())

    def _measure(self, x: Tensor) -> None:
        weight = self.linear.weight.detach()
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        exact_x, exact_w = x.float(), weight.float()
        amax = exact_x.abs().max()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        rows = max(1, _CHUNK // weight.shape[0])
        parts = [slice(begin, begin + rows) for begin in range(0, x.shape[0], rows)]
        kept = exact_x @ exact_w.t() if len(parts) == 1 else None
        for name in self.formats:
            of_x, of_w = FORMATS[name]
            x_hat = of_x(x).dequantize(torch.float32)
            w_hat = of_w(weight).dequantize(torch.float32)
            self.energies["activation"][name].add(exact_x, x_hat)
            if self.tokens == 0:
                self.energies["weight"][name].add(exact_w, w_hat)
            for part in parts:
                exact = exact_x[part] @ exact_w.t() if kept is None else kept
                self.energies["output"][name].add(exact, x_hat[part] @ w_hat.t())
        self.tokens += x.shape[0]

    def result(self, name: str) -> LayerReport:
        sizes = (self.linear.in_features, self.linear.out_features)
        amax = math.nan if self.amax is None else self.amax.item()
        made = LayerReport(name, self.tokens, *sizes, amax)
        for of, energies in self.energies.items():
            setattr(made, of, {name: energy.decibels() for name, energy in energies.items()})
        return made


def report(
    model: nn.Module,
    inputs: Inputs,
    *,
    formats: Sequence[str] = tuple(FORMATS),
    filter: Callable[[str, nn.Linear], bool] | None = None,
) -> ModelReport:
    """Runs a model once and measures the error of each of its linears in each format.

    Each linear gets its input from the unquantized model. Input and weight are quantized and
    dequantized, and their product in fp32 is compared with that of the originals. Errors that
    accumulate over layers are not included: to measure these, convert the model and compare its
    outputs.

    - "nvfp4": as `NVFP4Linear`.
    - "nvfp4_fp8": as `NVFP4Linear` with ``weight_only`` and ``compute="fp8"``: the NVFP4 weight
      rounded to E4M3 with a power of two for each row; inputs in E4M3 with a scale for each token.
      The SQNR of the weight includes this rounding. Compared with "nvfp4", normally distributed
      weights lose about 0.2 dB; uniform ones, as in a new ``nn.Linear``, gain 0.1 dB. ``fp8_loss``
      is the loss of each layer.
    - "fp8_block": as `Float8BlockwiseLinear`: 1x128 by 128x128.
    - "fp8_row": E4M3, a scale for each token and each output feature.
    - "int8": 1x128 by 128x128.

    The model is not changed: it runs once, in its current mode, without gradients, and hooks are
    removed even after an error. Padding tokens count like others.

    Args:
        model: any module, on the device of its inputs.
        inputs: the arguments of the model: a tensor, positional arguments, or a mapping of keyword
            arguments, such as the result of a tokenizer.
        formats: any of the five.
        filter: called with the name and the module of each linear; False skips it.

    Returns:
        SQNR by layer, and what was not measured and why.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a format is not one of the five.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    formats = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in formats:
        one_of("formats", name, tuple(FORMATS))
    result = ModelReport(formats)
    measured: dict[str, _Measured] = {}
    for name, module in model.named_modules():
        if isinstance(module, (NVFP4Linear, MXFP4Linear)):
            kind = "NVFP4" if isinstance(module, NVFP4Linear) else "MXFP4"
            result.skipped[name] = f"its weight is in {kind} already"
        elif isinstance(module, nn.Linear):
            why = _unfit(module)
            if why is None and filter is not None and not filter(name, module):
                why = "refused by filter"
            if why is None:
                measured[name] = _Measured(module, formats)
            else:
                result.skipped[name] = why
    order: dict[str, None] = {}

    def hook(name: str) -> Callable[..., None]:
        def before(*arguments: Any) -> None:
            order.setdefault(name)
            measured[name].call(*arguments)

        return before

    handles = []
    try:
        for name, one in measured.items():
            handles.append(one.linear.register_forward_pre_hook(hook(name), with_kwargs=True))
        with torch.no_grad():
            call_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for name in (*order, *(name for name in measured if name not in order)):
        if measured[name].tokens:
            result.layers.append(measured[name].result(name))
        else:
            result.skipped[name] = measured[name].why
    parameters = dict(model.named_parameters())
    seen = {id(measured[layer.name].linear.weight) for layer in result.layers}
    result.left = {name: p.numel() for name, p in parameters.items() if id(p) not in seen}
    result.model_elements = sum(p.numel() for p in parameters.values())
    result.model_bytes = sum(p.nbytes for p in parameters.values())
    result.elements = result.model_elements - sum(result.left.values())
    result.weight_bytes = sum(p.nbytes for p in parameters.values() if id(p) in seen)
    return result


def _unfit(linear: nn.Linear) -> str | None:
    """Why a linear cannot be measured."""
    if type(linear) not in (nn.Linear, Float8BlockwiseLinear):
        return f"it is a {type(linear).__name__}, which may compute something else"
    weight = linear.weight
    if weight.dtype not in INPUT_DTYPES:
        return f"its weight is {weight.dtype}"
    if weight.is_meta:
        return "its weight is on meta, without values"
    if weight.numel() == 0:
        return f"its weight has the shape {tuple(weight.shape)}"
    return None
