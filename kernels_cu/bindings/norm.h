// Arguments of RMSNorm.
#pragma once

#include "common.h"

namespace jitquant {

// The rows of the residual, which are updated in place.
inline std::optional<Matrix> residual_of(const std::optional<InPlace>& residual, const char* name) {
  if (!residual) return std::nullopt;
  return matrix_of(*residual, name);
}

// X is (..., H, N), A (..., H).
inline HyperConnection hyper_connection(const View& X, const View& A) {
  const int64_t leading = X.dim() - 2;
  HyperConnection mix = {};
  mix.x = matrix_of(X, "X", leading);
  mix.streams = static_cast<int>(X.size(leading));
  mix.stream_stride = X.stride(leading);
  mix.x.vector = mix.x.vector && mix.stream_stride * element_size(mix.x.dtype) % 16 == 0;
  mix.weights = A.data;
  mix.weights_fp32 = A.dtype == ScalarType::Float;
  mix.weight_row_stride = mix.streams;
  mix.weight_stride = 1;
  return mix;
}

}  // namespace jitquant
