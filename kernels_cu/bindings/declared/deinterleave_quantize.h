// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct DeinterleaveAmaxQuantizeNvfp4 {
  static constexpr const char* kName = "deinterleave_amax_quantize_nvfp4";
  static constexpr const char* kArguments =
      "Tensor fused, int intermediate, int interleave, float divisor=2688., *, float? gsa_value=None, str op='select', str granularity='tensor', str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa"};
  using Inputs = std::tuple<View, int64_t, int64_t, double, std::optional<double>, std::string_view, std::string_view, std::string_view, std::string_view>;

  const View& fused;
  int64_t intermediate;
  int64_t interleave;
  double divisor;
  std::optional<double> gsa_value;
  std::string_view op;
  std::string_view granularity;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_name("granularity", granularity, {"tensor", "row"});
    check_name("op", op, {"select", "swiglu"});
    check_number("divisor", divisor, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32. 2688 = 6 * 448 is NVFP4's");
    check_number("gsa", gsa_value, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32, such as amax / 2688. Leave it out to have it computed");
  }
};

struct DeinterleaveQuantizeNvfp4 {
  static constexpr const char* kName = "deinterleave_quantize_nvfp4";
  static constexpr const char* kArguments =
      "Tensor fused, int intermediate, int interleave, Tensor gsa, *, str op='select', str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf"};
  using Inputs = std::tuple<View, int64_t, int64_t, View, std::string_view, std::string_view, std::string_view>;

  const View& fused;
  int64_t intermediate;
  int64_t interleave;
  const View& gsa;
  std::string_view op;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_name("op", op, {"select", "swiglu"});
  }
};

struct DeinterleaveQuantizeNvfp4FromAmax {
  static constexpr const char* kName = "deinterleave_quantize_nvfp4_from_amax";
  static constexpr const char* kArguments =
      "Tensor fused, int intermediate, int interleave, Tensor amax, float divisor=2688., *, str op='select', str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa"};
  using Inputs = std::tuple<View, int64_t, int64_t, View, double, std::string_view, std::string_view, std::string_view>;

  const View& fused;
  int64_t intermediate;
  int64_t interleave;
  const View& amax;
  double divisor;
  std::string_view op;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_name("op", op, {"select", "swiglu"});
    check_number("divisor", divisor, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32. 2688 = 6 * 448 is NVFP4's");
  }
};

}  // namespace jitquant::declared
