// Arguments of 8-bit groups and blocks.
#pragma once

#include "../group/launch.h"
#include "fp8.h"

namespace [[gnu::visibility("hidden")]] jitquant {

// Whether 8 bits hold a number.
inline bool holds(EightBit format, float x) {
  switch (format) {
    case EightBit::kE4m3:
      return float_from_e4m3(e4m3_from_float(x)) == x;
    case EightBit::kE5m2:
      return float_from_e5m2(e5m2_from_float(x)) == x;
    case EightBit::kInt8:
      return static_cast<float>(int8_from_float(x)) == x;
  }
  return false;
}

inline GroupNumerics group_numerics(ScalarType dtype, std::string_view scale_format,
                                    std::optional<double> eps, std::string_view recipe,
                                    std::optional<double> fp8_min, std::optional<double> fp8_max) {
  GroupNumerics n = {};
  n.format = eight_bit_of(dtype);
  n.recipe = is(recipe, "te")         ? GroupRecipe::kTe
             : is(recipe, "deepgemm") ? GroupRecipe::kDeepGemm
                                      : GroupRecipe::kVllm;
  n.scale_format = is(scale_format, "float32") ? ScaleFormat::kFloat32
                   : is(scale_format, "ue8m0") ? ScaleFormat::kPowerOfTwo
                                               : ScaleFormat::kPacked;
  n.eps = static_cast<float>(eps.value_or(n.recipe == GroupRecipe::kDeepGemm ? 1e-4 : 1e-10));
  const float most = largest(n.format), least = n.format == EightBit::kInt8 ? -128.0f : -most;
  n.high = static_cast<float>(fp8_max.value_or(most));
  n.low = static_cast<float>(fp8_min.value_or(least));
  JITQUANT_CHECK(n.high <= most && holds(n.format, n.high), "fp8_max: expected a value of ",
                 dtype_text(dtype), " from 16 to ", most, ", got ", fp8_max.value_or(most),
                 ". Leave it out for the largest");
  JITQUANT_CHECK(n.low >= least, "fp8_min: expected a number from ", least, " to 0 with ",
                 dtype_text(dtype), ", got ", fp8_min.value_or(least));
  n.bounded = n.high != most || n.low != least;
  return n;
}

// A norm has another eps.
inline GroupNumerics normed_numerics(ScalarType dtype, std::string_view scale_format,
                                     std::optional<double> amax_eps, std::string_view recipe,
                                     std::optional<double> fp8_min, std::optional<double> fp8_max) {
  return group_numerics(dtype, scale_format, amax_eps, recipe, fp8_min, fp8_max);
}

// The scale is the amax divided by the largest element, as in recipe deepgemm.
inline GroupNumerics mxfp8_numerics(ScalarType dtype) {
  GroupNumerics n = {};
  n.format = eight_bit_of(dtype);
  n.recipe = GroupRecipe::kDeepGemm;
  n.scale_format = ScaleFormat::kE8m0;
  return n;
}

// The scales of data: one for `tall` rows of it in each group of `wide` columns.
inline GroupScales group_scales(const Memory& data, const Memory& scale_inv, ScaleFormat format,
                                int64_t tall, int64_t wide, std::string_view scale_layout) {
  const int64_t leading = data.shape.dim() - 1;
  const int64_t of_batch = leading > 0 ? data.shape.size(leading - 1) : 1;
  const int64_t rows = ceil_div(of_batch, tall), groups = ceil_div(data.cols(), wide);
  const bool column = is(scale_layout, "column") || is(scale_layout, "column_tma");
  GroupScales s = {scale_inv.data,
                   format,
                   {},
                   swizzled_of(scale_layout),
                   of_batch > 0 ? data.row_count() / of_batch : 0,
                   rows,
                   groups};
  const int64_t packed = format == ScaleFormat::kPacked ? ceil_div(groups, 4) : groups;
  s.grid = column ? ScaleGrid{ScaleOrder::kColumn, scale_inv.cols(), packed}
                  : ScaleGrid{ScaleOrder::kRow, rows,
                              is(scale_layout, "row_padded") ? ceil_div(groups, 4) * 4 : packed};
  return s;
}

// `counts`: the valid rows of each batch, or null.
inline GroupOutput group_output(const Memory& data, const Memory& scale_inv,
                                const GroupNumerics& numerics, int64_t group_size,
                                std::string_view scale_layout, const std::optional<View>& counts) {
  GroupOutput out = {rows_of(data, "data"), group_scales(data, scale_inv, numerics.scale_format, 1,
                                                         group_size, scale_layout)};
  if (!counts && out.scales.grid.order == ScaleOrder::kRow) {
    // One batch: the rows of all batches are contiguous.
    out.scales.batches = 1;
    out.scales.rows = out.scales.grid.stored_rows = data.row_count();
  }
  return out;
}
inline GroupOutput group_output(const Memory& data, const Memory& scale_inv,
                                const GroupNumerics& numerics, int64_t group_size,
                                std::string_view scale_layout) {
  return group_output(data, scale_inv, numerics, group_size, scale_layout, std::nullopt);
}
inline GroupOutput mxfp8_output(const Memory& data, const Memory& scale_inv,
                                const GroupNumerics& numerics, std::string_view scale_layout) {
  return group_output(data, scale_inv, numerics, kMxfp8Block, scale_layout);
}
inline GroupOutput block_output(const Memory& data, const Memory& scale_inv,
                                const GroupNumerics& numerics, int64_t block_rows,
                                int64_t block_cols, std::string_view scale_layout) {
  return {rows_of(data, "data"), group_scales(data, scale_inv, numerics.scale_format, block_rows,
                                              block_cols, scale_layout)};
}

inline RowCounts row_counts(const std::optional<View>& counts, bool zero_padding) {
  if (!counts) return {nullptr, false, true};
  return {counts->data, counts->dtype == ScalarType::Long, zero_padding};
}

}  // namespace jitquant
