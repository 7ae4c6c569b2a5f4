#include "common.h"

namespace jitquant {

int amax_gsa_blocks(const Matrix& x);
cudaError_t launch_amax_gsa(const Matrix& x, float divisor, float* partials, int blocks, float* gsa,
                            cudaStream_t stream);

namespace {

void compute_amax_gsa_out(const Tensor& x, double divisor, const Tensor& gsa) {
  const Matrix m = matrix_of(x, "x");
  const float d = divisor_of(divisor);
  float* out = float_out(gsa, "gsa", 1, x);
  const DeviceGuard guard(x.get_device_index());
  const int blocks = amax_gsa_blocks(m);
  const Tensor partials = empty_floats(blocks, x);
  check_launch(launch_amax_gsa(m, d, floats(partials), blocks, out, current_stream(x)),
               "compute_amax_gsa");
}

Tensor compute_amax_gsa(const Tensor& x, double divisor) {
  check_cuda(x, "x");
  Tensor gsa = empty_floats(1, x);
  compute_amax_gsa_out(x, divisor, gsa);
  return gsa;
}

}  // namespace
}  // namespace jitquant

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def("compute_amax_gsa(Tensor x, float divisor=2688.) -> Tensor");
  m.def("compute_amax_gsa.out(Tensor x, float divisor=2688., *, Tensor(a!) gsa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) {
  m.impl("compute_amax_gsa", TORCH_BOX(&jitquant::compute_amax_gsa));
  m.impl("compute_amax_gsa.out", TORCH_BOX(&jitquant::compute_amax_gsa_out));
}
