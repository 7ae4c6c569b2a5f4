"""NVFP4 of what SwiGLU, RMSNorm or hyper-connections give, in the same launches.

`jitquant.ops.nvfp4` says what these functions share with its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from jitquant.formats import NVFP4_DIVISOR, DeinterleaveOp, Granularity, Recipe, ScaleLayout
from jitquant.ops import _checks, sources
from jitquant.ops.nvfp4 import chosen, family_of, fitting, over, quantized
from jitquant.ops.parts import PARTS, Part, held, part_for_residual
from jitquant.ops.schema import Op
from jitquant.tensors import QuantizedActivation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["deinterleave_quantize_nvfp4", "mhc_rmsnorm_quantize_nvfp4", "rmsnorm_quantize_nvfp4"]


def _normed_part(
    x: Tensor,
    residual: Tensor | None = None,
    granularity: str = "row",
    inv_rms: Tensor | None = None,
) -> Part | None:
    of = part_for_residual(x.dtype, residual)
    return of if of is None else held(_with_launches(of, granularity, inv_rms), x)


def _mhc_part(
    X: Tensor,
    granularity: str = "row",
    inv_rms: Tensor | None = None,
) -> Part | None:
    of = PARTS.get(X.dtype)
    return of if of is None else _with_launches(of, granularity, inv_rms)


def _with_launches(of: Part, granularity: str, inv_rms: Tensor | None) -> Part:
    """Without the second launch, which quantizes rows whose inv_rms is known, if need not be."""
    if granularity == "tensor" or inv_rms is not None:
        return of
    return of.narrowed("rows", "-DJITQUANT_ROW_SCALES=1")


DEINTERLEAVE = family_of(
    "deinterleave_quantize_nvfp4",
    sources.DEINTERLEAVED,
    computed=("deinterleave_quantize", "deinterleave_amax_quantize_nvfp4"),
    given=("deinterleave_quantize", "deinterleave_quantize_nvfp4"),
    also={"fused_amax_quantize": "deinterleave_quantize_from_buffer"},
)
RMSNORM = family_of(
    "rmsnorm_quantize_nvfp4",
    sources.NORM,
    computed=("fused_rmsnorm_quantize", "rmsnorm_quantize_nvfp4"),
    given=("fused_rmsnorm_quantize", "rmsnorm_quantize_nvfp4_from_gsa"),
    normalized=sources.NORMALIZED,
    part=_normed_part,
)
MHC = family_of(
    "mhc_rmsnorm_quantize_nvfp4",
    sources.MHC,
    computed=("fused_mhc_rmsnorm_quantize", "mhc_rmsnorm_quantize_nvfp4"),
    given=("fused_mhc_rmsnorm_quantize", "mhc_rmsnorm_quantize_nvfp4_from_gsa"),
    normalized=sources.MHC_NORMALIZED,
    part=_mhc_part,
)

OPS: tuple[Op, ...] = (*DEINTERLEAVE.ops, *RMSNORM.ops, *MHC.ops)
"""Every op of NVFP4 that computes what it quantizes."""


def deinterleave_quantize_nvfp4(
    fused: Tensor,
    intermediate: int,
    gsa: float | Tensor | None = None,
    *,
    interleave: int = 8,
    op: DeinterleaveOp = "swiglu",
    granularity: Granularity = "tensor",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    process_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """Applies SwiGLU to (or selects the gate of) a fused gate-and-up tensor, and quantizes that.

    Args:
        fused: (..., 2 * intermediate), runs of ``interleave`` gate and up columns, alternating.
        intermediate: columns of the result.
        gsa: None to compute it, a positive number, or float32 of one element, (rows,) or (..., 1).
        interleave: length of the runs, a divisor of ``intermediate``; 0: [gate | up].
        op: "swiglu": ``silu(gate) * up`` in fp32; "select": the gate unchanged, for a GEMM
            whose epilogue has applied SwiGLU.
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is ``amax / divisor``.
        recipe: "te", "vllm" or "te_flush".
        scale_layout: "linear" or "swizzled_128x4".
        process_group: the ranks that hold the parts of fused, which share one amax; or None.
        out: buffers of ``QuantizedActivation.empty((*fused.shape[:-1], intermediate), ...)``.

    Returns:
        A quantized tensor of the shape (..., intermediate).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    if type(intermediate) is not int:
        intermediate = _checks.integer(intermediate, "intermediate")
    of_gsa, number, given, covers = chosen(DEINTERLEAVE, gsa, granularity)
    form = (fused, intermediate, -1, scale_layout, covers, recipe)
    done = of_gsa.into(
        process_group is None and fitting(of_gsa, form, given, out),
        fused=fused,
        intermediate=intermediate,
        interleave=interleave,
        op=op,
        gsa=given,
        divisor=divisor,
        granularity=granularity,
        recipe=recipe,
        scale_layout=scale_layout,
        gsa_value=number,
    )
    if process_group is not None:
        return over(process_group, DEINTERLEAVE, done, form, gsa, out)
    return quantized(of_gsa, done, form, given, out)


def rmsnorm_quantize_nvfp4(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    gsa: float | Tensor | None = None,
    granularity: Granularity = "row",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    process_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """RMSNorm and quantization in one launch.

    With a computed gsa for the whole tensor there are two if it has more than one row.

    ``y = v * inv_rms * weight`` in fp32, ``inv_rms = 1 / sqrt(mean(v^2) + eps)``; y is not
    rounded to the input's dtype before it is quantized.

    Args:
        x: (..., N).
        weight: (N,), contiguous, of x's dtype or float32.
        eps: added to the mean of the squares.
        residual: of x's shape and dtype; becomes ``x + residual``, added in fp32 and rounded once,
            and that is the v which is normalized. Without it v is x.
        gsa: None to compute it, a positive number, or float32 of one element, (rows,) or (..., 1).
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is ``amax / divisor``.
        recipe: "te", "vllm" or "te_flush".
        scale_layout: "linear" or "swizzled_128x4".
        process_group: the ranks that hold the parts of x, which share one amax; or None.
        out: buffers of ``QuantizedActivation.empty(x.shape, inv_rms=True, granularity=...)``.

    Returns:
        A quantized tensor of x's shape with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    op, number, given, covers = chosen(RMSNORM, gsa, granularity)
    form = (x, None, -1, scale_layout, covers, recipe)
    done = op.into(
        process_group is None and fitting(op, form, given, out),
        x=x,
        weight=weight,
        eps=eps,
        residual=residual,
        gsa=given,
        divisor=divisor,
        granularity=granularity,
        recipe=recipe,
        scale_layout=scale_layout,
        gsa_value=number,
    )
    if process_group is not None:
        return over(process_group, RMSNORM, done, form, gsa, out)
    return quantized(op, done, form, given, out)


def mhc_rmsnorm_quantize_nvfp4(
    X: Tensor,
    A: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    gsa: float | Tensor | None = None,
    granularity: Granularity = "row",
    divisor: float = NVFP4_DIVISOR,
    recipe: Recipe = "te",
    scale_layout: ScaleLayout = "linear",
    process_group: ProcessGroup | None = None,
    out: QuantizedActivation | None = None,
) -> QuantizedActivation:
    """The mix of hyper-connections, RMSNorm and quantization, in as many launches as the norm.

    ``v = sum over h of A[..., h] * X[..., h, :]`` in fp32, in the order of h; then as
    `rmsnorm_quantize_nvfp4`.

    Args:
        X: (..., n_hc, N), n_hc from 1 to 8.
        A: (..., n_hc), contiguous, of X's dtype or float32.
        weight: (N,), contiguous, of X's dtype or float32.
        eps: added to the mean of the squares.
        gsa: None to compute it, a positive number, or float32 of one element, (rows,) or (..., 1).
        granularity: what one computed gsa covers: "tensor" or "row".
        divisor: a computed gsa is ``amax / divisor``.
        recipe: "te", "vllm" or "te_flush".
        scale_layout: "linear" or "swizzled_128x4".
        process_group: the ranks that hold the parts of X, which share one amax; or None.
        out: buffers of ``QuantizedActivation.empty((..., N), inv_rms=True, granularity=...)``.

    Returns:
        A quantized tensor of the shape (..., N) with ``inv_rms`` (rows,).

    Raises:
        TypeError, ValueError: an argument is not accepted.
    """
    op, number, given, covers = chosen(MHC, gsa, granularity)
    form = (X, None, -1, scale_layout, covers, recipe)
    done = op.into(
        process_group is None and fitting(op, form, given, out),
        X=X,
        A=A,
        weight=weight,
        eps=eps,
        gsa=given,
        divisor=divisor,
        granularity=granularity,
        recipe=recipe,
        scale_layout=scale_layout,
        gsa_value=number,
    )
    if process_group is not None:
        return over(process_group, MHC, done, form, gsa, out)
    return quantized(op, done, form, given, out)
