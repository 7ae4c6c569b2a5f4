// silu(gate) * up of a fused gate-and-up projection, as FP8 with a scale per row or a given scale.
// One launch.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int64_t swiglu_quantize_fp8_partials(const GateAndUp& in, const Fp8Scale& scale) {
  return fp8_partials(scale, in.fused.rows, in.fused.cols / 2);
}

cudaError_t launch_swiglu_quantize_fp8(const GateAndUp& in, const Fp8Scale& scale, float* partials,
                                       const ElementRows& out, cudaStream_t stream) {
  return deinterleaved(in, true, [&](const auto& source) {
    return launch_fp8(source, scale.with(partials), out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
