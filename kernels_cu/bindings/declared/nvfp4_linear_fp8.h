// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct Nvfp4LinearFp8 {
  static constexpr const char* kName = "nvfp4_linear_fp8";
  static constexpr const char* kArguments =
      "Tensor x, Tensor x_scale_inv, Tensor w_fp4, Tensor w_sf, Tensor w_gsa, *, Tensor? bias=None, Tensor? residual=None, ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"y"};
  using Inputs = std::tuple<View, View, View, View, View, std::optional<View>, std::optional<View>, std::optional<ScalarType>>;

  const View& x;
  const View& x_scale_inv;
  const View& w_fp4;
  const View& w_sf;
  const View& w_gsa;
  const std::optional<View>& bias;
  const std::optional<View>& residual;
  std::optional<ScalarType> dtype;

  void check() const {
  }
};

}  // namespace jitquant::declared
