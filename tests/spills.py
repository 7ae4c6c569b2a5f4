"""The most that the kernels of a module may spill, and the largest stack: bytes of a thread."""

from __future__ import annotations

# Written and read. The 512 threads of a block of experts have all registers; what does not
# fit is used once a group of rows, not in the loop over tiles. Rotated rows in fp16 and rotated
# groups in fp32 are a few registers past their bound; no GPU has timed a looser one. A matrix and
# its transpose were timed with these spills, which make room for three blocks per SM: on 9.0 4over6
# takes 466 us with 56 bytes stored and 530 with two blocks. Products with unaligned weights, which
# spill most in fp16, were timed with these spills: 7 to 10% faster than with 620.
SPILLED = {
    "nvfp4_experts": 664,
    "nvfp4_linear": 60,
    "quantize_both": 8,
    "quantize_nvfp4_both": 168,
    "quantize_nvfp4_recipe": 64,
    "rotate_quantize": 8,
}
# What spills, and functions apart: of 4over6, for the rare errors that are too near to tell apart,
# and of stochastic rounding, for scales that are zero, subnormal or saturated.
STACK = {
    "nvfp4_experts": 120,
    "nvfp4_linear": 24,
    "quantize_both": 8,
    "quantize_mxfp4": 80,
    "quantize_nvfp4_both": 304,
    "quantize_nvfp4_recipe": 96,
    "rotate_quantize": 8,
}


def exceed(module: str, spilled: int, stack: int) -> bool:
    """Whether a kernel of this module spills more, or has a larger stack, than it may."""
    return spilled > SPILLED.get(module, 0) or stack > STACK.get(module, 0)
