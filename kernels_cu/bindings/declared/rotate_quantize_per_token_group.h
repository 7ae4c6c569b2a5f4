// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct RotateQuantizePerTokenGroup {
  static constexpr const char* kName = "rotate_quantize_per_token_group";
  static constexpr const char* kArguments =
      "Tensor x, int group_size, Tensor? counts=None, *, ScalarType dtype, str rotate='none', Tensor? signs=None, Tensor? cos=None, Tensor? sin=None, bool interleaved=False, str scale_format='float32', str scale_layout='row', float? eps=None, str recipe='te', bool zero_rest=True";
  static constexpr std::initializer_list<const char*> kResults = {"data", "scale_inv"};
  using Inputs = std::tuple<View, int64_t, std::optional<View>, ScalarType, std::string_view, std::optional<View>, std::optional<View>, std::optional<View>, bool, std::string_view, std::string_view, std::optional<double>, std::string_view, bool>;

  const View& x;
  int64_t group_size;
  const std::optional<View>& counts;
  ScalarType dtype;
  std::string_view rotate;
  const std::optional<View>& signs;
  const std::optional<View>& cos;
  const std::optional<View>& sin;
  bool interleaved;
  std::string_view scale_format;
  std::string_view scale_layout;
  std::optional<double> eps;
  std::string_view recipe;
  bool zero_rest;

  void check() const {
    check_name("rotate", rotate, {"none", "te", "16", "32", "64", "128", "256"});
    check_name("scale_format", scale_format, {"float32", "ue8m0", "ue8m0_packed"});
    check_name("scale_layout", scale_layout, {"row", "column", "column_tma"});
    check_name("recipe", recipe, {"te", "deepgemm", "vllm"});
    check_number("eps", eps, 0x1.9f623d5a8a733p-107, 0x1.fffffe0000000p+127,
                 "a finite number from 1e-32 on, or None for the recipe's. Below it the scale of a group of zeros would overflow");
  }
};

}  // namespace jitquant::declared
