// silu(gate) * up of a fused gate-and-up projection, as FP8 or INT8 with one scale per group of
// neighbors in a row. One launch.
#include "rows.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_swiglu_quantize_per_token_group(const GateAndUp& in, int64_t group_size,
                                                   const GroupNumerics& numerics,
                                                   const GroupOutput& out, const RowCounts& counts,
                                                   cudaStream_t stream) {
  if (in.fused.rows == 0) return cudaSuccess;
  return deinterleaved(in, true, [&](const auto& source) {
    return launch_groups(source, numerics, out, counts, group_size, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
