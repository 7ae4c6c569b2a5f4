"""Arguments for the halves of a quantization over a process group, made of those of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from samples import DTYPES, Arguments, Sample, inputs, randn
from torch import Tensor

from jitquant import reference

Device = torch.device | str
Whole = dict[str, list[Sample]]


def _larger(keep_nan: bool, granularity: str, x: Tensor, *gate_and_up: Any) -> Tensor:
    """An amax as of a tensor that ``x`` is a part of: of some rows larger than that of ``x``.

    Args:
        keep_nan, granularity, x: of the op.
        gate_and_up: nothing; or of a projection intermediate, interleave and op.
    """
    how: dict[str, Any] = {"granularity": granularity, "keep_nan": keep_nan}
    if gate_and_up:
        *columns, op = gate_and_up
        (amax,) = reference.deinterleave_amax(x.cpu(), *columns, op=op, **how)
    else:
        (amax,) = reference.amax(x.cpu(), **how)
    factors = torch.tensor([1.0, 1.7, 1.0, 30.0]).repeat(amax.numel() // 4 + 1)
    return (amax * factors[: amax.numel()]).to(x.device)


_WAYS = list(itertools.product(("tensor", "row"), (False, True)))


def _amax_samples() -> list[Sample]:
    out = []
    for i, ((label, make), dtype) in enumerate(itertools.product(inputs().items(), DTYPES)):
        for granularity, keep_nan in _WAYS[i % 2 :: 2]:

            def plain(d: Device, m=make, t=dtype, g=granularity, n=keep_nan) -> Arguments:
                return (m(t, d),), {"granularity": g, "keep_nan": n}

            name = f"{label}-{str(dtype)[6:]}-{granularity}-{keep_nan}"
            out.append(Sample("amax", name, plain))
    for rows, cols in ((300, 1040), (2, 70000)):
        out += [
            Sample(
                "amax",
                f"{rows}x{cols}-{granularity}-{keep_nan}",
                lambda d, s=(rows, cols), g=granularity, n=keep_nan: (
                    (randn(*s).to(d),),
                    {"granularity": g, "keep_nan": n},
                ),
            )
            for granularity, keep_nan in _WAYS
        ]
    return out


def _deinterleave_amax_samples() -> list[Sample]:
    out = []
    shapes = (((5,), 32, 8), ((3,), 40, 0), ((130,), 64, 16), ((2, 3), 21, 7), ((0,), 16, 8))
    for (leading, cols, interleave), dtype, (granularity, keep_nan) in itertools.product(
        shapes, DTYPES, _WAYS
    ):
        op = "swiglu" if keep_nan == (granularity == "row") else "select"
        keywords = {"op": op, "granularity": granularity, "keep_nan": keep_nan}

        def make(
            d: Device, s=(*leading, 2 * cols), t=dtype, c=cols, i=interleave, k=keywords
        ) -> Arguments:
            return (randn(*s, dtype=t).to(d), c, i), k

        name = f"{leading}x{cols}-{interleave}-{str(dtype)[6:]}-{granularity}-{keep_nan}-{op}"
        out.append(Sample("deinterleave_amax", name, make, op == "select"))
    return out


def _from(
    whole: list[Sample],
    op: str,
    change: Callable[[tuple[Any, ...], dict[str, Any]], Arguments],
    given: Callable[[dict[str, Any]], bool] = lambda keywords: False,
) -> list[Sample]:
    """The samples of ``whole`` whose scale is computed, as arguments of the second half."""
    out = []
    for sample in whole:
        _, keywords = sample.make("cpu")
        if keywords.get("gsa_value") is not None or given(keywords):
            continue

        def make(d: Device, s=sample) -> Arguments:
            return change(*s.make(d))

        out.append(Sample(op, sample.label, make, sample.exact))
    return out


def _names(keywords: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: keywords[name] for name in names if name in keywords}


def _quantize(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    amax = _larger(False, keywords.get("granularity", "tensor"), args[0])
    return (args[0], amax, *args[1:]), _names(keywords, "recipe", "scale_layout")


def _weight(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    amax = _larger(False, "tensor", args[0]) * 1.7
    return (args[0], amax), _names(keywords, "block", "dim", "recipe", "scale_layout")


def _deinterleave(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    of = keywords.get("op", "select")
    amax = _larger(False, keywords.get("granularity", "tensor"), *args, of)
    return (*args, amax), _names(keywords, "op", "recipe", "scale_layout")


def _rmsnorm(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    x, weight = args[:2]
    amax, inv_rms = reference.rmsnorm_amax(x.cpu(), weight.cpu(), *args[2:])
    parts = (inv_rms.to(x.device), (2 * amax).to(x.device))
    return (x, weight, *parts), _names(keywords, "recipe", "scale_layout")


def _mhc(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    amax, inv_rms = reference.mhc_rmsnorm_amax(*(t.cpu() for t in args[:3]), *args[3:])
    parts = (inv_rms.to(args[0].device), (2 * amax).to(args[0].device))
    return (*args[:3], *parts), _names(keywords, "recipe", "scale_layout")


def _fp8(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    amax = _larger(True, keywords["granularity"], args[0])
    return (args[0], amax), _names(keywords, "dtype", "scale_ub", "amax_eps", "granularity")


def _silu(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    fused = args[0]
    columns = fused.shape[-1] // 2, keywords.get("interleave", 0)
    amax = _larger(True, keywords["granularity"], fused, *columns, "swiglu")
    return (fused, amax), _names(
        keywords, "dtype", "scale_ub", "amax_eps", "granularity", "interleave"
    )


def _first(args: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
    return args, _names(keywords, "residual")


def sharded_samples(whole: Whole) -> Whole:
    """Samples of each op that is half of one over a process group, by its name.

    Args:
        whole: the samples of the ops that do both.
    """

    def scaled(keywords: dict[str, Any]) -> bool:
        return keywords.get("scale_value") is not None

    norms = (
        ("rmsnorm_quantize_nvfp4", "rmsnorm_amax"),
        ("mhc_rmsnorm_quantize_nvfp4", "mhc_rmsnorm_amax"),
    )
    fp8 = {
        name: [s for s in whole[name] if len(a := s.make("cpu")[0]) < 2 or a[1] is None]
        for name in ("quantize_fp8", "swiglu_quantize_fp8")
    }
    groups = [
        _amax_samples(),
        _deinterleave_amax_samples(),
        *(_from(whole[dynamic], first, _first) for dynamic, first in norms),
        *(
            _from(samples, f"{name}_from_amax", change, scaled)
            for name, samples, change in (
                ("quantize_nvfp4", whole["quantize_nvfp4"], _quantize),
                ("quantize_weight_nvfp4", whole["quantize_weight_nvfp4"], _weight),
                (
                    "deinterleave_quantize_nvfp4",
                    whole["deinterleave_quantize_nvfp4"],
                    _deinterleave,
                ),
                ("rmsnorm_quantize_nvfp4", whole["rmsnorm_quantize_nvfp4"], _rmsnorm),
                ("mhc_rmsnorm_quantize_nvfp4", whole["mhc_rmsnorm_quantize_nvfp4"], _mhc),
                ("quantize_fp8", fp8["quantize_fp8"], _fp8),
                ("swiglu_quantize_fp8", fp8["swiglu_quantize_fp8"], _silu),
            )
        ),
    ]
    return {group[0].op: group for group in groups}
