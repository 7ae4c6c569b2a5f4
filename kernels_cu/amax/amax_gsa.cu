// gsa = amax / divisor of a whole tensor, in one launch.
#include "kernels.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int amax_gsa_blocks(const Matrix& x) {
  return tensor_amax_blocks(x.rows, x.cols, 4);
}

cudaError_t launch_amax_gsa(const Matrix& x, float divisor, float* partials, int blocks, float* gsa,
                            cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    return launch_tensor_amax_plain<decltype(element), false>(x, divisor, partials, blocks, gsa,
                                                              stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
