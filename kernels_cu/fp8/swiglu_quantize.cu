// silu(gate) * up of a fused gate-and-up projection, as FP8 with a scale per row or a given scale.
// One launch; two if the amax of a tensor is requested that no cluster holds.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_swiglu_quantize_fp8(const GateAndUp& in, const Fp8Scale& scale,
                                       const ElementRows& out, cudaStream_t stream) {
  return deinterleaved(in, true,
                       [&](const auto& source) { return launch_fp8(source, scale, out, stream); });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
