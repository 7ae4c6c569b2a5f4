// Rotary position embedding, a Hadamard transform, or both, then FP8 with a scale per row or a
// given scale. One launch; two if the amax of a tensor is requested that no cluster holds.
#include "../fp8/rows.cuh"
#include "source.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_rotate_quantize_fp8(const Matrix& x, const Rotation& rotation, const Rope& rope,
                                       const Fp8Scale& scale, const ElementRows& out,
                                       cudaStream_t stream) {
  return rotated_rows(x, rotation, rope,
                      [&](const auto& source) { return launch_fp8(source, scale, out, stream); });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
