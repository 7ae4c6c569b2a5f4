// NVFP4 of a fused gate-and-up projection: either the gate alone or silu(gate) * up. The amax is
// that of the quantized values.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_deinterleave_quantize_nvfp4(const GateAndUp& in, bool activate,
                                               const GlobalScale& scale, Nvfp4Recipe recipe,
                                               const Nvfp4Output& out, cudaStream_t stream) {
  return deinterleaved(in, activate, [&](const auto& source) {
    return launch_quantize(source, scale, recipe, out, stream);
  });
}

int64_t deinterleave_amax_quantize_nvfp4_partials(const GateAndUp& in, const ComputedScale& scale) {
  return scale.given || scale.by_row ? 0 : amax_plan(in.fused.rows, in.fused.cols / 2).partials;
}

cudaError_t launch_deinterleave_amax_quantize_nvfp4(const GateAndUp& in, bool activate,
                                                    const ComputedScale& scale, float* partials,
                                                    Nvfp4Recipe recipe, const Nvfp4Output& out,
                                                    cudaStream_t stream) {
  if (scale.given) {
    return launch_deinterleave_quantize_nvfp4(in, activate, value_scale(scale), recipe, out,
                                              stream);
  }
  return deinterleaved(in, activate, [&](const auto& source) {
    if (scale.by_row) return launch_row_amax(source, scale.divisor, scale.gsa, recipe, out, stream);
    const AmaxPlan plan = amax_plan(source.rows, source.cols);
    if (plan.cluster > 0) {
      return launch_cluster(source, plan.cluster, scale.divisor, scale.gsa, recipe, out, stream);
    }
    const cudaError_t error = launch_amax(source, partials, plan.partials, stream);
    if (error != cudaSuccess) return error;
    return launch_quantize(source,
                           partials_scale(partials, plan.partials, scale.divisor, scale.gsa),
                           recipe, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
