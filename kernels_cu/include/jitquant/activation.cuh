// Activations, for values and gradients that are cast in the same pass. Exponentials and quotients
// differ between GPU and CPU by an ulp or two.
#pragma once

#include "jitquant/numeric.cuh"

namespace jitquant {

enum class Activation : int { kNone = 0, kRelu = 1, kSilu = 2, kGelu = 3, kQgelu = 4, kSrelu = 5 };

// Of each, its value and its slope.
struct Relu {
  static JITQUANT_HD float value(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays
  static JITQUANT_HD float slope(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};

// max(x, 0)^2.
struct Srelu {
  static JITQUANT_HD float value(float x) { return mul_rn(Relu::value(x), Relu::value(x)); }
  static JITQUANT_HD float slope(float x) { return x > 0.0f ? add_rn(x, x) : 0.0f; }
};

// s * (1 + z * (1 - s)) with s = 1 / (1 + exp(-y)): the derivative of x / (1 + exp(-y)) if z is x
// times the derivative of y. A z beyond fp32 becomes its largest number: then s is 0 or 1, and the
// derivative too.
JITQUANT_HD float gate_slope(float y, float z) {
  const float s = sigmoid_near(y);
  z = fmaxf(fminf(z, kFloatMax), -kFloatMax);
  return mul_rn(s, fma_rn(z, add_rn(1.0f, -s), 1.0f));
}

// x / (1 + exp(-x)).
struct Silu {
  static JITQUANT_HD float value(float x) { return mul_rn(x, sigmoid_near(x)); }
  static JITQUANT_HD float slope(float x) { return gate_slope(x, x); }
};

// x / (1 + exp(-1.702 * x)).
struct Qgelu {
  static JITQUANT_HD float inner(float x) { return mul_rn(1.702f, x); }
  static JITQUANT_HD float value(float x) { return mul_rn(x, sigmoid_near(inner(x))); }
  static JITQUANT_HD float slope(float x) { return gate_slope(inner(x), inner(x)); }
};

// 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), where 0.5 * (1 + tanh(y)) is
// 1 / (1 + exp(-2 * y)).
struct Gelu {
  static constexpr float kRoot = 2.0f * 0.79788456080286536f, kCubic = 0.044715f;
  static JITQUANT_HD float inner(float x, float cubic) {
    return mul_rn(mul_rn(kRoot, x), fma_rn(cubic, mul_rn(x, x), 1.0f));
  }
  static JITQUANT_HD float value(float x) { return mul_rn(x, sigmoid_near(inner(x, kCubic))); }
  static JITQUANT_HD float slope(float x) {
    return gate_slope(inner(x, kCubic), inner(x, 3.0f * kCubic));
  }
};

// Calls f with an activation; not with none.
template <class F>
JITQUANT_HD void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return f(Relu());
    case Activation::kSilu:
      return f(Silu());
    case Activation::kGelu:
      return f(Gelu());
    case Activation::kQgelu:
      return f(Qgelu());
    case Activation::kSrelu:
      return f(Srelu());
  }
}

}  // namespace jitquant
