// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeNvfp4 {
  static constexpr const char* kName = "quantize_nvfp4";
  static constexpr const char* kArguments =
      "Tensor x, Tensor gsa, *, str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf"};
  using Inputs = std::tuple<View, View, std::string_view, std::string_view>;

  const View& x;
  const View& gsa;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
  }
};

}  // namespace jitquant::declared
