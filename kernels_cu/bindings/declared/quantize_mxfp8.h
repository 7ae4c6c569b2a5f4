// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeMxfp8 {
  static constexpr const char* kName = "quantize_mxfp8";
  static constexpr const char* kArguments =
      "Tensor x, *, ScalarType dtype, str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv"};
  using Inputs = std::tuple<View, ScalarType, std::string_view>;

  const View& x;
  ScalarType dtype;
  std::string_view scale_layout;

  void check() const {
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
  }
};

}  // namespace jitquant::declared
