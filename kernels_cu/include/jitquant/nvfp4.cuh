// The NVFP4 recipes, each rule once. A value is e2m1 * e4m3(block scale) * gsa.
//   te    TransformerEngine's NVFP4 quantizer; torchao's nvfp4_training gives the same bits.
//   vllm  what vLLM, SGLang and FlashInfer store, with their approximate reciprocals made exact.
// jitquant/reference/nvfp4.py is the same in PyTorch; the two agree bit for bit.
#pragma once

#include "jitquant/block.cuh"

namespace jitquant {

enum class Nvfp4Recipe : int { kTe = 0, kVllm = 1 };

constexpr float kSixth = 1.0f / 6.0f;

// The scale of a whole tensor (or row) as the quantizer uses it.
struct Nvfp4Encoding {
  float S;       // encoding scale: value * S is what the block scale and the code share out
  float S_6;     // S * (1/6)
  float over_S;  // 1 / S
};

JITQUANT_HD Nvfp4Encoding nvfp4_encoding(float S) {
  if (S > kFloatMax) S = kFloatMax;  // not fminf: a NaN stays
  if (S == 0.0f) S = 1.0f;
  return {S, mul_rn(S, kSixth), reciprocal_rn(S)};
}

// From the amax of the tensor or row (no NaN). `divisor` is 6 * 448 = 2688 unless the caller says.
JITQUANT_HD Nvfp4Encoding nvfp4_encoding_from_amax(float amax, float divisor) {
  return nvfp4_encoding(amax == 0.0f ? 1.0f : div_rn(divisor, amax));
}

// From a given gsa; 0, which an all-zero tensor returns, means the same here as there.
JITQUANT_HD Nvfp4Encoding nvfp4_encoding_from_gsa(float gsa) {
  return nvfp4_encoding(gsa == 0.0f ? 1.0f : reciprocal_rn(gsa));
}

// The stored scale of a block whose amax is b; a NaN b gives NaN (0x7f).
JITQUANT_HD uint8_t nvfp4_block_scale(float b, const Nvfp4Encoding& e, Nvfp4Recipe recipe) {
  const float scale =
      recipe == Nvfp4Recipe::kTe ? mul_rn(b, e.S_6) : mul_rn(e.S, mul_rn(b, kSixth));
  return e4m3_from_float(scale);
}

// What the elements of a block are multiplied with before they are rounded to E2M1.
JITQUANT_HD float nvfp4_block_encode(uint8_t stored, const Nvfp4Encoding& e, Nvfp4Recipe recipe) {
  const float s = float_from_e4m3(stored);
  if (recipe == Nvfp4Recipe::kVllm && s == 0.0f) return 0.0f;
  const float enc = reciprocal_rn(mul_rn(s, e.over_S));
  return enc > kFloatMax ? kFloatMax : enc;
}

struct Nvfp4Codes {
  uint32_t low, high;  // elements 0-7 and 8-15, element 0 in the low four bits
  uint8_t scale;
};

// A block whose amax is b (of these elements, or of a larger tile that they belong to). With a
// `factor` > 0 it is x * factor that is quantized, and b is the amax of that.
template <class T>
JITQUANT_HD Nvfp4Codes nvfp4_quantize_block(const Block<T>& x, float b, const Nvfp4Encoding& e,
                                            Nvfp4Recipe recipe, float factor = 1.0f) {
  Nvfp4Codes out;
  out.scale = nvfp4_block_scale(b, e, recipe);
  const float enc = mul_rn(nvfp4_block_encode(out.scale, e, recipe), factor);
  if (enc > 0.0f) {
    out.low = e2m1x8(x, 0, enc);
    out.high = e2m1x8(x, 1, enc);
  } else if (enc == 0.0f) {
    out.low = e2m1x8_of_zeros(x, 0);
    out.high = e2m1x8_of_zeros(x, 1);
  } else {
    out.low = out.high = 0;  // the block is NaN: its codes carry nothing
  }
  return out;
}

JITQUANT_HD float nvfp4_dequantize(uint32_t code, float scale, float gsa) {
  return mul_rn(mul_rn(float_from_e2m1(code), scale), gsa);
}

// Eight codes of one word. As fp16 the bits of a code, put in place, are its value times 2^-14:
// two at once, and the factor goes to the scale, whose 4 bits of mantissa keep every product exact.
JITQUANT_HD void nvfp4_dequantize8(uint32_t codes, float scale, float gsa, float* v) {
  const float factor = mul_rn(scale, 0x1p14f);
  JITQUANT_UNROLL
  for (int i = 0; i < 4; ++i) {
    // Codes i and i + 4 are 16 bits apart.
    const uint32_t pair = codes >> (4 * i);
    const uint32_t halves = ((pair << 12) & 0x80008000u) | ((pair << 9) & 0x0e000e00u);
    const Block<Fp16> both = {{halves}};
    v[i] = mul_rn(mul_rn(value_of(both, 0), factor), gsa);
    v[i + 4] = mul_rn(mul_rn(value_of(both, 1), factor), gsa);
  }
}

// Byte of the scale of (row, block) in cuBLASLt's 128x4 layout; `padded_blocks` is a multiple of 4.
JITQUANT_HD int64_t swizzle_128x4(int64_t row, int64_t block, int64_t padded_blocks) {
  const int64_t tile = (row >> 7) * (padded_blocks >> 2) + (block >> 2);
  return tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (block & 3);
}

}  // namespace jitquant
