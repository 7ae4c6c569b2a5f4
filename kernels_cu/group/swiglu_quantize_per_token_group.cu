// silu(gate) * up of a fused gate-and-up projection, as FP8 or INT8 with one scale per group of
// neighbors in a row. One launch.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_swiglu_per_token_group(const Matrix& fused, int64_t run, int64_t group_size,
                                          const GroupNumerics& numerics, const GroupOutput& out,
                                          const RowCounts& counts, cudaStream_t stream) {
  if (fused.rows == 0) return cudaSuccess;
  return deinterleaved(fused, run, true, [&](const auto& source) {
    return launch_groups(source, numerics, out, counts, group_size, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
