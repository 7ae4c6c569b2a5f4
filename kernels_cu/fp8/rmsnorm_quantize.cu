// RMSNorm and FP8 with a scale per row or a given scale, in one launch; in two if the amax of more
// than one row is requested. A residual, if any, is added in place first.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_rmsnorm_quantize_fp8(const Matrix& x, const Matrix* residual,
                                        const ColumnVector& weight, float eps, float* inv_rms,
                                        const Fp8Scale& scale, const ElementRows& out,
                                        cudaStream_t stream) {
  return normalized(x, residual, weight, eps, inv_rms, [&](const auto& source, const auto& norm) {
    return launch_fp8_rows<true>(source, norm, scale, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
