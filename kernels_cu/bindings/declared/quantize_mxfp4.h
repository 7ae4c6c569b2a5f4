// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeMxfp4 {
  static constexpr const char* kName = "quantize_mxfp4";
  static constexpr const char* kArguments =
      "Tensor x, *, str scaling='rceil', str rotate='none', Tensor? signs=None, str rounding='nearest', Tensor? rng_state=None, Tensor? random_bytes=None, str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf"};
  using Inputs = std::tuple<View, std::string_view, std::string_view, std::optional<View>, std::string_view, std::optional<View>, std::optional<View>, std::string_view>;

  const View& x;
  std::string_view scaling;
  std::string_view rotate;
  const std::optional<View>& signs;
  std::string_view rounding;
  const std::optional<View>& rng_state;
  const std::optional<View>& random_bytes;
  std::string_view scale_layout;

  void check() const {
    check_name("scaling", scaling, {"floor", "ceil", "even", "rceil"});
    check_name("rotate", rotate, {"none", "te", "16", "32", "64", "128", "256"});
    check_name("rounding", rounding, {"nearest", "stochastic"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
  }
};

struct DequantizeMxfp4 {
  static constexpr const char* kName = "dequantize_mxfp4";
  static constexpr const char* kArguments =
      "Tensor x_fp4, Tensor x_sf, *, int? cols=None, str scale_layout='linear', ScalarType? dtype=None";
  static constexpr std::initializer_list<const char*> kResults = {"out"};
  using Inputs = std::tuple<View, View, std::optional<int64_t>, std::string_view, std::optional<ScalarType>>;

  const View& x_fp4;
  const View& x_sf;
  std::optional<int64_t> cols;
  std::string_view scale_layout;
  std::optional<ScalarType> dtype;

  void check() const {
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
  }
};

}  // namespace jitquant::declared
