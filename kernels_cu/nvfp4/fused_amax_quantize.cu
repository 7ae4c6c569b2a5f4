// NVFP4 of a tensor with its own gsa. One launch if a cluster holds the tensor, otherwise two:
// amax, then quantize. With a gsa per row: one launch. The second launch is also available alone,
// for a gsa that already is on the device.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_nvfp4(const Matrix& x, const GlobalScale& scale, Nvfp4Recipe recipe,
                                  const Nvfp4Output& out, cudaStream_t stream) {
  return dispatch(x.dtype, [&](auto element) {
    if constexpr (kTakesTensor) {
      return launch_quantize_plain<decltype(element), false>(x, scale, recipe, out, stream);
    }
    return cudaErrorInvalidValue;
  });
}

int64_t amax_quantize_nvfp4_partials(const Matrix& x, const ComputedScale& scale) {
  return scale.given || scale.by_row ? 0 : amax_plan(x.rows, x.cols).partials;
}

cudaError_t launch_amax_quantize_nvfp4(const Matrix& x, const ComputedScale& scale, float* partials,
                                       Nvfp4Recipe recipe, const Nvfp4Output& out,
                                       cudaStream_t stream) {
  if (scale.given) return launch_quantize_nvfp4(x, value_scale(scale), recipe, out, stream);
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    const PlainSource<T> source(x);
    if (scale.by_row) {
      if constexpr (kTakesRows) {
        return launch_row_amax(source, scale.divisor, scale.gsa, recipe, out, stream);
      }
    } else if constexpr (kTakesTensor) {
      const AmaxPlan plan = amax_plan(x.rows, x.cols);
      if (plan.cluster > 0) {
        return launch_cluster(source, plan.cluster, scale.divisor, scale.gsa, recipe, out, stream);
      }
      const cudaError_t error = launch_amax_plain<T>(x, partials, plan.partials, stream);
      if (error != cudaSuccess) return error;
      return launch_quantize_plain<T, true>(
          x, partials_scale(partials, plan.partials, scale.divisor, scale.gsa), recipe, out,
          stream);
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t launch_deinterleave_quantize(const GateAndUp& in, bool activate,
                                         const GlobalScale& scale, Nvfp4Recipe recipe,
                                         const Nvfp4Output& out, cudaStream_t stream) {
#ifdef JITQUANT_DTYPE
  return cudaErrorInvalidValue;  // ops use deinterleave_quantize.cu for this
#else
  return deinterleaved(in, activate, [&](const auto& source) {
    return launch_quantize(source, scale, recipe, out, stream);
  });
#endif
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
