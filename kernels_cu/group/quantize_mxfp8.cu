// MXFP8: FP8 with one E8M0 scale per 32 neighbors in a row.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_quantize_mxfp8(const Matrix& x, const GroupNumerics& numerics,
                                  const GroupOutput& out, cudaStream_t stream) {
  if (x.rows == 0) return cudaSuccess;
  return dispatch(x.dtype, [&](auto element) {
    return launch_groups<true>(PlainSource<decltype(element)>(x), numerics, out,
                               {nullptr, false, true}, kMxfp8Block, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
