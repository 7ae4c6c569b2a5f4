// Recipes for training and rotation, each rule once: Hadamard transforms, stochastic rounding with
// Philox, 4over6, MXFP4. docs/numerics.md has the formulas and their sources.
// jitquant/numerics/recipes.py defines the same in PyTorch, bit for bit.
#pragma once

#include "jitquant/fp8.cuh"
#include "jitquant/memory.cuh"
#include "jitquant/nvfp4.cuh"
#include "launch.h"

// For what is rarely called and large: it is called rather than inlined.
#if defined(__CUDACC__)
#define JITQUANT_APART __noinline__ __host__ __device__
#else
#define JITQUANT_APART inline
#endif

namespace jitquant {

// ---- rotation ----------------------------------------------------------------------------------

// The rotations that kernels are compiled for. kTe: 16 neighbors, rounded to the input's type.
// kWide: 16 to 256 neighbors, 16 per lane. kRope: the source embeds positions and then rotates.
enum class Rotate : int { kNone, kTe, kWide, kRope };

constexpr uint32_t kTeMinus = 0xd7e8u;  // bit i: sign i of TransformerEngine's vector is minus

// Which of the 16 signs at index `part` (of n / 16) are minus.
__device__ __forceinline__ uint32_t minus_signs(const Rotation& r, int part) {
  if (r.signs == nullptr) return r.rounded ? kTeMinus : 0u;
  const int8_t* const signs = r.signs + 16 * part;
  uint32_t minus = 0;
  if (reinterpret_cast<uintptr_t>(signs) % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Moves the highest bits of four bytes next to each other.
      const uint32_t high = reinterpret_cast<const uint32_t*>(signs)[i] >> 7 & 0x01010101u;
      minus |= (high * 0x01020408u >> 24 & 15u) << (4 * i);
    }
    return minus;
  }
#pragma unroll 1
  for (int i = 0; i < 16; ++i) minus |= signs[i] < 0 ? 1u << i : 0u;
  return minus;
}

// The blocks of a lane: with kBlocks = 2 as many lanes as half of a transform has blocks take the
// first half and then the second, so that the last step of the transform is within lanes.
template <int kBlocks>
struct LaneBlocks {
  static_assert(kBlocks == 1 || kBlocks == 2);
  uint32_t step;

  __device__ __forceinline__ explicit LaneBlocks(const Rotation& r)
      : step(r.lanes > 1 ? static_cast<uint32_t>(r.lanes) / 2 : 1) {}
  // The k-th block of a thread.
  __device__ __forceinline__ uint32_t of(uint32_t thread, int k) const {
    return kBlocks == 1 ? thread : 2 * thread - (thread & (step - 1)) + k * step;
  }
};

__device__ __forceinline__ void negate(float (&v)[16], uint32_t minus) {
  if (minus == 0) return;  // most transforms have no signs
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = bits_float(float_bits(v[i]) ^ (minus >> i << 31));
}

// Transforms 16 * r.lanes values, in blocks of 16: first within blocks, then between the lanes of
// `mask`, which call it together, and the blocks of a lane. kExact: products with the factor are
// exact, so a sum of two is rounded once if it is an fma.
template <bool kExact = false>
__device__ __forceinline__ void transform_within(float (&v)[16], const Rotation& r,
                                                 uint32_t minus) {
  const auto factor = [&](int i) { return bits_float(float_bits(r.factor) | (minus >> i << 31)); };
#pragma unroll
  for (int i = 0; i < 16; i += kExact ? 2 : 1) v[i] = mul_rn(v[i], factor(i));
#pragma unroll
  for (int h = 1; h < 16; h *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & h) continue;
      const float a = v[i], b = v[i + h];
      if (kExact && h == 1) {
        v[i] = fma_rn(b, factor(i + 1), a);
        v[i + 1] = fma_rn(b, -factor(i + 1), a);
      } else {
        v[i] = add_rn(a, b);
        v[i + h] = add_rn(a, -b);
      }
    }
  }
}
template <int kBlocks>
__device__ __forceinline__ void transform_between(float (&v)[kBlocks][16], const Rotation& r,
                                                  uint32_t mask) {
#pragma unroll 1
  for (int lanes = 1; kBlocks * lanes < r.lanes; lanes *= 2) {
    // A product with it is exact, so the fma is a sum or a difference.
    const float sign = (threadIdx.x & lanes) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        v[k][i] = fma_rn(v[k][i], sign, __shfl_xor_sync(mask, v[k][i], lanes));
      }
    }
  }
  if constexpr (kBlocks == 2) {
    if (r.lanes < 2) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float a = v[0][i], b = v[1][i];
      v[0][i] = add_rn(a, b);
      v[1][i] = add_rn(a, -b);
    }
  }
}

// A block after the transform. For kWide, all lanes of a group compute it together.
template <Rotate kRotate, class T>
using Rotated =
    Block<std::conditional_t<kRotate == Rotate::kWide || kRotate == Rotate::kRope, float, T>>;

template <Rotate kRotate, int kBlocks, class T>
__device__ __forceinline__ void rotate(const Block<T> (&x)[kBlocks], const Rotation& r,
                                       const uint32_t (&minus)[kBlocks],
                                       Rotated<kRotate, T> (&y)[kBlocks]) {
  constexpr bool kWide = kRotate == Rotate::kWide;
  float v[kBlocks][16];
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[k][i] = value_of(x[k], i);
    if (kWide) negate(v[k], minus[k]);
    // Of 16-bit values a quarter is exact in fp32.
    transform_within<!kWide && sizeof(T) == 2>(v[k], r, kWide ? 0u : minus[k]);
  }
  if constexpr (kWide) transform_between(v, r, 0xffffffffu);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    y[k] = block_of<typename Rotated<kRotate, T>::Element>(v[k]);
  }
}

template <Rotate kRotate, class T>
__device__ __forceinline__ Rotated<kRotate, T> rotated(const Block<T>& x, const Rotation& r,
                                                       uint32_t minus) {
  if constexpr (kRotate == Rotate::kNone || kRotate == Rotate::kRope) {
    return x;
  } else {
    Rotated<kRotate, T> y[1];
    rotate<kRotate, 1>({x}, r, {minus}, y);
    return y[0];
  }
}

// ---- stochastic rounding -----------------------------------------------------------------------

// 16 random bytes, the first in the lowest byte of the first word.
struct RandomBytes {
  uint32_t words[4];
};

JITQUANT_HD uint64_t wide_product(uint32_t a, uint32_t b) {
  return static_cast<uint64_t>(a) * b;
}

// Philox4x32-10.
JITQUANT_HD RandomBytes philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                               uint32_t k1) {
  JITQUANT_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = wide_product(c0, 0xd2511f53u), q = wide_product(c2, 0xcd9e8d57u);
    c0 = static_cast<uint32_t>(q >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(q);
    c2 = static_cast<uint32_t>(p >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p);
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// The state of a launch's random numbers.
struct Draws {
  uint32_t k0 = 0, k1 = 0, c2 = 0, c3 = 0;

  Draws() = default;
  // From seed and offset, on the device.
  __device__ __forceinline__ explicit Draws(const int64_t* rng_state) {
    if (rng_state == nullptr) return;
    const uint64_t seed = static_cast<uint64_t>(rng_state[0]);
    const uint64_t offset = static_cast<uint64_t>(rng_state[1]);
    k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    c2 = static_cast<uint32_t>(offset);
    c3 = static_cast<uint32_t>(offset >> 32) & 0x7fffffffu;
  }
  // The random numbers of a columnwise output.
  __device__ __forceinline__ Draws of_columns() const {
    Draws other = *this;
    other.c3 |= 0x80000000u;
    return other;
  }
  __device__ __forceinline__ RandomBytes of(int64_t row, int64_t block) const {
    return philox(static_cast<uint32_t>(block), static_cast<uint32_t>(row), c2, c3, k0, k1);
  }
};

// E2M1 of values 8 * half to 8 * half + 7 times enc > 0, each with its random byte: the largest
// code at most fma(r / 256, step, |x * enc|).
template <class T>
JITQUANT_HD uint32_t e2m1x8_stochastic(const Block<T>& x, int half, float enc,
                                       const RandomBytes& r) {
  const auto sum = [&](int i) {
    float a = mul_rn(magnitude_of(x, 8 * half + i), enc);
    a = a < 8.0f ? a : 8.0f;
    // 1, 2 or 4: twice the step.
    const float within = a > 1.0f ? (a < 4.0f ? a : 4.0f) : 1.0f;
    const float power = bits_float(float_bits(within) & 0x7f800000u);
    // The byte becomes the low mantissa bits of 2^14, so the sum is 2^14 + r / 512.
    const uint32_t bits =
        byte_permute(r.words[2 * half + (i >> 2)], 0x46800000u, 0x7650u + (i & 3));
    const float t = fma_rn(add_rn(bits_float(bits), -0x1p14f), power, a);
    return mul_rn(t < 7.0f ? t : 7.0f, kHalfUnit);
  };
  return (e2m1x8_and_half(sum) >> 1 & 0x77777777u) | (e2m1x8_signs(x, half) & kSignBits);
}

// The same where no product reaches 8 and enc is far above the smallest numbers. Truncated to fp16,
// products in kHalfUnit have 9 bits below their code, whatever its step. Adding the random byte to
// the upper 8 of them carries into the code if the sum reaches the next one. fp32 rounds some sums
// up to that: those up to 2^-26 below 0.5, of products below 0.25. Larger products stay as they are
// if 2^-26 is added toward zero.
template <class T>
JITQUANT_HD uint32_t e2m1x8_stochastic_usual(const Block<T>& x, int half, float enc,
                                             const RandomBytes& r) {
  const float unit = enc * kHalfUnit;
  const auto product = [&](int i) {
    return add_rz(mul_rn(magnitude_of(x, 8 * half + i), unit), 0x1p-26f * kHalfUnit);
  };
  const auto sums = [&](int i) {
    const uint32_t bytes =
        byte_permute(r.words[2 * half + (i >> 2)], 0u, 0x4240u + 0x101u * (i & 3));
    return 2 * bytes + truncated_halves(product(i), product(i + 2));
  };
  return (e2m1x8_of_halves<kMostTruncated>(sums) >> 1 & 0x77777777u) |
         (e2m1x8_signs(x, half) & kSignBits);
}

// Of a block with any enc.
template <class T>
JITQUANT_APART Nvfp4Codes any_stochastic_block(const Block<T>& x, float enc, uint8_t scale,
                                               const RandomBytes& r) {
  if (enc == 0.0f) return {e2m1x8_of_zeros(x, 0), e2m1x8_of_zeros(x, 1), scale};
  if (!(enc > 0.0f)) return {0, 0, scale};  // the block is NaN
  return {e2m1x8_stochastic(x, 0, enc, r), e2m1x8_stochastic(x, 1, enc, r), scale};
}

// b is the amax of the block, or of more.
template <class T>
JITQUANT_HD Nvfp4Codes stochastic_block(const Block<T>& x, float b, float enc, uint8_t scale,
                                        const RandomBytes& r) {
  if (mul_rn(b, enc) < 8.0f && enc >= 0x1p-100f) {
    return {e2m1x8_stochastic_usual(x, 0, enc, r), e2m1x8_stochastic_usual(x, 1, enc, r), scale};
  }
  const Block<T> copy = x;  // in local memory
  const RandomBytes bytes = r;
  return any_stochastic_block(copy, enc, scale, bytes);
}

template <class T>
JITQUANT_HD Nvfp4Codes nvfp4_stochastic_block(const Block<T>& x, float b, const Nvfp4Encoding& e,
                                              const RandomBytes& r) {
  const uint16_t scale = nvfp4_block_scale(b, e);
  const float enc = nvfp4_block_encode(float_from_e4m3(scale), e);
  return stochastic_block(x, b, enc, static_cast<uint8_t>(scale), r);
}

// ---- 4over6 ------------------------------------------------------------------------------------

// How a block's scale is selected, given the amax of the tensor.
struct Selection {
  Nvfp4Encoding encoding;
  float S, amax, divisor;
};

// From an amax, or from a given gsa.
JITQUANT_HD Selection selection_of(float value, float divisor, bool from_gsa = false,
                                   Nvfp4Recipe recipe = Nvfp4Recipe::kTe) {
  const float S = nvfp4_S(value, from_gsa ? 1.0f : divisor);
  const float amax = from_gsa ? mul_rn(value, divisor) : value;
  return {nvfp4_encoding(S, recipe), S, amax, divisor};
}

// The block scale that maps the amax b to `full`, before it is rounded to E4M3.
JITQUANT_HD float scale_to(float full, float b, const Selection& s) {
  return mul_rn(div_rn(b, full), s.S);
}

// A block whose amax maps to `full`, without a choice, rounded stochastically.
template <class T>
JITQUANT_HD Nvfp4Codes static_stochastic_block(const Block<T>& x, float b, const Selection& s,
                                               float full, const RandomBytes& r) {
  const uint16_t scale = e4m3_from_float(scale_to(full, b, s));
  const float enc = nvfp4_block_encode(float_from_e4m3(scale), s.encoding);
  return stochastic_block(x, b, enc, static_cast<uint8_t>(scale), r);
}

// q| of eight codes as bf16, two per word: 0 and 1, 2 and 3, and so on.
JITQUANT_HD void e2m1x8_magnitudes(uint32_t codes, uint32_t (&pairs)[4]) {
  const uint32_t selectors = codes & 0x77777777u;
  JITQUANT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint32_t four = selectors >> (16 * half);
    const uint32_t high = byte_permute(0x3f3f3f00u, 0x40404040u, four);
    const uint32_t low = byte_permute(0xc0800000u, 0xc0804000u, four);
    pairs[2 * half] = byte_permute(low, high, 0x5140);
    pairs[2 * half + 1] = byte_permute(low, high, 0x7362);
  }
}

// Calls f(i, |q|) for all codes of a block, in order.
template <class F>
JITQUANT_HD void each_magnitude(const Nvfp4Codes& codes, F&& f) {
  JITQUANT_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[4];
    e2m1x8_magnitudes(half == 0 ? codes.low : codes.high, pairs);
    JITQUANT_UNROLL
    for (int i = 0; i < 4; ++i) {
      f(8 * half + 2 * i, bits_float(pairs[i] << 16));
      f(8 * half + 2 * i + 1, bits_float(pairs[i] & 0xffff0000u));
    }
  }
}

// Adds a term to an error. The first is added to 0, which keeps its bits.
template <Error kError>
JITQUANT_HD float with_error(float error, float d) {
  if (kError == Error::kSquared) return add_rn(error, mul_rn(d, d));
  if (kError == Error::kLargest) return amax_keep_nan(error, d);
  return add_rn(error, abs_of(d));
}

// The error of codes, bit for bit as defined. Codes have the signs of their values, so magnitudes
// suffice.
template <Error kError, class T>
JITQUANT_HD float exact_error(const Block<T>& x, const Nvfp4Codes& codes, const Selection& s,
                              bool scaled) {
  const float stored = float_from_e4m3(codes.scale);
  float error = 0.0f;
  each_magnitude(codes, [&](int i, float q) {
    const float product = mul_rn(q, stored), m = magnitude_of(x, i);
    const float d = scaled ? add_rn(product, -mul_rn(m, s.S))
                           : add_rn(div_rn(mul_rn(product, s.amax), s.divisor), -m);
    error = with_error<kError>(error, d);
  });
  return error;
}

// The stored scales that map the amax of a block to 6 and to 4.
struct TwoScales {
  uint16_t six, four;
};

// The errors of a block, whose amax is b, with either scale.
template <Error kError, class T>
JITQUANT_APART float2 exact_errors(const Block<T>& x, float b, TwoScales scales, const Selection& s,
                                   bool scaled) {
  const Nvfp4Codes six = nvfp4_encode_with(x, b, scales.six, s.encoding);
  const Nvfp4Codes four = nvfp4_encode_with(x, b, scales.four, s.encoding);
  return make_float2(exact_error<kError>(x, six, s, scaled),
                     exact_error<kError>(x, four, s, scaled));
}

// The same up to a few roundings, without codes: the distances of products below 7 from E2M1, in
// multiples of `unit`. The step between codes is half the power of two in max(z, 1), and so is the
// last bit of z - 2^22 * max(z, 1), which is therefore z rounded to a code, less the same product.
// Numbers below 1 need a little more than 1 for that.
template <Error kError, class T>
JITQUANT_HD float near_error(const Block<T>& x, float enc, float unit) {
  float error = 0.0f;
  JITQUANT_UNROLL
  for (int i = 0; i < 16; ++i) {
    const float z = mul_rn(magnitude_of(x, i), enc), least = 1.0f + 0x1p-22f;
    const float within = z > least ? z : least;
    const float d = fma_rn(within, 0x1p22f, fma_rn(within, -0x1p22f, z)) - z;
    error = kError == Error::kSquared ? fma_rn(d, d, error) : with_error<kError>(error, abs_of(d));
  }
  return kError == Error::kSquared ? error * unit * unit : error * unit;
}

// More than the roundings in two such errors can be, for the larger of two units. A distance is at
// most a unit. It is off by up to 2^-17.7 units: 11 roundings of at most 7 units. A square is off
// by 2^-16.7 times the distance, and the sum of the distances is at most 4 e / unit + unit.
template <Error kError>
JITQUANT_HD float near_bound(float unit, float both) {
  if (kError == Error::kSquared) return 0x1p-13f * both + 0x1p-14f * unit * unit;
  if (kError == Error::kLargest) return 0x1p-15f * unit;
  return 0x1p-18f * both + 0x1p-12f * unit;
}

// The choice between the two scales of blocks with amax b.
struct Choice {
  TwoScales scales;
  float unit6, unit4, enc6, enc4;
  bool exact;  // whether near errors would not do: they need numbers far from the limits of fp32

  JITQUANT_HD Choice(float b, TwoScales scales, const Selection& s, bool scaled) : scales(scales) {
    const float six = float_from_e4m3(scales.six), four = float_from_e4m3(scales.four);
    const float unit = s.amax * reciprocal_rn(s.divisor);
    unit6 = six * unit, unit4 = four * unit;
    enc6 = nvfp4_usual_encode(six, s.encoding), enc4 = nvfp4_usual_encode(four, s.encoding);
    exact =
        scaled || !(b >= 0x1p-40f && s.amax <= 0x1p60f && enc6 <= s.encoding.most &&
                    enc4 <= s.encoding.most && mul_rn(b, enc6) < 7.0f && mul_rn(b, enc4) < 7.0f);
  }
  template <Error kError, class T>
  JITQUANT_HD float2 near_errors(const Block<T>& x) const {
    return make_float2(near_error<kError>(x, enc6, unit6), near_error<kError>(x, enc4, unit4));
  }
  // Whether near errors with either scale tell which one is better.
  template <Error kError>
  JITQUANT_HD bool decided(float2 e) const {
    const float unit = unit6 > unit4 ? unit6 : unit4;
    return abs_of(e.y - e.x) > near_bound<kError>(unit, e.x + e.y);
  }
};

// Whether the scale that maps the amax b to 4 is the better one. over(e, largest) combines the
// errors of a tile's rows, with the same result in all its lanes.
template <Error kError, class T, class Over>
__device__ __forceinline__ bool takes_four(const Block<T>& x, float b, TwoScales scales,
                                           const Selection& s, bool scaled, Over&& over) {
  constexpr bool largest = kError == Error::kLargest;
  if (b == 0.0f) return false;
  const Choice choice(b, scales, s, scaled);
  const auto combined = [&](float2 e) {
    return make_float2(over(e.x, largest), over(e.y, largest));
  };
  if (!choice.exact) {
    const float2 e = combined(choice.near_errors<kError>(x));
    if (choice.decided<kError>(e)) return e.y < e.x;
  }
  const Block<T> copy = x;  // in local memory
  const float2 e = combined(exact_errors<kError>(copy, b, scales, s, scaled));
  return e.y < e.x;
}

// Calls f with the kind of error as a compile-time constant.
template <class F>
__device__ __forceinline__ auto with_error_of(const Select& how, F&& f) {
  if (how.error == Error::kSquared) return f(std::integral_constant<Error, Error::kSquared>());
  if (how.error == Error::kLargest) return f(std::integral_constant<Error, Error::kLargest>());
  return f(std::integral_constant<Error, Error::kAbsolute>());
}

// The stored scale that maps the amax b to 6 or to `full`; and the two of 4over6.
JITQUANT_HD TwoScales two_scales(float b, const Selection& s, const Select& how) {
  const float base = scale_to(how.single ? how.full : 6.0f, b, s);
  return {e4m3_from_float(base), e4m3_from_float(mul_rn(base, 1.5f))};
}

// Encodes a block with the selection that the call asks for.
template <class T, class Over>
__device__ __forceinline__ Nvfp4Codes selected_block(const Block<T>& x, float b, const Selection& s,
                                                     const Select& how, Over&& over) {
  const TwoScales scales = two_scales(b, s, how);
  uint16_t scale = scales.six;
  if (!how.single) {
    const bool four = with_error_of(how, [&](auto error) {
      return takes_four<decltype(error)::value>(x, b, scales, s, how.scaled, over);
    });
    if (four) scale = scales.four;
  }
  Nvfp4Codes out = nvfp4_encode_with(x, b, scale, s.encoding);
  if (!how.single && (out.scale & 0x7f) == 0x7f) out.low = out.high = 0;
  return out;
}

// ---- MXFP4 -------------------------------------------------------------------------------------

// The E8M0 byte of a block with amax b: at most 253, or 255 for infinity and NaN.
JITQUANT_HD uint32_t mxfp4_exponent(float b, Mxfp4Scaling scaling) {
  if (!(b <= kFloatMax)) return 255;
  if (scaling >= Mxfp4Scaling::kRceil) {
    const bool down = scaling == Mxfp4Scaling::kGptOssDown;
    const bool to_four = down || scaling == Mxfp4Scaling::kStatic4;
    const uint32_t g = float_bits(to_four ? mul_rn(b, 0.25f) : div_rn(b, 6.0f));
    const uint32_t e = down ? g >> 23 : exponent_up(g);
    return scaling == Mxfp4Scaling::kRceil ? rceil(g, e) : e;
  }
  const uint32_t bits = float_bits(b), half = scaling == Mxfp4Scaling::kEven ? 1u << 21 : 0u;
  const uint32_t e = scaling == Mxfp4Scaling::kCeil ? exponent_up(bits) : (bits + half) >> 23;
  return e > 2 ? e - 2 : 0;
}

// One lane's part of a block with amax b.
template <class T>
JITQUANT_HD Nvfp4Codes mxfp4_block(const Block<T>& x, float b, Mxfp4Scaling scaling,
                                   const RandomBytes* r) {
  const uint32_t e = mxfp4_exponent(b, scaling);
  const uint8_t scale = static_cast<uint8_t>(e);
  if (e == 255) return {0, 0, scale};
  if (e == 0 && scaling > Mxfp4Scaling::kRceil) {
    if (scaling >= Mxfp4Scaling::kStatic6) return {0, 0, scale};
    return {e2m1x8_of_zeros(x, 0), e2m1x8_of_zeros(x, 1), scale};
  }
  const float enc = inverse_normal_power(e);
  if (r != nullptr) return stochastic_block(x, b, enc, scale, *r);
  uint32_t codes[2];
  e2m1x16_scaled(x, enc, codes);
  return {codes[0], codes[1], scale};
}

}  // namespace jitquant
