// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeRaggedNvfp4 {
  static constexpr const char* kName = "quantize_ragged_nvfp4";
  static constexpr const char* kArguments =
      "Tensor x, Tensor offsets, Tensor? scale=None, *, Tensor? sizes=None, str recipe='te'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa", "amax"};
  using Inputs = std::tuple<View, View, std::optional<View>, std::optional<View>, std::string_view>;

  const View& x;
  const View& offsets;
  const std::optional<View>& scale;
  const std::optional<View>& sizes;
  std::string_view recipe;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
  }
};

}  // namespace jitquant::declared
