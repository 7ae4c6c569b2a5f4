"""The second set of peers' bits (tests/data/README.md), and calls that match them.

A call here is of the ops or of their references alike: ``call(ops, x)`` takes functions by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = load_file(Path(__file__).parent / "data" / "peer_vectors_2.safetensors")


class Recipe(NamedTuple):
    """What gives a vector's bits.

    Attributes:
        op: "quantize_nvfp4_recipe" or "quantize_mxfp4".
        kwargs: its recipe.
        transposed: whether it quantizes the transpose.
        subnormal: whether blocks whose scale byte is 1 to 7 count.
    """

    op: str
    kwargs: dict[str, Any]
    transposed: bool = False
    subnormal: bool = True


def _nvfp4(transposed: bool = False, subnormal: bool = True, **kwargs: Any) -> Recipe:
    return Recipe("quantize_nvfp4_recipe", kwargs, transposed, subnormal)


def _fouroversix(**kwargs: Any) -> Recipe:
    return _nvfp4(subnormal=False, recipe="te_flush", **kwargs)


RECIPES: dict[str, Recipe] = {
    "nvfp4_te_t": _nvfp4(True),
    "nvfp4_te_16x16": _nvfp4(block="16x16"),
    "nvfp4_te_16x16_t": _nvfp4(True, block="16x16"),
    "nvfp4_te_rowscaled_t": _nvfp4(True, granularity="row"),
    "nvfp4_te_rht_t": _nvfp4(True, rotate="te"),
    "nvfp4_te_rht_nosign_t": _nvfp4(True, rotate="te", signs=torch.ones(16, dtype=torch.int8)),
    "nvfp4_te_sr": _nvfp4(rounding="stochastic"),
    "nvfp4_te_4over6_mae_256_t": _nvfp4(True, select="4over6_mae", e4m3_max=256),
    "nvfp4_te_4over6_mae_256_rowscaled": _nvfp4(
        select="4over6_mae", e4m3_max=256, granularity="row"
    ),
    "nvfp4_fouroversix_static_6": _fouroversix(select="static_6"),
    "nvfp4_fouroversix_static_4": _fouroversix(select="static_4"),
    "nvfp4_fouroversix_mse_16x16": _fouroversix(select="4over6_mse", e4m3_max=256, block="16x16"),
}
for _rule in ("mae", "mse"):
    for _top in (256, 448):
        _kind = {"select": f"4over6_{_rule}", "e4m3_max": _top}
        RECIPES[f"nvfp4_te_4over6_{_rule}_{_top}"] = _nvfp4(**_kind)
        RECIPES[f"nvfp4_te_4over6_{_rule}_{_top}_16x16"] = _nvfp4(**_kind, block="16x16")
    RECIPES[f"nvfp4_te_4over6_{_rule}_256_fast"] = _nvfp4(
        select=f"4over6_{_rule}_fast", e4m3_max=256
    )
for _rule in ("mae", "mse", "abs_max"):
    RECIPES[f"nvfp4_fouroversix_{_rule}"] = _fouroversix(select=f"4over6_{_rule}", e4m3_max=256)
for _scaling in ("floor", "ceil", "even", "rceil"):
    RECIPES[f"mxfp4_torchao_{_scaling}"] = Recipe("quantize_mxfp4", {"scaling": _scaling})
for _direction in ("up", "down"):
    _how = {"scaling": f"gptoss_{_direction}"}
    RECIPES[f"mxfp4_gptoss_{_direction}"] = Recipe("quantize_mxfp4", _how)
for _full in (6, 4):
    _how = {"scaling": f"static_{_full}"}
    RECIPES[f"mxfp4_fouroversix_static_{_full}"] = Recipe("quantize_mxfp4", _how)

CASES = sorted(
    {(case, recipe) for case, recipe, _ in (k.split("/") for k in GOLDEN if k.count("/") == 2)}
)

Function = Callable[..., tuple[Tensor, ...]]


def _agree(name: str, got: Tensor, want: Tensor, meaningful: Tensor) -> None:
    got, want = got.view(torch.uint8).cpu(), want.view(torch.uint8)
    assert got.shape == want.shape, name
    wrong = ((got != want) & meaningful).sum()
    assert wrong == 0, f"{name}: {wrong} of {got.numel()} differ"


def assert_equals_golden(
    case: str, name: str, function: Callable[[str], Function], device: torch.device | str = "cpu"
) -> None:
    """What the functions of these names give is what the peer gave, to the bit.

    Args:
        case: the input.
        name: of a vector.
        function: by the name of an op.
        device: where to.
    """
    recipe, field = RECIPES[name], f"{case}/{name}/"
    x = GOLDEN[f"{case}/x"]
    source = x.T.contiguous() if recipe.transposed else x
    rows, cols = source.shape
    kwargs = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in recipe.kwargs.items()
    }
    if name == "nvfp4_te_sr":
        kwargs["random_bytes"] = GOLDEN[f"{field}rbits"].to(device)
    block = 32 if recipe.op == "quantize_mxfp4" else 16
    if "rotate" in kwargs and cols % 16:
        source = torch.nn.functional.pad(source, (0, 16 - cols % 16))
    on_device = source.to(device)
    if block == 32:
        x_fp4, x_sf = function(recipe.op)(on_device, **kwargs)
        want_sf = GOLDEN[f"{field}scale_e8m0"]
    else:
        rotation = {k: v for k, v in kwargs.items() if k in ("rotate", "signs", "granularity")}
        a = function("rotated_amax")(on_device, **rotation)[0]
        if f"{field}amax" in GOLDEN:
            assert torch.equal(a.amax().reshape(1).cpu(), GOLDEN[f"{field}amax"])
        x_fp4, x_sf = function(recipe.op)(on_device, a, **kwargs)[:2]
        want_sf = GOLDEN[f"{field}x_sf"]
    codes, groups = GOLDEN[f"{field}x_fp4"], want_sf.shape[1]
    compared = torch.ones_like(want_sf, dtype=torch.bool)
    if not recipe.subnormal:
        compared &= (want_sf == 0) | (want_sf > 7)
    _agree("x_sf", x_sf[:rows, :groups], want_sf, compared)
    meaningful = compared
    if kwargs.get("recipe") == "te_flush":
        # Where the scale is 0, this peer drops the signs of the values.
        zero = (want_sf == 0).repeat_interleave(8, dim=1)[:, : codes.shape[1]]
        x_fp4 = x_fp4.cpu().view(torch.uint8).clone()
        x_fp4[:, : codes.shape[1]][zero] &= 0x77
    elif block == 16:
        meaningful = compared & (want_sf != 0)
    meaningful = meaningful.repeat_interleave(block // 2, dim=1)[:, : codes.shape[1]]
    if case == "zero_rows_bf16":
        # Of -0 these peers keep no sign.
        zero = (source == 0).reshape(rows, -1, 2)
        got = x_fp4.cpu().view(torch.uint8)[:, : codes.shape[1]].clone()
        for half, mask in enumerate((0x08, 0x80)):
            dropped = zero[:, :, half] & (codes & mask == 0) & (got & mask != 0)
            got[dropped] &= 0xFF ^ mask
        x_fp4 = got
    _agree("x_fp4", x_fp4[:, : codes.shape[1]], codes, meaningful)
    if f"{field}dequant" in GOLDEN:
        value = function("dequantize_mxfp4")(x_fp4.view(torch.float4_e2m1fn_x2), x_sf)[0].cpu()
        want = GOLDEN[f"{field}dequant"]
        assert torch.equal(
            value[compared.repeat_interleave(block, 1)], want[compared.repeat_interleave(block, 1)]
        )
