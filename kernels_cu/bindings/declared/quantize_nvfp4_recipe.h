// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct RotatedAmax {
  static constexpr const char* kName = "rotated_amax";
  static constexpr const char* kArguments =
      "Tensor x, *, str rotate='none', Tensor? signs=None, str granularity='tensor'";
  static constexpr std::initializer_list<const char*> kResults = {"maxima"};
  using Inputs = std::tuple<View, std::string_view, std::optional<View>, std::string_view>;

  const View& x;
  std::string_view rotate;
  const std::optional<View>& signs;
  std::string_view granularity;

  void check() const {
    check_name("rotate", rotate, {"none", "te", "16", "32", "64", "128", "256"});
    check_name("granularity", granularity, {"tensor", "row"});
  }
};

struct QuantizeNvfp4Recipe {
  static constexpr const char* kName = "quantize_nvfp4_recipe";
  static constexpr const char* kArguments =
      "Tensor x, Tensor amax, *, str granularity='tensor', str block='1x16', str rotate='none', Tensor? signs=None, str select='none', int top=448, str rounding='nearest', Tensor? rng_state=None, Tensor? random_bytes=None, str scale_layout='linear', bool from_gsa=False";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa"};
  using Inputs = std::tuple<View, View, std::string_view, std::string_view, std::string_view, std::optional<View>, std::string_view, int64_t, std::string_view, std::optional<View>, std::optional<View>, std::string_view, bool>;

  const View& x;
  const View& amax;
  std::string_view granularity;
  std::string_view block;
  std::string_view rotate;
  const std::optional<View>& signs;
  std::string_view select;
  int64_t top;
  std::string_view rounding;
  const std::optional<View>& rng_state;
  const std::optional<View>& random_bytes;
  std::string_view scale_layout;
  bool from_gsa;

  void check() const {
    check_name("granularity", granularity, {"tensor", "row"});
    check_name("block", block, {"1x16", "16x16"});
    check_name("select", select, {"none", "4over6_mae", "4over6_mse", "4over6_mae_fast", "4over6_mse_fast", "4over6_abs_max", "static_6", "static_4"});
    check_name("rotate", rotate, {"none", "te", "16", "32", "64", "128", "256"});
    check_name("rounding", rounding, {"nearest", "stochastic"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
  }
};

}  // namespace jitquant::declared
