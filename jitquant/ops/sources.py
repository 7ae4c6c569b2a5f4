"""Where the values come from that ops quantize: the tensor itself, gate and up, norms, a weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jitquant.formats import ROTATIONS
from jitquant.numerics import nvfp4, recipes, sources
from jitquant.ops import _checks, _checks_fp8, _checks_rotation
from jitquant.ops.schema import FP32, SIGNS, Number, Source, Values

_EPS = "float eps=1e-6, "
_EPSILON = Number(0.0, "a finite number that is not negative")


def _half_cols(fused: Tensor) -> int:
    return fused.shape[-1] // 2


def _own_cols(intermediate: int) -> int:
    return intermediate


PLAIN = Source("x", "Tensor x", nvfp4.rows_of, {"x": Values()})
"""A plain tensor."""

WEIGHT = Source(
    "w",
    "Tensor w",
    nvfp4.weight_values,
    {"w": Values(2, "(N, K), or (K, N) with dim=0")},
    _checks.weight_arguments,
    granularity=None,
    options='str block="1x16", int dim=-1, ',
)
"""A weight, which is packed along either dimension and has one scale for all of it."""

DEINTERLEAVED = Source(
    "fused",
    "Tensor fused, int intermediate, int interleave",
    sources.deinterleave,
    {"fused": Values(shape="(..., 2 * intermediate)")},
    _checks.deinterleave_arguments,
    options='str op="select", ',
    cols=_own_cols,
)
"""Gate and up of a fused projection, of which it keeps the gate or makes ``silu(gate) * up``."""

SWIGLU = Source(
    "fused",
    "Tensor fused",
    sources.swiglu,
    {"fused": Values(shape="(..., 2 * N)")},
    _checks_fp8.gate_and_up,
    options="int interleave=0, ",
    granularity="row",
    cols=_half_cols,
)
"""``silu(gate) * up`` of a fused projection."""

ROTATED = Source(
    "x",
    "Tensor x",
    recipes.rotated,
    {"x": Values(), "signs": SIGNS, "cos": FP32, "sin": FP32},
    _checks_rotation.rotated_arguments,
    options='str rotate="none", Tensor? signs=None, Tensor? cos=None, Tensor? sin=None, '
    "bool interleaved=False, ",
    granularity="row",
    choices={"rotate": ROTATIONS},
)
"""A tensor after RoPE of its first columns, and a Hadamard transform of neighbors in a row."""

NORM = Source(
    "x",
    "Tensor x, Tensor weight",
    sources.rmsnorm_of,
    {"x": Values(), "eps": _EPSILON},
    _checks.norm_arguments,
    tail=_EPS,
    written="Tensor(a!)? residual=None, ",
    granularity="row",
    inv_rms=True,
)
"""RMSNorm of a tensor, or of its sum with a residual, which is written in place."""

NORMALIZED = NORM._replace(
    takes="Tensor x, Tensor weight, Tensor inv_rms",
    check=_checks.normalized_arguments,
    values=sources.normalized,
    tail="",
    written="",
    inv_rms=False,
    accepts={"x": Values()},
)
"""RMSNorm of a tensor whose inv_rms is known."""

_HYPER_CONNECTIONS = Values(2, "(..., n_hc, N)")
MHC = Source(
    "X",
    "Tensor X, Tensor A, Tensor weight",
    sources.mhc_rmsnorm_of,
    {"X": _HYPER_CONNECTIONS, "eps": _EPSILON},
    _checks.mhc_arguments,
    tail=_EPS,
    granularity="row",
    reduced=2,
    inv_rms=True,
)
"""RMSNorm of a sum of hyper-connections."""

MHC_NORMALIZED = MHC._replace(
    takes="Tensor X, Tensor A, Tensor weight, Tensor inv_rms",
    check=_checks.mhc_normalized_arguments,
    values=sources.mhc_normalized,
    tail="",
    inv_rms=False,
    accepts={"X": _HYPER_CONNECTIONS},
)
"""RMSNorm of a sum of hyper-connections, with inv_rms known."""


def rotated_arguments(
    rotate: str, signs: Tensor | None, rope: tuple[Tensor, Tensor] | None, interleaved: bool
) -> dict[str, Any]:
    """What ROTATED takes beside the tensor, as public functions have it.

    Raises:
        TypeError: ``rope`` is not a pair.
        ValueError: ``interleaved`` without ``rope``, or a table or signs that are not contiguous.
    """
    if interleaved and rope is None:
        raise ValueError(
            f"interleaved: expected False without rope, got {interleaved!r}. It tells which "
            "columns rope pairs"
        )
    pair: Any = (None, None) if rope is None else rope
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise TypeError(
            f"rope: expected a pair of tensors, cos and sin, got {_checks.kind_of(pair)}"
        )
    cos, sin = pair
    for name, given in (("cos", cos), ("sin", sin), ("signs", signs)):
        if isinstance(given, Tensor):
            _checks.contiguous(given, name)
    return {"rotate": rotate, "signs": signs, "cos": cos, "sin": sin, "interleaved": interleaved}
