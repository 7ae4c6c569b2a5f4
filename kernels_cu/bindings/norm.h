// What the two norm pipelines do alike: one launch for a gsa a row or a given gsa, two for a
// tensor's.
#pragma once

#include "common.h"

namespace jitquant {

struct NormArguments {
  float eps = 0.0f;
  std::optional<double> global_scale = std::nullopt;  // gsa as a number
  float divisor = 1.0f;
  bool rows = false;
  Nvfp4Recipe recipe = Nvfp4Recipe::kTe;
};

inline float eps_of(double eps) {
  const float e = static_cast<float>(eps);
  JITQUANT_CHECK(std::isfinite(e) && e >= 0, "eps must be finite and not negative, not ", eps);
  return e;
}

inline int64_t gsa_count(const std::string& granularity, const std::optional<double>& global_scale,
                         int64_t rows) {
  return by_row(granularity) && !global_scale ? rows : 1;
}

// `given` is gsa as a tensor, or null. `launch_rows(scale, partials)` is the only launch or the
// first, `launch_second(scale)` the second; `partial_count()` says how many partials the first
// writes.
template <class Rows, class Second, class Count>
void launch_norm(const NormArguments& a, const Tensor* given, int64_t rows, float* gsa_out,
                 const Tensor& like, const char* name, Rows&& launch_rows, Second&& launch_second,
                 Count&& partial_count) {
  RowScale scale = {};
  scale.divisor = a.divisor;
  if (given != nullptr || a.global_scale) {
    scale.mode = RowMode::kGiven;
    scale.given = given != nullptr ? given_scale(*given, "gsa", rows, like)
                                   : value_scale(*a.global_scale, gsa_out);
    check_launch(launch_rows(scale, 0), name);
  } else if (a.rows) {
    scale.mode = RowMode::kRowAmax;
    scale.gsa_out = gsa_out;
    check_launch(launch_rows(scale, 0), name);
  } else {
    const int count = partial_count();
    const Tensor partials = empty_floats(count, like);
    scale.mode = RowMode::kTensorAmax;
    scale.partials = floats(partials);
    check_launch(launch_rows(scale, count), name);
    check_launch(launch_second(partial_scale(partials, a.divisor, gsa_out)), name);
  }
}

}  // namespace jitquant
