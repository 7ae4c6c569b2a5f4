// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct RmsnormQuantizePerTokenGroup {
  static constexpr const char* kName = "rmsnorm_quantize_per_token_group";
  static constexpr const char* kArguments =
      "Tensor x, Tensor weight, int group_size, float eps=1e-6, *, Tensor(a!)? residual=None, ScalarType dtype, str scale_format='float32', str scale_layout='row', float? amax_eps=None, str recipe='te'";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv", "inv_rms"};
  using Inputs = std::tuple<View, View, int64_t, double, std::optional<InPlace>, ScalarType, std::string_view, std::string_view, std::optional<double>, std::string_view>;

  const View& x;
  const View& weight;
  int64_t group_size;
  double eps;
  const std::optional<InPlace>& residual;
  ScalarType dtype;
  std::string_view scale_format;
  std::string_view scale_layout;
  std::optional<double> amax_eps;
  std::string_view recipe;

  void check() const {
    check_name("scale_format", scale_format, {"float32", "ue8m0", "ue8m0_packed"});
    check_name("scale_layout", scale_layout, {"row", "column", "column_tma"});
    check_name("recipe", recipe, {"te", "deepgemm", "vllm"});
    check_number("eps", eps, 0x0.0p+0, 0x1.fffffe0000000p+127,
                 "a finite number that is not negative");
    check_number("amax_eps", amax_eps, 0x1.9f623d5a8a733p-107, 0x1.fffffe0000000p+127,
                 "a finite number from 1e-32 on, or None for the recipe's. Below it the scale of a group of zeros would overflow");
  }
};

}  // namespace jitquant::declared
