"""Ops at shapes that models have and the other tables leave out, beside a copy of their bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import jitquant
from harness import timing
from harness.bench import plain, plain_fp8
from harness.bench.op import vector

E4M3 = torch.float8_e4m3fn
ROTATE_BYTES = 128 * 2**20
STAGE = timing.Stage(seconds=0.012, repeats=3)
POOL_BYTES = 2**32

Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An op at a shape.

    Attributes:
        op: what it is, for people.
        m, n: rows and columns of the result.
        run: takes the inputs, and then ``extra``.
        inputs: how many matrices are read.
        wide: the inputs have twice as many columns, gate and up.
        reads: how often the inputs are read.
        extra: further arguments, for (n, device), the same in every call.
        updates: matrices that are written beside what is returned.
        plain: the same in plain PyTorch, for torch.compile.
    """

    op: str
    m: int
    n: int
    run: Call
    inputs: int = 1
    wide: bool = False
    reads: int = 1
    extra: Callable[[int, torch.device], tuple[Tensor, ...]] = lambda n, device: ()
    updates: int = 0
    plain: Call | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of each input."""
        return self.m, self.n * (2 if self.wide else 1)


@dataclass(frozen=True)
class Point:
    """One case: microseconds, of a copy of as many bytes, and of torch.compile."""

    op: str
    m: int
    n: int
    us: float | None = None
    floor_us: float | None = None
    compiled_us: float | None = None
    error: str = ""


def nbytes(result: Any) -> int:
    """Bytes of all tensors in a result."""
    if type(result) is Tensor:
        return result.nbytes
    if isinstance(result, Tensor):
        parts = result.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return sum(nbytes(getattr(result, name)) for name in parts)
    if isinstance(result, tuple | list):
        return sum(nbytes(part) for part in result)
    if dataclasses.is_dataclass(result):
        return sum(nbytes(getattr(result, f.name)) for f in dataclasses.fields(result))
    return 0


def _weight(n: int, device: torch.device) -> tuple[Tensor, ...]:
    return (vector(n, torch.bfloat16, device),)


def _state(n: int, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.tensor([1, 2], device=device),)


def _scale(value: float, n: int, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.full((1,), value, device=device),)


def _offsets(rows: int, groups: int, n: int, device: torch.device) -> tuple[Tensor, ...]:
    return (torch.tensor([i * rows // groups for i in range(groups + 1)], device=device),)


def _swiglu_nvfp4(fused: Tensor) -> Any:
    return jitquant.deinterleave_quantize_nvfp4(fused, fused.shape[1] // 2, granularity="row")


def _plain_swiglu_nvfp4(fused: Tensor) -> Any:
    gate, up = plain._runs(fused, 8)
    return plain._quantize(torch.nn.functional.silu(gate.float()) * up.float(), "row")


def _added(run: Call) -> Call:
    return lambda x, residual, weight: run(x, weight, residual=residual)


def _drawn(run: Call) -> Call:
    return lambda x, state: run(x, rounding="stochastic", rng_state=state)


_ROW: dict[str, Any] = {"granularity": "row"}
_NORMS: tuple[tuple[str, Call, int], ...] = (
    ("rmsnorm nvfp4 row", jitquant.rmsnorm_quantize_nvfp4, 1),
    ("rmsnorm fp8 row", jitquant.rmsnorm_quantize_fp8, 1),
    ("rmsnorm fp8 group", jitquant.rmsnorm_quantize_per_token_group, 1),
    ("rmsnorm nvfp4 tensor", partial(jitquant.rmsnorm_quantize_nvfp4, granularity="tensor"), 2),
)
_ROWS: tuple[tuple[str, Call], ...] = (
    ("nvfp4 row", partial(jitquant.quantize_nvfp4, **_ROW)),
    ("fp8 row", partial(jitquant.quantize_fp8, **_ROW)),
)
_GATES: tuple[tuple[str, Call], ...] = (
    ("swiglu nvfp4 row", _swiglu_nvfp4),
    ("swiglu fp8 row", jitquant.swiglu_quantize_fp8),
)
_BOTH: tuple[tuple[str, Call], ...] = (
    ("both fp8 group", jitquant.quantize_per_token_group_both),
    ("both fp8 128x128", jitquant.quantize_block_both),
    ("both mxfp8", jitquant.quantize_mxfp8_both),
)
_ROTATED: tuple[tuple[str, Call, int], ...] = (
    ("nvfp4", jitquant.quantize_nvfp4, 2),
    ("nvfp4 both", jitquant.quantize_nvfp4_both, 2),
    ("mxfp4", jitquant.quantize_mxfp4, 1),
    ("fp8 row", partial(jitquant.quantize_fp8, **_ROW), 1),
    ("fp8 group", jitquant.quantize_per_token_group, 1),
    ("int8 row", partial(jitquant.quantize_fp8, dtype=torch.int8, **_ROW), 1),
    ("int8 group", partial(jitquant.quantize_per_token_group, dtype=torch.int8), 1),
)


def _rows(m: int, n: int) -> Iterator[Case]:
    """Everything that takes a matrix row by row."""
    for name, run in _ROWS:
        yield Case(name, m, n, run)
    for name, run, reads in _NORMS:
        yield Case(name, m, n, run, reads=reads, extra=_weight)
    for name, run, _ in _NORMS[:2]:
        yield Case(f"add {name}", m, n, _added(run), inputs=2, extra=_weight, updates=1)
    if n % 16 == 0:
        for name, run in _GATES:
            yield Case(name, m, n, run, wide=True)


def _recipes(m: int, n: int) -> Iterator[Case]:
    """Rotation, stochastic rounding and 4over6 beside the quantizers without them."""
    for name, run, reads in _ROTATED:
        if name != "fp8 row":  # one of _rows
            yield Case(name, m, n, run, reads=reads)
        sizes = ("te",) if "both" in name else ("te", "64") if name == "nvfp4" else ("128",)
        for size in sizes:
            yield Case(f"{name} rotate={size}", m, n, partial(run, rotate=size), reads=reads)
        if "fp4" in name:
            yield Case(f"{name} stochastic", m, n, _drawn(run), reads=reads, extra=_state)
        if "nvfp4" in name:
            four = partial(run, select="4over6_mae")
            yield Case(f"{name} 4over6", m, n, four, reads=reads)


def cases() -> Iterator[Case]:
    """All cases."""
    n = 7168
    for cols in (128, 384, 512, 768, 1024, 1536, 2048):
        yield from _rows(2**25 // cols // 128 * 128, cols)
    for cols in (4096, 7168, 12288, 14336, 18432, 28672, 53248):
        yield from _rows(4096, cols)
    yield from _rows(16384, n)
    for cols in (7170, 7176):
        yield from _rows(8192, cols)
    for m in (4096, 10000, 10007, 10112, 16384):
        for name, run in _BOTH:
            yield Case(name, m, n, run)
    for m in (4096, 16384):
        for block, dim in (("1x16", 0), ("16x16", 0), ("1x16", -1), ("16x16", -1)):
            weight = partial(jitquant.quantize_weight_nvfp4, block=block, dim=dim)
            yield Case(f"weight {block} dim={dim}", m, n, weight, reads=2)
        yield from _recipes(m, n)
        watched: Call = lambda x, s: jitquant.quantize_fp8(x, scale=s)  # noqa: E731
        yield Case("fp8 given, amax", m, n, watched, extra=partial(_scale, 37.5))
        for groups in (8, 64):
            gradient: Call = lambda g, x, o: jitquant.quantize_ragged_grad(  # noqa: E731
                g, o, act_input=x, activation="silu", dtype=E4M3
            )
            name, extra = f"gradient of {groups}", partial(_offsets, m, groups)
            yield Case(name, m, n, gradient, inputs=2, reads=2, extra=extra)
    for m in (3, 37):
        yield Case("swiglu fp8 row", m, 896, _GATES[1][1], wide=True, plain=plain_fp8.swiglu)
        norm = _added(jitquant.rmsnorm_quantize_fp8)
        yield Case(
            "add rmsnorm fp8 row",
            m,
            896,
            norm,
            inputs=2,
            extra=_weight,
            updates=1,
            plain=plain_fp8.rmsnorm_residual,
        )
    yield Case("swiglu nvfp4 row", 3, 18432, _swiglu_nvfp4, wide=True, plain=_plain_swiglu_nvfp4)


def calls(case: Case, pool: Tensor) -> list[tuple[Any, ...]]:
    """Arguments of as many calls as it takes to leave the L2 cache behind, as parts of a pool."""
    size = math.prod(case.shape)
    step = -(-size // 128) * 128
    wanted = timing.sets_needed(case.inputs * size * pool.element_size(), ROTATE_BYTES)
    count = max(1, min(wanted, 2048, pool.numel() // (case.inputs * step)))
    extra = case.extra(case.n, pool.device)
    parts = iter(pool[i * step :][:size].view(case.shape) for i in range(count * case.inputs))
    return [(*(next(parts) for _ in range(case.inputs)), *extra) for _ in range(count)]


def measure(case: Case, pool: Tensor, ceilings: timing.Ceilings) -> Point:
    """Times one case."""
    at = (case.op, case.m, case.n)
    try:
        inputs = calls(case, pool)
        matrix = math.prod(case.shape) * pool.element_size()
        written = nbytes(case.run(*inputs[0])) + case.updates * matrix
        floor = (case.inputs * case.reads * matrix + written) / (ceilings.copy * 1e3)
        us = timing.brief_us(case.run, inputs, STAGE)
        compiled = None
        if case.plain is not None:
            compiled = timing.brief_us(torch.compile(case.plain, dynamic=False), inputs, STAGE)
        return Point(*at, us, floor, compiled)
    except Exception as error:
        return Point(*at, error=f"{type(error).__name__}: {error}"[:300])


def run(device: torch.device, ceilings: timing.Ceilings, only: str = "") -> Iterator[Point]:
    """The points of the cases whose name contains ``only``."""
    chosen = [case for case in cases() if only in f"{case.op} {case.m} x {case.n}"]
    pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device=device)
    written = True
    for case in chosen:
        if written:  # also by the case before: residuals that grow with each call
            for part in pool.split(2**28):
                part.normal_()
        yield measure(case, pool, ceilings)
        written = case.updates > 0
