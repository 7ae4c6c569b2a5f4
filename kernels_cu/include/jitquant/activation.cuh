// Derivatives of activations, for gradients that are cast in the same pass. The exponential and the
// hyperbolic tangent differ by an ulp or two between a GPU and a host.
#pragma once

#include "jitquant/numeric.cuh"

namespace jitquant {

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2, kGelu = 3 };

JITQUANT_HD float drelu(float x) {
  return x > 0.0f ? 1.0f : 0.0f;
}

// s * (1 + x * (1 - s)), s = 1 / (1 + exp(-x))
JITQUANT_HD float dsilu(float x) {
  const float s = div_rn(1.0f, add_rn(1.0f, expf(-x)));
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
template <Activation kActivation>
JITQUANT_HD float activation_gradient(float grad, float x) {
  if constexpr (kActivation == Activation::kRelu) return mul_rn(grad, drelu(x));
  if constexpr (kActivation == Activation::kSilu) return mul_rn(grad, dsilu(x));
  if constexpr (kActivation == Activation::kGelu) return mul_rn(grad, dgelu(x));
  return grad;
}

}  // namespace jitquant
