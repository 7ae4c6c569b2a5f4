// A block: sixteen neighbors that share a scale, as stored in memory. 16-bit types stay in pairs,
// because the hardware processes two per instruction if it can. Compiles as CUDA and as plain
// C++17, like numeric.cuh.
#pragma once

#include <type_traits>

#include "jitquant/formats.cuh"

#if defined(__CUDACC__)
#define JITQUANT_UNROLL _Pragma("unroll")
#else
#define JITQUANT_UNROLL
#endif

namespace jitquant {

// Replaces cuda_bf16.h and cuda_fp16.h, which take longer to compile than a kernel.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

JITQUANT_HD float to_float(Bf16 x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}
JITQUANT_HD float to_float(Fp16 x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  const uint32_t magnitude = x.bits & 0x7fffu;
  const float a = magnitude >= 0x7c00u ? bits_float(0x7f800000u | ((magnitude & 0x3ffu) << 13))
                                       : number_of_code<10, 15>(magnitude);
  return x.bits & 0x8000u ? -a : a;
#endif
}
JITQUANT_HD float to_float(float x) {
  return x;
}

// Four E4M3, the first in the lowest byte.
JITQUANT_HD void floats_from_e4m3(uint32_t bytes, float* v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  const uint32_t halves[2] = {halves_from_e4m3<false>(bytes), halves_from_e4m3<true>(bytes)};
  JITQUANT_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = to_float(Fp16{static_cast<uint16_t>(halves[i / 2] >> (16 * (i % 2)))});
  }
#else
  for (int i = 0; i < 4; ++i) v[i] = float_from_e4m3((bytes >> (8 * i)) & 0xffu);
#endif
}

template <class T>
struct Block {
  using Element = T;
  static constexpr int kWords = 4 * sizeof(T);
  uint32_t words[kWords];
};

// Value i of the block. i is a constant after loop unrolling.
JITQUANT_HD float value_of(const Block<Bf16>& x, int i) {
  const uint32_t pair = x.words[i >> 1];
  return bits_float(i & 1 ? pair & 0xffff0000u : pair << 16);
}
JITQUANT_HD float value_of(const Block<Fp16>& x, int i) {
  return to_float(Fp16{static_cast<uint16_t>(x.words[i >> 1] >> (16 * (i & 1)))});
}
JITQUANT_HD float value_of(const Block<float>& x, int i) {
  return bits_float(x.words[i]);
}

template <class T>
JITQUANT_HD float magnitude_of(const Block<T>& x, int i) {
  return abs_of(value_of(x, i));
}
JITQUANT_HD float magnitude_of(const Block<Bf16>& x, int i) {
  const uint32_t pair = x.words[i >> 1];
  return i & 1 ? bits_float(pair & 0x7fff0000u) : abs_of(bits_float(pair << 16));
}

// Per half, the larger magnitude of a and b; its sign is arbitrary. kNan: NaN wins; otherwise NaNs
// are ignored.
template <class T, bool kNan>
JITQUANT_HD uint32_t pair_max(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  constexpr bool kBf16 = sizeof(T) == sizeof(Bf16) && !std::is_same<T, Fp16>::value;
  uint32_t y;
  if constexpr (kBf16 && kNan) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kBf16) {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else if constexpr (kNan) {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
#else
  // Magnitudes compare as integers, with NaN above infinity.
  const uint32_t infinity = std::is_same<T, Fp16>::value ? 0x7c00u : 0x7f80u;
  uint32_t y = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    uint32_t p = (a >> shift) & 0x7fffu, q = (b >> shift) & 0x7fffu;
    if (!kNan && p > infinity) p = 0;
    if (!kNan && q > infinity) q = 0;
    y |= (p > q ? p : q) << shift;
  }
  return y;
#endif
}

// max(a, |x|). kNan: NaN wins; otherwise NaNs are ignored.
template <bool kNan>
JITQUANT_HD float amax_of(float a, float x) {
  return kNan ? amax_keep_nan(a, x) : amax_ignore_nan(a, x);
}

// The amax of blocks. kNan: NaN if they contain one; otherwise NaNs are ignored.
template <class T, bool kNan = false>
struct Amax {
  uint32_t pair = 0;

  JITQUANT_HD void add(const Block<T>& x) {
    JITQUANT_UNROLL
    for (int i = 0; i < 8; i += 2) {
      pair = pair_max<T, kNan>(pair, pair_max<T, kNan>(x.words[i], x.words[i + 1]));
    }
  }
  JITQUANT_HD float result() const {
    const Block<T> both = {{pair}};
    // Without kNan, only an all-NaN input still gives NaN here: its maximum with 0 is 0.
    return amax_of<kNan>(amax_of<kNan>(0.0f, value_of(both, 0)), value_of(both, 1));
  }
};
template <bool kNan>
struct Amax<float, kNan> {
  float amax = 0.0f;

  JITQUANT_HD void add(const Block<float>& x) {
    JITQUANT_UNROLL
    for (int i = 0; i < 16; ++i) amax = amax_of<kNan>(amax, value_of(x, i));
  }
  JITQUANT_HD float result() const { return amax; }
};

// The largest magnitudes of a block's even and odd 16-bit values, as from pair_max; NaN wins.
template <class T>
JITQUANT_HD uint32_t block_amax_pair(const Block<T>& x) {
  uint32_t pair = x.words[0];
  JITQUANT_UNROLL
  for (int i = 1; i < 8; ++i) pair = pair_max<T, true>(pair, x.words[i]);
  return pair;
}

// The amax of one block, NaN if it contains one.
template <class T>
JITQUANT_HD float block_amax(const Block<T>& x) {
  const Block<T> both = {{block_amax_pair(x)}};
  return amax_keep_nan(amax_keep_nan(0.0f, value_of(both, 0)), value_of(both, 1));
}
JITQUANT_HD float block_amax(const Block<float>& x) {
  float b[2] = {magnitude_of(x, 0), magnitude_of(x, 1)};  // two, which do not wait for each other
  JITQUANT_UNROLL
  for (int i = 2; i < 16; ++i) b[i & 1] = amax_keep_nan(b[i & 1], value_of(x, i));
  return amax_keep_nan(b[0], b[1]);
}

// The sign bits of eight E2M1 codes.
constexpr uint32_t kSignBits = 0x88888888u;

// Bits of a where `mask` is set, bits of b elsewhere. One instruction; a compiler that knows the
// mask would emit two.
JITQUANT_HD uint32_t bit_select(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(y) : "r"(mask), "r"(a), "r"(b));
  return y;
#else
  return (a & mask) | (b & ~mask);
#endif
}

// The signs of values 8 * half to 8 * half + 7, each in all four bits of its code.
template <class T>
JITQUANT_HD uint32_t e2m1x8_signs(const Block<T>& x, int half) {
  uint32_t even, odd;
  if (sizeof(T) == 2) {
    const uint32_t* w = x.words + 4 * half;
    const uint32_t a = byte_permute(w[0], w[1], 0x7351), b = byte_permute(w[2], w[3], 0x7351);
    even = byte_signs(a, b, 0x5410), odd = byte_signs(a, b, 0x7632);
  } else {
    const uint32_t* w = x.words + 8 * half;
    even = byte_signs(byte_permute(w[0], w[2], 0x73), byte_permute(w[4], w[6], 0x73), 0x5410);
    odd = byte_signs(byte_permute(w[1], w[3], 0x73), byte_permute(w[5], w[7], 0x73), 0x5410);
  }
  return bit_select(0xf0f0f0f0u, odd, even);
}

// The signs of a block in one word: those of the first half at the sign bits of the codes, those of
// the second half one bit below.
template <class T>
JITQUANT_HD uint32_t e2m1x16_signs(const Block<T>& x) {
  return bit_select(kSignBits, e2m1x8_signs(x, 0), e2m1x8_signs(x, 1));
}
JITQUANT_HD uint32_t half_of_signs(uint32_t signs, int half) {
  return (half == 0 ? signs : signs << 1) & kSignBits;
}

// Packs eight 3-bit codes, the first in the low four bits. f(i) is 2^23 plus the code of value i.
// Sums of shifts replace masks: the constant that 2^23 contributes is subtracted at the end.
template <class F>
JITQUANT_HD uint32_t sum_codes(F&& f) {
  uint32_t codes = 0, offset = 0;
  JITQUANT_UNROLL
  for (int i = 0; i < 8; ++i) {
    codes += f(i) << (4 * i);
    offset += 0x4b000000u << (4 * i);
  }
  return codes - offset;
}

// The unit of values for e2m1x8_halves_up: it maps E2M1's exponents and subnormals to those of
// fp16.
constexpr float kHalfUnit = 0x1p-14f;

// Eight 3-bit codes, each with a rounding bit below, the first in the low four bits. halves(i) is
// values i and i + 2 in kHalfUnit, truncated to fp16; the upper bytes are the codes. kMost: the
// largest upper byte, for values that may be as large as 16; 0: they are below 8.
constexpr uint32_t kMostTruncated = 0x0f, kMostRounded = 0x0e;
template <uint32_t kMost = 0, class F>
JITQUANT_HD uint32_t e2m1x8_of_halves(F&& halves) {
  const auto limited = [&](int i) {
    return kMost == 0 ? halves(i) : halves_min(halves(i), kMost << 24 | kMost << 8);
  };
  const auto upper_bytes = [&](int i) { return byte_permute(limited(i), limited(i + 4), 0x7531); };
  return upper_bytes(0) + 16 * upper_bytes(1);
}
// The same of magnitudes f(i) in kHalfUnit.
template <uint32_t kMost = 0, class F>
JITQUANT_HD uint32_t e2m1x8_and_half(F&& f) {
  return e2m1x8_of_halves<kMost>([&](int i) { return truncated_halves(f(i), f(i + 2)); });
}

// Eight 3-bit codes of magnitudes below 7, or with kMost below 16. Ties round up.
template <uint32_t kMost = 0, class F>
JITQUANT_HD uint32_t e2m1x8_halves_up(F&& f) {
  const uint32_t doubled = e2m1x8_and_half<kMost>(f);
  return doubled - (doubled >> 1 & 0x77777777u);
}

// As above with ties to even, given the codes from above.
template <uint32_t kMost = 0, class F>
JITQUANT_HD uint32_t e2m1x8_halves_even(uint32_t halves_up, F&& f) {
  // The next smaller number has a different code only if f(i) is a tie.
  const uint32_t below =
      e2m1x8_halves_up<kMost>([&](int i) { return mul_rn(f(i), 0x1.fffffep-1f); });
  return below + ((halves_up - below) & below & 0x11111111u);
}

// Sixteen such codes of magnitude(i), ties to even. A tie ends with 21 zero bits. Most blocks have
// no value whose low 16 bits are zero, so checking these is enough for them.
template <uint32_t kMost = 0, class F>
JITQUANT_HD void e2m1x16_magnitudes(F&& magnitude, uint32_t (&codes)[2]) {
  float x[16];
  uint32_t least[2] = {~0u, ~0u};
  JITQUANT_UNROLL
  for (int i = 0; i < 16; i += 2) {
    x[i] = magnitude(i), x[i + 1] = magnitude(i + 1);
    uint32_t& to = least[i >> 1 & 1];
    to = lower_halves_min(to, float_bits(x[i]), float_bits(x[i + 1]));
  }
  const auto half_of = [&](int half) { return [&x, half](int i) { return x[8 * half + i]; }; };
  JITQUANT_UNROLL
  for (int half = 0; half < 2; ++half) codes[half] = e2m1x8_halves_up<kMost>(half_of(half));
  if ((lower_halves_min(least[0], least[1], ~0u) & 0xffffu) != 0) return;
  JITQUANT_UNROLL
  for (int half = 0; half < 2; ++half) {
    codes[half] = e2m1x8_halves_even<kMost>(codes[half], half_of(half));
  }
}

// E2M1 of values 8 * half to 8 * half + 7 times enc > 0, the first in the low four bits.
template <class T>
JITQUANT_HD uint32_t e2m1x8(const Block<T>& x, int half, float enc) {
#if defined(JITQUANT_HAS_E2M1_INSTRUCTION)
  float v[8];
  JITQUANT_UNROLL
  for (int i = 0; i < 8; ++i) v[i] = mul_rn(value_of(x, 8 * half + i), enc);
  uint32_t codes;
  asm("{\n"
      " .reg .b8 b0, b1, b2, b3;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      " mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(codes)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return codes;
#else
  return sum_codes(
             [&](int i) { return e2m1_magnitude(mul_rn(magnitude_of(x, 8 * half + i), enc)); }) |
         (e2m1x8_signs(x, half) & kSignBits);
#endif
}

// Whether the product of a value of T and RN(1 / d) may be 0.25, 1.25, 2.5 or 5: the ties that
// round down, to an even code. Then d or 5 d is nearly a value of T, which has few bits.
template <class T>
JITQUANT_HD bool e2m1_half_may_go_down(float d) {
  constexpr int kMore = std::is_same<T, Fp16>::value ? 3 : 0;  // extra mantissa bits over bf16
  constexpr uint32_t kNear = 0x00080008u << kMore;
  const uint32_t one = float_bits(d) << kMore, five = float_bits(mul_rn(d, 5.0f)) << kMore;
  const uint32_t rests = byte_permute(one, five, 0x5410) + kNear;
  return halves_min(rests, 2 * kNear) != 2 * kNear;
}

// E2M1 of all values times enc. Every product is below 7, enc is far from the limits of fp32 and,
// for 16-bit values, enc = RN(1 / d). kLooks: for fp32, checks for ties, which is faster but takes
// more registers.
template <bool kLooks, class T>
JITQUANT_HD void e2m1x16_ordinary(const Block<T>& x, float enc, float d, uint32_t (&codes)[2]) {
#if defined(JITQUANT_HAS_E2M1_INSTRUCTION)
  JITQUANT_UNROLL
  for (int half = 0; half < 2; ++half) codes[half] = e2m1x8(x, half, enc);
#else
  const float unit = enc * kHalfUnit;
  if constexpr (kLooks && sizeof(T) == 4) {
    const uint32_t signs = e2m1x16_signs(x);  // first, so that only the products stay in registers
    e2m1x16_magnitudes([&](int i) { return mul_rn(magnitude_of(x, i), unit); }, codes);
    JITQUANT_UNROLL
    for (int half = 0; half < 2; ++half) codes[half] |= half_of_signs(signs, half);
  } else {
    const bool may_go_down = sizeof(T) == 4 || e2m1_half_may_go_down<T>(d);
    JITQUANT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto f = [&](int i) { return mul_rn(magnitude_of(x, 8 * half + i), unit); };
      codes[half] = e2m1x8_halves_up(f);
      if (may_go_down) codes[half] = e2m1x8_halves_even(codes[half], f);
      codes[half] |= e2m1x8_signs(x, half) & kSignBits;
    }
  }
#endif
}

// E2M1 of all values times enc, a power of two. Every product is below 16.
template <class T>
JITQUANT_HD void e2m1x16_scaled(const Block<T>& x, float enc, uint32_t (&codes)[2]) {
#if defined(JITQUANT_HAS_E2M1_INSTRUCTION)
  JITQUANT_UNROLL
  for (int half = 0; half < 2; ++half) codes[half] = e2m1x8(x, half, enc);
#else
  const float unit = enc * kHalfUnit;
  if constexpr (sizeof(T) == 4) {
    e2m1x16_magnitudes<kMostRounded>([&](int i) { return mul_rn(magnitude_of(x, i), unit); },
                                     codes);
  } else {
    JITQUANT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto f = [&](int i) { return mul_rn(magnitude_of(x, 8 * half + i), unit); };
      codes[half] = e2m1x8_halves_even<kMostRounded>(e2m1x8_halves_up<kMostRounded>(f), f);
    }
  }
  JITQUANT_UNROLL
  for (int half = 0; half < 2; ++half) codes[half] |= e2m1x8_signs(x, half) & kSignBits;
#endif
}

// The sign bits of the codes whose values are finite.
template <class T>
JITQUANT_HD uint32_t e2m1x8_finite(const Block<T>& x, int half) {
  uint32_t finite = 0;
  JITQUANT_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (magnitude_of(x, 8 * half + i) <= kFloatMax) finite |= 8u << (4 * i);
  }
  return finite;
}

// E2M1 of the values times 0: the signs of finite values. Infinities and NaN give 0.
template <class T>
JITQUANT_HD uint32_t e2m1x8_of_zeros(const Block<T>& x, int half) {
  return e2m1x8_signs(x, half) & e2m1x8_finite(x, half);
}

// x << kBits. The compiler would emit the same, except for masks that it would move across the
// shift.
template <int kBits>
JITQUANT_HD uint32_t shifted_left(uint32_t x) {
#if defined(__CUDA_ARCH__)
  uint32_t y;
  asm("shl.b32 %0, %1, %2;" : "=r"(y) : "r"(x), "n"(kBits));
  return y;
#else
  return x << kBits;
#endif
}

// E2M1 codes as bits of T: the code's exponent and mantissa are placed at the lowest exponent bit
// and the highest mantissa bit of T. The result is the code's value times 2^kExponent, exactly,
// including subnormals of T.
template <class T>
struct PlacedCodes;
template <>
struct PlacedCodes<Bf16> {
  static constexpr int kShift = 6, kExponent = -126;
};
template <>
struct PlacedCodes<Fp16> {
  static constexpr int kShift = 9, kExponent = -14;
};

// pairs[i] = (code i, code i + 4) of eight codes.
template <class T>
JITQUANT_HD void place_codes(uint32_t codes, uint32_t (&pairs)[4]) {
  constexpr int kShift = PlacedCodes<T>::kShift;
  constexpr uint32_t kMagnitude = 0x00070007u << kShift;
  // If the magnitude mask covers it, the other byte's sign need not be cleared.
  constexpr bool kCovered = (kMagnitude & 0x80u) != 0;
  constexpr uint32_t kSigns = kCovered ? 0x80808080u : 0x80008000u;
  const uint32_t odd = codes & kSigns, even = shifted_left<4>(codes) & kSigns;
  if constexpr (kCovered) {
    pairs[0] = bit_select(kMagnitude, shifted_left<kShift>(codes), shifted_left<8>(even));
    pairs[1] = bit_select(kMagnitude, shifted_left<kShift - 4>(codes), shifted_left<8>(odd));
    pairs[2] = bit_select(kMagnitude, codes >> (8 - kShift), even);
  } else {
    pairs[0] =
        bit_select(kMagnitude, shifted_left<kShift>(codes), shifted_left<12>(codes) & kSigns);
    pairs[1] =
        bit_select(kMagnitude, shifted_left<kShift - 4>(codes), shifted_left<8>(codes) & kSigns);
    pairs[2] = bit_select(kMagnitude, shifted_left<kShift - 8>(codes), even);
  }
  pairs[3] = bit_select(kMagnitude, codes >> (12 - kShift), odd);
}

// The upper code of each byte, placed likewise: low those of the lower bytes of both halves, high
// those of the upper ones.
template <class T>
JITQUANT_HD void place_upper_codes(uint32_t codes, uint32_t& low, uint32_t& high) {
  constexpr int kShift = PlacedCodes<T>::kShift;
  constexpr uint32_t kMagnitude = 0x00070007u << kShift;
  constexpr bool kCovered = (kMagnitude & 0x80u) != 0;
  const uint32_t signs = codes & (kCovered ? 0x80808080u : 0x80008000u);
  const uint32_t low_signs =
      kCovered ? shifted_left<8>(signs) : shifted_left<8>(codes) & 0x80008000u;
  low = bit_select(kMagnitude, shifted_left<kShift - 4>(codes), low_signs);
  high = bit_select(kMagnitude, codes >> (12 - kShift), signs);
}

}  // namespace jitquant
