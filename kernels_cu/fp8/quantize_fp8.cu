// FP8 with one scale per tensor or per row. A tensor's computed scale, or its amax beside a given
// scale, takes one launch if a cluster holds the values, otherwise two. Everything else takes one.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
int64_t quantize_fp8_partials(const Matrix& x, const Fp8Scale& scale) {
  return fp8_partials(scale, x.rows, x.cols);
}

cudaError_t launch_quantize_fp8(const Matrix& x, const Fp8Scale& scale, float* partials,
                                const ElementRows& out, cudaStream_t stream) {
  const Fp8Scale own = scale.with(partials);
  return dispatch(x.dtype, [&](auto element) {
    using T = decltype(element);
    if (!needs_amax(own)) return launch_cast_plain<T>(x, own, 0, out, stream);
    // The scale of one row is the tensor's, unless the row is too long for a thread block.
    const bool one = x.rows == 1 && held_in_block<PlainSource<T>>(x.cols);
    if (own.by_row || one) {
      Fp8Scale of_rows = own;
      of_rows.by_row = true;
      return launch_fp8_rows(PlainSource<T>(x), of_rows, out, stream);
    }
    const AmaxPlan plan = amax_plan(x.rows, x.cols);
    if (plan.cluster > 0) {
      return launch_cluster_cast(PlainSource<T>(x), plan.cluster, own, out, stream);
    }
    if (own.kind == Fp8Scale::kAmax) {
      const cudaError_t error = launch_amax_plain<T, true>(x, own.partials, plan.partials, stream);
      if (error != cudaSuccess) return error;
    }
    return launch_cast_plain<T>(x, own, plan.partials, out, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
