"""Samples of products with the NVFP4 weights of experts."""

from __future__ import annotations

import functools
import itertools

import torch
from samples import Arguments, Sample, randn
from samples_linear import packed
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)


def stack(
    experts: int, n: int, cols: int, seed: int, gsas: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and gsas: one (0), one an expert (1), or one a row (2)."""
    codes, scales = packed(experts * n, cols, seed)
    count = (1, experts, experts * n)[gsas]
    gsa = torch.linspace(0.0005, 0.002, count)
    shaped = codes.view(experts, n, -1), scales.view(experts, n, -1)
    return shaped[0].to(device), shaped[1].to(device), gsa.to(device)


def routed(rows: int, top_k: int, experts: int, kind: str, seed: int = 0) -> Tensor:
    """Ids (rows, top_k): any; those of the first row for all; or with some that are no expert's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=generator).argsort(-1)[:, :top_k]
    if kind == "one":
        return ids[:1].expand(rows, -1).contiguous()
    if kind == "absent":
        ids[torch.rand(rows, top_k, generator=generator) < 0.4] = -1
        ids[-1, -1] = experts
    if kind == "none":
        ids.fill_(-1)
    return ids.contiguous()


def layer(
    rows: int,
    shape: tuple[int, int, int],
    ids: Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
    gsas: int = 0,
) -> Arguments:
    """Arguments of `nvfp4_experts` with shape (experts, hidden, intermediate)."""
    experts, hidden, inter = shape
    x = randn(rows, hidden, dtype=dtype).to(device)
    up = stack(experts, 2 * inter, hidden, 1, gsas, device)
    down = stack(experts, hidden, inter, 2, (gsas + 1) % 3, device)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)).to(device)
    return (x, *up, *down, ids.to(device), weights), {"dtype": torch.float32}


def _grouped_arguments(
    device: torch.device | str,
    turn: int,
    ends: list[int],
    rows: int,
    n: int,
    cols: int,
    dtype: torch.dtype | None,
) -> Arguments:
    w = stack(len(ends), n, cols, turn, turn % 3, device)
    offsets = torch.tensor(ends, dtype=(torch.int32, torch.int64)[turn % 2], device=device)
    if dtype is not None:
        x = randn(rows, cols + 8 * (turn % 2), dtype=dtype).to(device)
        x = x[:, : cols - 5 * (turn % 7 == 3)]
        return (x, *w, offsets), {"dtype": torch.float32}
    codes, scales = (t.to(device) for t in packed(rows, cols, seed=5))
    gsa = torch.linspace(0.5, 2.0, max(rows, 1))[: rows if rows > 2 else 1].to(device)
    return (codes, *w, offsets, scales, gsa), {"dtype": torch.float32}


def _large_gsas(device: torch.device | str, rows: int, dtype: torch.dtype) -> Arguments:
    # Times a power of two that kernels apply to sums they are not finite.
    args, keywords = layer(rows, (3, 64, 32), routed(rows, 2, 3, "any"), dtype, device)
    x, up, up_sf, up_gsa, down, down_sf, down_gsa, ids, weights = args
    gsas = up_gsa / 64, torch.full_like(down_gsa, 2.0**121)
    return (x, up, up_sf, gsas[0], down, down_sf, gsas[1], ids, weights * 2.0**-100), keywords


def _small_integers(device: torch.device | str) -> Arguments:
    # Sums of few integers are exact in every order, so all bits agree.
    x = (torch.arange(9 * 256).reshape(9, 256) * 7 % 5 - 2).bfloat16()
    codes = (torch.arange(3 * 24 * 128).reshape(3, 24, 128) * 37 % 256).to(torch.uint8)
    scales = torch.full((3, 24, 16), 0x38, dtype=torch.uint8)  # one
    gsa, offsets = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([2, 3, 9])
    return tuple(t.to(device) for t in (x, codes, scales, gsa, offsets)), {}


def _grouped() -> list[Sample]:
    samples = [Sample("nvfp4_grouped_linear", "small_integers", _small_integers)]
    # Where the rows of each expert end; rows and columns of a weight.
    shapes: tuple[tuple[str, int, list[int], int, int], ...] = (
        ("one_row", 1, [0, 0, 1], 17, 512),
        ("skewed", 13, [0, 2, 2, 12, 13], 16, 256),
        ("all_to_one", 19, [0, 19, 19], 33, 48),
        ("none", 3, [0, 0, 0], 16, 64),
        ("some_past_the_end", 6, [1, 3, 4], 24, 272),
        ("not_ascending", 7, [4, 2, -3, 99], 16, 80),
        ("no_rows", 0, [0, 0], 16, 32),
    )
    cases = itertools.product(shapes, (*DTYPES, None))
    for turn, ((label, rows, ends, n, cols), dtype) in enumerate(cases):
        make = functools.partial(
            _grouped_arguments,
            turn=turn,
            ends=ends,
            rows=rows,
            n=n,
            cols=cols,
            dtype=dtype,
        )
        name = "codes" if dtype is None else str(dtype).removeprefix("torch.")
        samples.append(Sample("nvfp4_grouped_linear", f"{label}-{name}", make, exact=False))
    return samples


def _layer_arguments(
    device: torch.device | str,
    turn: int,
    rows: int,
    top_k: int,
    shape: tuple[int, int, int],
    kind: str,
    dtype: torch.dtype,
) -> Arguments:
    ids = routed(rows, top_k, shape[0], kind, turn).to((torch.int64, torch.int32)[turn % 2])
    args, keywords = layer(rows, shape, ids, dtype, device, turn % 3)
    return (*args[:-1], args[-1].to((torch.float32, *DTYPES)[turn % 3])), keywords


def _layers() -> list[Sample]:
    samples = []
    # Rows, choices, experts, hidden, intermediate.
    shapes = (
        (1, 3, 4, 512, 256, "any"),
        (1, 2, 3, 80, 48, "any"),
        (1, 5, 6, 256, 256, "absent"),
        (1, 2, 3, 32, 16, "none"),
        (2, 3, 4, 512, 256, "any"),
        (3, 5, 6, 256, 256, "absent"),
        (4, 2, 3, 80, 48, "one"),
        (2, 2, 3, 32, 16, "none"),
        (9, 2, 7, 256, 256, "any"),
        (8, 2, 7, 256, 256, "any"),
        (11, 2, 3, 80, 48, "one"),
        (4, 3, 4, 64, 32, "absent"),
        (9, 3, 4, 64, 32, "absent"),
        (17, 2, 5, 48, 32, "absent"),  # more pairs than one warp sorts
        (32, 1, 3, 48, 32, "one"),  # and as many
        (0, 2, 3, 32, 16, "any"),
    )
    for turn, ((rows, top_k, *shape, kind), dtype) in enumerate(itertools.product(shapes, DTYPES)):
        make = functools.partial(
            _layer_arguments,
            turn=turn,
            rows=rows,
            top_k=top_k,
            shape=tuple(shape),
            kind=kind,
            dtype=dtype,
        )
        name = f"{rows}x{top_k}of{'x'.join(map(str, shape))}-{kind}-{str(dtype)[6:]}"
        samples.append(Sample("nvfp4_experts", name, make, exact=False))
    for rows, dtype in itertools.product((1, 9), DTYPES):
        make = functools.partial(_large_gsas, rows=rows, dtype=dtype)
        name = f"large_gsas-{rows}-{str(dtype)[6:]}"
        samples.append(Sample("nvfp4_experts", name, make, exact=False))
    return samples


def expert_samples() -> dict[str, list[Sample]]:
    """Every routing with few rows and many, in every type, aligned or not."""
    return {"nvfp4_grouped_linear": _grouped(), "nvfp4_experts": _layers()}


def more_experts() -> list[Sample]:
    """More of k than the warps of a block have in registers."""

    def deep(device: torch.device | str, rows: int, dtype: torch.dtype) -> Arguments:
        return layer(rows, (2, 8704, 16), routed(rows, 1, 2, "any"), dtype, device)

    def wide(device: torch.device | str, dtype: torch.dtype) -> Arguments:
        return layer(1, (4, 48, 4608), routed(1, 4, 4, "any"), dtype, device)

    return [
        *(
            Sample("nvfp4_experts", f"deep-{r}-{d}", lambda v, r=r, d=d: deep(v, r, d), exact=False)
            for r in (1, 9)
            for d in DTYPES
        ),
        *(
            Sample("nvfp4_experts", f"wide-{d}", lambda v, d=d: wide(v, d), exact=False)
            for d in DTYPES
        ),
    ]


def experts_in_more_launches() -> list[Sample]:
    """More rows, or pairs, than the 1024 that a launch sorts with little shared memory."""

    def grouped(device: torch.device | str) -> Arguments:
        return _grouped_arguments(device, 1, [3, 700, 1030], 1040, 17, 32, None)

    def mixed(device: torch.device | str) -> Arguments:
        return layer(520, (3, 32, 16), routed(520, 2, 3, "absent"), torch.float16, device)

    return [
        Sample("nvfp4_grouped_linear", "more_launches", grouped, exact=False),
        Sample("nvfp4_experts", "more_launches", mixed, exact=False),
    ]


def experts_in_tiles() -> list[Sample]:
    """Experts with many rows, alone and beside others with few; for compute capability 9.0."""

    def grouped(
        device: torch.device | str, counts: list[int], n: int, cols: int, dtype: torch.dtype
    ) -> Arguments:
        ends = torch.tensor(counts).cumsum(0).tolist()
        return _grouped_arguments(device, 0, ends, ends[-1] + 3, n, cols, dtype)

    def mixed(
        device: torch.device | str,
        rows: int,
        top_k: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> Arguments:
        ids = routed(rows, top_k, shape[0], "absent")
        ids[: rows // 2, 0] = 1
        return layer(rows, shape, ids, dtype, device)

    bf16, fp16 = DTYPES
    products = (
        ([130, 0, 60, 100, 190, 250, 300], 130, 128, bf16),  # tiles of each number of columns
        ([70, 3, 300], 66, 64, fp16),
        ([20, 1, 50, 16, 17], 257, 192, fp16),
    )
    layers = (
        (40, 2, (3, 192, 64), bf16),
        (40, 1, (8, 64, 128), fp16),
        (130, 2, (3, 64, 64), bf16),
        (110, 2, (3, 64, 64), fp16),
    )
    return [
        *(
            Sample(
                "nvfp4_grouped_linear",
                f"tiles-{max(counts)}x{n}x{cols}-{dtype}",
                functools.partial(grouped, counts=counts, n=n, cols=cols, dtype=dtype),
                exact=False,
            )
            for counts, n, cols, dtype in products
        ),
        *(
            Sample(
                "nvfp4_experts",
                f"tiles-{rows}x{top_k}of{shape}-{dtype}",
                functools.partial(mixed, rows=rows, top_k=top_k, shape=shape, dtype=dtype),
                exact=False,
            )
            for rows, top_k, shape, dtype in layers
        ),
    ]
