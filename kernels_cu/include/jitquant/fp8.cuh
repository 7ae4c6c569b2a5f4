// FP8, INT8 and E8M0 as bits, and the recipes of 8-bit quantization; each rule is defined once. A
// value is element * scale_inv. jitquant/numerics/fp8.py and mxfp8.py define the same in PyTorch,
// bit for bit.
//
// The rule for a group's scale is in group_scale.cuh.
#pragma once

#include "jitquant/block.cuh"

namespace jitquant {

enum class EightBit : int { kE4m3 = 0, kE5m2 = 1, kInt8 = 2 };

constexpr float kE5m2Max = 57344.0f;

// The element that the amax maps to.
JITQUANT_HD constexpr float largest(EightBit format) {
  return format == EightBit::kE4m3 ? kE4m3Max : (format == EightBit::kE5m2 ? kE5m2Max : 127.0f);
}

// ---- elements ----------------------------------------------------------------------------------

// E5M2 of x, round to nearest even. Saturates to +-57344, including Inf; NaN gives 0x7f.
JITQUANT_HD uint8_t e5m2_from_float(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<uint8_t>(pair);
#else
  if (is_nan(x)) return 0x7f;
  const uint32_t sign = (float_bits(x) >> 24) & 0x80u;
  const float a = abs_of(x);
  return static_cast<uint8_t>(sign | rounded_code<2, 15>(a < kE5m2Max ? a : kE5m2Max));
#endif
}

// Exact: E5M2 is the upper byte of an fp16.
JITQUANT_HD float float_from_e5m2(uint8_t code) {
  return to_float(Fp16{static_cast<uint16_t>(code << 8)});
}

// Rounds to the nearest integer, ties to even, saturating to -128 and 127; NaN gives 0.
JITQUANT_HD int32_t int8_from_float(float x) {
#if defined(__CUDA_ARCH__)
  int32_t y;
  asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
#else
  if (is_nan(x)) return 0;
  const float a = x < -128.0f ? -128.0f : (x > 127.0f ? 127.0f : x);
  return static_cast<int32_t>(std::nearbyint(a));
#endif
}

// Packs four elements into a word, v[0] in the lowest byte.
template <EightBit kFormat>
JITQUANT_HD uint32_t pack4(const float* v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kFormat != EightBit::kInt8) {
    uint16_t low, high;
    if constexpr (kFormat == EightBit::kE4m3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
    }
    return low | (static_cast<uint32_t>(high) << 16);
  }
#endif
#if defined(__CUDA_ARCH__)
  if constexpr (kFormat == EightBit::kInt8) {
    int32_t i[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) asm("cvt.rni.s32.f32 %0, %1;" : "=r"(i[k]) : "f"(v[k]));
    uint32_t word;
    asm("{\n"
        " .reg .b32 upper;\n"
        " cvt.pack.sat.s8.s32.b32 upper, %4, %3, 0;\n"
        " cvt.pack.sat.s8.s32.b32 %0, %2, %1, upper;\n"
        "}"
        : "=r"(word)
        : "r"(i[0]), "r"(i[1]), "r"(i[2]), "r"(i[3]));
    return word;
  }
#endif
  uint32_t word = 0;
  for (int k = 0; k < 4; ++k) {
    uint32_t code;
    if constexpr (kFormat == EightBit::kE4m3) {
      code = e4m3_from_float(v[k]);
    } else if constexpr (kFormat == EightBit::kE5m2) {
      code = e5m2_from_float(v[k]);
    } else {
      code = static_cast<uint32_t>(int8_from_float(v[k])) & 0xffu;
    }
    word |= code << (8 * k);
  }
  return word;
}

template <EightBit kFormat>
JITQUANT_HD float float_from_code(uint8_t code) {
  if constexpr (kFormat == EightBit::kE4m3) return float_from_e4m3(code);
  if constexpr (kFormat == EightBit::kE5m2) return float_from_e5m2(code);
  return static_cast<float>(static_cast<int8_t>(code));
}

JITQUANT_HD float dequantize_fp8(float element, float scale_inv) {
  return mul_rn(element, scale_inv);
}

// ---- powers of two -----------------------------------------------------------------------------

// The biased exponent of a number rounded up to a power of two, from the bits of its magnitude: the
// exponent field, plus 1 if any mantissa bit is set.
JITQUANT_HD uint32_t exponent_up(uint32_t magnitude) {
  return (magnitude + 0x7fffffu) >> 23;
}
// RCEIL, the rounding of MX formats, given what the exponent would be: exponent 0 is 2^-127, so it
// is enough up to that.
JITQUANT_HD uint32_t rceil(uint32_t magnitude, uint32_t up) {
  return magnitude > 0x400000u ? up : 0u;
}

// The exponent of a scale rounded up: 255 for Inf and NaN.
JITQUANT_HD uint32_t ue8m0_exponent(float s) {
  const uint32_t e = exponent_up(float_bits(s) & 0x7fffffffu);
  return e < 255u ? e : 255u;
}

// The same with RCEIL: 254 for Inf, 255 for NaN.
JITQUANT_HD uint32_t e8m0_rceil(float s) {
  const uint32_t bits = float_bits(s) & 0x7fffffffu, e = exponent_up(bits);
  return rceil(bits, bits > 0x7f800000u ? 255u : (e < 254u ? e : 254u));
}

// 2^(e - 127); Inf for 255.
JITQUANT_HD float power_of_two(uint32_t e) {
  return bits_float(e > 0u ? e << 23 : 0x400000u);
}

// 2^(127 - e), for e below 254. Exact, so that a product with it is exact too.
JITQUANT_HD float inverse_normal_power(uint32_t e) {
  return bits_float((254u - e) << 23);
}
// The same for any e.
JITQUANT_HD float inverse_power_of_two(uint32_t e) {
  return e < 254u ? inverse_normal_power(e) : bits_float(0x400000u >> (e - 254u));
}

// E8M0 as MXFP8 and packed exponents use it: 255 is NaN.
JITQUANT_HD float float_from_e8m0(uint32_t e) {
  return e == 255u ? bits_float(0x7fffffffu) : power_of_two(e);
}

// a / b, correctly rounded, if r is the correctly rounded 1 / b and the remainder is exact
// (Markstein).
JITQUANT_HD float div_by_reciprocal(float a, float b, float r) {
  const float q = mul_rn(a, r);
  return fma_rn(fma_rn(-q, b, a), r, q);
}

// ---- one scale for a tensor or a row -----------------------------------------------------------

// min(top / amax, FLT_MAX); 1 if amax is 0, Inf or NaN. Elements are multiplied by it.
JITQUANT_HD float fp8_scale_from_amax(float amax, float top) {
  // Branch-free: a division would check for cases that are selected away at the end.
  const float lift = amax > 0x1p100f ? 0x1p-64f : 1.0f, lifted = mul_rn(amax, lift);
  const float scale = mul_rn(div_by_reciprocal(top, lifted, reciprocal_rn_ordinary(lifted)), lift);
  // Inf or NaN if the quotient overflows, or if the amax is too small for its reciprocal.
  return amax > 0.0f && amax <= kFloatMax ? fminf(scale, kFloatMax) : 1.0f;
}

JITQUANT_HD float fp8_scale_inv(float scale) {
  return reciprocal_rn(scale);
}

// scale_inv of a scale that was computed from `amax`, negative if it was given: the reciprocal, but
// for INT8 amax / 127, as vLLM stores it.
JITQUANT_HD float scale_inv_of(float scale, float amax, EightBit format) {
  if (format == EightBit::kInt8 && amax >= 0.0f && amax <= kFloatMax) {
    return div_rn(amax, largest(format));
  }
  return fp8_scale_inv(scale);
}

// max(min(amax, most), least), NaN if amax is.
JITQUANT_HD float bound_amax(float amax, float least, float most) {
  const float bound = amax > most ? most : amax;
  return bound < least ? least : bound;
}

// ---- where scales and groups lie ---------------------------------------------------------------

enum class ScaleOrder : int { kRow = 0, kColumn = 1 };

// The scales of `batches` matrices of `rows` rows, as `stored_cols` columns (packed: int32) of
// `stored_rows` (row order: rows; column order: rows, rounded up to 4 with TMA padding).
struct ScaleGrid {
  ScaleOrder order;
  int64_t stored_rows, stored_cols;

  JITQUANT_HD int64_t offset(int64_t batch, int64_t row, int64_t col) const {
    return order == ScaleOrder::kRow ? (batch * stored_rows + row) * stored_cols + col
                                     : (batch * stored_cols + col) * stored_rows + row;
  }
};

// a / b of nonnegative numbers that are usually below 2^32, which a GPU divides faster.
JITQUANT_HD int64_t divide_index(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

struct SegmentBounds {
  int64_t start, stop;
};

// A segment between two offsets, with at most `size` elements, clamped to a buffer of `numel`
// elements.
JITQUANT_HD SegmentBounds segment_between(int64_t from, int64_t to, int64_t size, int64_t numel) {
  const int64_t start = from < 0 ? 0 : (from < numel ? from : numel);
  const int64_t most = size < 0 ? 0 : (size < numel ? size : numel);
  int64_t stop = to < 0 ? 0 : (to < numel ? to : numel);
  if (start + most < stop) stop = start + most;
  return {start, stop < start ? start : stop};
}

// The segments of a buffer of `rows` rows of `row` elements, which offsets and sizes count.
struct SegmentTable {
  const int64_t* offsets;
  const int64_t* sizes;  // may be null
  int64_t count, numel, row, rows;

  SegmentTable(const int64_t* offsets, const int64_t* sizes, int64_t count, int64_t numel,
               int64_t row)
      : offsets(offsets),
        sizes(sizes),
        count(count),
        numel(numel),
        row(row),
        rows(row > 0 ? numel / row : 0) {}

  // In elements, within the buffer.
  JITQUANT_HD int64_t elements(int64_t n) const {
    return (n < 0 ? 0 : (n < rows ? n : rows)) * row;
  }
  JITQUANT_HD int64_t offset(int64_t i) const { return elements(offsets[i]); }
  JITQUANT_HD int64_t size(int64_t i) const {
    return sizes != nullptr ? elements(sizes[i]) : numel;
  }
  JITQUANT_HD SegmentBounds bounds(int64_t i) const {
    return segment_between(offset(i), offset(i + 1), size(i), numel);
  }
};

}  // namespace jitquant
