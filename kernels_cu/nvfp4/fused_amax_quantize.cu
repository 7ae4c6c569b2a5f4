// NVFP4 of a tensor with its own gsa. One launch if a cluster holds the tensor, otherwise two:
// amax, then quantize. With a gsa per row: one launch. The second launch is also available alone,
// for a gsa that already is on the device.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int amax_partials(const Matrix& x) {
  return amax_plan(x.rows, x.cols).partials;
}

cudaError_t launch_amax_quantize_nvfp4(const Matrix& x, float divisor, float* partials, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream) {
  const AmaxPlan plan = amax_plan(x.rows, x.cols);
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (kTakesTensor) {
      if (plan.cluster > 0) {
        return launch_cluster(PlainSource<T>(x), plan.cluster, divisor, gsa, recipe, out, stream);
      }
      const cudaError_t error = launch_amax_plain<T>(x, partials, plan.partials, stream);
      if (error != cudaSuccess) return error;
      const GlobalScale scale = partials_scale(partials, plan.partials, divisor, gsa);
      return launch_quantize_plain<T, true>(x, scale, recipe, out, stream);
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    if constexpr (kTakesTensor) {
      return launch_quantize_plain<decltype(element), false>(x, scale, recipe, out, stream);
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t launch_quantize_nvfp4_rows(const Matrix& x, float divisor, float* gsa,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    if constexpr (kTakesRows) {
      return launch_row_amax(PlainSource<decltype(element)>(x), divisor, gsa, recipe, out, stream);
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t launch_deinterleave_quantize_nvfp4(const Matrix& fused, int64_t run, bool activate,
                                               const GlobalScale& scale, Nvfp4Recipe recipe,
                                               const Nvfp4Output& out, cudaStream_t stream) {
#ifdef JITQUANT_DTYPE
  return cudaErrorInvalidValue;  // ops use deinterleave_quantize.cu for this
#else
  return deinterleaved(fused, run, activate, [&](const auto& source) {
    return launch_quantize(source, scale, recipe, out, stream);
  });
#endif
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
