// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct DequantizeRaggedFp8 {
  static constexpr const char* kName = "dequantize_ragged_fp8";
  static constexpr const char* kArguments =
      "Tensor data, Tensor scale_inv, Tensor offsets, *, Tensor? sizes=None, ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"out"};
  using Inputs = std::tuple<View, View, View, std::optional<View>, std::optional<ScalarType>>;

  const View& data;
  const View& scale_inv;
  const View& offsets;
  const std::optional<View>& sizes;
  std::optional<ScalarType> dtype;

  void check() const {
  }
};

struct DequantizeRaggedNvfp4 {
  static constexpr const char* kName = "dequantize_ragged_nvfp4";
  static constexpr const char* kArguments =
      "Tensor x_fp4, Tensor x_sf, Tensor gsa, Tensor offsets, *, int numel, Tensor? sizes=None, ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"out"};
  using Inputs = std::tuple<View, View, View, View, int64_t, std::optional<View>, std::optional<ScalarType>>;

  const View& x_fp4;
  const View& x_sf;
  const View& gsa;
  const View& offsets;
  int64_t numel;
  const std::optional<View>& sizes;
  std::optional<ScalarType> dtype;

  void check() const {
  }
};

}  // namespace jitquant::declared
