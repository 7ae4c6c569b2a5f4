// Derivatives of activations, for gradients that are cast in the same pass. Exponentials and
// quotients differ by an ulp or two between a GPU and a host.
#pragma once

#include "jitquant/numeric.cuh"

namespace jitquant {

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2, kGelu = 3 };

JITQUANT_HD float drelu(float x) {
  return x > 0.0f ? 1.0f : 0.0f;
}

// exp(x), and 1 / x of a positive x: as near as the hardware's own are, which is far below what a
// code can show.
JITQUANT_HD float exp_near(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  return std::exp(x);
#endif
}
JITQUANT_HD float reciprocal_near(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, x);
#else
  return 1.0f / x;
#endif
}

// s * (1 + x * (1 - s)), s = 1 / (1 + exp(-x))
JITQUANT_HD float dsilu(float x) {
  const float s = reciprocal_near(add_rn(1.0f, exp_near(-x)));
  return mul_rn(s, add_rn(1.0f, mul_rn(x, add_rn(1.0f, -s))));
}

// Of 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).
JITQUANT_HD float dgelu(float x) {
  constexpr float kRoot = 0.79788456080286536f, kCubic = 0.044715f;
  const float square = mul_rn(x, x);
  const float t = tanhf(mul_rn(mul_rn(kRoot, x), add_rn(1.0f, mul_rn(kCubic, square))));
  const float slope = mul_rn(kRoot, add_rn(1.0f, mul_rn(3.0f * kCubic, square)));
  const float tail = mul_rn(add_rn(1.0f, -mul_rn(t, t)), slope);
  return add_rn(mul_rn(mul_rn(0.5f, x), tail), mul_rn(0.5f, add_rn(1.0f, t)));
}

// grad times the derivative at x.
JITQUANT_HD float activation_gradient(Activation activation, float grad, float x) {
  switch (activation) {
    case Activation::kRelu:
      return mul_rn(grad, drelu(x));
    case Activation::kSilu:
      return mul_rn(grad, dsilu(x));
    case Activation::kGelu:
      return mul_rn(grad, dgelu(x));
    default:
      return grad;
  }
}

}  // namespace jitquant
