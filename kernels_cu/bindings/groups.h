// Shared by the bindings that quantize groups and blocks to 8 bits.
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

// `args` has dtype, scale_format, recipe and the bounds of elements.
template <class Args>
GroupNumerics group_numerics(const Args& args, std::optional<double> eps) {
  GroupNumerics n = {};
  n.format = eight_bit_of(args.dtype);
  n.recipe = args.recipe == "te"         ? GroupRecipe::kTe
             : args.recipe == "deepgemm" ? GroupRecipe::kDeepGemm
                                         : GroupRecipe::kVllm;
  n.scale_format = args.scale_format == "float32" ? ScaleFormat::kFloat32
                   : args.scale_format == "ue8m0" ? ScaleFormat::kPowerOfTwo
                                                  : ScaleFormat::kPacked;
  n.eps = static_cast<float>(eps.value_or(n.recipe == GroupRecipe::kDeepGemm ? 1e-4 : 1e-10));
  const float most = largest(n.format), least = n.format == EightBit::kInt8 ? -128.0f : -most;
  n.high = static_cast<float>(args.fp8_max.value_or(most));
  n.low = static_cast<float>(args.fp8_min.value_or(least));
  JITQUANT_CHECK(n.high <= most && holds(n.format, n.high), "fp8_max: expected a value of ",
                 dtype_text(args.dtype), " from 16 to ", most, ", got ",
                 args.fp8_max.value_or(most), ". Leave it out for the largest");
  JITQUANT_CHECK(n.low >= least, "fp8_min: expected a number from ", least, " to 0 with ",
                 dtype_text(args.dtype), ", got ", args.fp8_min.value_or(least));
  n.bounded = n.high != most || n.low != least;
  return n;
}

// The scale is the amax divided by the largest element, as in recipe deepgemm.
inline GroupNumerics mxfp8_numerics(ScalarType dtype) {
  GroupNumerics n = {};
  n.format = eight_bit_of(dtype);
  n.recipe = GroupRecipe::kDeepGemm;
  n.scale_format = ScaleFormat::kE8m0;
  return n;
}

// Whether the rows of block scales are padded to a multiple of four.
inline bool padded_of(std::string_view scale_layout) {
  return scale_layout == "row_padded";
}

// The scales of `batches` matrices of `rows` rows with `groups` groups each, and the shape of their
// tensor, whose leading sizes, if any, are the first `leading` of `like`: (*batch, rows).
struct ScalesPlan {
  GroupScales scales;
  Shape shape;
  ScalarType dtype;

  static ScalesPlan of(const View& like, int64_t leading, int64_t batches, int64_t rows,
                       int64_t groups, ScaleFormat format, std::string_view scale_layout) {
    const bool packed = format == ScaleFormat::kPacked;
    const int64_t stored = packed ? ceil_div(groups, 4) : groups;
    GroupScales s = {nullptr, format, {ScaleOrder::kRow, rows, stored}, false, batches,
                     rows,    groups};
    const ScalarType dtype = packed ? ScalarType::Int : ScalarType::Float;
    if (scale_layout == "row") return {s, Shape::of(like, leading, stored), dtype};
    s.grid.order = ScaleOrder::kColumn;
    if (scale_layout == "column_tma") s.grid.stored_rows = ceil_div(rows, 4) * 4;
    const int64_t batch_sizes = leading > 0 ? leading - 1 : 0;
    return {s, Shape::of(like, batch_sizes, stored, s.grid.stored_rows), dtype};
  }

  static ScalesPlan mxfp8(const View& like, int64_t leading, int64_t rows, int64_t groups,
                          bool swizzled) {
    const GroupScales s = {
        nullptr, ScaleFormat::kE8m0, {ScaleOrder::kRow, rows, groups}, swizzled, 1, rows, groups};
    return {s,
            swizzled ? Shape::of(swizzled_rows(rows), swizzled_blocks(groups))
                     : Shape::of(like, leading, groups),
            ScalarType::Float8_e8m0fnu};
  }

  GroupScales store(Result& scale_inv, const char* name, const View& like) const {
    GroupScales s = scales;
    s.data = scale_inv.memory(name, dtype, shape, like);
    return s;
  }
};

// The rows of a call with one scale per group: where they are, and which are valid.
struct RowsOfGroups {
  int64_t leading, batches, rows, all_rows, cols, groups;
  RowCounts counts;

  // `cols` is the result's; the result has the shape of x, and `m` has the rows of x.
  static RowsOfGroups of(const View& x, const Matrix& m, int64_t cols, int64_t group_size,
                         const std::optional<View>& counts, bool zero_padding) {
    RowsOfGroups r = {x.dim() - 1,           1, 1, m.rows, cols, ceil_div(cols, group_size),
                      {nullptr, false, true}};
    if (r.leading > 0) r.rows = x.size(r.leading - 1);
    for (int64_t i = 0; i + 1 < r.leading; ++i) r.batches *= x.size(i);
    if (counts) {
      r.counts = {counts->const_data_ptr(), counts->dtype == ScalarType::Long, zero_padding};
    }
    return r;
  }

  GroupOutput results(Result& data, Result& scale_inv, ScalarType dtype,
                      const GroupNumerics& numerics, std::string_view scale_layout,
                      const View& like) const {
    const ScalesPlan plan =
        ScalesPlan::of(like, leading, batches, rows, groups, numerics.scale_format, scale_layout);
    GroupOutput out = {data.rows("data", dtype, Shape::of(like, leading, cols), like),
                       plan.store(scale_inv, "scale_inv", like)};
    if (counts.counts == nullptr && out.scales.grid.order == ScaleOrder::kRow) {
      // One batch: the rows of all batches are contiguous.
      out.scales.batches = 1;
      out.scales.rows = out.scales.grid.stored_rows = all_rows;
    }
    return out;
  }
};

}  // namespace jitquant
