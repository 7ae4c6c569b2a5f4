"""What is measured: each op's inputs, its call here, and the plain code beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jitquant
from harness import timing
from harness.bench import plain
from jitquant.numerics import recipes as numerics

HYPER_CONNECTIONS = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes that a call moves: ``once`` with every input read once, ``read`` in all readings."""

    once: int
    read: int
    written: int

    @property
    def moved(self) -> int:
        """All readings and the results."""
        return self.read + self.written

    def floor_us(self, ceilings: timing.Ceilings) -> float:
        """Microseconds in which a copy moves as much."""
        return self.moved / (ceilings.copy * 1e3)

    def mixed_floor_us(self, ceilings: timing.Ceilings) -> float:
        """Microseconds of the readings at the read ceiling, then of the results at the write one.

        For what a copy, of which half is written, is no measure of. Not a bound: a GPU reads and
        writes at once, and a copy itself may take less.
        """
        return (self.read / ceilings.read + self.written / ceilings.write) / 1e3


@dataclass(frozen=True)
class Quantized:
    """How an op's input is made from a tensor, and how many bytes that is for (m, n)."""

    make: Callable[[Tensor], Any]
    nbytes: Callable[[int, int], int]


@dataclass(frozen=True)
class Op:
    """One op of the benchmark.

    Attributes:
        name: as ``--ops`` takes it.
        call: what it is, for people.
        modules: the compiled modules behind it.
        run: the op, taking the tensors that `inputs` makes.
        plain: the same in plain PyTorch.
        shapes: of the inputs that are read in full, for (m, n).
        reads: how often these must be read: twice where an amax over all comes first.
        written: bytes of results for (m, n, element size).
        extra: further arguments, for (n, dtype, device), the same for every call.
        quantized: of an op that takes no tensor but what was quantized from one.
    """

    name: str
    call: str
    modules: tuple[str, ...]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    reads: int
    written: Callable[[int, int, int], int]
    extra: Callable[[int, torch.dtype, torch.device], tuple[Tensor, ...]] = lambda *_: ()
    quantized: Quantized | None = None

    def traffic(self, m: int, n: int, element: int) -> Traffic:
        """Bytes that a call has to move."""
        if self.quantized is not None:
            read = self.quantized.nbytes(m, n)
        else:
            read = sum(math.prod(shape) for shape in self.shapes(m, n)) * element
        write = self.written(m, n, element)
        return Traffic(read + write, self.reads * read, write)

    def inputs(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Any, ...]]:
        """Arguments of as many calls as it takes to leave the L2 cache behind."""
        extra = self.extra(n, dtype, device)
        per_call = self.traffic(m, n, dtype.itemsize).once
        count = 1 if per_call > timing.ROTATE_BYTES else timing.sets_needed(per_call)
        pools = [
            torch.empty((count, *shape), dtype=dtype, device=device).normal_()
            for shape in self.shapes(m, n)
        ]
        if self.quantized is not None:
            return [(self.quantized.make(x),) for x in pools[0]]
        return [(*(pool[i] for pool in pools), *extra) for i in range(count)]


def packed_bytes(rows: int, n: int, gsa: int) -> int:
    """Bytes of codes, scales and ``gsa`` factors."""
    return rows * (n // 2 + n // 16) + 4 * gsa


def _vector(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(n, dtype=dtype, device=device).uniform_(0.5, 1.5)


def _gsa(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.full((1,), 4.0 / plain.DIVISOR, device=device),)


def _deinterleave(op: Any) -> Callable[..., Any]:
    def run(fused: Tensor, gsa: Tensor | None = None) -> Any:
        return jitquant.deinterleave_quantize_nvfp4(fused, fused.shape[1] // 2, gsa, op=op)

    return run


def _plain_dequantize(q: Any) -> Tensor:
    return plain.dequantize(q.x_fp4.view(torch.uint8), q.x_sf, q.gsa)


def _rmsnorm_residual(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return jitquant.rmsnorm_quantize_nvfp4(x, weight, residual=residual)


def _state(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.tensor([1, 0], device=device),)


def _recipe(name: str, *, state: bool = False, **recipe: Any) -> Op:
    """`quantize_nvfp4` by a recipe for training or rotation, beside its definition."""
    said = ", ".join(f"{key}={value!r}" for key, value in recipe.items())

    def run(x: Tensor, *rest: Tensor) -> Any:
        more = {"rng_state": rest[0]} if state else {}
        return jitquant.quantize_nvfp4(x, **recipe, **more)

    def definition(x: Tensor, *rest: Tensor) -> Any:
        more = {"rng_state": rest[0]} if state else {}
        amax = numerics.rotated_amax(x, rotate=recipe.get("rotate", "none"))[0]
        return numerics.quantize_nvfp4_recipe(x, amax, **recipe, **more)

    return Op(
        name,
        f"quantize_nvfp4(x, {said})",
        ("quantize_nvfp4_recipe",),
        run,
        definition,
        lambda m, n: ((m, n),),
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
        extra=_state if state else lambda *_: (),
    )


RECIPES = (
    _recipe("recipe-te", rotate="te"),
    _recipe("recipe-64", rotate="64"),
    _recipe("recipe-4over6", select="4over6_mae", top=256),
    _recipe("recipe-stochastic", state=True, rounding="stochastic"),
)
"""By recipes for training and rotation."""

OPS = (
    Op(
        "quantize-tensor",
        "quantize_nvfp4(x)",
        ("fused_amax_quantize",),
        lambda x: jitquant.quantize_nvfp4(x),
        plain.quantize,
        lambda m, n: ((m, n),),
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
    ),
    Op(
        "quantize-row",
        "quantize_nvfp4(x, granularity='row')",
        ("fused_amax_quantize",),
        lambda x: jitquant.quantize_nvfp4(x, granularity="row"),
        lambda x: plain.quantize(x, "row"),
        lambda m, n: ((m, n),),
        1,
        lambda m, n, _: packed_bytes(m, n, m),
    ),
    Op(
        "quantize-given",
        "quantize_nvfp4(x, gsa)",
        ("fused_amax_quantize", "quantize_nvfp4"),
        lambda x, gsa: jitquant.quantize_nvfp4(x, gsa),
        plain.quantize_given,
        lambda m, n: ((m, n),),
        1,
        lambda m, n, _: packed_bytes(m, n, 0),
        _gsa,
    ),
    Op(
        "swiglu",
        "deinterleave_quantize_nvfp4(fused, N, op='swiglu')",
        ("deinterleave_quantize",),
        _deinterleave("swiglu"),
        plain.swiglu,
        lambda m, n: ((m, 2 * n),),
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
    ),
    Op(
        "swiglu-given",
        "deinterleave_quantize_nvfp4(fused, N, gsa, op='swiglu')",
        ("deinterleave_quantize",),
        _deinterleave("swiglu"),
        plain.swiglu_given,
        lambda m, n: ((m, 2 * n),),
        1,
        lambda m, n, _: packed_bytes(m, n, 0),
        _gsa,
    ),
    Op(
        # 8 columns of gate and 8 of up share a sector of memory, so all of fused is read.
        "select",
        "deinterleave_quantize_nvfp4(fused, N, op='select')",
        ("deinterleave_quantize",),
        _deinterleave("select"),
        plain.select,
        lambda m, n: ((m, 2 * n),),
        2,
        lambda m, n, _: packed_bytes(m, n, 1),
    ),
    Op(
        "select-given",
        "deinterleave_quantize_nvfp4(fused, N, gsa, op='select')",
        ("deinterleave_quantize",),
        _deinterleave("select"),
        plain.select_given,
        lambda m, n: ((m, 2 * n),),
        1,
        lambda m, n, _: packed_bytes(m, n, 0),
        _gsa,
    ),
    Op(
        "rmsnorm",
        "rmsnorm_quantize_nvfp4(x, weight)",
        ("fused_rmsnorm_quantize",),
        lambda x, weight: jitquant.rmsnorm_quantize_nvfp4(x, weight),
        plain.rmsnorm,
        lambda m, n: ((m, n),),
        1,
        lambda m, n, _: packed_bytes(m, n, 2 * m),
        lambda n, dtype, device: (_vector(n, dtype, device),),
    ),
    Op(
        "rmsnorm-residual",
        "rmsnorm_quantize_nvfp4(x, weight, residual=r)",
        ("fused_rmsnorm_quantize",),
        _rmsnorm_residual,
        plain.rmsnorm_residual,
        lambda m, n: ((m, n), (m, n)),
        1,
        lambda m, n, element: packed_bytes(m, n, 2 * m) + m * n * element,
        lambda n, dtype, device: (_vector(n, dtype, device),),
    ),
    Op(
        "mhc",
        f"mhc_rmsnorm_quantize_nvfp4(X, A, weight), {HYPER_CONNECTIONS} hyper-connections",
        ("fused_mhc_rmsnorm_quantize",),
        lambda x, a, weight: jitquant.mhc_rmsnorm_quantize_nvfp4(x, a, weight),
        plain.mhc,
        lambda m, n: ((m, HYPER_CONNECTIONS, n), (m, HYPER_CONNECTIONS)),
        1,
        lambda m, n, _: packed_bytes(m, n, 2 * m),
        lambda n, dtype, device: (_vector(n, dtype, device),),
    ),
    Op(
        "dequantize",
        "dequantize_nvfp4(q)",
        ("dequant_nvfp4", "fused_amax_quantize"),
        lambda q: jitquant.dequantize_nvfp4(q),
        _plain_dequantize,
        lambda m, n: ((m, n),),
        1,
        lambda m, n, _: 2 * m * n,
        quantized=Quantized(jitquant.quantize_nvfp4, lambda m, n: packed_bytes(m, n, 1)),
    ),
    *RECIPES,
)


SETS = {"all": "kernels", "fp8": "kernels-fp8", "ragged": "kernels-ragged"}  # and their files


def chosen(names: str) -> Iterator[Op]:
    """The ops of a comma-separated list, or of one of `SETS`: all of NVFP4 with "all"."""
    from harness.bench.ops_fp8 import FP8_OPS
    from harness.bench.ops_ragged import RAGGED_OPS

    sets = dict(zip(SETS, (OPS, FP8_OPS, RAGGED_OPS), strict=True))
    by_name = {op.name: op for ops in sets.values() for op in ops}
    for name in (op.name for op in sets[names]) if names in sets else names.split(","):
        if name not in by_name:
            raise ValueError(f"--ops {name}: accepted are {', '.join((*SETS, *by_name))}")
        yield by_name[name]
