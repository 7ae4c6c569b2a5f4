// gsa = amax / divisor of a whole tensor, in one launch.
#include "kernels.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int64_t compute_amax_gsa_partials(const Matrix& x) {
  return amax_partials(tensor_amax_blocks(x.rows, x.cols, 4));
}

cudaError_t launch_compute_amax_gsa(const Matrix& x, float divisor, float* partials, float* gsa,
                                    cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    const int blocks = tensor_amax_blocks(x.rows, x.cols, 4);
    return launch_tensor_amax_plain<decltype(element), false>(x, divisor, partials, blocks, gsa,
                                                              stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
