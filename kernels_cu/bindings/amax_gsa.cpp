#include "function.h"

namespace jitquant {

int amax_gsa_blocks(const Matrix& x);
cudaError_t launch_amax_gsa(const Matrix& x, float divisor, float* partials, int blocks, float* gsa,
                            cudaStream_t stream);

namespace {

void compute_amax_gsa(Call& call, const View& x, double divisor, Result& gsa) {
  const Matrix m = matrix_of(x, "x");
  const float d = divisor_of(divisor);
  float* out = gsa.floats("gsa", 1, x);
  const Launching at(call, x);
  const int blocks = amax_gsa_blocks(m);
  const Workspace partials(blocks > 1 ? blocks : 0, x);
  check_launch(launch_amax_gsa(m, d, partials.floats(), blocks, out, at.stream),
               "compute_amax_gsa");
}

}  // namespace
}  // namespace jitquant

JITQUANT_FUNCTIONS(function<&compute_amax_gsa>("compute_amax_gsa", "Tensor x, float divisor=2688.",
                                               {"gsa"}))
