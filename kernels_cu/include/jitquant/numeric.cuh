// fp32 arithmetic with the same bits on every compiler: each operation is rounded once, to nearest
// even, and never contracted, reassociated or approximated. Compiles as CUDA and as plain C++17, so
// that the recipes built on it can be tested exhaustively without a GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JITQUANT_HD __host__ __device__ __forceinline__
#else
#define JITQUANT_HD inline
#endif

namespace jitquant {

constexpr float kFloatMax = 0x1.fffffep127f;

JITQUANT_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

JITQUANT_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// The host versions are plain operators, because host code is compiled with -ffp-contract=off.
JITQUANT_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  const float y = a * b;
  return y != y ? bits_float(0x7fffffffu) : y;  // the device has only this NaN; a host's may be
                                                // negative
#endif
}

#if !defined(__CUDA_ARCH__)
inline float toward_zero(double exact) {
  const float y = static_cast<float>(exact);
  return std::fabs(static_cast<double>(y)) > std::fabs(exact) ? bits_float(float_bits(y) - 1) : y;
}
#endif

// The product, rounded toward zero: finite factors give at most kFloatMax.
JITQUANT_HD float mul_rz(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rz(a, b);
#else
  return toward_zero(static_cast<double>(a) * b);  // 48 bits
#endif
}

JITQUANT_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// The sum, rounded toward zero, of two numbers whose exact sum fits in fp64.
JITQUANT_HD float add_rz(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rz(a, b);
#else
  return toward_zero(static_cast<double>(a) + b);
#endif
}

JITQUANT_HD float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

JITQUANT_HD float reciprocal_rn(float a) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

JITQUANT_HD float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// 1 / x from the hardware, within an ulp; subnormal results are zero. On the host it is one ulp
// off, so that tests catch code that needs an exact reciprocal. Powers of two stay exact: the step
// below cannot correct them, and the hardware does not get them wrong.
JITQUANT_HD float reciprocal_near(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float y = 1.0f / x, a = y < 0.0f ? -y : y;
  if (a < 0x1p-126f) return y < 0.0f ? -0.0f : 0.0f;
  return (float_bits(y) & 0x7fffffu) > 1u && a <= kFloatMax ? bits_float(float_bits(y) - 1) : y;
#endif
}

// The correctly rounded 1 / a from an approximation, if |a| is 2^-125 to 2^125, or a is NaN.
JITQUANT_HD float reciprocal_from(float a, float near) {
  return fma_rn(near, -fma_rn(a, near, -1.0f), near);
}
JITQUANT_HD float reciprocal_rn_ordinary(float a) {
  return reciprocal_from(a, reciprocal_near(a));
}

// 1 / sqrt(x) from the hardware, within two ulp; one ulp above on the host.
JITQUANT_HD float reciprocal_root_near(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float y = 1.0f / std::sqrt(x);
  return y > 0.0f && y <= kFloatMax ? bits_float(float_bits(y) + 1) : y;
#endif
}

// 1 / sqrt(a), with the root rounded first. Branch-free: numbers whose remainder would be subnormal
// are scaled by 2^64. The root of a positive number is never near the limits of fp32.
JITQUANT_HD float reciprocal_of_root(float a) {
  const bool small = a < 0x1p-64f;
  const float b = mul_rn(a, small ? 0x1p64f : 1.0f), near = reciprocal_root_near(b);
  const float rough = mul_rn(b, near);
  const float lifted = fma_rn(fma_rn(-rough, rough, b), mul_rn(near, 0.5f), rough);
  const float root = mul_rn(lifted, small ? 0x1p-32f : 1.0f);
  return a > 0.0f && a <= kFloatMax ? reciprocal_rn_ordinary(root) : near;
}

// Whether x is a positive normal number.
JITQUANT_HD bool is_ordinary(float x) {
  return x >= 0x1p-126f && x <= kFloatMax;
}

// 2^x from the hardware, within an ulp or two; subnormal results are zero.
JITQUANT_HD float exp2_near(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
#endif
}

JITQUANT_HD float abs_of(float x) {
#if defined(__CUDA_ARCH__)
  return fabsf(x);  // becomes an operand modifier
#else
  return bits_float(float_bits(x) & 0x7fffffffu);
#endif
}

// 1 / (1 + e^-x), within a few ulp; 0 if e^-x overflows. Scaled by 1/4, so that the reciprocal is
// not subnormal: it may be multiplied by something large.
JITQUANT_HD float sigmoid_near(float x) {
  const float e = exp2_near(mul_rn(x, -1.44269504f));
  return mul_rn(reciprocal_near(fma_rn(e, 0.25f, 0.25f)), 0.25f);
}

JITQUANT_HD bool is_nan(float x) {
  return (float_bits(x) & 0x7fffffffu) > 0x7f800000u;
}

// max(a, |x|), NaN if either is NaN.
JITQUANT_HD float amax_keep_nan(float a, float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(fabsf(x)));
  return y;
#else
  const float b = abs_of(x);
  return is_nan(a) ? a : (is_nan(b) || b > a ? b : a);
#endif
}

// max(a, |x|), where a is not NaN; a NaN in x is ignored.
JITQUANT_HD float amax_ignore_nan(float a, float x) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, fabsf(x));
#else
  const float b = abs_of(x);
  return b > a ? b : a;
#endif
}

// Four of the eight bytes of (low, high), selected by the nibbles of `selector`, lowest first.
JITQUANT_HD uint32_t byte_permute(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, selector);
#else
  const uint64_t bytes = (static_cast<uint64_t>(high) << 32) | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7u))) & 0xffu) << (8 * i);
  }
  return out;
#endif
}

// The sign bits of the same bytes, each repeated eight times.
JITQUANT_HD uint32_t byte_signs(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector | 0x8888u));
  return out;
#else
  return ((byte_permute(low, high, selector) >> 7) & 0x01010101u) * 0xffu;
#endif
}

// Truncates two numbers to fp16; `low` goes to the low half. Both must be nonnegative and at most
// fp16's largest.
JITQUANT_HD uint32_t truncated_halves(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return halves;
#else
  const auto half = [](float x) {
    // Subnormals are multiples of 2^-24.
    return x < 0x1p-14f ? static_cast<uint32_t>(x * 0x1p24f)
                        : (float_bits(x) - float_bits(0x1p-15f)) >> 13;
  };
  return half(high) << 16 | half(low);
#endif
}

// The minimum of the lower halves of three words, in the lower half.
JITQUANT_HD uint32_t lower_halves_min(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return __vimin3_u16x2(a, b, c);
#else
  const uint32_t x = a & 0xffffu, y = b & 0xffffu, z = c & 0xffffu, least = x < y ? x : y;
  return least < z ? least : z;
#endif
}

// The smaller number per half of a word.
JITQUANT_HD uint32_t halves_min(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vminu2(a, b);
#else
  const uint32_t low = (a & 0xffffu) < (b & 0xffffu) ? a : b, high = a >> 16 < b >> 16 ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
#endif
}

// The larger number per half of a word.
JITQUANT_HD uint32_t halves_max(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a : b, high = a >> 16 > b >> 16 ? a : b;
  return (high & 0xffff0000u) | (low & 0xffffu);
#endif
}

// Divides numbers below 2^31 by a precomputed divisor, with a multiplication and a shift.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  // divisor is 1 to 2^31 - 1. multiplier is 2^(31 + shift) / divisor, rounded up.
  explicit Divisor(uint32_t divisor) : divisor(divisor), shift(0) {
    while ((uint32_t{1} << shift) < divisor) ++shift;
    const uint64_t power = uint64_t{1} << (31 + shift);
    multiplier = static_cast<uint32_t>((power + divisor - 1) / divisor);
  }
  JITQUANT_HD uint32_t quotient_of(uint32_t a) const {
#if defined(__CUDA_ARCH__)
    return __umulhi(a << 1, multiplier) >> shift;
#else
    return static_cast<uint32_t>((static_cast<uint64_t>(a) * multiplier) >> (31 + shift));
#endif
  }
};

}  // namespace jitquant
