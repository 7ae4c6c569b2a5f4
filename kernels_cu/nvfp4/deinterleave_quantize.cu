// NVFP4 of a fused gate-and-up projection: either the gate alone or silu(gate) * up. The amax is
// that of the quantized values.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int deinterleave_amax_partials(const Matrix& fused) {
  return amax_plan(fused.rows, fused.cols / 2).partials;
}

cudaError_t launch_deinterleave_amax_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* partials, float* gsa,
                                                    Nvfp4Recipe recipe, const Nvfp4Output& out,
                                                    cudaStream_t stream) {
  const AmaxPlan plan = amax_plan(fused.rows, fused.cols / 2);
  return deinterleaved(fused, run, activate, [&](const auto& source) {
    if (plan.cluster > 0) {
      return launch_cluster(source, plan.cluster, divisor, gsa, recipe, out, stream);
    }
    const cudaError_t error = launch_amax(source, partials, plan.partials, stream);
    if (error != cudaSuccess) return error;
    return launch_quantize(source, partials_scale(partials, plan.partials, divisor, gsa), recipe,
                           out, stream);
  });
}

cudaError_t launch_deinterleave_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                               const GlobalScale& scale, Nvfp4Recipe recipe,
                                               const Nvfp4Output& out, cudaStream_t stream) {
  return deinterleaved(fused, run, activate, [&](const auto& source) {
    return launch_quantize(source, scale, recipe, out, stream);
  });
}

cudaError_t launch_deinterleave_quantize_nvfp4_rows(const Matrix& fused, int64_t run, bool activate,
                                                    float divisor, float* gsa, Nvfp4Recipe recipe,
                                                    const Nvfp4Output& out, cudaStream_t stream) {
  return deinterleaved(fused, run, activate, [&](const auto& source) {
    return launch_row_amax(source, divisor, gsa, recipe, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
