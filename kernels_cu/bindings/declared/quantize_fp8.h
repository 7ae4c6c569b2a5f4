// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct QuantizeFp8 {
  static constexpr const char* kName = "quantize_fp8";
  static constexpr const char* kArguments =
      "Tensor x, Tensor? scale=None, *, ScalarType dtype, float? scale_value=None, float? scale_ub=None, str granularity='tensor', bool with_amax=True";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv", "amax"};
  using Inputs = std::tuple<View, std::optional<View>, ScalarType, std::optional<double>, std::optional<double>, std::string_view, bool>;

  const View& x;
  const std::optional<View>& scale;
  ScalarType dtype;
  std::optional<double> scale_value;
  std::optional<double> scale_ub;
  std::string_view granularity;
  bool with_amax;

  void check() const {
    check_name("granularity", granularity, {"tensor", "row"});
    check_number("scale", scale_value, 0x1.0000080000000p-128, 0x1.fffffe0000000p+127,
                 "a finite positive number whose reciprocal is finite in float32, 2.94e-39 or more, such as 448 / amax: elements are multiplied with it");
    check_number("scale_ub", scale_ub, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32, 2**-149 or more. Leave it out for no bound");
  }
};

struct QuantizeFp8FromAmax {
  static constexpr const char* kName = "quantize_fp8_from_amax";
  static constexpr const char* kArguments =
      "Tensor x, Tensor amax, *, ScalarType dtype, float? scale_ub=None, str granularity='tensor'";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv"};
  using Inputs = std::tuple<View, View, ScalarType, std::optional<double>, std::string_view>;

  const View& x;
  const View& amax;
  ScalarType dtype;
  std::optional<double> scale_ub;
  std::string_view granularity;

  void check() const {
    check_name("granularity", granularity, {"tensor", "row"});
    check_number("scale_ub", scale_ub, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32, 2**-149 or more. Leave it out for no bound");
  }
};

}  // namespace jitquant::declared
