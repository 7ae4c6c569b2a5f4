"""Mixture-of-experts layers with three-dimensional weights and quantized products.

They replace the modules that transformers 5 marks with ``use_experts_implementation``:
``gate_up_proj`` and ``down_proj`` (E, N, K), or (E, K, N) in gpt-oss, and a forward that takes the
tokens, the experts of each token, and their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jitquant.formats import FP4_DTYPE, INPUT_DTYPES, NVFP4_BLOCK, SCALE_DTYPE, one_of
from jitquant.nn._codes import QuantizedModule
from jitquant.nn._grouped import grouped_linear
from jitquant.nn._linear import check_columns, check_input_gsa, check_same_dtype
from jitquant.nn._matmul import is_hopper
from jitquant.nn._rounding import WEIGHT_ROUNDINGS, WeightRounding, quantized_weights
from jitquant.nn._weights import KeepsQuantizedWeights, WeightCache
from jitquant.nn.float8 import ScaleFormat, multiply
from jitquant.numerics.nvfp4 import gsa_from_amax
from jitquant.ops.experts import EXPERTS, MOST_EXPERTS, MOST_TOP_K, nvfp4_grouped_linear
from jitquant.ops.nvfp4 import quantize_nvfp4
from jitquant.tensors.nvfp4 import NVFP4Tensor

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_TILE = 128
_DECODED = 2048  # rows up to which an expert's weight may be decoded again for every few rows


class Projection(NamedTuple):
    """One of the three-dimensional weights.

    Attributes:
        name: of the parameter.
        pieces: number of matrices per expert, such as 2 for gate and up.
        interleaved: whether their rows alternate.
    """

    name: str
    pieces: int
    interleaved: bool = False

    def rows(self, piece: int, total: int) -> slice:
        """Those of one matrix among all rows of an expert."""
        if self.interleaved:
            return slice(piece, None, self.pieces)
        size = total // self.pieces
        return slice(piece * size, (piece + 1) * size)

    def together(self, matrices: Sequence[Tensor], dim: int = 0) -> Tensor:
        """An expert's matrices as stored in the parameter; ``dim`` is that of the rows."""
        if not self.interleaved or len(matrices) == 1:
            return torch.cat(list(matrices), dim)
        at = dim % matrices[0].dim()
        return torch.stack(list(matrices), at + 1).flatten(at, at + 1)


def projections_of(experts: nn.Module) -> tuple[Projection, Projection]:
    """The two tensors of a module whose `refusal` is None, in the order of their products."""
    if not getattr(experts, "has_gate", True):
        return Projection("up_proj", 1), Projection("down_proj", 1)
    interleaved = not getattr(experts, "is_concatenated", True)
    return Projection("gate_up_proj", 2, interleaved), Projection("down_proj", 1)


def has_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of experts, recognized or not."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3


def refusal(module: nn.Module) -> str | None:
    """Why a module is not recognized as experts; None if it is."""
    own = {name: p for name, p in module.named_parameters(recurse=False) if p is not None}
    if not hasattr(module, "num_experts") or not hasattr(module, "is_transposed"):
        return "its forward is not known"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm after each expert"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are divided between processes"
    expected = {"down_proj", "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"}
    biases = {f"{name}_bias" for name in expected}
    if set(own) not in (expected, expected | biases):
        return f"its parameters are {', '.join(own)}"
    for name in expected:
        if own[name].dim() != 3 or own[name].dtype not in INPUT_DTYPES or own[name].numel() == 0:
            return f"{name} is {own[name].dtype} {tuple(own[name].shape)}"
    return None


class Experts(nn.Module):
    """Base class: routes tokens to experts and back.

    Attributes:
        num_experts: E.
        projections: the two weights, in the order of their products.
    """

    projections: tuple[Projection, Projection]

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.num_experts = int(original.num_experts)  # type: ignore[arg-type]
        self.has_gate = bool(getattr(original, "has_gate", True))
        self.is_transposed = bool(original.is_transposed)
        self.projections = projections_of(original)
        emptied = original.__class__.__new__(original.__class__)
        emptied.__dict__ = {**original.__dict__, "_parameters": {}}
        self._original = (emptied,)  # its activation; in a tuple it is not a module of this one
        self.train(original.training)

    def _project(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: (T, hidden).
            top_k_index: int (T, k), experts of each token; values outside of 0 to E - 1 are
                ignored.
            top_k_weights: (T, k).

        Returns:
            (T, hidden) of the dtype of ``hidden_states``.

        Raises:
            ValueError: the three are not of the same number of tokens.
        """
        tokens, k = top_k_index.shape
        if hidden_states.shape[0] != tokens or top_k_weights.shape != top_k_index.shape:
            raise ValueError(
                "top_k_index and top_k_weights: expected shape (T, k) for the T = "
                f"{hidden_states.shape[0]} rows of hidden_states, got {tuple(top_k_index.shape)} "
                f"and {tuple(top_k_weights.shape)}"
            )
        ignored = (top_k_index < 0) | (top_k_index >= self.num_experts)
        ids = top_k_index.masked_fill(ignored, self.num_experts)  # they come last
        expert, order = ids.reshape(-1).sort(stable=True)
        each = torch.arange(self.num_experts, device=expert.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, each, right=True)
        of_row = expert.clamp(max=self.num_experts - 1)
        x = hidden_states[order // k]
        up, down = (projection.name for projection in self.projections)
        inner: Any = self._original[0]
        h = self._biased(up, self._project(up, x, ends), of_row)
        h = inner._apply_gate(h) if self.has_gate else inner.act_fn(h)
        y = self._biased(down, self._project(down, h.to(x.dtype), ends), of_row)
        y = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        # Past the last expert (another process has it) there is nothing to add.
        y = y.masked_fill((expert >= self.num_experts).unsqueeze(-1), 0)
        back = torch.empty_like(y).index_copy(0, order, y)
        return back.view(tokens, k, y.shape[-1]).sum(1).to(hidden_states.dtype)

    def _biased(self, name: str, y: Tensor, of_row: Tensor) -> Tensor:
        bias = getattr(self, f"{name}_bias", None)
        return y if bias is None else y + bias[of_row].to(y.dtype)

    def _take_biases(self, original: nn.Module, frozen: bool) -> None:
        for name in (projection.name for projection in self.projections):
            bias = getattr(original, f"{name}_bias", None)
            if bias is not None and frozen:
                bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
            self.register_parameter(f"{name}_bias", bias)

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return f"num_experts={self.num_experts}"


class SwiGLUExperts(nn.Module):
    """What `NVFP4Experts.from_parts` asks of a module of experts with ``silu(gate) * up``, where
    there is none of transformers: sizes and the activation, with weights on meta."""

    is_transposed = False

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        """Sizes: E, H, and I, the columns of ``down_proj``."""
        super().__init__()
        self.num_experts = num_experts
        self.act_fn = nn.SiLU()
        for name, shape in (
            ("gate_up_proj", (num_experts, 2 * inner, hidden)),
            ("down_proj", (num_experts, hidden, inner)),
        ):
            empty = torch.empty(shape, device="meta", dtype=torch.bfloat16)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def _default_apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        y: Tensor = self.act_fn(gate) * up
        return y

    _apply_gate = _default_apply_gate  # by this name `NVFP4Experts` knows silu(gate) * up


class ObservedExperts(Experts):
    """Runs the unquantized experts one after another, and passes each input to a function."""

    def __init__(self, original: nn.Module, observe: Callable[[str, int, Tensor], None]) -> None:
        """Takes the parameters of a module of experts.

        Args:
            original: whose `refusal` is None.
            observe: called with the name of a projection, the expert, and the rows that it gets.
        """
        super().__init__(original)
        self._weights = {p.name: original.get_parameter(p.name).detach() for p in self.projections}
        self._observe = observe
        self._take_biases(original, frozen=False)

    def _project(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        weight = self._weights[name]
        weight = weight if self.is_transposed else weight.transpose(-2, -1)
        y = x.new_zeros((x.shape[0], weight.shape[-1]))
        for expert, rows in _rows_of_experts(ends):
            self._observe(name, expert, x[rows])
            y[rows] = x[rows] @ weight[expert]
        return y


class NVFP4Experts(Experts, QuantizedModule):
    """Experts for inference whose weights are stored in NVFP4, with one gsa for each expert's gate
    and up, and one for its down.

    Up to 2048 rows use `jitquant.nvfp4_grouped_linear`, which reads only the weights of experts
    that have rows, as they are stored. More rows use `jitquant.nn.grouped_linear`, unless they are
    not quantized.

    The weights have no gradient. The tokens have the gradient through the dequantized weights.

    Attributes:
        gate_up_proj_packed, down_proj_packed: uint8 (E, N, ceil(K / 16) * 8); ``up_proj_packed``
            without a gate.
        gate_up_proj_scale, ...: ``float8_e4m3fn`` (E, N, ceil(K / 16)).
        gate_up_proj_gsa, ...: fp32 (E,).
        gate_up_proj_input_gsa, ...: fp32 (1,), a calibrated gsa for the rows of all experts; None:
            computed in each call, which takes one more launch.
        gate_up_proj_bias, ...: (E, N) parameters without gradient, or None.
        columns: K of each projection.
    """

    columns: dict[str, int]

    def __init__(
        self,
        original: nn.Module,
        *,
        weight_only: bool = False,
        rounding: WeightRounding = "nearest",
        moments: Mapping[str, Sequence[Tensor | None]] | None = None,
        input_gsas: Mapping[str, Tensor] | None = None,
        quantized: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Takes the weights of a module of experts.

        Args:
            original: whose `refusal` is None. It keeps its parameters.
            rounding: of the weights, as for `convert`.
            moments: for "gptq": the moments of each expert's inputs, fp32 (K, K) or None, by the
                name of the projection. An expert without one is rounded like "mse".
            input_gsas: fp32 (1,) by the name of the projection: static gsas of the inputs.
            quantized: what `quantize` returned for a projection, by its name. Its weights in
                ``original`` are not read.
            weight_only: whether the tokens are not quantized, bfloat16 or float16. Then up to 2048
                pairs of a token and an expert (on Hopper any number, if both K are multiples of
                64) use `jitquant.nvfp4_experts`, if the activation is ``silu(gate) * up``, without
                biases, and both K are multiples of 16.

        Raises:
            TypeError: one of ``input_gsas`` is not fp32.
            ValueError: `refusal` has a reason, or an argument is not accepted.
        """
        parts: dict[str, Tensor] = {}
        _check(original)
        for name in (n for n in _PROJECTIONS if n in original._parameters):
            if quantized is not None and name in quantized:
                parts |= quantized[name]
                continue
            whole = original.get_parameter(name)
            weight = whole.transpose(-2, -1) if original.is_transposed else whole
            known = None if moments is None else moments[name]
            parts |= self.quantize(name, weight, rounding, known)
        names = tuple(projection.name for projection in projections_of(original))
        for name, gsa in (input_gsas or {}).items():
            one_of("input_gsas", name, names)
            check_input_gsa(gsa, f"input_gsas[{name!r}]")
            parts[f"{name}_input_gsa"] = gsa
        self._take(original, parts)
        self.weight_only = weight_only

    @staticmethod
    def quantize(
        name: str,
        weight: Tensor,
        rounding: WeightRounding = "nearest",
        moments: Sequence[Tensor | None] | None = None,
    ) -> dict[str, Tensor]:
        """The buffers of a projection, by name.

        Args:
            name: of the projection.
            weight: (E, N, K).
            rounding, moments: as for the class; the moments of this projection.

        Raises:
            ValueError: ``rounding`` is not accepted.
        """
        one_of("rounding", rounding, WEIGHT_ROUNDINGS)
        weight = weight.detach()
        experts, rows, _ = weight.shape
        if rounding == "nearest":
            gsa = gsa_from_amax(weight.abs().amax((1, 2)).float())
            q = quantize_nvfp4(weight.reshape(experts * rows, -1), gsa.repeat_interleave(rows))
            codes, scales = q.x_fp4_bytes, q.x_sf
        else:
            known = [None] * experts if moments is None else moments
            each = [
                quantized_weights([w], rounding, [moment])[0]
                for w, moment in zip(weight, known, strict=True)
            ]
            codes = torch.cat([q.x_fp4_bytes for q in each])
            scales = torch.cat([q.x_sf.view(torch.uint8) for q in each]).view(SCALE_DTYPE)
            gsa = torch.cat([q.gsa for q in each])
        return {
            f"{name}_packed": codes.view(experts, rows, -1),
            f"{name}_scale": scales.view(experts, rows, -1),
            f"{name}_gsa": gsa,
        }

    @classmethod
    def from_parts(cls, original: nn.Module, parts: dict[str, Tensor]) -> NVFP4Experts:
        """Experts whose weights are quantized already.

        Args:
            original: what they are in the model, perhaps on meta; its weights are not read.
            parts: the buffers by name.

        Raises:
            ValueError: `refusal` has a reason.
        """
        _check(original)
        made = cls.__new__(cls)
        made._take(original, parts)
        return made

    @classmethod
    def from_mxfp4(
        cls, original: nn.Module, parts: Mapping[str, tuple[Tensor, Tensor]]
    ) -> NVFP4Experts:
        """``weight_only`` experts with the values of weights in MXFP4, bit for bit.

        Args:
            original: what they are in the model, perhaps on meta; its weights are not read.
            parts: by the name of the projection, codes uint8 (E, N, K / 32, 16) and exponents uint8
                (E, N, K / 32), as in files of gpt-oss.

        Raises:
            ValueError: `refusal` has a reason, or the exponents of an expert span more than 17 (see
                `jitquant.NVFP4Tensor.from_mxfp4`).
        """
        found: dict[str, Tensor] = {}
        for name, (blocks, exponents) in parts.items():
            each = [
                NVFP4Tensor.from_mxfp4(codes.flatten(1), scales)
                for codes, scales in zip(blocks, exponents, strict=True)
            ]
            scales = torch.stack([q.x_sf.view(torch.uint8) for q in each])
            found[f"{name}_packed"] = torch.stack([q.x_fp4_bytes for q in each])
            found[f"{name}_scale"] = scales.view(SCALE_DTYPE)
            found[f"{name}_gsa"] = torch.cat([q.gsa for q in each])
        made = cls.from_parts(original, found)
        made.weight_only = True
        return made

    def _take(self, original: nn.Module, parts: dict[str, Tensor]) -> None:
        super().__init__(original)
        names = [projection.name for projection in self.projections]
        first = original.get_parameter(names[0])
        self.dtype = first.dtype
        self.weight_only = False
        self.columns = {}
        for name in names:
            shape = original.get_parameter(name).shape
            self.columns[name] = shape[-2] if self.is_transposed else shape[-1]
        static = [f"{name}_input_gsa" for name in names]
        self.quantized = tuple(dict.fromkeys((*parts, *static)))  # type: ignore[misc]
        for name in self.quantized:
            part = parts.get(name)
            device = part.device if part is not None and first.is_meta else first.device
            self.register_buffer(name, None if part is None else part.to(device))
        self._take_biases(original, frozen=True)

    def forget_input_gsas(self) -> None:
        """Has the gsas of inputs computed in each call, if inputs are quantized."""
        for projection in self.projections:
            self._buffers[f"{projection.name}_input_gsa"] = None

    def weight(self, name: str) -> NVFP4Tensor:
        """A projection's weights (E, N, K) as views of the buffers, with a gsa for each row."""
        packed, scale, gsa = (self.get_buffer(f"{name}_{p}") for p in ("packed", "scale", "gsa"))
        of_rows = gsa.repeat_interleave(packed.shape[1])
        cols = self.columns[name]
        return NVFP4Tensor(packed.view(FP4_DTYPE), scale, of_rows, cols=cols, granularity="row")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `Experts`, or by `jitquant.nvfp4_experts`."""
        if self._is_one_op(hidden_states, top_k_index, top_k_weights):
            arguments = {
                "x": hidden_states.contiguous(),
                "gate_up_fp4": self.get_buffer("gate_up_proj_packed"),
                "gate_up_sf": self.get_buffer("gate_up_proj_scale"),
                "gate_up_gsa": self.get_buffer("gate_up_proj_gsa"),
                "down_fp4": self.get_buffer("down_proj_packed"),
                "down_sf": self.get_buffer("down_proj_scale"),
                "down_gsa": self.get_buffer("down_proj_gsa"),
                "topk_ids": top_k_index.contiguous(),
                "topk_weights": top_k_weights.contiguous(),
                "dtype": None,
            }
            return EXPERTS.one_tensor(arguments, None)
        return super().forward(hidden_states, top_k_index, top_k_weights)

    def _is_one_op(self, x: Tensor, index: Tensor, weights: Tensor) -> bool:
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            return False
        inner: Any = self._original[0]
        gate = getattr(type(inner), "_apply_gate", None)
        bias = getattr(self, "gate_up_proj_bias", None)
        return (
            self.weight_only
            and self.has_gate
            and not self.projections[0].interleaved
            and bias is None
            and type(inner.act_fn).__name__ in ("SiLU", "SiLUActivation")  # PyTorch's and theirs
            and getattr(gate, "__name__", "") == "_default_apply_gate"  # act_fn(gate) * up
            and all(cols % NVFP4_BLOCK == 0 for cols in self.columns.values())
            and x.dtype in (torch.bfloat16, torch.float16)
            and index.dtype in (torch.int32, torch.int64)
            and (index.numel() <= _DECODED or self._is_tiled(x))
            and 1 <= index.shape[-1] <= MOST_TOP_K
            and self.num_experts <= MOST_EXPERTS
        )

    def _is_tiled(self, x: Tensor) -> bool:
        """Whether `jitquant.nvfp4_experts` decodes weights once for many rows."""
        return is_hopper(x.device) and all(cols % 64 == 0 for cols in self.columns.values())

    def _project(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = _Straight.apply(x, self, name, ends)  # type: ignore[no-untyped-call]
            return y
        return self._product(name, x, ends)

    def _product(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        if x.shape[0] == 0:
            rows = self.get_buffer(f"{name}_packed").shape[1]
            return x.new_empty((0, rows))
        weight = self.weight(name)
        if self.weight_only:
            return nvfp4_grouped_linear(x.detach().contiguous(), weight, ends, dtype=x.dtype)
        q = quantize_nvfp4(x.detach().contiguous(), getattr(self, f"{name}_input_gsa"))
        # Past some rows an expert decodes its weight too often: then all are dequantized once.
        multiply_rows = nvfp4_grouped_linear if x.shape[0] <= _DECODED else grouped_linear
        return multiply_rows(q, weight, ends, dtype=x.dtype)


class _Straight(torch.autograd.Function):
    """The grouped product, and the gradient of the tokens through the dequantized weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: NVFP4Experts, name: str, ends: Tensor) -> Tensor:
        ctx.experts, ctx.name, ctx.ends = experts, name, ends
        return experts._product(name, x, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.experts.weight(ctx.name).dequantize(grad.dtype)
        made = grad.new_zeros((grad.shape[0], weight.shape[-1]))
        for expert, rows in _rows_of_experts(ctx.ends):
            made[rows] = grad[rows] @ weight[expert]
        return made, None, None, None


class Float8BlockwiseExperts(KeepsQuantizedWeights, Experts):
    """Experts whose products are those of `jitquant.nn.Float8BlockwiseLinear`, forward and
    backward, with the very parameters of the module that it replaces.

    One product for each expert that has tokens, after another: the CPU reads how many each has.
    """

    def __init__(self, original: nn.Module, *, scale_format: ScaleFormat | None = None) -> None:
        """Takes the parameters of a module of experts.

        Args:
            original: whose `refusal` is None.
            scale_format: as for `jitquant.nn.Float8BlockwiseLinear`.

        Raises:
            ValueError: `refusal` has a reason, or scale_format is not accepted.
        """
        _check(original)
        one_of("scale_format", scale_format, ("float32", "ue8m0", None))
        super().__init__(original)
        self.scale_format = scale_format
        for name in (projection.name for projection in self.projections):
            self.register_parameter(name, original.get_parameter(name))
        self._take_biases(original, frozen=False)
        self._caches: dict[tuple[str, int, int], WeightCache] = {}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `Experts`; the states have the dtype of the weights, or any under autocast."""
        weight = self.get_parameter(self.projections[0].name)
        check_same_dtype(hidden_states, weight.dtype, "hidden_states")
        hidden = self.matrices(self.projections[0].name).shape[-1]
        check_columns(hidden_states.shape, hidden, "hidden_states")
        return super().forward(hidden_states, top_k_index, top_k_weights)

    def matrices(self, name: str) -> Tensor:
        """A projection's unquantized weights (E, N, K)."""
        weight = self.get_parameter(name)
        return weight.transpose(-2, -1) if self.is_transposed else weight

    def _project(self, name: str, x: Tensor, ends: Tensor) -> Tensor:
        whole = self.get_parameter(name)
        matrices = self.matrices(name).unbind(0)
        projection = next(p for p in self.projections if p.name == name)
        total = matrices[0].shape[0]
        if not projection.interleaved and total // projection.pieces % _TILE == 0:
            projection = Projection(name, 1)  # blocks do not straddle gate and up
        found = []
        for expert, rows in _rows_of_experts(ends):
            made = []
            for piece in range(projection.pieces):
                part = projection.rows(piece, total)
                cache = self._caches.setdefault((name, expert, piece), WeightCache())
                kept = partial(_part, self.is_transposed, expert, part)
                y = multiply(
                    x[rows],
                    matrices[expert][part],
                    kept_weight=whole,
                    version=0,
                    cache=cache,
                    part=kept,
                    scale_format=self.scale_format,
                )
                made.append(y)
            found.append(projection.together(made, -1))
        last = sum(part.shape[0] for part in found)
        more = x.new_zeros((x.shape[0] - last, total))
        return torch.cat([*found, more.to(found[0].dtype)]) if found else more

    def weight_changed(self) -> None:
        """Requantizes the weights at the next call: needed after a write that PyTorch misses."""
        self.__dict__.get("_caches", {}).clear()


def _part(transposed: bool, expert: int, rows: slice, whole: Tensor) -> Tensor:
    """Some rows of the matrix of one expert."""
    matrix = whole[expert]
    return (matrix.t() if transposed else matrix)[rows]


def _check(original: nn.Module) -> None:
    why = refusal(original)
    if why is not None:
        raise ValueError(
            "original: expected the experts of transformers 5 (gate_up_proj and down_proj of "
            f"three dimensions), got {type(original).__name__}: {why}"
        )


def _rows_of_experts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and these."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end
