// Scales of 8-bit elements that are dequantized.
#pragma once

#include "fp8.h"

namespace jitquant {

inline StoredScales::Type stored_type(ScalarType dtype) {
  if (dtype == ScalarType::Float) return StoredScales::kFloat;
  return dtype == ScalarType::Int ? StoredScales::kPacked : StoredScales::kE8m0;
}

// How a layout stores the scales of the `leading` first dimensions of data, the last of which
// counts `lines` (rows or blocks).
struct StoredLayout {
  bool column = false, padded_cols = false, padded_rows = false, swizzled = false;

  static StoredLayout of(std::string_view name) {
    if (is(name, "row") || is(name, "linear")) return {};
    if (is(name, "row_padded")) return {false, true, false, false};
    if (is(name, "column")) return {true, false, false, false};
    if (is(name, "column_tma")) return {true, false, true, false};
    return {false, true, false, true};
  }
};

inline StoredScales stored_scales(const View& data, const View& scale_inv, int64_t block_rows,
                                  int64_t block_cols, std::string_view scale_layout) {
  JITQUANT_CHECK(data.size(data.dim() - 1) < (int64_t{1} << 34) && block_cols < (int64_t{1} << 34),
                 "data: expected fewer than 2^34 columns, got shape ", shape_text(data));
  const StoredLayout layout = StoredLayout::of(scale_layout);
  StoredScales s = {};
  s.data = scale_inv.data;
  s.type = stored_type(scale_inv.dtype);
  s.block_rows = block_rows;
  s.halves_per_col = static_cast<uint32_t>(block_cols / 8);
  if (block_rows == 0) return s;
  const int64_t leading = data.dim() - 1, cols = data.size(leading);
  int64_t groups = block_cols == 0 ? 1 : ceil_div(cols, block_cols);
  if (s.type == StoredScales::kPacked) groups = ceil_div(groups, 4);
  const int64_t per_batch = leading == 0 ? 1 : data.size(leading - 1);
  const int64_t lines = ceil_div(per_batch, block_rows);
  s.matrix_rows = per_batch > 0 ? per_batch : 1;
  s.per_matrix = block_rows > 1 || layout.column;
  s.swizzled = layout.swizzled;
  s.grid.order = layout.column ? ScaleOrder::kColumn : ScaleOrder::kRow;
  s.grid.stored_cols = layout.padded_cols ? 4 * ceil_div(groups, 4) : groups;
  s.grid.stored_rows = layout.padded_rows ? 4 * ceil_div(lines, 4) : lines;
  return s;
}

}  // namespace jitquant
