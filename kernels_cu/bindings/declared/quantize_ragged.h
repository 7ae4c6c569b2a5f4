// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeRaggedFp8 {
  static constexpr const char* kName = "quantize_ragged_fp8";
  static constexpr const char* kArguments =
      "Tensor x, Tensor offsets, Tensor? scale=None, *, Tensor? sizes=None, ScalarType dtype";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv", "amax"};
  using Inputs = std::tuple<View, View, std::optional<View>, std::optional<View>, ScalarType>;

  const View& x;
  const View& offsets;
  const std::optional<View>& scale;
  const std::optional<View>& sizes;
  ScalarType dtype;

  void check() const {
  }
};

}  // namespace jitquant::declared
