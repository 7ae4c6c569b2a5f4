// The device arithmetic, compiled by the host compiler, behind functions that ctypes can call.
#include "jitquant/nvfp4.cuh"
#include "jitquant/swizzle.cuh"

using namespace jitquant;

// The nearest E2M1, ties to even, found in double precision.
static uint32_t nearest_e2m1(float x) {
  const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  // Beyond 8 the nearest is 6, and a difference of doubles would no longer tell the values apart.
  const double a = std::fmin(std::fabs(static_cast<double>(x)), 8.0);
  uint32_t best = 0;
  for (uint32_t c = 1; c < 8; ++c) {
    const double was = std::fabs(a - values[best]), is = std::fabs(a - values[c]);
    if (is < was || (is == was && c % 2 == 0)) best = c;
  }
  return best | (std::signbit(x) ? 8u : 0u);
}

extern "C" {

// 1 / a where a is ordinary, from a reciprocal that may be an ulp off: for every mantissa.
int64_t count_wrong_reciprocals(int exponent) {
  int64_t wrong = 0;
  for (uint32_t mantissa = 0; mantissa < 1u << 23; ++mantissa) {
    const float a = bits_float(static_cast<uint32_t>(exponent) << 23 | mantissa);
    wrong += float_bits(reciprocal_rn_ordinary(a)) != float_bits(1.0f / a);
    wrong += float_bits(reciprocal_of_root(a)) != float_bits(1.0f / std::sqrt(a));
  }
  return wrong;
}

float reciprocal_root(float a) {
  return reciprocal_of_root(a);
}

// As in a block whose scale is not an ordinary number.
void encode_e2m1(const float* x, uint8_t* code, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const Block<float> block = {{float_bits(x[i])}};
    code[i] = static_cast<uint8_t>(e2m1x8(block, 0, 1.0f) & 15u);
  }
}

void decode_e2m1(const uint8_t* code, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = float_from_e2m1(code[i]);
}

void encode_e4m3(const float* x, uint8_t* code, int64_t n) {
  for (int64_t i = 0; i < n; ++i) code[i] = static_cast<uint8_t>(e4m3_from_float(x[i]));
}

void decode_e4m3(const uint8_t* code, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = float_from_e4m3(code[i]);
}

// Every fp32 whose bits are in [first, last]: how many codes differ from the nearest E2M1.
int64_t count_wrong_e2m1(uint32_t first, uint32_t last) {
  int64_t wrong = 0;
  for (uint64_t bits = first; bits <= last; bits += 8) {
    Block<float> x = {};
    for (uint32_t i = 0; i < 8 && bits + i <= last; ++i) {
      const uint32_t word = static_cast<uint32_t>(bits) + i;
      x.words[i] = is_nan(bits_float(word)) ? 0u : word;
    }
    const uint32_t codes = e2m1x8(x, 0, 1.0f);
    for (int i = 0; i < 8; ++i) wrong += (codes >> (4 * i) & 15) != nearest_e2m1(value_of(x, i));
  }
  return wrong;
}

}  // extern "C"

template <class T>
static void quantize(const Block<T>* x, int64_t blocks, const Nvfp4Encoding& e, uint8_t* codes,
                     uint8_t* scales) {
  for (int64_t i = 0; i < blocks; ++i) {
    const Nvfp4Codes out = nvfp4_quantize_block(x[i], block_amax(x[i]), e);
    for (int j = 0; j < 4; ++j) {
      codes[8 * i + j] = static_cast<uint8_t>(out.low >> (8 * j));
      codes[8 * i + 4 + j] = static_cast<uint8_t>(out.high >> (8 * j));
    }
    scales[i] = out.scale;
  }
}

template <class T>
static float amax_of(const Block<T>* x, int64_t blocks) {
  Amax<T> amax;
  for (int64_t i = 0; i < blocks; ++i) amax.add(x[i]);
  return amax.result();
}

// Of the values of T whose products with RN(1 / d) are below 7 and not too small to matter: how
// many have another code than the nearest to the product; adds those that are half way above
// an even code to `halves`.
template <class T>
static int64_t wrong_codes(float d, int64_t& halves) {
  const float enc = reciprocal_rn_ordinary(d);
  int64_t wrong = 0;
  int count = 0;
  Block<T> x = {};
  const auto check = [&] {
    uint32_t codes[2];
    e2m1x16_ordinary<false>(x, enc, d, codes);
    for (int i = 0; i < count; ++i) {
      const float product = mul_rn(value_of(x, i), enc), a = abs_of(product);
      wrong += (codes[i / 8] >> (4 * (i % 8)) & 15) != nearest_e2m1(product);
      halves += a == 0.25f || a == 1.25f || a == 2.5f || a == 5.0f;
    }
    x = {}, count = 0;
  };
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const T value = {static_cast<uint16_t>(bits)};
    const float product = abs_of(mul_rn(to_float(value), enc));
    if (!(product < 7.0f) || (product < 0.2f && product > 0.0f)) continue;
    x.words[count / 2] |= bits << (16 * (count % 2));
    if (++count == 16) check();
  }
  check();
  return wrong;
}

template <class F>
static auto with_blocks(const void* x, int dtype, F&& f) {
  switch (dtype) {
    case 0:
      return f(static_cast<const Block<Bf16>*>(x));
    case 1:
      return f(static_cast<const Block<Fp16>*>(x));
    default:
      return f(static_cast<const Block<float>*>(x));
  }
}

extern "C" {

// blocks x 16 values of bf16 (dtype 0), fp16 (1) or fp32 (2); gsa given (mode 0), or the amax of
// the tensor and a divisor (mode 1).
void quantize_blocks(const void* x, int dtype, int64_t blocks, int mode, float value, float divisor,
                     int recipe, uint8_t* codes, uint8_t* scales) {
  const Nvfp4Recipe r = static_cast<Nvfp4Recipe>(recipe);
  const Nvfp4Encoding e =
      mode == 0 ? nvfp4_encoding_from_gsa(value, r) : nvfp4_encoding_from_amax(value, divisor, r);
  with_blocks(x, dtype, [&](auto p) { quantize(p, blocks, e, codes, scales); });
}

// Of `count` numbers d, for bf16 (dtype 0) or fp16 (1).
int64_t count_wrong_codes(const float* d, int64_t count, int dtype, int64_t* halves) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    wrong += dtype == 0 ? wrong_codes<Bf16>(d[i], *halves) : wrong_codes<Fp16>(d[i], *halves);
  }
  return wrong;
}

float amax_ignoring_nan(const void* x, int dtype, int64_t blocks) {
  return with_blocks(x, dtype, [&](auto p) { return amax_of(p, blocks); });
}

// blocks x 8 bytes of codes, a scale each.
void dequantize_blocks(const uint32_t* codes, const uint8_t* scales, int64_t blocks, float gsa,
                       float* x) {
  for (int64_t i = 0; i < 2 * blocks; ++i) {
    nvfp4_dequantize8(codes[i], float_from_e4m3(scales[i / 2]), gsa, x + 8 * i);
  }
}

int64_t swizzled_offset(int64_t row, int64_t block, int64_t padded_blocks) {
  return swizzle_128x4(row, block, padded_blocks);
}

}  // extern "C"
