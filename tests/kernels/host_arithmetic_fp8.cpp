// The device arithmetic of FP8, INT8 and MXFP8, compiled by the host compiler, for ctypes.
#include <cmath>
#include <random>

#include "jitquant/activation.cuh"
#include "jitquant/fp8.cuh"
#include "jitquant/group_scale.cuh"

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

// Groups of kBlocks blocks with a scale of their own.
template <EightBit kFormat, int kBlocks>
void quantize(const Block<float>* x, int64_t groups, const GroupNumerics& numerics, uint8_t* codes,
              float* scale_inv, int32_t* exponent) {
  const bool by_division = divides(numerics);
  for (int64_t i = 0; i < groups; ++i) {
    float amax = 0.0f;
    for (int k = 0; k < kBlocks; ++k) amax = amax_keep_nan(amax, block_amax(x[kBlocks * i + k]));
    const GroupScale g = group_scale(numerics, amax);
    const float factor = by_division ? group_reciprocal(g.scale_inv) : g.factor;
    for (int k = 0; k < kBlocks; ++k) {
      uint32_t words[4];
      encode_group_block<kFormat>(x[kBlocks * i + k], numerics, by_division, factor, g.scale_inv,
                                  words);
      std::memcpy(codes + 16 * (kBlocks * i + k), words, sizeof words);
    }
    scale_inv[i] = g.scale_inv;
    exponent[i] = static_cast<int32_t>(g.exponent);
  }
}

template <int kBlocks>
void quantize_as(const float* x, int64_t groups, const GroupNumerics& n, uint8_t* codes,
                 float* scale_inv, int32_t* exponent) {
  const auto* blocks = reinterpret_cast<const Block<float>*>(x);
  const auto run = [&](auto format) {
    quantize<decltype(format)::value, kBlocks>(blocks, groups, n, codes, scale_inv, exponent);
  };
  if (n.format == EightBit::kE4m3) run(std::integral_constant<EightBit, EightBit::kE4m3>());
  if (n.format == EightBit::kE5m2) run(std::integral_constant<EightBit, EightBit::kE5m2>());
  if (n.format == EightBit::kInt8) run(std::integral_constant<EightBit, EightBit::kInt8>());
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
  const ScaleFormat scales = power_of_two_scales ? ScaleFormat::kPowerOfTwo : ScaleFormat::kFloat32;
  quantize_as<1>(x, groups,
                 {static_cast<EightBit>(format), static_cast<GroupRecipe>(recipe), scales, eps,
                  false, 0.0f, 0.0f},
                 codes, scale_inv, exponent);
}

void quantize_mx(const float* x, int64_t blocks, int format, uint8_t* codes, float* scale,
                 int32_t* exponent) {
  quantize_as<kMxfp8Block / 16>(x, blocks,
                                {static_cast<EightBit>(format), GroupRecipe::kDeepGemm,
                                 ScaleFormat::kE8m0, 0.0f, false, 0.0f, 0.0f},
                                codes, scale, exponent);
}

void tensor_scales(const float* amax, int64_t n, int format, float* scale, float* scale_inv) {
  const EightBit elements = static_cast<EightBit>(format);
  for (int64_t i = 0; i < n; ++i) {
    scale[i] = fp8_scale_from_amax(amax[i], largest(elements));
    scale_inv[i] = scale_inv_of(scale[i], amax[i], elements);
  }
}

void bounded(const float* amax, int64_t n, float least, float most, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = bound_amax(amax[i], least, most);
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
    const float got = divide(x, group_divisor(s, group_reciprocal(s)));
    wrong += float_bits(got) != float_bits(div_rn(x, s));
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

void activations(const float* x, int64_t n, int activation, float* value, float* slope) {
  with_activation(static_cast<Activation>(activation), [&](auto act) {
    for (int64_t i = 0; i < n; ++i) value[i] = act.value(x[i]), slope[i] = act.slope(x[i]);
  });
}

int64_t scale_offset(int order, int64_t rows, int64_t cols, int64_t batch, int64_t row,
                     int64_t col) {
  return ScaleGrid{static_cast<ScaleOrder>(order), rows, cols}.offset(batch, row, col);
}

void all_bounds(const int64_t* offsets, const int64_t* sizes, int64_t groups, int64_t numel,
                int64_t row, int64_t* start, int64_t* stop) {
  const SegmentTable table(offsets, sizes, groups, numel, row);
  for (int64_t i = 0; i < groups; ++i) {
    const SegmentBounds b = table.bounds(i);
    start[i] = b.start, stop[i] = b.stop;
  }
}

}  // extern "C"
