// Made by ./scripts/headers from the declarations in jitquant/ops; not to be edited.
// clang-format off
#pragma once

#include "../function.h"

namespace jitquant::declared {

struct Amax {
  static constexpr const char* kName = "amax";
  static constexpr const char* kArguments =
      "Tensor x, *, str granularity='tensor', bool keep_nan=False, int run=0, bool activate=False";
  static constexpr std::initializer_list<const char*> kResults = {"amax"};
  using Inputs = std::tuple<View, std::string_view, bool, int64_t, bool>;

  const View& x;
  std::string_view granularity;
  bool keep_nan;
  int64_t run;
  bool activate;

  void check() const {
    check_name("granularity", granularity, {"tensor", "row"});
  }
};

}  // namespace jitquant::declared
