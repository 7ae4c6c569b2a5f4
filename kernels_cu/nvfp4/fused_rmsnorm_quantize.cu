// RMSNorm and NVFP4. A residual, if any, is added in place first. One launch with a gsa per row or
// a given gsa, two with the tensor's own gsa.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int rmsnorm_amax_partials(const Matrix& x, const Matrix* residual, const ColumnVector& weight) {
  int64_t grid = 0;
  with_residual(x, residual, [&](const auto& source) {
    grid = row_partials(source, weight);
    return cudaSuccess;
  });
  return static_cast<int>(grid);
}

// The only launch, or the first of two (scale.mode == kTensorAmax).
cudaError_t launch_rmsnorm_rows(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                                float eps, float* inv_rms, const RowScale& scale,
                                Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream) {
  return with_residual(x, residual, [&](const auto& source) {
    using T = typename std::decay_t<decltype(source)>::Element;
    return launch_rows<true>(source, Normalize<T>{weight, eps, inv_rms}, scale, recipe, out,
                             stream);
  });
}

// The second of two launches. x is the input of the norm, which is the residual if there is one.
cudaError_t launch_rmsnorm_quantize(const Matrix& x, const ColumnVector& weight, float* inv_rms,
                                    const GlobalScale& scale, Nvfp4Recipe recipe,
                                    const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (kTakesTensor) {
      return launch_quantize(
          NormalizedSource<PlainSource<T>>(PlainSource<T>(x), Normalize<T>{weight, 0.0f, inv_rms}),
          scale, recipe, out, stream);
    }
    return cudaErrorInvalidValue;
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
