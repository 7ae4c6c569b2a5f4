// FP8 and INT8 with one scale per group of neighbors in a row.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_per_token_group(const Matrix& x, int64_t group_size,
                                            const GroupNumerics& numerics, const GroupOutput& out,
                                            const RowCounts& counts, cudaStream_t stream) {
  if (x.rows == 0) return cudaSuccess;
  return dispatch(x.dtype, [&](auto element) {
    return launch_groups(PlainSource<decltype(element)>(x), numerics, out, counts, group_size,
                         stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
