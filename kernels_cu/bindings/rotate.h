// The input of rotary position embedding and Hadamard transforms.
#pragma once

#include "recipes.h"

namespace jitquant {

inline const float* table_of(const View& t, const char* name, const View& cos, const View& x) {
  check_cuda(t, name, &x);
  JITQUANT_CHECK(t.dim() == 2 && t.is_contiguous() && same_shape(t, cos), name,
                 ": expected shape (P, R / 2), contiguous, the same for cos and sin, got shape ",
                 shape_text(t));
  return static_cast<const float*>(t.data);
}

inline Rope rope_of(const std::optional<View>& cos, const std::optional<View>& sin,
                    bool interleaved, const Matrix& m, const View& x) {
  JITQUANT_CHECK(cos.has_value() == sin.has_value(),
                 "rope: expected both cos and sin, or neither, got one of them");
  if (!cos) return {nullptr, nullptr, 1, 0, interleaved, false};
  const float *c = table_of(*cos, "cos", *cos, x), *s = table_of(*sin, "sin", *cos, x);
  const int64_t positions = cos->size(0), size = 2 * cos->size(1);
  JITQUANT_CHECK(size > 0 && size % 32 == 0 && size <= m.cols,
                 "cos: expected a multiple of 16 columns, up to half of the ", m.cols,
                 " of x, got ", size / 2, ". Each is for a pair of x's first columns");
  JITQUANT_CHECK(positions > 0 && m.rows % positions == 0, "cos: expected a divisor of the ",
                 m.rows, " rows of x, got ", positions,
                 " rows. Each serves consecutive rows of x, such as the heads of a token");
  const int64_t each = m.rows > 0 ? m.rows / positions : 1;
  JITQUANT_CHECK(m.rows < (int64_t{1} << 31),
                 "x: expected fewer than 2^31 rows with cos and sin, got ", m.rows);
  return {c, s, each, static_cast<int32_t>(size), interleaved, aligned(c, 16) && aligned(s, 16)};
}

}  // namespace jitquant
