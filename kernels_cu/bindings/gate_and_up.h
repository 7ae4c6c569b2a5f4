// The input of silu(gate) * up.
#pragma once

#include "function.h"

namespace jitquant {

// Alternating runs of `run` gate and up columns.
struct GateAndUp {
  Matrix fused;
  int64_t cols, run;

  GateAndUp(const View& t, int64_t interleave) : fused(matrix_of(t, "fused")) {
    JITQUANT_CHECK(fused.cols % 2 == 0, "fused must have an even number of columns, not ",
                   fused.cols);
    cols = fused.cols / 2;
    JITQUANT_CHECK(cols < (int64_t{1} << 31), "fused must have less than 2^32 columns");
    JITQUANT_CHECK(interleave == 0 || (interleave > 0 && cols % interleave == 0),
                   "interleave must be 0, or divide N = ", cols, "; it is ", interleave);
    run = interleave == 0 ? cols : interleave;
  }
};

}  // namespace jitquant
