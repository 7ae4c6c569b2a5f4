"""Samples of the ops of recipes for training and rotation."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from samples import DTYPES, Arguments, Sample, inputs, randn, ways
from torch import Tensor

from jitquant.formats import (
    FP8_DTYPES,
    GROUP_DTYPES,
    GROUP_RECIPES,
    GROUP_SCALE_LAYOUTS,
    GROUP_SIZES,
    MXFP4_SCALINGS,
    RECIPES,
    ROTATIONS,
    SCALE_FORMATS,
    SCALE_LAYOUTS,
    SELECTS,
    STATIC_SELECTS,
)
from jitquant.numerics import recipes

STATE = torch.tensor([0x1234567890ABCDEF, (3 << 40) + 17])


def signs_of(rotate: str) -> Tensor | None:
    """Signs for a rotation, the same each time."""
    n = recipes.hadamard_size(rotate)
    return torch.where(randn(n, dtype=torch.float32, seed=9) > 0, 1, -1).to(torch.int8)


def _with_specials(v: Tensor) -> Tensor:
    """Rows of zeros, with NaN, with infinity, and of other magnitudes, in place."""
    v[1] = 0.0
    v[2, 3] = torch.nan
    v[3, 1] = torch.inf
    v[4] *= 1e-30
    v[5] *= 1e4
    return v


def _bytes(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(10)
    return torch.randint(256, tuple(x.shape), dtype=torch.uint8, generator=generator)


def _wide(rotate: str, dtype: torch.dtype, turn: int, flat: bool) -> Tensor:
    """Rows whose length a rotation divides; some with values that are special."""
    n = max(recipes.hadamard_size(rotate), 32 if flat else 16)
    shape = ((18, 3 * n), (5, 2 * n), (2, 3, n), (130, n), (0, n))[turn % 5]
    x = randn(*shape, dtype=torch.float32, seed=turn)
    if shape[0] == 18:
        x[1] = 0.0
        x[2, 3] = torch.nan
        x[3, 1] = torch.inf
        x[4] *= 1e-30
        x[5] *= 1e4
        x[6] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(3 * n // 8)
    return x.to(dtype)


def _on(device: torch.device | str, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in kwargs.items()}


def _amax(x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    names = ("rotate", "signs", "cos", "sin", "interleaved", "granularity")
    rotation = {k: kwargs[k] for k in names if k in kwargs}
    return recipes.rotated_amax(x, **rotation)[0]


def _rounding(x: Tensor, turn: int) -> dict[str, Any]:
    if turn % 2:
        return {"rounding": "stochastic", "rng_state": STATE}
    return {"rounding": "stochastic", "random_bytes": _bytes(x)}


def _nvfp4(label: str, x: Any, kwargs: dict[str, Any]) -> Sample:
    """Of the recipe's values, with the amax of the reference."""

    def make(device: torch.device | str) -> Arguments:
        values = x()
        a = _amax(values, kwargs)
        if kwargs.get("granularity") != "row" and len(label) % 2:
            a = a.amax().reshape(1)
        return (values.to(device), a.to(device)), _on(device, kwargs)

    return Sample("quantize_nvfp4_recipe", label, make)


def _plain(label: str, dtype: torch.dtype) -> Tensor:
    return inputs()[label](dtype, "cpu")


def _both_samples() -> tuple[list[Sample], list[Sample]]:
    amaxes, out = [], []
    # Rows, columns; the last are strided, or lie between words.
    shapes = ((128, 128), (256, 80), (16, 16), (384, 272), (128, 19), (40, 33), (1, 64), (130, 144))
    recipe_list: list[dict[str, Any]] = [
        {},
        {"rounding": "stochastic", "rng_state": STATE},
        {"rounding": "stochastic", "rng_state": STATE, "select": "static_4"},
        *({"select": select, "e4m3_max": 256} for select in SELECTS[1:]),
        {"block": "16x16"},
        *({"block": "16x16", "select": select} for select in SELECTS[1:]),
    ]
    every = itertools.product(DTYPES, (True, False), ("none", "te"), range(7))
    for turn, (dtype, whole, rotate, kind) in enumerate(every):
        fitting = [
            s
            for s in shapes
            if s[0] % max(recipes.hadamard_size(rotate), 1) == 0 and (s[1] % 16 == 0) == whole
        ]
        shape = fitting[turn % len(fitting)]
        how = recipe_list[kind if kind < 3 else 3 + (turn + 5 * kind) % (len(recipe_list) - 3)]
        if rotate == "none" or "block" not in how:
            how = {**how, "rotate": rotate}
        if turn % 2 and how.get("rotate", "none") != "none":
            how = {**how, "signs": signs_of(rotate)}

        def x(shape=shape, dtype=dtype, turn=turn) -> Tensor:
            rows, cols = shape
            values = randn(rows, cols + 16 * (turn % 2), dtype=torch.float32, seed=turn)
            if turn % 3 == 0 and rows > 20:
                values[3] = 0.0
                values[5, 2] = torch.nan
                values[20, 1] = torch.inf if turn % 2 else 1e4
            return values.to(dtype)[:, :cols]

        rotation = {k: how[k] for k in ("rotate", "signs") if k in how}
        layout = SCALE_LAYOUTS[turn // 2 % 2]
        if "rng_state" in how and turn // 2 % 2:
            how = {k: v for k, v in how.items() if k != "rng_state"}
            how |= {"random_bytes": _bytes(x()), "random_bytes_t": _bytes(x().T) ^ 0x5A}
        gsa = torch.tensor([0.01, (0.003, 2.0**-126, 3.3e38)[turn % 3]])
        said = f"{str(dtype)[6:]}-{shape}-{rotate}-{kind}-{turn}"

        def make(
            d, x=x, how=how, rotation=rotation, layout=layout, gsa=gsa, turn=turn
        ) -> Arguments:
            values = x()
            more = {"scale_layout": layout}
            if turn % 5 < 2:
                a, more["from_gsa_t"] = gsa[:1], gsa[1:]
            else:
                a = recipes.nvfp4_both_amax(values, **rotation)[0]
            device = values.to(d)
            return (device, a.to(d)), _on(d, {**how, **more})

        amaxes.append(
            Sample("nvfp4_both_amax", said, lambda d, x=x, k=rotation: ((x().to(d),), _on(d, k)))
        )
        out.append(Sample("quantize_nvfp4_both", said, make))
    return amaxes, out


def tables(rows: int, size: int, turn: int) -> dict[str, Any]:
    """cos and sin of RoPE for as many rows, each of which serves two of them if that is even."""
    positions = rows // 2 if rows % 2 == 0 and rows else max(rows, 1)
    angles = randn(positions, size // 2, dtype=torch.float32, seed=turn) * 3
    return {"cos": angles.cos(), "sin": angles.sin(), "interleaved": turn % 2 == 0}


def _embedded_samples() -> dict[str, list[Sample]]:
    """NVFP4 and MXFP4 of values after RoPE and, with most, a transform; some rows are strided."""
    found: dict[str, list[Sample]] = {
        name: [] for name in ("rotated_amax", "quantize_nvfp4_recipe", "quantize_mxfp4")
    }
    shapes = ((18, 3), (5, 2), (2, 3, 1), (130, 1), (0, 1))
    every = itertools.product(DTYPES, ROTATIONS, range(3))
    for turn, (dtype, rotate, kind) in enumerate(every):
        n = max(recipes.hadamard_size(rotate), 32)
        *leading, times = shapes[turn % len(shapes)]
        cols, between = times * n, (0, 24, 0, 23)[turn % 4]
        if rotate == "none" and turn % 2:
            cols += 8  # past the last pair; the last block is shorter

        def x(shape=(*leading, cols + between), dtype=dtype, turn=turn, cols=cols) -> Tensor:
            v = randn(*shape, dtype=torch.float32, seed=turn)
            return (_with_specials(v) if len(v) == 18 else v).to(dtype)[..., :cols]

        rows = int(torch.tensor(leading).prod())
        size = 32 * (1 + (cols // 32 - 1) * (turn // 2 % 2))
        how: dict[str, Any] = {"rotate": rotate, **tables(rows, size, turn)}
        if rotate != "none" and turn % 3:
            how["signs"] = signs_of(rotate)
        granularity = ("tensor", "row")[(turn + kind) % 2]
        said = f"rope-{str(dtype)[6:]}-{rotate}-{kind}-{turn}"
        amax = {**how, "granularity": granularity}
        found["rotated_amax"].append(
            Sample("rotated_amax", said, lambda d, x=x, k=amax: ((x().to(d),), _on(d, k)))
        )
        layout = SCALE_LAYOUTS[turn // 3 % 2]
        nvfp4 = {**amax, "scale_layout": layout}
        mx = {**how, "scaling": MXFP4_SCALINGS[turn % 8], "scale_layout": layout}
        if kind == 1:
            rounding = _rounding(x(), turn // 2)
            nvfp4, mx = {**nvfp4, **rounding}, {**mx, **rounding}
        elif kind == 2:
            select = SELECTS[1 + turn % 7]
            nvfp4 |= {"select": select, "e4m3_max": (448, 256)[turn % 2]}
            if select in STATIC_SELECTS:
                nvfp4 |= _rounding(x(), turn // 2)
        nvfp4["recipe"] = ("te", "te_flush")[turn % 2] if kind == 2 else RECIPES[turn // 2 % 3]
        if granularity == "tensor" and rotate in ("none", "te", "16"):
            nvfp4["block"] = "16x16"
        found["quantize_nvfp4_recipe"].append(_nvfp4(said, x, nvfp4))
        found["quantize_mxfp4"].append(
            Sample("quantize_mxfp4", said, lambda d, x=x, k=mx: ((x().to(d),), _on(d, k)))
        )
    return found


def _rotated_samples() -> tuple[list[Sample], list[Sample]]:
    """FP8 and INT8 of values after RoPE and a transform; rows are whole, padded or strided."""
    fp8: list[Sample] = []
    group: list[Sample] = []
    options = ways(
        dtype=GROUP_DTYPES,
        scale_format=SCALE_FORMATS,
        scale_layout=GROUP_SCALE_LAYOUTS,
        recipe=GROUP_RECIPES,
    )
    shapes = ((19, 3), (5, 2), (4, 1), (2, 3, 1), (130, 1), (0, 1), (40, 9))
    every = itertools.product(DTYPES, ROTATIONS, range(3))
    for turn, (dtype, rotate, kind) in enumerate(every):
        n = recipes.hadamard_size(rotate) or 32
        *leading, times = shapes[turn % len(shapes)]
        between = (0, 24, 0, 23)[turn % 4]  # rows, which are aligned or not

        def x(
            leading=tuple(leading), cols=times * n, dtype=dtype, turn=turn, between=between
        ) -> Tensor:
            v = randn(*leading, cols + between, dtype=torch.float32, seed=turn)
            return (_with_specials(v) if len(v) == 19 else v).to(dtype)[..., :cols]

        how: dict[str, Any] = {"rotate": rotate}
        if rotate != "none" and turn % 3:
            how["signs"] = signs_of(rotate)
        if kind and times * n >= 32:
            rows = int(torch.tensor(leading).prod())
            how |= tables(rows, 32 * (1 + (times * n // 32 - 1) * (kind - 1)), turn)
        said = f"{str(dtype)[6:]}-{rotate}-{kind}-{turn}"
        size = GROUP_SIZES[(turn // 3) % 5]
        of_groups = {**how, **next(options)}
        group.append(
            Sample(
                "rotate_quantize_per_token_group",
                f"{said}-{size}",
                lambda d, x=x, s=size, k=of_groups: ((x().to(d), s), _on(d, k)),
            )
        )
        granularity = "tensor" if (turn // 3 + kind) % 3 == 0 else "row"
        of_rows = {
            **how,
            "dtype": FP8_DTYPES[turn % 2],
            "granularity": granularity,
            "with_amax": turn // 2 % 2 > 0,
        }

        def rows_of(d, x=x, k=of_rows) -> Arguments:
            given = torch.tensor([0.7], device=d) if k["granularity"] == "tensor" else None
            return (x().to(d), given), _on(d, k)

        fp8.append(Sample("rotate_quantize_fp8", said, rows_of))
    for i, (dtype, embeds, shape) in enumerate(
        itertools.product(DTYPES, (True, False), ((5, 64), (130, 1024)))
    ):

        def watched(d, dtype=dtype, embeds=embeds, shape=shape, i=i) -> Arguments:
            how = {"rotate": "64", "dtype": FP8_DTYPES[i % 2], "granularity": "tensor"}
            how |= _on(d, tables(shape[0], 32, i)) if embeds else {}
            x = randn(*shape, dtype=dtype, seed=i).to(d)
            return (x, torch.tensor([2.5], device=d)), how

        label = f"amax-{str(dtype)[6:]}-{embeds}-{shape}"
        fp8.append(Sample("rotate_quantize_fp8", label, watched))
    whole = itertools.product(DTYPES, GROUP_DTYPES, (True, False), (True, False))
    for i, (dtype, element, embeds, counts) in enumerate(whole):

        def of_batches(
            d, dtype=dtype, element=element, embeds=embeds, counts=counts, i=i
        ) -> Arguments:
            v = randn(2, 9, 128, dtype=dtype, seed=i)
            numbers = torch.tensor([5, 9], dtype=torch.int32, device=d) if counts else None
            if counts:
                v[0, 5:] = torch.nan
            layout = GROUP_SCALE_LAYOUTS[i % 3]
            how = {"rotate": "128", "dtype": element, "scale_layout": layout}
            how |= _on(d, tables(18, 64, i)) if embeds else {}
            return (v.to(d), 64, numbers), how

        label = f"batches-{str(dtype)[6:]}-{str(element)[6:]}-{embeds}-{counts}"
        group.append(Sample("rotate_quantize_per_token_group", label, of_batches))
    return fp8, group


def _ulps_from(x: Tensor, ulps: Tensor) -> Tensor:
    """Positive numbers so many units in the last place away."""
    return (x.contiguous().view(torch.int32) + ulps.int()).view(torch.float32)


def _near_codes() -> tuple[Tensor, Tensor]:
    """Values whose sums with the step's part of a random byte are near a code, and these bytes.

    The first of a block makes the scale 1. fp32 rounds sums a little below 0.5 up to it.
    """
    r = torch.arange(256)[:, None, None]
    code = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[:, None]
    step = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0])[:, None]
    near = _ulps_from(code - r / 256 * step, torch.arange(-4, 5))
    far = _ulps_from(code[:1] - r / 256 * step[:1], -(torch.arange(1, 32) ** 3))
    x = torch.cat([near.reshape(256, -1), far.reshape(256, -1)], dim=1)[:, :93].reshape(256, 3, 31)
    x = torch.cat([torch.full((256, 3, 1), 6.0), x], dim=2).reshape(256, 96)
    return x, torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 96)


def _near_powers() -> Tensor:
    """Blocks with amax 6, whose other values are up to 8 units below a power of two, or random."""
    x = randn(512, 16, dtype=torch.float32, seed=11).abs_().clamp_(max=6)
    power = torch.tensor([0.5, 1.0, 2.0, 4.0]).repeat(512, 2)
    x[:, 4:12] = _ulps_from(power, -(torch.arange(512) % 8)[:, None])
    x[:, 0] = 6.0
    return x.reshape(16, 512)


def recipe_samples() -> dict[str, list[Sample]]:
    """By op."""
    amax: list[Sample] = []
    nvfp4: list[Sample] = []
    mxfp4: list[Sample] = []
    back: list[Sample] = []
    layouts = ways(granularity=("tensor", "row"), scale_layout=SCALE_LAYOUTS)
    every = itertools.product(DTYPES, ROTATIONS, range(3), (True, False))
    for turn, (dtype, rotate, kind, flat) in enumerate(every):
        # The kernels for contiguous tensors of whole blocks, and those for all others.
        granularity, layout = ("tensor", "linear") if flat else next(layouts).values()
        if not flat and granularity == "tensor":
            layout = "swizzled_128x4"
        rotation: dict[str, Any] = {"rotate": rotate}
        if rotate != "none" and turn % 3:
            rotation["signs"] = signs_of(rotate)
        said = f"{str(dtype)[6:]}-{rotate}-{kind}-{'flat' if flat else 'any'}"

        def x(rotate=rotate, dtype=dtype, turn=turn, flat=flat) -> Tensor:
            return _wide(rotate, dtype, turn, flat)

        how = {**rotation, "granularity": granularity}
        amax.append(Sample("rotated_amax", said, lambda d, x=x, k=how: ((x().to(d),), _on(d, k))))
        how = {**how, "scale_layout": layout}
        scaling = MXFP4_SCALINGS[(turn + turn // 2) % 8]
        mx = {**rotation, "scaling": scaling, "scale_layout": layout}
        if kind == 1:
            rounding = _rounding(x(), 1 if flat else turn // 2)
            how, mx = {**how, **rounding}, {**mx, **rounding}
        elif kind == 2:
            how |= {"select": SELECTS[1 + turn % 7], "e4m3_max": (448, 256)[turn // 2 % 2]}
        nvfp4.append(_nvfp4(said, x, how))
        if kind < 2:
            mxfp4.append(
                Sample("quantize_mxfp4", said, lambda d, x=x, k=mx: ((x().to(d),), _on(d, k)))
            )
    for turn, (dtype, rotate, kind) in enumerate(itertools.product(DTYPES, ROTATIONS, range(3))):

        def some(rotate=rotate, dtype=dtype) -> Tensor:
            return _wide(rotate, dtype, 0, True)

        how = {"rotate": rotate, "granularity": ("tensor", "row")[turn // 3 % 2]}
        if kind == 0:  # of a static selection
            how |= {"select": STATIC_SELECTS[turn % 2], "recipe": ("te", "te_flush")[turn // 2 % 2]}
            how |= _rounding(some(), turn // 3)
        else:
            how["recipe"] = RECIPES[kind]
            how |= _rounding(some(), turn // 2) if turn // 3 % 3 == 0 else {}
        nvfp4.append(_nvfp4(f"rule-{str(dtype)[6:]}-{rotate}-{kind}", some, how))
    for i, (label, dtype) in enumerate(itertools.product(inputs(), DTYPES)):
        said = f"{label}-{str(dtype)[6:]}"

        def plain(label=label, dtype=dtype) -> Tensor:
            return _plain(label, dtype)

        granularity, layout = next(layouts).values()
        amax.append(
            Sample(
                "rotated_amax",
                said,
                lambda d, x=plain, g=granularity: ((x().to(d),), {"granularity": g}),
            )
        )
        for more in range(2):
            how = {"granularity": granularity, "scale_layout": layout}
            if (i + more) % 3 == 0:
                how |= _rounding(plain(), i)
            else:
                how |= {"select": SELECTS[1 + (i + more) % 7], "e4m3_max": (448, 256)[more]}
            if more:
                how["granularity"] = "tensor"
                how["block"] = "16x16"
            nvfp4.append(_nvfp4(f"{said}-{more}", plain, how))
            mx = {"scaling": MXFP4_SCALINGS[(i + more) % 8], "scale_layout": layout}
            if more:
                mx |= _rounding(plain(), i)
            mxfp4.append(
                Sample(
                    "quantize_mxfp4",
                    f"{said}-{more}",
                    lambda d, x=plain, k=mx: ((x().to(d),), _on(d, k)),
                )
            )
    for i, scaling in enumerate(MXFP4_SCALINGS):

        def least(d, scaling=scaling, i=i) -> Arguments:
            """The least numbers there are, of which some share byte 0."""
            x = torch.randint(-200, 200, (64, 64), generator=torch.Generator().manual_seed(i))
            bits = x.abs().int() << torch.arange(64, dtype=torch.int32)[:, None] % 21
            values = bits.view(torch.float32) * x.sign()
            values[:3] = torch.tensor([2.0**-149, -(2.0**-149), -0.0])[:, None]
            how = {"scaling": scaling, "scale_layout": "linear"}
            return (values.to(d),), how | (_on(d, _rounding(values, i // 2)) if i % 2 else {})

        mxfp4.append(Sample("quantize_mxfp4", f"least-{scaling}", least))
    for i, (shape, dtype) in enumerate(
        itertools.product(
            ((5, 64), (48,), (3, 19), (130, 80), (2, 3, 24), (0, 32)), (None, *DTYPES)
        )
    ):
        layout = SCALE_LAYOUTS[i % 2 ^ i // 4 % 2]

        def made(d, shape=shape, dtype=dtype, layout=layout) -> Arguments:
            parts = recipes.quantize_mxfp4(randn(*shape), scale_layout=layout)
            x_fp4, x_sf = (t.view(torch.uint8).to(d) for t in parts)
            return (x_fp4, x_sf), {"cols": shape[-1], "scale_layout": layout, "dtype": dtype}

        back.append(Sample("dequantize_mxfp4", f"{shape}-{str(dtype)[6:]}-{layout}", made))

    def all_bytes(d: torch.device | str) -> Arguments:
        codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
        scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
        return (codes.to(d), scales.to(d)), {"dtype": torch.float32}

    back.append(Sample("dequantize_mxfp4", "all_bytes", all_bytes))

    def near_codes(d: torch.device | str) -> Arguments:
        x, given = _near_codes()
        return (x.to(d),), {"rounding": "stochastic", "random_bytes": given.to(d)}

    mxfp4.append(Sample("quantize_mxfp4", "near_codes", near_codes))
    for select in ("4over6_mae", "4over6_mse"):
        how = {"select": select, "e4m3_max": 256, "granularity": "tensor"}
        nvfp4.append(_nvfp4(f"near_powers-{select}", _near_powers, how))
    both_amax, both = _both_samples()
    rotated_fp8, rotated_group = _rotated_samples()
    embedded = _embedded_samples()
    return {
        "rotate_quantize_fp8": rotated_fp8,
        "rotate_quantize_per_token_group": rotated_group,
        "nvfp4_both_amax": both_amax,
        "quantize_nvfp4_both": both,
        "rotated_amax": amax + embedded["rotated_amax"],
        "quantize_nvfp4_recipe": nvfp4 + embedded["quantize_nvfp4_recipe"],
        "quantize_mxfp4": mxfp4 + embedded["quantize_mxfp4"],
        "dequantize_mxfp4": back,
    }
