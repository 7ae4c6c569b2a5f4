"""Rounds weights to NVFP4: to nearest, with searched scales, or by GPTQ.

The result is always plain NVFP4: E2M1 codes, E4M3 scales for 16 neighbors, one gsa. Kernels, files
and speed are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from jitquant.formats import (
    E2M1_MAX,
    E4M3_MAX,
    NVFP4_BLOCK,
    SCALE_DTYPE,
)
from jitquant.numerics.nvfp4 import (
    constant,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from jitquant.ops.nvfp4 import amax_gsa, quantize_nvfp4, quantize_weight_nvfp4
from jitquant.tensors.nvfp4 import NVFP4Tensor

WeightRounding = Literal["nearest", "4over6", "mse", "gptq"]
WEIGHT_ROUNDINGS: Final = ("nearest", "4over6", "mse", "gptq")
"""Ways to round a weight; as a rule each is more accurate than the one before it."""

Codes = tuple[Tensor, Tensor]
"""E2M1 codes uint8 (N, K), and the bytes of E4M3 scales uint8 (N, K / 16)."""

_TOP = 256  # largest block scale of 4over6: one that is half as large again is E4M3, too
_DAMPINGS = (0.01, 0.1, 1.0, 10.0)  # of the mean of the diagonal: the first is GPTQ's
_CHUNK = 8 * NVFP4_BLOCK  # columns whose errors are passed on together
_STEPS = range(-2, 7)  # E4M3 codes from that which makes an amax 6; at 5 it is 4
_GSAS = 8  # gsas of an octave
_SAMPLE = 1 << 18  # elements that a gsa is searched with
_PART = 1 << 22  # elements whose scales are searched together


def quantized_weights(
    weights: Sequence[Tensor],
    rounding: WeightRounding,
    moments: Sequence[Tensor | None] = (),
) -> list[NVFP4Tensor]:
    """Quantizes weights to NVFP4 with one shared gsa and linear scales.

    - "nearest": `jitquant.quantize_weight_nvfp4`.
    - "4over6": the amax of each block maps to 6 or 4, whichever has the smaller squared error
      (fouroversix, arXiv 2512.02010); gsa = amax / 1536.
    - "mse": block scales and gsa with the smallest squared error.
    - "gptq": later columns compensate the error of a column (arXiv 2210.17323), with the gsa of
      "mse". On the inputs of the moment, the squared error of the outputs is never larger than
      with "nearest". Weights without a moment are rounded like "mse".

    Args:
        weights: (N, K) each, K the same, bfloat16, float16 or float32, on one device.
        rounding: one of these.
        moments: for "gptq": fp32 (K, K), the sum of ``x.T @ x`` over the inputs of each, or None.
    """
    dense = [w.detach() if w.stride(-1) == 1 else w.detach().contiguous() for w in weights]
    gsa = shared_gsa(dense, rounding)
    if rounding != "gptq" or all(moment is None for moment in moments):
        return [with_gsa(w, rounding, gsa) for w in dense]
    known = tuple(moments)
    pad = -dense[0].shape[1] % NVFP4_BLOCK
    values = [functional.pad(w.float(), (0, pad)) for w in dense]
    known = tuple(None if m is None else functional.pad(m, (0, pad) * 2) for m in known)
    made = [_rounded(v, gsa, m) for v, m in zip(values, known, strict=True)]
    least = shared_gsa(dense, "nearest")
    for v, m, mine in zip(values, known, made, strict=True):
        if m is not None and bool(
            output_noise(dequantized(*mine, gsa) - v, m).sum()
            > output_noise(dequantized(*_nearest(v, least), least) - v, m).sum()
        ):
            gsa = least  # with it no row is worse
            made = [_rounded(v, gsa, m) for v, m in zip(values, known, strict=True)]
            break
    return [_packed(codes, gsa, w.shape[1]) for w, codes in zip(dense, made, strict=True)]


def shared_gsa(weights: Sequence[Tensor], rounding: WeightRounding = "nearest") -> Tensor:
    """The gsa that weights share: fp32 (1,) on the device of the first.

    Args:
        weights: (N, K) each, the last dimension contiguous.
        rounding: "nearest": the largest amax / 2688; "4over6": the largest amax / 1536; "mse" and
            "gptq": the value in the octave above amax / 2688 with the smallest squared error on
            evenly spaced rows.
    """
    gsas = [amax_gsa(w).to(weights[0].device) for w in weights]
    least = torch.stack(gsas).amax(0)
    return gsa_for(rounding, least, [sample(w, len(weights)).to(least.device) for w in weights])


def gsa_for(rounding: WeightRounding, least: Tensor, samples: Sequence[Tensor]) -> Tensor:
    """`shared_gsa` from the largest gsa of the weights and, for "mse" and "gptq", rows of them.

    A gsa is 0, or a normal number: files have its reciprocal.
    """
    least = torch.where(least == 0, least, least.clamp(min=torch.finfo(torch.float32).tiny))
    if rounding == "nearest":
        return least
    if rounding == "4over6":
        return least * (E4M3_MAX / _TOP)
    power = _power(least)
    values = [functional.pad(s.float(), (0, -s.shape[1] % NVFP4_BLOCK)) * power for s in samples]
    gsas = [least * 2.0 ** (i / _GSAS) for i in range(_GSAS)]
    errors = [torch.stack([_noise(v, gsa * power) for v in values]).sum() for gsa in gsas]
    return torch.stack(gsas)[torch.stack(errors).argmin()]


def with_gsa(weight: Tensor, rounding: WeightRounding, gsa: Tensor) -> NVFP4Tensor:
    """Quantizes a weight (N, K) with a given gsa from `shared_gsa`; "gptq" works like "mse"."""
    if rounding == "nearest":
        return quantize_weight_nvfp4(weight, gsa=gsa)
    if rounding == "4over6":
        return _four_over_six(weight, gsa)
    values = functional.pad(weight.float(), (0, -weight.shape[1] % NVFP4_BLOCK))
    return _packed(searched(values, gsa), gsa, weight.shape[1])


def _packed(made: Codes, gsa: Tensor, cols: int) -> NVFP4Tensor:
    return NVFP4Tensor(pack_e2m1(made[0]), made[1].view(SCALE_DTYPE), gsa, None, cols)


def _rounded(values: Tensor, gsa: Tensor, moment: Tensor | None) -> Codes:
    """Rounds by "gptq", or by "mse" without statistics of the inputs."""
    found = searched(values, gsa)
    if moment is None:
        return found
    best = _better(found, _nearest(values, gsa), values, gsa, moment)
    return _better(gptq(values, moment, gsa), best, values, gsa, moment)


def _nearest(values: Tensor, gsa: Tensor) -> Codes:
    q = quantize_weight_nvfp4(values, gsa=gsa)
    return unpack_e2m1(q.x_fp4), q.x_sf.view(torch.uint8)


def _better(first: Codes, second: Codes, values: Tensor, gsa: Tensor, moment: Tensor) -> Codes:
    """Selects, for each row, the version with the smaller output error."""
    noises = [
        output_noise(dequantized(*each, gsa) - values, moment)[:, None] for each in (first, second)
    ]
    better = noises[0] < noises[1]
    return torch.where(better, first[0], second[0]), torch.where(better, first[1], second[1])


def sample(weight: Tensor, weights: int) -> Tensor:
    """Evenly spaced rows for the search of a gsa.

    Args:
        weight: (N, K).
        weights: the number of weights that share the gsa.
    """
    count = min(weight.shape[0], max(1, _SAMPLE // weights // weight.shape[1]))
    last = weight.shape[0] - 1
    first = torch.linspace(0, last, count, dtype=torch.float32, device=weight.device)
    return weight[first.long()]


def _power(gsa: Tensor) -> Tensor:
    """The power of two that brings a gsa to 0.5 or more and below 1; products with it are exact.

    Squares of weights times it neither overflow nor vanish.
    """
    usable = torch.where(gsa == 0, 1.0, gsa)
    return torch.frexp(usable).mantissa / usable


def _noise(values: Tensor, gsa: Tensor) -> Tensor:
    error = dequantized(*searched(values, gsa), gsa) - values
    return error.square().sum(dtype=torch.float64)


def dequantized(codes: Tensor, scales: Tensor, gsa: Tensor) -> Tensor:
    """fp32 (N, K) of codes uint8 (N, K) and bytes of scales (N, K / 16)."""
    values = decode_e2m1(codes).view(*scales.shape, NVFP4_BLOCK)
    return (values * (decode_e4m3(scales) * gsa)[:, :, None]).flatten(1)


def _four_over_six(weight: Tensor, gsa: Tensor) -> NVFP4Tensor:
    q = quantize_nvfp4(weight, gsa, select="4over6_mse", e4m3_max=_TOP)
    return NVFP4Tensor(q.x_fp4, q.x_sf, gsa, None, weight.shape[1])


def searched(values: Tensor, gsa: Tensor, importance: Tensor | None = None) -> Codes:
    """Codes and scale bytes with the smallest squared error.

    Tries nine E4M3 codes per block, from those where the amax saturates to those that map it to 4
    or less. Others are hardly ever better.

    Args:
        values: fp32 (N, K), K a multiple of 16.
        gsa: fp32 (1,).
        importance: fp32 (K,), weights of the columns' squared errors; None: 1.
    """
    parts = torch.split(values, max(1, _PART // values.shape[1]))
    found = [_searched(part, gsa, importance) for part in parts]
    return torch.cat([codes for codes, _ in found]), torch.cat([scales for _, scales in found])


def _searched(values: Tensor, gsa: Tensor, importance: Tensor | None) -> Codes:
    power = _power(gsa)
    x = (values * power).view(values.shape[0], -1, NVFP4_BLOCK)
    weights = None if importance is None else importance.view(1, -1, NVFP4_BLOCK)
    usable = torch.where(gsa == 0, 1.0, gsa) * power
    sixth = torch.div(x.abs().amax(2), constant(E2M1_MAX, x))
    base = encode_e4m3(sixth / usable).view(torch.uint8).to(torch.int16)
    most = encode_e4m3(torch.full_like(gsa, E4M3_MAX)).view(torch.uint8)
    best_codes = torch.zeros_like(x, dtype=torch.uint8)
    best_scales = torch.zeros_like(base, dtype=torch.uint8)
    best = torch.full(base.shape, torch.inf, dtype=torch.float32, device=x.device)
    for step in _STEPS:
        scales = torch.minimum((base + step).clamp(min=1), most).to(torch.uint8)
        unit = (decode_e4m3(scales) * usable)[:, :, None]
        codes = encode_e2m1(x / unit)
        errors = (decode_e2m1(codes) * unit - x).square()
        error = (errors if weights is None else errors * weights).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        best_codes = torch.where(better[:, :, None], codes, best_codes)
        best_scales = torch.where(better, scales, best_scales)
    return best_codes.flatten(1), best_scales


def output_noise(error: Tensor, moment: Tensor) -> Tensor:
    """The squared error of each output over the inputs of a moment: fp64 (N,).

    Args:
        error: fp32 (N, K) of a weight.
        moment: fp32 (K, K), or (K,) of inputs that are uncorrelated.
    """
    e, m = error.double(), moment.double()
    return ((e @ m) * e).sum(1) if m.dim() == 2 else e.square() @ m


def gptq(values: Tensor, moment: Tensor, gsa: Tensor) -> Codes:
    """Codes and scale bytes with a small error of the outputs.

    Rounds one column at a time; later columns compensate its error if the inputs are correlated.
    Blocks of 16 columns are processed from the largest inputs to the smallest. A block's scales are
    searched when it is processed.

    Args:
        values: fp32 (N, K), K a multiple of 16.
        moment: fp32 (K, K): the sum of ``x.T @ x``.
        gsa: fp32 (1,).
    """
    n, k = values.shape
    # Sums of squares near the ends of fp32 would not survive what follows.
    moment = moment / moment.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    turns = moment.diagonal().view(-1, NVFP4_BLOCK).sum(1).argsort(descending=True, stable=True)
    inner = torch.arange(NVFP4_BLOCK, device=turns.device)
    order = (turns[:, None] * NVFP4_BLOCK + inner).flatten()
    u = _inverse_factor(moment[order][:, order])
    importance = u.diagonal().square().reciprocal()
    usable = torch.where(gsa == 0, 1.0, gsa)
    w = values[:, order]
    codes = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    scales = torch.empty(n, k // NVFP4_BLOCK, dtype=torch.uint8, device=w.device)
    for first in range(0, k, _CHUNK):
        last = min(first + _CHUNK, k)
        errors = torch.empty(n, last - first, dtype=torch.float32, device=w.device)
        for column in range(first, last):
            block = column // NVFP4_BLOCK
            if column % NVFP4_BLOCK == 0:
                ours = slice(column, column + NVFP4_BLOCK)
                scales[:, block] = searched(w[:, ours], gsa, importance[ours])[1][:, 0]
                unit = decode_e4m3(scales[:, block]) * usable
            code = encode_e2m1(w[:, column] / unit)
            codes[:, column] = code
            error = (w[:, column] - decode_e2m1(code) * unit) / u[column, column]
            errors[:, column - first] = error
            rest = slice(column + 1, last)
            w[:, rest].addr_(error, u[column, rest], alpha=-1)
        w[:, last:].addmm_(errors, u[first:last, last:], alpha=-1)
    return codes[:, order.argsort()], scales[:, turns.argsort()]


def _inverse_factor(moment: Tensor) -> Tensor:
    """Upper U of ``inv(moment + damping) = U.T @ U``: fp32, by a Cholesky from the last column."""
    k = moment.shape[0]
    diagonal = moment.diagonal()
    dead = (diagonal == 0).to(moment.dtype)  # nothing is known of these columns
    for damping in _DAMPINGS:
        damped = moment + torch.diag(damping * diagonal.mean() + dead)
        factor, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not bool(failed):
            break
    else:
        raise ValueError("moment: expected x.T @ x of finite inputs, got another matrix")
    eye = torch.eye(k, dtype=moment.dtype, device=moment.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor.flip(0, 1), eye, upper=True)
    return inverse
