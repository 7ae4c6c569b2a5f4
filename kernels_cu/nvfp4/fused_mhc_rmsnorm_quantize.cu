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
int mhc_amax_partials(const HyperConnection& mix, const ColumnVector& weight) {
  int64_t grid = 0;
  dispatch(mix.x.dtype, [&](auto element) {
    using T = decltype(element);
    grid = row_partials(source_of<T>(mix), weight);
    return cudaSuccess;
  });
  return static_cast<int>(grid);
}

// The only launch, or the first of two (scale.mode == kTensorAmax).
cudaError_t launch_mhc_rows(const HyperConnection& mix, const ColumnVector& weight, float eps,
                            float* inv_rms, const RowScale& scale, Nvfp4Recipe recipe,
                            const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(mix.x.dtype, [&](auto element) {
    using T = decltype(element);
    return launch_rows<true>(source_of<T>(mix), Normalize<T>{weight, eps, inv_rms}, scale, recipe,
                             out, stream);
  });
}

// The second of two launches.
cudaError_t launch_mhc_quantize(const HyperConnection& mix, const ColumnVector& weight,
                                float* inv_rms, const GlobalScale& scale, Nvfp4Recipe recipe,
                                const Nvfp4Output& out, cudaStream_t stream) {
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
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
