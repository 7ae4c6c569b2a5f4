// The input of rotary position embedding and Hadamard transforms.
#pragma once

#include "recipes.h"

namespace jitquant {

inline Rope rope_of(const std::optional<View>& cos, const std::optional<View>& sin,
                    bool interleaved, const Matrix& m) {
  if (!cos) return {nullptr, nullptr, 1, 0, interleaved, false};
  const float *c = static_cast<const float*>(cos->data), *s = static_cast<const float*>(sin->data);
  const int64_t positions = cos->size(0), size = 2 * cos->size(1);
  const int64_t each = m.rows > 0 ? m.rows / positions : 1;
  JITQUANT_CHECK(m.rows < (int64_t{1} << 31),
                 "x: expected fewer than 2^31 rows with cos and sin, got ", m.rows);
  return {c, s, each, static_cast<int32_t>(size), interleaved, aligned(c, 16) && aligned(s, 16)};
}

}  // namespace jitquant
