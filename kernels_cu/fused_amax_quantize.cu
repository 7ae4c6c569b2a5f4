// NVFP4 of a tensor with its own gsa: amax, then quantize, in two launches; a row at a time in one.
// And the second halves by themselves, for a gsa that is on the device already.
#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

int amax_partials(const Matrix& x) {
  return amax_grid(x.rows, x.cols);
}

cudaError_t launch_amax_partials(const Matrix& x, float* partials, int count, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    return launch_amax(PlainSource<decltype(element)>(flattened(x)), partials, count, stream);
  });
}

cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    return launch_quantize_plain<decltype(element)>(x, scale, recipe, out, stream);
  });
}

cudaError_t launch_quantize_nvfp4_rows(const Matrix& x, float divisor, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    return launch_row_amax(PlainSource<decltype(element)>(x), divisor, gsa, recipe, out, stream);
  });
}

cudaError_t launch_deinterleave_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                               const GlobalScale& scale, Nvfp4Recipe recipe,
                                               const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(fused.dtype, [&](auto element) {
    return launch_quantize(DeinterleaveSource<decltype(element)>(fused, run, activate), scale,
                           recipe, out, stream);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
