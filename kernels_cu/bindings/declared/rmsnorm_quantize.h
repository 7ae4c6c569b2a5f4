// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct RmsnormQuantizeFp8 {
  static constexpr const char* kName = "rmsnorm_quantize_fp8";
  static constexpr const char* kArguments =
      "Tensor x, Tensor weight, Tensor? scale=None, float eps=1e-6, *, Tensor(a!)? residual=None, ScalarType dtype, float? scale_value=None, float? scale_ub=None, str granularity='row', bool with_amax=True";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv", "amax", "inv_rms"};
  using Inputs = std::tuple<View, View, std::optional<View>, double, std::optional<InPlace>, ScalarType, std::optional<double>, std::optional<double>, std::string_view, bool>;

  const View& x;
  const View& weight;
  const std::optional<View>& scale;
  double eps;
  const std::optional<InPlace>& residual;
  ScalarType dtype;
  std::optional<double> scale_value;
  std::optional<double> scale_ub;
  std::string_view granularity;
  bool with_amax;

  void check() const {
    check_name("granularity", granularity, {"tensor", "row"});
    check_number("eps", eps, 0x0.0p+0, 0x1.fffffe0000000p+127,
                 "a finite number that is not negative");
    check_number("scale", scale_value, 0x1.0000080000000p-128, 0x1.fffffe0000000p+127,
                 "a finite positive number whose reciprocal is finite in float32, 2.94e-39 or more, such as 448 / amax: elements are multiplied with it");
    check_number("scale_ub", scale_ub, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32, 2**-149 or more. Leave it out for no bound");
  }
};

}  // namespace jitquant::declared
