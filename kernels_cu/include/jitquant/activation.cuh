// Derivatives of activations, for gradients that are cast in the same pass. Exponentials and
// quotients differ by an ulp or two between a GPU and a host.
#pragma once

#include "jitquant/numeric.cuh"

namespace jitquant {

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2, kGelu = 3 };

JITQUANT_HD float drelu(float x) {
  return x > 0.0f ? 1.0f : 0.0f;
}

// exp(x), and 1 / x of an x of at least 1: as near as the hardware's own are, which is far below
// what a code can show. Denormals are zeros.
JITQUANT_HD float exp_near(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
#else
  return std::exp(x);
#endif
}
JITQUANT_HD float reciprocal_near(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// s * (1 + z * (1 - s)), s = 1 / (1 + exp(-y)): the derivative of x / (1 + exp(-y)) where z is x
// times that of y.
JITQUANT_HD float dgate(float y, float z) {
  const float s = reciprocal_near(add_rn(1.0f, exp_near(-y)));
  return mul_rn(s, fma_rn(z, add_rn(1.0f, -s), 1.0f));
}

JITQUANT_HD float dsilu(float x) {
  return dgate(x, x);
}

// Of 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), where 0.5 * (1 + tanh(y)) is
// 1 / (1 + exp(-2 * y)).
JITQUANT_HD float dgelu(float x) {
  constexpr float kRoot = 2.0f * 0.79788456080286536f, kCubic = 0.044715f;
  const float square = mul_rn(x, x), y = mul_rn(kRoot, x);
  return dgate(mul_rn(y, fma_rn(kCubic, square, 1.0f)),
               mul_rn(y, fma_rn(3.0f * kCubic, square, 1.0f)));
}

}  // namespace jitquant
