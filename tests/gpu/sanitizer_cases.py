"""Every kernel once on small, awkward shapes, to be run under compute-sanitizer."""

from __future__ import annotations

import torch

from jitquant.loader import get_cuda_module


def products(linear) -> None:  # type: ignore[no-untyped-def]
    """Every way to multiply, aligned and not, by one pass of k and by several."""
    gsa = torch.ones(1, device="cuda")

    def packed(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, device="cuda")
        return codes, torch.full((rows, cols // 16), 0x38, dtype=torch.uint8, device="cuda")

    for n, k in ((33, 48), (70, 1024), (17, 9216)):
        w = (*packed(n, k), gsa)
        for m in (1, 7, 18, 140):
            for dtype in (torch.bfloat16, torch.float16):
                x, bias = torch.randn(m, k).to(dtype).cuda(), torch.randn(n).cuda()
                residual = torch.randn(m, n).to(dtype).cuda()
                linear(x, *w, bias=bias, residual=residual)
                linear(x[:, : k - 3], *w)
            codes, scales = packed(m, k)
            linear(codes, *w, scales, gsa)
            linear(codes, *w, scales, torch.rand(m, device="cuda"), bias=torch.randn(n).cuda())
    # Tiles of other sizes, on an H200, which end behind the last row.
    for n, m, k in ((4100, 330, 576), (17001, 150, 576), (9001, 60, 1088), (13001, 30, 1600)):
        linear(torch.randn(m, k).bfloat16().cuda(), *packed(n, k), gsa)


def refolded_weights(refold) -> None:  # type: ignore[no-untyped-def]
    """Scales that are read four at a time, and one at a time."""
    one = torch.ones(1, device="cuda")
    for n, k in ((70, 64), (300, 1088), (33, 48)):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        refold(codes, torch.full((n, k // 16), 0x38, dtype=torch.uint8, device="cuda"), one)


def products_of_experts(module) -> None:  # type: ignore[no-untyped-def]
    """One row and several of a layer, and sorted rows, aligned and not, by one pass and several;
    with many rows, by tiles."""
    gsa = torch.ones(1, device="cuda")

    def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        *most, cols = shape
        codes = torch.randint(0, 256, (*most, cols // 2), dtype=torch.uint8, device="cuda")
        return codes, torch.full((*most, cols // 16), 0x38, dtype=torch.uint8, device="cuda")

    for hidden, inter in ((48, 32), (512, 256), (8704, 16)):
        up, down = packed(4, 2 * inter, hidden), packed(4, hidden, inter)
        for rows in (1, 3, 13, 80):
            ids = torch.randint(-1, 5, (rows, 3), device="cuda")
            for dtype in (torch.bfloat16, torch.float16):
                x = torch.randn(rows, hidden).to(dtype).cuda()
                weights = torch.rand(rows, 3).to(dtype).cuda()
                module.nvfp4_experts(x, *up, gsa, *down, gsa, ids, weights)
                ends = torch.tensor([rows // 3, rows // 3, rows - 1, rows // 2], device="cuda")
                module.nvfp4_grouped_linear(x, *up, gsa, ends)
            codes, scales = packed(rows, hidden)
            module.nvfp4_grouped_linear(codes, *up, gsa, ends, scales, gsa)


def eight_bits(module) -> None:  # type: ignore[no-untyped-def]
    """FP8, with strided buffers."""
    quantize, back = module("quantize_fp8").quantize_fp8, module("dequantize").dequantize
    silu = module("swiglu_quantize").swiglu_quantize_fp8
    silu_group = module("swiglu_quantize_per_token_group").swiglu_quantize_per_token_group
    norm = module("rmsnorm_quantize")
    norm_group = module("rmsnorm_quantize_per_token_group").rmsnorm_quantize_per_token_group
    scale, counts = torch.tensor([3.0], device="cuda"), torch.tensor([3], device="cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, cols, gap in ((1, 16, 0), (5, 35, 3), (130, 80, 16), (300, 1024, 0)):
            x = torch.randn(rows, cols + gap).to(dtype).cuda()[:, :cols]
            for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
                data, scale_inv, amax = quantize(x, dtype=fp8)
                back(data, scale_inv, 0, 0, dtype=dtype)
                quantize(x, scale, dtype=fp8)
                quantize(x, scale, dtype=fp8, with_amax=False)
                parts = quantize(x, dtype=fp8, granularity="row")
                back(*parts[:2], 1, 0, dtype=dtype)
                quantize(x, parts[1], dtype=fp8, granularity="row", with_amax=False)
                w, residual = torch.rand(cols).cuda(), torch.randn(rows, cols).to(dtype).cuda()
                norm.rmsnorm_quantize_fp8(x, w, dtype=fp8, residual=residual)
                norm.rmsnorm_quantize_fp8(x, w, scale, dtype=fp8, granularity="tensor")
                for layout in ("row", "column_tma"):
                    k = {"scale_format": "ue8m0_packed", "scale_layout": layout}
                    norm_group(x, w, 32, dtype=fp8, **k)
                both = torch.randn(rows, 2 * cols).to(dtype).cuda()
                for interleave in (0, 8 if cols % 8 == 0 else cols):
                    silu(both, dtype=fp8, interleave=interleave)
                    silu(both, scale, dtype=fp8, granularity="tensor", interleave=interleave)
                    for size, layout in ((16, "row"), (128, "column_tma")):
                        k = {"scale_layout": layout, "interleave": interleave}
                        silu_group(both, size, dtype=fp8, **k)
                        silu_group(both, size, counts, dtype=fp8, **k)
                silu(both, scale, dtype=fp8, granularity="tensor", with_amax=False)
                apart = torch.empty(rows, cols + 5, dtype=torch.uint8, device="cuda")
                apart = apart[:, 3 : 3 + cols].view(fp8)
                quantize.out(x, dtype=fp8, data=apart, scale_inv=scale_inv, amax=amax)
                back(apart, scale_inv, 0, 0, dtype=dtype)


def eight_bit_groups(x: torch.Tensor) -> None:
    """Groups, blocks, MXFP8 and both orientations of a matrix."""
    both = get_cuda_module("quantize_both", ["quantize_both.cu"])
    one = {
        name: getattr(get_cuda_module(name, [f"{name}.cu"]), name)
        for name in ("quantize_per_token_group", "quantize_block", "quantize_mxfp8")
    }
    fp8 = {"dtype": torch.float8_e4m3fn}
    for layout in ("row", "column", "column_tma"):
        for size, scales in ((16, "float32"), (128, "ue8m0_packed"), (256, "float32")):
            options = {**fp8, "scale_format": scales, "scale_layout": layout}
            one["quantize_per_token_group"](x, size, **options)
            one["quantize_per_token_group"](x, size, torch.tensor([3], device="cuda"), **options)
            both.quantize_per_token_group_both(x, size, **options)
    for side in (16, 128):
        one["quantize_block"](x, side, side, scale_layout="row_padded", **fp8)
        both.quantize_block_both(x, side, side, scale_layout="row_padded", **fp8)
    for layout in ("linear", "swizzled_128x4"):
        one["quantize_mxfp8"](x, scale_layout=layout, **fp8)
        both.quantize_mxfp8_both(x, scale_layout=layout, **fp8)


def ragged_tensors() -> None:
    """Tensors in one buffer, with gaps, empty ones, and a last block that is not whole."""
    back, fp8, nvfp4, grad, mxfp8 = (
        get_cuda_module(name, [f"{name}.cu"])
        for name in (
            "dequantize_ragged",
            "quantize_ragged",
            "quantize_ragged_nvfp4",
            "quantize_ragged_grad",
            "quantize_ragged_mxfp8",
        )
    )
    # By one thread block, and over several ranges of launch 1.
    for cols, ends in (
        (1, (3, 3, 40, 1500, 2001)),
        (33, (0, 1, 1, 4, 60)),
        (640, (0, 1, 700, 900)),
    ):
        at = torch.tensor(ends, device="cuda")
        x = torch.randn(ends[-1] + 4, cols, device="cuda").bfloat16()
        e4m3, e5m2 = {"dtype": torch.float8_e4m3fn}, {"dtype": torch.float8_e5m2}
        for given in (None, torch.rand(len(ends) - 1, device="cuda")):
            for lengths in (None, at.diff() - at.diff().clamp(max=1)):
                for values, row in ((x, 1), (x.float(), 1), (x.view(-1)[1:], cols)):
                    counted = row * at, given
                    of = None if lengths is None else row * lengths
                    fp8.quantize_ragged_fp8(values, *counted, sizes=of, **e4m3)
                    nvfp4.quantize_ragged_nvfp4(values, *counted, sizes=of)
                    fp8.quantize_ragged_fp8(values, *counted, sizes=of, activation="qgelu", **e4m3)
                    codes = mxfp8.quantize_ragged_mxfp8(values, row * at, sizes=of, **e4m3)
                    back.dequantize_ragged_mxfp8(*codes, row * at, sizes=of)
                for values in (x, x.float()):
                    act = {"act_input": values, "activation": "gelu"}
                    f = grad.quantize_ragged_grad_fp8
                    f(values, at, given, sizes=lengths, **act, **e5m2)
                    f(values, at, given, sizes=lengths, with_dbias=False, **e5m2)
    offsets = torch.tensor([3, 3, 40, 1500, 2001], device="cuda")
    sizes, scales = torch.tensor([0, 30, 1460, 501], device="cuda"), torch.rand(4).cuda()
    data = torch.randn(2005).cuda().to(torch.float8_e4m3fn)
    codes, factors = (torch.ones(n, dtype=torch.uint8, device="cuda") for n in (126 * 8, 126))
    for dtype in (torch.bfloat16, torch.float32):
        for lengths in (None, sizes):
            back.dequantize_ragged_fp8(data, scales, offsets, sizes=lengths, dtype=dtype)
            back.dequantize_ragged_nvfp4(
                codes, factors, scales, offsets, numel=2005, sizes=lengths, dtype=dtype
            )


def halves_over_a_process_group(module) -> None:  # type: ignore[no-untyped-def]
    """Amaxes, and quantization with an amax that is given."""
    amax, gates_amax = module("amax").amax, module("amax").deinterleave_amax
    fused = module("fused_amax_quantize")
    fp8, silu = module("quantize_fp8"), module("swiglu_quantize")
    norm, mhc = module("fused_rmsnorm_quantize"), module("fused_mhc_rmsnorm_quantize")
    weights, deinterleave = module("quantize_weight_nvfp4"), module("deinterleave_quantize")
    e4m3 = {"dtype": torch.float8_e4m3fn}
    for dtype in (torch.bfloat16, torch.float32):
        for rows, cols, gap in ((1, 16, 0), (5, 35, 3), (130, 80, 16), (300, 1024, 0)):
            x = torch.randn(rows, cols + gap).to(dtype).cuda()[:, :cols]
            both = torch.randn(rows, 2 * cols).to(dtype).cuda()
            w, residual = torch.rand(cols).cuda(), torch.randn(rows, cols).to(dtype).cuda()
            X, A = torch.randn(rows, 3, cols).to(dtype).cuda(), torch.rand(rows, 3).cuda()
            for granularity in ("tensor", "row"):
                g = {"granularity": granularity}
                one = amax(x, **g)
                fused.quantize_nvfp4_from_amax(x, one, scale_layout="swizzled_128x4")
                fp8.quantize_fp8_from_amax(x, amax(x, keep_nan=True, **g), **e4m3, **g)
                gates = gates_amax(both, cols, 0, op="swiglu", **g)
                deinterleave.deinterleave_quantize_nvfp4_from_amax(
                    both, cols, 0, gates, op="swiglu"
                )
                silu.swiglu_quantize_fp8_from_amax(both, gates, **e4m3, **g)
            weights.quantize_weight_nvfp4_from_amax(x, amax(x), block="16x16")
            maxima, inv_rms = norm.rmsnorm_amax(x, w, residual=residual)
            norm.rmsnorm_quantize_nvfp4_from_amax(residual, w, inv_rms, maxima)
            maxima, inv_rms = mhc.mhc_rmsnorm_amax(X, A, w)
            mhc.mhc_rmsnorm_quantize_nvfp4_from_amax(X, A, w, inv_rms, maxima)


def recipes(module) -> None:  # type: ignore[no-untyped-def]
    """Rotation, rotary embedding, stochastic rounding, 4over6 and MXFP4; whole blocks and not."""
    nvfp4, both = module("quantize_nvfp4_recipe"), module("quantize_nvfp4_both")
    mx, rows_of = module("quantize_mxfp4"), module("rotate_quantize").rotate_quantize_fp8
    groups_of = module("rotate_quantize_per_token_group").rotate_quantize_per_token_group
    scale, e4m3 = torch.tensor([3.0], device="cuda"), {"dtype": torch.float8_e4m3fn}
    drawn = {"rounding": "stochastic", "rng_state": torch.tensor([1, 2], device="cuda")}
    four, tile = {"select": "4over6_mse", "e4m3_max": 256}, {"block": "16x16"}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rotate, rows, cols, gap in (
            ("none", 5, 35, 3),
            ("te", 1, 16, 0),
            ("te", 130, 144, 16),
            ("64", 40, 192, 8),
            ("256", 5, 512, 3),
        ):
            x = torch.randn(rows, cols + gap).to(dtype).cuda()[:, :cols]
            angles = torch.randn(rows, 16).cuda()
            rotated = {"rotate": rotate}
            embedded = {**rotated, "cos": angles.cos(), "sin": angles.sin()}
            if rotate == "64":
                embedded["signs"] = torch.ones(64, dtype=torch.int8, device="cuda")
            for how in (rotated, embedded) if cols >= 32 else (rotated,):
                for granularity, layout in (("tensor", "linear"), ("row", "swizzled_128x4")):
                    g, k = {**how, "granularity": granularity}, {"scale_layout": layout}
                    maxima = nvfp4.rotated_amax(x, **g)
                    small = granularity == "tensor" and rotate in ("none", "te")
                    for more in ({}, drawn, four, *([tile, {**tile, **four}] if small else [])):
                        nvfp4.quantize_nvfp4_recipe(x, maxima, **g, **k, **more)
                    for more in ({}, drawn, {"scaling": "even"}):
                        codes = mx.quantize_mxfp4(x, **how, **k, **more)
                        mx.dequantize_mxfp4(*codes, cols=cols, dtype=dtype, **k)
                rows_of(x, granularity="row", **e4m3, **how)
                rows_of(x, scale, granularity="tensor", **e4m3, **how)
                for layout in ("row", "column_tma"):
                    groups_of(x, 32, scale_layout=layout, **e4m3, **how)
                    groups_of(x, 128, scale_format="ue8m0_packed", **e4m3, **how)
        for rotate, rows, cols, gap in (
            ("none", 1, 64, 0),
            ("none", 40, 33, 3),
            ("none", 130, 144, 16),
            ("te", 16, 16, 0),
            ("te", 272, 80, 16),
        ):
            x = torch.randn(rows, cols + gap).to(dtype).cuda()[:, :cols]
            for layout in ("linear", "swizzled_128x4"):
                k = {"rotate": rotate, "scale_layout": layout}
                maxima = both.nvfp4_both_amax(x, rotate=rotate)
                for more in ({}, drawn, four, *([tile, {**tile, **four}] * (rotate == "none"))):
                    both.quantize_nvfp4_both(x, maxima, **k, **more)
        # In lanes of a warp, in a thread block, in a cluster.
        for rows, cols in ((1100, 64), (3, 18496), (3, 24640)):
            x, angles = torch.randn(rows, cols).to(dtype).cuda(), torch.randn(rows, 16).cuda()
            for how in ({}, {"cos": angles.cos(), "sin": angles.sin()}):
                rows_of(x, granularity="row", rotate="64", **e4m3, **how)


def long_and_many_rows(module) -> None:  # type: ignore[no-untyped-def]
    """Rows that a cluster holds, and more than eight or 32 rows for each multiprocessor."""
    fused, deinterleave = module("fused_amax_quantize"), module("deinterleave_quantize")
    norm, norm_fp8 = module("fused_rmsnorm_quantize"), module("rmsnorm_quantize")
    quantize, silu = module("quantize_fp8").quantize_fp8, module("swiglu_quantize")
    norm_group = module("rmsnorm_quantize_per_token_group").rmsnorm_quantize_per_token_group
    row = {"granularity": "row"}
    e4m3 = {"dtype": torch.float8_e4m3fn}
    for dtype in (torch.bfloat16, torch.float32):
        for rows, cols in (
            *((3, 18464), (3, 53264)),
            *((1100, 64), (4300, 64), (1100, 2048), (1100, 12320)),
        ):
            x, w = torch.randn(rows, cols).to(dtype).cuda(), torch.rand(cols).to(dtype).cuda()
            fused.amax_quantize_nvfp4(x, **row)
            quantize(x, **row, **e4m3)
            for residual in (None, torch.randn(rows, cols).to(dtype).cuda()):
                norm.rmsnorm_quantize_nvfp4(x, w, residual=residual, **row)
                norm_fp8.rmsnorm_quantize_fp8(x, w, residual=residual, **e4m3)
                for recipe in ("te", "deepgemm", "vllm"):
                    norm_group(x, w, 32, residual=residual, recipe=recipe, **e4m3)
            both = torch.randn(rows, 2 * cols).to(dtype).cuda()
            silu.swiglu_quantize_fp8(both, **e4m3)
            for op in ("select", "swiglu"):
                deinterleave.deinterleave_amax_quantize_nvfp4(both, cols, 0, op=op, **row)


def main() -> None:
    """Runs the cases; what they compute is checked by the tests."""

    def module(name: str):  # type: ignore[no-untyped-def]
        return get_cuda_module(name, [f"{name}.cu"])

    fused, deinterleave = module("fused_amax_quantize"), module("deinterleave_quantize")
    norm, mhc = module("fused_rmsnorm_quantize"), module("fused_mhc_rmsnorm_quantize")
    weights = module("quantize_weight_nvfp4")
    gsa = torch.tensor([0.01], device="cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, cols, gap in ((1, 16, 0), (5, 1043, 2), (130, 80, 16), (40, 1024, 0)):
            x = torch.randn(rows, cols + gap).to(dtype).cuda()[:, :cols]
            w = torch.rand(cols).to(dtype).cuda()
            module("amax_gsa").compute_amax_gsa(x)
            for layout in ("linear", "swizzled_128x4"):
                k = {"scale_layout": layout}
                packed = fused.amax_quantize_nvfp4(x, **k)
                module("dequant_nvfp4").dequant_nvfp4(*packed, cols=cols, dtype=dtype, **k)
                module("quantize_nvfp4").quantize_nvfp4(x, gsa, **k)
                norm.rmsnorm_quantize_nvfp4_from_gsa(x, w, gsa, **k)
                for granularity in ("tensor", "row"):
                    g = {"granularity": granularity, **k}
                    fused.amax_quantize_nvfp4(x, **g)
                    norm.rmsnorm_quantize_nvfp4(x, w, **g)
                    residual = torch.randn(rows, cols).to(dtype).cuda()
                    norm.rmsnorm_quantize_nvfp4(x, w, residual=residual, **g)
                    X = torch.randn(rows, 3, cols).to(dtype).cuda()
                    A = torch.rand(rows, 3).cuda()
                    mhc.mhc_rmsnorm_quantize_nvfp4(X, A, w, **g)
                    mhc.mhc_rmsnorm_quantize_nvfp4_from_gsa(X, A, w, gsa, **k)
                    both = torch.randn(rows, 2 * cols).to(dtype).cuda()
                    for op, interleave in (("select", 1 if cols % 8 else 8), ("swiglu", 0)):
                        halves = (both, cols, interleave)
                        deinterleave.deinterleave_amax_quantize_nvfp4(*halves, op=op, **g)
                        deinterleave.deinterleave_quantize_nvfp4(*halves, gsa, op=op, **k)
            for dim in (-1, 0):
                for block in ("1x16", "16x16"):
                    parts = weights.quantize_weight_nvfp4(x, block=block, dim=dim)
                    weights.quantize_weight_nvfp4_from_gsa(x, gsa, block=block, dim=dim)
                    size = rows if dim == 0 else cols
                    module("dequant_nvfp4").dequant_nvfp4(*parts, cols=size, dim=dim, dtype=dtype)
        many = torch.randn(60033, 208).to(dtype).cuda()
        module("quantize_nvfp4").quantize_nvfp4(many, gsa, scale_layout="swizzled_128x4")
        fused.amax_quantize_nvfp4(many, granularity="row", scale_layout="swizzled_128x4")
        # More rows than thread blocks of a persistent grid.
        many, w = torch.randn(2000, 528).to(dtype).cuda(), torch.rand(528).to(dtype).cuda()
        norm.rmsnorm_quantize_nvfp4(many, w, granularity="row")
        norm.rmsnorm_quantize_nvfp4(many, w, residual=many.clone(), granularity="row")
    eight_bits(module)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, cols, gap in ((1, 16, 0), (5, 35, 3), (130, 272, 16)):
            eight_bit_groups(torch.randn(rows, cols + gap).to(dtype).cuda()[:, :cols])
    ragged_tensors()
    halves_over_a_process_group(module)
    recipes(module)
    long_and_many_rows(module)
    products(module("nvfp4_linear").nvfp4_linear)
    refolded_weights(module("nvfp4_refold").nvfp4_refold)
    products_of_experts(module("nvfp4_experts"))
    # More than one block of the cooperative launch, and of the partial maxima.
    large = torch.randn(300, 7168).bfloat16().cuda()
    module("amax_gsa").compute_amax_gsa(large)
    fused.amax_quantize_nvfp4(large)
    # Rows of which some have a block of threads to themselves.
    fused.amax_quantize_nvfp4(torch.randn(400, 16400).bfloat16().cuda(), granularity="row")
    # Two blocks of values a thread.
    module("quantize_per_token_group").quantize_per_token_group(
        torch.randn(440, 7184).bfloat16().cuda(), 128, dtype=torch.float8_e4m3fn
    )
    torch.cuda.synchronize()
    print("all cases ran")


if __name__ == "__main__":
    main()
