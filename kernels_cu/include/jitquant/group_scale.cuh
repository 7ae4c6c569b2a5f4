// The rule of 8-bit quantization with a scale per group or block of values: per-token-group FP8 and
// INT8, and MXFP8. jitquant/numerics/fp8.py and mxfp8.py define the same in PyTorch, bit for bit. A
// value is element * scale_inv.
#pragma once

#include "jitquant/block.cuh"
#include "jitquant/fp8.cuh"

namespace jitquant {

constexpr int kMxfp8Block = 32;

// te: TransformerEngine, torchao. deepgemm: DeepGEMM. vllm: vLLM's group kernels.
enum class GroupRecipe : int { kTe = 0, kDeepGemm = 1, kVllm = 2 };

// fp32; fp32 rounded to powers of two; their exponents, four per int32; E8M0 bytes of MXFP8,
// including its arithmetic.
enum class ScaleFormat : int { kFloat32 = 0, kPowerOfTwo = 1, kPacked = 2, kE8m0 = 3 };

struct GroupNumerics {
  EightBit format;
  GroupRecipe recipe;
  ScaleFormat scale_format;
  float eps;
  bool bounded;  // elements are from low to high, which the amax maps to
  float low, high;
};

struct GroupScale {
  float scale_inv;    // as stored; recipe vllm divides by it
  float factor;       // elements are multiplied by it
  uint32_t exponent;  // of scale_inv if that is a power of two
};

// The scales of groups from their amaxes, NaN if a group contains one. Quotients use reciprocals: a
// division would check for cases that cannot occur or are selected away. All branches are uniform
// across groups.
template <int kCount>
JITQUANT_HD void group_scales(const GroupNumerics& n, const float (&amax)[kCount],
                              GroupScale (&g)[kCount]) {
  const float top = n.bounded ? n.high : largest(n.format);
  float b[kCount];
  JITQUANT_UNROLL
  for (int k = 0; k < kCount; ++k) b[k] = amax_keep_nan(n.eps, amax[k]);
  if (n.recipe == GroupRecipe::kTe) {
    JITQUANT_UNROLL
    for (int k = 0; k < kCount; ++k) {
      // Times 2^-3, so that the reciprocal of the largest amax is not subnormal.
      const float lowered = mul_rn(b[k], 0x1p-3f);
      const float lifted = div_by_reciprocal(top, lowered, reciprocal_rn_ordinary(lowered));
      g[k].factor = mul_rn(lifted, 0x1p-3f);
      g[k].scale_inv = reciprocal_rn_ordinary(g[k].factor);
    }
  } else {
    const float over_top = reciprocal_rn_ordinary(top);
    JITQUANT_UNROLL
    for (int k = 0; k < kCount; ++k) {
      g[k].scale_inv = div_by_reciprocal(b[k], top, over_top);
      g[k].factor = reciprocal_rn_ordinary(g[k].scale_inv);
    }
  }
  JITQUANT_UNROLL
  for (int k = 0; k < kCount; ++k) {
    if (b[k] > kFloatMax) g[k].scale_inv = b[k], g[k].factor = 0.0f;
    g[k].exponent = 0;
  }
  if (n.scale_format == ScaleFormat::kFloat32) return;
  JITQUANT_UNROLL
  for (int k = 0; k < kCount; ++k) {
    const float s = g[k].scale_inv;
    g[k].exponent = n.scale_format == ScaleFormat::kE8m0 ? e8m0_rceil(s) : ue8m0_exponent(s);
    g[k].factor = inverse_power_of_two(g[k].exponent);
    if (!is_nan(s)) g[k].scale_inv = power_of_two(g[k].exponent);
  }
}

JITQUANT_HD GroupScale group_scale(const GroupNumerics& n, float b) {
  const float amax[1] = {b};
  GroupScale g[1];
  group_scales(n, amax, g);
  return g[0];
}

JITQUANT_HD bool divides(const GroupNumerics& n) {
  return n.recipe == GroupRecipe::kVllm && n.scale_format == ScaleFormat::kFloat32;
}

// Divides by a scale with the hardware's reciprocal. The product is within 1.5 ulp, and the
// correction rounds it (Markstein), correctly wherever the element's code depends on it. A power of
// two moves scale and elements away from the limits of fp32. The remainder is negated, so that
// zeros keep their sign.
struct GroupDivisor {
  float lift, s, r;
};

JITQUANT_HD float lift_of(float scale_inv) {
  return scale_inv > 0x1p120f ? 0x1p-64f : (scale_inv < 0x1p-80f ? 0x1p64f : 1.0f);
}
// `r` is the scale's reciprocal, which is already known.
JITQUANT_HD GroupDivisor group_divisor(float scale_inv, float r) {
  const float lift = lift_of(scale_inv);
  // Skips the remainder if the scale is Inf or NaN: finite elements give 0, others NaN, as r
  // determines.
  return {lift, scale_inv <= kFloatMax ? mul_rn(scale_inv, lift) : 0.0f, r};
}
JITQUANT_HD float group_reciprocal(float scale_inv) {
  const float r = reciprocal_rn_ordinary(mul_rn(scale_inv, lift_of(scale_inv)));
  return scale_inv <= kFloatMax ? r : (is_nan(scale_inv) ? scale_inv : 0.0f);
}
JITQUANT_HD float divide(float x, const GroupDivisor& d) {
  const float lifted = mul_rn(x, d.lift), q = mul_rn(lifted, d.r);
  return fma_rn(-fma_rn(q, d.s, -lifted), d.r, q);
}

// The sixteen bytes of a block within one group. `factor` is the group's factor or, by division,
// the group_reciprocal of the scale.
template <EightBit kFormat, class T>
JITQUANT_HD void encode_group_block(const Block<T>& x, const GroupNumerics& n, bool by_division,
                                    float factor, float scale_inv, uint32_t (&words)[4]) {
  const auto pack = [&](auto&& scaled) {
    const auto word = [&](int i) {
      const float v[4] = {scaled(value_of(x, i)), scaled(value_of(x, i + 1)),
                          scaled(value_of(x, i + 2)), scaled(value_of(x, i + 3))};
      return pack4<kFormat>(v);
    };
    words[0] = word(0), words[1] = word(4), words[2] = word(8), words[3] = word(12);
  };
  if (!by_division && !n.bounded) return pack([&](float v) { return mul_rn(v, factor); });
  const GroupDivisor d = group_divisor(scale_inv, factor);
  if (!n.bounded) return pack([&](float v) { return divide(v, d); });
  pack([&](float value) {
    const float v = by_division ? divide(value, d) : mul_rn(value, factor);
    return v < n.low ? n.low : (v > n.high ? n.high : v);  // NaN stays
  });
}

}  // namespace jitquant
