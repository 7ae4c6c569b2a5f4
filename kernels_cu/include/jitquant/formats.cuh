// The number formats as bits: E4M3 (OCP OFP8, "fn": no infinity, NaN is 0x7f) and E2M1 (OCP MX
// FP4).
#pragma once

#include "jitquant/numeric.cuh"

namespace jitquant {

constexpr float kE4m3Max = 448.0f;  // largest finite E4M3

struct E4m3 {
  uint8_t bits;
};

// The code of a number in a small format with kBits mantissa bits, for what has no instruction. It
// is not negative, rounds to nearest even, and is at most the largest number of the format.
template <int kBits, int kBias>
JITQUANT_HD uint32_t rounded_code(float a) {
  constexpr uint32_t kShift = 23 - kBits, kHalf = (1u << (kShift - 1)) - 1u;
  const uint32_t bits = float_bits(a);
  if (bits < (128u - kBias) << 23) {
    // Subnormals are multiples of the spacing of fp32 at this power of two, so the sum rounds.
    const float power = bits_float((151u - kBias - kBits) << 23);
    return float_bits(add_rn(a, power)) - float_bits(power);
  }
  return ((bits + kHalf + ((bits >> kShift) & 1u)) >> kShift) - ((127u - kBias) << kBits);
}
// The number of a code without a sign, infinity or NaN. Exact.
template <int kBits, int kBias>
JITQUANT_HD float number_of_code(uint32_t code) {
  // The shifted bits are the value times 2^(kBias - 127), including subnormals.
  return mul_rn(bits_float(code << (23 - kBits)), bits_float((254u - kBias) << 23));
}

// E4M3 of x, round to nearest even. Saturates to +-448, including Inf; NaN gives 0x7f.
JITQUANT_HD uint16_t e4m3_from_float(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair;
#else
  if (is_nan(x)) return 0x7f;
  const uint32_t sign = (float_bits(x) >> 24) & 0x80u;
  const float a = abs_of(x);
  return static_cast<uint16_t>(sign | rounded_code<3, 7>(a < kE4m3Max ? a : kE4m3Max));
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Two E4M3, in the low or the high half of `bytes`, as a pair of fp16. Exact.
template <bool kHigh = false>
__device__ __forceinline__ uint32_t halves_from_e4m3(uint32_t bytes) {
  uint32_t halves;
  if constexpr (kHigh) {
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, high;\n}"
        : "=r"(halves)
        : "r"(bytes));
  } else {
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, low;\n}"
        : "=r"(halves)
        : "r"(bytes));
  }
  return halves;
}
#endif

// Exact; 0x7f and 0xff give NaN.
JITQUANT_HD float float_from_e4m3(uint16_t code) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  float x;
  asm("{\n"
      " .reg .b32 halves;\n"
      " .reg .b16 low, high;\n"
      " cvt.rn.f16x2.e4m3x2 halves, %1;\n"
      " mov.b32 {low, high}, halves;\n"
      " cvt.f32.f16 %0, low;\n"
      "}"
      : "=f"(x)
      : "h"(code));
  return x;
#else
  const uint32_t magnitude = code & 0x7fu;
  const float a = magnitude == 0x7fu ? bits_float(0x7fc00000u) : number_of_code<3, 7>(magnitude);
  return code & 0x80u ? -a : a;
#endif
}

JITQUANT_HD float to_float(E4m3 x) {
  return float_from_e4m3(x.bits);
}

// The bits of 2^23 plus the code of a >= 0, round to nearest even, saturating at 6. A code is the
// minimum of three linear functions of a, one per binade. Adding one to 2^23 rounds it to an
// integer code.
JITQUANT_HD uint32_t e2m1_magnitude(float a) {
  constexpr uint32_t kMost = 0x4b000007u;
  const float low = fma_rn(a, 2.0f, 0x1p23f);
  const float middle = add_rn(a, 0x1p23f + 2.0f);
  const float high = fma_rn(a, 0.5f, 0x1p23f + 4.0f);
  // Positive floats compare as integers; one instruction takes the minimum of three.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t code =
      __vimin3_s32(__float_as_int(low), __float_as_int(middle), __float_as_int(high));
#else
  const float least = low < middle ? low : middle;
  const uint32_t code = float_bits(least < high ? least : high);
#endif
  return code < kMost ? code : kMost;
}

// Exact; reads the low four bits.
JITQUANT_HD float float_from_e2m1(uint32_t code) {
  const uint32_t bits = ((code & 8u) << 28) | ((code & 7u) << 22);
  return mul_rn(bits_float(bits), 0x1p126f);  // the bits are the value times 2^-126
}

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define JITQUANT_HAS_E2M1_INSTRUCTION 1
#endif

}  // namespace jitquant
