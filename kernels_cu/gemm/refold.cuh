// Refolds an NVFP4 weight for FP8 products: each code times its scale becomes E4M3, rounded once,
// with a power of two per row of W.
#pragma once

#include "jitquant/mma.cuh"

namespace jitquant {

// The exponent of a row's power of two, -3 to 12, given the largest byte of its scales without the
// sign bit: the largest exponent for which 6 times that scale, times 2^exponent, is at most 448.
// NaN counts as 480.
JITQUANT_HD int refold_exponent(uint32_t most) {
  const int binades = static_cast<int>((most + 6) >> 3);
  return 13 - (binades > 1 ? binades : 1);
}

// 2^exponent, twice, as a pair of fp16.
__device__ __forceinline__ uint32_t refold_factor(int exponent) {
  return static_cast<uint32_t>(exponent + 15) * 0x04000400u;
}

// Two E4M3 scales, in the low half of `bytes`, times 2^exponent, as a pair of fp16. Exact; the
// results are at most 448 / 6.
__device__ __forceinline__ uint32_t refold_scales(uint32_t bytes, uint32_t factor) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const uint32_t pair = halves_from_e4m3(bytes);
#else
  const uint32_t pair =
      pair_from_floats<Fp16>(float_from_e4m3(bytes & 0xffu), float_from_e4m3((bytes >> 8) & 0xffu));
#endif
  return multiply_pairs<Fp16>(pair, factor);
}

// Converts two pairs of fp16 to four E4M3, rounding to nearest even and saturating. NaN of either
// sign becomes 0x7f.
__device__ __forceinline__ uint32_t e4m3_from_pairs(uint32_t low, uint32_t high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t bytes;
  asm("{\n"
      " .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      " mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(bytes)
      : "r"(low), "r"(high));
  return bytes;
#else
  const auto code = [](uint32_t pair, int i) {
    return static_cast<uint32_t>(
        e4m3_from_float(to_float(Fp16{static_cast<uint16_t>(pair >> (16 * i))})));
  };
  return code(low, 0) | code(low, 1) << 8 | code(high, 0) << 16 | code(high, 1) << 24;
#endif
}

// The values of codes 0 to 7 times a scale from refold_scales, the first of a pair, as E4M3.
__device__ __forceinline__ void refold_table(uint32_t scales, uint32_t (&table)[2]) {
  const uint32_t scale = byte_permute(scales, 0u, 0x1010);
  // The constants are 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in fp16.
  table[0] = e4m3_from_pairs(multiply_pairs<Fp16>(0x38000000u, scale),
                             multiply_pairs<Fp16>(0x3e003c00u, scale));
  table[1] = e4m3_from_pairs(multiply_pairs<Fp16>(0x42004000u, scale),
                             multiply_pairs<Fp16>(0x46004400u, scale));
}

// Looks up eight neighboring codes.
__device__ __forceinline__ void refold_codes(uint32_t codes, const uint32_t (&table)[2],
                                             uint32_t (&e4m3)[2]) {
  const uint32_t magnitudes = codes & 0x77777777u;
  const uint32_t even = codes << 4;  // puts the sign of even codes in the top bit of a byte
  e4m3[0] = byte_permute(table[0], table[1], magnitudes) ^
            (byte_permute(even, codes, 0x5140) & 0x80808080u);
  e4m3[1] = byte_permute(table[0], table[1], magnitudes >> 16) ^
            (byte_permute(even, codes, 0x7362) & 0x80808080u);
}

}  // namespace jitquant
