"""What `quantize_checkpoint` does with each tensor of a folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from jitquant.formats import (
    CODES_PER_BYTE,
    E8M0_DTYPE,
    INPUT_DTYPES,
    MXFP4_BLOCK,
    NVFP4_DIVISOR,
    Mxfp4Scaling,
)
from jitquant.loader.units import show_size
from jitquant.nn._calibration import InputStatistics, lowest, output_sqnr
from jitquant.nn._checkpoint_source import (
    FP8_TILE,
    Matrix,
    Source,
    check_model,
    expert_pieces,
    has_nan,
    in_memory,
    is_embedding,
)
from jitquant.nn._compressed_tensors import global_scale
from jitquant.nn._reader import HOST, Part
from jitquant.nn._rounding import WeightRounding, gsa_for, quantized_weights, sample, with_gsa
from jitquant.nn._safetensors import Writer
from jitquant.nn._schemes import SCHEMES, Layout, Scheme
from jitquant.nn._targets import (
    check_targets,
    families,
    idle,
    ignoring,
    is_head,
    matches,
    refusal,
    unused,
)
from jitquant.numerics.nvfp4 import gsa_from_amax
from jitquant.tensors.nvfp4 import NVFP4Tensor

Progress = Callable[[int, int, str], None]
"""Called with the bytes read, all that will be, and the name of the file in work."""

_HEADS = {
    "albert": "predictions.decoder",
    "bert": "cls.predictions.decoder",
    "camembert": "lm_head.decoder",
    "deberta": "cls.predictions.decoder",
    "deberta-v2": "cls.predictions.decoder",
    "distilbert": "vocab_projector",
    "electra": "generator_lm_head",
    "esm": "lm_head.decoder",
    "modernbert": "decoder",
    "mpnet": "lm_head.decoder",
    "nomic_bert": "cls.predictions.decoder",
    "roberta": "lm_head.decoder",
    "whisper": "proj_out",
    "xlm-roberta": "lm_head.decoder",
}
"""Of models whose head, which may be their embedding, is not called lm_head."""
_KEPT = 1 << 30  # bytes of a family that is read once; a larger one is read again for its amax
_AHEAD = 256 << 20  # bytes that are read before they are needed, and that wait to be written


@dataclass
class Checkpoint:
    """What `quantize_checkpoint` wrote; ``print`` it.

    Attributes:
        path: the folder.
        format: the requested format.
        files: the weight files and their SHA-256.
        elements, quantized: number of elements of all weights, and of the quantized ones.
        bytes_before, bytes_after: size of all tensors.
        left: elements of tensors with two or more dimensions that are not quantized, by name.
        why: the reason, by name.
        in_fp8: names of the matrices that ``fp8_share`` keeps in FP8 blocks.
        sqnr: with ``fp8_share``: the SQNR of each matrix in NVFP4, in dB, by name; empty if it was
            computed by an earlier, interrupted call.
        uncalibrated: names of matrices that "gptq" rounds like "mse".
        idle: patterns of ``ignore`` that mean no tensor, and the nearest name.
        seconds: of this call, in which it waited for "reading" and for "writing", and all others,
            "quantizing".
    """

    path: Path
    format: str
    files: dict[str, str] = field(default_factory=dict)
    elements: int = 0
    quantized: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    left: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    in_fp8: list[str] = field(default_factory=list)
    sqnr: dict[str, float] = field(default_factory=dict)
    uncalibrated: list[str] = field(default_factory=list)
    idle: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        share = self.quantized / max(1, self.elements)
        lines = [
            f"{self.path}: {len(self.files)} files, {show_size(self.bytes_before)} -> "
            f"{show_size(self.bytes_after)}",
            f"  {self.quantized:,} of {self.elements:,} parameters in {self.format} ({share:.1%})",
        ]
        for what, some in (
            ("in FP8", self.in_fp8),
            ("not in the calibration, rounded as mse", self.uncalibrated),
        ):
            if some:
                more = f" and {len(some) - 1} more" if len(some) > 1 else ""
                lines.append(f"  {what}: {some[0]}{more}")
        for pattern, near in self.idle.items():
            lines.append(f"  {unused(pattern, near)}")
        reasons: dict[str, list[str]] = {}
        for name, why in self.why.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            size = sum(self.left[name] for name in names)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  unchanged: {names[0]}{more}: {size:,} parameters: {why}")
        return "\n".join(lines)


def _is_expert(name: str) -> bool:
    place = in_memory(name)
    return place is not None and place[0].endswith("experts")


class Work:
    """Decides what to do with each tensor, and writes it."""

    def __init__(
        self,
        source: Source,
        format: str,
        layout: str,
        device: torch.device,
        rounding: WeightRounding,
        scaling: Mxfp4Scaling,
        calibration: Mapping[str, InputStatistics],
    ) -> None:
        self.source, self.layout, self.device = source, layout, device
        self.rounding: WeightRounding = rounding
        self.scaling: Mxfp4Scaling = scaling
        self.calibration = calibration
        self.scheme: Scheme = SCHEMES[format]
        self.result = Checkpoint(Path(), format)
        self.matrices: dict[str, Matrix] = {}
        self.quantized: dict[str, Matrix] = {}
        self.ignored: list[str] = []
        self.amaxes: dict[str, float] = {}
        self.relatives: dict[str, list[str]] = {}
        self._kept: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._gsas: dict[str, Tensor] = {}
        self._rounded: dict[str, NVFP4Tensor] = {}
        self._unchecked: Sequence[str] = ()
        files = [sum(e.size for e in entries.values()) for entries in source.files.values()]
        self._ahead = min(_AHEAD, max(files) // 8)  # what is in memory is less than a file
        self.waited = 0.0  # seconds, for files to be written

    def plan(
        self,
        targets: str | Sequence[str],
        ignored: Sequence[str] | None,
        fused_layers: Sequence[Sequence[str]],
        input_amax: float | Mapping[str, float] | None,
    ) -> None:
        """Decides by name what to do with each matrix. Reads no values."""
        config = self.source.config
        check_model(self.source.directory, config)
        self._unchecked = ignored or ()
        self.matrices = self.source.matrices()
        shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        check_targets(targets, shapes)
        done = self.result
        modules = {*shapes, *(name.removesuffix(".weight") for name in self.source.map)}
        done.idle = idle(self._unchecked, modules)
        if self.layout == "gpt-oss" and not any(m.is_stacked for m in self.matrices.values()):
            raise ValueError(
                "layout: expected a model with experts as gpt-oss has them (gate_up_proj and "
                f"down_proj of three dimensions) with 'gpt-oss', got {config.get('model_type')!r} "
                "without them. Take layout 'compressed-tensors'"
            )
        for name, matrix in self.matrices.items():
            why = refusal(name, shapes, targets, ignored)
            if why is None and self.layout == "gpt-oss" and not matrix.is_stacked:
                why = "layout 'gpt-oss' has only experts in MXFP4"
            if why is None and matrix.shape[1] % self.scheme.columns:
                why = f"its {matrix.shape[1]} columns are not a multiple of {self.scheme.columns}"
            self.quantized[name] = matrix
            if why is not None:
                self._leave(name, why)
            if why is not None and self.layout == "gpt-oss" and matrix.is_stacked:
                raise ValueError(
                    "targets and ignore: expected to leave out no expert with layout 'gpt-oss', "
                    f"which has them all in MXFP4, got {name} left out: {why}. Take layout "
                    "'compressed-tensors'"
                )
        self._leave_experts_together()
        if not self.quantized:
            first = next(iter(done.why.items()), None)
            raise ValueError(
                "targets and ignore: expected to leave a matrix to be quantized, got none in "
                f"{self.source.directory}" + (f"; {first[0]} is left: {first[1]}" if first else "")
            )
        for name in self.source.map:
            self.ignored += self._unread(name)
        # transformers looks for its own names: for that of a head that is the embedding and in no
        # file, for lm_head where files have language_model.lm_head or embed_out, and for what a
        # regular expression of the caller means.
        head = _HEADS.get(config.get("model_type", ""), "lm_head")
        may_be_tied = config.get("tie_word_embeddings", any(map(is_embedding, self.ignored)))
        is_plain = may_be_tied or any(map(is_head, self.ignored))
        if is_plain and head not in self.ignored and not any(map(is_head, self.quantized)):
            self.ignored.append(head)
        if self.layout == "compressed-tensors":
            self.ignored += [p for p in ignored or () if p.startswith("re:")]
        if self.scheme.has_gsa:
            for family in families(self.quantized, shapes, fused_layers):
                self.relatives |= dict.fromkeys(family, family)
        if self.calibration or self.rounding == "gptq":
            unknown = [name for name in self.quantized if self._inputs(name) is None]
            self._check_calibration(unknown)
            done.uncalibrated = unknown if self.rounding == "gptq" else []
        if self.scheme.inputs is not None and self.scheme.has_gsa:
            self.amaxes = {name: self._amax(name, input_amax) for name in self.quantized}
        for name in self.source.map:
            entry = self.source.entry(name)
            done.bytes_before += entry.size
            counts = not name.endswith(("_scales", "weight_scale_inv"))
            elements = math.prod(entry.shape) * (2 if name.endswith("_blocks") else 1)
            done.elements += elements if counts else 0
            why = self._why_left(name)
            if counts and why is not None:
                done.why[name], done.left[name] = why, elements
        done.quantized = sum(math.prod(m.shape) for m in self.quantized.values())
        self._lay_out()

    def _leave(self, name: str, why: str) -> None:
        """Marks a matrix that is not to be quantized."""
        matrix = self.quantized.pop(name)
        self.result.why[name], self.result.left[name] = why, math.prod(matrix.shape)
        self.ignored.append(name)

    def _leave_experts_together(self) -> None:
        """Engines take one format for the experts of a layer."""
        layers: dict[str, list[str]] = {}
        for name in self.matrices:
            if (place := in_memory(name)) is not None and _is_expert(name):
                layers.setdefault(place[0], []).append(name)
        for names in layers.values():
            why = next((self.result.why[n] for n in names if n not in self.quantized), None)
            for name in names:
                if why is not None and name in self.quantized:
                    self._leave(name, f"an expert beside one that is left: {why}")

    def _lay_out(self) -> None:
        self.outputs = {file: self._outputs(file) for file in self.source.files}
        taken: set[str] = set()
        for name, made in (output for outputs in self.outputs.values() for output in outputs):
            if twice := taken & made.keys():
                raise ValueError(
                    "source: expected names that differ from those of quantized weights, got "
                    f"{name} and another tensor, which both give {min(twice)}. Leave the quantized "
                    "one out with ignore, or start from the model before quantization"
                )
            taken |= made.keys()
        self.result.bytes_after = self.bytes_after({})

    def _inputs(self, name: str) -> InputStatistics | None:
        """What is known of the inputs of a matrix."""
        found = self.calibration.get(name)
        if found is None and (place := in_memory(name)) is not None:
            found = self.calibration.get(".".join(place))
        return found

    def _amax(self, name: str, amaxes: float | Mapping[str, float] | None) -> float:
        """The amax of the inputs of a matrix; of an expert without inputs, or whose inputs are all
        zero, the largest of the others, as engines take it. 2688, whose gsa is 1, as in `convert`,
        if a calibration has only zeros."""
        given = amaxes.get(name) if isinstance(amaxes, Mapping) else amaxes
        amax = given
        if amax is None:
            own = self._inputs(name)
            known = [] if own is None else [own.amax.item()]
            if not any(known) and (place := in_memory(name)) is not None:
                start = f"{place[0]}.{place[1]}."
                known = [f.amax.item() for n, f in self.calibration.items() if n.startswith(start)]
            amax = (max(known) or NVFP4_DIVISOR) if known else None
        limits = torch.finfo(torch.float32)
        if amax is None or not 0 < amax <= limits.max:
            raise ValueError(
                f"input_amax of {name}: expected a positive float32 number, got {amax}. "
                + (
                    "Calibrate with batches that reach this layer, or give its amax in input_amax"
                    if self.calibration and given is None
                    else "Measure it with report(model, inputs) and name it as the folder does, or "
                    "pass one number for all layers"
                )
            )
        return max(float(amax), limits.tiny * NVFP4_DIVISOR)  # as `static_gsa`

    def _check_calibration(self, unknown: Sequence[str]) -> None:
        if len(unknown) == len(self.quantized):
            raise ValueError(
                "calibration: expected layers named as in the folder, such as "
                f"{next(iter(self.quantized))}, got "
                f"{', '.join([*self.calibration][:1]) or 'no layers'}"
            )
        for name, matrix in self.quantized.items():
            found = self._inputs(name)
            if found is not None and len(found.moment) != matrix.shape[1]:
                raise ValueError(
                    f"calibration: expected {matrix.shape[1]} elements in each input of {name}, "
                    f"got {len(found.moment)}. Calibrate this model"
                )

    def lowest(self, share: float, progress: Progress | None) -> list[str]:
        """The matrices to keep in FP8. Reads all but experts, which stay together in NVFP4: engines
        take one scheme for the experts of a layer."""
        linears = [name for name in self.quantized if not _is_expert(name)]
        rounding: WeightRounding = "mse" if self.rounding == "gptq" else self.rounding
        sqnr, read, total = self.result.sqnr, 0, self.result.bytes_before
        mine = {self.quantized[name].name for name in linears}
        self._expect([o for made in self.outputs.values() for o in made if o[0] in mine])
        for name in linears:
            weight = self._values(name)
            found = self._inputs(name)
            found = None if found is None else found.to(weight.device)
            q = with_gsa(weight, rounding, self._gsa(name, weight))
            sqnr[name] = output_sqnr(weight, q, found, self.scheme.inputs is None)
            if progress is not None:
                read += weight.nbytes
                progress(min(read, total), total, "what stays in FP8")
        groups = [self.relatives.get(name, [name]) for name in linears]
        fits = [g for g in groups if self.quantized[g[0]].shape[1] % FP8_TILE == 0]
        return lowest(sqnr, fits, int(share * len(linears) + 0.5))

    def scan(self, done: Mapping[str, str], progress: Progress | None) -> None:
        """Reads the tensors of files that are not finished, for their amaxes and for NaN."""
        read, total = 0, self.result.bytes_before
        left = [o for file, outputs in self.outputs.items() if file not in done for o in outputs]
        left = [
            (name, made)
            for name, made in left
            if self._is_copied(name, made) or not self._maxima.keys() >= {*self._modules(made)}
        ]
        self._expect(left)
        for name, made in left:
            if self._is_copied(name, made):
                self._copied(name)
            else:
                for module in self._modules(made):
                    self._values(module)
            read += self.source.entry(name).size
            if progress is not None:
                progress(min(read, total), total, "whether all weights are finite")

    def set_fp8(self, names: Sequence[str]) -> None:
        """Marks matrices to be written in FP8 blocks."""
        done = self.result
        done.in_fp8 = list(names)
        done.uncalibrated = [name for name in done.uncalibrated if name not in names]
        for name in names:
            self.amaxes.pop(name, None)
        self._lay_out()

    def scheme_of(self, name: str) -> Scheme:
        """The scheme of a matrix."""
        return SCHEMES["fp8_block"] if name in self.result.in_fp8 else self.scheme

    def _why_left(self, name: str) -> str | None:
        """Why a tensor is not quantized; None if it is, or if it is small."""
        entry, module = self.source.entry(name), name.removesuffix(".weight")
        known = module in self.matrices or name.endswith("_blocks") or self.source.is_stack(name)
        if known or len(entry.shape) < 2 or self._expert_bias(name) is not None:
            return None
        if is_embedding(module):
            return "an embedding"
        if entry.dtype not in INPUT_DTYPES:
            return f"it is {entry.dtype}"
        if self._is_unread_stack(name):
            return f"experts of {self.source.config.get('model_type')} in one tensor are not read"
        return "not the weight of a linear"

    def _unread(self, name: str) -> list[str]:
        """The layers of a tensor that may be those of linears and is not read as such. Engines take
        them for quantized unless they are named."""
        shape, module = self.source.entry(name).shape, name.removesuffix(".weight")
        if self._is_unread_stack(name):
            owner, pieces = expert_pieces(name)
            return [f"{owner}.{e}.{piece}" for e in range(shape[0]) for piece in pieces]
        is_weight = module != name and len(shape) == 2
        return [module] if is_weight and module not in self.matrices else []

    def _is_unread_stack(self, name: str) -> bool:
        """Whether a tensor has the experts of a layer, in a layout other than gpt-oss's."""
        known = self.source.is_stack(name) or self.source.is_mxfp4(name)
        return len(self.source.entry(name).shape) == 3 and "experts" in name and not known

    def _parts(self, name: str, matrix: Matrix) -> Layout:
        """The tensors to write for a matrix, by full name."""
        if name not in self.quantized:
            return {f"{name}.weight": (torch.bfloat16, matrix.shape)}
        parts = self.scheme_of(name).layout(*matrix.shape)
        if name in self.amaxes:
            parts["input_global_scale"] = (torch.float32, (1,))
        if self.layout == "modelopt":
            parts = {
                "weight": parts["weight_packed"],
                "weight_scale": parts["weight_scale"],
                "weight_scale_2": (torch.float32, ()),
                "input_scale": (torch.float32, ()),
            }
        return {f"{name}.{part}": about for part, about in parts.items()}

    def _outputs(self, file: str) -> list[tuple[str, Layout]]:
        """The tensors to write for each tensor of a file, in order."""
        by_tensor: dict[str, list[str]] = {}
        for module, matrix in self.matrices.items():
            if matrix.file == file:
                by_tensor.setdefault(matrix.name, []).append(module)
        found = []
        for name, entry in self.source.files[file].items():
            made: Layout = {}
            modules = by_tensor.get(name.removesuffix("_blocks"), [])
            as_it_is = modules and self.matrices[modules[0]].source in ("plain", "stack")
            if self.layout == "gpt-oss" and self.source.is_stack(name):
                experts, cols, rows = entry.shape
                groups = (experts, rows, cols // MXFP4_BLOCK)
                blocks = (*groups, MXFP4_BLOCK // CODES_PER_BYTE)
                made = {
                    f"{name}_blocks": (torch.uint8, blocks),
                    f"{name}_scales": (torch.uint8, groups),
                }
            elif self.layout == "gpt-oss" and self.source.is_mxfp4(name):
                made = {name: (torch.uint8, entry.shape)}
            elif modules and not (as_it_is and not self.quantized.keys() & set(modules)):
                for module in modules:
                    made |= self._parts(module, self.matrices[module])
            elif self.source.is_scale(name):
                pass
            elif self.layout != "gpt-oss" and self._expert_bias(name) is not None:
                owner, pieces = self._expert_bias(name) or ("", ())
                experts, size = entry.shape
                shape = (size // len(pieces),)
                for e in range(experts):
                    made |= {f"{owner}.{e}.{p}.bias": (entry.dtype, shape) for p in pieces}
            else:
                made = {name: (entry.dtype, entry.shape)}
            found.append((name, made))
        return found

    def _expert_bias(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """The experts of a bias, and its matrices, whose elements alternate."""
        base = name.removesuffix("_bias")
        if base == name:
            return None
        if base in self.source.map and self.source.is_stack(base):
            owner, pieces = expert_pieces(base)
            experts = range(self.source.entry(base).shape[0])
            every = {f"{owner}.{e}.{piece}" for e in experts for piece in pieces}
            return (owner, pieces) if every & self.quantized.keys() else None
        return expert_pieces(base) if f"{base}_blocks" in self.source.map else None

    def bytes_after(self, done: Mapping[str, str]) -> int:
        """Size of the tensors in the files that are not finished."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for file, outputs in self.outputs.items()
            if file not in done
            for _, layout in outputs
            for dtype, shape in layout.values()
        )

    def run(
        self,
        folder: Path,
        done: dict[str, str],
        keep: Callable[[], None],
        progress: Progress | None,
    ) -> None:
        """Writes the files that are not finished.

        Args:
            folder: to write to.
            done: hashes of the finished files; the others are added.
            keep: called after each file.
            progress: called after each tensor.
        """
        total, read = self.result.bytes_before, 0
        left: dict[str, list[tuple[str, Layout]]] = {}
        for file, outputs in self.outputs.items():
            if file in done:
                read += sum(self.source.entry(name).size for name, _ in outputs)
            else:
                left[file] = outputs
        self._expect([output for outputs in left.values() for output in outputs])

        def close(file: str, writer: Writer) -> None:
            with _abandoned_if_it_fails(writer):
                done[file] = writer.close()
            keep()

        with ThreadPoolExecutor(1) as closer:
            closing: Future[None] | None = None
            for file, outputs in left.items():
                layout = {n: about for _, made in outputs for n, about in made.items()}
                writer = Writer(folder / file, layout, self._ahead)
                with _abandoned_if_it_fails(writer):
                    for name, made in outputs:
                        for part, tensor in self._tensors(name, made):
                            writer.write(part, tensor)
                        read += self.source.entry(name).size
                        if progress is not None:
                            progress(read, total, file)
                    self.waited += writer.waited
                    self._wait(closing)
                self._kept.clear()
                closing = closer.submit(close, file, writer)  # while the next one is written
            self._wait(closing)

    def _wait(self, closing: Future[None] | None) -> None:
        began = time.perf_counter()
        if closing is not None:
            closing.result()
        self.waited += time.perf_counter() - began

    def _expect(self, outputs: Sequence[tuple[str, Layout]]) -> None:
        """Begins to read what is needed for the tensors of some outputs, in this order."""
        source, parts = self.source, dict[Part, torch.device]()
        for name, made in outputs:
            copied = self._is_copied(name, made)
            is_stacked = source.is_stack(name) or source.is_mxfp4(name)
            by_expert = is_stacked and (self.layout == "gpt-oss" or not copied)
            experts = range(source.entry(name).shape[0]) if by_expert else (None,)
            module = name.removesuffix(".weight")
            matrix = self.matrices.get(module)
            computes = matrix is not None and not self._has_format(matrix, module)
            device = self.device if not copied and (computes or source.is_stack(name)) else HOST
            parts |= {source.part(name, expert): device for expert in experts}
        source.reader.expect(parts, self._ahead)

    def _tensors(self, name: str, made: Layout) -> Iterator[tuple[str, Tensor]]:
        """The tensors to write for one tensor, large ones in parts."""
        if self.layout == "gpt-oss" and self.source.is_stack(name):
            yield from self._blocks(name)
            return
        if self.layout == "gpt-oss" and self.source.is_mxfp4(name):
            for expert in range(self.source.entry(name).shape[0]):
                codes = self.source.read(name, expert)
                self._check(name, codes.view(E8M0_DTYPE) if name.endswith("_scales") else codes)
                yield name, codes.view(torch.uint8).unsqueeze(0)
            return
        if self._is_copied(name, made):
            yield name, self._copied(name)
            return
        bias = self._expert_bias(name)
        if bias is not None:
            owner, pieces = bias
            whole = self._copied(name)
            for e in range(whole.shape[0]):
                for i, piece in enumerate(pieces):
                    yield f"{owner}.{e}.{piece}.bias", whole[e, i :: len(pieces)]
            return
        for module in self._modules(made):
            yield from self._matrix(module)

    def _is_copied(self, name: str, made: Layout) -> bool:
        """Whether a tensor is written as it is read."""
        module = name.removesuffix(".weight")
        plain = module not in self.matrices or self.matrices[module].source == "plain"
        return list(made) == [name] and module not in self.quantized and plain

    def _modules(self, made: Layout) -> list[str]:
        """The matrices that are written to some tensors."""
        return list(dict.fromkeys(part.rpartition(".")[0] for part in made))

    def _matrix(self, name: str) -> Iterator[tuple[str, Tensor]]:
        matrix = self.matrices[name]
        if name not in self.quantized:
            yield f"{name}.weight", self._values(name).to(torch.bfloat16)
            return
        if self._has_format(matrix, name):
            for part, tensor in self._as_it_is(matrix).items():
                yield f"{name}.{part}", tensor
            return
        scheme, gsa = self.scheme_of(name), None
        if scheme.has_gsa and self.rounding == "gptq":
            q = self._gptq(name)
            gsa, packed = q.gsa, {"weight_packed": q.x_fp4_bytes, "weight_scale": q.x_sf}
            parts = packed | {"weight_global_scale": global_scale(gsa)}
        else:
            weight = self._values(name)
            gsa = self._gsa(name, weight) if scheme.has_gsa else None
            parts = scheme.quantize(weight, gsa, self.rounding, self.scaling)
        if name in self.amaxes:
            static = NVFP4_DIVISOR / self.amaxes[name]
            parts["input_global_scale"] = torch.tensor([static], dtype=torch.float32)
        if self.layout == "modelopt":
            assert gsa is not None
            parts = {
                "weight": parts["weight_packed"],
                "weight_scale": parts["weight_scale"],
                "weight_scale_2": gsa.reshape(()),
                "input_scale": torch.tensor(self.amaxes[name] / NVFP4_DIVISOR, dtype=torch.float32),
            }
        for part, tensor in parts.items():
            yield f"{name}.{part}", tensor

    def _blocks(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """A tensor of experts in gpt-oss's layout: the codes of one after another, then all scales.

        The rows of gate and up alternate there, as they do in bfloat16.
        """
        experts, cols, rows = self.source.entry(name).shape
        scales = []
        for expert in range(experts):
            matrix = Matrix(self.source.map[name], "stack", name, (rows, cols), expert)
            weight = self.source.values(matrix, self.device)
            self._amax_of(matrix, weight, "Get the file again")
            parts = self.scheme.quantize(weight, None, scaling=self.scaling)
            scales.append(parts["weight_scale"])
            groups = (1, *scales[-1].shape)
            yield f"{name}_blocks", parts["weight_packed"].view(*groups, -1)
        yield f"{name}_scales", torch.stack(scales)

    def _gptq(self, name: str) -> NVFP4Tensor:
        """A matrix, rounded together with those that engines fuse with it."""
        if name not in self._rounded:
            family = self.relatives.get(name, [name])
            weights = [self._values(member) for member in family]
            known = [self._inputs(member) for member in family]
            moments = [None if k is None else k.moment.to(self.device) for k in known]
            made = quantized_weights(weights, "gptq", moments)
            self._rounded |= dict(zip(family, made, strict=True))
        return self._rounded.pop(name)

    def _has_format(self, matrix: Matrix, name: str) -> bool:
        """Whether a matrix already has the format that it is to be written in."""
        if matrix.source == "fp8":
            return name in self.quantized and self.scheme_of(name) is SCHEMES["fp8_block"]
        return matrix.source == "mxfp4" and self.result.format == "mxfp4"

    def _as_it_is(self, matrix: Matrix) -> dict[str, Tensor]:
        """The parts of a matrix that already has the requested format."""
        if matrix.source == "fp8":
            scale = self._copied(f"{matrix.name}_scale_inv").to(torch.float32)
            return {"weight": self._copied(matrix.name), "weight_scale": scale}
        codes, scales = self.source.mxfp4(matrix)
        self._check(f"{matrix.name}_scales", scales)
        return {"weight_packed": codes, "weight_scale": scales.view(torch.uint8)}

    def _copied(self, name: str) -> Tensor:
        """A tensor that is written as it is read."""
        return self._check(name, self.source.read(name))

    def _check(self, name: str, values: Tensor) -> Tensor:
        """Checks values for NaN, and for infinity if they are a parameter: buffers, such as masks
        and limits, may have it."""
        last = name.rpartition(".")[2]
        infinity = (values.dim() > 1 or last in ("weight", "bias")) and "mask" not in name
        if not matches(name.removesuffix(".weight"), self._unchecked) and has_nan(values, infinity):
            way_out = f"Get the file again, or {ignoring(name.removesuffix('.weight'))}"
            raise self._not_finite(name, self.source.map[name], way_out)
        return values

    def _not_finite(self, name: str, file: str, way_out: str) -> ValueError:
        return ValueError(
            f"{name} in {self.source.directory / file}: expected finite weights, got NaN or "
            f"infinity. {way_out}"
        )

    def _values(self, name: str) -> Tensor:
        """The values of a matrix. Records its amax."""
        if name in self._kept:
            return self._kept.pop(name)
        matrix = self.matrices[name]
        weight = self.source.values(matrix, self.device)
        is_named = name not in self.quantized and matches(name, self._unchecked)
        if name not in self._maxima and not is_named:
            way_out = f"Get the file again, or {ignoring(name)}"
            self._maxima[name] = self._amax_of(matrix, weight, way_out)
        return weight

    def _amax_of(self, matrix: Matrix, weight: Tensor, way_out: str) -> Tensor:
        low, high = weight.aminmax()
        amax = torch.maximum(-low, high).float().reshape(1)
        if not bool(amax.isfinite()):
            raise self._not_finite(matrix.name, matrix.file, way_out)
        return amax

    def _gsa(self, name: str, weight: Tensor) -> Tensor:
        """The gsa of a matrix, whose values are given, and of those that engines fuse with it."""
        if name not in self._gsas:
            family, samples = self.relatives.get(name, [name]), []
            searches = self.rounding in ("mse", "gptq")
            for member in family:
                values = weight
                if member != name and (searches or member not in self._maxima):
                    values = self._values(member)
                    if values.nbytes * len(family) <= _KEPT:
                        self._kept[member] = values
                if searches:
                    samples.append(sample(values, len(family)))
            amax = torch.stack([self._maxima[member] for member in family]).amax(0)
            gsa = gsa_for(self.rounding, gsa_from_amax(amax), samples)
            self._gsas |= dict.fromkeys(family, gsa)
        return self._gsas[name]


@contextlib.contextmanager
def _abandoned_if_it_fails(writer: Writer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        writer.abandon()
        raise
