"""The instructions that the device code asks for by name: a host never runs them, so that one with
another rounding would be seen on a GPU alone."""

from __future__ import annotations

import re
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels_cu"

# What each does.
CONVERSIONS = {
    # To nearest, ties to even.
    "cvt.rn.bf16.f32",
    "cvt.rn.bf16x2.f32",
    "cvt.rn.f16.f32",
    "cvt.rn.f16x2.f32",
    # The same; what is too large becomes the largest number.
    "cvt.rn.satfinite.e4m3x2.f32",
    "cvt.rn.satfinite.e4m3x2.f16x2",
    "cvt.rn.satfinite.e5m2x2.f32",
    "cvt.rn.satfinite.e2m1x2.f32",
    # To the nearest integer, ties to even; then to -128 to 127.
    "cvt.rni.s32.f32",
    "cvt.rni.sat.s8.f32",
    "cvt.pack.sat.s8.s32.b32",
    # Cut off: e2m1x8_halves_up rounds what is left.
    "cvt.rz.f16x2.f32",
    # Exact.
    "cvt.f32.f16",
    "cvt.rn.f16x2.e4m3x2",
    # Near: reciprocal_from and what is documented as near build on them.
    "rcp.approx.ftz.f32",
    "rsqrt.approx.ftz.f32",
    "ex2.approx.ftz.f32",
    # With NaN a NaN wins, without it loses.
    "max.NaN.f32",
    "max.NaN.xorsign.abs.bf16x2",
    "max.NaN.xorsign.abs.f16x2",
    "max.xorsign.abs.bf16x2",
    "max.xorsign.abs.f16x2",
}


def test_arithmetic_in_inline_assembly() -> None:
    found = set()
    for path in [*KERNELS.rglob("*.cuh"), *KERNELS.rglob("*.cu")]:
        for statement in re.findall(r"\basm\b(?: volatile)?\((.*?)\);", path.read_text(), re.S):
            code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', statement))
            found.update(re.findall(r"\b(?:cvt|rcp|ex2|rsqrt|max|min)(?:\.\w+)+", code))
    assert found == CONVERSIONS
