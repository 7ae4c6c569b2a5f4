// The device arithmetic of FP8, INT8 and MXFP8, compiled by the host compiler, for ctypes.
#include <cmath>
#include <random>

#include "jitquant/activation.cuh"
#include "jitquant/fp8.cuh"

using namespace jitquant;

namespace {

template <EightBit kFormat>
void pack(const float* v, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; i += 4) {
    const uint32_t word = pack4<kFormat>(v + i);
    for (int k = 0; k < 4; ++k) out[i + k] = static_cast<uint8_t>(word >> (8 * k));
  }
}

void pack_as(EightBit format, const float* v, int64_t n, uint8_t* out) {
  if (format == EightBit::kE4m3) pack<EightBit::kE4m3>(v, n, out);
  if (format == EightBit::kE5m2) pack<EightBit::kE5m2>(v, n, out);
  if (format == EightBit::kInt8) pack<EightBit::kInt8>(v, n, out);
}

float amax_of(const float* v, int n) {
  float b = 0.0f;
  for (int i = 0; i < n; ++i) b = amax_keep_nan(b, v[i]);
  return b;
}

}  // namespace

extern "C" {

// n is a multiple of 4.
void encode(const float* x, int64_t n, int format, uint8_t* codes) {
  pack_as(static_cast<EightBit>(format), x, n, codes);
}

void decode(const uint8_t* codes, int64_t n, int format, float* x) {
  for (int64_t i = 0; i < n; ++i) {
    if (format == 0) x[i] = float_from_code<EightBit::kE4m3>(codes[i]);
    if (format == 1) x[i] = float_from_code<EightBit::kE5m2>(codes[i]);
    if (format == 2) x[i] = float_from_code<EightBit::kInt8>(codes[i]);
  }
}

void exponents(const float* s, int64_t n, int32_t* ue8m0, int32_t* rceil) {
  for (int64_t i = 0; i < n; ++i) {
    ue8m0[i] = static_cast<int32_t>(ue8m0_exponent(s[i]));
    rceil[i] = static_cast<int32_t>(e8m0_rceil(s[i]));
  }
}

void powers(float* power, float* inverse, float* e8m0) {
  for (uint32_t e = 0; e < 256; ++e) {
    power[e] = power_of_two(e);
    inverse[e] = inverse_power_of_two(e);
    e8m0[e] = float_from_e8m0(e);
  }
}

// Groups of 16 that are scaled by their own amax.
void quantize_groups(const float* x, int64_t groups, int format, float eps, int recipe,
                     bool power_of_two_scales, uint8_t* codes, float* scale_inv,
                     int32_t* exponent) {
  const auto kind = static_cast<EightBit>(format);
  const auto rule = static_cast<GroupRecipe>(recipe);
  for (int64_t i = 0; i < groups; ++i) {
    float v[16];
    for (int k = 0; k < 16; ++k) v[k] = x[16 * i + k];
    const GroupScale g = group_scale(amax_of(v, 16), largest(kind), eps, rule, power_of_two_scales);
    scale_group(v, g, rule == GroupRecipe::kVllm && !power_of_two_scales);
    pack_as(kind, v, 16, codes + 16 * i);
    scale_inv[i] = g.scale_inv;
    exponent[i] = static_cast<int32_t>(g.exponent);
  }
}

void quantize_mx(const float* x, int64_t blocks, int format, uint8_t* codes, uint8_t* exponent) {
  const auto kind = static_cast<EightBit>(format);
  for (int64_t i = 0; i < blocks; ++i) {
    float v[kMxfp8Block];
    for (int k = 0; k < kMxfp8Block; ++k) v[k] = x[kMxfp8Block * i + k];
    const uint32_t e = mxfp8_exponent(amax_of(v, kMxfp8Block), largest(kind));
    for (float& element : v) element = mul_rn(element, inverse_power_of_two(e));
    pack_as(kind, v, kMxfp8Block, codes + kMxfp8Block * i);
    exponent[i] = static_cast<uint8_t>(e);
  }
}

void tensor_scales(const float* amax, int64_t n, float top, float* scale, float* scale_inv) {
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = fp8_scale_from_amax(amax[i], top);
    scale_inv[i] = fp8_scale_inv(scale[i]);
  }
}

void bounded(const float* amax, int64_t n, float bound, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = bound_amax(amax[i], bound);
}

// How many of n quotients x / s, |x| from 2^-17 to 2^17 times s, differ from the division: random
// ones, or those next to numbers of eight bits, where codes of elements change.
int64_t count_wrong_quotients(int64_t n, uint32_t seed, bool at_codes) {
  std::mt19937 random(seed);
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) {
    // s of every magnitude for which the quotient is taken so, x of every one that counts.
    const uint32_t exponent = 47 + random() % 190;  // 2^-80 to 2^109
    const float s = bits_float((exponent << 23) | (random() & 0x7fffffu));
    const uint32_t below = exponent + 16 - random() % 34;
    float x = bits_float((random() & 0x80000000u) | (below << 23) | (random() & 0x7fffffu));
    if (at_codes) {
      const double number = std::ldexp(128 + random() % 128, static_cast<int>(random() % 34) - 24);
      const float nearest = static_cast<float>(number * s);
      x = bits_float(float_bits(nearest) + random() % 5 - 2);
    }
    wrong += float_bits(group_divide(x, s, reciprocal_rn(s))) != float_bits(div_rn(x, s));
  }
  return wrong;
}

// How many quotients by `divisor` differ from a division: around every multiple of it that is among
// n spread over the range, and at the end of the range.
int64_t count_wrong_whole_quotients(uint32_t divisor, uint32_t n) {
  const Divisor by(divisor);
  const uint32_t end = 0x7fffffffu, multiples = end / divisor;
  int64_t wrong = by.quotient_of(end) != end / divisor;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t m = static_cast<uint32_t>(uint64_t{multiples} * i / n) * divisor;
    for (const uint32_t a : {m, m + 1, m > 0 ? m - 1 : 0, m + (divisor - 1)}) {
      if (a <= end) wrong += by.quotient_of(a) != a / divisor;
    }
  }
  return wrong;
}

void derivatives(const float* x, int64_t n, float* relu, float* silu, float* gelu, float* qgelu,
                 float* srelu) {
  for (int64_t i = 0; i < n; ++i) {
    relu[i] = drelu(x[i]);
    silu[i] = dsilu(x[i]);
    gelu[i] = dgelu(x[i]);
    qgelu[i] = dqgelu(x[i]);
    srelu[i] = dsrelu(x[i]);
  }
}

int64_t scale_offset(int order, int64_t rows, int64_t cols, int64_t batch, int64_t row,
                     int64_t col) {
  return ScaleGrid{static_cast<ScaleOrder>(order), rows, cols}.offset(batch, row, col);
}

void all_bounds(const int64_t* offsets, const int64_t* sizes, int64_t groups, int64_t numel,
                int64_t* start, int64_t* stop) {
  for (int64_t i = 0; i < groups; ++i) {
    const SegmentBounds b = segment_bounds(offsets, sizes, i, numel);
    start[i] = b.start, stop[i] = b.stop;
  }
}

}  // extern "C"
