// RMSNorm and NVFP4. A residual, if any, is added in place first. One launch with a gsa per row or
// a given gsa, two with the tensor's own gsa.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int rmsnorm_amax_partials(const Matrix& x, const Matrix* residual, const ColumnVector& weight) {
  int64_t grid = 0;
  dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    grid = residual != nullptr ? row_partials(ResidualSource<T>(x, *residual), weight)
                               : row_partials(PlainSource<T>(x), weight);
    return cudaSuccess;
  });
  return static_cast<int>(grid);
}

// The only launch, or the first of two (scale.mode == kTensorAmax).
cudaError_t launch_rmsnorm_rows(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                                float eps, float* inv_rms, const RowScale& scale,
                                Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    const Normalize<T> norm = {weight, eps, inv_rms};
    if (residual != nullptr) {
      return launch_rows<true>(ResidualSource<T>(x, *residual), norm, scale, recipe, out, stream);
    }
    return launch_rows<true>(PlainSource<T>(x), norm, scale, recipe, out, stream);
  });
}

// The second of two launches. x is the input of the norm, which is the residual if there is one.
cudaError_t launch_rmsnorm_quantize(const Matrix& x, const ColumnVector& weight, float* inv_rms,
                                    const GlobalScale& scale, Nvfp4Recipe recipe,
                                    const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    return launch_quantize(
        NormalizedSource<PlainSource<T>>(PlainSource<T>(x), Normalize<T>{weight, 0.0f, inv_rms}),
        scale, recipe, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
