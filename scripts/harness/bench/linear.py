"""Products with a weight in NVFP4, beside cuBLAS in bf16, other libraries and the bytes' time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import jitquant
from harness import timing
from harness.bench.peers_linear import Prepare, Product, is_the_product

DEVICE = "cuda"
BF16 = torch.bfloat16
SHAPES = ((8192, 8192), (28672, 8192), (6144, 4096), (4096, 14336))
ROWS = (1, 2, 8, 16, 64)


@dataclass(frozen=True)
class Times:
    """Microseconds of one product (rows, k) by (n, k), by graph replay, weights not in L2.

    Attributes:
        floor: of the weight's bytes, 0.5625 an element, at `bandwidth`.
        bf16: ``torch.mm`` with a weight in bf16.
        weight_only: `jitquant.nvfp4_linear` of an x in bf16, one call after the other.
        weight_only_behind: the same where each call comes behind a plain kernel, less its time.
        quantized: the same of a quantized x, one call after the other.
        fp8: `jitquant.nvfp4_linear` in FP8 of an x in bf16, which it quantizes first; None: not
            compute capability 9.0.
        fp8_weight: what that is to be compared with: `jitquant.quantize_fp8` and
            ``torch._scaled_mm`` with a weight that is in FP8 with a scale for each row; likewise.
        marlin: of vLLM, of an x in bf16, one call after the other; None: not importable, or wrong.
        humming: likewise.
    """

    n: int
    k: int
    rows: int
    floor: float
    bf16: float
    weight_only: float
    weight_only_behind: float
    quantized: float
    fp8: float | None = None
    fp8_weight: float | None = None
    marlin: float | None = None
    humming: float | None = None

    def text(self) -> str:
        """A line of the table."""
        part = self.floor / self.weight_only
        return (
            f"{self.n:>6} x {self.k:<6} {self.rows:>3} rows  bytes {self.floor:6.1f}  "
            f"bf16 {self.bf16:6.1f}  bf16 x {self.weight_only:6.1f} ({part:4.0%})  "
            f"behind {self.weight_only_behind:6.1f}  quantized x {self.quantized:6.1f}"
            f"  fp8 {_shown(self.fp8)}  fp8 weight {_shown(self.fp8_weight)}"
            f"  marlin {_shown(self.marlin)}  humming {_shown(self.humming)}"
        )


def _shown(us: float | None) -> str:
    return "     -" if us is None else f"{us:6.1f}"


def _weights(n: int, k: int, count: int) -> list[Any]:
    made = []
    for _ in range(count):
        w = torch.randn(n, k, device=DEVICE, dtype=BF16) * 0.02
        made.append(jitquant.quantize_weight_nvfp4(w))
    return made


def _call(w: Any, x: Any) -> Tensor:
    return jitquant.nvfp4_linear(x, w, dtype=BF16)


def _fp8_call(w: Any, x: Any) -> Tensor:
    return jitquant.nvfp4_linear(x, w, dtype=BF16, compute="fp8")


def _fp8_times(weights: Sequence[Any], x: Tensor) -> dict[str, float]:
    """The times in FP8, on compute capability 9.0."""
    if torch.cuda.get_device_capability() != (9, 0):
        return {}
    wide = [jitquant.quantize_fp8(w.dequantize(), granularity="row") for w in weights]

    def scaled(w: Any, x: Tensor = x) -> Tensor:
        q = jitquant.quantize_fp8(x, granularity="row")
        factors = {"scale_a": q.scale_inv, "scale_b": w.scale_inv.t()}
        return torch._scaled_mm(q.data, w.data.t(), **factors, out_dtype=BF16)

    return {
        "fp8": timing.graph_us(_fp8_call, [(w, x) for w in weights]),
        "fp8_weight": timing.graph_us(scaled, [(w,) for w in wide]),
    }


def _peer_us(prepared: Sequence[Product], x: Tensor, w: Any) -> float | None:
    """Microseconds of a peer's product; None if it is not the product."""

    def call(product: Product) -> Tensor:
        return product(x)

    if not is_the_product(prepared[0](x), x, w):
        return None
    return timing.graph_us(call, [(product,) for product in prepared])


def products(
    bandwidth: float,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    row_counts: Sequence[int] = ROWS,
    peers: Mapping[str, Prepare] | None = None,
) -> Iterator[Times]:
    """Every shape with every number of rows.

    Args:
        bandwidth: in GB/s, of which the floor is made.
        shapes: (N, K) of the weights.
        row_counts: of x.
        peers: what prepares a weight for "marlin" and "humming".
    """
    for n, k in shapes:
        packed = n * k * 9 // 16
        weights = _weights(n, k, timing.sets_needed(packed))
        wide = [
            torch.randn(n, k, device=DEVICE, dtype=BF16)
            for _ in range(timing.sets_needed(2 * n * k))
        ]
        others = {name: [prepare(w) for w in weights] for name, prepare in (peers or {}).items()}
        for rows in row_counts:
            x = torch.randn(rows, k, device=DEVICE, dtype=BF16)
            q = jitquant.quantize_nvfp4(x)
            inputs = [(w, x) for w in weights]

            def bf16(w: Tensor, x: Tensor = x) -> Tensor:
                return x @ w.t()

            yield Times(
                *(n, k, rows, packed / bandwidth * 1e-3),
                timing.graph_us(bf16, [(w,) for w in wide]),
                timing.graph_us(_call, inputs),
                timing.behind_us(_call, inputs, timing.SUSTAINED),
                timing.graph_us(_call, [(w, q) for w in weights]),
                **_fp8_times(weights, x),
                **{name: _peer_us(made, x, weights[0]) for name, made in others.items()},
            )
        del weights, wide, others
        torch.cuda.empty_cache()


def report(times: Iterator[Times], show: Callable[[str], Any]) -> list[dict[str, float | None]]:
    """All times as plain data; each is shown as it is measured."""
    rows = []
    for product in times:
        show(product.text())
        rows.append(
            {
                name: value if value is None else round(value, 3)
                for name, value in asdict(product).items()
            }
        )
    return rows
