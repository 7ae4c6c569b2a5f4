// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeRaggedGradFp8 {
  static constexpr const char* kName = "quantize_ragged_grad_fp8";
  static constexpr const char* kArguments =
      "Tensor grad, Tensor offsets, Tensor? scale=None, *, Tensor? sizes=None, Tensor? act_input=None, str activation='none', bool with_dbias=True, ScalarType dtype";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv", "amax", "dbias"};
  using Inputs = std::tuple<View, View, std::optional<View>, std::optional<View>, std::optional<View>, std::string_view, bool, ScalarType>;

  const View& grad;
  const View& offsets;
  const std::optional<View>& scale;
  const std::optional<View>& sizes;
  const std::optional<View>& act_input;
  std::string_view activation;
  bool with_dbias;
  ScalarType dtype;

  void check() const {
    check_name("activation", activation, {"none", "relu", "silu", "gelu", "qgelu", "srelu"});
  }
};

}  // namespace jitquant::declared
