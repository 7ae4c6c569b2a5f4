// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeWeightNvfp4 {
  static constexpr const char* kName = "quantize_weight_nvfp4";
  static constexpr const char* kArguments =
      "Tensor w, float divisor=2688., *, float? gsa_value=None, str block='1x16', int dim=-1, str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa"};
  using Inputs = std::tuple<View, double, std::optional<double>, std::string_view, int64_t, std::string_view, std::string_view>;

  const View& w;
  double divisor;
  std::optional<double> gsa_value;
  std::string_view block;
  int64_t dim;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_name("block", block, {"1x16", "16x16"});
    check_number("divisor", divisor, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32. 2688 = 6 * 448 is NVFP4's");
    check_number("gsa", gsa_value, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32, such as amax / 2688. Leave it out to have it computed");
  }
};

struct QuantizeWeightNvfp4FromGsa {
  static constexpr const char* kName = "quantize_weight_nvfp4_from_gsa";
  static constexpr const char* kArguments =
      "Tensor w, Tensor gsa, *, str block='1x16', int dim=-1, str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf"};
  using Inputs = std::tuple<View, View, std::string_view, int64_t, std::string_view, std::string_view>;

  const View& w;
  const View& gsa;
  std::string_view block;
  int64_t dim;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_name("block", block, {"1x16", "16x16"});
  }
};

struct QuantizeWeightNvfp4FromAmax {
  static constexpr const char* kName = "quantize_weight_nvfp4_from_amax";
  static constexpr const char* kArguments =
      "Tensor w, Tensor amax, float divisor=2688., *, str block='1x16', int dim=-1, str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa"};
  using Inputs = std::tuple<View, View, double, std::string_view, int64_t, std::string_view, std::string_view>;

  const View& w;
  const View& amax;
  double divisor;
  std::string_view block;
  int64_t dim;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_name("block", block, {"1x16", "16x16"});
    check_number("divisor", divisor, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32. 2688 = 6 * 448 is NVFP4's");
  }
};

}  // namespace jitquant::declared
