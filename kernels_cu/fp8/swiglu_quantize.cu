// silu(gate) * up of a fused gate-and-up projection, as FP8 with a scale per row or a given scale.
// One launch.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
bool swiglu_fp8_partials(const Matrix& fused, const Fp8Scale& scale) {
  return fp8_partials(scale, fused.rows, fused.cols / 2);
}

cudaError_t launch_swiglu_fp8(const Matrix& fused, int64_t run, const Fp8Scale& scale,
                              const ElementRows& out, cudaStream_t stream) {
  return deinterleaved(fused, run, true,
                       [&](const auto& source) { return launch_fp8(source, scale, out, stream); });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
