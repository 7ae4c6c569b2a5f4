// The input of rotary position embedding and Hadamard transforms.
#pragma once

#include "recipes.h"

namespace jitquant {

inline const float* table_of(const View& t, const char* name, const View& other, const View& x) {
  check_cuda(t, name, &x);
  JITQUANT_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 2 && t.is_contiguous() &&
                     t.size(0) == other.size(0) && t.size(1) == other.size(1),
                 name,
                 " must be float32 with shape (P, R / 2), contiguous, as the other of cos and "
                 "sin; its shape is ",
                 shape_text(t));
  return static_cast<const float*>(t.data);
}

inline Rope rope_of(const std::optional<View>& cos, const std::optional<View>& sin,
                    bool interleaved, const Matrix& m, const View& x) {
  JITQUANT_CHECK(cos.has_value() == sin.has_value(), "cos and sin must be given together");
  if (!cos) return {nullptr, nullptr, 1, 0, interleaved, false};
  JITQUANT_CHECK(cos->dim() == 2 && sin->dim() == 2, "cos and sin must have two dimensions");
  const int64_t positions = cos->size(0), size = 2 * cos->size(1);
  JITQUANT_CHECK(size > 0 && size % 32 == 0 && size <= m.cols,
                 "cos must have a multiple of 16 columns, up to half of ", m.cols, ", not ",
                 size / 2);
  JITQUANT_CHECK(positions > 0 && m.rows % positions == 0, "cos must have as many rows as divide ",
                 m.rows, ", not ", positions);
  const int64_t each = m.rows > 0 ? m.rows / positions : 1;
  JITQUANT_CHECK(m.rows < (int64_t{1} << 31), "x must have fewer than 2^31 rows with cos and sin");
  const float *c = table_of(*cos, "cos", *sin, x), *s = table_of(*sin, "sin", *cos, x);
  return {c, s, each, static_cast<int32_t>(size), interleaved, aligned(c, 16) && aligned(s, 16)};
}

}  // namespace jitquant
