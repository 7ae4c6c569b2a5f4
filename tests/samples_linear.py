"""Samples of products with a weight in NVFP4."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from samples import Arguments, Sample, randn
from torch import Tensor

from jitquant import reference


def packed(rows: int, cols: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix as bytes, cols a multiple of 16."""
    x_fp4, x_sf, _ = reference.quantize_nvfp4(randn(rows, cols, seed=seed))
    return x_fp4.view(torch.uint8), x_sf.view(torch.uint8)


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 and scale_inv of rows, one each."""
    data, scale_inv, _ = reference.quantize_fp8(x, dtype=torch.float8_e4m3fn, granularity="row")
    return data, scale_inv


def _weight(n: int, cols: int, device: torch.device | str) -> tuple[Tensor, ...]:
    codes, scales = packed(n, cols, seed=n)
    return codes.to(device), scales.to(device), torch.tensor([0.0007], device=device)


def _behind_a_word(t: Tensor) -> Tensor:
    """The same bytes, from the second word of a buffer on."""
    return torch.cat((t.flatten()[:4], t.flatten()))[4:].view(t.shape)


def linear_samples() -> dict[str, list[Sample]]:
    """Few and many rows, in every type, aligned or not, with all that is added at the end."""
    samples = []

    def add(label: str, make: Any, *, exact: bool = False) -> None:
        samples.append(Sample("nvfp4_linear", label, make, exact=exact))

    for rows, n, cols, more in (
        (1, 16, 512, {}),
        (2, 33, 48, {"bias": True}),
        (5, 17, 768, {"bias": True, "residual": True}),
        (4, 19, 80, {}),
        (12, 40, 272, {"residual": True}),
        (16, 20, 256, {"bias": True}),
        (12, 20, 2560, {}),  # in more than one pass with 100 KiB of shared memory
        (0, 16, 32, {}),
        # In tiles, of each shape (gemm/linear_tiles.cuh), on a device with two multiprocessors.
        (20, 100, 576, {"bias": True}),
        (30, 400, 1024, {"codes": True}),
        (30, 400, 832, {"short": True}),
        (25, 50, 576, {"residual": True}),
        (20, 250, 1152, {"codes": True}),
        (30, 300, 832, {"bias": True}),
        (30, 180, 1152, {}),
        (40, 70, 576, {}),
        (50, 250, 1024, {"residual": True}),
        (40, 300, 576, {"codes": True}),
        (60, 180, 832, {}),
        (25, 50, 512, {}),  # scales are copied by 16 bytes, then by 4
        (40, 50, 512, {"behind_a_word": True}),
        (60, 400, 512, {"residual": True}),
        (90, 50, 192, {"residual": True}),
        (80, 100, 1600, {}),
        (70, 180, 832, {"bias": True}),
        (90, 250, 576, {"codes": True}),
        (70, 300, 576, {}),
        (90, 400, 576, {"residual": True}),
        (100, 64, 64, {}),
        (100, 64, 192, {"bias": True, "codes": True}),
        (100, 90, 2112, {}),
        (100, 190, 832, {}),
        (100, 400, 576, {}),
        (100, 300, 576, {"bias": True}),
        (150, 100, 3328, {}),
        (150, 180, 576, {"bias": True}),
        (150, 200, 576, {"codes": True}),
        (130, 300, 576, {"residual": True}),
        (180, 200, 1152, {}),
        (140, 50, 192, {"residual": True}),
        (250, 100, 192, {"bias": True}),
        (250, 130, 192, {"bias": True, "residual": True, "codes": True, "one_gsa": True}),
        (300, 140, 448, {}),
        (250, 1200, 192, {}),  # several for each cluster
        (20, 18, 80, {"codes": True}),  # which tiles do not take
    ):
        for dtype in (torch.bfloat16, torch.float16, None):
            if dtype is None and rows > 18 and not more.get("codes"):
                continue  # decoded, they are an x in bf16; elsewhere they take long

            def make(
                device: torch.device | str,
                rows: int = rows,
                n: int = n,
                cols: int = cols,
                more: dict[str, bool] = more,
                dtype: torch.dtype | None = dtype,
            ) -> Arguments:
                w = _weight(n, cols, device)
                if more.get("behind_a_word"):
                    w = (w[0], _behind_a_word(w[1]), w[2])
                keywords: dict[str, Any] = {"dtype": torch.float32}
                if more.get("bias"):
                    keywords["bias"] = randn(n, seed=1).to(device)
                if more.get("residual"):
                    keywords["residual"] = randn(rows, n, dtype=torch.float32, seed=2).to(device)
                if dtype is not None:
                    x = randn(rows, cols, dtype=dtype).to(device)
                    return (x[:, :-3] if more.get("short") else x, *w), keywords
                codes, scales = (t.to(device) for t in packed(rows, cols, seed=5))
                gsas = rows if rows > 2 and not more.get("one_gsa") else 1
                gsa = torch.linspace(0.5, 2.0, max(rows, 1))[:gsas].to(device)
                return (codes, *w, scales, gsa), keywords

            name = "codes" if dtype is None else str(dtype).removeprefix("torch.")
            tiles = "tiles-" if rows > 18 else ""
            add(f"{tiles}{rows}x{n}x{cols}-{name}", make)

    def row_stride(device: torch.device | str) -> Arguments:
        x = randn(3, 2, 290).to(device)[..., :270]
        return (x, *_weight(18, 272, device)), {"dtype": torch.float32}

    def large_gsa(device: torch.device | str, rows: int, dtype: torch.dtype | None) -> Arguments:
        # Times a power of two that kernels apply to sums, which stay exact here, it is not finite.
        codes, scales = (
            t[:, :n].contiguous()
            for t, n in zip(small_integers("cpu")[0][1:3], (64, 8), strict=True)
        )
        keywords = {"dtype": torch.float32}
        if dtype is None:
            own = torch.arange(rows) % 24
            gsas = torch.tensor([2.0**114]), torch.tensor([2.0**-20])
            parts = (codes[own], codes, scales, gsas[0], scales[own], gsas[1])
        else:
            x = (torch.arange(rows * 128).reshape(rows, 128) * 7 % 5 - 2) * 2.0**-20
            parts = (x.to(dtype), codes, scales, torch.tensor([2.0**122]))
        return tuple(t.to(device) for t in parts), keywords

    def no_rows_3d(device: torch.device | str) -> Arguments:
        return (randn(2, 0, 64).to(device), *_weight(18, 64, device)), {}

    def many_small_integers(device: torch.device | str) -> Arguments:
        (x, *w), _ = small_integers("cpu")
        return (x.repeat(9, 1).to(device), *(t.to(device) for t in w)), {}

    def small_integers(device: torch.device | str) -> Arguments:
        # Sums of few integers are exact in every order, so all bits agree.
        x = (torch.arange(4 * 256).reshape(4, 256) * 7 % 5 - 2).bfloat16()
        codes = (torch.arange(24 * 128).reshape(24, 128) * 37 % 256).to(torch.uint8)
        scales = torch.full((24, 16), 0x38, dtype=torch.uint8)  # one
        gsa = torch.ones(1, device=device)
        return (x.to(device), codes.to(device), scales.to(device), gsa), {}

    def all_scales(device: torch.device | str) -> Arguments:
        # Each row of the weight has one byte of 256 as its scales, NaN among them.
        codes = (torch.arange(256 * 8).reshape(256, 8) * 29 % 256).to(torch.uint8)
        scales = torch.arange(256, dtype=torch.uint8)[:, None].contiguous()
        x = torch.tensor([[1.0, -2.0, 0.5, 3.0] * 4]).half()
        gsa = torch.ones(1, device=device)
        keywords = {"dtype": torch.float32}
        return (x.to(device), codes.to(device), scales.to(device), gsa), keywords

    def all_scales_of_x(device: torch.device | str) -> Arguments:
        # The same of x, each byte with every code; the weight is an identity.
        codes = torch.arange(64).add(5).remainder(16)
        x = (codes[::2] | codes[1::2] << 4).to(torch.uint8).repeat(256, 1)
        x_sf = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 4)
        eye = torch.eye(64, dtype=torch.uint8) * 2  # the code of one
        w = eye[:, ::2] | eye[:, 1::2] << 4
        ones = torch.full((64, 4), 0x38, dtype=torch.uint8)
        gsas = torch.tensor([0.75]), torch.tensor([0.5, 3.0])[torch.arange(256) % 2]
        return tuple(t.to(device) for t in (x, w, ones, gsas[0], x_sf, gsas[1])), {}

    add("row_stride", row_stride)
    add("no_rows_3d", no_rows_3d)
    for rows, dtype in itertools.product((1, 4, 12, 40), (torch.bfloat16, torch.float16, None)):
        make = functools.partial(large_gsa, rows=rows, dtype=dtype)
        add(f"{'tiles-' if rows > 18 else ''}large_gsa-{rows}-{str(dtype)[6:]}", make, exact=True)
    add("small_integers", small_integers, exact=True)
    add("many_small_integers", many_small_integers, exact=True)
    add("all_bytes_of_scales", all_scales, exact=True)
    add("tiles-all_bytes_of_scales_of_x", all_scales_of_x, exact=True)
    return {
        "nvfp4_linear": samples,
        "nvfp4_refold": _refold_samples(),
        "nvfp4_linear_fp8": _fp8_samples(),
    }


def _fp8_samples() -> list[Sample]:
    """One scale of x and one a row, in shapes that PyTorch multiplies on a GPU."""

    def made(
        device: torch.device | str, leading: tuple[int, ...], n: int, cols: int, more: str
    ) -> Arguments:
        keywords: dict[str, Any] = {"dtype": torch.float32} if "fp32" in more else {}
        if "bias" in more:
            keywords["bias"] = randn(n, seed=1).to(device)
        if "residual" in more:
            dtype = keywords.get("dtype", torch.bfloat16)
            keywords["residual"] = randn(*leading, n, dtype=dtype, seed=2).to(device)
        x = randn(*leading, cols + 32 * ("stride" in more))
        data, scale_inv = (t.to(device) for t in quantized_rows(x))
        scale_inv = torch.tensor([0.5], device=device) if "tensor" in more else scale_inv
        return (data[..., :cols], scale_inv, *_weight(n, cols, device)), keywords

    return [
        Sample("nvfp4_linear_fp8", f"{more}-{leading}x{n}x{cols}", make, exact=False)
        for leading, n, cols, more in (
            ((1,), 16, 64, "plain"),
            ((3,), 80, 192, "bias-tensor-fp32"),
            ((2, 20), 208, 448, "residual"),
            ((40,), 128, 320, "bias-residual-fp32"),
            ((2, 3), 32, 96, "stride"),
            ((0,), 16, 64, "no_rows"),
        )
        for make in [functools.partial(made, leading=leading, n=n, cols=cols, more=more)]
    ]


def _refold_samples() -> list[Sample]:
    """Rows whose scales are read four at a time and one at a time, and every code and scale."""

    def weight(device: torch.device | str, n: int, cols: int) -> Arguments:
        return _weight(n, cols, device), {}

    def every_scale(device: torch.device | str) -> Arguments:
        # Every code times every byte as a scale, in rows that have each of the 16 exponents.
        first = torch.tensor([1, *range(14, 127, 8)], dtype=torch.uint8)  # 16 of them
        scales = torch.arange(256).to(torch.uint8).repeat(16)[:, None].repeat(1, 4)
        scales[:, 0] = first.repeat_interleave(256)
        codes = torch.arange(64).add(5).remainder(16).to(torch.uint8)
        packed_codes = (codes[::2] | codes[1::2] << 4).expand(4096, 32).contiguous()
        gsa = torch.tensor([0.75], device=device)
        return (packed_codes.to(device), scales.to(device), gsa), {}

    samples = [
        Sample("nvfp4_refold", f"{n}x{cols}", functools.partial(weight, n=n, cols=cols))
        for n, cols in ((5, 64), (70, 192), (33, 48), (9, 4352), (3, 4112), (0, 64))
    ]
    return [*samples, Sample("nvfp4_refold", "all_bytes_of_scales", every_scale)]
