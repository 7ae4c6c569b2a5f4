// Arguments of 8-bit elements with one scale per tensor or per row.
#pragma once

#include "../fp8/launch.h"
#include "common.h"

namespace [[gnu::visibility("hidden")]] jitquant {

inline EightBit eight_bit_of(ScalarType dtype) {
  if (dtype == ScalarType::Float8_e4m3fn) return EightBit::kE4m3;
  return dtype == ScalarType::Float8_e5m2 ? EightBit::kE5m2 : EightBit::kInt8;
}

// Elements that are read, eight at a time.
inline ElementRows elements_of(const View& data, const char* name) {
  Matrix rows = rows_of(data, name, data.dim() - 1, 1);
  rows.vector = aligned(rows.data, 8) && rows.s0 % 8 == 0 && rows.s1 % 8 == 0 && rows.s2 % 8 == 0;
  return {rows, eight_bit_of(data.dtype)};
}

inline ElementRows element_rows(const Memory& data) {
  return {rows_of(data, "data"), eight_bit_of(data.dtype)};
}

// The amax is given, for the tensor or for each row.
inline Fp8Scale fp8_scale(const View& amax, std::optional<double> scale_ub,
                          std::optional<double> amax_eps, std::string_view granularity,
                          const Memory& scale_inv) {
  Fp8Scale scale = {};
  scale.kind = Fp8Scale::kMaxima;
  scale.given = static_cast<const float*>(amax.data);
  scale.by_row = by_row_of(granularity);
  scale.least = static_cast<float>(amax_eps.value_or(0.0));
  scale.bound = scale_ub ? static_cast<float>(*scale_ub) : std::numeric_limits<float>::infinity();
  scale.scale_inv = scale_inv.floats();
  return scale;
}

// The scale is given, or computed. The result amax is empty if it is not requested.
inline Fp8Scale fp8_scale(const std::optional<View>& scale, std::optional<double> scale_value,
                          std::optional<double> scale_ub, std::optional<double> amax_eps,
                          std::string_view granularity, bool with_amax, const Memory& scale_inv,
                          const Memory& amax) {
  Fp8Scale s = fp8_scale(View(), scale_ub, amax_eps, granularity, scale_inv);
  s.kind = Fp8Scale::kAmax;
  if (scale) {
    s.kind = s.by_row ? Fp8Scale::kRows : Fp8Scale::kTensor;
    s.given = static_cast<const float*>(scale->data);
  } else if (scale_value) {
    s.kind = Fp8Scale::kValue;
    s.value = static_cast<float>(*scale_value);
  }
  s.amax = with_amax ? amax.floats() : nullptr;
  return s;
}

}  // namespace jitquant
