// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeBlock {
  static constexpr const char* kName = "quantize_block";
  static constexpr const char* kArguments =
      "Tensor w, int block_rows, int block_cols, *, ScalarType dtype, str scale_format='float32', str scale_layout='row', float? eps=None, str recipe='te'";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv"};
  using Inputs = std::tuple<View, int64_t, int64_t, ScalarType, std::string_view, std::string_view, std::optional<double>, std::string_view>;

  const View& w;
  int64_t block_rows;
  int64_t block_cols;
  ScalarType dtype;
  std::string_view scale_format;
  std::string_view scale_layout;
  std::optional<double> eps;
  std::string_view recipe;

  void check() const {
    check_name("scale_format", scale_format, {"float32", "ue8m0"});
    check_name("scale_layout", scale_layout, {"row", "row_padded"});
    check_name("recipe", recipe, {"te", "deepgemm", "vllm"});
    check_number("eps", eps, 0x1.9f623d5a8a733p-107, 0x1.fffffe0000000p+127,
                 "a finite number from 1e-32 on, or None for the recipe's. Below it the scale of a group of zeros would overflow");
  }
};

}  // namespace jitquant::declared
