// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct ComputeAmaxGsa {
  static constexpr const char* kName = "compute_amax_gsa";
  static constexpr const char* kArguments =
      "Tensor x, float divisor=2688.0";
  static constexpr std::initializer_list<const char*> kResults = {"gsa"};
  using Inputs = std::tuple<View, double>;

  const View& x;
  double divisor;

  void check() const {
    check_number("divisor", divisor, 0x1.0000000000000p-149, 0x1.fffffe0000000p+127,
                 "a positive number that is finite in float32. 2688 = 6 * 448 is NVFP4's");
  }
};

}  // namespace jitquant::declared
