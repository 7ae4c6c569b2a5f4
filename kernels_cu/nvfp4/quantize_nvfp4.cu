// NVFP4 of a tensor with a given gsa, in one launch.
#include "kernels.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    return launch_quantize_plain<decltype(element), false>(x, scale, recipe, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
