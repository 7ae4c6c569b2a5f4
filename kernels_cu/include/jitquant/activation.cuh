// Derivatives of activations, for gradients that are cast in the same pass. Exponentials and
// quotients differ between GPU and CPU by an ulp or two.
#pragma once

#include "jitquant/numeric.cuh"

namespace jitquant {

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2, kGelu = 3, kQgelu = 4, kSrelu = 5 };

JITQUANT_HD float drelu(float x) {
  return x > 0.0f ? 1.0f : 0.0f;
}

// The derivative of max(x, 0)^2.
JITQUANT_HD float dsrelu(float x) {
  return x > 0.0f ? add_rn(x, x) : 0.0f;
}

// s * (1 + z * (1 - s)) with s = 1 / (1 + exp(-y)): the derivative of x / (1 + exp(-y)) if z is x
// times the derivative of y.
JITQUANT_HD float dgate(float y, float z) {
  const float s = sigmoid_near(y);
  return mul_rn(s, fma_rn(z, add_rn(1.0f, -s), 1.0f));
}

JITQUANT_HD float dsilu(float x) {
  return dgate(x, x);
}

// The derivative of x / (1 + exp(-1.702 * x)).
JITQUANT_HD float dqgelu(float x) {
  const float y = mul_rn(1.702f, x);
  return dgate(y, y);
}

// The derivative of 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), where 0.5 * (1 +
// tanh(y)) is 1 / (1 + exp(-2 * y)).
JITQUANT_HD float dgelu(float x) {
  constexpr float kRoot = 2.0f * 0.79788456080286536f, kCubic = 0.044715f;
  const float square = mul_rn(x, x), y = mul_rn(kRoot, x);
  return dgate(mul_rn(y, fma_rn(kCubic, square, 1.0f)),
               mul_rn(y, fma_rn(3.0f * kCubic, square, 1.0f)));
}

}  // namespace jitquant
