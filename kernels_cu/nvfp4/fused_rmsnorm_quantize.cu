// RMSNorm and NVFP4. A residual, if any, is added in place first. One launch with a gsa per row or
// a given gsa, two with the tensor's own gsa.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
namespace {

// The only launch, or the first of two (scale.mode == kTensorAmax), which sets the number of
// `partials`.
cudaError_t launch_first(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                         float eps, float* inv_rms, const RowScale& scale, Nvfp4Recipe recipe,
                         const Nvfp4Output& out, cudaStream_t stream, int* partials = nullptr) {
  return with_residual(x, residual, [&](const auto& source) {
    using T = typename std::decay_t<decltype(source)>::Element;
    return launch_rows<true>(source, Normalize<T>{weight, eps, inv_rms}, scale, recipe, out, stream,
                             partials);
  });
}

// The second of two launches. x is the input of the norm, which is the residual if there is one.
cudaError_t launch_second(const Matrix& x, const ColumnVector& weight, float* inv_rms,
                          const GlobalScale& scale, Nvfp4Recipe recipe, const Nvfp4Output& out,
                          cudaStream_t stream) {
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

int64_t partials_of(const Matrix& x, const Matrix* residual, const ColumnVector& weight) {
  int64_t grid = 0;
  with_residual(x, residual, [&](const auto& source) {
    grid = row_partials(source, weight);
    return cudaSuccess;
  });
  return grid;
}

}  // namespace

int64_t rmsnorm_quantize_nvfp4_partials(const Matrix& x, const Matrix* residual,
                                        const ColumnVector& weight, const ComputedScale& scale) {
  return needs_two(scale, x.rows) ? partials_of(x, residual, weight) : 0;
}

cudaError_t launch_rmsnorm_quantize_nvfp4(const Matrix& x, const Matrix* residual,
                                          const ColumnVector& weight, float eps, float* inv_rms,
                                          const ComputedScale& scale, float* partials,
                                          Nvfp4Recipe recipe, const Nvfp4Output& out,
                                          cudaStream_t stream) {
  int count = 0;
  const cudaError_t error =
      launch_first(x, residual, weight, eps, inv_rms, first_scale(scale, x.rows, partials), recipe,
                   out, stream, &count);
  if (error != cudaSuccess || !needs_two(scale, x.rows)) return error;
  return launch_second(residual != nullptr ? *residual : x, weight, inv_rms,
                       partials_scale(partials, count, scale.divisor, scale.gsa), recipe, out,
                       stream);
}

cudaError_t launch_rmsnorm_quantize_nvfp4_from_gsa(const Matrix& x, const Matrix* residual,
                                                   const ColumnVector& weight, float eps,
                                                   float* inv_rms, const GlobalScale& scale,
                                                   Nvfp4Recipe recipe, const Nvfp4Output& out,
                                                   cudaStream_t stream) {
  return launch_first(x, residual, weight, eps, inv_rms, given_scale(scale), recipe, out, stream);
}

cudaError_t launch_rmsnorm_amax(const Matrix& x, const Matrix* residual, const ColumnVector& weight,
                                float eps, float* inv_rms, float* amax, cudaStream_t stream) {
  return launch_first(x, residual, weight, eps, inv_rms, all_maxima(amax), Nvfp4Recipe::kTe, {},
                      stream);
}

cudaError_t launch_rmsnorm_quantize_nvfp4_from_amax(const Matrix& x, const ColumnVector& weight,
                                                    const float* inv_rms, const GlobalScale& scale,
                                                    Nvfp4Recipe recipe, const Nvfp4Output& out,
                                                    cudaStream_t stream) {
  return launch_second(x, weight, const_cast<float*>(inv_rms), scale, recipe, out, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
