// The input of silu(gate) * up.
#pragma once

#include "function.h"

namespace jitquant {

// Alternating runs of `run` gate and up columns.
struct GateAndUp {
  Matrix fused;
  int64_t cols, run;

  GateAndUp(const View& t, int64_t interleave) : fused(matrix_of(t, "fused")) {
    cols = fused.cols / 2;
    JITQUANT_CHECK(cols < (int64_t{1} << 31), "fused: expected fewer than 2^32 columns, got shape ",
                   shape_text(t));
    run = interleave == 0 ? cols : interleave;
  }
};

}  // namespace jitquant
