// The NVFP4 recipes, each rule once. A value is e2m1 * e4m3(block scale) * gsa.
//   te    TransformerEngine's NVFP4 quantizer; torchao's nvfp4_training gives the same bits.
//   vllm  what vLLM, SGLang and FlashInfer store, with their approximate reciprocals made exact.
// jitquant/numerics/nvfp4.py defines the same in PyTorch, bit for bit.
#pragma once

#include "jitquant/block.cuh"

namespace jitquant {

// kTeFlush: kTe, with code 0 in blocks whose scale underflows.
enum class Nvfp4Recipe : int { kTe = 0, kVllm = 1, kTeFlush = 2 };

constexpr float kSixth = 1.0f / 6.0f;

// The scale of a tensor (or row) as the quantizer uses it. S is the encoding scale: values are
// multiplied by it, and block scale and code together represent the product.
struct Nvfp4Encoding {
  float first, second;  // the stored scale is RN(RN(b * first) * second): S / 6, or 1 / 6 and S
  float over_S;         // 1 / S
  float of_zero;        // factor of the elements if the stored scale is 0
  float most;           // 2^126 if every nonzero stored scale times over_S is far from the limits
                        // of fp32; otherwise -1
};

// S within the numbers that can be used: at most the largest one, and 1 instead of 0. NaN stays.
JITQUANT_HD float nvfp4_bounded(float S) {
  if (S > kFloatMax) S = kFloatMax;  // not fminf: keeps NaN
  return S == 0.0f ? 1.0f : S;
}

// From a bounded S.
JITQUANT_HD Nvfp4Encoding nvfp4_encoding(float S, Nvfp4Recipe recipe) {
  const bool te = recipe != Nvfp4Recipe::kVllm, keeps = recipe == Nvfp4Recipe::kTe;
  Nvfp4Encoding e;
  e.first = te ? mul_rn(S, kSixth) : kSixth;
  e.second = te ? 1.0f : S;
  e.over_S = reciprocal_rn(S);
  e.most = e.over_S >= 0x1p-100f && e.over_S <= 0x1p100f ? 0x1p126f : -1.0f;
  // As for any scale, recipe te uses 1 / (0 / S), capped at the largest number; 0 / S may be NaN.
  e.of_zero = keeps ? (e.over_S <= kFloatMax ? kFloatMax : mul_rn(0.0f, e.over_S)) : 0.0f;
  return e;
}

// S from the amax of the tensor or row (not NaN). `divisor` is 6 * 448 = 2688 unless the caller
// sets it.
JITQUANT_HD float nvfp4_S(float amax, float divisor) {
  return nvfp4_bounded(amax == 0.0f ? 1.0f : div_rn(divisor, amax));
}
JITQUANT_HD Nvfp4Encoding nvfp4_encoding_from_amax(float amax, float divisor, Nvfp4Recipe recipe) {
  return nvfp4_encoding(nvfp4_S(amax, divisor), recipe);
}

// From a given gsa. 0, as returned for an all-zero tensor, has the same meaning as there.
JITQUANT_HD Nvfp4Encoding nvfp4_encoding_from_gsa(float gsa, Nvfp4Recipe recipe) {
  return nvfp4_encoding(nvfp4_bounded(gsa == 0.0f ? 1.0f : reciprocal_rn(gsa)), recipe);
}

// The stored scale of a block whose amax is b; a NaN b gives NaN (0x7f).
JITQUANT_HD uint16_t nvfp4_block_scale(float b, const Nvfp4Encoding& e) {
  return e4m3_from_float(mul_rn(mul_rn(b, e.first), e.second));
}

// The factor of a block's elements before they are rounded to E2M1, given the stored scale. Valid
// if it is at most e.most; otherwise, including NaN, use nvfp4_block_encode.
JITQUANT_HD float nvfp4_usual_encode(float stored, const Nvfp4Encoding& e) {
  return reciprocal_rn_ordinary(mul_rn(stored, e.over_S));
}
// Whether that factor is valid and, where it matters, no product in a block with amax b exceeds the
// largest code. True for all blocks whose scale is not zero, subnormal or saturated.
JITQUANT_HD bool nvfp4_is_usual(float b, float enc, const Nvfp4Encoding& e) {
#if defined(JITQUANT_HAS_E2M1_INSTRUCTION)
  return enc <= e.most;
#else
  return mul_rn(b, enc) < 7.0f && enc <= e.most;
#endif
}
JITQUANT_HD float nvfp4_block_encode(float stored, const Nvfp4Encoding& e) {
  if (stored == 0.0f) return e.of_zero;
  const float enc = reciprocal_rn(mul_rn(stored, e.over_S));
  return enc > kFloatMax ? kFloatMax : enc;
}

struct Nvfp4Codes {
  uint32_t low, high;  // elements 0-7 and 8-15, element 0 in the low four bits
  uint8_t scale;
};

// The codes of a block whose elements are multiplied by any enc.
template <class T>
JITQUANT_HD void nvfp4_encode_block(const Block<T>& x, float enc, Nvfp4Codes& out) {
  if (enc > 0.0f) {
    out.low = e2m1x8(x, 0, enc);
    out.high = e2m1x8(x, 1, enc);
  } else if (enc == 0.0f) {
    out.low = e2m1x8_of_zeros(x, 0);
    out.high = e2m1x8_of_zeros(x, 1);
  } else {
    out.low = out.high = 0;  // the block is NaN; its codes do not matter
  }
}

// Encodes a block whose amax (over these elements, or over a larger tile) is b, with a given stored
// scale or the recipe's.
template <bool kLooks = false, class T>
JITQUANT_HD Nvfp4Codes nvfp4_encode_with(const Block<T>& x, float b, uint16_t scale,
                                         const Nvfp4Encoding& e) {
  const float stored = float_from_e4m3(scale), enc = nvfp4_usual_encode(stored, e);
  Nvfp4Codes out;
  out.scale = static_cast<uint8_t>(scale);
  if (nvfp4_is_usual(b, enc, e)) {
    uint32_t codes[2];
    e2m1x16_ordinary<kLooks>(x, enc, mul_rn(stored, e.over_S), codes);
    out.low = codes[0], out.high = codes[1];
  } else {
    nvfp4_encode_block(x, nvfp4_block_encode(stored, e), out);
  }
  return out;
}
template <bool kLooks = false, class T>
JITQUANT_HD Nvfp4Codes nvfp4_quantize_block(const Block<T>& x, float b, const Nvfp4Encoding& e) {
  return nvfp4_encode_with<kLooks>(x, b, nvfp4_block_scale(b, e), e);
}

// Blocks that still have to be multiplied by a nonnegative factor, a norm's inv_rms. The scale
// comes from the amax times the factor. Elements are multiplied by RN(enc * factor) or, if that is
// not a normal number, by the factor and then by enc.
struct Nvfp4Product {
  float stored, enc;  // enc includes the factor
  uint8_t scale;
  // True unless the scale is zero or subnormal: no product exceeds the largest code, and enc is far
  // from the limits of fp32.
  bool usual;
};

constexpr float kLeastProduct = 0x1p-110f;

// For a block whose largest magnitude is b.
JITQUANT_HD Nvfp4Product nvfp4_product(float b, float factor, const Nvfp4Encoding& e) {
  const uint16_t scale = nvfp4_block_scale(mul_rn(b, factor), e);
  const float stored = float_from_e4m3(scale), enc = mul_rn(nvfp4_usual_encode(stored, e), factor);
  return {stored, enc, static_cast<uint8_t>(scale),
          nvfp4_is_usual(b, enc, e) && enc >= kLeastProduct};
}

template <bool kLooks, class T>
JITQUANT_HD Nvfp4Codes nvfp4_quantize_scaled_block(const Block<T>& x, float b, float factor,
                                                   const Nvfp4Encoding& e) {
  const Nvfp4Product product = nvfp4_product(b, factor, e);
  Nvfp4Codes out;
  out.scale = product.scale;
  if (product.usual) {
    uint32_t codes[2];
    e2m1x16_ordinary<kLooks>(x, product.enc, 0.0f, codes);
    out.low = codes[0], out.high = codes[1];
    return out;
  }
  float enc = nvfp4_block_encode(product.stored, e);
  Block<T> y = x;
  if (is_ordinary(mul_rn(enc, factor))) {
    enc = mul_rn(enc, factor);
  } else {
    JITQUANT_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float product = mul_rn(value_of(x, i), factor);
      y.words[i] = is_nan(product) ? 0u : float_bits(product);
    }
  }
  nvfp4_encode_block(y, enc, out);
  return out;
}

// As above for magnitudes with separate signs (e2m1x16_signs): modifies unusual blocks so that the
// usual encoding gives the right codes.
JITQUANT_HD void nvfp4_make_usual(float (&x)[16], uint32_t& signs, float factor,
                                  const Nvfp4Encoding& e, Nvfp4Product& product) {
  if (product.usual) return;
  float enc = nvfp4_block_encode(product.stored, e);
  if (is_ordinary(mul_rn(enc, factor))) {
    enc = mul_rn(enc, factor);
  } else {
    uint32_t numbers[2] = {};
    JITQUANT_UNROLL
    for (int i = 0; i < 16; ++i) {
      const float y = mul_rn(x[i], factor);
      numbers[i >> 3] |= is_nan(y) ? 0u : 8u << (4 * (i & 7));
      x[i] = is_nan(y) ? 0.0f : y;
    }
    signs &= numbers[0] | numbers[1] >> 1;
  }
  if (!(enc > 0.0f)) {  // zero, which drops the signs of non-finite values, or NaN
    uint32_t finite[2] = {};
    JITQUANT_UNROLL
    for (int i = 0; i < 16; ++i) {
      finite[i >> 3] |= enc == 0.0f && x[i] <= kFloatMax ? 8u << (4 * (i & 7)) : 0u;
      x[i] = 0.0f;
    }
    signs &= finite[0] | finite[1] >> 1;
    product.enc = 1.0f;
    return;
  }
  const float up = enc > 0x1p126f ? 4.0f : (enc < kLeastProduct ? 0x1p-64f : 1.0f);
  enc = enc > 0x1p126f ? enc * 0.25f : (enc < kLeastProduct ? enc * 0x1p64f : enc);
  const float most = mul_rn(6.5f, reciprocal_rn(enc));
  JITQUANT_UNROLL
  for (int i = 0; i < 16; ++i) {
    x[i] = mul_rn(x[i], up);
    x[i] = x[i] < most ? x[i] : most;
  }
  product.enc = enc;
}

// Encodes several blocks.
template <int kCount, class Magnitudes>
JITQUANT_HD void nvfp4_encode_magnitudes(const Magnitudes (&x)[kCount],
                                         const Nvfp4Product (&products)[kCount],
                                         Nvfp4Codes (&out)[kCount]) {
#if defined(JITQUANT_HAS_E2M1_INSTRUCTION)
  JITQUANT_UNROLL
  for (int k = 0; k < kCount; ++k) {
    Block<float> block;
    JITQUANT_UNROLL
    for (int i = 0; i < 16; ++i) block.words[i] = float_bits(x[k].magnitude[i]);
    out[k].low = e2m1x8(block, 0, products[k].enc);
    out[k].high = e2m1x8(block, 1, products[k].enc);
  }
#else
  uint32_t codes[kCount][2];
  JITQUANT_UNROLL
  for (int k = 0; k < kCount; ++k) {
    const float unit = products[k].enc * kHalfUnit;
    e2m1x16_magnitudes([&](int i) { return mul_rn(x[k].magnitude[i], unit); }, codes[k]);
  }
  JITQUANT_UNROLL
  for (int k = 0; k < kCount; ++k) out[k].low = codes[k][0], out[k].high = codes[k][1];
#endif
  JITQUANT_UNROLL
  for (int k = 0; k < kCount; ++k) {
    out[k].low |= half_of_signs(x[k].signs, 0), out[k].high |= half_of_signs(x[k].signs, 1);
    out[k].scale = products[k].scale;
  }
}

JITQUANT_HD float nvfp4_dequantize(uint32_t code, float scale, float gsa) {
  return mul_rn(mul_rn(float_from_e2m1(code), scale), gsa);
}

// Decodes the eight codes of a word. place_codes gives their values times 2^-14. That factor goes
// to the scale, whose 4-bit mantissa keeps every product exact.
JITQUANT_HD void nvfp4_dequantize8(uint32_t codes, float scale, float gsa, float* v) {
  static_assert(PlacedCodes<Fp16>::kExponent == -14);
  const float factor = mul_rn(scale, 0x1p14f);
  uint32_t pairs[4];
  place_codes<Fp16>(codes, pairs);
  JITQUANT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Block<Fp16> both = {{pairs[i]}};
    v[i] = mul_rn(mul_rn(value_of(both, 0), factor), gsa);
    v[i + 4] = mul_rn(mul_rn(value_of(both, 1), factor), gsa);
  }
}

}  // namespace jitquant
