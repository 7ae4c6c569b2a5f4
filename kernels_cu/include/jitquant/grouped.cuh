// Many tensors in one flat buffer. Each warp has a range of the buffer, whatever the groups are: it
// finds the group that its range begins in by one search, and then walks with the data.
#pragma once

#include "jitquant/fp8.cuh"
#include "jitquant/nvfp4_kernels.cuh"

namespace jitquant {

constexpr int kStep = 512;  // elements that a warp takes at once

struct Groups {
  const int64_t* offsets;
  const int64_t* sizes;  // may be null
  int64_t count, numel;

  __device__ __forceinline__ GroupBounds bounds(int64_t i) const {
    return group_bounds(offsets, sizes, i, numel);
  }
};

// The last group that begins at or before `position`; -1 before the first, and `count` behind the
// last offset. All lanes of a warp together, each with a part of what is left to be searched.
__device__ __forceinline__ int64_t group_at(const Groups& groups, int64_t position) {
  int64_t low = 0, high = groups.count + 1;  // the first offset behind the position is in between
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  while (low < high) {
    const int64_t step = (high - low + 31) >> 5, i = low + lane * step;
    const bool before = i < high && groups.offsets[i] <= position;
    const int count = __popc(__ballot_sync(0xffffffffu, before));
    if (count == 0) break;
    const int64_t first = low;
    low = first + (count - 1) * step + 1;
    if (first + count * step < high) high = first + count * step;
  }
  return low - 1;
}

// Which of sixteen elements from `position` on are those of a group.
struct Part {
  int first, behind;

  __device__ __forceinline__ Part(const GroupBounds& at, int64_t position)
      : first(within(at.start - position)), behind(within(at.stop - position)) {}
  __device__ __forceinline__ bool has(int i) const { return i >= first && i < behind; }
  __device__ __forceinline__ bool empty() const { return first >= behind; }

 private:
  static __device__ __forceinline__ int within(int64_t i) {
    return i < 0 ? 0 : (i < 16 ? static_cast<int>(i) : 16);
  }
};

// Elements of each warp's range: whole steps.
inline int64_t range_of_warp(int64_t numel, int64_t warps) {
  const int64_t steps = (numel + kStep - 1) / kStep;
  return (steps + warps - 1) / warps * kStep;
}

}  // namespace jitquant
