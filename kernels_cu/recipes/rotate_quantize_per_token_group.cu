// Rotary position embedding, a Hadamard transform, or both, then FP8 or INT8 with one scale per
// group of neighbors in a row. One launch.
#include "../group/rows.cuh"
#include "source.cuh"

namespace jitquant {

#ifndef __CUDACC_RTC__
cudaError_t launch_rotate_quantize_per_token_group(const Matrix& x, const Rotation& rotation,
                                                   const Rope& rope, int64_t group_size,
                                                   const GroupNumerics& numerics,
                                                   const GroupOutput& out, const RowCounts& counts,
                                                   cudaStream_t stream) {
  if (x.rows == 0) return cudaSuccess;
  return rotated_rows(x, rotation, rope, [&](const auto& source) {
    return launch_groups(source, numerics, out, counts, group_size, stream);
  });
}
#endif

}  // namespace jitquant

JITQUANT_EXPORT_RESIDENT()
