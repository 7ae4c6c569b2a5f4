#include "function.h"

namespace jitquant {

int amax_blocks(const Matrix& x, int64_t run);
cudaError_t launch_amax(const Matrix& x, int64_t run, bool activate, bool by_row, bool keep_nan,
                        float* partials, int blocks, float* out, cudaStream_t stream);

namespace {

void amax(Call& call, const View& x, std::string_view granularity, bool keep_nan, int64_t run,
          bool activate, Result& amax) {
  const Matrix m = matrix_of(x, "x");
  JITQUANT_CHECK(run >= 0 && run < (int64_t{1} << 31) && (run == 0 || m.cols % (2 * run) == 0),
                 "run must be 0, or divide half of the ", m.cols, " columns; it is ", run);
  const bool rows = by_row(granularity);
  float* out = amax.floats("amax", rows ? m.rows : 1, x);
  const Launching at(call, x);
  const int blocks = rows ? 1 : amax_blocks(m, run);
  const Workspace partials(blocks > 1 ? blocks : 0, x);
  check_launch(
      launch_amax(m, run, activate, rows, keep_nan, partials.floats(), blocks, out, at.stream),
      "amax");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&amax>("amax",
                                   "Tensor x, *, str granularity='tensor', bool keep_nan=False, "
                                   "int run=0, bool activate=False",
                                   {"amax"}))
