// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct RmsnormQuantizeNvfp4 {
  static constexpr const char* kName = "rmsnorm_quantize_nvfp4";
  static constexpr const char* kArguments =
      "Tensor x, Tensor weight, float eps=1e-6, float divisor=2688., *, Tensor(a!)? residual=None, float? gsa_value=None, str granularity='row', str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa", "inv_rms"};
  using Inputs = std::tuple<View, View, double, double, std::optional<InPlace>, std::optional<double>, std::string_view, std::string_view, std::string_view>;

  const View& x;
  const View& weight;
  double eps;
  double divisor;
  const std::optional<InPlace>& residual;
  std::optional<double> gsa_value;
  std::string_view granularity;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_name("granularity", granularity, {"tensor", "row"});
    check_number("eps", eps, 0x0.0p+0, 0x1.fffffe0000000p+127,
                 "a finite number that is not negative");
    check_number("divisor", divisor, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32. 2688 = 6 * 448 is NVFP4's");
    check_number("gsa", gsa_value, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32, such as amax / 2688. Leave it out to have it computed");
  }
};

struct RmsnormQuantizeNvfp4FromGsa {
  static constexpr const char* kName = "rmsnorm_quantize_nvfp4_from_gsa";
  static constexpr const char* kArguments =
      "Tensor x, Tensor weight, Tensor gsa, float eps=1e-6, *, Tensor(a!)? residual=None, str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "inv_rms"};
  using Inputs = std::tuple<View, View, View, double, std::optional<InPlace>, std::string_view, std::string_view>;

  const View& x;
  const View& weight;
  const View& gsa;
  double eps;
  const std::optional<InPlace>& residual;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_number("eps", eps, 0x0.0p+0, 0x1.fffffe0000000p+127,
                 "a finite number that is not negative");
  }
};

struct RmsnormQuantizeNvfp4FromAmax {
  static constexpr const char* kName = "rmsnorm_quantize_nvfp4_from_amax";
  static constexpr const char* kArguments =
      "Tensor x, Tensor weight, Tensor inv_rms, Tensor amax, float divisor=2688., *, str recipe='te', str scale_layout='linear'";
  static constexpr std::initializer_list<const char*> kResults = {"x_fp4", "x_sf", "gsa"};
  using Inputs = std::tuple<View, View, View, View, double, std::string_view, std::string_view>;

  const View& x;
  const View& weight;
  const View& inv_rms;
  const View& amax;
  double divisor;
  std::string_view recipe;
  std::string_view scale_layout;

  void check() const {
    check_name("recipe", recipe, {"te", "vllm"});
    check_name("scale_layout", scale_layout, {"linear", "swizzled_128x4"});
    check_number("divisor", divisor, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32. 2688 = 6 * 448 is NVFP4's");
  }
};

struct RmsnormAmax {
  static constexpr const char* kName = "rmsnorm_amax";
  static constexpr const char* kArguments =
      "Tensor x, Tensor weight, float eps=1e-6, *, Tensor(a!)? residual=None";
  static constexpr std::initializer_list<const char*> kResults = {"amax", "inv_rms"};
  using Inputs = std::tuple<View, View, double, std::optional<InPlace>>;

  const View& x;
  const View& weight;
  double eps;
  const std::optional<InPlace>& residual;

  void check() const {
    check_number("eps", eps, 0x0.0p+0, 0x1.fffffe0000000p+127,
                 "a finite number that is not negative");
  }
};

}  // namespace jitquant::declared
