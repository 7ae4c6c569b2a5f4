// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct DequantNvfp4 {
  static constexpr const char* kName = "dequant_nvfp4";
  static constexpr const char* kArguments =
      "Tensor x_fp4, Tensor x_sf, Tensor gsa, *, int? cols=None, int dim=-1, str scale_layout='linear', ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"out"};
  using Inputs = std::tuple<View, View, View, std::optional<int64_t>, int64_t, std::string_view, std::optional<ScalarType>>;

  const View& x_fp4;
  const View& x_sf;
  const View& gsa;
  std::optional<int64_t> cols;
  int64_t dim;
  std::string_view scale_layout;
  std::optional<ScalarType> dtype;

  void check() const {
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
  }
};

}  // namespace jitquant::declared
