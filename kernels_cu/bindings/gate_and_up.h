// The input of silu(gate) * up.
#pragma once

#include "common.h"

namespace jitquant {

// `interleave`: the length of runs, or 0 if all gates come before all ups.
inline GateAndUp gate_and_up(const View& fused, int64_t interleave) {
  const Matrix m = matrix_of(fused, "fused");
  JITQUANT_CHECK(m.cols / 2 < (int64_t{1} << 31),
                 "fused: expected fewer than 2^32 columns, got shape ", shape_text(fused));
  return {m, interleave == 0 ? m.cols / 2 : interleave};
}

}  // namespace jitquant
