// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct RotateQuantizeFp8 {
  static constexpr const char* kName = "rotate_quantize_fp8";
  static constexpr const char* kArguments =
      "Tensor x, Tensor? scale=None, *, ScalarType dtype, float? scale_value=None, float? scale_ub=None, str granularity='row', str rotate='none', Tensor? signs=None, Tensor? cos=None, Tensor? sin=None, bool interleaved=False, bool with_amax=True";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv", "amax"};
  using Inputs = std::tuple<View, std::optional<View>, ScalarType, std::optional<double>, std::optional<double>, std::string_view, std::string_view, std::optional<View>, std::optional<View>, std::optional<View>, bool, bool>;

  const View& x;
  const std::optional<View>& scale;
  ScalarType dtype;
  std::optional<double> scale_value;
  std::optional<double> scale_ub;
  std::string_view granularity;
  std::string_view rotate;
  const std::optional<View>& signs;
  const std::optional<View>& cos;
  const std::optional<View>& sin;
  bool interleaved;
  bool with_amax;

  void check() const {
    check_name("rotate", rotate, {"none", "te", "16", "32", "64", "128", "256"});
    check_name("granularity", granularity, {"tensor", "row"});
    check_number("scale", scale_value, 0x1.0000080000000p-128, 0x1.fffffe0000000p+127,
                 "a finite positive number whose reciprocal is finite in float32, 2.94e-39 or more, such as 448 / amax: elements are multiplied with it");
    check_number("scale_ub", scale_ub, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32, 2**-149 or more. Leave it out for no bound");
  }
};

}  // namespace jitquant::declared
