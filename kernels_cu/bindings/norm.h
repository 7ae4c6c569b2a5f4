// What the two norm pipelines do alike: one launch for a gsa a row or a given gsa, two for a
// tensor's.
#pragma once

#include "function.h"

namespace jitquant {

struct NormArguments {
  float eps = 0.0f;
  std::optional<float> gsa = std::nullopt;  // as a number
  float divisor = 1.0f;
  bool rows = false;
  Nvfp4Recipe recipe = Nvfp4Recipe::kTe;
};

inline float eps_of(double eps) {
  JITQUANT_CHECK(eps >= 0 && eps <= std::numeric_limits<float>::max(),
                 "eps must be finite and not negative, not ", eps);
  return static_cast<float>(eps);
}

// `given` is gsa as a tensor, or null. `launch_rows(scale)` is the only launch or the first,
// `launch_second(scale)` the second; `partial_count()` says how many partials the first
// writes.
template <class Rows, class Second, class Count>
void launch_norm(const NormArguments& a, const GlobalScale* given, float* gsa_out, const View& like,
                 const char* name, Rows&& launch_rows, Second&& launch_second,
                 Count&& partial_count) {
  RowScale scale = {};
  scale.divisor = a.divisor;
  if (given != nullptr || a.gsa) {
    scale.mode = RowMode::kGiven;
    scale.given = given != nullptr ? *given : value_scale(*a.gsa, gsa_out);
    check_launch(launch_rows(scale), name);
  } else if (a.rows) {
    scale.mode = RowMode::kRowAmax;
    scale.gsa_out = gsa_out;
    check_launch(launch_rows(scale), name);
  } else {
    const int count = partial_count();
    const Workspace partials(count, like);
    scale.mode = RowMode::kTensorAmax;
    scale.partials = partials.floats();
    check_launch(launch_rows(scale), name);
    check_launch(launch_second(partials_scale(partials.floats(), count, a.divisor, gsa_out)), name);
  }
}

}  // namespace jitquant
