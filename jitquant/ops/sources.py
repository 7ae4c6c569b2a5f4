"""Where the values come from that ops quantize: the tensor itself, gate and up, norms, a weight."""

from __future__ import annotations

from dataclasses import replace

from jitquant.numerics import nvfp4, sources
from jitquant.ops import _checks, _checks_fp8
from jitquant.ops.schema import Number, Source

_EPS = "float eps=1e-6, "
_NUMBERS = {"eps": Number(0.0, "a finite number that is not negative")}

PLAIN = Source("x", "Tensor x", _checks.plain_arguments, nvfp4.rows_of)
"""A tensor as it is."""

WEIGHT = Source(
    "w",
    "Tensor w",
    _checks.weight_arguments,
    nvfp4.weight_values,
    granularity=None,
    options='str block="1x16", int dim=-1, ',
)
"""A weight, which is packed along either dimension and has one scale for all of it."""

DEINTERLEAVED = Source(
    "fused",
    "Tensor fused, int intermediate, int interleave",
    _checks.deinterleave_arguments,
    sources.deinterleave,
    options='str op="select", ',
    cols=lambda intermediate: intermediate,
)
"""Gate and up of a fused projection, of which it keeps the gate or makes ``silu(gate) * up``."""

SWIGLU = Source(
    "fused",
    "Tensor fused",
    _checks_fp8.gate_and_up,
    sources.swiglu,
    options="int interleave=0, ",
    granularity="row",
    cols=lambda fused: fused.shape[-1] // 2,
)
"""``silu(gate) * up`` of a fused projection."""

NORM = Source(
    "x",
    "Tensor x, Tensor weight",
    _checks.norm_arguments,
    sources.rmsnorm_of,
    tail=_EPS,
    written="Tensor(a!)? residual=None, ",
    granularity="row",
    inv_rms=True,
    numbers=_NUMBERS,
)
"""RMSNorm of a tensor, or of its sum with a residual, which is written in place."""

NORMALIZED = replace(
    NORM,
    takes="Tensor x, Tensor weight, Tensor inv_rms",
    check=_checks.normalized_arguments,
    values=sources.normalized,
    tail="",
    written="",
    inv_rms=False,
    numbers={},
)
"""RMSNorm of a tensor whose inv_rms is known."""

MHC = Source(
    "X",
    "Tensor X, Tensor A, Tensor weight",
    _checks.mhc_arguments,
    sources.mhc_rmsnorm_of,
    tail=_EPS,
    granularity="row",
    reduced=2,
    inv_rms=True,
    numbers=_NUMBERS,
)
"""RMSNorm of a sum of hyper-connections."""

MHC_NORMALIZED = replace(
    MHC,
    takes="Tensor X, Tensor A, Tensor weight, Tensor inv_rms",
    check=_checks.mhc_normalized_arguments,
    values=sources.mhc_normalized,
    tail="",
    inv_rms=False,
    numbers={},
)
"""RMSNorm of a sum of hyper-connections, with inv_rms known."""
