// Shared by the two norm pipelines: one launch for a gsa per row or a given gsa, two for the
// tensor's own gsa.
#pragma once

#include "function.h"

namespace jitquant {

struct NormArguments {
  float eps = 0.0f;
  std::optional<float> gsa = std::nullopt;  // if given as a number
  float divisor = 1.0f;
  bool rows = false;
  Nvfp4Recipe recipe = Nvfp4Recipe::kTe;
};

// The rows of the residual, which are updated in place.
inline std::optional<Matrix> residual_of(const std::optional<InPlace>& residual) {
  if (!residual) return std::nullopt;
  return matrix_of(*residual, "residual");
}

// The input of a norm.
struct NormInput {
  Matrix x;
  ColumnVector weight;
  std::optional<Matrix> residual;
  float eps;

  NormInput(const View& t, const View& w, double e, const std::optional<InPlace>& r)
      : x(matrix_of(t, "x")),
        weight(column_vector(w)),
        residual(residual_of(r)),
        eps(static_cast<float>(e)) {}
  const Matrix* residual_rows() const { return residual ? &*residual : nullptr; }
};

// `given` is gsa as a tensor, or null. `launch_rows(scale)` is the first launch, or the only one;
// `launch_second(scale)` is the second. `partial_count()` is the number of partials that the first
// one writes. The gsa of a single row is the tensor's.
template <class Rows, class Second, class Count>
void launch_norm(const NormArguments& a, const GlobalScale* given, float* gsa_out, int64_t rows,
                 const View& like, const char* name, Rows&& launch_rows, Second&& launch_second,
                 Count&& partial_count) {
  RowScale scale = {};
  scale.divisor = a.divisor;
  if (given != nullptr || a.gsa) {
    scale.mode = RowMode::kGiven;
    scale.given = given != nullptr ? *given : value_scale(*a.gsa, gsa_out);
    check_launch(launch_rows(scale), name);
  } else if (a.rows || rows == 1) {
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

// inv_rms from an earlier read of the rows. Only read here, although the pointer is not const.
inline float* given_inv_rms(const View& inv_rms) {
  return const_cast<float*>(static_cast<const float*>(inv_rms.const_data_ptr()));
}

// The first of two launches alone. Writes the largest possible number of maxima, with zeros after
// those that are used, so that results of different devices can be combined.
template <class Rows>
void launch_norm_amax(float* maxima, const char* name, Rows&& launch_rows) {
  RowScale scale = {};
  scale.mode = RowMode::kTensorAmax;
  scale.partials = maxima;
  scale.maxima = kMaxPartials;
  check_launch(launch_rows(scale), name);
}

}  // namespace jitquant
