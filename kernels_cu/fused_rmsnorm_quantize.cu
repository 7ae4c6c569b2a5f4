// RMSNorm, with the residual added in place first where there is one, and NVFP4 of the result: one
// launch with a gsa a row or a given gsa, two with one gsa for the tensor.
#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

int rmsnorm_amax_partials(const Matrix& x) {
  return norm_grid(x.rows);
}

// The only launch, or the first of two (scale.mode == kTensorAmax).
cudaError_t launch_rmsnorm_rows(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                                float eps, float* inv_rms, const RowScale& scale, int partials,
                                Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return launch_rows<ResidualSource<T>, true>(ResidualSource<T>(x, residual),
                                                Normalize<T>{weight, eps, inv_rms}, scale, recipe,
                                                out, partials, stream);
  });
}

// The second of two: what was normalized is read again, from the residual where there is one.
cudaError_t launch_rmsnorm_quantize(const Matrix& x, const Matrix* residual,
                                    const ColumnVector& weight, float* inv_rms,
                                    const GlobalScale& scale, Nvfp4Recipe recipe,
                                    const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return launch_quantize(NormalizedSource<ResidualSource<T>>(ResidualSource<T>(x, residual),
                                                               Normalize<T>{weight, 0.0f, inv_rms}),
                           scale, recipe, out, stream);
  });
}

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
