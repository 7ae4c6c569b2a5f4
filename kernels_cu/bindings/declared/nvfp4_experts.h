// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct Nvfp4GroupedLinear {
  static constexpr const char* kName = "nvfp4_grouped_linear";
  static constexpr const char* kArguments =
      "Tensor x, Tensor w_fp4, Tensor w_sf, Tensor w_gsa, Tensor offsets, Tensor? x_sf=None, Tensor? x_gsa=None, *, ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"y"};
  using Inputs = std::tuple<View, View, View, View, View, std::optional<View>, std::optional<View>, std::optional<ScalarType>>;

  const View& x;
  const View& w_fp4;
  const View& w_sf;
  const View& w_gsa;
  const View& offsets;
  const std::optional<View>& x_sf;
  const std::optional<View>& x_gsa;
  std::optional<ScalarType> dtype;

  void check() const {
  }
};

struct Nvfp4Experts {
  static constexpr const char* kName = "nvfp4_experts";
  static constexpr const char* kArguments =
      "Tensor x, Tensor gate_up_fp4, Tensor gate_up_sf, Tensor gate_up_gsa, Tensor down_fp4, Tensor down_sf, Tensor down_gsa, Tensor topk_ids, Tensor topk_weights, *, ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"mixture"};
  using Inputs = std::tuple<View, View, View, View, View, View, View, View, View, std::optional<ScalarType>>;

  const View& x;
  const View& gate_up_fp4;
  const View& gate_up_sf;
  const View& gate_up_gsa;
  const View& down_fp4;
  const View& down_sf;
  const View& down_gsa;
  const View& topk_ids;
  const View& topk_weights;
  std::optional<ScalarType> dtype;

  void check() const {
  }
};

}  // namespace jitquant::declared
