// NVFP4 of a fused gate-and-up projection: the gate run as it is, or silu(gate) * up. The amax is
// that of the values that are quantized.
#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

int deinterleave_amax_partials(const Matrix& fused) {
  return amax_grid(fused.rows, fused.cols / 2);
}

cudaError_t launch_deinterleave_amax_partials(const Matrix& fused, int64_t run, bool activate,
                                              float* partials, int count, cudaStream_t stream) {
  return dispatch(fused.dtype, [&](auto element) {
    return launch_amax(DeinterleaveSource<decltype(element)>(fused, run, activate), partials, count,
                       stream);
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

cudaError_t launch_deinterleave_quantize_nvfp4_rows(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* gsa, Nvfp4Recipe recipe,
                                                    const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(fused.dtype, [&](auto element) {
    return launch_row_amax(DeinterleaveSource<decltype(element)>(fused, run, activate), divisor,
                           gsa, recipe, out, stream);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
