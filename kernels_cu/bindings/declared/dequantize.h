// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct Dequantize {
  static constexpr const char* kName = "dequantize";
  static constexpr const char* kArguments =
      "Tensor data, Tensor scale_inv, int block_rows, int block_cols, *, str scale_layout='row', ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"out"};
  using Inputs = std::tuple<View, View, int64_t, int64_t, std::string_view, std::optional<ScalarType>>;

  const View& data;
  const View& scale_inv;
  int64_t block_rows;
  int64_t block_cols;
  std::string_view scale_layout;
  std::optional<ScalarType> dtype;

  void check() const {
    check_name("scale_layout", scale_layout, {"row", "column", "column_tma", "row_padded", "linear", "swizzled_128x4"});
  }
};

}  // namespace jitquant::declared
