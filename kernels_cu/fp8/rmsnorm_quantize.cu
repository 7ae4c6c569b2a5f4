// RMSNorm, with the residual added in place first where there is one, and FP8 of the result with a
// scale for each row or a given one. One launch.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_rmsnorm_fp8(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                               float eps, float* inv_rms, const Fp8Scale& scale,
                               const ElementRows& out, cudaStream_t stream) {
  return normalized(x, residual, weight, eps, inv_rms, [&](const auto& source, const auto& norm) {
    return launch_fp8_rows<true>(source, norm, scale, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
