// Rotary position embedding, a Hadamard transform, or both, then FP8 with a scale per row or a
// given scale. One launch.
#include "../fp8/rows.cuh"
#include "source.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int64_t rotate_quantize_fp8_partials(const Matrix& x, const Fp8Scale& scale) {
  return fp8_partials(scale, x.rows, x.cols);
}

cudaError_t launch_rotate_quantize_fp8(const Matrix& x, const Rotation& rotation, const Rope& rope,
                                       const Fp8Scale& scale, float* partials,
                                       const ElementRows& out, cudaStream_t stream) {
  return rotated_rows(x, rotation, rope, [&](const auto& source) {
    return launch_fp8(source, scale.with(partials), out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
