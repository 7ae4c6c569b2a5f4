// Mixes the streams of a hyper-connection (sum over h of A[h] * X[h]), then RMSNorm and NVFP4. One
// launch with a gsa per row or a given gsa, two with the tensor's own gsa.
#include "rows.cuh"

namespace jitquant {

namespace {

template <class T>
HyperConnectionSource<T> source_of(const HyperConnection& mix) {
  return {
      RowPointer<const T>(mix.x), mix.weights,       mix.x.rows,  mix.x.cols,   mix.stream_stride,
      mix.weight_row_stride,      mix.weight_stride, mix.streams, mix.x.vector, mix.weights_fp32};
}

}  // namespace

#ifndef __CUDACC_RTC__
namespace {

// The only launch, or the first of two (scale.mode == kTensorAmax), which sets the number of
// `partials`.
cudaError_t launch_first(const HyperConnection& mix, const ColumnVector& weight, float eps,
                         float* inv_rms, const RowScale& scale, Nvfp4Recipe recipe,
                         const Nvfp4Output& out, cudaStream_t stream, int* partials = nullptr) {
  return dispatch(mix.x.dtype, [&](auto element) {
    using T = decltype(element);
    return launch_rows<true>(source_of<T>(mix), Normalize<T>{weight, eps, inv_rms}, scale, recipe,
                             out, stream, partials);
  });
}

// The second of two launches.
cudaError_t launch_second(const HyperConnection& mix, const ColumnVector& weight, float* inv_rms,
                          const GlobalScale& scale, Nvfp4Recipe recipe, const Nvfp4Output& out,
                          cudaStream_t stream) {
  return dispatch(mix.x.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (kTakesTensor) {
      return launch_quantize(NormalizedSource<HyperConnectionSource<T>>(
                                 source_of<T>(mix), Normalize<T>{weight, 0.0f, inv_rms}),
                             scale, recipe, out, stream);
    }
    return cudaErrorInvalidValue;
  });
}

int64_t partials_of(const HyperConnection& mix, const ColumnVector& weight) {
  int64_t grid = 0;
  dispatch(mix.x.dtype, [&](auto element) {
    using T = decltype(element);
    grid = row_partials(source_of<T>(mix), weight);
    return cudaSuccess;
  });
  return grid;
}

}  // namespace

int64_t mhc_rmsnorm_quantize_nvfp4_partials(const HyperConnection& mix, const ColumnVector& weight,
                                            const ComputedScale& scale) {
  return needs_two(scale, mix.x.rows) ? partials_of(mix, weight) : 0;
}

cudaError_t launch_mhc_rmsnorm_quantize_nvfp4(const HyperConnection& mix,
                                              const ColumnVector& weight, float eps, float* inv_rms,
                                              const ComputedScale& scale, float* partials,
                                              Nvfp4Recipe recipe, const Nvfp4Output& out,
                                              cudaStream_t stream) {
  const int64_t rows = mix.x.rows;
  int count = 0;
  const cudaError_t error = launch_first(
      mix, weight, eps, inv_rms, first_scale(scale, rows, partials), recipe, out, stream, &count);
  if (error != cudaSuccess || !needs_two(scale, rows)) return error;
  return launch_second(mix, weight, inv_rms,
                       partials_scale(partials, count, scale.divisor, scale.gsa), recipe, out,
                       stream);
}

cudaError_t launch_mhc_rmsnorm_quantize_nvfp4_from_gsa(const HyperConnection& mix,
                                                       const ColumnVector& weight, float eps,
                                                       float* inv_rms, const GlobalScale& scale,
                                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                                       cudaStream_t stream) {
  return launch_first(mix, weight, eps, inv_rms, given_scale(scale), recipe, out, stream);
}

cudaError_t launch_mhc_rmsnorm_amax(const HyperConnection& mix, const ColumnVector& weight,
                                    float eps, float* inv_rms, float* amax, cudaStream_t stream) {
  return launch_first(mix, weight, eps, inv_rms, all_maxima(amax), Nvfp4Recipe::kTe, {}, stream);
}

cudaError_t launch_mhc_rmsnorm_quantize_nvfp4_from_amax(
    const HyperConnection& mix, const ColumnVector& weight, const float* inv_rms,
    const GlobalScale& scale, Nvfp4Recipe recipe, const Nvfp4Output& out, cudaStream_t stream) {
  return launch_second(mix, weight, const_cast<float*>(inv_rms), scale, recipe, out, stream);
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
